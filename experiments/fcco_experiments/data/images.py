"""Images as samples: files, members of archives, or decoded in memory; copies of one photo."""

from __future__ import annotations

import io
import lzma
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .grouped import Samples, Vectors
from .sources import Sighting, WrongData, digest

__all__ = [
    "ImageFiles",
    "Piece",
    "PieceImages",
    "decode",
    "decoded",
    "distinct_rows",
    "image_files",
    "members",
    "pieces",
    "thumbnail",
]


def decode(
    source: Path | bytes, name: str, size: tuple[int, int] | None = None, fit: bool = False
) -> Tensor:
    """An image as uint8 (3, height, width); grey ones and those with transparency become RGB.

    Args:
        source: path, or content of a file.
        name: for errors.
        size: height and width that it must have.
        fit: give it that size instead: turn it as its camera says, scale it until it just covers
            the size, and cut out its middle.

    Raises:
        WrongData: when it cannot be decoded or has another size; names the file.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if fit and size is not None:
                upright = ImageOps.exif_transpose(image).convert("RGB")
                fitted = ImageOps.fit(upright, (size[1], size[0]), Image.Resampling.BICUBIC)
                pixels = np.array(fitted)
            else:
                pixels = np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise WrongData(f"The image {name} cannot be decoded: {error}.") from error
    if size is not None and pixels.shape[:2] != size:
        raise WrongData(
            f"The image {name} must have the size of the others, {size[1]} x {size[0]}, but has "
            f"{pixels.shape[1]} x {pixels.shape[0]}."
        )
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


@dataclass(frozen=True)
class ImageFiles:
    """Samples that are image files, decoded whenever a row is read.

    Args:
        folder: of all files.
        names: paths inside it, by row.
        size: height and width of all.
        fit: scale and cut images of other sizes, see `decode`; otherwise they are refused.
    """

    folder: str
    names: tuple[str, ...]
    size: tuple[int, int]
    fit: bool = False

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> Tensor:
        path = Path(self.folder, self.names[row])
        return decode(path, str(path), self.size, self.fit)


def image_files(folder: Path, names: Sequence[str]) -> ImageFiles:
    """Samples from files; the first one says which size all must have."""
    first = folder / names[0]
    _, height, width = decode(first, str(first)).shape
    return ImageFiles(str(folder), tuple(names), (height, width))


def decoded(contents: Mapping[str, bytes], names: Sequence[str]) -> Vectors:
    """Samples in memory; the first one says which size all must have.

    Args:
        contents: of files, by name.
        names: of those that are samples, by row.
    """
    first = decode(contents[names[0]], names[0])
    size = (first.shape[1], first.shape[2])
    values = torch.empty((len(names), *first.shape), dtype=torch.uint8)
    for row, name in enumerate(names):
        values[row] = decode(contents[name], name, size)
    return Vectors(values)


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


SIDE = 16
BLOCK = 1024


def thumbnail(image: Tensor) -> Tensor:
    """Mean brightness (0 to 255) of 16 x 16 fields of an image of (3, H, W), as one row."""
    grey = image.float().mean(0, keepdim=True)
    return torch.nn.functional.adaptive_avg_pool2d(grey, SIDE).flatten()


def distinct_rows(images: Samples, tolerance: float) -> Tensor:
    r"""Rows of the images without those that repeat an earlier row that is kept.

    Two images are taken for copies of one photo when their thumbnails :math:`a, b` of 16 x 16
    fields are close,

    .. math::
        \Bigl(\tfrac{1}{256} \sum\nolimits_k (a_k - b_k)^2\Bigr)^{1/2} \le \text{tolerance},

    which also finds photos that were scaled or compressed again. With a tolerance of 0 all pixels
    must be equal.

    Args:
        images: of three channels and one size.
        tolerance: in steps of brightness, of 255.

    Example:
        >>> grey = torch.full((3, 16, 16), 100, dtype=torch.uint8)
        >>> distinct_rows([grey, grey + 1, grey + 50], tolerance=4.0).tolist()
        [0, 2]
    """
    found: list[int] = []
    if tolerance == 0:
        seen: set[str] = set()
        for row in range(len(images)):
            own = digest(_image(images, row).numpy().tobytes())
            found += [] if own in seen else [row]
            seen.add(own)
        return torch.tensor(found, dtype=torch.int64)
    small = torch.stack([thumbnail(_image(images, row)) for row in range(len(images))])
    lost: set[int] = set()
    for start in range(0, len(small), BLOCK):
        # differences first: a matrix product would lose the small distances to rounding
        apart = torch.cdist(
            small[start : start + BLOCK],
            small[start:],
            compute_mode="donot_use_mm_for_euclid_dist",
        )
        close = (apart <= tolerance * SIDE).triu(1)
        for first, other in torch.nonzero(close).tolist():
            if start + first not in lost:
                lost.add(start + other)
    return torch.tensor([row for row in range(len(small)) if row not in lost])


def _image(images: Samples, row: int) -> Tensor:
    image = images[row]
    assert isinstance(image, Tensor)
    return image
