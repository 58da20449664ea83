"""Copies of large data sets: folders in a known layout, found, checked, or had through `wilds`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from .download import Progress
from .files import DataFile
from .gather import MissingData
from .places import Sighting, cache_folder, in_folder, roots

__all__ = ["Copy", "Layout", "WrongData", "digest", "few", "listed", "locate", "sight", "unchecked"]

UNCHECKED_LIMIT = 1 << 28  # bytes of a file whose size is not known


class WrongData(RuntimeError):
    """Data that are there but are not what they should be; the message says what is wrong."""


@dataclass(frozen=True)
class Layout:
    """A folder that a reader knows.

    Args:
        name: what it is, in a few words.
        folder: its usual name.
        needs: paths inside it that must be there; the first one marks it.
        loose: its files may also lie open in the folder that is searched.
        wilds: its name in the package `wilds`, which can download it.
        version: of the data, for `wilds`.
        how: how to come by it.
    """

    name: str
    folder: str
    needs: tuple[str, ...]
    loose: bool = False
    wilds: str = ""
    version: str = ""
    how: str = ""


@dataclass(frozen=True)
class Copy:
    """A file that is the whole data set.

    Args:
        file: the file.
        how: how to come by it.
    """

    file: DataFile
    how: str = ""

    @property
    def name(self) -> str:
        """The file's name."""
        return self.file.name


class _Unchecked(DataFile):
    """A file that is taken whatever it holds."""

    @property
    def limit(self) -> int:
        return UNCHECKED_LIMIT

    def accept(self, content: bytes) -> bytes:
        return content


def unchecked(copies: Sequence[Layout | Copy]) -> tuple[Layout | Copy, ...]:
    """The same copies, with files accepted by their name alone."""
    return tuple(
        Copy(_Unchecked(**{f.name: getattr(copy.file, f.name) for f in fields(copy.file)}))
        if isinstance(copy, Copy)
        else copy
        for copy in copies
    )


def sight(copy: Layout | Copy, place: str, root: Path | None) -> Iterator[Sighting]:
    """What one folder holds of a copy. A layout with gaps is `"corrupt"`."""
    if isinstance(copy, Copy):
        yield from in_folder(copy.file, place, root)
        return
    if root is not None and place == "cache":
        root = root / "wilds"
    yield _layout_in(copy, place, root)


def _layout_in(layout: Layout, place: str, root: Path | None) -> Sighting:
    if root is None:
        return Sighting(layout.name, place, "missing", "the environment variable is not set")
    if not root.is_dir():
        return Sighting(layout.name, place, "missing", f"{root} is not a folder")
    own = root / layout.folder
    if root.name == layout.folder or (layout.loose and (root / layout.needs[0]).exists()):
        own = root
    if not own.is_dir():
        detail = f"{root} has no folder {layout.folder}"
        if layout.loose:
            detail += f", nor {layout.needs[0]} itself"
        return Sighting(layout.name, place, "missing", detail)
    gaps = [need for need in layout.needs if not (own / need).exists()]
    if gaps:
        return Sighting(layout.name, place, "corrupt", f"{own} lacks {', '.join(gaps)}")
    return Sighting(layout.name, place, "found", str(own))


def locate(
    data: str,
    copies: Sequence[Layout | Copy],
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    target: Path | None = None,
) -> tuple[Layout | Copy, Sighting]:
    """The first copy of a data set: in `folder`, in `FCCO_DATA`, in the cache, through `wilds`.

    Args:
        data: name of the data set.
        copies: what will do, the best first.
        folder: where to look first.
        download: ask the package `wilds`, where it is installed, for what is on no place.
        progress: is told about downloads.
        target: where downloads go; the cache unless given.

    Raises:
        WrongData: when a folder has a layout's name but lacks files: no other copy is taken in its
            stead, and nothing is downloaded.
        MissingData: when there is no copy; it lists every place and how to come by the data.
    """
    tried: list[Sighting] = []
    for place, root in roots(folder):
        for copy in copies:
            for entry in sight(copy, place, root):
                if entry.state == "found":
                    return copy, entry
                # What an interrupted download left in the cache is for `wilds` to mend.
                if entry.state == "corrupt" and isinstance(copy, Layout) and place != "cache":
                    raise WrongData(
                        f"`{data}` cannot be loaded: {entry.detail}. Complete that folder "
                        f"({copy.name}), or move it away to use another copy."
                    )
                tried.append(entry)
    for copy in copies:
        if isinstance(copy, Layout) and copy.wilds:
            entry = _through_wilds(copy, target or cache_folder() / "wilds", download, progress)
            if entry.state == "found":
                return copy, entry
            tried.append(entry)
    ways = [copy.how for copy in copies if copy.how]
    if any(isinstance(copy, Layout) and copy.wilds for copy in copies):
        ways.append("install the package wilds (pip install wilds): then it is downloaded")
    raise MissingData(data, tried, how=ways)


def _through_wilds(
    layout: Layout, root: Path, download: bool, progress: Progress | None
) -> Sighting:
    """The folder that `wilds` downloads; its readers are not used."""

    def failed(reason: str) -> Sighting:
        return Sighting(layout.name, "wilds", "missing", reason)

    if not download:
        return failed("not asked, because of download=False")
    try:
        package = importlib.import_module("wilds")
    except Exception as error:  # absent, or broken by what it needs
        return failed(f"the package cannot be imported ({type(error).__name__}: {error})")
    if progress is not None:
        progress(f"{layout.folder} through wilds", 0, None)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it prints; our stdout may be JSON
            package.get_dataset(
                dataset=layout.wilds, version=layout.version, download=True, root_dir=str(root)
            )
    except Exception as error:
        return failed(f"get_dataset({layout.wilds!r}) failed ({type(error).__name__}: {error})")
    return _layout_in(layout, "wilds", root)


def listed(data: str, folder: Path, names: Mapping[str, Sequence[str]]) -> None:
    """Refuse an image folder with gaps. Folders are listed, files are not opened.

    Args:
        data: name of the data set.
        folder: the folder of all images.
        names: of the images, by the folder inside it that must hold them (`""`: itself).

    Raises:
        WrongData: says how many images are missing and names the first few.
    """
    missing: list[str] = []
    for inner, wanted in names.items():
        here = folder / inner
        present = set(os.listdir(here)) if here.is_dir() else set()
        missing += [f"{inner}/{name}" if inner else name for name in wanted if name not in present]
    if missing:
        total = sum(len(wanted) for wanted in names.values())
        raise WrongData(
            f"`{data}` is incomplete: {len(missing):,} of {total:,} images are not in {folder}: "
            f"{few(missing)}."
        )


def few(names: Sequence[str], shown: int = 3) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more:,} more" if more > 0 else "")


def digest(*parts: object) -> str:
    """A fingerprint of texts, numbers and contents."""
    total = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        total.update(len(content).to_bytes(8, "little") + content)
    return total.hexdigest()
