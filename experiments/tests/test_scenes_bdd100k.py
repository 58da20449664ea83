"""BDD100K in its official releases, as csv lists, and the archive of some val frames."""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest
import torch
from fcco_experiments import data
from fcco_experiments.data import bdd100k as frames
from fcco_experiments.data.images import decode
from grouped_fixtures import put, stand_in
from PIL import Image
from scenes_fixtures import SIDE, Drives, saved, tar, unpack

drives = Drives()
CLASSES = ("clear", "rainy", "overcast", "foggy")
RELEASES = {
    "2020": "labels of 2020",
    "2018": "labels of 2018",
    "frames": "labels of each frame",
}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))


def pixels(images: dict[str, bytes]) -> dict[bytes, str]:
    """Paths such as val/x.jpg by what the picture shows."""
    return {
        decode(own, name).numpy().tobytes(): "/".join(name.split("/")[-2:])
        for name, own in images.items()
    }


def check(loaded: data.GroupedData, official: bool) -> dict[str, Counter[str]]:
    """Every row has its weather; returns the classes of each part."""
    assert loaded.kind == "image" and loaded.class_names == CLASSES
    known = pixels(drives.images())
    counts: dict[str, Counter[str]] = {}
    rows = []
    for name, part in loaded.cut(1).items():
        counts[name] = Counter()
        assert torch.equal(part.label, part.group) and part.group_names == CLASSES
        for row, label in zip(part.rows.tolist(), part.label.tolist(), strict=True):
            sample = loaded.samples[row]
            assert isinstance(sample, torch.Tensor) and sample.shape == (3, *SIDE)
            path = known[sample.numpy().tobytes()]
            assert drives.weather(path) == CLASSES[label]
            if official:
                assert path.startswith("val/") == (name == "test")
            counts[name][CLASSES[label]] += 1
        rows += part.rows.tolist()
    assert sorted(rows) == list(range(len(loaded.samples)))
    return counts


@pytest.mark.parametrize("release", RELEASES)
def test_official_releases(tmp_path, release):
    root = drives.write(tmp_path / "mine", release)
    for folder in (root, root / "bdd100k"):
        loaded = data.load("bdd100k", folder, classes=CLASSES)
        counts = check(loaded, official=True)
        assert counts["test"] == {"clear": 5, "overcast": 4, "rainy": 4, "foggy": 3}
        assert counts["validation"] == dict.fromkeys(CLASSES, 1)
        assert counts["train"] == {"clear": 11, "overcast": 8, "rainy": 7, "foggy": 3}
        first, other = (loaded.cut(seed) for seed in (0, 3))
        assert torch.equal(first["test"].rows, other["test"].rows)
        assert not torch.equal(first["validation"].rows, other["validation"].rows)
        assert isinstance(loaded.samples, data.ImageFiles), "decoded when read"
    facts = dict(loaded.facts)
    assert facts["labels"] == RELEASES[release] and facts["frames without weather"] == "8"
    assert facts["frames of other weather"] == facts["frames without image"] == "0"
    assert facts["images"] == "49" and facts["scene"] == "highway 49"
    shares = dict(word.split() for word in facts["time of day"].split(", "))
    assert set(shares) == {"daytime", "night"} and sum(map(int, shares.values())) == 49
    assert str(tmp_path) not in str(facts), "facts may be published"


def test_releases_agree_and_options_change_the_fingerprint(tmp_path):
    roots = [drives.write(tmp_path / release, release) for release in RELEASES]
    same = {data.load("bdd100k", root, classes=CLASSES).fingerprint for root in roots}
    assert len(same) == 1
    few = data.load("bdd100k", roots[0], classes=CLASSES, limit=3)
    assert check(few, official=True)["test"] == dict.fromkeys(CLASSES, 3)
    assert len(few.samples) == 24, "of each class three train and three val images"
    two = data.load("bdd100k", roots[0], classes=("foggy", "clear"))
    assert two.class_names == ("foggy", "clear") and len(two.samples) == 24
    assert two.facts["frames of other weather"] == "25"
    assert len({*same, few.fingerprint, two.fingerprint}) == 3


