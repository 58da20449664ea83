"""Camelyon17-WILDS in its layout."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from fcco_experiments import data
from fcco_experiments.data import wilds
from grouped_fixtures import Patches, image

patches = Patches()


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    return patches.write(tmp_path / "mine")


def load(folder: Path, **options) -> data.GroupedData:
    return data.load("camelyon17", folder, **{"expected": patches.counts, **options})


def number_of(sample) -> int:
    assert sample.shape == (3, 96, 96) and sample.dtype == torch.uint8
    red, green, _ = (int(value) // 4 for value in sample.float().mean((1, 2)).tolist())
    return red + 64 * green


def check(loaded: data.GroupedData) -> dict[str, list[int]]:
    """Every row against the table; returns the numbers of the patches of each part."""
    assert (loaded.kind, loaded.class_names) == ("image", ("no tumour", "tumour"))
    parts = loaded.cut(0)
    found = {}
    for name, part in parts.items():
        found[name] = [number_of(loaded.samples[row]) for row in part.rows.tolist()]
        for place, number in enumerate(found[name]):
            _, _, _, _, tumour, slide, center, split = patches.rows[number]
            assert part.label[place] == tumour
            assert part.group_names[part.group[place]] == f"hospital {center}, slide {slide}"
            assert name == {1: "validation", 2: "test"}.get(center, "train")
            assert center in (1, 2) or split == 0
        assert torch.equal(part.reported, part.group)
        assert part.reported_names == part.group_names
    assert [len(part.group_names) for part in parts.values()] == [4, 1, 1]
    return found


def test_official_parts(folder):
    for place in (folder, folder.parent):
        loaded = load(place)
        found = check(loaded)
        assert {name: len(own) for name, own in found.items()} == {
            "train": 32,
            "validation": 10,
            "test": 10,
        }
        assert (
            len({number for own in found.values() for number in own}) == 52 == len(loaded.samples)
        )
    again = pickle.loads(pickle.dumps(loaded))
    assert torch.equal(again.cut(7)["train"].rows, loaded.cut(0)["train"].rows)
    assert loaded.fingerprint == load(folder).fingerprint
    assert str(folder.parent) not in str(loaded.facts)


def test_the_known_counts(folder):
    assert sum(wilds.CAMELYON17_SIZES.values()) == 455_954
    with pytest.raises(
        data.WrongData, match=r"must list 302,436 \(train\), 33,560 .* but lists 32"
    ):
        load(folder, expected=None)
    assert len(load(folder, expected=None, verify=False).samples) == 52


def test_rows_are_counted(folder):
    one = Patches()
    one.rows = one.rows[:-1]
    one.table(folder)
    with pytest.raises(data.WrongData, match="must list 32"):
        load(folder)
    loaded = load(folder, verify=False)
    assert len(loaded.samples) in (51, 52)
    one.rows[0], one.rows[1] = one.rows[1], one.rows[0]
    one.table(folder)
    assert load(folder, verify=False).fingerprint != loaded.fingerprint


def test_limit(folder):
    loaded = load(folder, limit=3)
    found = check(loaded)
    assert {name: len(own) for name, own in found.items()} == {
        "train": 12,
        "validation": 3,
        "test": 3,
    }
    assert len(loaded.samples) == 18 and loaded.fingerprint != load(folder).fingerprint


def test_gaps(folder):
    lost = [patches.path(row) for row in patches.rows if row[6] == 3][:4]
    for name in lost:
        (folder / "patches" / name).unlink()
    with pytest.raises(data.WrongData) as caught:
        load(folder)
    assert f"4 of 60 images are not in {folder / 'patches'}: {lost[0]}" in str(caught.value)
    assert str(caught.value).endswith("and 1 more.")
    inner = folder / "patches" / "patient_040_node_0"
    inner.rename(folder / "elsewhere")
    with pytest.raises(data.WrongData, match="14 of 60"):
        load(folder)


@pytest.mark.parametrize("gap", ["metadata.csv", "RELEASE_v1.0.txt", "patches"])
def test_a_folder_without_a_part(folder, gap):
    (folder / gap).rename(folder.parent / "moved")
    for place in (folder, folder.parent):
        with pytest.raises(data.WrongData, match=rf"camelyon17_v1.0 lacks {gap}\. Complete"):
            load(place)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (",tumor,", ",tumour,", "lacks the columns tumor; its header is .*tumour"),
        (",3,0\n", ",5,0\n", "center from 0 to 4"),
        (",3,0\n", ",3,2\n", "split of 0 or 1"),
        (",3,0\n", ",x,0\n", "but has"),
        (",3,0\n", ",3\n", "must have 9 cells, as its header, but has 8"),
    ],
)
def test_broken_tables(folder, old, new, reason):
    path = folder / "metadata.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(data.WrongData, match=reason):
        load(folder)


def test_a_table_without_a_part(folder):
    one = Patches()
    one.rows = [row for row in one.rows if row[6] != 2]
    one.table(folder)
    with pytest.raises(data.WrongData, match="hospitals to train, validate and test"):
        load(folder, verify=False)


def test_a_broken_patch_is_named(folder):
    loaded = load(folder)
    part = loaded.cut(0)["test"]
    row = int(part.rows[4])
    assert isinstance(loaded.samples, data.ImageFiles)
    path = folder / "patches" / loaded.samples.names[row]
    path.write_bytes(image(1, (96, 96), "PNG")[:-30])
    with pytest.raises(data.WrongData, match=f"{path.name} cannot be decoded"):
        loaded.samples[row]
