"""Weather, time of day and scene of the frames of BDD100K, from any of its label files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TextIO

from .columns import rows_of
from .download import store
from .folders import WrongData, digest
from .places import cache_folder
from .records import records

__all__ = ["RELEASES", "SPLITS", "Frame", "read_file", "read_labels", "read_lists"]

SPLITS = ("train", "val")
RELEASES = {
    "labels of 2020": "labels/det_20/det_{}.json",
    "labels of 2018": "labels/bdd100k_labels_images_{}.json",
    "labels of each frame": "labels/100k/{}",
}
"""Where the labels of a split are: in one file, or in a folder with a file for each frame."""
UNDEFINED = "undefined"
CACHED_FROM = 1 << 24  # bytes; smaller files are read again each time
VERSION = 1
_TEXT = "utf-8-sig"  # with or without the mark that some programs begin a file with


class Frame(NamedTuple):
    """One picture of a drive; what the labels do not say is `"undefined"`."""

    path: str
    """Inside `images/100k`, such as `val/b1c66a42-6f7d68ca.jpg`."""
    weather: str
    timeofday: str
    scene: str


def read_labels(root: Path) -> tuple[str, list[Frame]]:
    """The frames of both splits in an official folder, and the release of its labels.

    The files of 2018 and 2020 also hold every box and are large: what is needed of them is kept in
    the cache, under the size and time of the file.

    Raises:
        WrongData: when no release is there with both splits, or a file is damaged.
    """
    for release, pattern in RELEASES.items():
        paths = {split: root / pattern.format(split) for split in SPLITS}
        if all(path.exists() for path in paths.values()):
            return release, [
                frame for split, path in paths.items() for frame in _remembered(path, split)
            ]
    wanted = " or ".join(pattern.format("{train,val}") for pattern in RELEASES.values())
    raise WrongData(f"`bdd100k`: {root} has no labels of train and val: it needs {wanted}.")


def read_lists(paths: Sequence[str | os.PathLike[str]]) -> list[Frame]:
    """The frames of csv files with the columns path, inside `images/100k`, and weather."""
    return _unique(frame for path in map(Path, paths) for frame in _listed(path))


def _listed(path: Path) -> Iterator[Frame]:
    try:
        with path.open(newline="", encoding=_TEXT) as lines:
            for inner, weather in rows_of("bdd100k", str(path), lines, ("path", "weather")):
                if inner.partition("/")[0] not in SPLITS:
                    raise WrongData(
                        f"`bdd100k`: the paths in {path} must begin with train/ or val/, inside "
                        f"images/100k, but one is: {inner}."
                    )
                yield Frame(inner, weather, UNDEFINED, UNDEFINED)
    except UnicodeDecodeError as error:
        raise WrongData(f"`bdd100k`: {path} is no text: {error}.") from error


def read_file(name: str, stream: TextIO, split: str) -> list[Frame]:
    """The frames of one label file of 2018 or 2020."""
    return _unique(_frame(record, split, name) for record in records("bdd100k", name, stream))


def _unique(frames: Iterator[Frame]) -> list[Frame]:
    """Each frame once; refuses one that is said to be of two kinds of weather."""
    found: dict[str, Frame] = {}
    for frame in frames:
        first = found.setdefault(frame.path, frame)
        if first.weather != frame.weather:
            raise WrongData(
                f"`bdd100k`: the labels name {frame.path} twice, with the weather {first.weather} "
                f"and with {frame.weather}."
            )
    return list(found.values())


def _frame(record: Any, split: str, where: str) -> Frame:
    name = record.get("name") if isinstance(record, dict) else None
    if not isinstance(name, str):
        raise WrongData(f"`bdd100k`: a record of {where} has no name.")
    own = PurePosixPath(name)
    attributes = record.get("attributes") or {}
    if not isinstance(attributes, dict):
        raise WrongData(f"`bdd100k`: the attributes of {name} in {where} are no fields.")
    words = (attributes.get(key) or UNDEFINED for key in ("weather", "timeofday", "scene"))
    return Frame(f"{split}/{own.name if own.suffix else f'{own.name}.jpg'}", *map(str, words))


def _parsed(path: Path, split: str) -> list[Frame]:
    if path.is_dir():
        return _unique(_frame(_one(file), split, str(file)) for file in sorted(path.glob("*.json")))
    with path.open(encoding=_TEXT) as stream:
        return read_file(str(path), stream, split)


def _one(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding=_TEXT))
    except (ValueError, RecursionError) as error:
        raise WrongData(f"`bdd100k`: {file} is damaged: {error}.") from error


def _remembered(path: Path, split: str) -> list[Frame]:
    """The frames of a label file, or of a folder of them; those of large ones from the cache."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    states = [(file.name, file.stat()) for file in files]
    if sum(state.st_size for _, state in states) < CACHED_FROM:
        return _parsed(path, split)
    marks = (f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in states)
    key = digest("bdd100k", VERSION, split, path.resolve(), *marks)
    kept = cache_folder() / "bdd100k" / f"{split}-{key[:16]}.csv.gz"
    found = _kept(kept)
    if found is not None:
        return found
    found = _parsed(path, split)
    text = io.StringIO(newline="")
    csv.writer(text).writerows(found)
    with suppress(OSError):  # a cache that cannot be written is no reason to stop
        store(gzip.compress(text.getvalue().encode()), kept)
    return found


def _kept(path: Path) -> list[Frame] | None:
    """What the cache holds; nothing when it is absent or damaged."""
    try:
        with gzip.open(path, "rt", newline="", encoding="utf-8") as lines:
            return [Frame(*row) for row in csv.reader(lines)]
    except (OSError, EOFError, zlib.error, ValueError, TypeError, csv.Error):
        return None
