r"""The logarithms of both inner means of every pair, from at most one B x B matrix.

With :math:`\ell_i = \log\sum_j e^{s_{ij}/\tau}` over the negatives j of pair i, and
:math:`\ell'_i` likewise by column, everything that the backward pass needs beside the scores are
these two vectors and the incoming coefficients a and b:

.. math::
    \frac{\partial}{\partial s_{ij}} = \frac1\tau\Bigl(a_i e^{s_{ij}/\tau - \ell_i}
        + b_j e^{s_{ij}/\tau - \ell'_j}\Bigr)\ (i \ne j), \qquad
    \frac{\partial}{\partial s_{ii}} = -\frac{a_i + b_i}\tau .

Every exponential there is at most 1. On several ranks each forms only the rows of its own images
and of its own texts; the vectors of the other ranks are gathered, so that no gradient has to be
sent back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _checks
from .._distributed import find_group
from .candidates import Candidates, find_candidates

__all__ = ["compute_dtype", "log_means"]

_STRIP = 2**24
"""Numbers in a temporary: a strip of this size keeps a GPU busy and takes 64 MiB."""


def log_means(
    images: Tensor,
    texts: Tensor,
    temperature: float | Tensor,
    *,
    label: Tensor | None = None,
    anchor: Tensor | None = None,
    chunk: int | None = None,
    process_group: Any = "auto",
) -> Tensor:
    r"""Logarithms of a pair's two inner means, over the negatives of the batch.

    .. math::
        \log \frac1{N_i}\sum_{j} e^{(s_{ij} - s_{ii})/\tau}, \qquad
        \log \frac1{N_i}\sum_{j} e^{(s_{ji} - s_{ii})/\tau}, \qquad
        s_{ij} = \langle x_i, t_j\rangle

    The sums run over the negatives j of pair i: all other pairs of the batch (of all ranks), less
    those with the same label. Products and sums are in float32 (float64 for float64 features),
    also inside autocast and for half-precision features, and nothing is exponentiated before its
    maximum is taken off. One matrix of B x B scores is kept for the backward pass, none with
    `chunk`. Differentiable once, in the features and the temperature.

    On several ranks, each gets the rows of its own pairs, against the features of all. The
    gradient that a rank gets is that of the sum over *all* ranks' rows, with respect to its own
    features: use it as `Compositional` does, with coefficients multiplied by the number of ranks,
    under DDP or FSDP2, which average. Forward and backward then communicate, so every rank must
    call them equally often; a rank may have any number of pairs.

    Args:
        images: features x_i, shape (B, d), row i belongs to row i of `texts`.
        texts: features t_i, shape (B, d).
        temperature: tau, a positive number or a tensor of one element (with gradient, if wanted);
            a tensor that is not positive makes every value NaN.
        label: integers, shape (B,): pairs with the same label are no negatives of each other. All
            ranks give it or none does.
        anchor: booleans, shape (B,): only these pairs get a row, in order; all are negatives.
        chunk: rows of scores at a time, computed anew in the backward pass; None keeps the scores.
        process_group: see `Compositional`.

    Returns:
        Shape (A, 2): image side, text side, for the A anchors.

    Example:
        >>> import torch
        >>> from fcco.contrastive import log_means
        >>> images, texts = torch.eye(2), torch.tensor([[1.0, 0.0], [0.5, 1.0]])
        >>> log_means(images, texts, temperature=0.5)  # (s_ij - s_ii) / tau, one negative each
        tensor([[-1., -2.],
                [-2., -1.]])
    """
    if not isinstance(temperature, Tensor):
        _checks.positive("log_means", "temperature", temperature)
    if chunk is not None:
        _checks.integer("log_means", "chunk", chunk, 1)
    if not isinstance(temperature, Tensor):
        temperature = images.new_full((), temperature, dtype=compute_dtype(images, texts))
    elif temperature.numel() != 1:
        raise ValueError(
            "`log_means(temperature=...)` must be a number or a tensor of one element but has "
            f"shape {tuple(temperature.shape)}."
        )
    group = find_group(process_group)
    pairs = find_candidates("log_means", images, texts, label, anchor, group)
    needed = (images, texts, temperature)
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in needed)
    return _LogMeans.apply(images, texts, temperature, pairs, chunk, keeps)  # type: ignore[return-value]


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The precision to compute in: that of the inputs, but not below float32."""
    kind = torch.float32
    for tensor in tensors:
        kind = torch.promote_types(kind, tensor.dtype)
    return kind


