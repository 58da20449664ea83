"""Readers of the files that the cards name: each gives one table."""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pandas as pd

from fcco._files import atomic

from .grouped import PARTS
from .samples import SUFFIXES, scaffold, scaffold_split
from .sources import Sighting, WrongData, cache_folder, digest, members
from .table import Frame, Table, read_frame

Files = Path | dict[str, bytes]
"""A folder, or the files of an archive by path."""


def _files(found: Sequence[Sighting]) -> Files:
    (entry,) = found
    return members(entry.detail, entry.content) if entry.content else Path(entry.detail)


def _read(files: Files, name: str) -> bytes:
    return files[name] if isinstance(files, dict) else (files / name).read_bytes()


def _frame(entry: Sighting, **options: Any) -> Frame:
    return read_frame(io.BytesIO(entry.content), entry.detail, **options)


# --- Features ------------------------------------------------------------------------------------

ADULT = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)


def adult(found: Sequence[Sighting]) -> Table:
    """The official training and test file; the latter begins with a comment."""
    options = {"header": None, "names": ADULT, "skipinitialspace": True, "comment": "|"}
    frames = [_frame(entry, **options).assign(split=i * 2) for i, entry in enumerate(found)]
    frame = pd.concat(frames, ignore_index=True)
    # The test file ends its labels with a dot.
    return Table(
        found[0].detail,
        frame.assign(income=frame["income"].str.rstrip("."), split=frame["split"].astype(str)),
    )


COMPAS_TEST_SEED, COMPAS_TRAIN_SHARE = 42, 0.8


def compas(found: Sequence[Sighting]) -> Table:
    """The rows of ProPublica's filter in a fixed random order, the first 80 % to train on.

    The filter: the charge is at most 30 days from the screening, the outcome is known, the charge
    is no ordinary traffic offence, and there is a score.
    """
    frame = _frame(found[0])
    days: Frame = pd.to_numeric(frame["days_b_screening_arrest"])
    frame = frame[
        (days.abs() <= 30)
        & (frame["is_recid"] != "-1")
        & (frame["c_charge_degree"] != "O")
        & frame["score_text"].notna()
        & (frame["score_text"] != "N/A")
    ]
    order = np.random.RandomState(COMPAS_TEST_SEED).permutation(len(frame))
    size = round(COMPAS_TRAIN_SHARE * len(frame))
    split = np.where(np.arange(len(frame)) < size, "train", "test")
    return Table(found[0].detail, frame.iloc[order].assign(split=split))


# --- Texts ---------------------------------------------------------------------------------------


def sentiment(found: Sequence[Sighting]) -> Table:
    """A text is its title, where it has one, a full stop, and its body."""
    frame = _frame(found[0], usecols=["domain", "label", "title", "text"])
    title, body = frame["title"].fillna(""), frame["text"].fillna("")
    return Table(found[0].detail, frame.assign(text=body.where(title == "", title + ". " + body)))


REVIEWS = ["reviewerID", "overall", "reviewText"]
WILDS_SPLITS = {"0": "train", "1": "validation", "3": "test"}  # others are not used


def reviews(found: Sequence[Sighting]) -> Table:
    """A file like reviews.csv of Amazon-WILDS, or its official folder with the part of each."""
    (entry,) = found
    root = Path(entry.detail)
    if entry.content:
        frame = _frame(entry, usecols=REVIEWS)
    else:
        frame = read_frame(root / "reviews.csv", str(root / "reviews.csv"), usecols=REVIEWS)
        parts = read_frame(root / "splits/user.csv", str(root / "splits/user.csv"))["split"]
        if len(frame) != len(parts):
            raise WrongData(
                f"{root}: reviews.csv must have {len(parts):,} rows, as many as splits/user.csv, "
                f"but has {len(frame):,}."
            )
        frame = frame.assign(split=parts.map(WILDS_SPLITS))
        frame = frame[frame["split"].notna()]
    return Table(entry.detail, frame.assign(reviewText=frame["reviewText"].fillna("")))


def toxicity(found: Sequence[Sighting]) -> Table:
    """Comments, toxic where at least half of the votes say so."""
    frame, votes = (_frame(entry, sep="\t") for entry in found)
    share = votes["toxicity"].astype(int).groupby(votes["rev_id"]).mean()
    text = frame["comment"].str.replace(r"(NEWLINE|TAB)_TOKEN", " ", regex=True)
    toxic = (frame["rev_id"].map(share) >= 0.5).astype(int).astype(str)
    return Table(found[0].detail, frame.assign(text=text, toxic=toxic))


