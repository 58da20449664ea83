"""Means over pairs of scores, row by row, without keeping all pairs in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._distributed import Group, gather_rows
from .surrogates import Surrogate

__all__ = [
    "Members",
    "PairMean",
    "all_pair_means",
    "gather_scores",
    "pair_means",
    "share_above",
    "two_means",
]

_KEPT = 1 << 20
"""Pairs whose slopes are kept for the backward pass; more than these are computed twice."""

_CHUNK = 1 << 18
"""Pairs that are computed at a time when there are more than these."""


@dataclass(frozen=True)
class PairMean:
    r"""What is computed of the pairs (i, j) of each row i, with d_ij = h_j - h_i.

    | kind | value of row i |
    |---|---|
    | `"mean"` | mean_j l(d_ij) |
    | `"cvar"` | s_i + mean_j [l(d_ij) - s_i]_+ / share |
    | `"log_mean_exp"` | log mean_j exp(l(d_ij) / temperature) |

    Args:
        surrogate: l.
        kind: see the table.
        share: the share of the worst pairs, for `"cvar"`.
        temperature: for `"log_mean_exp"`.
    """

    surrogate: Surrogate
    kind: Literal["mean", "cvar", "log_mean_exp"] = "mean"
    share: float = 1.0
    temperature: float = 1.0

    def rows(
        self, difference: Tensor, level: Tensor | None, weight: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """The value of each row (R,), and its derivatives by d_ij, (R, M); pure.

        Args:
            difference: d_ij, (R, M).
            level: s_i, (R, 1), for `"cvar"`.
            weight: of the pairs in the mean of their row: one number or (R, M), 0 for a pair that
                does not count. Of `"cvar"`, (M,) if the worst pairs are known: those of columns.
        """
        value, slope = self.surrogate.value_and_slope(difference)
        if self.kind == "mean":
            return (value * weight).sum(1), slope.mul_(weight)
        if self.kind == "cvar":
            assert level is not None
            excess = value.sub_(level)
            known = isinstance(weight, Tensor) and weight.dim() == 1
            counted = weight if known else (excess > 0).to(excess).mul_(weight).div_(self.share)
            return level.squeeze(1) + (excess * counted).sum(1), slope.mul_(counted)
        log_weight = weight.log() if isinstance(weight, Tensor) else math.log(weight)
        scaled = value.div_(self.temperature).add_(log_weight)
        total = scaled.logsumexp(1)
        share = (scaled - total.unsqueeze(1)).exp_()
        return total, slope.mul_(share).div_(self.temperature)


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
    mean: PairMean,
    anchors: Tensor,
    others: Tensor,
    level: Tensor | None = None,
    members: Members | Tensor | None = None,
) -> Tensor:
    """One value for each anchor, from its pairs with the others; differentiable once.

    Memory is that of at most a million pairs, and a step costs one or two passes over the pairs.

    Args:
        mean: what is computed.
        anchors: scores h_i, (P,).
        others: scores h_j, (M,).
        level: s_i of `"cvar"`, (P,); no gradient flows into it.
        members: which pairs count; None for all. Or the weight of each of the others, (M,).

    Example:
        >>> import torch
        >>> from fcco.xrisk.pairs import PairMean, pair_means
        >>> from fcco.xrisk.surrogates import SquaredHinge
        >>> positives, negatives = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.0])
        >>> pair_means(PairMean(SquaredHinge()), positives, negatives)
        tensor([2., 0.])
    """
    return _PairMeans.apply(anchors, others, level, mean, members)  # type: ignore[return-value]


def two_means(surrogate: Surrogate, scores: Tensor, anchors: int) -> Tensor:
    """The means of l over the pairs with the anchors and with the others, (P, 2).

    The same as `pair_means` twice, in one pass. An anchor is among the anchors itself.

    Args:
        surrogate: l.
        scores: of the anchors, then of the others.
        anchors: P, the number of anchors.
    """
    return _TwoMeans.apply(scores, anchors, surrogate)  # type: ignore[return-value]


class _TwoMeans(torch.autograd.Function):
    """`two_means` with its own backward pass."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, anchors: int, surrogate: Surrogate) -> Tensor:
        ctx.anchors, ctx.surrogate = anchors, surrogate
        parts, slope = [], None
        for rows in _chunks(anchors, len(scores)):
            value, slope = surrogate.value_and_slope(scores - scores[rows].unsqueeze(1))
            halves = value.tensor_split((anchors,), dim=1)
            parts.append(torch.stack([half.mean(1) for half in halves], dim=1))
        ctx.save_for_backward(scores, slope if len(parts) == 1 else None)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (scores, kept), anchors = ctx.saved_tensors, ctx.anchors
        sizes = gradients[0].new_tensor([anchors, len(scores) - anchors])
        weight, result = gradients[0] / sizes, torch.zeros_like(scores)
        for rows in _chunks(anchors, len(scores)):
            slope = kept
            if slope is None:
                _, slope = ctx.surrogate.value_and_slope(scores - scores[rows].unsqueeze(1))
            first, second = slope.tensor_split((anchors,), dim=1)
            of_first, of_second = weight[rows].unbind(1)
            result[:anchors] += of_first @ first
            result[anchors:] += of_second @ second
            result[rows] -= of_first * first.sum(1) + of_second * second.sum(1)
        return result, None, None