class _Side(NamedTuple):
    """The scores of this rank's images against all texts, or of its texts against all images.

    Attributes:
        own: this rank's features, shape (own, d).
        every: the features of the other kind of all ranks, shape (total, d).
        tau: the temperature.
        pairs: who is a negative of whom.
        chunk: rows at a time, or None.
        scores: own @ every.T when it is kept, shape (own, total).
    """

    own: Tensor
    every: Tensor
    tau: Tensor
    pairs: Candidates
    chunk: int | None
    scores: Tensor | None

    def strips(self) -> Iterator[tuple[slice, Tensor]]:
        """Scores over tau, some rows at a time, each time in a new tensor."""
        step = self.chunk or max(_STRIP // self.pairs.total, 1)
        for first in range(0, self.pairs.own, step):
            rows = slice(first, min(first + step, self.pairs.own))
            if self.scores is None:
                yield rows, (self.own[rows] @ self.every.T).div_(self.tau)
            else:
                yield rows, self.scores[rows] / self.tau

    def summed(self, mean: Tensor | None) -> Tensor:
        """The log sum exp over the negatives of each own pair.

        `mean`, when given, is filled with the mean exponent, weighed by the exponentials.
        """
        total = self.own.new_empty(self.pairs.own)
        for rows, strip in self.strips():
            # Finite, so that 0 times it is 0 below; its exponential is 0 all the same.
            strip = self.pairs.hide(strip, rows.start, torch.finfo(strip.dtype).min)
            total[rows] = strip.logsumexp(1)
            if mean is not None:
                share = torch.exp(strip - total[rows].unsqueeze(1))
                mean[rows] = share.mul_(strip).sum(1)
        return total

    def pulled(self, weight: Tensor, total: Tensor, others: Tensor, totals: Tensor) -> Tensor:
        """The gradient of the own features times tau, without the part of the matching pairs.

        Args:
            weight: coefficients of the own pairs, shape (own,).
            total: what `summed` gave for them.
            others: coefficients of the other side of all pairs, shape (total,).
            totals: what `summed` gave for these.
        """
        result = torch.empty_like(self.own)
        for rows, strip in self.strips():
            slopes = torch.exp(strip - total[rows].unsqueeze(1)).mul_(weight[rows].unsqueeze(1))
            slopes.add_(strip.sub_(totals).exp_().mul_(others))
            result[rows] = self.pairs.hide(slopes, rows.start, 0.0) @ self.every
        return result


def _sides(
    images: Tensor, texts: Tensor, tau: Tensor, pairs: Candidates, chunk: int | None, kept: Any
) -> tuple[_Side, _Side]:
    """Both sides, from the features of all ranks; `kept` is empty or what was saved of the scores.

    On one process the scores of one side are those of the other, transposed.
    """
    mine = slice(pairs.start, pairs.start + pairs.own)
    if kept:
        first, second = kept[0], kept[-1] if len(kept) > 1 else kept[0].T
    else:
        first = second = None
    return (
        _Side(images[mine], texts, tau, pairs, chunk, first),
        _Side(texts[mine], images, tau, pairs, chunk, second),
    )


class _LogMeans(torch.autograd.Function):
    """`log_means`, with its own backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        texts: Tensor,
        temperature: Tensor,
        pairs: Candidates,
        chunk: int | None,
        keeps: bool,
    ) -> Tensor:
        kind = compute_dtype(images, texts)
        with torch.autocast(images.device.type, enabled=False):
            tau = temperature.reshape(()).to(images.device, kind)
            # One that was learned below 0 would turn the loss round; a tracker refuses NaN.
            tau = torch.where(tau > 0, tau, torch.nan)
            every = pairs.gathered(images, texts)
            first, second = (each.to(kind) for each in every)
            mine = slice(pairs.start, pairs.start + pairs.own)
            kept = []
            if chunk is None:
                kept.append(first[mine] @ second.T)
                if pairs.group is not None:
                    kept.append(second[mine] @ first.T)
            totals = first.new_empty((2, pairs.own))
            means = torch.empty_like(totals) if keeps and ctx.needs_input_grad[2] else None
            for k, side in enumerate(_sides(first, second, tau, pairs, chunk, kept)):
                totals[k] = side.summed(None if means is None else means[k])
            matching = (first[mine] * second[mine]).sum(1) / tau
            result = (totals - matching - pairs.log_negatives(kind)).T
        if keeps:
            if means is not None:
                means -= matching
            ctx.call = pairs, chunk, images.dtype, texts.dtype
            ctx.temperature = temperature.shape, temperature.device, temperature.dtype
            ctx.save_for_backward(first, second, tau, totals, means, *kept)
        return result.contiguous() if pairs.anchor is None else result[pairs.anchor]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        first, second, tau, totals, means, *kept = ctx.saved_tensors
        pairs, chunk, *kinds = ctx.call
        needs = ctx.needs_input_grad
        slopes: list[Tensor | None] = [None, None, None]
        with torch.autocast(first.device.type, enabled=False):
            weights = gradients[0].T.to(totals.dtype)
            if pairs.anchor is not None:  # a pair without a row has no coefficients
                weights = torch.zeros_like(totals).index_copy_(1, pairs.anchor, weights)
            if means is not None and needs[2]:
                shape, device, kind = ctx.temperature
                # Without a negative (then it is no anchor) a pair's mean is not finite.
                slope = torch.where(weights == 0, 0, weights * means).sum() / -tau
                slopes[2] = slope.to(device, kind).reshape(shape)
            others = pairs.gathered(weights.T, totals.T)
            mine = slice(pairs.start, pairs.start + pairs.own)
            matching = weights.sum(0).unsqueeze(1)
            for k, side in enumerate(_sides(first, second, tau, pairs, chunk, kept)):
                if needs[k]:
                    its, theirs = totals[k], others[1].T[1 - k]
                    slope = side.pulled(weights[k], its, others[0].T[1 - k], theirs)
                    slope.sub_(matching * side.every[mine]).div_(tau)
                    slopes[k] = slope.to(kinds[k])
        return *slopes, None, None, None
