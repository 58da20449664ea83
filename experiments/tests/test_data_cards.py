"""The cards and their readers, on small files in the exact layouts of the data sets."""

from __future__ import annotations

import csv
import io
import math
import pickle
from datetime import datetime
from typing import Any

import numpy as np
import pytest
import torch
from data_fixtures import RARE, adult_contents, change_card, compas_contents, put
from fcco_experiments import data
from fcco_experiments.data import layouts
from fcco_experiments.data.sources import without_names
from grouped_fixtures import Faces, Patches, Reviews, image, opinions, stand_in
from scenes_fixtures import SIDE, Drives, photos, picture, saved, tar, unpack


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))


def test_cards_are_complete():
    assert len(data.names()) >= 16
    for name in data.names():
        card = data.card(name)
        assert all((card.title, card.rows, card.licence, card.citation))
        assert bool(card.copies) != name.endswith("synthetic")
        for copy in card.copies:
            assert copy.reader in layouts.READERS and copy.source
            assert bool(copy.files) != bool(copy.folder)
            for file in copy.files:
                assert len({file.sha256, *file.others.values()}) == 1 + len(file.others)
                assert all(len(own) == 64 for own in (file.sha256, *file.others.values()))
                assert bool(file.wheel) == bool(file.member), "a wheel on PyPI, or a place in words"
                assert file.wheel or "https://github.com/" in copy.source


# Adult and COMPAS, a second time with loops.


def standardised(fitted: list[list[float]], rows: list[list[float]]) -> np.ndarray:
    result = np.zeros((len(rows), len(fitted[0])))
    for j in range(len(fitted[0])):
        column = [row[j] for row in fitted]
        mean = math.fsum(column) / len(column)
        variance = math.fsum((x - mean) ** 2 for x in column) / len(column)
        deviation = 1.0 if len(set(column)) == 1 else math.sqrt(variance)
        result[:, j] = [(row[j] - mean) / deviation for row in rows]
    return result


def set_aside(group: list[int], label: list[int], share: float, seed: int) -> list[int]:
    random, chosen = np.random.RandomState(seed), []
    for cell in ((0, 0), (0, 1), (1, 0), (1, 1)):
        rows = [i for i in range(len(group)) if (group[i], label[i]) == cell]
        chosen += random.permutation(rows)[: round(share * len(rows))].tolist()
    return sorted(chosen)


def compare(loaded: data.FairnessData, train: Any, test: Any, encode: Any, share: float) -> None:
    """Rows are (cells, label, group) here; `encode` makes numbers of the cells."""
    aside = set_aside([r[2] for r in train], [r[1] for r in train], share, 7)
    stay = [i for i in range(len(train)) if i not in aside]
    fitted = [encode(train[i][0]) for i in stay]
    wanted = {"train": [train[i] for i in stay], "validation": [train[i] for i in aside]}
    wanted = {name: rows for name, rows in {**wanted, "test": test}.items() if rows}
    assert list(loaded.parts()) == list(wanted)
    for name, part in loaded.parts().items():
        rows = wanted[name]
        features = standardised(fitted, [encode(row[0]) for row in rows])
        np.testing.assert_allclose(part.features, features, atol=2e-6)
        assert part.label.tolist() == [row[1] for row in rows]
        assert part.group.tolist() == [row[2] for row in rows]
        assert part.features.dtype == np.float32 and part.label.dtype == np.int64
    assert len(loaded.feature_names) == loaded.train.features.shape[1]


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_adult_equals_loops(monkeypatch, tmp_path, share):
    contents = adult_contents(1)
    change_card(monkeypatch, "adult", **contents)
    for name, content in contents.items():
        put(tmp_path, name, content)
    loaded = data.load("adult", tmp_path, validation=share, seed=7)

    def rows(content: bytes) -> list[tuple[list[str], int, int]]:
        lines = [line for line in content.decode().split("\n") if line and line[0] != "|"]
        cells = [line.rstrip(".").split(", ") for line in lines]
        return [(own, int(own[14] == ">50K"), int(own[9] == "Male")) for own in cells]

    train, test = map(rows, contents.values())

    def encode(cells: list[str]) -> list[float]:
        found = [float(cells[place]) for place in (0, 4, 10, 11, 12)]
        for place in (1, 3, 5, 6, 7, 8, 9, 13):
            values = sorted({row[0][place] for row in train})
            found += [float(cells[place] == value) for value in values]
        return found

    compare(loaded, train, test, encode, share)
    assert loaded.group_names == ("Female", "Male") and "workclass=?" in loaded.feature_names
    assert not any("fnlwgt" in name or RARE in name for name in loaded.feature_names)


