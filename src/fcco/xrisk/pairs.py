"""Pairs of scores: the loss of a pair, and means over many pairs.

No more than a million pairs are ever in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from .. import _checks

_KEPT = 1 << 20  # pairs whose slopes are kept for the backward pass; more are computed twice
_CHUNK = 1 << 18  # and so many at a time then

ValueAndSlope = tuple[Tensor, Tensor]
"""Two different tensors, which the caller may overwrite."""


def _squared_hinge(z: Tensor, by: float) -> ValueAndSlope:
    excess = (z + 1).relu_()
    return excess * excess, excess * (2 * by)


def _logistic(z: Tensor, by: float) -> ValueAndSlope:
    return softplus(z) / math.log(2), z.sigmoid() * (by / math.log(2))


SURROGATES: dict[str, Callable[[Tensor, float], ValueAndSlope]] = {
    "squared_hinge": _squared_hinge,
    "logistic": _logistic,
}


@dataclass(frozen=True)
class PairLoss:
    """A differentiable stand-in l(d) for the 0-1 loss of a pair.

    d is the score that should be lower minus the other one. With z = d / margin the choices are

    | surrogate | l(d) |
    |---|---|
    | `"squared_hinge"` | [1 + z]_+^2 |
    | `"logistic"` | log2(1 + exp(z)) |

    Both are non-decreasing, and 1 at d = 0. Called with differences, it returns l(d) and l'(d).
    """

    surrogate: str = "squared_hinge"
    margin: float = 1.0

    def __call__(self, difference: Tensor) -> ValueAndSlope:
        return SURROGATES[self.surrogate](difference / self.margin, 1 / self.margin)

    @classmethod
    def read(cls, call: str, surrogate: Any, margin: Any) -> PairLoss:
        """The settings of a call, checked."""
        _checks.one_of(call, "surrogate", surrogate, tuple(SURROGATES))
        _checks.positive(call, "margin", margin)
        return cls(surrogate, margin)


def difference(d: Tensor) -> ValueAndSlope:
    """The difference itself, for exponentials of it."""
    return d, torch.ones_like(d)


class Members(NamedTuple):
    """Pairs of one list (query) alone, and no item with itself."""

    own: Tensor  # the position of each anchor among the others, (P,)
    row: Tensor  # the list of each anchor, (P,)
    column: Tensor  # the list of each of the others, (M,)

    def weight(self, rows: slice, like: Tensor) -> Tensor:
        """The weights of the pairs of some anchors, (R, M): 1 over the number that counts, or 0."""
        table = (self.row[rows].unsqueeze(1) == self.column).to(like)
        table.scatter_(1, self.own[rows].unsqueeze(1), 0.0)
        return table / table.sum(1, keepdim=True).clamp(min=1)


def pair_means(
    loss: Callable[[Tensor], ValueAndSlope],
    anchors: Tensor,
    others: Tensor,
    weight: Members | Tensor | None = None,
    *,
    level: Tensor | None = None,
    split: int | None = None,
    log_exp: bool = False,
) -> Tensor:
    r"""Means over the pairs of each anchor i with the others j; differentiable once.

    .. math::
        s_i + \sum_j w_{ij}\,\bigl(\ell(h_j - h_i) - s_i\bigr) \qquad\text{or}\qquad
        \log\sum_j w_{ij}\, e^{\ell(h_j - h_i)}

    Args:
        loss: l, a `PairLoss` or `difference`.
        anchors: scores h_i, (P,).
        others: scores h_j, (M,).
        weight: w of each of the others, (M,), or the pairs to take the mean over; None for all.
        level: s_i, (P,), without gradient, for weights of the others; 0 unless given.
        split: means over the others before and from this one on, (P, 2), without weights.
        log_exp: the second form, with weights.
    """
    cuts = () if split is None else (split,)
    means: Any = _PairMeans.apply(anchors, others, loss, weight, level, cuts, log_exp)
    return means.squeeze(1) if split is None else means


class _PairMeans(torch.autograd.Function):
    """`pair_means` with its own backward pass; one column for each part of the others."""

    @staticmethod
    def forward(ctx: Any, anchors: Tensor, others: Tensor, *how: Any) -> Tensor:
        ctx.how, parts, slope = how, [], None
        for rows in _chunks(len(anchors), len(others)):
            value, slope = _block(anchors[rows], others, rows, *how)
            parts.append(value)
        ctx.save_for_backward(anchors, others, slope if len(parts) == 1 else None)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (anchors, others, kept), cuts = ctx.saved_tensors, ctx.how[3]
        of_others, of_anchors = torch.zeros_like(others), torch.zeros_like(anchors)
        for rows in _chunks(len(anchors), len(others)):
            slope = kept if kept is not None else _block(anchors[rows], others, rows, *ctx.how)[1]
            parts = slope.tensor_split(cuts, dim=1), of_others.tensor_split(cuts)
            for gradient, part, of_part in zip(gradients[0][rows].unbind(1), *parts, strict=True):
                of_part += gradient @ part
                of_anchors[rows] -= gradient * part.sum(1)
        return of_anchors, of_others, None, None, None, None, None


def _block(
    anchors: Tensor,
    others: Tensor,
    rows: slice,
    loss: Callable[[Tensor], ValueAndSlope],
    weight: Members | Tensor | None,
    level: Tensor | None,
    cuts: tuple[int, ...],
    log_exp: bool,
) -> tuple[Tensor, Tensor]:
    """The values of some rows, (R, parts), and their derivatives by the differences, (R, M)."""
    value, slope = loss(others - anchors.unsqueeze(1))
    if isinstance(weight, Members):
        weight = weight.weight(rows, value)
    if weight is None:
        for part in slope.tensor_split(cuts, dim=1):
            part /= part.shape[1]
        means = [part.mean(1) for part in value.tensor_split(cuts, dim=1)]
        return torch.stack(means, dim=1), slope
    if log_exp:
        total = value.add_(weight.log()).logsumexp(1, keepdim=True)
        return total, slope.mul_((value - total).exp_())
    start = 0.0 if level is None else level[rows].unsqueeze(1)
    return start + value.sub_(start).mul_(weight).sum(1, keepdim=True), slope.mul_(weight)


def _chunks(rows: int, columns: int) -> list[slice]:
    """Rows to compute at a time: all of them where pairs are few."""
    if rows * columns <= _KEPT:
        return [slice(0, rows)]
    size = max(_CHUNK // max(columns, 1), 1)
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]