def test_the_newer_release_is_taken(tmp_path):
    root = drives.write(tmp_path, "2018")
    unpack(drives.labels("2020", ("val",)), root / "bdd100k")
    loaded = data.load("bdd100k", root, classes=CLASSES)
    assert loaded.facts["labels"] == "labels of 2018", "2020 lacks train"
    unpack(drives.labels("2020"), root / "bdd100k")
    assert data.load("bdd100k", root, classes=CLASSES).facts["labels"] == "labels of 2020"


def test_a_frame_that_is_listed_twice_counts_once(tmp_path):
    root = drives.write(tmp_path)
    path = root / "bdd100k/labels/det_20/det_val.json"
    path.write_text(json.dumps([*drives.rows["val"], *drives.rows["val"]]))
    assert len(data.load("bdd100k", root, classes=CLASSES).samples) == 49


def test_images_that_were_scaled_down_are_other_data(tmp_path):
    root = drives.write(tmp_path)
    first = data.load("bdd100k", root, classes=CLASSES)
    for path in (root / "bdd100k/images/100k").rglob("*.jpg"):
        path.write_bytes(saved(Image.open(path).resize((16, 12)), "JPEG"))
    second = data.load("bdd100k", root, classes=CLASSES)
    assert second.fingerprint != first.fingerprint


def test_a_frame_of_two_kinds_of_weather_is_refused(tmp_path):
    root = drives.write(tmp_path)
    path = root / "bdd100k/labels/det_20/det_val.json"
    rows = drives.rows["val"]
    own = next(row for row in rows if row.get("attributes", {}).get("weather") == "clear")
    other = {**own, "attributes": {**own["attributes"], "weather": "rainy"}}
    path.write_text(json.dumps([*rows, other]))
    said = f"name val/{own['name']}.* twice, with the weather clear and with rainy"
    with pytest.raises(data.WrongData, match=said):
        data.load("bdd100k", root, classes=CLASSES)
    more = tmp_path / "more.csv"
    more.write_text(f"path,weather\nval/{own['name']},hail\n")
    with pytest.raises(data.WrongData, match=r"twice, with the weather clear and with hail"):
        data.load("bdd100k", root, classes=CLASSES, lists=[*drives.lists(tmp_path), more])


