"""Cards of folders with subfolders as labels: PACS, AudioMNIST, AfriSenti."""

from __future__ import annotations

import numpy as np
import pytest
from fcco_experiments import data
from fcco_experiments.data.layouts import RATE, SIDE, spectrogram
from grouped_fixtures import image
from scenes_fixtures import unpack
from scipy.io import wavfile


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))


def test_pacs(tmp_path):
    cells = [(domain, kind) for domain in ("art_painting", "cartoon", "photo", "sketch")
             for kind in ("dog", "house")]  # fmt: skip
    images = {f"{domain}/{kind}/{n}.jpg": image(8 * n + k)
              for k, (domain, kind) in enumerate(cells) for n in range(5)}  # fmt: skip
    unpack({**images, "photo/dog/.DS_Store": b"", "photo/dog/notes.txt": b""}, tmp_path / "PACS")
    loaded = data.load_grouped("pacs", tmp_path)
    assert len(loaded.samples) == 40 and loaded.class_names == ("dog", "house")
    for part in loaded.cut(0).values():
        assert part.group_names == tuple(map(", ".join, cells))
        for row, label, group in zip(part.rows, part.label, part.group, strict=True):
            cell = round(float(np.asarray(loaded.samples[int(row)])[0, 0, 0]) / 4) % 8
            assert group == cell and label == cell % 2


@pytest.mark.parametrize("tone", [200.0, 1000.0, 3000.0])
def test_a_tone_is_a_line_at_its_pitch_while_it_sounds(tone):
    """Bands are triangles on the mel scale, 2595 log10(1 + f / 700), from 0 to 4,000 Hz."""
    rate = 48_000
    wave = np.sin(2 * np.pi * tone * np.arange(rate) / rate) * 10_000
    wave[: rate // 2] = 0
    found = spectrogram(wave.astype(np.int16), rate)
    assert found.shape == (SIDE, SIDE) and found.max() == 255
    middles = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), SIDE + 2)[1:-1]
    nearest = np.abs(middles - 2595 * np.log10(1 + tone / 700)).argmin()
    assert abs(SIDE - 1 - found[:, 3 * SIDE // 4].argmax() - nearest) <= 1
    assert not found[:, : SIDE // 2 - 2].any()
    np.testing.assert_array_equal(spectrogram(wave[rate // 4 :] / 4, rate)[:, -1], 0)


def test_audiomnist(tmp_path):
    root, random = tmp_path / "AudioMNIST", np.random.RandomState(0)
    for speaker, digit, take in np.ndindex(5, 3, 2):
        folder = root / f"data/{speaker + 1:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        wave = random.randint(-9000, 9000, 20_000 + 5_000 * digit).astype(np.int16)
        wavfile.write(folder / f"{digit}_{speaker + 1:02d}_{take}.wav", 48_000, wave)
    loaded = data.load_grouped("audiomnist", tmp_path)
    assert loaded.kind == "image" and len(loaded.samples) == 30
    names = []
    for part in loaded.cut(0).values():
        names += part.group_names
        assert np.bincount(part.group).tolist() == [6] * len(part.group_names)
        for row, label in zip(part.rows, part.label, strict=True):
            longest = (np.asarray(loaded.samples[int(row)][0]).max(0) > 0).sum()
            assert label == round((longest / SIDE * 48_000 - 20_000) / 5_000)
    assert sorted(names) == ["01", "02", "03", "04", "05"], "each speaker is in one part"
    for path in root.glob("data/*/*.wav"):
        path.write_bytes(b"")
    assert data.load_grouped("audiomnist", tmp_path).fingerprint == loaded.fingerprint, "kept"


def test_afrisenti(tmp_path):
    rows = "tweet\tlabel\n" + "".join(
        f'she said "{n}\t{label}\n' for n in range(4) for label in ("negative", "positive")
    )
    rows += "NA\tneutral\n"
    files = {f"data/{language}/{part}.tsv": rows.encode()
             for language in ("amh", "yor") for part in ("train", "dev", "test")}  # fmt: skip
    unpack({**files, "data/orm/test.tsv": rows.encode()}, tmp_path / "afrisent-semeval-2023")
    loaded = data.load_grouped("afrisenti", tmp_path)
    assert loaded.class_names == ("negative", "neutral", "positive")
    for part in loaded.cut(0).values():
        assert part.group_names == ("amh", "yor") and len(part) == 18
        texts = {str(loaded.samples[int(row)]) for row in part.rows}
        assert texts == {'she said "0', 'she said "1', 'she said "2', 'she said "3', "NA"}
