"""Backbones by name, and the cache of features."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from fcco_experiments import backbones
from fcco_experiments.backbones import networks, registry, text
from fcco_experiments.backbones.weights import LITE0
from fcco_experiments.data import DataFile, Form, MissingData
from fcco_experiments.data.grouped import GroupedData, Vectors
from fcco_experiments.data.sources import checksum
from torch import Tensor, nn

CALLS: list[tuple[int, ...]] = []  # shapes of the batches that the backbones below saw


class TinyImages(backbones.Backbone):
    """A backbone of a user: its name is `"test_backbones:TinyImages"`."""

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


IMAGES, TEXTS = "test_backbones:TinyImages", "test_backbones:TinyTexts"
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
    data, state, told = grouped(Read(photos())), torch.get_rng_state(), []
    first = backbones.features(
        IMAGES, data, batch=4, progress=lambda *entry: told.append(entry), **OPTIONS
    )
    what = f"features of toy by {IMAGES}"
    assert told == [(what, 4, 10), (what, 8, 10), (what, 10, 10)]
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
    built = []

    def network():
        built.append(1)
        torch.nn.init.uniform_(torch.empty(1))  # depends on the random stream
        return networks.ResNet((1, 1, 1, 1), channels=4)

    tiny = replace(networks.IMAGES["resnet50"], network=network)
    monkeypatch.setitem(registry.BUILT_IN, "resnet50", tiny)
    data = grouped(Vectors(photos()))
    assert backbones.checksum("resnet50", pretrained=False) == "random"
    assert backbones.checksum("efficientnet-lite0", pretrained=True) == LITE0.form.sha256
    assert not built
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


# Names.


def test_a_registered_backbone():
    backbones.register("mine", "test_backbones:TinyImages", "image")
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
        (lambda: backbones.kind("test_backbones:none"), "test_backbones has no none"),
        (
            lambda: backbones.kind("test_backbones:no_backbone"),
            "give the function an attribute `kind`",
        ),
        (
            lambda: backbones.features(IMAGES, grouped(["a"], "text"), **OPTIONS),
            "takes images, but the data `toy` are texts",
        ),
        (lambda: backbones.register("mine", "module", "image"), "must be 'module:function'"),
        (
            lambda: (
                backbones.register("mine", "test_backbones:no_backbone", "image"),
                backbones.build("mine", pretrained=False),
            ),
            "must be a Backbone but is: Linear",
        ),
        (lambda: backbones.register("minilm", "a:b", "text"), "'minilm' is built in"),
        (lambda: backbones.register("mine", "a:b", "sound"), "must be one of 'image', 'text'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert message in str(caught.value)


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
    own = {"efficientnet-lite0": ("lite",), "minilm": ("minilm", "words"), "distilbert": ("words",)}
    for name, parts in own.items():
        spec = {**networks.IMAGES, **text.TEXTS}[name]
        spec = replace(spec, files=tuple(files[part] for part in parts))
        monkeypatch.setitem(registry.BUILT_IN, name, spec)
    for name in (*registry.BUILT_IN, IMAGES):
        found = [entry.file for entry in backbones.fetch(name, folder=tmp_path)]
        assert found == list(own.get(name, ()))
    with pytest.raises(MissingData):
        backbones.fetch("minilm")
    with pytest.raises(ValueError, match="no backbone"):
        backbones.fetch("none")
