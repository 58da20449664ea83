"""Text backbones: token ids, masks and pooling, folders of weights, recomputation."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fcco_experiments import backbones
from fcco_experiments.backbones import registry
from fcco_experiments.backbones.text import TEXTS, TextBackbone
from fcco_experiments.data.grouped import Vectors
from torch import Tensor, nn
from torch.nn import functional as F

import fcco

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "phone", "shirt", "##s", "very")
CONFIG = {
    "model_type": "distilbert",
    "vocab_size": len(WORDS),
    "dim": 16,
    "hidden_dim": 24,
    "n_heads": 4,
    "n_layers": 2,
    "max_position_embeddings": 12,
}


def tokenizer_json(words=WORDS) -> str:
    vocabulary = {word: number for number, word in enumerate(words)}
    built = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    built.normalizer = tokenizers.normalizers.BertNormalizer()
    built.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(word, vocabulary[word]) for word in ("[CLS]", "[SEP]")],
    )
    built.add_special_tokens(["[PAD]"])
    built.enable_padding(length=40)  # files come with such settings
    return built.to_str()


def weights_of(config: dict) -> dict[str, Tensor]:
    torch.manual_seed(4)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config))
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A Hugging Face folder as a masked language model leaves it."""
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    state = {f"distilbert.{key}": value for key, value in weights_of(CONFIG).items()}
    state["vocab_projector.bias"] = torch.zeros(len(WORDS))
    state["distilbert.embeddings.position_ids"] = torch.arange(12)[None]
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path


def tiny(folder: Path, **options) -> TextBackbone:
    options = {"pretrained": True, "weights": str(folder), "tokens": 12, **options}
    built = backbones.build("distilbert", **options)
    assert isinstance(built, TextBackbone)
    return built


IDS = torch.tensor([[2, 4, 6, 3, 0, 0, 0], [2, 9, 5, 7, 8, 3, 0], [2, 3, 0, 0, 0, 0, 0]])


# Tokens.


def test_texts_become_padded_token_ids(folder):
    texts: Any = ["good phone", "Very bad shirts!", "", "[PAD] good", "good " * 30]
    found = backbones.encode("distilbert", texts, tokens=7, weights=str(folder))
    assert isinstance(found, Vectors) and found.values.dtype == torch.int32
    assert found.values.tolist() == [
        [2, 4, 6, 3, 0, 0, 0],
        [2, 9, 5, 7, 8, 1, 3],
        [2, 3, 0, 0, 0, 0, 0],
        [2, 0, 4, 3, 0, 0, 0],
        [2, 4, 4, 4, 4, 4, 3],
    ]


def test_texts_tokenizers_and_ids_that_do_not_fit_are_refused(folder):
    def encode(texts: Any, tokens: int = 4) -> None:
        backbones.encode("distilbert", texts, tokens=tokens, weights=str(folder))

    with pytest.raises(TypeError, match="row 1 is: Tensor"):
        encode(["a", torch.zeros(1)])
    with pytest.raises(ValueError, match=r"tokens=...\)` must be at least 3"):
        encode(["a"], tokens=2)
    with pytest.raises(ValueError, match="must be from 1 to 12, the positions"):
        tiny(folder, tokens=13)
    with pytest.raises(ValueError, match="takes whole token ids"):
        tiny(folder)(IDS.float())
    (folder / "tokenizer.json").write_text(tokenizer_json(("[UNK]", *WORDS[2:], "[PAD]")))
    with pytest.raises(backbones.WeightsError, match=r"\[PAD\] with the id 0"):
        encode(["a"])


@pytest.mark.parametrize(
    "name, width, count", [("minilm", 384, 22_565_376), ("distilbert", 768, 66_362_880)]
)
def test_sizes_of_the_published_networks(name, width, count):
    with torch.device("meta"):
        built = backbones.build(name, pretrained=False, tokens=512)
    assert isinstance(built, TextBackbone) and built.width == width
    assert sum(parameter.numel() for parameter in built.parameters()) == count


# What comes out.


def literal_distilbert(state: dict[str, Tensor], row: list[int]) -> Tensor:
    """All states of one text without padding, head by head."""

    def linear(name, values):
        return values @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name, values):
        middle = values - values.mean(-1, keepdim=True)
        scaled = middle / torch.sqrt(middle.square().mean(-1, keepdim=True) + 1e-12)
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    values = state["embeddings.word_embeddings.weight"][row]
    values = values + state["embeddings.position_embeddings.weight"][: len(row)]
    values = norm("embeddings.LayerNorm", values)
    for layer in range(2):
        name = f"transformer.layer.{layer}"
        q, k, v = (linear(f"{name}.attention.{part}_lin", values) for part in "qkv")
        heads = []
        for head in range(4):
            own = slice(4 * head, 4 * head + 4)
            scores = q[:, own] @ k[:, own].T / math.sqrt(4)
            heads.append(scores.softmax(1) @ v[:, own])
        inner = linear(f"{name}.attention.out_lin", torch.cat(heads, 1))
        values = norm(f"{name}.sa_layer_norm", inner + values)
        inner = linear(f"{name}.ffn.lin1", values)
        inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
        values = norm(f"{name}.output_layer_norm", linear(f"{name}.ffn.lin2", inner) + values)
    return values


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_each_text_has_its_own_vector_whatever_the_padding(folder, pooling):
    built, state = tiny(folder), weights_of(CONFIG)
    built.pooling = pooling
    rows = [[number for number in row if number] for row in IDS.tolist()]
    states = [literal_distilbert(state, row) for row in rows]
    expected = torch.stack([s[0] if pooling == "first" else s.mean(0) for s in states])
    with torch.no_grad():
        for ids in (IDS, IDS.int(), F.pad(IDS, (0, 5)), IDS[:, :6]):
            found = built(ids)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(built(IDS[2:]), expected[2:], rtol=1e-4, atol=1e-5)
        nothing = built(torch.zeros_like(IDS))  # rows of padding alone
        with torch.autocast("cpu", torch.bfloat16):
            low = built(IDS)
    assert nothing.isfinite().all()
    assert found.dtype == low.dtype == torch.float32 and not torch.equal(low, expected)


