"""Means over pairs of scores, row by row, without keeping all pairs in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._distributed import Group, gather_rows
from .surrogates import Surrogate

__all__ = ["Members", "gather_scores", "pair_means"]

_KEPT = 1 << 20
"""Pairs whose slopes are kept for the backward pass; more than these are computed twice."""

_CHUNK = 1 << 18
"""Pairs that are computed at a time when there are more than these."""


class Members(NamedTuple):
    """Which pairs count when these are not all: those of one list (query), but no item with itself.

    Attributes:
        own: the position of each anchor among the others, (P,).
        row: the list of each anchor, (P,).
        column: the list of each of the others, (M,).
    """

    own: Tensor
    row: Tensor
    column: Tensor

    def weight(self, rows: slice, like: Tensor) -> Tensor:
        """The weights of the pairs of some anchors, (R, M): 1 over the number that counts, or 0."""
        table = (self.row[rows].unsqueeze(1) == self.column).to(like)
        table.scatter_(1, self.own[rows].unsqueeze(1), 0.0)
        return table / table.sum(1, keepdim=True).clamp(min=1)


def pair_means(
    surrogate: Surrogate,
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

    Memory is that of at most a million pairs, and a step costs one or two passes over the pairs.

    Args:
        surrogate: l.
        anchors: scores h_i, (P,).
        others: scores h_j, (M,).
        weight: w of each of the others, (M,), or the pairs to take the mean over; None for all.
        level: s_i, (P,), without gradient; 0 unless given, and only with the weights of the others.
        split: means over the others before and from this one on, (P, 2), not over all; of all
            pairs only.
        log_exp: the second form.

    Example:
        >>> import torch
        >>> from fcco.xrisk.pairs import pair_means
        >>> from fcco.xrisk.surrogates import PairSquaredHinge
        >>> positives, negatives = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.0])
        >>> pair_means(PairSquaredHinge(), positives, negatives)
        tensor([2., 0.])
    """
    cuts = () if split is None else (split,)
    means: Any = _PairMeans.apply(anchors, others, surrogate, weight, level, cuts, log_exp)
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
    surrogate: Surrogate,
    weight: Members | Tensor | None,
    level: Tensor | None,
    cuts: tuple[int, ...],
    log_exp: bool,
) -> tuple[Tensor, Tensor]:
    """The values of some rows, (R, parts), and their derivatives by the differences, (R, M)."""
    value, slope = surrogate.value_and_slope(others - anchors.unsqueeze(1))
    if isinstance(weight, Members):
        weight = weight.weight(rows, value)
    if weight is None and not log_exp:
        for part in slope.tensor_split(cuts, dim=1):
            part /= part.shape[1]
        means = [part.mean(1) for part in value.tensor_split(cuts, dim=1)]
        return torch.stack(means, dim=1), slope
    if weight is None:
        weight = value.new_tensor(1 / len(others))
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


def gather_scores(scores: Tensor, group: Group, sizes: list[int]) -> Tensor:
    """Concatenate the scores of all ranks, (B,) or (B, T); backward needs no communication.

    Args:
        scores: of this rank.
        group: the ranks.
        sizes: number of samples on each.
    """
    return _GatherScores.apply(scores, group, sizes)  # type: ignore[return-value]


class _GatherScores(torch.autograd.Function):
    """The scores of all ranks; only those of this rank carry a gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, group: Group, sizes: list[int]) -> Tensor:
        start = sum(sizes[: group.rank])
        ctx.local, ctx.ranks = slice(start, start + len(scores)), group.size
        rows = scores if scores.dim() > 1 else scores.unsqueeze(1)
        return gather_rows(rows.contiguous(), group, sizes).reshape(-1, *scores.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # All ranks compute the same loss from the same scores, and each adds the gradient of its
        # own samples: the sum over ranks is wanted, and data-parallel training takes the mean.
        return gradients[0][ctx.local] * ctx.ranks, None, None