def afrisenti(found: Sequence[Sighting]) -> Table:
    """One csv file, or the official folder: data/LANGUAGE/{train,dev,test}.tsv."""
    if found[0].content:
        return Table(found[0].detail, _frame(found[0]))
    root, frames = Path(found[0].detail), []
    for path in sorted(root.glob("data/*/*.tsv")):
        if (path.parent / "train.tsv").is_file():  # some languages have tweets to test on alone
            frame = read_frame(path, str(path), sep="\t", quoting=csv.QUOTE_NONE)
            frame = frame.rename(columns={"tweet": "text"})
            frames.append(frame.assign(language=path.parent.name, split=path.stem))
    return Table(str(root), pd.concat(frames, ignore_index=True))


def hiv(found: Sequence[Sighting]) -> Table:
    """Molecules as SMILES, split 80:10:10 by scaffold; the parts are kept in the cache."""
    frame = _frame(found[0])
    kept = cache_folder() / "hiv" / f"scaffolds-{digest(found[0].content)[:16]}.json"
    split = None
    with suppress(OSError, ValueError):
        split = json.loads(kept.read_text())
    if split is None:
        split = scaffold_split([scaffold(smiles) for smiles in frame["smiles"]]).tolist()
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(split))
    return Table(found[0].detail, frame.assign(split=[PARTS[place] for place in split]))


# --- Lists ---------------------------------------------------------------------------------------


def lambdarank(found: Sequence[Sighting]) -> Table:
    """Files in the LibSVM format, with the number of rows of each query beside them."""
    files, frames = _files(found), []
    for split in ("train", "test"):
        frame = libsvm(_read(files, f"rank.{split}").decode(), f"rank.{split}")
        sizes = np.array(_read(files, f"rank.{split}.query").decode().split(), dtype=int)
        if sizes.sum() != len(frame):
            raise WrongData(
                f"rank.{split}.query of {found[0].detail} must count {len(frame):,} rows but "
                f"counts {sizes.sum():,}."
            )
        query = [f"{split} {number + 1}" for number in np.repeat(np.arange(len(sizes)), sizes)]
        frames.append(frame.assign(query=query, split=split))
    # A feature that is 0 in a whole file may be missing in it.
    frame = pd.concat(frames, ignore_index=True).fillna("0")
    return Table(found[0].detail, frame)


def libsvm(content: str, where: str) -> Frame:
    """Rows `label number:value ...` as cells of text; what a row does not name is 0."""
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        label, *cells = line.partition("#")[0].split()
        pairs = [cell.partition(":") for cell in cells]
        if not all(name.isdigit() and value for name, _, value in pairs):
            raise WrongData(f"{where}: line {number} is not `label number:value ...`.")
        rows.append({"relevance": label, **{f"x{int(name)}": value for name, _, value in pairs}})
    frame = pd.DataFrame(rows, dtype=str).fillna("0")
    features = sorted(
        (name for name in frame if name != "relevance"), key=lambda name: int(name[1:])
    )
    return frame[["relevance", *features]]


# --- Images --------------------------------------------------------------------------------------


def celeba(found: Sequence[Sighting]) -> Table:
    """The attributes of the official list, with the images."""
    files, name = _files(found), f"list_attr_celeba.txt of {found[0].detail}"
    content = io.BytesIO(_read(files, "list_attr_celeba.txt"))
    frame = read_frame(content, name, sep=r"\s+", skiprows=1)
    # Its header has no name for the first column, which pandas takes for the index.
    frame = frame.rename_axis("image").reset_index()
    frame["image"] = "img_align_celeba/" + frame["image"]
    return Table(found[0].detail, frame, files)


CAMELYON17 = ["patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split"]


def camelyon17(found: Sequence[Sighting]) -> Table:
    """Hospital 1 validates, 2 tests; patches that the others set aside are left out."""
    root = Path(found[0].detail)
    frame = read_frame(root / "metadata.csv", str(root / "metadata.csv"), usecols=CAMELYON17)
    inner = "patient_" + frame["patient"] + "_node_" + frame["node"]
    place = "_x_" + frame["x_coord"] + "_y_" + frame["y_coord"]
    used = frame["split"].eq("0").map({True: "train"})
    split = frame["center"].map({"1": "validation", "2": "test"}).fillna(used)
    frame = frame.assign(
        image="patches/" + inner + "/patch_" + inner + place + ".png",
        slide="hospital " + frame["center"] + ", slide " + frame["slide"],
        split=split,
    )
    return Table(str(root), frame[split.notna()], root)