def test_compas_equals_loops(monkeypatch, tmp_path):
    raw, plain = compas_contents().values()
    change_card(monkeypatch, "compas", **{"compas_two_years_reduced.csv": without_names(raw)})
    put(tmp_path, "compas_two_years_reduced.csv", without_names(raw))
    loaded = data.load("compas", tmp_path, validation=0.2, seed=7)
    numeric = ("age", "juv_fel_count", "decile_score", "juv_misd_count", "priors_count",
               "v_decile_score", "decile_score.1")  # fmt: skip
    rows = []
    for row in csv.DictReader(io.StringIO(plain.decode())):
        days = row["days_b_screening_arrest"]
        if not days or abs(float(days)) > 30 or row["is_recid"] == "-1":
            continue
        if row["c_charge_degree"] == "O" or row["score_text"] == "N/A":
            continue
        jail = 0.0
        if row["c_jail_in"]:
            start, end = (datetime.fromisoformat(row[f"c_jail_{way}"]) for way in ("in", "out"))
            jail = math.floor((end - start).total_seconds() / 86400)
        cells = [*(float(row[name]) for name in numeric), jail, row["race"], row["c_charge_degree"]]
        rows.append((cells, int(row["two_year_recid"]), int(row["race"] == "Caucasian")))
    order = np.random.RandomState(42).permutation(len(rows))
    rows, size = [rows[k] for k in order], round(0.8 * len(rows))

    def encode(cells: list[Any]) -> list[float]:
        found = list(cells[:8])
        for place in (8, 9):
            values = sorted({row[0][place] for row in rows[:size]})
            found += [float(cells[place] == value) for value in values]
        return found

    compare(loaded, rows[:size], rows[size:], encode, 0.2)
    assert loaded.group_names == ("non-Caucasian", "Caucasian")


# Images


def pixel(sample: Any) -> int:
    """The number of an image of one colour."""
    return round(float(sample[0, 0, 0]) / 4) + 64 * round(float(sample[1, 0, 0]) / 4)


@pytest.mark.parametrize("layout", ["official", "loose", "archive"])
def test_celeba(monkeypatch, tmp_path, layout):
    faces, folder = Faces(), tmp_path / "mine"
    if layout == "archive":
        name = stand_in(monkeypatch, "celeba", faces.archive())
        put(folder, name, faces.archive(), compress=True)
    else:
        faces.official(folder if layout == "loose" else folder / "celeba")
    loaded = pickle.loads(pickle.dumps(data.load_grouped("celeba", folder)))
    assert [pixel(loaded.samples[row]) for row in range(len(faces.names))] == [
        *range(len(faces.names))
    ]
    assert isinstance(loaded.samples, data.Vectors) == (layout == "archive")
    words = [("not attractive", "attractive"), ("mouth closed", "mouth open"), ("woman", "man"),
             ("not blond", "blond")]  # fmt: skip
    for part in loaded.cut(0).values():
        for row, label, group, shown in zip(
            part.rows, part.label, part.group, part.reported, strict=True
        ):
            number = faces.groups[row]
            names = [pair[number >> (3 - place) & 1] for place, pair in enumerate(words)]
            assert part.group_names[group] == ", ".join(names)
            assert part.reported_names[shown] == ", ".join(names[2:])
            assert loaded.class_names[label] == names[3]