@pytest.mark.parametrize("name", ["minilm", "distilbert"])
def test_every_parameter_takes_part_and_nothing_is_random(name, monkeypatch):
    spec = TEXTS[name]
    small = spec.config()
    small.num_hidden_layers = 1
    monkeypatch.setitem(registry.BUILT_IN, name, replace(spec, config=lambda: small))
    built = backbones.build(name, pretrained=False).train()
    first = built(IDS)
    assert torch.equal(first, built(IDS))
    first.square().sum().backward()
    assert [key for key, p in built.named_parameters() if p.grad is None] == []
    loose = backbones.build(name, pretrained=False, dropout=0.3).train()
    assert not torch.equal(loose(IDS), loose(IDS))
    rates = {m.p for m in loose.modules() if isinstance(m, nn.Dropout)}
    assert rates == {0.3}


# Recomputation.


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_recomputation_changes_no_gradient(folder, dropout):
    found, calls = {}, {}
    for recompute in (False, True):
        built = tiny(folder, recompute=recompute, dropout=dropout).train()
        counted: list[int] = []
        layer = built.network.transformer.layer[0].ffn
        handle = layer.register_forward_hook(lambda *_, c=counted: c.append(1))
        torch.manual_seed(7)
        built(IDS).square().sum().backward()
        handle.remove()
        found[recompute] = [p.grad for p in built.parameters()]
        calls[recompute] = len(counted)
    assert calls == {False: 1, True: 2}
    for plain, again in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-6, atol=1e-6)


def test_recomputation_under_msvr(folder):
    group = torch.tensor([0, 1, 2])

    def end(recompute: bool) -> list[Tensor]:
        body = tiny(folder, recompute=recompute)
        torch.manual_seed(3)
        model = nn.Sequential(body, nn.Linear(16, 2)).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        dro = fcco.CVaRGroupDRO(
            model, optimizer, num_groups=3, ratio=0.5, smoothing=0.1, gamma=0.5, correction="theory"
        )
        for step in range(3):
            label = torch.tensor([0, 1, step % 2])
            loss = dro(lambda y=label: F.cross_entropy(model(IDS), y, reduction="none"), group)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*model.state_dict().values(), dro.group_losses()]

    for plain, again in zip(end(False), end(True), strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-6)


# Folders of weights.


def test_old_names_of_bert(tmp_path):
    from safetensors.torch import save_file

    config = {
        "model_type": "bert",
        "vocab_size": 10,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "max_position_embeddings": 12,
    }
    state = weights_of(config)
    assert any(key.startswith("pooler.") for key in state)
    old = {
        f"bert.{key}".replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
        for key, value in state.items()
    }
    old["cls.predictions.bias"] = torch.zeros(10)
    save_file(old, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    built = backbones.build("minilm", pretrained=True, weights=str(tmp_path), tokens=12)
    own = built.network.state_dict()  # type: ignore[union-attr]
    assert own and all(torch.equal(value, state[key]) for key, value in own.items())


def test_folders_that_lack_something(folder, tmp_path_factory, monkeypatch):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(
        backbones.WeightsError, match=r"no config.json and no model.safetensors; `wei"
    ):
        tiny(empty)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(empty))
    with pytest.raises(
        backbones.WeightsError, match=r"no pretrained weights here.*save_pretrained"
    ):
        backbones.build("distilbert", pretrained=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "n_layers": 3}))
    with pytest.raises(
        backbones.WeightsError, match=r"lacks transformer.layer.2.attention.*13 more"
    ):
        tiny(folder)


def test_what_hugging_face_has_in_its_cache_is_used(folder, tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("hub")
    home = cache / "models--distilbert-base-uncased"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123")
    (home / "snapshots").mkdir()
    folder.rename(home / "snapshots" / "0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    built = backbones.build("distilbert", pretrained=True, tokens=12)
    assert isinstance(built, TextBackbone)
    word = built.network.embeddings.word_embeddings.weight
    assert torch.equal(word, weights_of(CONFIG)["embeddings.word_embeddings.weight"])


def test_the_checksum_covers_the_whole_folder(folder):
    found = [backbones.checksum("distilbert", pretrained=True, weights=str(folder))]
    for part in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / part).write_bytes((folder / part).read_bytes() + b" ")
        found.append(backbones.checksum("distilbert", pretrained=True, weights=str(folder)))
    assert len(set(found)) == 4


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'fcco-experiments\[text\]'"):
        backbones.build("minilm", pretrained=False)
