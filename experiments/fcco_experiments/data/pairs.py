"""Images with captions: folders, archives and tables as those who collect pairs write them."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .images import SUFFIXES, decode
from .sources import WrongData, check_member, digest, few
from .table import is_table, read_frame

PATHS = ("filepath", "path", "image", "file")
CAPTIONS = ("title", "caption", "text")


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
        piece = self.pieces[row]
        return decode(piece.read(), str(piece), self.size, fit=True)


@dataclass(frozen=True)
class PairedData:
    """Images and their captions, by row; the fingerprint changes when they do."""

    samples: PieceImages
    captions: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.captions)


def read_pairs(path: str | os.PathLike[str], *, size: tuple[int, int] = (224, 224)) -> PairedData:
    """Pairs of images and captions, such as those of LAION, from files on this machine.

    The images are scaled until they just cover `size`, and their middle is cut out. They are read
    and decoded when a row is asked for.

    Args:
        path: one of three kinds. A folder as the program img2dataset writes it, with files such as
            `00000/000000012.jpg` and their caption in `000000012.txt`, or under `caption` in
            `000000012.json`. A plain archive with such files (`.tar`, as for webdataset), or a
            folder of those. A table (csv, tsv, parquet) with a column `filepath`, `path`, `image`
            or `file`, relative to the table's folder, and a column `title`, `caption` or `text`.
        size: height and width.

    Raises:
        WrongData: when it is something else, or when images or captions are missing; it names them.
    """
    root = Path(path).expanduser()
    if root.is_file() and is_table(root):
        pairs = list(_listed(root))
    elif root.is_dir() or root.suffix == ".tar":
        pairs = list(_together(root))
    else:
        raise WrongData(f"{root} must be a folder, a .tar archive, or a table of pairs.")
    wrong = [f"{image} {problem}" for image, _, problem in pairs if problem]
    if wrong or not pairs:
        what = few(wrong) if wrong else "it has none"
        raise WrongData(f"{root} must hold pairs of image and caption, but: {what}.")
    images, captions, _ = zip(*pairs, strict=True)
    marks = (f"{image.name} {image.size}" for image in images)
    return PairedData(
        PieceImages(images, (size[0], size[1])), captions, digest("pairs", *size, *marks, *captions)
    )


Pair = tuple[Piece, str, str]
"""An image, its caption, and what is wrong with them, as far as can be seen at once."""


def _together(root: Path) -> Iterator[Pair]:
    """Files of one name are a pair."""
    shards = [root] if root.is_file() else sorted(root.glob("*.tar"))
    for own in [_pieces(shard) for shard in shards] or [_files(root)]:
        stems: dict[str, dict[str, Piece]] = {}
        for piece in own:
            stem, suffix = os.path.splitext(piece.name)
            stems.setdefault(stem, {})[suffix.lower()] = piece
        for found in stems.values():
            image = next((found[suffix] for suffix in SUFFIXES if suffix in found), None)
            caption = _caption(found)
            if image is not None:
                yield image, caption, "" if caption else "has no caption"
            elif ".txt" in found:
                yield found[".txt"], caption, "has no image"


def _pieces(shard: Path) -> list[Piece]:
    """The files in an archive, in its order; their contents are not read."""
    found = []
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                check_member(str(shard), member)
                if member.isfile():
                    found.append(Piece(str(shard), member.name, member.offset_data, member.size))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise WrongData(f"{shard} is no plain tar archive: {error}.") from error
    if found and shard.stat().st_size < found[-1].offset + found[-1].size:
        raise WrongData(f"{shard} ends too early.")
    return found


def _files(root: Path) -> list[Piece]:
    # Files with a dot in front are not the user's: macOS puts `._name.jpg` beside `name.jpg`.
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name[0] != ".")
    return [_piece(path, path.relative_to(root).as_posix()) for path in files]


def _piece(file: Path, name: str) -> Piece:
    return Piece(str(file), name, 0, file.stat().st_size if file.is_file() else 0)


def _caption(found: dict[str, Piece]) -> str:
    with suppress(ValueError, RecursionError):  # neither text nor json: the same as no caption
        if ".txt" in found:
            return found[".txt"].read().decode("utf-8-sig").strip()
        if ".json" in found:
            record = json.loads(found[".json"].read())
            return str(record.get("caption") or "").strip() if isinstance(record, dict) else ""
    return ""


def _listed(path: Path) -> Iterator[Pair]:
    """The pairs of a table, whose paths begin in its folder."""
    frame = read_frame(path, str(path)).fillna("")
    columns = []
    for names in (PATHS, CAPTIONS):
        there = [name for name in names if name in frame]
        if not there:
            raise WrongData(
                f"{path} must have a column {' or '.join(names)}; it has {few(list(frame), 20)}."
            )
        columns.append(frame[there[0]])
    for name, caption in zip(*columns, strict=True):
        image = _piece(path.parent / name, name)
        problem = "" if caption.strip() else "has no caption"
        yield image, caption.strip(), problem if image.size else "is missing"