@pytest.mark.parametrize("release", ["2020", "frames", "lists"])
def test_marks_at_the_beginning_of_files(tmp_path, release):
    """As Excel and some editors write them."""
    root = drives.write(tmp_path, "2020" if release == "lists" else release)
    lists = drives.lists(tmp_path) if release == "lists" else ()
    for path in lists:  # without the column of row numbers, which has no name
        rows = (line.split(",", 1)[1] for line in path.read_text().splitlines())
        path.write_text("\n".join(rows) + "\n")
    wanted = data.load("bdd100k", root, classes=CLASSES, lists=lists).fingerprint
    for path in lists or (root / "bdd100k/labels").rglob("*.json"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert data.load("bdd100k", root, classes=CLASSES, lists=lists).fingerprint == wanted


def test_csv_lists(tmp_path):
    root = unpack(drives.images(), tmp_path / "mine" / "bdd100k")
    with pytest.raises(data.WrongData, match=r"no labels of train and val: it needs labels/det_20"):
        data.load("bdd100k", root, classes=CLASSES)
    lists = drives.lists(tmp_path)
    for order in (lists, lists[::-1]):
        loaded = data.load("bdd100k", root, classes=CLASSES, lists=order)
        counts = check(loaded, official=True)
        assert counts["test"].total() == 16 and counts["train"].total() == 29
    assert loaded.facts["labels"] == "lists"
    with pytest.raises(data.WrongData, match=r"no frame in the train images .* clear or rainy"):
        data.load("bdd100k", root, classes=CLASSES, lists=lists[1:])
    lists[0].write_text("path,weather\nimages/100k/val/x.jpg,clear\n")
    with pytest.raises(data.WrongData, match="must begin with train/ or val/"):
        data.load("bdd100k", root, classes=CLASSES, lists=lists)
    lists[0].write_bytes(b"path,weather\nval/\xff.jpg,clear\n")
    with pytest.raises(data.WrongData, match="is no text"):
        data.load("bdd100k", root, classes=CLASSES, lists=lists)
    lists[0].write_text("file,weather\nval/x.jpg,clear\n")
    with pytest.raises(data.WrongData, match="lacks the columns path"):
        data.load("bdd100k", root, classes=CLASSES, lists=lists)


def test_missing_images(tmp_path):
    root = drives.write(tmp_path)
    wanted = drives.names("train", "clear")
    unused = drives.names("val", None)
    for split, name in (("train", wanted[0]), ("train", wanted[1]), ("val", unused[0])):
        (root / "bdd100k/images/100k" / split / name).unlink()
    with pytest.raises(data.WrongData, match="2 of 49 images that the labels name are not"):
        data.load("bdd100k", root, classes=CLASSES)
    loaded = data.load("bdd100k", root, classes=CLASSES, verify=False)
    assert len(loaded.samples) == 47 and loaded.facts["frames without image"] == "2"
    assert check(loaded, official=True)["train"]["clear"] == 9
    with pytest.raises(data.WrongData, match=r"no frame in the train images .* weather hail"):
        data.load("bdd100k", root, classes=("clear", "hail"), verify=False)
    (root / "bdd100k/images/100k/val").rename(root / "bdd100k/images/100k/valid")
    with pytest.raises(data.WrongData, match="lacks images/100k/val"):
        data.load("bdd100k", root, classes=CLASSES)
    with pytest.raises(data.MissingData, match=r"bdd-data\.berkeley\.edu"):
        data.load("bdd100k", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"name": "a.jpg"}, {"name"', "damaged after 1 records"),
        ('[{"name": "a.jpg"} {"name": "b.jpg"}]', "after 1 records: a comma or `]` must follow"),
        ('{"name": "a.jpg"}', "after 0 records: a list of records must begin"),
        ('[{"name": "a.jpg"}, 3]', "after 1 records: a record must begin"),
        ('[{"name": "a.jpg"},]', "after 1 records: a record must begin"),
        ('[{"name": "a.jpg"}', "after 1 records: a comma or `]` must follow"),
        ('[{"name": "a.jpg"}] more', "something follows the end"),
        ('[{"name": "a\xff.jpg"}]', "damaged after 0 records: .*utf-8"),
        ('[{"title": "a.jpg"}]', "has no name"),
        ('[{"name": "a.jpg", "attributes": "clear"}]', "attributes of a.jpg in .* are no fields"),
        ('[{"name": "a.jpg"}, {"n": ' + "9" * 5000 + "}]", "damaged after 1 records: Exceeds"),
        ('[{"name": "a.jpg"}, {"n": ' + "[" * 200_000, "damaged after 1 records: .*recursion"),
        ("", "damaged after 0 records"),
    ],
)
def test_damaged_labels(tmp_path, text, reason):
    root = drives.write(tmp_path)
    path = root / "bdd100k/labels/det_20/det_val.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(data.WrongData, match=reason):
        data.load("bdd100k", root, classes=CLASSES)


def test_damaged_label_of_a_frame(tmp_path):
    root = drives.write(tmp_path, "frames")
    path = sorted((root / "bdd100k/labels/100k/train").iterdir())[4]
    path.write_text('{"name": "x')
    with pytest.raises(data.WrongData, match=f"{path.name} is damaged"):
        data.load("bdd100k", root, classes=CLASSES)


