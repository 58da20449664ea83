r"""CVaR of many values: its threshold s, the slopes of its estimate, its value.

.. math::
    \min_s\; s + \frac1n\sum_i f_\lambda(u_i - s), \qquad f = \tfrac1r[\cdot]_+
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arrays import Array, Number, where


def slopes(
    u: Array, s: Number, ratio: Number, smoothing: Number, tie_slope: Number, blocks: Number
) -> Array:
    r"""The slopes of the estimate of CVaR from some blocks.

    .. math::
        \frac1{B_1} f_\lambda'(u_i - s) = \frac1{B_1}
            \mathrm{clip}\Bigl(\frac{u_i - s}{\lambda}, 0, \frac1r\Bigr)

    Args:
        u: u_i, shape (B1,).
        s: the threshold.
        ratio: r.
        smoothing: lambda; a tensor may be 0 in some runs of a fleet.
        tie_slope: the subgradient at u_i = s without smoothing.
        blocks: B1, the number of blocks in the batch.

    Example:
        >>> import numpy as np
        >>> slopes(np.array([1.0, 1.2, 3.0]), 1.0, 0.5, smoothing=0.5, tie_slope=0.0, blocks=3) * 3
        array([0. , 0.4, 2. ])
    """
    excess, share, cap = u - s, 1 / blocks, 1 / ratio
    if not isinstance(smoothing, Tensor):
        if smoothing:
            # The factor 1/B1 is in the slope from the start: fewer operations on short vectors.
            most = cap * share
            return (excess * (share / smoothing)).clip(0 * most, most)
        zero = 0 * excess  # keeps the precision
        return where(excess == 0, tie_slope + zero, where(excess > 0, cap + zero, zero)) * share
    hard = smoothing == 0
    slope = (excess / torch.where(hard, 1, smoothing)).clip(min=0)
    slope = torch.minimum(slope, cap + torch.zeros_like(excess))
    hard_slope = torch.where(excess == 0, tie_slope, (excess > 0).to(excess) * cap)
    return torch.where(hard, hard_slope, slope) * share


def width_at_first(u: Array, seen: Array | None, ratio: Number) -> Number:
    """Before any block was seen twice: so wide that all count alike."""
    low = u if seen is None else where(seen, u, math.inf)
    high = u if seen is None else where(seen, u, -math.inf)
    spread = high.max() - low.min()
    return 100 / ratio * ((spread if isinstance(spread, Tensor) else float(spread)) + 1e-12)


def mean_of_worst(u: Array, ratio: Number, seen: Array | None = None) -> Number:
    """CVaR: the mean of the worst r n values, the last of them in part.

    Args:
        u: u_i, shape (n,), n > 0.
        ratio: r.
        seen: which values count, for tensors; None for all.

    Example:
        >>> import numpy as np
        >>> mean_of_worst(np.array([1.0, 4.0, 2.0, 3.0, 0.0]), ratio=0.5)
        3.2
    """
    if not isinstance(u, Tensor):
        rank = ratio * u.size
        first = max(u.size - int(rank) - 1, 0)  # what counts in part, then what counts
        worst = np.partition(u, first)[first:]
        total = float(worst.sum(dtype=np.float64))
        return (total - (worst.size - rank) * float(worst[0])) / rank
    number = u.shape[0] if seen is None else seen.sum(dtype=_widest(u))
    rank = ratio * number
    ordered = (u if seen is None else torch.where(seen, u, -torch.inf)).sort(descending=True).values
    weight = (rank - torch.arange(len(u), dtype=u.dtype, device=u.device)).clip(0, 1)
    return torch.where(weight > 0, ordered * weight, 0).sum() / rank


def threshold(
    u: Array,
    ratio: Number,
    smoothing: Number,
    seen: Array | None = None,
    *,
    start: float | None = None,
) -> tuple[Number, Number]:
    r"""The s that minimises CVaR's formula, and the slope at u_i = s if lambda is 0.

    Without smoothing, s is the (1-r)-quantile, the ceil(r n)-th largest value. With smoothing, it
    is the root of (1/n) sum_i clip((u_i - s)/lambda, 0, 1/r) = 1, which is piecewise linear in s.

    Args:
        u: u_i, shape (n,), n > 0.
        ratio: r; a tensor in double precision where lambda may be 0.
        smoothing: lambda; a tensor must be above 0.
        seen: which values count, for tensors; None for all.
        start: where to look first, for arrays.

    Example:
        >>> import torch
        >>> threshold(torch.tensor([1.0, 4.0, 2.0, 3.0]), 0.5, 0.0)
        (tensor(3.), tensor(2.))
        >>> threshold(torch.tensor([0.0, 1.0]), 0.5, smoothing=torch.tensor(0.5))[0]
        tensor(0.)
    """
    if not isinstance(smoothing, Tensor) and not smoothing:
        return _hard(u, ratio, seen)
    if not isinstance(u, Tensor):
        root = None if start is None else _newton(u, ratio, smoothing, start)
        if root is not None:
            return root, 0.0
        return _sorted(torch.from_numpy(u), ratio, smoothing).item(), 0.0
    return _sorted(u, ratio, smoothing, seen), 0.0 * u.sum()


def _newton(u: Array, ratio: Number, smoothing: Any, start: float) -> float | None:
    """Newton's method from the last s, None where it fails.

    A step that stays in its linear piece is exact, the usual case during training, and costs O(n)
    instead of a sort.
    """
    root, width, number = start, smoothing / ratio, u.size
    for _ in range(4):
        above = u[u > root]
        zone = above[above < root + width]  # the blocks whose slope is between 0 and 1/r
        inside, capped = zone.size, above.size - zone.size
        if inside == 0:
            return None
        total = float(zone.sum(dtype=np.float64)) - inside * root
        move = (total + capped * width - number * smoothing) / inside
        # The step is exact if no block enters or leaves the zone on the way. Strictly: with a
        # block on an end of the zone the root may not be unique, and the next round decides.
        if move >= 0:
            stays = zone.min() > root + move
            stays = stays and np.count_nonzero(above > root + width + move) == capped
        else:
            stays = zone.max() < root + width + move
            stays = stays and np.count_nonzero(u > root + move) == above.size
        root += move
        if stays:
            return root
    return None


def _hard(u: Array, ratio: Number, seen: Array | None) -> tuple[Number, Number]:
    """The ceil(r n)-th largest value, and the subgradient there with which weights sum to 1."""
    number = u.shape[0] if seen is None else seen.sum(dtype=_widest(u))
    # r n in floating point may lie just above the integer that is meant.
    rank = ratio * number - 1e-9
    if isinstance(rank, Tensor):
        assert seen is not None
        ordered = torch.where(seen, u, -torch.inf).sort(descending=True).values
        place = rank.ceil().clamp(min=1).long().unsqueeze(0) - 1
        s = ordered.gather(0, place).squeeze(0)
        above, ties = ((u > s) & seen).sum().to(s.dtype), ((u == s) & seen).sum()
    else:
        place = max(math.ceil(rank), 1) - 1
        if not isinstance(u, Tensor):
            s = float(-np.partition(-u, place)[place])
            above, ties = np.count_nonzero(u > s), np.count_nonzero(u == s)
            return s, float((number - above / ratio) / ties)  # NumPy's would widen float32
        s = u.sort(descending=True).values[place]
        above, ties = (u > s).sum(), (u == s).sum()
    return s, (number - above / ratio) / ties


def _widest(u: Tensor) -> torch.dtype:
    return u.dtype if u.device.type == "mps" else torch.float64


def _sorted(u: Tensor, ratio: Number, smoothing: Number, seen: Tensor | None = None) -> Tensor:
    """The root with smoothing, from its 2n sorted breakpoints, in O(n log n)."""
    number, width = u.shape[0], smoothing / ratio
    # Sums of values are subtracted below: start from small ones, in the best precision there is.
    largest = (u if seen is None else torch.where(seen, u, -torch.inf)).max()
    wide = _widest(u)
    relative, count = (u - largest).to(wide), number
    if seen is not None:
        # Others go below all breakpoints of those that count, where they add nothing.
        lowest = torch.where(seen, relative, 0).min()
        relative = torch.where(seen, relative, lowest - 2 * width)
        count = seen.sum().to(wide)
    ordered = relative.sort().values
    above = torch.cat([ordered.flip(0).cumsum(0).flip(0), ordered.new_zeros(1)])

    def excess(point: Tensor) -> Tensor:
        """Sum of [u_i - point]_+ at many points at once."""
        first = torch.searchsorted(ordered, point)
        return above[first] - (number - first) * point

    knots = torch.cat([ordered, ordered - width]).sort().values
    mean_slope = (excess(knots) - excess(knots + width)) / (smoothing * count)
    # mean_slope falls from 1/r >= 1 to 0: interpolate in the piece where it passes 1. Where it
    # rests at 1 (r n an integer, values far apart) every s is a minimiser; rounding must not choose
    # among them, so take the largest.
    slack = 8 * count * torch.finfo(wide).eps
    right = (mean_slope >= 1 - slack).sum().clamp(1, len(knots) - 1)
    ends = torch.stack([right - 1, right])
    high, low = mean_slope[ends]
    share = ((high - 1) / (high - low).clamp(min=torch.finfo(wide).tiny)).clamp(0, 1)
    left, end = knots[ends]
    root = left + share * (end - left)
    return largest + root.to(u.dtype)
