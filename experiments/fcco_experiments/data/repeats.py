"""Photos that are copies of others, equal or nearly so."""

from __future__ import annotations

import torch
from torch import Tensor

from .folders import digest
from .grouped import Samples

__all__ = ["distinct_rows", "thumbnail"]

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
