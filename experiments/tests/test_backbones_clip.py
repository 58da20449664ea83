"""CLIP's backbones: preprocessing, pooling, projections, temperature, folders, recomputation."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fcco_experiments import backbones
from fcco_experiments.backbones.clip import CLIP, ClipImageBackbone, ClipSpec, ClipTextBackbone
from fcco_experiments.data.grouped import GroupedData, Vectors
from torch import Tensor, nn
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

# "!" has the id 0, as in CLIP's own vocabulary, and the end of a text the largest.
PIECES = ("!", "a", "b", "c", "!</w>", "a</w>", "b</w>", "c</w>", "ab</w>")
START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = (*PIECES, START, END)
MERGES = [("a", "b</w>")]
EDGE, POSITIONS, SHARED, SCALE = 16, 9, 6, 1.7
CONFIG: dict[str, Any] = {
    "projection_dim": SHARED,
    "vision_config": {
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": EDGE,
        "patch_size": 8,
    },
    "text_config": {
        "vocab_size": len(WORDS),
        "hidden_size": 8,
        "intermediate_size": 14,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": 9,
        "eos_token_id": 10,
    },
}
TEXTS: Any = ["ab c", "", "!!a B", "c " * 20]
IDS = torch.tensor(
    [
        [9, 8, 7, 10, 0, 0, 0],
        [9, 10, 0, 0, 0, 0, 0],
        [9, 0, 4, 5, 6, 10, 0],
        [9, 7, 7, 7, 7, 7, 10],
    ]
)


def model_of(end: int = 10) -> Any:
    config = copy.deepcopy(CONFIG)
    config["text_config"]["eos_token_id"] = end
    torch.manual_seed(5)
    model = transformers.CLIPModel(transformers.CLIPConfig(**config)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    nn.init.constant_(model.logit_scale, SCALE)
    return model


def tokenizer_json() -> str:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    built = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, MERGES, end_of_word_suffix="</w>", unk_token=END)
    )
    built.normalizer = tokenizers.normalizers.Lowercase()
    built.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"[a-z]+|!+"), behavior="removed", invert=True
    )
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{START} $A {END}",
        special_tokens=[(word, vocabulary[word]) for word in (START, END)],
    )
    built.add_special_tokens([START, END])
    built.enable_padding(pad_id=10, pad_token=END, length=40)  # files come with such settings
    return built.to_str()


STATE = "model.safetensors"


def save(folder: Path, model: Any) -> Path:
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / STATE)
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return save(tmp_path, model_of())


def backbone_of(name: str, folder: Path, **options) -> Any:
    return backbones.build(name, pretrained=True, weights=str(folder), **options)


def images(height: int = EDGE, width: int = EDGE) -> Tensor:
    generator = torch.Generator().manual_seed(height + width)
    return torch.randint(0, 256, (3, 3, height, width), dtype=torch.uint8, generator=generator)


BATCHES = {"clip-image": images(), "clip-text": IDS}
NAMES = tuple(BATCHES)


def tensor_of(found: Any) -> Tensor:
    """`get_image_features` gives a tensor before version 5 of transformers, then a structure."""
    return found if isinstance(found, Tensor) else found.pooler_output


def normalised(batch: Tensor, mean=None, deviation=None) -> Tensor:
    mean = np.array(mean or [0.48145466, 0.4578275, 0.40821073])
    deviation = np.array(deviation or [0.26862954, 0.26130258, 0.27577711])
    found = (batch.double().numpy() / 255 - mean[:, None, None]) / deviation[:, None, None]
    return torch.from_numpy(found).float()


# What comes out.


def test_images_have_clips_own_vectors(folder):
    model, backbone = model_of(), backbone_of("clip-image", folder)
    assert (
        isinstance(backbone, ClipImageBackbone)
        and backbone.kind == "image"
        and backbone.width == 12
    )
    batch = images()
    with torch.no_grad():
        expected = tensor_of(model.get_image_features(pixel_values=normalised(batch)))
        found = backbone.projection()(backbone(batch))
    assert found.shape == (3, SHARED)
    torch.testing.assert_close(F.normalize(found), F.normalize(expected), rtol=0, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("end", [10, 2])
def test_texts_have_clips_own_vectors_whatever_the_padding(tmp_path, end):
    """Old configurations call the end of a text 2, which is the id of "b" here."""
    model = model_of(end)
    backbone = backbone_of("clip-text", save(tmp_path, model))
    assert (
        isinstance(backbone, ClipTextBackbone) and backbone.kind == "text" and backbone.width == 8
    )
    rows = [row[: row.index(10) + 1] for row in IDS.tolist()]
    with torch.no_grad():
        alone = [tensor_of(model.get_text_features(torch.tensor([row]))) for row in rows]
        expected = torch.cat(alone)
        own = torch.where(IDS.cumsum(1) > IDS.sum(1, keepdim=True) - 1, 10, IDS)  # CLIP's padding
        mask = (IDS.flip(1).cumsum(1) > 0).flip(1)
        whole = tensor_of(model.get_text_features(own, attention_mask=mask.long()))
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
        for ids in (IDS, IDS.int(), F.pad(IDS, (0, 2)), own):
            found = backbone.projection()(backbone(ids))
            torch.testing.assert_close(F.normalize(found), F.normalize(expected), rtol=0, atol=1e-6)
        for row, text in enumerate(rows):
            found = backbone.projection()(backbone(torch.tensor([text])))
            torch.testing.assert_close(found, expected[row : row + 1], rtol=1e-5, atol=1e-5)


def test_scores_of_both_backbones_are_clips(folder):
    model = model_of()
    image, text = (backbone_of(name, folder).train() for name in NAMES)
    with torch.no_grad():
        expected = model(input_ids=IDS, pixel_values=normalised(images())).logits_per_image
    first, second = image(images()), text(IDS)
    one = F.normalize(image.projection()(first))
    two = F.normalize(text.projection()(second))
    assert image.temperature() == text.temperature() == pytest.approx(math.exp(-SCALE), rel=1e-6)
    torch.testing.assert_close(one @ two.T / image.temperature(), expected, rtol=1e-5, atol=1e-5)
    (first.square().sum() + second.square().sum()).backward()
    for body in (image, text):  # a parameter without gradient would stop DDP
        assert [key for key, p in body.named_parameters() if p.grad is None] == []


def seen_by(backbone: Any, batch: Tensor) -> Tensor:
    found = []
    hook = backbone.network.register_forward_pre_hook(
        lambda _, args, options: found.append(options["pixel_values"]), with_kwargs=True
    )
    with torch.no_grad():
        backbone(batch)
    hook.remove()
    return found[0]


@pytest.mark.parametrize("size", [(40, 40), (40, 56), (63, 33), (16, 22), (9, 12)])
def test_images_are_scaled_and_cut_as_clip_does(folder, size):
    from PIL import Image

    batch = images(*size)
    batch = F.avg_pool2d(batch.float(), 3, 1, 1).to(torch.uint8)  # no noise, as photos
    batch[0, :, :, : size[1] // 2] = (
        0  # at an edge, cubic interpolation goes beyond black and white
    )
    batch[0, :, :, size[1] // 2 :] = 255
    high, wide = (int(EDGE * side / min(size)) for side in size)
    top, left = (high - EDGE) // 2, (wide - EDGE) // 2
    box = (left, top, left + EDGE, top + EDGE)
    expected = []
    for picture in batch:
        image = Image.fromarray(picture.permute(1, 2, 0).numpy())
        image = image.resize((wide, high), Image.Resampling.BICUBIC).crop(box)
        expected.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    found = seen_by(backbone_of("clip-image", folder), batch)
    assert found.shape == (3, 3, EDGE, EDGE)
    one_level = 1.01 / 255 / 0.26  # Pillow rounds
    torch.testing.assert_close(found, normalised(torch.stack(expected)), rtol=0, atol=one_level)


def test_colours_of_the_folder(folder):
    mean, deviation = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    fields = {"image_mean": mean, "image_std": deviation, "do_resize": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    found = seen_by(backbone_of("clip-image", folder), images())
    torch.testing.assert_close(found, normalised(images(), mean, deviation), rtol=1e-5, atol=1e-5)


# Projections and temperature.


@pytest.mark.parametrize("name", NAMES)
def test_projections_are_new_layers(name, folder):
    backbone = backbone_of(name, folder)
    first, second = backbone.projection(), backbone.projection()
    expected = model_of().state_dict()[
        "visual_projection.weight" if name == "clip-image" else "text_projection.weight"
    ]
    assert isinstance(first, nn.Linear) and first.bias is None and first.weight.requires_grad
    assert (first.in_features, first.out_features) == (backbone.width, SHARED)
    assert torch.equal(first.weight, expected)
    nn.init.zeros_(first.weight)
    assert torch.equal(second.weight, expected)
    assert torch.equal(backbone.projection().weight, expected)
    assert backbone.double().projection().weight.dtype == torch.float64
    assert not any("projection" in key for key in backbone.state_dict())


# Training.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_recomputation_changes_no_gradient(name, folder, dropout):
    found, calls = {}, {}
    for recompute in (False, True):
        backbone = backbone_of(name, folder, recompute=recompute, dropout=dropout).train()
        counted: list[int] = []
        for layer in backbone.network.encoder.layers:
            layer.self_attn.register_forward_hook(lambda *_, c=counted: c.append(1))
        torch.manual_seed(7)
        backbone(BATCHES[name]).square().sum().backward()
        found[recompute] = [p.grad for p in backbone.parameters()]
        calls[recompute] = len(counted)
    assert calls == {False: 2, True: 4}
    for plain, again in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-6, atol=1e-6)


# Tokens.


def test_texts_become_padded_token_ids(folder):
    found = backbones.encode("clip-text", TEXTS, tokens=7, weights=str(folder))
    assert isinstance(found, Vectors) and found.values.dtype == torch.int32
    assert torch.equal(found.values, IDS.int())
    wide = backbones.encode("clip-text", TEXTS, tokens=POSITIONS, weights=str(folder))
    assert isinstance(wide, Vectors) and wide.values[3].tolist() == [9, *[7] * 7, 10]
    pictures = Vectors(images())
    assert backbones.encode("clip-image", pictures, tokens=7) is pictures


def test_encoding_refuses(folder, tmp_path_factory, monkeypatch):
    def encode(texts: Any = TEXTS, tokens: int = 7, weights: str = str(folder)) -> None:
        backbones.encode("clip-text", texts, tokens=tokens, weights=weights)

    with pytest.raises(TypeError, match="row 1 is: Tensor"):
        encode(["a", torch.zeros(1)])
    with pytest.raises(ValueError, match=r"tokens=...\)` must be at least 3"):
        encode(tokens=2)
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(backbones.WeightsError, match=r"has no tokenizer.json; give `weights` a"):
        encode(weights=str(empty))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(empty))
    with pytest.raises(
        backbones.WeightsError, match=r"tokenizer is not here; give.*tokenizer.json"
    ):
        encode(weights="")
    whole = tokenizer_json()
    (folder / "tokenizer.json").write_text(whole[:-30])
    with pytest.raises(backbones.WeightsError, match=r"tokenizer.json is no tokenizer"):
        encode()
    fields = json.loads(whole)
    fields["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(backbones.WeightsError, match=r"end every text with the token 10, .*: None"):
        encode()


@pytest.mark.parametrize("end, wanted", [(4, 4), (2, 11)])
def test_a_tokenizer_of_another_network_is_refused(tmp_path, end, wanted):
    save(tmp_path, model_of(end))
    if end == 2:  # then the largest id is the end, and a further token takes its place
        built = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        built.add_special_tokens(["<new>"])
        built.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(backbones.WeightsError, match=rf"with the token {wanted}, .* it with: 10\."):
        backbones.encode("clip-text", TEXTS, tokens=7, weights=str(tmp_path))


# The published network, and shapes.


@pytest.mark.parametrize(
    "name, width, count", [("clip-image", 768, 85_799_424), ("clip-text", 512, 63_165_952)]
)
def test_sizes_of_the_published_network(name, width, count):
    with torch.device("meta"):
        backbone: Any = backbones.build(name, pretrained=False)
        layer = backbone.projection()
    assert backbones.kind(name) == backbone.kind and backbone.width == width
    assert sum(parameter.numel() for parameter in backbone.parameters()) == count
    assert layer.weight.shape == (512, width)
    assert backbone.temperature() == pytest.approx(0.07, abs=1e-4)
    config = backbone.network.config
    assert config._attn_implementation == "sdpa" and config.num_hidden_layers == 12
    if name == "clip-image":
        assert (config.image_size, config.patch_size) == (224, 16)
    else:
        assert (config.max_position_embeddings, config.vocab_size) == (77, 49408)
        assert config.eos_token_id == 49407
    assert CLIP[name].shape(False, "") == ((224, 224), 77)


def test_shapes_that_do_not_fit_are_refused(folder):
    backbone_of("clip-image", folder, size=(EDGE, EDGE), tokens=128)
    backbone_of("clip-text", folder, size=(128, 104), tokens=POSITIONS)
    with pytest.raises(ValueError, match=r"size=...\)` must be \(16, 16\).*is: \(128, 104\)"):
        backbone_of("clip-image", folder, size=(128, 104))
    with pytest.raises(ValueError, match=r"tokens=...\)` must be from 1 to 9, the positions"):
        backbone_of("clip-text", folder, tokens=10)
    with pytest.raises(ValueError, match=r"dropout=...\)` must"):
        backbone_of("clip-text", folder, dropout=1.0)
    with pytest.raises(ValueError, match="must be a new name, but 'clip-text' is built in"):
        backbones.register("clip-text", "a:b", "text")


# Folders of weights.


@pytest.mark.parametrize("name", NAMES)
def test_files_as_they_were_once_saved(name, folder):
    """pytorch_model.bin in half precision, with positions, sub-configurations twice."""
    model = model_of(2)
    state = {key: value.half() for key, value in model.state_dict().items()}
    state["vision_model.embeddings.position_ids"] = torch.arange(5)[None]
    state["text_model.embeddings.position_ids"] = torch.arange(POSITIONS)[None]
    (folder / STATE).unlink()
    torch.save(state, folder / "pytorch_model.bin")
    parts = copy.deepcopy(CONFIG)
    parts["text_config"] |= {"eos_token_id": 2, "bad_words_ids": None, "torch_dtype": "float16"}
    fields = {
        **parts,
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "text_config_dict": parts["text_config"],
        "vision_config_dict": parts["vision_config"],
        "torch_dtype": "float16",
        "transformers_version": None,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    backbone = backbone_of(name, folder)
    assert {value.dtype for value in backbone.parameters()} == {torch.float32}
    front = "vision_model." if name == "clip-image" else "text_model."
    for key, value in backbone.network.named_parameters():
        assert torch.equal(value, state[front + key].float())
    assert backbone.temperature() == pytest.approx(math.exp(-SCALE), rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_folders_that_lack_something(name, folder, tmp_path_factory, monkeypatch):
    from safetensors.torch import load_file, save_file

    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(
        backbones.WeightsError, match=r"no config.json and no model.safetensors; `wei"
    ):
        backbone_of(name, empty)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(empty))
    with pytest.raises(
        backbones.WeightsError, match=r"no pretrained weights here.*clip-vit-base-pat"
    ):
        backbones.build(name, pretrained=True)
    with pytest.raises(ValueError, match="must be empty with pretrained=False"):
        backbones.build(name, pretrained=False, weights=str(folder))
    whole = load_file(folder / STATE)
    layer = {"clip-image": "visual_projection.weight", "clip-text": "text_projection.weight"}[name]
    for key in (layer, "logit_scale"):
        save_file({k: v for k, v in whole.items() if k != key}, folder / STATE)
        with pytest.raises(backbones.WeightsError, match=f"it lacks {key}"):
            backbone_of(name, folder)
    (folder / STATE).write_bytes(b"no weights at all")
    with pytest.raises(backbones.WeightsError, match="is no file of weights"):
        backbone_of(name, folder)


@pytest.mark.parametrize(
    "content, match",
    [
        ("{", "config.json is no JSON"),
        ("[1]", r"must hold fields with values but holds: \[1\]"),
        ('{"model_type": "bert"}', "must be of the model_type 'clip' but is of: 'bert'"),
        (json.dumps({"model_type": "clip", "vision_config": 3}), "config.json cannot be used"),
        (json.dumps({"model_type": "clip", **CONFIG, "projection_dim": 7}), "it misshapes"),
    ],
)
def test_configurations_that_do_not_fit(folder, content, match):
    (folder / "config.json").write_text(content)
    with pytest.raises(backbones.WeightsError, match=match):
        backbone_of("clip-image", folder)


def test_what_hugging_face_has_in_its_cache_is_used(folder, tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("hub")
    home = cache / "models--openai--clip-vit-base-patch16"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123")
    (home / "snapshots").mkdir()
    folder.rename(home / "snapshots" / "0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    expected = model_of().state_dict()
    for name, front in zip(NAMES, ("vision_model.", "text_model."), strict=True):
        backbone: Any = backbones.build(name, pretrained=True)
        for key, value in backbone.network.named_parameters():
            assert torch.equal(value, expected[front + key])
    found = backbones.encode("clip-text", TEXTS, tokens=7)
    assert isinstance(found, Vectors) and torch.equal(found.values, IDS.int())


@pytest.mark.parametrize("name", NAMES)
def test_the_checksum_covers_the_whole_folder(name, folder):
    (folder / "preprocessor_config.json").write_text("{}")
    found = [backbones.checksum(name, pretrained=True, weights=str(folder))]
    for part in ("config.json", "tokenizer.json", STATE, "preprocessor_config.json"):
        (folder / part).write_bytes((folder / part).read_bytes() + b" ")
        found.append(backbones.checksum(name, pretrained=True, weights=str(folder)))
    assert len(set(found)) == 5
    assert backbones.checksum(name, pretrained=False) == "random"
    assert backbones.fetch(name) == [] and name in backbones.names()


@pytest.mark.parametrize("name", NAMES)
def test_features(name, folder, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path_factory.mktemp("cache")))
    samples: Any = Vectors(images(20, 24)) if name == "clip-image" else TEXTS
    data = GroupedData("toy", backbones.kind(name), samples, ("no", "yes"), lambda seed: {}, "1")
    found = backbones.features(name, data, weights=str(folder))
    batch: Any = backbones.encode(name, samples, tokens=POSITIONS, weights=str(folder))
    with torch.no_grad():
        expected = backbone_of(name, folder)(batch.values)
    torch.testing.assert_close(found.values, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(ClipSpec, "build", None)  # the second time they are read
    assert torch.equal(backbones.features(name, data, weights=str(folder)).values, found.values)
