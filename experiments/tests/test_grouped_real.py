"""The real files: `FCCO_DATA=... pytest -m data`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from fcco_experiments import data

pytestmark = pytest.mark.data

# Images by (attractive, mouth open, man, blond) as a binary number, counted by a second program.
CELEBA = [677, 162, 1714, 28, 750, 221, 1308, 25, 1500, 400, 695, 12, 1485, 588, 419, 16]


@pytest.fixture(autouse=True)
def only_the_named_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path))


def sizes(loaded: data.GroupedData, seed: int = 0) -> list[int]:
    """Of the groups, over all parts."""
    counts: Counter[str] = Counter()
    for part in loaded.cut(seed).values():
        counts.update(part.group_names[index] for index in part.group.tolist())
    return sorted(counts.values())


def test_celeba():
    loaded = data.load("celeba", download=False, copy="subset")
    assert isinstance(loaded.samples, data.Vectors)
    assert loaded.samples.values.shape == (10_000, 3, 109, 89)
    assert loaded.samples.values.dtype == torch.uint8
    found = sizes(loaded)
    assert len(found) == 16 and sum(found) == 10_000
    assert found[:4] == [12, 16, 25, 28] and found[-1] == 1714
    # mean colour: faces, not noise, and the channels in the order RGB
    red, green, blue = loaded.samples.values[::50].float().mean((0, 2, 3)).tolist()
    assert red > green > blue > 60
    parts = loaded.cut(0)
    assert [len(part) for part in parts.values()] == [8000, 1000, 1000]
    for part in parts.values():
        assert part.reported_names == (
            "woman, not blond",
            "woman, blond",
            "man, not blond",
            "man, blond",
        )
    counts = sum(torch.bincount(part.group, minlength=16) for part in parts.values())
    assert isinstance(counts, torch.Tensor) and counts.tolist() == CELEBA
    assert sum(int(part.label.sum()) for part in parts.values()) == sum(CELEBA[1::2]) == 1452
    assert parts["test"].group_names[11] == "attractive, mouth closed, man, blond"
    small = data.load("celeba", download=False, copy="subset", limit=30)
    assert sizes(small) == [12, 16, 25, 28] + [30] * 12


def test_sentiment():
    loaded = data.load("sentiment", download=False)
    assert len(loaded.samples) == 14_000
    assert sizes(loaded) == [860, 932, *[1000] * 10, 1068, 1140]
    assert str(loaded.samples[0]).startswith("Horrible book, horrible.. THis book was horrible.")
    once = data.load("sentiment", download=False, distinct=True)
    assert len(once.samples) == 14_000 - 1707
    assert len(once.cut(0)["test"].group_names) == 14


def test_amazon():
    loaded = data.load("amazon", download=False)
    assert len(loaded.samples) == 10_450 and loaded.facts["users"] == "1,897"
    for seed in range(3):
        parts = loaded.cut(seed)
        assert sum(len(part) for part in parts.values()) == 10_450
        assert len(parts["train"].group_names) == 636, "60 per cent of 1,060"
        assert torch.bincount(parts["train"].group).min() == 5
        for name in ("validation", "test"):
            assert torch.bincount(parts[name].group).min() >= 20
            assert 130 <= len(parts[name].group_names) <= 150
    stars = sum(torch.bincount(part.label, minlength=5) for part in parts.values())
    assert isinstance(stars, torch.Tensor) and stars.tolist() == [230, 158, 452, 887, 8723]
    once = data.load("amazon", download=False, distinct=True)
    assert len(once.samples) == 4072
    assert len(once.cut(0)["train"].group_names) == round(0.6 * 296)