def test_broken_celeba(tmp_path):
    folder = Faces().official(tmp_path / "celeba")
    text = folder / "list_attr_celeba.txt"
    good = text.read_text()
    for old, new, reason in (
        (
            "000001.jpg",
            "000099.jpg",
            r"1 of 72 images .* the first is img_align_celeba/000099\.jpg",
        ),
        (" Male ", " Mal ", "no column `Male`"),
        ("-1", " 0", "= 0; it must be one of -1, 1"),
    ):
        text.write_text(good.replace(old, new))
        with pytest.raises(data.WrongData, match=reason):
            data.load_grouped("celeba", tmp_path)
    text.write_text(good)
    (folder / "img_align_celeba/000002.jpg").write_bytes(image(1, (9, 9)))
    with pytest.raises(data.WrongData, match=r"000002\.jpg must have the size of the others, 20 x"):
        data.load_grouped("celeba", tmp_path).samples[1]


def test_camelyon17(tmp_path):
    patches = Patches()
    folder = patches.write(tmp_path)
    loaded = data.load_grouped("camelyon17", tmp_path)
    used = [row for row in patches.rows if row[6] in (1, 2) or row[7] == 0]
    seen = 0
    for name, part in loaded.cut(0).items():
        centers = {"train": (0, 3, 4), "validation": (1,), "test": (2,)}[name]
        for row, label, group in zip(part.rows, part.label, part.group, strict=True):
            own = used[row]
            assert own[6] in centers and own[4] == label
            assert part.group_names[group] == f"hospital {own[6]}, slide {own[5]}"
            assert pixel(loaded.samples[int(row)]) == patches.rows.index(own)
            seen += 1
        assert part.group_names == tuple(
            f"hospital {c}, slide {s}" for c, s in Patches.slides if c in centers
        ), "slide 4 comes before slide 11"
    assert seen == len(used) == 52
    (folder / "patches" / patches.path(used[0])).unlink()
    with pytest.raises(data.WrongData, match="1 of 52 images"):
        data.load_grouped("camelyon17", tmp_path)


def test_bdd100k(tmp_path):
    drives, classes = Drives(), ("clear", "overcast", "rainy", "foggy")
    drives.write(tmp_path / "mine")
    loaded = data.load_grouped("bdd100k", tmp_path / "mine", classes=classes)
    assert len(loaded.samples) == 49 and loaded.class_names == classes
    assert isinstance(loaded.samples, data.ImageFiles) and loaded.samples.size == SIDE
    parts = loaded.cut(0)
    for name, part in parts.items():
        for row, label in zip(part.rows, part.label, strict=True):
            path = loaded.samples.names[row].removeprefix("images/100k/")
            assert path.startswith("val/" if name == "test" else "train/")
            assert drives.weather(path) == classes[label]
    assert len(parts["test"]) == 16 and len(parts["validation"]) == 4


def test_broken_bdd100k(tmp_path):
    root = Drives().write(tmp_path / "mine")
    path = root / "bdd100k/labels/det_20/det_train.json"
    path.write_text("[{")
    with pytest.raises(data.WrongData, match=r"det_train\.json of .* is damaged"):
        data.load_grouped("bdd100k", root)
    path.unlink()
    with pytest.raises(data.WrongData, match=r"lacks labels/det_20/det_train\.json"):
        data.load_grouped("bdd100k", root)


def test_bdd100k_subset(monkeypatch, tmp_path):
    content = Drives().archive()
    folder = put(tmp_path, stand_in(monkeypatch, "bdd100k-subset", content), content, True)
    loaded = data.load_grouped("bdd100k-subset", folder, classes=("foggy", "clear"))
    assert len(loaded.samples) == 3 + 5 and isinstance(loaded.samples, data.Vectors)
    assert sum(len(part) for part in loaded.cut(1).values()) == 8


