"""Backbones on `transformers`, against its own models, from small folders."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fcco_experiments import backbones
from fcco_experiments.data.grouped import Vectors
from torch import Tensor, nn
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "phone", "shirt", "##s", "very")
BERT: dict[str, Any] = {
    "model_type": "distilbert", "vocab_size": len(WORDS), "dim": 16, "hidden_dim": 24, "n_heads": 4,
    "n_layers": 2, "max_position_embeddings": 12, "torch_dtype": "float16",
}  # fmt: skip
IDS = torch.tensor([[2, 4, 6, 3, 0, 0, 0], [2, 9, 5, 7, 8, 3, 0], [2, 3, 0, 0, 0, 0, 0]])

# "!" has the id 0, as in CLIP's own vocabulary, and the end of a text the largest.
START, END = "<|startoftext|>", "<|endoftext|>"
PIECES = ("!", "a", "b", "c", "!</w>", "a</w>", "b</w>", "c</w>", "ab</w>", START, END)
EDGE, POSITIONS, SHARED, SCALE = 16, 9, 6, 1.7
COMMON = {"num_hidden_layers": 2, "num_attention_heads": 2}
CLIP: dict[str, Any] = {
    "projection_dim": SHARED,
    "vision_config": {
        "hidden_size": 12, "intermediate_size": 20, "image_size": EDGE, "patch_size": 8, **COMMON
    },
    "text_config": {
        "vocab_size": len(PIECES), "hidden_size": 8, "intermediate_size": 14, **COMMON,
        "max_position_embeddings": POSITIONS, "bos_token_id": 9, "eos_token_id": 10,
    },
}  # fmt: skip
CLIP_TEXTS: Any = ["ab c", "", "!!a B", "c " * 20]
CLIP_IDS = torch.tensor(
    [
        [9, 8, 7, 10, 0, 0, 0],
        [9, 10, 0, 0, 0, 0, 0],
        [9, 0, 4, 5, 6, 10, 0],
        [9, 7, 7, 7, 7, 7, 10],
    ]
)
SHAPE: dict[str, Any] = {"size": (EDGE, EDGE), "tokens": POSITIONS}


def save(folder: Path, config: dict[str, Any], state: dict[str, Tensor], tokenizer: Any) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.enable_padding(length=40)  # files come with such settings
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    return folder


def with_ends(built: Any, vocabulary: dict[str, int], start: str, end: str) -> Any:
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{start} $A {end}",
        special_tokens=[(word, vocabulary[word]) for word in (start, end)],
    )
    return built


def bert_state() -> dict[str, Tensor]:
    torch.manual_seed(4)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**BERT)).float()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.fixture
def bert(tmp_path) -> Path:
    """A Hugging Face folder as a masked language model leaves it."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    built = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    built.normalizer = tokenizers.normalizers.BertNormalizer()
    built.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    state = {f"distilbert.{key}": value for key, value in bert_state().items()}
    state["vocab_projector.bias"] = torch.zeros(len(WORDS))
    return save(tmp_path / "bert", BERT, state, with_ends(built, vocabulary, "[CLS]", "[SEP]"))


def clip_model() -> Any:
    torch.manual_seed(5)
    model = transformers.CLIPModel(transformers.CLIPConfig(**CLIP)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    nn.init.constant_(model.logit_scale, SCALE)
    return model


@pytest.fixture
def clip(tmp_path) -> Path:
    vocabulary = {word: number for number, word in enumerate(PIECES)}
    built = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [("a", "b</w>")], end_of_word_suffix="</w>")
    )
    built.normalizer = tokenizers.normalizers.Lowercase()
    built.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"[a-z]+|!+"), behavior="removed", invert=True
    )
    model, tokenizer = clip_model(), with_ends(built, vocabulary, START, END)
    return save(tmp_path / "clip", model.config.to_dict(), model.state_dict(), tokenizer)


def images(height: int = EDGE, width: int = EDGE) -> Tensor:
    generator = torch.Generator().manual_seed(height + width)
    return torch.randint(0, 256, (3, 3, height, width), dtype=torch.uint8, generator=generator)


