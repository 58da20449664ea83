"""Pairs of images and captions: folders, archives, tables."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fcco_experiments.data import PairedData, Vectors, WrongData, read_pairs
from fcco_experiments.data.images import decode
from PIL import Image
from scenes_fixtures import picture, saved, tar, unpack

SIZE = (20, 24)
WORDS = {  # caption by number; the numbers are in no order of forms
    0: "Fog on a road", 1: "a bridge,\nin fog", 2: "mist", 3: "Straße im Nebel", 4: "haze",
    5: 'a "thick" fog',
}  # fmt: skip
FORMS = {0: "jpg", 1: "png", 2: "webp", 3: "JPEG", 4: "jpg", 5: "png"}
KINDS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "JPEG": "JPEG"}


def image(number: int) -> bytes:
    size = (40 + 3 * number, 90 - 8 * number)
    return saved(picture(number, size), KINDS[FORMS[number]])


def members() -> dict[str, bytes]:
    """As img2dataset writes them; the caption of every third one is in its json only."""
    found: dict[str, bytes] = {"00000_stats.json": b'{"count": 6}', "00000.parquet": b"PAR1"}
    for number, words in WORDS.items():
        stem = f"0000{number // 4}/{number:09d}"
        found[f"{stem}.{FORMS[number]}"] = image(number)
        other = "another caption" if number % 3 else words
        found[f"{stem}.json"] = json.dumps({"caption": other, "status": "success"}).encode()
        if number % 3:
            found[f"{stem}.txt"] = f"{words}\n".encode()
    return found


def check(found: PairedData, numbers: tuple[int, ...] = tuple(WORDS)) -> None:
    assert found.captions == tuple(WORDS[number] for number in numbers)
    assert len(found) == len(found.samples) == len(numbers)
    for row, number in enumerate(numbers):
        sample = found.samples[row]
        assert isinstance(sample, torch.Tensor) and sample.dtype == torch.uint8
        assert torch.equal(sample, decode(image(number), "", SIZE, fit=True))
        assert sample.shape == (3, *SIZE)


def test_folder(tmp_path):
    unpack(members(), tmp_path)
    found = read_pairs(tmp_path, size=SIZE)
    check(found)
    assert found.facts == {"kind": "folder", "pairs": "6", "damaged pairs left out": "0"}
    check(read_pairs(str(tmp_path), size=SIZE, limit=4), (0, 1, 2, 3))
    check(pickle.loads(pickle.dumps(found)))


def shards(folder: Path) -> Path:
    for number in (0, 1):
        own = {k: v for k, v in members().items() if k.startswith(f"0000{number}/")}
        inner = {name.partition("/")[2]: content for name, content in own.items()}
        unpack({f"{number:05d}.tar": tar(inner)}, folder)
    return folder


def test_archives(tmp_path):
    folder = shards(tmp_path)
    unpack({"00000_stats.json": b"{}", "00000.parquet": b"PAR1"}, folder)
    found = read_pairs(folder, size=SIZE)
    check(found)
    assert found.facts["kind"] == "archives"
    check(read_pairs(folder / "00001.tar", size=SIZE), (4, 5))
    check(read_pairs(folder, size=SIZE, limit=5), (0, 1, 2, 3, 4))
    check(pickle.loads(pickle.dumps(found)))


def table(folder: Path, name: str, header: tuple[str, ...], delimiter: str = ",") -> Path:
    for number in WORDS:
        unpack({f"images/{number}.{FORMS[number]}": image(number)}, folder)
    with (folder / name).open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerow(header)
        for number, words in WORDS.items():
            writer.writerow([number, f"images/{number}.{FORMS[number]}", 1, words])
    return folder / name


@pytest.mark.parametrize(
    ("name", "delimiter"), [("pairs.csv", ","), ("pairs.tsv", "\t"), ("open_clip.csv", "\t")]
)
@pytest.mark.parametrize(
    "header", [("", "filepath", "slabel", "title"), ("text ", "image", "key", "caption")]
)
def test_text_tables(tmp_path, name, delimiter, header):
    path = table(tmp_path, name, header, delimiter)
    found = read_pairs(path, size=SIZE)
    check(found)
    assert found.facts["kind"] == "table"
    check(read_pairs(path, size=SIZE, limit=2), (0, 1))


def test_marks_of_captions_and_files_of_macos(tmp_path):
    folder = unpack(members(), tmp_path / "pairs")
    for path in folder.rglob("*.txt"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        (path.parent / f"._{path.stem}.jpg").write_bytes(b"no image")
    check(read_pairs(folder, size=SIZE))


def test_mark_at_the_beginning_of_a_table(tmp_path):
    path = table(tmp_path, "a.csv", ("text ", "image", "key", "caption"))
    path.write_bytes(b"\xef\xbb\xbfimage,caption\nimages/2.webp,mist\n")  # as Excel writes it
    check(read_pairs(path, size=SIZE), (2,))


def test_first_name_of_a_column_counts(tmp_path):
    check(read_pairs(table(tmp_path, "a.csv", ("text", "filepath", "file", "title")), size=SIZE))


def test_images_are_fitted(tmp_path):
    """The shorter side decides; what stands over is cut off on both sides."""
    wide = np.zeros((30, 120, 3), np.uint8)
    wide[:, 45:75] = 250
    unpack({"a.png": saved(Image.fromarray(wide)), "a.txt": b"a"}, tmp_path)
    unpack({"b.png": saved(Image.fromarray(np.rot90(wide))), "b.txt": b"b"}, tmp_path)
    found = read_pairs(tmp_path, size=(60, 60))
    for row in range(2):
        sample = found.samples[row]
        assert isinstance(sample, torch.Tensor) and sample[:, 3:-3, 3:-3].min() == 250


def spoil(folder: Path, kind: str) -> Path:
    """Six pairs, of which the third is as it should not be."""
    own = members()
    stem = "00000/000000002"
    if kind == "no image":
        del own[f"{stem}.webp"]
    elif kind == "no caption":
        del own[f"{stem}.txt"], own[f"{stem}.json"]
    elif kind == "blank caption":
        own[f"{stem}.txt"] = b" \n"
    elif kind == "caption is no text":
        own[f"{stem}.txt"] = b"\xff\xfe"
    elif kind == "caption is no json":
        del own[f"{stem}.txt"]
        own[f"{stem}.json"] = b"[1"
    elif kind == "json without caption":
        del own[f"{stem}.txt"]
        own[f"{stem}.json"] = b'["caption"]'
    elif kind == "json with fields for a caption":
        del own[f"{stem}.txt"]
        own[f"{stem}.json"] = b'{"caption": {"en": "fog"}}'
    elif kind == "endless json":
        del own[f"{stem}.txt"]
        own[f"{stem}.json"] = b'{"caption": ' + b"[" * 200_000
    elif kind == "cut image":
        own[f"{stem}.webp"] = own[f"{stem}.webp"][:-200]
    else:
        own[f"{stem}.webp"] = b"no image"
    return unpack(own, folder)


CAPTIONS = (
    *("no caption", "blank caption", "caption is no text", "caption is no json"),
    *("json without caption", "json with fields for a caption", "endless json"),
)


@pytest.mark.parametrize("kind", ["no image", *CAPTIONS, "cut image", "bad image"])
def test_damaged_pairs(tmp_path, kind):
    folder = spoil(tmp_path, kind)
    if kind in ("cut image", "bad image"):
        found = read_pairs(folder, size=SIZE)  # not yet decoded
        with pytest.raises(WrongData, match=r"000000002\.webp cannot be decoded"):
            found.samples[2]
        assert found.samples[3] is not None
    else:
        reason = r"1 of 6 pairs are damaged: .*000000002\.\w+ has no"
        with pytest.raises(WrongData, match=reason):
            read_pairs(folder, size=SIZE)
    found = read_pairs(folder, size=SIZE, on_damaged="skip")
    check(found, (0, 1, 3, 4, 5))
    assert found.facts["damaged pairs left out"] == "1"
    check(read_pairs(folder, size=SIZE, on_damaged="skip", limit=3), (0, 1, 3))


def test_damaged_archives(tmp_path):
    folder = shards(tmp_path)
    own = {k: v for k, v in members().items() if k.startswith("00001/")}
    own["00001/000000004.jpg"] = b"no image"
    (folder / "00001.tar").write_bytes(tar(own))
    found = read_pairs(folder, size=SIZE)
    with pytest.raises(WrongData, match=r"00001/000000004\.jpg in .*00001\.tar cannot be decoded"):
        found.samples[4]
    check(read_pairs(folder, size=SIZE, on_damaged="skip"), (0, 1, 2, 3, 5))
    place = tar(own).index(b"00001/000000005.png")  # of the header of a file
    for end in (place, place + 100, place + 700, 0, 100):
        (folder / "00001.tar").write_bytes(tar(own)[:end])
        for mode in ("error", "skip"):
            with pytest.raises(WrongData, match=r"00001\.tar is no plain tar archive"):
                read_pairs(folder, size=SIZE, on_damaged=mode)
    (folder / "00001.tar").write_bytes(gzip.compress(tar(own)))
    with pytest.raises(WrongData, match=r"00001\.tar is no plain tar archive"):
        read_pairs(folder, size=SIZE)


def test_damaged_tables(tmp_path):
    path = table(tmp_path, "pairs.csv", ("", "path", "", "text"))
    (tmp_path / "images/1.png").unlink()
    (tmp_path / "images/4.jpg").write_bytes(b"no image")
    with pytest.raises(WrongData, match=r"1 of 6 pairs .*images/1\.png is missing"):
        read_pairs(path, size=SIZE)
    found = read_pairs(path, size=SIZE, on_damaged="skip")
    check(found, (0, 2, 3, 5))
    assert found.facts["damaged pairs left out"] == "2"
    for content, reason in (
        ("path,label\na,b\n", "must have a column title, caption or text; its header is path, lab"),
        ("url,text\na,b\n", "must have a column filepath, path, image or file; its header is url"),
        ("", "its header is empty"),
        ("path,text\n", "has no pair"),
        ("path,text\na\n", "line 2 .* must have 2 cells"),
        ("path,text\nimages/0.jpg,\n", r"images/0\.jpg has no caption"),
        ("path,text\n,words\n", "is missing"),
    ):
        path.write_text(content)
        with pytest.raises(WrongData, match=reason):
            read_pairs(path, size=SIZE)
    path.write_bytes(b"path,text\n\xff\xff,a\n")
    with pytest.raises(WrongData, match="is no text"):
        read_pairs(path, size=SIZE)


def test_wrong_calls(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_pairs(tmp_path / "nothing")
    with pytest.raises(WrongData, match="has no pair"):
        read_pairs(tmp_path)
    (tmp_path / "a.zip").write_bytes(b"")
    with pytest.raises(WrongData, match=r"must be a folder, a \.tar archive, or a table"):
        read_pairs(tmp_path / "a.zip")
    wrong: list[dict[str, Any]] = [{"size": (0, 4)}, {"limit": -1}, {"on_damaged": "ignore"}]
    for options in wrong:
        with pytest.raises(ValueError, match="read_pairs"):
            read_pairs(tmp_path, **options)
    with pytest.raises(ValueError, match="1 images and 2 captions"):
        PairedData(Vectors(torch.zeros(1, 3, 2, 2)), ("a", "b"), "")


def test_fingerprint(tmp_path):
    """The same pairs in another place are the same; other words, images or sizes are not."""
    one, two = (unpack(members(), tmp_path / name) for name in ("one", "two"))
    first = read_pairs(one, size=SIZE).fingerprint
    assert read_pairs(two, size=SIZE).fingerprint == first
    others = {read_pairs(two, size=(8, 8)).fingerprint}
    others.add(read_pairs(two, size=SIZE, limit=5).fingerprint)
    (two / "00000/000000001.txt").write_text("other words")
    others.add(read_pairs(two, size=SIZE).fingerprint)
    unpack({"00000/000000001.png": saved(picture(9, (50, 50)))}, two)
    others.add(read_pairs(two, size=SIZE).fingerprint)
    assert first not in others and len(others) == 4


# --- parquet, with stand-ins for the packages, and with the packages where they are --------------

COLUMNS = {"file": [f"images/{n}.{FORMS[n]}" for n in WORDS], "caption": list(WORDS.values())}


@pytest.mark.parametrize("package", ["pyarrow", "pandas"])
def test_parquet_through_packages(monkeypatch, tmp_path, package):
    path = table(tmp_path, "pairs.parquet", ("", "", "", ""))
    arrow, pandas = ModuleType("pyarrow.parquet"), ModuleType("pandas")
    columns = {**COLUMNS, "url": [None] * 6}
    arrow.__dict__["read_schema"] = lambda _: SimpleNamespace(names=list(columns))
    arrow.__dict__["read_table"] = lambda _, columns: SimpleNamespace(
        to_pydict=lambda: {name: COLUMNS[name] for name in columns}
    )

    class Frame(dict):
        columns = property(lambda self: list(self))

    pandas.__dict__["read_parquet"] = lambda _: Frame(
        {name: SimpleNamespace(tolist=lambda own=own: own) for name, own in columns.items()}
    )
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", arrow if package == "pyarrow" else None)
    monkeypatch.setitem(sys.modules, "pandas", pandas if package == "pandas" else None)
    found = read_pairs(path, size=SIZE)
    check(found)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="needs the package pyarrow, or pandas"):
        read_pairs(path, size=SIZE)


def test_real_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = table(tmp_path, "pairs.parquet", ("", "", "", ""))
    parquet.write_table(pyarrow.table(COLUMNS), path)
    check(read_pairs(path, size=SIZE))
    path.write_bytes(b"PAR1")
    with pytest.raises(WrongData, match="cannot be read"):
        read_pairs(path)
