"""Images: decoding within limits, copies of one photo."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from fcco_experiments import data
from fcco_experiments.data import WrongData
from fcco_experiments.data.samples import decode, distinct_rows
from PIL import Image
from scenes_fixtures import picture, saved


def encoded(kind: str) -> bytes:
    stream = io.BytesIO()
    picture(0, (8, 8)).save(stream, kind)
    return stream.getvalue()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (encoded("EPS"), "cannot identify"),  # would start Ghostscript
        (encoded("TIFF"), "cannot identify"),
        (encoded("JPEG")[:300], "Truncated"),
        (b"", "cannot identify"),
    ],
    ids=["eps", "tiff", "truncated", "empty"],
)
def test_unsafe_and_broken_images_are_refused(tmp_path, content, reason):
    path = tmp_path / "own.jpg"
    path.write_bytes(content)
    for source in (path, content):
        with pytest.raises(WrongData, match=rf"The image own\.jpg cannot be decoded .*{reason}"):
            decode(source, "own.jpg")


def test_images_that_would_fill_the_memory_are_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 31)
    with pytest.raises(WrongData, match=r"The image a\.png .* \(64 pixels\) exceeds limit"):
        decode(encoded("PNG"), "a.png")


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


def test_distinct_rows_against_a_loop():
    """Also where a is near b and b near c: b goes, so c stays."""
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
        found = distinct_rows(data.Vectors(torch.from_numpy(pixels)), tolerance).tolist()
        assert found == wanted and 4 <= len(found) < 40
