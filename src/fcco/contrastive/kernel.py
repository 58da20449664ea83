r"""Logarithms of both inner means of every pair; at most one B x B matrix is kept for backward.

Let :math:`s_{ij} = \langle x_i, t_j\rangle` be the scores, :math:`\tau_i, \tau'_i` the temperatures
of the two sides of pair i, often all the same, :math:`\ell_i = \log\sum_j e^{s_{ij}/\tau_i}` and
:math:`\ell'_i = \log\sum_j e^{s_{ji}/\tau'_i}` over the negatives j of pair i, and a, b the
gradients with respect to the two values of each pair, divided by the temperatures. Then the
gradient with respect to the scores is

.. math::
    \frac{\partial}{\partial s_{ij}} = a_i e^{s_{ij}/\tau_i - \ell_i}
        + b_j e^{s_{ij}/\tau'_j - \ell'_j}\ (i \ne j), \qquad
    \frac{\partial}{\partial s_{ii}} = -(a_i + b_i).

Every exponential is at most 1, and besides the scores only these vectors are needed. On several
ranks each computes the rows of its own images and of its own texts, forward and backward. Only the
vectors of the other ranks are gathered then, not gradients of their features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _checks
from .._distributed import Group, find_group, gather_rows, row_counts

# Numbers in a temporary without `chunk`: 64 MiB in float32, enough to keep a GPU busy.
_BLOCK = 2**24


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
    r"""Logarithms of each pair's two inner means, over its negatives in the batch.

    .. math::
        \log \frac1{N_i}\sum_{j} e^{(s_{ij} - s_{ii})/\tau}, \qquad
        \log \frac1{N_i}\sum_{j} e^{(s_{ji} - s_{ii})/\tau}, \qquad
        s_{ij} = \langle x_i, t_j\rangle

    The sums run over the N_i negatives j of pair i: all other pairs of the batch (of all ranks)
    except those with the same label. Products and sums are at least in float32, also inside
    autocast, and do not overflow. Differentiable once, with respect to features and temperature.

    On several ranks, each gets the rows of its own pairs, and its features the gradient of the sum
    over *all* ranks' rows; DDP and FSDP2 average over ranks, so multiply by their number, as
    `Compositional` does. Every rank must make every call, with any number of pairs.

    Args:
        images: features x_i, (B, d); row i belongs to row i of `texts`, t_i.
        temperature: tau, a positive number, a tensor of one element, or one for each value, (A, 2);
            where a tensor is not positive, values are NaN.
        label: integers, (B,): pairs with the same label are no negatives of each other.
        anchor: booleans, (B,): only these pairs get a row, in order; all are negatives.
        chunk: number of rows of scores at a time, computed again in the backward pass; None keeps
            all scores.
        process_group: see `Compositional`.

    Returns:
        Shape (A, 2): image side, text side, for the A anchors. With a temperature for each value
        `grad_fn.by_tau` holds the derivative of each by its own.
    """
    if chunk is not None:
        _checks.integer("log_means", "chunk", chunk, 1)
    dtype = compute_dtype(images, texts)
    batch = _read_batch(images, texts, label, anchor, chunk, find_group(process_group))
    if isinstance(temperature, Tensor):
        tau = temperature.to(images.device, dtype)
    else:
        _checks.positive("log_means", "temperature", temperature)
        tau = images.new_full((), temperature, dtype=dtype)
    # Below 0 the loss would change its sign. An `if` would make the CPU wait for the GPU; NaN does
    # not, and the tracker refuses it.
    tau = torch.where(tau > 0, tau, torch.nan)
    rows = len(images) if batch.anchor is None else len(batch.anchor)
    shared = tau.numel() == 1
    if shared:
        tau = tau.reshape(1, 1).expand(2, len(images))
    elif tau.shape != (rows, 2):
        raise ValueError(
            f"`log_means(temperature=...)` must be one number, or {(rows, 2)} of them, but "
            f"has shape {tuple(tau.shape)}; individual ones are found by the `index` of the pairs."
        )
    elif batch.anchor is None:
        tau = tau.T
    else:  # that of a pair without a row does not matter
        tau = tau.new_ones((2, len(images))).index_copy(1, batch.anchor, tau.T)
    result: Any = _LogMeans.apply(images.to(dtype), texts.to(dtype), tau, batch, shared)
    return result


def compute_dtype(images: Tensor, texts: Tensor) -> torch.dtype:
    """The dtype to compute in: that of the inputs, but at least float32."""
    return torch.promote_types(torch.promote_types(images.dtype, texts.dtype), torch.float32)


@dataclass(frozen=True)
class _Batch:
    """Which pairs of all ranks are negatives of which, and which of them belong to this rank."""

    local: slice  # positions of this rank's pairs among those of all ranks
    total: int  # number of pairs of all ranks
    negatives: Tensor | int  # number of negatives of each local pair, (b,), or one for all
    label: Tensor | None  # label of every pair, (total,), or None if all differ
    anchor: Tensor | None  # positions of the anchors among the local pairs, None for all
    chunk: int | None
    group: Group | None
    sizes: list[int] | None  # number of pairs of each rank

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All ranks' rows of tensors of equal shape, in one message."""
        if self.group is None:
            return tensors
        rows = gather_rows(torch.cat(tensors, 1), self.group, self.sizes)
        return rows.chunk(len(tensors), 1)

    def log_negatives(self, dtype: torch.dtype) -> Tensor | float:
        """The logarithm of the number of negatives; 0 for a pair without any (it is no anchor)."""
        if isinstance(self.negatives, int):
            return math.log(self.negatives)
        return self.negatives.clamp(min=1).to(dtype).log()

    def fill_others_(self, block: Tensor, first: int, value: float) -> Tensor:
        """Overwrite what is no negative in a block, (R, total), from the local pair `first` on."""
        start = self.local.start + first
        if self.label is not None:
            rows = self.label[start : start + len(block)]
            block.masked_fill_(rows.unsqueeze(1) == self.label, value)
        block.diagonal(start).fill_(value)  # each pair itself
        return block


