"""Images as samples: files, or decoded in memory; copies of one photo."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .grouped import Samples, Vectors
from .sources import WrongData

FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # others, as EPS, would start other programs
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
PIXELS = 1 << 26  # of one image: a small file can hold an image that fills the memory


@contextmanager
def opened(source: Path | bytes, name: str) -> Iterator[Any]:
    """An image whose pixels are not decoded yet; what fails inside names the image."""
    from PIL import Image

    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        stream = io.BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(stream, formats=FORMATS) as image:
            if image.width * image.height > PIXELS:
                raise ValueError(f"its {image.width} x {image.height} are over {PIXELS:,} pixels")
            yield image
    except (OSError, SyntaxError, ValueError, *bombs) as error:
        raise WrongData(
            f"The image {name} cannot be decoded ({', '.join(FORMATS)} are read): {error}."
        ) from error


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
        WrongData: when it cannot be decoded, is too large or has another size; names the file.
    """
    from PIL import Image, ImageOps

    with opened(source, name) as image:
        if fit and size is not None:
            upright = ImageOps.exif_transpose(image).convert("RGB")
            fitted = ImageOps.fit(upright, (size[1], size[0]), Image.Resampling.BICUBIC)
            pixels = np.array(fitted)
        else:
            pixels = np.array(image.convert("RGB"))
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


def image_samples(
    files: Path | Mapping[str, bytes], names: Sequence[str], size: tuple[int, int] | None = None
) -> ImageFiles | Vectors:
    """Samples from a folder, read when they are asked for, or from an archive, decoded at once.

    Args:
        files: the folder, or contents by path.
        names: paths, by row.
        size: height and width that they are given; unless given, all must have that of the first.
    """
    fit = size is not None
    if isinstance(files, Path):
        first = files / names[0]
        shape = size or tuple(decode(first, str(first)).shape[1:])
        return ImageFiles(str(files), tuple(names), (shape[0], shape[1]), fit)
    shape = size or tuple(decode(files[names[0]], names[0]).shape[1:])
    values = torch.empty((len(names), 3, *shape), dtype=torch.uint8)
    for row, name in enumerate(names):
        values[row] = decode(files[name], name, (shape[0], shape[1]), fit)
    return Vectors(values)


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

    which also finds photos that were scaled or compressed again.

    Args:
        images: of three channels and one size.
        tolerance: in steps of brightness, of 255.

    Example:
        >>> grey = torch.full((3, 16, 16), 100, dtype=torch.uint8)
        >>> distinct_rows([grey, grey + 1, grey + 50], tolerance=4.0).tolist()
        [0, 2]
    """
    small = torch.stack([thumbnail(torch.as_tensor(images[row])) for row in range(len(images))])
    repeated: set[int] = set()
    for start in range(0, len(small), BLOCK):
        # differences first: a matrix product would lose the small distances to rounding
        apart = torch.cdist(
            small[start : start + BLOCK],
            small[start:],
            compute_mode="donot_use_mm_for_euclid_dist",
        )
        close = (apart <= tolerance * SIDE).triu(1)
        for first, other in torch.nonzero(close).tolist():
            if start + first not in repeated:
                repeated.add(start + other)
    return torch.tensor([row for row in range(len(small)) if row not in repeated])
