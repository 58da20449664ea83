"""Backbones by name, and the cache of features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fcco_experiments import backbones
from fcco_experiments.backbones.base import LITE0
from fcco_experiments.data.grouped import GroupedData, Vectors
from torch import Tensor, nn

CALLS: list[tuple[int, ...]] = []  # shapes of the batches that the backbones below saw


class TinyImages(backbones.Backbone):
    """A backbone of a user: its name is `"test_backbones:TinyImages"`."""

    kind, width = "image", 4

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self.conv, self.norm = options, nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        if options["weights"]:
            nn.init.constant_(self.conv.weight, float(options["weights"]))

    def forward(self, batch: Tensor) -> Tensor:
        CALLS.append(tuple(batch.shape))
        return self.norm(self.conv(batch.float())).mean((2, 3))


class TinyTexts(backbones.Backbone):
    """Mean embedding of the tokens."""

    kind, width = "text", 4

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)

    def forward(self, batch: Tensor) -> Tensor:
        CALLS.append(tuple(batch.shape))
        mask = (batch != 0).unsqueeze(2)
        return (self.words(batch) * mask).sum(1) / mask.sum(1)


def no_kind(**options: Any) -> nn.Module:
    return nn.Linear(1, 1)


def no_backbone(**options: Any) -> nn.Module:
    return nn.Linear(1, 1)


no_backbone.kind = "image"  # type: ignore[attr-defined]
IMAGES, TEXTS = "test_backbones:TinyImages", "test_backbones:TinyTexts"


def photos(count: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, 6, 5), dtype=torch.uint8, generator=generator)


def grouped(samples: Any, kind: Any = "image", fingerprint: str = "1") -> GroupedData:
    return GroupedData("toy", kind, samples, ("no", "yes"), lambda seed: {}, fingerprint)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FCCO_DATA", raising=False)
    CALLS.clear()
    return tmp_path / "cache" / "data" / "features"


def test_features_are_computed_once():
    rows, state = list(photos()), torch.get_rng_state()
    first = backbones.features(IMAGES, grouped(rows), batch=4)
    again = backbones.features(IMAGES, grouped(rows), batch=3)
    assert CALLS == [(4, 3, 6, 5), (4, 3, 6, 5), (2, 3, 6, 5)]
    assert torch.equal(first.values, again.values)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    torch.testing.assert_close(first.values, TinyImages(weights="").eval()(photos()))


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
        backbones.features(IMAGES, which, **options)
        assert len(CALLS) == len(list(own_cache.iterdir())) == number
    unimportant: list[dict[str, Any]] = [{}, {"tokens": 5}, {"batch": 1}]
    for options in unimportant:
        backbones.features(IMAGES, data, **options)
    assert len(CALLS) == len(variants)


@pytest.mark.parametrize("damage", ["cut", "of another key"])
def test_damaged_files_are_computed_anew(own_cache, damage):
    data = grouped(Vectors(photos()))
    first = backbones.features(IMAGES, data).values
    (path,) = own_cache.iterdir()
    content = path.read_bytes()[:-50]
    if damage == "of another key":
        backbones.features(IMAGES, grouped(Vectors(photos().flip(0)), fingerprint="2"))
        content = next(other for other in own_cache.iterdir() if other != path).read_bytes()
    path.write_bytes(content)
    calls = len(CALLS)
    for _ in range(2):  # the second time the file is mended
        assert torch.equal(backbones.features(IMAGES, data).values, first)
    assert len(CALLS) == calls + 1


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(own_cache):
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot be kept in"):
        assert backbones.features(IMAGES, grouped(Vectors(photos()))).values.shape == (10, 4)


def test_texts_go_by_length_come_back_in_order_and_use_their_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3}

    def save(vocabulary: dict[str, int]) -> None:
        built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        built.save(str(tmp_path / "tokenizer.json"))

    save(words)
    data = grouped(["good", "bad good bad", "good bad"], "text")
    chosen: dict[str, Any] = {"weights": str(tmp_path)}
    values = backbones.features(TEXTS, data, tokens=3, batch=1, **chosen).values
    assert CALLS == [(1, 3), (1, 2), (1, 1)], "the longest first, without padding"
    torch.manual_seed(0)
    table = TinyTexts().words.weight
    expected = torch.stack([table[rows].mean(0) for rows in ([2], [3, 2, 3], [2, 3])])
    torch.testing.assert_close(values, expected)
    backbones.features(TEXTS, data, tokens=4, **chosen)
    backbones.features(TEXTS, data, tokens=4, size=(1, 1), **chosen)
    assert len(CALLS) == 4, "tokens are in the key, the size of images is not"
    save({**words, "ugly": 4})
    backbones.features(TEXTS, data, tokens=4, **chosen)
    assert len(CALLS) == 5, "and so is the tokenizer"


def test_random_weights_are_the_same_each_time_and_not_built_for_their_checksum(monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("nothing may be built")

    with monkeypatch.context() as patched:
        for spec in backbones.BUILT_IN.values():
            patched.setattr(type(spec), "build", refuse)
        assert backbones.checksum("resnet50", pretrained=False) == "random"
        assert backbones.checksum("efficientnet-lite0") == LITE0.sha256
    data = grouped(Vectors(photos(2)))
    options: dict[str, Any] = {"pretrained": False, "size": (16, 16)}
    first = backbones.features("efficientnet-lite0", data, **options).values
    torch.manual_seed(0)
    own = backbones.build("efficientnet-lite0", **options).eval()
    torch.testing.assert_close(first, own(photos(2)).detach())


def test_a_backbone_of_the_user_is_given_every_option(tmp_path, monkeypatch):
    built = backbones.build(IMAGES, pretrained=False, size=(4, 5), tokens=6, batch_norm="batch")
    assert isinstance(built, TinyImages) and backbones.kind(IMAGES) == "image"
    assert built.options == {
        "pretrained": False,
        "weights": "",
        "size": (4, 5),
        "tokens": 6,
        "batch_norm": "batch",
    }
    assert backbones.fetch(IMAGES) == []
    (tmp_path / "of_a_user.py").write_text("def backbone(**options): ...\nbackbone.kind = 'text'\n")
    monkeypatch.chdir(tmp_path)
    assert backbones.kind("of_a_user:backbone") == "text"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: backbones.kind("resnet5"), "no backbone `resnet5`; did you mean `resnet50`"),
        (lambda: backbones.kind("test_backbones:none"), "has no attribute 'none'"),
        (lambda: backbones.kind("test_backbones:no_kind"), "the attribute `kind`"),
        (lambda: backbones.build("test_backbones:no_backbone"), "must be a Backbone but is: Linea"),
        (lambda: backbones.features(IMAGES, grouped(["a"], "text")), "the data `toy` are texts"),
        (lambda: backbones.build("resnet50", pretrained=False, weights="a"), "must be empty with"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert message in str(caught.value)
