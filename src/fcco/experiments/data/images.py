"""Images as samples: read from files when they are asked for, or decoded once."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .folders import WrongData

__all__ = ["ImageFiles", "decode", "image_files"]


def decode(source: Path | bytes, name: str, size: tuple[int, int] | None = None) -> Tensor:
    """An image as uint8 (3, height, width); grey ones and those with transparency become RGB.

    Args:
        source: path, or content of a file.
        name: for errors.
        size: height and width that it must have.

    Raises:
        WrongData: when it cannot be decoded or has another size; names the file.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
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
    """Samples that are image files of one size, decoded whenever a row is read.

    Args:
        folder: of all files.
        names: paths inside it, by row.
        size: height and width.
    """

    folder: str
    names: tuple[str, ...]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> Tensor:
        path = Path(self.folder, self.names[row])
        return decode(path, str(path), self.size)


def image_files(folder: Path, names: Sequence[str]) -> ImageFiles:
    """Samples from files; the first one says which size all must have."""
    first = folder / names[0]
    _, height, width = decode(first, str(first)).shape
    return ImageFiles(str(folder), tuple(names), (height, width))