def _read_batch(
    images: Tensor,
    texts: Tensor,
    label: Tensor | None,
    anchor: Tensor | None,
    chunk: int | None,
    group: Group | None,
) -> _Batch:
    """Check the arguments of `log_means` and exchange sizes and labels with the other ranks."""
    pairs, device = len(images), images.device
    floating = images.is_floating_point() and texts.is_floating_point()
    if images.dim() != 2 or images.shape != texts.shape or texts.device != device or not floating:
        kinds = (f"{tuple(x.shape)}, {x.dtype}, on {x.device}" for x in (images, texts))
        raise ValueError(
            "`log_means(images=..., texts=...)` must be features of the same shape (pairs, width) "
            f"and on the same device but are: {'; '.join(kinds)}."
        )
    for name, value, kind in (("label", label, "integers"), ("anchor", anchor, "booleans")):
        if value is None:
            continue
        found = "booleans" if value.dtype == torch.bool else "integers"
        if value.shape != (pairs,) or value.is_floating_point() or found != kind:
            raise ValueError(
                f"`log_means({name}=...)` must be {pairs} {kind}, one per pair, but has shape "
                f"{tuple(value.shape)} and dtype {value.dtype}."
            )
    label = None if label is None else label.to(device, torch.int64)
    sizes = None if group is None else row_counts(images, group)
    total = pairs if sizes is None else sum(sizes)
    start = 0 if group is None or sizes is None else sum(sizes[: group.rank])
    local = slice(start, start + pairs)
    if total < 2:
        raise ValueError(
            f"`log_means(images=..., texts=...)` needs at least two pairs but has: {total}."
        )
    negatives: Tensor | int = total - 1
    if label is not None:
        is_anchor = torch.ones_like(label) if anchor is None else anchor.to(label)
        # Anchors are gathered too, so that all ranks raise the error below or none does: a rank
        # that went on alone would wait for the others for ever.
        table = torch.stack([label, is_anchor], 1)
        table = table if group is None else gather_rows(table, group, sizes)
        label, is_anchor = table.unbind(1)
        _, inverse, same = torch.unique(label, return_inverse=True, return_counts=True)
        different = total - same[inverse]
        without = (different == 0) & (is_anchor > 0)
        if bool(without.any()):
            raise ValueError(
                f"`log_means(label=...)` leaves pairs without a negative: all {total} pairs of the "
                f"(global) batch have the label {int(label[without][0])}."
            )
        negatives = different[local]
    positions = None if anchor is None else anchor.to(device).nonzero().squeeze(1)
    return _Batch(local, total, negatives, label, positions, chunk, group, sizes)


