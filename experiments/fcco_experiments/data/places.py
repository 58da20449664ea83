"""Where data files are looked for on this machine, in which order."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from .files import DataFile, Wheel, WrongContent, read

__all__ = ["CACHE", "VARIABLE", "Sighting", "cache_folder", "in_folder", "roots", "search"]

VARIABLE = "FCCO_DATA"
CACHE = "FCCO_CACHE"


@dataclass(frozen=True)
class Sighting:
    """What one place holds of one file, or of one folder of files.

    Args:
        file: name of the file or folder.
        place: `"folder"`, `"FCCO_DATA"`, `"cache"`, `"package"`, `"PyPI"`, `"source"` or
            `"wilds"`.
        state: is it there, and is it what it should be.
        detail: the path or address, and what is wrong with it.
        content: what is parsed, when it was found.
    """

    file: str
    place: str
    state: Literal["found", "missing", "corrupt"]
    detail: str
    content: bytes | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.place}: {self.detail}"


def cache_folder() -> Path:
    """Where fetched files are kept: in `FCCO_CACHE`, or the platform's folder for caches."""
    named = os.environ.get(CACHE)
    if named:
        return Path(named).expanduser() / "data"
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "fcco" / "data"


def roots(folder: str | os.PathLike[str] | None = None) -> list[tuple[str, Path | None]]:
    """The folders that are searched, in order, each with its place; `None` where none is named."""
    named = os.environ.get(VARIABLE)
    own = [] if folder is None else [("folder", Path(folder).expanduser())]
    return [
        *own,
        (VARIABLE, Path(named).expanduser() if named else None),
        ("cache", cache_folder()),
    ]


def search(file: DataFile, folder: str | os.PathLike[str] | None = None) -> Iterator[Sighting]:
    """Look for a file: in `folder`, in `FCCO_DATA`, in the cache, in an installed package.

    Lazy: a caller that stops at the first copy found does not read the rest.
    """
    for place, root in roots(folder):
        yield from in_folder(file, place, root)
    if file.wheel is not None:
        yield _in_package(file, file.wheel)


def in_folder(file: DataFile, place: str, folder: Path | None) -> Iterator[Sighting]:
    """What one folder holds of a file: every copy, or one line that there is none."""
    if folder is None:
        yield Sighting(file.name, place, "missing", "the environment variable is not set")
        return
    names = [name for form in file.forms for name in (form.name, f"{form.name}.gz")]
    paths = [path for path in (folder / name for name in names) if path.is_file()]
    yield from (_at_path(file, place, path) for path in paths)
    if not paths:
        missing = f"has none of {', '.join(names)}" if folder.is_dir() else "is not a folder"
        yield Sighting(file.name, place, "missing", f"{folder} {missing}")


def _in_package(file: DataFile, wheel: Wheel) -> Sighting:
    """The file of an installed package, found by its metadata: the package is not imported."""
    try:
        path = Path(str(metadata.distribution(wheel.package).locate_file(file.member)))
    except metadata.PackageNotFoundError:
        return Sighting(file.name, "package", "missing", f"{wheel.package} is not installed")
    if not path.is_file():
        detail = f"{wheel.package} is installed, but without {file.member}"
        return Sighting(file.name, "package", "missing", detail)
    return _at_path(file, "package", path)


def _at_path(file: DataFile, place: str, path: Path) -> Sighting:
    try:
        content = file.accept(read(path, file.limit))
    except WrongContent as error:
        return Sighting(file.name, place, "corrupt", f"{path}: {error}")
    return Sighting(file.name, place, "found", str(path), content)
