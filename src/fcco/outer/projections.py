r"""Euclidean projections of the last axis, free of data-dependent branches.

A support function f(u) = max_{y in Y} <y, u> has prox_{lambda f}(u) = u - (projection of u onto
lambda Y). Every set here therefore has a size (`total`, `radius`), so that lambda Y is projected
onto directly: dividing u by a small lambda first would lose the digits that tell nearby entries
apart.

| function | set |
|---|---|
| `project_box` | low <= y <= high |
| `project_ball` | norm of y <= radius |
| `project_simplex` | y >= 0, sum y = total |
| `project_capped_simplex` | 0 <= y <= cap, sum y = total |
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks

__all__ = [
    "capped_threshold",
    "project_ball",
    "project_box",
    "project_capped_simplex",
    "project_simplex",
    "safe_norm",
]


def project_box(point: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Project each entry onto [low, high].

    Example:
        >>> project_box(torch.tensor([-1.0, 0.5, 2.0]), 0.0, 1.0)
        tensor([0.0000, 0.5000, 1.0000])
    """
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        # Two calls, because one refuses a number and a tensor together.
        return point.clamp(min=low).clamp(max=high)
    return point.clamp(low, high)


def project_ball(point: Tensor, radius: float | Tensor = 1.0) -> Tensor:
    """Project onto the Euclidean ball around 0.

    Example:
        >>> project_ball(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    norm = safe_norm(point).unsqueeze(-1)
    # Divided first: radius / norm may be too small a number for float32.
    return torch.where(norm > radius, point / norm.clamp(min=radius) * radius, point)


def safe_norm(point: Tensor) -> Tensor:
    """The Euclidean norm, also where the squares of the entries would overflow or vanish.

    Example:
        >>> safe_norm(torch.tensor([[3e20, 4e20], [3e-30, 4e-30]]))
        tensor([5.0000e+20, 5.0000e-30])
    """
    # A constant for autograd: the norm does not depend on the scale at which it is computed.
    largest = point.detach().abs().amax(dim=-1, keepdim=True)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return scale.squeeze(-1) * torch.linalg.vector_norm(point / scale, dim=-1)


def project_simplex(point: Tensor, total: float | Tensor = 1.0) -> Tensor:
    """Project onto {y >= 0, sum y = total}.

    Example:
        >>> project_simplex(torch.tensor([0.5, 0.3, -1.0]))
        tensor([0.6000, 0.4000, 0.0000])

    References:
        Held, Wolfe and Crowder (1974), Validation of subgradient optimization.
    """
    centred = point - point.amax(dim=-1, keepdim=True)
    partial = centred.sort(dim=-1, descending=True).values.cumsum(-1)
    threshold = ((partial - total) / _counts(point, first=1)).amax(dim=-1, keepdim=True)
    return (centred - threshold).clamp(min=0)


def project_capped_simplex(
    point: Tensor, cap: float | Tensor, total: float | Tensor = 1.0
) -> Tensor:
    r"""Project onto {0 <= y <= cap, sum y = total}, exactly.

    The projection is clip(point - t, 0, cap), and its sum is piecewise linear and decreasing in t
    with breakpoints point - cap and point: sort them, add up the pieces, solve the last one.

    Args:
        point: any shape; the last axis has length d.
        cap: the largest weight, at least total / d. total / cap need not be an integer. A tensor
            is 0-dimensional or ends in an axis of length 1.
        total: the sum of the weights.

    Example:
        >>> project_capped_simplex(torch.tensor([3.0, 1.0, 0.9, -2.0]), cap=0.4)
        tensor([0.4000, 0.3500, 0.2500, 0.0000])
    """
    size = point.shape[-1]
    if not isinstance(cap, Tensor) and not isinstance(total, Tensor):
        # The slack is for a cap = total / d that was rounded.
        _checks.at_least("project_capped_simplex", "cap", cap, total / size * (1 - 1e-6))
    cap, total = _as_tensor(cap, point), _as_tensor(total, point)
    cap = torch.minimum(cap, total)

    # Seen from the hard threshold the root t lies in [-cap, 0]: entries outside [-cap, cap] are
    # at one of their ends whatever t is, and all numbers that matter are of the size of cap.
    centred = project_box(point - capped_threshold(point, cap, total), -cap, cap)
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
    weights = project_box(centred, 0.0, cap)
    free = ((centred >= 0) & (centred <= cap)).sum(dim=-1, keepdim=True)
    correction = (weights.sum(dim=-1, keepdim=True) - total) / free.clamp(min=1)
    return project_box(centred - correction, 0.0, cap)


def capped_threshold(point: Tensor, cap: float | Tensor, total: float | Tensor = 1.0) -> Tensor:
    """The smallest entry with weight when the largest entries get `cap` each, up to `total`.

    With total = 1 and cap = 1/(r d) it is the upper quantile of level r: the value at risk.

    Example:
        >>> capped_threshold(torch.tensor([3.0, 1.0, 0.9, -2.0]), cap=0.4)
        tensor([0.9000])
    """
    ordered = point.sort(dim=-1, descending=True).values
    remaining = total - cap * _counts(point, first=0)
    return torch.where(remaining > 0, ordered, torch.inf).amin(dim=-1, keepdim=True)


def _counts(point: Tensor, first: int) -> Tensor:
    """The numbers first, first + 1, ..., one for each entry."""
    stop = point.shape[-1] + first
    return torch.arange(first, stop, dtype=point.dtype, device=point.device)


def _as_tensor(value: float | Tensor, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else like.new_full((), value)