IMAGES = "images/100k"


def bdd100k(found: Sequence[Sighting]) -> Table:
    """The weather of each frame; the official val images are to test on."""
    files, where = _files(found), found[0].detail
    rows = []
    for split in ("val",) if isinstance(files, dict) else ("train", "val"):
        name = f"labels/det_20/det_{split}.json"
        try:
            records = json.loads(_read(files, name))
        except ValueError as error:
            raise WrongData(f"`bdd100k`: {name} of {where} is damaged: {error}.") from error
        rows += [_weather(split, record) for record in records]
    return Table(where, pd.DataFrame(rows), files)


def _weather(split: str, record: Mapping[str, Any]) -> dict[str, str]:
    name = PurePosixPath(record["name"]).with_suffix(".jpg").name
    weather = (record.get("attributes") or {}).get("weather") or "undefined"
    part = "test" if split == "val" else "train"
    return {"image": f"{IMAGES}/{split}/{name}", "weather": weather, "split": part}


WEATHER = {
    "sunny": "clear", "shine": "clear", "clouds": "cloudy", "rain": "rainy", "snow": "snowy",
    "fog": "foggy", "fog_driving": "foggy", "storm": "stormy",
}  # fmt: skip
"""The class of folders that are not called as their class."""


def weather(found: Sequence[Sighting]) -> Table:
    """A folder of photos for each kind of weather; several may be one class."""
    files = _files(found)
    if isinstance(files, dict):
        paths = list(files)
    else:
        paths = [f"{folder.name}/{name}" for folder in files.iterdir() if folder.is_dir()
                 for name in os.listdir(folder)]  # fmt: skip
    # Files with a dot in front are not the user's: macOS puts `._name.jpg` beside photos.
    photos = [PurePosixPath(path) for path in sorted(paths)]
    photos = [p for p in photos if p.suffix.lower() in SUFFIXES and p.name[0] != "."]
    kinds = [WEATHER.get(path.parent.name, path.parent.name) for path in photos]
    frame = pd.DataFrame({"image": [str(path) for path in photos], "weather": kinds}, dtype=str)
    return Table(found[0].detail, frame, files, size=(128, 128))


def pacs(found: Sequence[Sighting]) -> Table:
    """A folder for each domain, in it one for each class."""
    root = Path(found[0].detail)
    paths = [path.relative_to(root) for path in sorted(root.glob("*/*/[!.]*"))]
    rows = [(p.as_posix(), *p.parts[:2]) for p in paths if p.suffix.lower() in SUFFIXES]
    return Table(str(root), pd.DataFrame(rows, columns=["image", "domain", "class"]), root)


# --- Recordings as log-mel spectrograms -----------------------------------------------------------

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


def audiomnist(found: Sequence[Sighting]) -> Table:
    """The spectrogram of each data/SPEAKER/DIGIT_SPEAKER_TAKE.wav; they are kept in the cache."""
    root = Path(found[0].detail)
    names = sorted(path.relative_to(root).as_posix() for path in root.glob("data/*/*_*_*.wav"))
    kept = cache_folder() / "audiomnist" / f"{digest(*names)[:16]}.tar"
    if kept.is_file():
        files = members(str(kept), kept.read_bytes())
    else:
        files = {name.removeprefix("data/"): picture(root / name) for name in names}
        kept.parent.mkdir(parents=True, exist_ok=True)
        with atomic(kept) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
            for name, content in files.items():
                entry = tarfile.TarInfo(f"data/{name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    rows = [(name, *PurePosixPath(name).stem.split("_")) for name in sorted(files)]
    frame = pd.DataFrame(rows, columns=["image", "digit", "speaker", "take"])
    return Table(str(root), frame, files)


READERS: dict[str, Callable[[Sequence[Sighting]], Table]] = {
    reader.__name__: reader
    for reader in (
        *(adult, compas, sentiment, reviews, celeba, camelyon17, bdd100k, weather),
        *(toxicity, hiv, lambdarank, pacs, audiomnist, afrisenti),
    )
}
