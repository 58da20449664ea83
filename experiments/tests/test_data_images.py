"""Images and pairs: decoding within limits, copies of one photo, folders, archives and tables."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fcco_experiments import data
from fcco_experiments.data import PairedData, WrongData, images, read_pairs
from fcco_experiments.data.images import decode, distinct_rows
from PIL import Image
from scenes_fixtures import picture, saved, tar, unpack


def huge_png() -> bytes:
    """A few bytes that say they hold 100,000 x 100,000 pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def encoded(kind: str) -> bytes:
    stream = io.BytesIO()
    picture(0, (8, 8)).save(stream, kind)
    return stream.getvalue()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (huge_png(), "pixels"),
        (encoded("EPS"), "cannot identify"),  # would start Ghostscript
        (encoded("TIFF"), "cannot identify"),
        (encoded("JPEG")[:300], "Truncated"),
        (b"", "cannot identify"),
    ],
    ids=["bomb", "eps", "tiff", "truncated", "empty"],
)
def test_unsafe_and_broken_images_are_refused(tmp_path, content, reason):
    path = tmp_path / "own.jpg"
    path.write_bytes(content)
    for source in (path, content):
        with pytest.raises(WrongData, match=rf"The image own\.jpg cannot be decoded .*{reason}"):
            decode(source, "own.jpg")


def test_the_limit_on_pixels(monkeypatch):
    content = encoded("PNG")
    monkeypatch.setattr(images, "PIXELS", 63)
    with pytest.raises(WrongData, match="its 8 x 8 are over 63 pixels"):
        decode(content, "a.png")
    monkeypatch.setattr(images, "PIXELS", 64)
    assert decode(content, "a.png").shape == (3, 8, 8)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "WEBP"])
def test_formats_that_are_read(kind):
    wanted = np.asarray(picture(0, (8, 8)).convert("RGB")).transpose(2, 0, 1)
    found = decode(encoded(kind), "").numpy().astype(int)
    assert abs(found - wanted).max() <= (0 if kind in ("PNG", "BMP") else 160)
    grey = saved(Image.fromarray(np.full((4, 4), 7, np.uint8)))
    assert decode(grey, "").tolist() == [[[7] * 4] * 4] * 3


def test_images_are_turned_scaled_and_cut():
    """Wide and high images lose their edges; the camera's turn is taken into account."""
    stripes = np.zeros((60, 180, 3), np.uint8)
    stripes[:, :60, 0], stripes[:, 60:120, 1], stripes[:, 120:, 2] = 250, 250, 250
    for turned in (stripes, np.rot90(stripes)):
        found = decode(saved(Image.fromarray(turned)), "", (128, 128), fit=True)
        assert torch.equal(found[1, 3:-3, 3:-3], torch.full((122, 122), 250).byte())
    half = np.zeros((100, 100, 3), np.uint8)
    half[:50] = 250
    exif = Image.Exif()
    exif[0x0112] = 6  # turn the picture by 90 degrees to the right
    found = decode(saved(Image.fromarray(half), exif=exif), "", (64, 64), fit=True)
    columns = found.float().mean((0, 1))
    assert columns[:28].max() < 10 and columns[-28:].min() > 240, "its top went to the right"


def test_distinct_rows_against_a_loop(monkeypatch):
    """Also where a is near b and b near c: b goes, so c stays. Blocks do not matter."""
    random = np.random.default_rng(0)
    base = random.integers(60, 180, size=(4, 3, 32, 32))
    shift = random.integers(-8, 9, size=40)
    pixels = (base[random.integers(0, 4, size=40)] + shift[:, None, None, None]).astype(np.uint8)
    small = pixels.astype(float).mean(1).reshape(40, 16, 2, 16, 2).mean((2, 4)).reshape(40, 256)
    for tolerance in (0.5, 2.2, 4.5):
        wanted: list[int] = []
        for row in range(40):
            near = (np.sqrt(((small[row] - small[own]) ** 2).mean()) for own in wanted)
            wanted += [] if any(distance <= tolerance for distance in near) else [row]
        for block in (3, 1024):
            monkeypatch.setattr(images, "BLOCK", block)
            found = distinct_rows(data.Vectors(torch.from_numpy(pixels)), tolerance).tolist()
            assert found == wanted and 4 <= len(found) < 40


# Pairs