BATCHES = {"clip-image": images(), "clip-text": CLIP_IDS, "distilbert": IDS}


def built_from(folder: Path, name: str, **options: Any) -> Any:
    return backbones.build(name, weights=str(folder), **{**SHAPE, **options})


@pytest.mark.parametrize(
    "name, width, count",
    [
        ("minilm", 384, 22_565_376),
        ("distilbert", 768, 66_362_880),
        ("clip-image", 768, 85_799_424),
        ("clip-text", 512, 63_165_952),
    ],
)
def test_sizes_of_the_published_networks(name, width, count):
    with torch.device("meta"):
        built: Any = backbones.build(name, pretrained=False, tokens=77, size=(224, 224))
    assert built.width == width and built.kind == backbones.kind(name)
    assert sum(parameter.numel() for parameter in built.parameters()) == count


# What comes out.


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_each_text_has_its_own_vector_whatever_the_padding(bert, pooling):
    """The states of each text alone, without padding, by the plain attention of transformers."""
    built = built_from(bert, "distilbert")
    built.pooling = pooling
    config = transformers.AutoConfig.for_model(**BERT)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").float().eval()
    model.load_state_dict(bert_state())
    with torch.no_grad():
        rows = [torch.tensor([[i for i in row if i]]) for row in IDS.tolist()]
        states = [model(row).last_hidden_state[0] for row in rows]
    expected = torch.stack([s[0] if pooling == "first" else s.mean(0) for s in states])
    with torch.no_grad():
        for ids in (IDS, IDS.int(), F.pad(IDS, (0, 5)), IDS[:, :6]):
            torch.testing.assert_close(built(ids), expected, rtol=1e-4, atol=1e-5)
        assert built(torch.zeros_like(IDS)).isfinite().all()  # rows of padding alone
        with torch.autocast("cpu", torch.bfloat16):
            assert built(IDS).dtype == torch.float32


def normalised(batch: Tensor, mean: Any = None, deviation: Any = None) -> Tensor:
    mean = np.array(mean or [0.48145466, 0.4578275, 0.40821073])
    deviation = np.array(deviation or [0.26862954, 0.26130258, 0.27577711])
    scaled = (batch.double().numpy() / 255 - mean[:, None, None]) / deviation[:, None, None]
    return torch.from_numpy(scaled).float()


def test_scores_of_both_halves_are_clips(clip):
    image, text = built_from(clip, "clip-image").train(), built_from(clip, "clip-text").train()
    model, rows = clip_model(), [row[: row.index(10) + 1] for row in CLIP_IDS.tolist()]
    with torch.no_grad():  # each text alone, without padding
        expected = torch.cat(
            [
                model(torch.tensor([row]), pixel_values=normalised(images())).logits_per_image
                for row in rows
            ],
            dim=1,
        )
    seen, read = image(images()), text(CLIP_IDS)
    torch.testing.assert_close(text(F.pad(CLIP_IDS, (0, 2))), read)
    one, two = F.normalize(image.projection()(seen)), F.normalize(text.projection()(read))
    torch.testing.assert_close(one @ two.T * math.exp(SCALE), expected, rtol=1e-5, atol=1e-5)
    assert image.double().projection().weight.dtype == torch.float64


@pytest.mark.parametrize("size", [(40, 56), (63, 33), (9, 12)])
def test_images_are_scaled_and_cut_as_clip_does(clip, size):
    from PIL import Image

    mean, deviation = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    fields = {"image_mean": mean, "image_std": deviation}
    (clip / "preprocessor_config.json").write_text(json.dumps(fields))
    batch = F.avg_pool2d(images(*size).float(), 3, 1, 1).to(torch.uint8)  # no noise, as photos
    batch[0, :, :, : size[1] // 2], batch[0, :, :, size[1] // 2 :] = (
        0,
        255,
    )  # where cubics overshoot
    high, wide = (int(EDGE * side / min(size)) for side in size)
    top, left = (high - EDGE) // 2, (wide - EDGE) // 2
    expected = []
    for picture in batch:
        image = Image.fromarray(picture.permute(1, 2, 0).numpy())
        image = image.resize((wide, high), Image.Resampling.BICUBIC)
        image = image.crop((left, top, left + EDGE, top + EDGE))
        expected.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    built, seen = built_from(clip, "clip-image"), []
    built.network.register_forward_pre_hook(
        lambda _, args, options: seen.append(options["pixel_values"]), with_kwargs=True
    )
    built(batch)
    wanted = normalised(torch.stack(expected), mean, deviation)
    torch.testing.assert_close(seen[0], wanted, rtol=0, atol=1.01 / 255 / 0.5)  # Pillow rounds


