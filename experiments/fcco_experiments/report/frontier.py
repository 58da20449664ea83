"""The frontier of a trade-off: what nothing else beats in both directions."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["frontier"]


def frontier(
    x: Sequence[float], y: Sequence[float], higher_x: bool = False, higher_y: bool = True
) -> list[int]:
    r"""Indices of the points that no other point dominates, ordered by `x`.

    .. math::
        j \text{ dominates } i \iff x_j \preceq x_i,\ y_j \preceq y_i
        \text{ and one of them is strict}

    where :math:`\preceq` is "at least as good". Points with a value that is not finite are left
    out. Of equal points all stay.

    Args:
        x: first figures.
        y: second figures.
        higher_x: whether a higher `x` is better.
        higher_y: whether a higher `y` is better.

    >>> frontier([0.0, 1.0, 2.0, 3.0], [0.5, 0.7, 0.6, 0.9])
    [0, 1, 3]
    """
    sign_x, sign_y = (-1.0 if higher_x else 1.0), (-1.0 if higher_y else 1.0)
    finite = [i for i, point in enumerate(zip(x, y, strict=True)) if all(map(math.isfinite, point))]
    kept: list[int] = []
    for i in sorted(finite, key=lambda i: (sign_x * x[i], sign_y * y[i], i)):
        last = kept[-1] if kept else i  # as good in x, or better, than all that follow
        if i == last or sign_y * y[i] < sign_y * y[last] or (x[i], y[i]) == (x[last], y[last]):
            kept.append(i)
    return sorted(kept, key=lambda i: (x[i], sign_y * y[i], i))
