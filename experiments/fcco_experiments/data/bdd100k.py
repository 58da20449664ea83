"""BDD100K: frames of drives, with the weather as class and group."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from .grouped import GroupedData, OfficialTest, WithinGroups, check_classes, check_limit, kept
from .images import decoded, image_files, members
from .sources import (
    Copy,
    DataFile,
    Form,
    Layout,
    Progress,
    WrongData,
    cache_folder,
    checksum,
    digest,
    few,
    locate,
    store,
    unchecked,
)
from .table import rows_of

__all__ = [
    "COPIES",
    "RELEASES",
    "SPLITS",
    "SUBSET",
    "Frame",
    "read_bdd100k",
    "read_bdd100k_subset",
    "read_file",
    "read_labels",
    "read_lists",
    "records",
]


CHUNK = 1 << 20  # characters
LONGEST = 1 << 26  # of one record: a damaged file is not read to its end


def records(data: str, name: str, stream: TextIO, chunk: int = CHUNK) -> Iterator[dict[str, Any]]:
    """The objects of a json list.

    Args:
        data: name of the data set, for errors.
        name: of the file, for errors.
        stream: the file, as text.
        chunk: characters that are read at a time.

    Raises:
        WrongData: when the file is something else, or ends too early.

    Example:
        >>> import io
        >>> [each["name"] for each in records("a", "b", io.StringIO('[{"name": 1}, {"name": 2}]'))]
        [1, 2]
    """
    window = _Window(stream, chunk)
    number = 0
    try:
        window.take("[", "a list of records must begin with `[`")
        while window.mark() != "]":
            if number:
                window.take(",", "a comma or `]` must follow")
            yield window.record()
            number += 1
        window.take("]", "")
        if window.mark():
            raise _Damaged("something follows the end of the list")
    except (_Damaged, UnicodeDecodeError) as error:
        raise WrongData(
            f"`{data}`: {name} is damaged after {number:,} records: {error}."
        ) from error


class _Damaged(Exception):
    """The text is not what it should be."""


class _Window:
    """A piece of a long text, and a place in it."""

    def __init__(self, stream: TextIO, chunk: int) -> None:
        self.stream = stream
        self.chunk = chunk
        self.text = ""
        self.place = 0
        self.decoder = json.JSONDecoder()

    def more(self) -> bool:
        """Drop what has been read; append at least as much as is left, so that pieces double."""
        rest = self.text[self.place :]
        new = self.stream.read(max(self.chunk, len(rest)))
        self.text, self.place = rest + new, 0
        return bool(new)

    def mark(self) -> str:
        """The next character that is not blank; none at the end."""
        while True:
            while self.place < len(self.text):
                if not self.text[self.place].isspace():
                    return self.text[self.place]
                self.place += 1
            if not self.more():
                return ""

    def take(self, mark: str, reason: str) -> None:
        if self.mark() != mark:
            raise _Damaged(reason)
        self.place += 1

    def record(self) -> dict[str, Any]:
        if self.mark() != "{":
            raise _Damaged("a record must begin with `{`")
        while True:
            try:
                found, self.place = self.decoder.raw_decode(self.text, self.place)
                return found
            except json.JSONDecodeError as error:
                # Either the record goes on behind the piece, or it is damaged.
                if len(self.text) - self.place > LONGEST or not self.more():
                    raise _Damaged(error.msg) from error
            except (ValueError, RecursionError) as error:  # endless numbers, endless brackets
                raise _Damaged(str(error)) from error


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


IMAGES = "images/100k"
COPIES = (
    Layout(
        "BDD100K, official files",
        "bdd100k",
        (IMAGES, *(f"{IMAGES}/{split}" for split in SPLITS)),
        loose=True,
        how="the official files, from https://bdd-data.berkeley.edu: the folder bdd100k with "
        "images/100k/{train,val} and labels/det_20/det_{train,val}.json (2020), "
        "labels/bdd100k_labels_images_{train,val}.json (2018) or labels/100k/{train,val}",
    ),
)
SUBSET = (
    Copy(
        DataFile(
            Form(
                "bdd100k_val_subset_256x144.tar",
                "8654538e0b399529f17416ce120bdcc9fb54a0e924c775d50b400d9729557e36",
                10_373_120,
            )
        ),
        how="bdd100k_val_subset_256x144.tar: 967 frames of the official val images at 256 x 144 "
        "with their labels in det_val.json, for those who have it",
    ),
)


def read_bdd100k(
    folder: str | os.PathLike[str] | None = None,
    *,
    classes: Sequence[str] = ("clear", "overcast", "snowy", "rainy", "partly cloudy", "foggy"),
    lists: Sequence[str | os.PathLike[str]] = (),
    download: bool = True,
    progress: Progress | None = None,
    limit: int = 0,
    verify: bool = True,
    copies: Sequence[Layout | Copy] = COPIES,
) -> GroupedData:
    """BDD100K: what is the weather, from the official images and label files.

    The test data are the official val images; a tenth of the train images of each class, by the
    seed, is to validate on. Frames without weather, or whose weather is `undefined`, are left out.

    Args:
        folder: where to look first.
        classes: kinds of weather in the order of their labels; frames of others are left out.
        lists: csv files with the columns path (inside `images/100k`) and weather, to be read
            instead of the official labels.
        download: has no effect, as a registration is needed.
        progress: has no effect.
        limit: frames of each class that are kept, of train and of val each; 0 keeps all.
        verify: refuse label files that name images which are not there; otherwise those frames are
            left out and counted.
        copies: what to look for; for tests.

    Raises:
        MissingData: when the folder is not found.
        WrongData: when it is broken, has gaps, or lacks a class.

    References:
        Yu et al. (2020). BDD100K: a diverse driving dataset for heterogeneous multitask learning.
        CVPR.
    """
    names = check_classes("read_bdd100k", classes)
    check_limit("read_bdd100k", limit)
    layout, found = locate("bdd100k", copies, folder, download=False)
    own = Path(found.detail)
    release, frames = ("lists", read_lists(lists)) if lists else read_labels(own)
    present = {f"{split}/{name}" for split in SPLITS for name in os.listdir(own / IMAGES / split)}
    chosen, facts = _chosen("bdd100k", frames, names, present, verify)
    group = _classes(chosen, names)
    test = torch.tensor([frame.path.startswith("val/") for frame in chosen])
    for split, rows in (("train", ~test), ("val", test)):
        _check_occupied("bdd100k", names, group[rows], f"the {split} images in {own}")
    rows = kept(2 * group + test, limit)
    chosen, group, test = [chosen[row] for row in rows.tolist()], group[rows], test[rows]
    samples = image_files(own / IMAGES, [frame.path for frame in chosen])
    told = (" ".join(frame) for frame in chosen)
    return GroupedData(
        name="bdd100k",
        kind="image",
        samples=samples,
        class_names=names,
        cut=OfficialTest(group, group, names, test),
        # With the size: many scale the images down where they lie.
        fingerprint=digest("bdd100k", *names, limit, *samples.size, *told),
        facts={"copy": layout.name, "place": found.place, "labels": release, **facts}
        | _summary(chosen),
    )


def read_bdd100k_subset(
    folder: str | os.PathLike[str] | None = None,
    *,
    classes: Sequence[str] = ("clear", "snowy", "rainy", "partly cloudy", "overcast"),
    download: bool = True,
    progress: Progress | None = None,
    limit: int = 0,
    verify: bool = True,
    copies: Sequence[Layout | Copy] = SUBSET,
) -> GroupedData:
    """967 val frames of BDD100K at 256 x 144: what is the weather. 841 have one of the classes.

    They come in one archive with the official layout. Each class is cut 8:1:1 by the seed. Only
    five of the frames are foggy.

    Args:
        folder: where to look first.
        classes: kinds of weather in the order of their labels; frames of others are left out.
        download: has no effect, as no place on the network has the archive.
        progress: has no effect.
        limit: frames of each class that are kept; 0 keeps all.
        verify: take the archive with its checksum only, and refuse one that lacks images.
        copies: what to look for; for tests.

    Raises:
        MissingData: when the archive is not found.
        WrongData: when it is broken, has gaps, or lacks a class.

    References:
        Yu et al. (2020). BDD100K: a diverse driving dataset for heterogeneous multitask learning.
        CVPR.
    """
    names = check_classes("read_bdd100k_subset", classes)
    check_limit("read_bdd100k_subset", limit)
    wanted = copies if verify else unchecked(copies)
    copy, found = locate("bdd100k-subset", wanted, folder, download=False)
    assert found.content is not None
    contents = members("bdd100k-subset", found)
    root, labels = _labels_in(contents, found.detail)
    stream = io.TextIOWrapper(io.BytesIO(contents[labels]), encoding="utf-8-sig")
    frames = read_file(labels, stream, "val")
    start = f"{root}{IMAGES}/"
    present = {path.removeprefix(start) for path in contents if path.startswith(start)}
    chosen, facts = _chosen("bdd100k-subset", frames, names, present, verify)
    group = _classes(chosen, names)
    _check_occupied("bdd100k-subset", names, group, found.detail)
    rows = kept(group, limit)
    chosen, group = [chosen[row] for row in rows.tolist()], group[rows]
    return GroupedData(
        name="bdd100k-subset",
        kind="image",
        samples=decoded(contents, [start + frame.path for frame in chosen]),
        class_names=names,
        cut=WithinGroups(group, group, names),
        fingerprint=digest("bdd100k-subset", checksum(found.content), *names, limit),
        facts={"copy": copy.name, "place": found.place, **facts} | _summary(chosen),
    )


def _labels_in(contents: dict[str, bytes], where: str) -> tuple[str, str]:
    """The folder of all files in an archive, and its label file."""
    for pattern in RELEASES.values():
        own = pattern.format("val")
        for path in contents:
            if path.endswith(own):
                return path.removesuffix(own), path
    raise WrongData(f"`bdd100k-subset`: {where} lacks {RELEASES['labels of 2020'].format('val')}.")


def _chosen(
    data: str, frames: Sequence[Frame], classes: Sequence[str], present: set[str], verify: bool
) -> tuple[list[Frame], dict[str, str]]:
    """Frames of the classes that have an image, and how many have not or are of no class."""
    wanted = [frame for frame in frames if frame.weather in classes]
    gaps = [frame.path for frame in wanted if frame.path not in present]
    if gaps and verify:
        raise WrongData(
            f"`{data}` is incomplete: {len(gaps):,} of {len(wanted):,} images that the labels name "
            f"are not in {IMAGES}: {few(gaps)} (verify=False leaves them out)."
        )
    undefined = sum(frame.weather == UNDEFINED for frame in frames)
    facts = {
        "frames without weather": f"{undefined:,}",
        "frames of other weather": f"{len(frames) - undefined - len(wanted):,}",
        "frames without image": f"{len(gaps):,}",
    }
    lost = set(gaps)
    return [frame for frame in wanted if frame.path not in lost], facts


def _classes(frames: Sequence[Frame], names: Sequence[str]) -> Tensor:
    return torch.tensor([names.index(frame.weather) for frame in frames], dtype=torch.int64)


def _check_occupied(data: str, names: Sequence[str], group: Tensor, where: str) -> None:
    present = set(group.tolist())
    empty = [name for index, name in enumerate(names) if index not in present]
    if empty:
        raise WrongData(f"`{data}`: no frame in {where} has the weather {' or '.join(empty)}.")


def _summary(frames: Sequence[Frame]) -> dict[str, str]:
    """How many there are, by time of day and by scene."""

    def counted(words: Sequence[str]) -> str:
        return ", ".join(f"{word} {count:,}" for word, count in Counter(words).most_common())

    return {
        "images": f"{len(frames):,}",
        "time of day": counted([frame.timeofday for frame in frames]),
        "scene": counted([frame.scene for frame in frames]),
    }
