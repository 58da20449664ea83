"""Differences between methods, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Interval", "paired"]


@dataclass(frozen=True)
class Interval:
    """A mean difference and where it lies with a given confidence.

    Attributes:
        mean: of the differences.
        low: end of the interval; NaN for a single pair.
        high: the other end.
        pairs: how many differences there are.
    """

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 0, so that seeds alone do not explain the difference."""
        return self.low > 0 or self.high < 0


def paired(left: Sequence[float], right: Sequence[float], level: float = 0.95) -> Interval:
    r"""Student's t interval of the mean of left - right, pair by pair.

    .. math::
        \bar d \pm t_{n-1,\,(1+\text{level})/2}\; s_d / \sqrt n

    Args:
        left: a figure of one method, one value for each seed.
        right: that of another, seeds in the same order.
        level: confidence.

    Example:
        >>> found = paired([0.5, 0.6, 0.7], [0.4, 0.4, 0.4])
        >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3), found.decided
        (0.2, -0.048, 0.448, False)
    """
    if len(left) != len(right) or not left:
        raise ValueError(f"`paired` needs pairs but got {len(left)} and {len(right)} values.")
    gaps = [a - b for a, b in zip(left, right, strict=True)]
    number, mean = len(gaps), math.fsum(gaps) / len(gaps)
    if number < 2:
        return Interval(mean, math.nan, math.nan, number)
    from scipy import stats

    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / (number - 1))
    reach = float(stats.t.ppf((1 + level) / 2, number - 1)) * deviation / math.sqrt(number)
    return Interval(mean, mean - reach, mean + reach, number)
