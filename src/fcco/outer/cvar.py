r"""CVaR of a vector, and the projections behind it, free of data-dependent branches.

CVaR is a support function f(u) = max_{y in Y} <y, u>, so prox_{lambda f}(u) = u - (projection of u
onto lambda Y). The sets have a size (`total`), so that lambda Y is projected onto directly:
dividing u by a small lambda first would lose the digits that tell nearby entries apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _checks
from .base import AbstractOuter, check_step, clip


@dataclass(frozen=True)
class CVaR(AbstractOuter):
    r"""The conditional value at risk: the mean of the worst share r of the entries.

    .. math::
        f(u) = \min_s\, s + \tfrac{1}{r d} \sum_{j=1}^{d} [u_j - s]_+
            = \max_{y\in Y} \langle y, u\rangle, \qquad
        Y = \Bigl\{0 \le y \le \tfrac1{rd},\ \textstyle\sum_j y_j = 1\Bigr\}

    r d need not be an integer: the last entry then has a part of the weight, and entries that tie
    share it. The gradient of f_lambda is the projection of u / lambda onto Y; a step is a number or
    a 0-dimensional tensor.

    Args:
        ratio: r in (0, 1]; 1/d is the maximum.
    """

    ratio: float

    dim = None
    convex = monotone = True
    lipschitz = 1.0

    def __post_init__(self) -> None:
        _checks.in_interval("CVaR", "ratio", self.ratio, 0, 1, open_low=True)

    def __call__(self, u: Tensor) -> Tensor:
        return self.value_and_gradient(u)[0]

    def gradient(self, u: Tensor) -> Tensor:
        cap = self._cap(u)
        threshold = capped_threshold(u, cap)
        above, tied = (u > threshold).to(u.dtype), (u == threshold).to(u.dtype)
        remaining = 1 - cap * above.sum(dim=-1, keepdim=True)
        return cap * above + tied * (remaining / tied.sum(dim=-1, keepdim=True))

    def value_and_gradient(self, u: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.gradient(u)
        return (weights * u).sum(dim=-1), weights

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """<y, u> - step/2 |y|^2, and y, the projection of u / step onto Y."""
        check_step(self, step)
        y = project_capped_simplex(u, step * self._cap(u), step) / step
        return (y * (u - y * (step / 2))).sum(dim=-1), y

    def _cap(self, u: Tensor) -> float:
        return 1 / (self.ratio * u.shape[-1])


def project_capped_simplex(
    point: Tensor, cap: float | Tensor, total: float | Tensor = 1.0
) -> Tensor:
    r"""Project onto {0 <= y <= cap, sum y = total}, exactly.

    It is clip(point - t, 0, cap), and its sum is piecewise linear and decreasing in t with
    breakpoints point - cap and point: sort them, add up the pieces, solve the last one.
    The last axis has length d; `cap` is at least total / d, and total / cap need not be an integer.
    As a tensor it is 0-dimensional or ends in an axis of length 1.
    """
    size = point.shape[-1]
    if not isinstance(cap, Tensor) and not isinstance(total, Tensor):
        # The slack is for a cap = total / d that was rounded.
        _checks.at_least("project_capped_simplex", "cap", cap, total / size * (1 - 1e-6))
    cap, total = _as_tensor(cap, point), _as_tensor(total, point)
    cap = torch.minimum(cap, total)

    # Seen from the hard threshold the root t lies in [-cap, 0]: entries outside [-cap, cap] are
    # at one of their ends whatever t is, and all numbers that matter are of the size of cap.
    centred = clip(point - capped_threshold(point, cap, total), -cap, cap)
    leaves_cap = centred - cap
    breaks, order = torch.cat([leaves_cap, centred.expand_as(leaves_cap)], dim=-1).sort(dim=-1)
    # The slope of the sum falls by 1 where an entry leaves its cap and rises by 1 where it
    # reaches 0; `sums` are the sums of the weights at the breakpoints.
    ones = torch.ones_like(leaves_cap)
    slope = torch.cat([-ones, ones], dim=-1).gather(-1, order).cumsum(-1)
    change = (slope[..., :-1] * breaks.diff(dim=-1)).cumsum(-1)
    sums = size * cap + torch.cat([torch.zeros_like(change[..., :1]), change], dim=-1)
    last = ((sums >= total).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    excess, descent = sums.gather(-1, last) - total, -slope.gather(-1, last)
    centred = centred - breaks.gather(-1, last) - excess / descent.clamp(min=1)

    # One Newton step removes the rounding of the running sums. Entries at an end may move too:
    # they count, so that the step is never too long.
    weights = clip(centred, 0.0, cap)
    free = ((centred >= 0) & (centred <= cap)).sum(dim=-1, keepdim=True)
    correction = (weights.sum(dim=-1, keepdim=True) - total) / free.clamp(min=1)
    return clip(centred - correction, 0.0, cap)


def capped_threshold(point: Tensor, cap: float | Tensor, total: float | Tensor = 1.0) -> Tensor:
    """The smallest entry with weight when the largest entries get `cap` each, up to `total`."""
    ordered = point.sort(dim=-1, descending=True).values
    larger = torch.arange(point.shape[-1], dtype=point.dtype, device=point.device)
    return torch.where(total - cap * larger > 0, ordered, torch.inf).amin(dim=-1, keepdim=True)


def _as_tensor(value: float | Tensor, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else like.new_full((), value)