@pytest.mark.parametrize("name", BATCHES)
def test_every_parameter_has_a_gradient(name, bert, clip):
    """One without would stop DistributedDataParallel."""
    built = built_from(bert if name == "distilbert" else clip, name).train()
    built(BATCHES[name]).square().sum().backward()
    assert all(parameter.grad is not None for parameter in built.parameters())


# Tokens.


def test_texts_become_padded_token_ids(bert, clip):
    texts: Any = ["good phone", "Very bad shirts!", "", "good " * 30]
    rows = backbones.encode("distilbert", texts, tokens=7, weights=str(bert))
    assert isinstance(rows, Vectors) and rows.values.dtype == torch.int32
    assert rows.values.tolist() == [
        [2, 4, 6, 3, 0, 0, 0],
        [2, 9, 5, 7, 8, 1, 3],
        [2, 3, 0, 0, 0, 0, 0],
        [2, 4, 4, 4, 4, 4, 3],
    ]
    rows = backbones.encode("clip-text", CLIP_TEXTS, tokens=7, weights=str(clip))
    assert isinstance(rows, Vectors) and torch.equal(rows.values, CLIP_IDS.int())
    pictures = Vectors(images())
    assert backbones.encode("clip-image", pictures, tokens=7) is pictures
    text = (bert / "tokenizer.json").read_text()
    (bert / "tokenizer.json").write_text(text.replace("[PAD]", "[GAP]"))
    with pytest.raises(backbones.WeightsError, match=r"\[PAD\] with the id 0"):
        backbones.encode("distilbert", texts, tokens=7, weights=str(bert))


# Folders.


@pytest.mark.parametrize("name", BATCHES)
def test_every_file_of_a_folder_is_in_the_checksum(name, bert, clip):
    with pytest.raises(backbones.WeightsError, match=r"needs `weights`.*`save_pretrained\(folder"):
        backbones.build(name, **SHAPE)
    folder = bert if name == "distilbert" else clip
    state = built_from(folder, name).state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    sums = [backbones.checksum(name, weights=str(folder))]
    for part in ("config.json", "tokenizer.json"):
        (folder / part).write_text((folder / part).read_text() + " ")
        sums.append(backbones.checksum(name, weights=str(folder)))
    assert len(set(sums)) == 3


def test_what_does_not_fit_is_refused(bert, clip, tmp_path, monkeypatch):
    with pytest.raises(backbones.WeightsError, match=r"needs `weights`.*model.safetensors or"):
        built_from(tmp_path, "distilbert")
    with pytest.raises(backbones.WeightsError, match="must be of CLIP but is of 'distilbert'"):
        built_from(bert, "clip-image")
    with pytest.raises(ValueError, match=r"must be \(16, 16\).*is: \(128, 104\)"):
        built_from(clip, "clip-image", size=(128, 104))
    for folder, name in ((bert, "distilbert"), (clip, "clip-text")):
        with pytest.raises(ValueError, match=r"must be from 3 to \d+, the positions"):
            built_from(folder, name, tokens=13)
    (bert / "config.json").write_text(json.dumps({**BERT, "n_layers": 3}))
    with pytest.raises(backbones.WeightsError, match=r"Missing key.*transformer.layer.2.attention"):
        built_from(bert, "distilbert")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install './experiments\[text\]'"):
        backbones.build("minilm", pretrained=False)