def all_pair_means(
    mean: PairMean,
    anchors: Tensor,
    others: Tensor,
    level: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """`pair_means` by plain operations, which `torch.func` can map; all pairs stay in memory."""
    return _block(anchors, others, level, mean, weight, slice(0, len(anchors)))[0]


class _PairMeans(torch.autograd.Function):
    """`pair_means` with its own backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        anchors: Tensor,
        others: Tensor,
        level: Tensor | None,
        mean: PairMean,
        members: Members | Tensor | None,
    ) -> Tensor:
        ctx.mean, ctx.members = mean, members
        parts, slope = [], None
        for rows in _chunks(len(anchors), len(others)):
            value, slope = _block(anchors, others, level, mean, members, rows)
            parts.append(value)
        if len(parts) == 1:
            ctx.save_for_backward(slope)
            return parts[0]
        ctx.save_for_backward(anchors, others, level)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        if len(ctx.saved_tensors) == 1:
            (slope,) = ctx.saved_tensors
            return -(slope.sum(1) * gradient), gradient @ slope, None, None, None
        anchors, others, level = ctx.saved_tensors
        of_others, of_anchors = torch.zeros_like(others), torch.empty_like(anchors)
        for rows in _chunks(len(anchors), len(others)):
            _, slope = _block(anchors, others, level, ctx.mean, ctx.members, rows)
            of_others += gradient[rows] @ slope
            of_anchors[rows] = slope.sum(1) * -gradient[rows]
        return of_anchors, of_others, None, None, None


def _block(
    anchors: Tensor,
    others: Tensor,
    level: Tensor | None,
    mean: PairMean,
    members: Members | Tensor | None,
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """The values and slopes of some rows."""
    difference = others - anchors[rows].unsqueeze(1)
    weight: Any = 1 / len(others) if members is None else members
    if isinstance(weight, Members):
        weight = weight.weight(rows, difference)
    return mean.rows(difference, None if level is None else level[rows].unsqueeze(1), weight)


def share_above(mean: PairMean, anchors: Tensor, others: Tensor, level: Tensor) -> Tensor:
    """The share of the pairs of each row whose loss is above s_i, (P,); without gradient."""
    parts = []
    for rows in _chunks(len(anchors), len(others)):
        value, _ = mean.surrogate.value_and_slope(others - anchors[rows].unsqueeze(1))
        parts.append((value > level[rows].unsqueeze(1)).to(value).mean(1))
    return torch.cat(parts)


def _chunks(rows: int, columns: int) -> list[slice]:
    """Rows to compute at a time: all of them where pairs are few."""
    if rows * columns <= _KEPT:
        return [slice(0, rows)]
    size = max(_CHUNK // max(columns, 1), 1)
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


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


def gather_scores(scores: Tensor, group: Group, sizes: list[int]) -> Tensor:
    """Concatenate the scores of all ranks; backward needs no communication.

    Args:
        scores: of this rank, (B,) or (B, T).
        group: the ranks.
        sizes: number of samples on each rank.
    """
    return _GatherScores.apply(scores, group, sizes)  # type: ignore[return-value]