SIZE = (20, 24)
WORDS = ("Fog on a road", "a bridge,\nin fog", "mist", "Straße im Nebel", "haze", 'a "thick" fog')
FORMS = ("jpg", "png", "webp", "JPEG", "jpg", "png")
KINDS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "JPEG": "JPEG"}


def shot(number: int) -> bytes:
    return saved(picture(number, (40 + 3 * number, 90 - 8 * number)), KINDS[FORMS[number]])


def pairs() -> dict[str, bytes]:
    """As img2dataset writes them; the caption of every third one is in its json only."""
    found: dict[str, bytes] = {"00000_stats.json": b'{"count": 6}', "00000.parquet": b"PAR1"}
    for number, words in enumerate(WORDS):
        stem = f"0000{number // 4}/{number:09d}"
        found[f"{stem}.{FORMS[number]}"] = shot(number)
        other = "another caption" if number % 3 else words
        found[f"{stem}.json"] = json.dumps({"caption": other}).encode()
        if number % 3:
            found[f"{stem}.txt"] = b"\xef\xbb\xbf" + f"{words}\n".encode()
    return found


def check(found: PairedData, numbers: tuple[int, ...] = tuple(range(6))) -> None:
    found = pickle.loads(pickle.dumps(found))
    assert found.captions == tuple(WORDS[number] for number in numbers)
    assert len(found) == len(found.samples) == len(numbers)
    for row, number in enumerate(numbers):
        assert torch.equal(found.samples[row], decode(shot(number), "", SIZE, fit=True))


def test_pairs_in_a_folder(tmp_path):
    folder = unpack({**pairs(), "00000/._000000001.jpg": b"what macOS leaves"}, tmp_path)
    check(read_pairs(folder, size=SIZE))
    before = read_pairs(folder, size=SIZE).fingerprint
    (folder / "00000/000000001.txt").write_text("other")
    assert read_pairs(folder, size=SIZE).fingerprint != before


def test_pairs_in_archives(tmp_path):
    for number in (0, 1):
        own = {k: v for k, v in pairs().items() if k.startswith(f"0000{number}/")}
        unpack({f"{number:05d}.tar": tar(own)}, tmp_path)
    check(read_pairs(tmp_path, size=SIZE))
    check(read_pairs(tmp_path / "00001.tar", size=SIZE), (4, 5))
    content = (tmp_path / "00001.tar").read_bytes()
    for spoilt in (b"no archive" * 100, content[: len(content) // 2]):
        (tmp_path / "00001.tar").write_bytes(spoilt)
        with pytest.raises(WrongData, match=r"00001\.tar (is no plain tar|ends too early)"):
            read_pairs(tmp_path, size=SIZE)


def listed(folder: Path, name: str, header: tuple[str, str], **options) -> Path:
    files = {f"images/{n}.{FORMS[n]}": shot(n) for n in range(6)}
    unpack(files, folder)
    frame = pd.DataFrame({"key": range(6), header[0]: list(files), header[1]: list(WORDS)})
    frame.to_csv(folder / name, index=False, **options)
    return folder / name


@pytest.mark.parametrize(
    ("name", "header", "options"),
    [
        ("pairs.csv", ("filepath", "title"), {}),
        ("pairs.tsv", ("image", "caption"), {"sep": "\t"}),
        ("open_clip.csv", ("path", "text"), {"sep": "\t", "encoding": "utf-8-sig"}),
    ],
)
def test_pairs_in_a_table(tmp_path, name, header, options):
    check(read_pairs(listed(tmp_path, name, header, **options), size=SIZE))


def test_wrong_pairs(tmp_path):
    path = listed(tmp_path / "t", "t.csv", ("filepath", "title"))
    text = path.read_text()
    for old, new, reason in (
        ("images/2", "images/9", r"images/9\.webp is missing"),
        ("mist", " ", r"images/2\.webp has no caption"),
        ("title", "words", r"must have a column title or caption or text; it has key, filepath"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(WrongData, match=reason):
            read_pairs(path)
    folder = unpack({"a.txt": b"fog", "b.jpg": shot(0)}, tmp_path / "gaps")
    with pytest.raises(WrongData, match=r"a\.txt has no image, .*b\.jpg has no caption"):
        read_pairs(folder)
    (tmp_path / "empty").mkdir()
    for place, reason in (("empty", "it has none"), ("nowhere.zip", "must be a folder, a .tar")):
        with pytest.raises(WrongData, match=reason):
            read_pairs(tmp_path / place)