class _Side(NamedTuple):
    """This rank's images against the texts of all ranks, or its texts against all images."""

    queries: Tensor  # features of this rank, (b, d)
    keys: Tensor  # features of the other kind of all ranks, (total, d)
    tau: Tensor  # the temperature of each query, (b, 1)
    batch: _Batch
    scores: Tensor | None  # queries @ keys.T if it is kept, (b, total)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Scores over tau, some rows at a time, each block a new tensor."""
        step = self.batch.chunk or max(_BLOCK // self.batch.total, 1)
        for first in range(0, len(self.queries), step):
            rows = slice(first, min(first + step, len(self.queries)))
            if self.scores is None:
                yield rows, (self.queries[rows] @ self.keys.T).div_(self.tau[rows])
            else:
                yield rows, self.scores[rows] / self.tau[rows]

    def log_sums(self, means: Tensor | None) -> Tensor:
        """The log-sum-exp of s_ij / tau over the negatives j of each local pair i.

        `means`, if given, is filled with the softmax-weighted means of s_ij / tau.
        """
        sums = self.queries.new_empty(len(self.queries))
        for rows, block in self.blocks():
            # The lowest finite number instead of -inf: its exponential is 0 too, and 0 times it
            # is 0 in the mean, not NaN.
            block = self.batch.fill_others_(block, rows.start, torch.finfo(block.dtype).min)
            sums[rows] = block.logsumexp(1)
            if means is not None:
                softmax = torch.exp(block - sums[rows].unsqueeze(1))
                means[rows] = softmax.mul_(block).sum(1)
        return sums

    def gradient(self, own: Tensor, others: list[Tensor]) -> Tensor:
        """The gradient with respect to `queries`, without the part of s_ii.

        Args:
            own: a_i and l_i of the local pairs, (2, b).
            others: b_j and l'_j of the other side, for the pairs of all ranks, each (total,); and
                tau'_j, unless there is one temperature for all.
        """
        result = torch.empty_like(self.queries)
        for rows, block in self.blocks():
            weight, log_sum = own[:, rows].unsqueeze(2)
            slopes = torch.exp(block - log_sum).mul_(weight)
            if len(others) > 2:
                block.mul_(self.tau[rows]).div_(others[2])
            slopes.add_(block.sub_(others[1]).exp_().mul_(others[0]))
            result[rows] = self.batch.fill_others_(slopes, rows.start, 0.0) @ self.keys
        return result


def _sides(
    images: Tensor, texts: Tensor, tau: Tensor, batch: _Batch, scores: list[Tensor]
) -> tuple[_Side, _Side]:
    """Image side and text side, from the features of all ranks and the scores that were kept."""
    first, second = (scores[0], scores[-1]) if scores else (None, None)
    if len(scores) == 1:  # on one process
        second = scores[0].T
    one, two = tau.unsqueeze(2)
    return (
        _Side(images[batch.local], texts, one, batch, first),
        _Side(texts[batch.local], images, two, batch, second),
    )


class _LogMeans(torch.autograd.Function):
    """`log_means` with its own backward pass."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, texts: Tensor, tau: Tensor, batch: _Batch, shared: bool
    ) -> Tensor:
        local = batch.local
        with torch.autocast(images.device.type, enabled=False):
            images, texts = batch.gather(images, texts)
            scores = []
            if batch.chunk is None:
                scores.append(images[local] @ texts.T)
                if batch.group is not None:  # on one process it is the transpose of the first
                    scores.append(texts[local] @ images.T)
            log_sums = torch.empty_like(tau)
            means = None if shared and not ctx.needs_input_grad[2] else torch.empty_like(log_sums)
            for k, side in enumerate(_sides(images, texts, tau, batch, scores)):
                log_sums[k] = side.log_sums(None if means is None else means[k])
            matching = (images[local] * texts[local]).sum(1) / tau  # s_ii / tau
            result = (log_sums - matching - batch.log_negatives(log_sums.dtype)).T
        ctx.by_tau = None
        if means is not None:
            means -= matching
            ctx.by_tau = (means / -tau).T
        ctx.batch, ctx.shared = batch, shared
        ctx.save_for_backward(images, texts, tau, log_sums, means, *scores)
        if batch.anchor is not None:
            ctx.by_tau = None if ctx.by_tau is None else ctx.by_tau[batch.anchor]
            return result[batch.anchor]
        return result.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        images, texts, tau, log_sums, means, *scores = ctx.saved_tensors
        batch: _Batch = ctx.batch
        slopes: list[Tensor | None] = [None, None, None]
        with torch.autocast(images.device.type, enabled=False):
            weights = gradients[0].T.to(log_sums.dtype)  # a and b, shape (2, b)
            if batch.anchor is not None:  # pairs without a row have weight 0
                weights = torch.zeros_like(log_sums).index_copy_(1, batch.anchor, weights)
            weights = weights / tau
            if ctx.needs_input_grad[2]:
                # The mean of a pair without negatives is not finite: 0 times it must be 0.
                slopes[2] = torch.where(weights == 0, 0, weights * means).neg_()
            vectors = (weights.T, log_sums.T) if ctx.shared else (weights.T, log_sums.T, tau.T)
            gathered = batch.gather(*vectors)
            for k, side in enumerate(_sides(images, texts, tau, batch, scores)):
                if ctx.needs_input_grad[k]:
                    own = torch.stack([weights[k], log_sums[k]])
                    slope = side.gradient(own, [vector[:, 1 - k] for vector in gathered])
                    matching = weights.sum(0).unsqueeze(1) * side.keys[batch.local]
                    slopes[k] = slope.sub_(matching)
        return *slopes, None, None
