"""Recordings as pictures: log-mel spectrograms."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

RATE, WINDOW, SIDE, RANGE = 8_000, 256, 32, 80.0  # Hz, samples, pixels, decibels


def _mel(bands: int) -> np.ndarray:
    """Triangles that are equally wide on the mel scale, (bands, WINDOW / 2 + 1)."""
    edges = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), bands + 2)
    hertz = 700 * (10 ** (edges / 2595) - 1)
    at = np.arange(WINDOW // 2 + 1) * RATE / WINDOW
    left, middle, right = (hertz[k : k + bands, None] for k in range(3))
    return np.minimum((at - left) / (middle - left), (right - at) / (right - middle)).clip(0)


def spectrogram(wave: np.ndarray, rate: int) -> np.ndarray:
    """The middle second of a recording as uint8 (SIDE, SIDE): low tones below, time to the right.

    White is the loudest of the recording, black is `RANGE` decibels below; shorter recordings are
    put in the middle of silence.
    """
    from scipy.signal import resample_poly

    found = resample_poly(wave.astype(np.float64), RATE, rate)
    found = found[max(0, (len(found) - RATE) // 2) :][:RATE]
    before = (RATE - len(found)) // 2
    found = np.pad(found, (before + WINDOW // 2, RATE - len(found) - before + WINDOW // 2))
    starts = np.linspace(0, RATE, SIDE, dtype=int)
    frames = np.stack([found[start : start + WINDOW] for start in starts])
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW))) ** 2 @ _mel(SIDE).T
    decibels = 10 * np.log10(np.maximum(power, 1e-12))
    scaled = (decibels - decibels.max() + RANGE).clip(0) * 255 / RANGE
    return np.rint(scaled).astype(np.uint8).T[::-1]


def picture(path: Any) -> bytes:
    """The spectrogram of a wav file as a PNG file."""
    from PIL import Image
    from scipy.io import wavfile

    rate, wave = wavfile.read(path)
    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(spectrogram(wave, rate))).save(content, "PNG")
    return content.getvalue()
