"""Images as samples: read from files when they are asked for, or decoded once."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .folders import WrongData
from .grouped import Vectors

__all__ = ["ImageFiles", "decode", "decoded", "image_files"]


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
