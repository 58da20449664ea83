"""Find the files of a data set on this machine, or fetch them from PyPI or their source."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import Literal

from ..store import atomic

__all__ = [
    "CACHE",
    "VARIABLE",
    "Copy",
    "DataFile",
    "Form",
    "Layout",
    "MissingData",
    "Progress",
    "Sighting",
    "Wheel",
    "WrongContent",
    "WrongData",
    "cache_folder",
    "checksum",
    "contents",
    "digest",
    "few",
    "from_url",
    "from_wheel",
    "gather",
    "in_folder",
    "keep",
    "listed",
    "locate",
    "read",
    "roots",
    "search",
    "sight",
    "store",
    "unchecked",
]


class WrongContent(Exception):
    """A file that is there but is not the one that is wanted; the message says why."""


def checksum(content: bytes) -> str:
    """The sha256 of a content, as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Form:
    """One content that a file may have.

    Args:
        name: the file's usual name, without `.gz`.
        sha256: checksum of the content, after gunzip.
        size: bytes of the content, after gunzip.
    """

    name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI that carries data files; it is read as a zip file, never imported."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class DataFile:
    """A file that a loader reads, with every way to come by it.

    Args:
        form: the content that is parsed and kept in the cache.
        others: other contents it may be found in, which `reduce` turns into that of `form`.
        reduce: drops what must not be kept (names, birth dates). `None` when there are no others.
        wheel: a wheel on PyPI that carries the file.
        member: the file's path inside the wheel.
        url: the original source.
    """

    form: Form
    others: tuple[Form, ...] = ()
    reduce: Callable[[bytes], bytes] | None = None
    wheel: Wheel | None = None
    member: str = ""
    url: str = ""

    @property
    def name(self) -> str:
        """The name under which the cache keeps it."""
        return self.form.name

    @property
    def forms(self) -> tuple[Form, ...]:
        """Every content that is accepted, the one that is parsed first."""
        return (self.form, *self.others)

    @property
    def limit(self) -> int:
        """The size of the largest accepted content."""
        return max(form.size for form in self.forms)

    def accept(self, content: bytes) -> bytes:
        """The content that is parsed.

        Raises:
            WrongContent: when the content is none of the accepted ones.
        """
        found = checksum(content)
        if found == self.form.sha256:
            return content
        if self.reduce is not None and found in {form.sha256 for form in self.others}:
            reduced = self.reduce(content)
            if checksum(reduced) == self.form.sha256:
                return reduced
            raise WrongContent(
                f"its reduced form has sha256 {checksum(reduced)} but {self.form.sha256} is "
                "expected: the reduction has changed"
            )
        wanted = " or ".join(f"{form.size:,} bytes, {form.sha256}" for form in self.forms)
        raise WrongContent(
            f"checksum mismatch: {len(content):,} bytes, sha256 {found} (expected {wanted})"
        )


def read(path: Path, limit: int) -> bytes:
    """The content of a file, plain or `.gz`; at most `limit` bytes.

    Raises:
        WrongContent: when it is longer, cannot be read, or is no whole gzip file.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream:
            content = stream.read(limit + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise WrongContent(f"not a whole gzip file: {error}") from error
    except OSError as error:
        raise WrongContent(f"cannot be read: {error.strerror or error}") from error
    if len(content) > limit:
        raise WrongContent(f"too long: more than the expected {limit:,} bytes")
    return content


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


Progress = Callable[[str, int, int | None], None]
"""Is told what is fetched, how many bytes have come, and how many there are (if known)."""

SECONDS = 30  # without an answer from the original source
PIP_SECONDS = 600  # for the whole wheel
CHUNK = 1 << 16


def from_wheel(
    wheel: Wheel, files: Sequence[DataFile], progress: Progress | None = None
) -> list[Sighting]:
    """Take files out of a wheel that pip downloads, without its dependencies.

    Neither the wheel nor pip's cache of it stays on the disk.
    """
    if progress is not None:
        progress(f"{wheel} from PyPI", 0, None)
    with tempfile.TemporaryDirectory(prefix="fcco-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
        command += ["--retries", "2", "--timeout", str(SECONDS), "--dest", folder, str(wheel)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return [_failed(file, "PyPI", f"{wheel}: {error}") for file in files]
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            reason = lines[-1].strip() if lines else f"pip ended with {done.returncode}"
            return [_failed(file, "PyPI", f"{wheel}: {reason}") for file in files]
        return [_member(wheel, wheels[0], file) for file in files]


def from_url(file: DataFile, progress: Progress | None = None) -> Sighting:
    """Take a file from its original source, through memory only."""
    content = bytearray()
    try:
        with urllib.request.urlopen(file.url, timeout=SECONDS) as stream:
            told = stream.headers.get("Content-Length")
            total = int(told) if told else None
            while len(content) <= file.limit and (chunk := stream.read(CHUNK)):
                content += chunk
                if progress is not None:
                    progress(file.url, len(content), total)
        accepted = file.accept(bytes(content))
    except WrongContent as error:
        return Sighting(file.name, "source", "corrupt", f"{file.url}: {error}")
    except (OSError, HTTPException, ValueError) as error:  # no network, time-outs, bad addresses
        return _failed(file, "source", f"{file.url}: {error}")
    return Sighting(file.name, "source", "found", file.url, accepted)


def store(content: bytes, path: Path) -> None:
    """Write a file whole or not at all, in a folder that may be new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as stream:
        stream.write(content)


def _member(wheel: Wheel, path: Path, file: DataFile) -> Sighting:
    where = f"{wheel}, {file.member}"
    try:
        with zipfile.ZipFile(path) as archive, archive.open(file.member) as stream:
            content = file.accept(stream.read(file.limit + 1))
    except WrongContent as error:
        return Sighting(file.name, "PyPI", "corrupt", f"{where}: {error}")
    except (OSError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        return _failed(file, "PyPI", f"{where}: {error}")
    return Sighting(file.name, "PyPI", "found", where, content)


def _failed(file: DataFile, place: str, detail: str) -> Sighting:
    return Sighting(file.name, place, "missing", detail)


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