@pytest.mark.parametrize("layout", ["archive", "folder"])
def test_weather(monkeypatch, tmp_path, layout):
    members = photos()
    again = saved(picture(0), "JPEG", quality=60)  # the first of sunny, compressed once more
    members["weather/shine/zz.jpg"] = again
    if layout == "archive":
        name = stand_in(monkeypatch, "weather", tar(members))
        put(tmp_path, name, tar(members))
    else:
        members["weather/shine/note.txt"] = members["weather/shine/._1.jpg"] = b"no photo"
        members["weather/snowy/large.png"] = saved(picture(500, (300, 200)))
        unpack(members, tmp_path)
    loaded = data.load_grouped("weather", tmp_path, classes=("sunrise", "clear", "snowy"))
    counts = sum(part.label.bincount(minlength=3) for part in loaded.cut(0).values())
    assert isinstance(counts, torch.Tensor)
    assert counts.tolist() == [3, 11, 7 + (layout == "folder")], "zz.jpg repeats another photo"
    for row in range(len(loaded.samples)):
        assert torch.as_tensor(loaded.samples[row]).shape == (3, 128, 128)


# Texts


def test_sentiment(monkeypatch, tmp_path):
    rows = opinions()
    content = rows.to_csv(index=False).encode()
    folder = put(tmp_path, stand_in(monkeypatch, "sentiment", content), content, True)
    loaded = data.load_grouped("sentiment", folder)
    texts = zip(rows["title"], rows["text"], strict=True)
    wanted = [f"{title}. {text}" if title else text for title, text in texts]
    assert [loaded.samples[row] for row in range(36)] == wanted
    for part in loaded.cut(0).values():
        for row, group in zip(part.rows.tolist(), part.group, strict=True):
            word = ("negative", "positive")[int(rows["label"][row])]
            assert part.group_names[group] == f"{rows['domain'][row]}, {word}"


COUNTS = {**{f"U{n:02d}": 1 + n % 9 for n in range(60)}, "BIG1": 25, "BIG2": 31}


def test_amazon(monkeypatch, tmp_path):
    made = Reviews(COUNTS)
    folder = put(tmp_path, stand_in(monkeypatch, "amazon", made.content()), made.content())
    loaded = data.load_grouped("amazon", folder)
    assert (loaded.kind, loaded.summary, loaded.class_names[0]) == ("text", "tenth", "1 star")
    assert list(loaded.samples) == list(made.table["reviewText"])  # type: ignore[call-overload]
    part = loaded.cut(0)["train"]
    assert (made.table["overall"][part.rows.tolist()] - 1).tolist() == part.label.tolist()
    assert b"BIG1" not in pickle.dumps(loaded), "no report can name a user"


def test_amazon_wilds(tmp_path):
    made, users, root = Reviews(COUNTS), list(COUNTS), tmp_path / "amazon_v2.1"
    folder = made.wilds(root, {user: (0, 1, 3)[n % 3] for n, user in enumerate(users)})
    loaded = data.load_grouped("amazon", tmp_path)
    used = [row for row, split in enumerate(made.splits) if split in (0, 1, 3)]
    assert list(loaded.samples) == list(made.table["reviewText"][used])  # type: ignore[call-overload]
    for place, part in zip((0, 1, 3), loaded.cut(0).values(), strict=True):
        assert {made.splits[used[row]] for row in part.rows} == {place}
    with (folder / "splits/user.csv").open("a") as stream:
        stream.write("0\n")
    with pytest.raises(data.WrongData, match=r"must have \d+ rows, as many as splits/user\.csv"):
        data.load_grouped("amazon", tmp_path)
    made.splits[used[0]] = 1 if made.splits[used[0]] != 1 else 3
    (folder / "splits/user.csv").write_text("\n".join(map(str, ["split", *made.splits])) + "\n")
    with pytest.raises(data.WrongData, match="a group must belong to one part"):
        data.load_grouped("amazon", tmp_path)