@pytest.mark.parametrize("release", ["2018", "frames"])
def test_large_label_files_are_remembered(monkeypatch, tmp_path, release):
    root = drives.write(tmp_path / "mine", release)
    before = data.load("bdd100k", root, classes=CLASSES)
    kept = tmp_path / "cache/data/bdd100k"
    assert not kept.exists(), "small files are read again"
    monkeypatch.setattr(frames, "CACHED_FROM", 1)
    first = data.load("bdd100k", root, classes=CLASSES)
    assert len(list(kept.iterdir())) == 2
    parsed = []
    with monkeypatch.context() as patch:
        patch.setattr(frames, "_parsed", lambda *words: parsed.append(words))
        second = data.load("bdd100k", root, classes=CLASSES)
    assert not parsed and before.fingerprint == first.fingerprint == second.fingerprint
    for file in kept.iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    third = data.load("bdd100k", root, classes=CLASSES)
    assert third.fingerprint == first.fingerprint, "a damaged cache is made anew"
    # a file of the same size that was written later
    folder = root / "bdd100k/labels"
    files = sorted(folder.rglob("*train*.json")) + sorted(folder.glob("100k/train/*.json"))
    path = next(file for file in files if '"foggy"' in file.read_text())
    state = path.stat()
    path.write_text(path.read_text().replace('"foggy"', '"rainy"', 1))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
    changed = data.load("bdd100k", root, classes=CLASSES)
    assert changed.fingerprint != first.fingerprint
    assert len(list(kept.iterdir())) == 3


def test_a_cache_that_cannot_be_written_does_not_matter(monkeypatch, tmp_path):
    root = drives.write(tmp_path / "mine")
    monkeypatch.setattr(frames, "CACHED_FROM", 1)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "file"))
    assert len(data.load("bdd100k", root, classes=CLASSES).samples) == 49


# --- the archive of some val frames --------------------------------------------------------------


def test_subset(monkeypatch, tmp_path):
    content = drives.archive()
    folder = put(tmp_path / "mine", stand_in(monkeypatch, "bdd100k-subset", content), content, True)
    loaded = data.load("bdd100k-subset", folder, classes=CLASSES)
    counts = check(loaded, official=False)
    assert counts["test"] == counts["validation"] == dict.fromkeys(CLASSES, 1)
    assert counts["train"] == {"clear": 3, "overcast": 2, "rainy": 2, "foggy": 1}
    assert isinstance(loaded.samples, data.Vectors)
    assert loaded.facts["frames without weather"] == "3" and loaded.facts["images"] == "16"
    assert "night" in loaded.facts["time of day"]
    few = data.load("bdd100k-subset", folder, classes=("clear", "overcast"), limit=3)
    assert len(few.samples) == 6 and few.fingerprint != loaded.fingerprint
    with pytest.raises(data.WrongData, match=r"no frame .* weather snowy or partly cloudy"):
        data.load("bdd100k-subset", folder)


def test_broken_subset(monkeypatch, tmp_path):
    clear = drives.names("val", "clear")[0]
    name = stand_in(monkeypatch, "bdd100k-subset", drives.archive())
    folder = put(tmp_path / "mine", name, drives.archive(without=clear))
    with pytest.raises(data.MissingData, match="checksum mismatch"):
        data.load("bdd100k-subset", folder, classes=CLASSES)
    loaded = data.load("bdd100k-subset", folder, classes=CLASSES, verify=False)
    assert len(loaded.samples) == 15 and loaded.facts["frames without image"] == "1"
    content = drives.archive(without=clear)
    stand_in(monkeypatch, "bdd100k-subset", content)
    with pytest.raises(data.WrongData, match=f"1 of 16 images .* val/{clear}"):
        data.load("bdd100k-subset", folder, classes=CLASSES)
    for content, reason in (
        (drives.archive(without="det_val"), r"lacks labels/det_20/det_val\.json"),
        (drives.archive(spoilt="det_val"), "damaged after 0 records"),
        (drives.archive(spoilt=clear), f"{clear} cannot be decoded"),
        (tar({}), "lacks labels"),
        (b"no archive" * 99, "is no tar archive"),
    ):
        put(folder, name, content)
        with pytest.raises(data.WrongData, match=reason):
            data.load("bdd100k-subset", folder, classes=CLASSES, verify=False)


def test_fixture_pictures_differ():
    assert len(pixels(drives.images())) == len(drives.images())
