"""The real files: `FCCO_DATA=... pytest -m data`."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from fcco_experiments import data

pytestmark = pytest.mark.data


@pytest.fixture(autouse=True)
def only_the_named_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path))


def digest_of(loaded: Any) -> str:
    """Of samples, labels and groups of every part, for two seeds."""
    total = hashlib.sha256()
    if isinstance(loaded, list):
        arrays = [
            array
            for own in loaded
            for part in own.parts().values()
            for array in (part.features, part.label, part.group)
        ]
    else:
        for row in range(len(loaded.samples)):
            sample = loaded.samples[row]
            total.update(sample.encode() if isinstance(sample, str) else sample.numpy().tobytes())
        parts = [part for seed in (0, 1) for part in loaded.cut(seed).values()]
        total.update(str([(part.group_names, part.reported_names) for part in parts]).encode())
        arrays = [
            tensor.numpy()
            for part in parts
            for tensor in (part.rows, part.label, part.group, part.reported)
        ]
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


KNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("adult", {}, "b832d225fb9e8c83"),
    ("adult", {"validation": 0.0}, "05e6e9800dbc6f01"),
    ("compas", {}, "6b3b56d4a66566d7"),
    ("celeba", {}, "c54a01a485a78833"),
    ("celeba", {"limit": 12}, "1d112a5ed7a0673d"),
    ("sentiment", {}, "8583dec9bf688d53"),
    ("sentiment", {"distinct": True, "limit": 150}, "dfd0f00cdd006163"),
    ("amazon", {}, "964b7ce497f44d9c"),
    ("amazon", {"distinct": True, "limit": 6}, "ab66a62930431aeb"),
    ("weather", {}, "2c0f062a3996b212"),
    ("weather", {"classes": ("snowy", "stormy"), "limit": 30}, "a1f3d2225787368d"),
    ("bdd100k-subset", {}, "3754df6360dfb09d"),
    ("bdd100k-subset", {"classes": ("clear", "overcast")}, "a181298e33f9aa2a"),
]
"""As the first release of this package read them, before there were cards."""


@pytest.mark.parametrize(("name", "options", "wanted"), KNOWN, ids=lambda own: str(own)[:40])
def test_samples_and_parts_are_those_of_earlier_releases(name, options, wanted):
    loaded: Any
    if name in ("adult", "compas"):
        loaded = [data.load(name, download=False, seed=seed, **options) for seed in (0, 1)]
    else:
        loaded = data.load_grouped(name, download=False, **options)
    assert digest_of(loaded) == wanted


# Counted by a second program. Group by label; images by four attributes as a binary number.
ADULT_TRAIN, ADULT_TEST = [9592, 1179, 15_128, 6662], [4831, 590, 7604, 3256]
COMPAS = [2082, 1987, 1281, 822]
CELEBA = [677, 162, 1714, 28, 750, 221, 1308, 25, 1500, 400, 695, 12, 1485, 588, 419, 16]


def test_adult_and_compas_have_the_known_cells():
    def cells(*parts: data.Part) -> list[int]:
        found: Any = sum(np.bincount(2 * part.group + part.label) for part in parts)
        return found.tolist()

    adult = data.load("adult", download=False, validation=0.0)
    assert cells(adult.train) == ADULT_TRAIN and cells(adult.test) == ADULT_TEST
    assert adult.train.features.shape == (32_561, 107)
    compas = data.load("compas", download=False)
    assert cells(*compas.parts().values()) == COMPAS and len(compas.test) == 1234
    assert len(compas.feature_names) == 16


def test_celeba_has_the_known_groups_and_shows_faces():
    loaded = data.load_grouped("celeba", download=False)
    assert isinstance(loaded.samples, data.Vectors)
    counts = sum(torch.bincount(part.group, minlength=16) for part in loaded.cut(0).values())
    assert isinstance(counts, torch.Tensor) and counts.tolist() == CELEBA
    red, green, blue = loaded.samples.values[::50].float().mean((0, 2, 3)).tolist()
    assert red > green > blue > 60


def test_molecules_have_the_field_s_scaffold_split():
    """As many molecules, and active ones, as in ogbg-molhiv, whose split is the same."""
    pytest.importorskip("rdkit")
    parts = data.load_grouped("hiv", download=False).cut(0)
    sizes = [len(part) for part in parts.values()]
    assert sizes == [32_901, 4113, 4113]
    assert [int(part.label.sum()) for part in parts.values()] == [1232, 81, 130]


def test_attributes_of_celeba_lists_and_comments_have_the_known_counts():
    for label, number in (("Bald", 246), ("Gray_Hair", 444)):
        parts = data.load_grouped("celeba", label=label, download=False).cut(0).values()
        assert sum(int(part.label.sum()) for part in parts) == number
        assert [len(part) for part in parts] == [8000, 1000, 1000]
    lists = data.load_grouped("ranking", download=False)
    parts = lists.cut(0)
    assert [len(part.group_names) for part in parts.values()] == [161, 40, 50]
    assert sum(map(len, parts.values())) == 3005 + 768 and len(parts["test"]) == 768
    assert lists.class_names == ("0", "1", "2", "3", "4")


def test_comments_come_from_the_wheel():
    for keep, sizes in ((0, [95_692, 32_128, 31_866]), (60_000, [35_955, 12_072, 11_973])):
        loaded = data.load_grouped("toxicity", keep=keep)
        parts = loaded.cut(0)
        assert [len(part) for part in parts.values()] == sizes
        shares = [part.label.double().mean().item() for part in parts.values()]
        assert shares == pytest.approx([0.116, 0.1145, 0.1135], abs=6e-4)
