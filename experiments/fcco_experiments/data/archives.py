"""Files inside tar archives, read without unpacking them on disk."""

from __future__ import annotations

import io
import lzma
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .folders import WrongData
from .images import decode
from .places import Sighting

__all__ = ["Piece", "PieceImages", "members", "pieces"]


def members(data: str, found: Sighting) -> dict[str, bytes]:
    """The content of every file in an archive that was found, by its path in the archive.

    Args:
        data: name of the data set, for errors.
        found: the archive.

    Raises:
        WrongData: when it is no whole tar archive.
    """
    assert found.content is not None
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(found.content)) as archive:
            for member in archive:
                stream = archive.extractfile(member)
                if stream is not None:
                    contents[member.name] = stream.read()
    # A link to nowhere is a KeyError; the last two come from compressed archives.
    except (tarfile.TarError, EOFError, KeyError, zlib.error, lzma.LZMAError) as error:
        raise WrongData(f"`{data}`: {found.detail} is no tar archive: {error}.") from error
    return contents


@dataclass(frozen=True)
class Piece:
    """A file on disk, or a file inside an archive that stays on disk.

    Args:
        file: path of the file or archive.
        name: of the file in its folder or archive.
        offset: where it begins; 0 for a file of its own, as archives begin with a header.
        size: bytes.
    """

    file: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Its content."""
        with open(self.file, "rb") as stream:
            stream.seek(self.offset)
            return stream.read(self.size)

    def __str__(self) -> str:
        return f"{self.name} in {self.file}" if self.offset else self.file


def pieces(data: str, archive: Path) -> list[Piece]:
    """The files in an archive, in its order; their contents are not read.

    Raises:
        WrongData: when it is no whole tar archive, or a compressed one.
    """
    try:
        with archive.open("rb") as stream, tarfile.open(fileobj=stream, mode="r:") as opened:
            found = [
                Piece(str(archive), each.name, each.offset_data, each.size)
                for each in opened
                if each.isfile() and not each.issparse()
            ]
            # An archive that was cut between two files looks whole but for its end.
            stream.seek(-tarfile.BLOCKSIZE, io.SEEK_END)
            if any(stream.read()):
                raise tarfile.ReadError("it ends too early")
    except (tarfile.TarError, EOFError) as error:
        raise WrongData(f"`{data}`: {archive} is no plain tar archive: {error}.") from error
    return found


@dataclass(frozen=True)
class PieceImages:
    """Samples that are images in files or archives, read and decoded whenever a row is read.

    Args:
        pieces: of the images, by row.
        size: height and width that they are given, see `decode`.
    """

    pieces: tuple[Piece, ...]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, row: int) -> Tensor:
        own = self.pieces[row]
        return decode(own.read(), str(own), self.size, fit=True)
