"""From the entries of a batch to the distinct blocks in it, on one process or on many.

A batch may name a block several times (one entry per sample, say) and, on several ranks, in
several places. All of these are samples of the same g_i, so they are pooled: sums and counts are
added, and the mean is taken once, over everything. Means of means would be wrong as soon as the
counts differ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._distributed import Group, gather_rows

__all__ = [
    "Batch",
    "Layout",
    "carrier_counts",
    "layout",
    "over_ranks",
    "per_row",
    "segment",
]


def per_row(vector: Tensor, like: Tensor) -> Tensor:
    """A vector (R,) shaped so that it multiplies the rows of `like`, (R,) or (R, d1)."""
    return vector if like.dim() == 1 else vector.unsqueeze(1)


def segment(entries: Tensor, inverse: Tensor, size: int, log: bool = False) -> Tensor:
    """Sum of the rows of each block, (E,) or (E, d1) -> (size,) or (size, d1), differentiable.

    With `log`, rows are logarithms and so is the result; every block must own a row then.
    """
    start = entries.new_zeros((size, *entries.shape[1:]))
    if not log:
        add = start.index_add if entries.requires_grad else start.index_add_
        return add(0, inverse, entries)
    rows = per_row(inverse, entries).expand_as(entries)
    largest = start.scatter_reduce(0, rows, entries.detach(), "amax", include_self=False)
    return largest + start.index_add(0, inverse, torch.exp(entries - largest[inverse])).log()


class Layout(NamedTuple):
    """Which distinct blocks the entries of a batch belong to.

    Attributes:
        index: the distinct block ids, increasing, shape (B1,).
        inverse: position of each entry's block in `index`, shape (E,); None when entry k is
            block k for all blocks.
        counts: samples per block, shape (B1,).
        weights: samples per entry, shape (E,); None when each entry is one sample.
        ids: `index` as numbers, when these are at hand.
        whole: entry k is the only sample of block k, for all blocks.
    """

    index: Tensor  # type: ignore[assignment]
    inverse: Tensor | None
    counts: Tensor
    weights: Tensor | None = None
    ids: list[int] | None = None
    whole: bool = False

    @property
    def entries(self) -> int:
        """E, the number of entries."""
        return (self.index if self.inverse is None else self.inverse).shape[0]

    def sums(self, entries: Tensor, log: bool = False) -> Tensor:
        """Sum over the samples of each block, (E, ...) -> (B1, ...)."""
        if self.weights is not None:
            weights = per_row(self.weights, entries)
            entries = entries + weights.log() if log else entries * weights
        if self.inverse is None:
            return entries
        return segment(entries, self.inverse, self.index.shape[0], log)

    def select(self, keep: Tensor) -> Layout:
        """The layout of the entries where `keep` is true (blocks without entries disappear)."""
        inverse = torch.arange(self.entries, device=keep.device)
        if self.inverse is not None:
            inverse = self.inverse
        left, inverse = torch.unique(inverse[keep], return_inverse=True)
        weights = None if self.weights is None else self.weights[keep]
        samples = self.counts.new_ones(len(inverse)) if weights is None else weights
        return Layout(self.index[left], inverse, segment(samples, inverse, len(left)), weights)


class Batch(NamedTuple):
    """The blocks of one step, pooled over entries and ranks, without gradient.

    Attributes:
        index: the distinct block ids, increasing, shape (B1,).
        counts: samples per block, shape (B1,).
        fresh: sum over samples of g_i(w_t), shape (B1,) or (B1, d1).
        previous: sum over samples of g_i(w_{t-1}), or None.
        log: the sums are logarithms.
        ids: `index` as numbers, when these are at hand.
        whole: all blocks in order, one sample each.
    """

    index: Tensor  # type: ignore[assignment]
    counts: Tensor
    fresh: Tensor
    previous: Tensor | None
    log: bool = False
    ids: list[int] | None = None
    whole: bool = False

    def mean(self, sums: Tensor) -> Tensor:
        """The sums divided by the number of samples."""
        if self.whole:
            return sums
        counts = per_row(self.counts, sums)
        return sums - counts.log() if self.log else sums / counts

    def merge(self, other: Batch) -> Batch:
        """Pool two batches: samples of the same block add up."""
        previous = None
        if self.previous is not None and other.previous is not None:
            previous = torch.cat([self.previous, other.previous])
        return _pooled(
            torch.cat([self.index, other.index]),
            torch.cat([self.counts, other.counts]),
            torch.cat([self.fresh, other.fresh]),
            previous,
            self.log,
        )


def _pooled(
    index: Tensor, counts: Tensor, fresh: Tensor, previous: Tensor | None, log: bool
) -> Batch:
    """Pool rows that may name a block more than once."""
    index, inverse = torch.unique(index, return_inverse=True)
    size = len(index)
    past = None if previous is None else segment(previous, inverse, size, log)
    return Batch(
        index, segment(counts, inverse, size), segment(fresh, inverse, size, log), past, log
    )


def over_ranks(batch: Batch, group: Group) -> Batch:
    """Pool the batches of all ranks."""
    sums = [batch.fresh] if batch.previous is None else [batch.fresh, batch.previous]
    kind, shape = batch.fresh.dtype, batch.fresh.shape[1:]
    columns = [batch.index, batch.counts, *sums]
    flat = [c.double().unsqueeze(1) if c.dim() == 1 else c.double() for c in columns]
    rows = gather_rows(torch.cat(flat, dim=1), group)
    parts = [part.reshape(-1, *shape) for part in rows[:, 2:].chunk(len(sums), dim=1)]
    previous = parts[1] if len(parts) > 1 else None
    result = _pooled(rows[:, 0].long(), rows[:, 1], parts[0], previous, batch.log)
    past = None if result.previous is None else result.previous.to(kind)
    return Batch(result.index, result.counts.to(kind), result.fresh.to(kind), past, batch.log)


def carrier_counts(carrier: Layout, batch: Batch, group: Group | None) -> Tensor:
    """Samples behind each block of an independent gradient batch, aligned with `batch`."""
    index, counts = carrier.index, carrier.counts
    if group is not None:
        rows = gather_rows(torch.stack([index.double(), counts.double()], dim=1), group)
        index, inverse = torch.unique(rows[:, 0].long(), return_inverse=True)
        counts = segment(rows[:, 1], inverse, len(index)).to(batch.counts.dtype)
    if not torch.equal(index, batch.index):
        raise ValueError(
            "The independent gradient batch must hold samples of the same blocks as the value "
            "batch (Alg. 2, line 5 draws two batches for each sampled block), but its block ids "
            "differ."
        )
    return counts


def layout(
    call: str, index: Tensor | None, num_inner: int, counts: Tensor | None, like: Tensor
) -> Layout:
    """Check an index and find its distinct blocks.

    Args:
        call: name of the calling object, for the error text.
        index: block id of each entry, integer, shape (E,); None means all blocks in order.
        num_inner: n.
        counts: samples behind each entry (default 1 each), shape (E,).
        like: the tracked values: counts take their device and precision.
    """
    weights = None
    if counts is not None:
        weights = _checked_counts(call, counts, num_inner if index is None else len(index), like)
    if index is None:
        every = torch.arange(num_inner, device=like.device)
        ones = like.new_ones(num_inner)
        whole = weights is None
        return Layout(every, None, ones if weights is None else weights, weights, whole=whole)
    kind = index.dtype
    if index.dim() != 1 or kind == torch.bool or kind.is_floating_point or kind.is_complex:
        raise ValueError(
            f"`{call}(index=...)` must be a 1-d tensor of integers but has shape "
            f"{tuple(index.shape)} and dtype {index.dtype}."
        )
    unique, inverse, multiplicity = torch.unique(index, return_inverse=True, return_counts=True)
    # One short transfer; a long list costs more than two numbers.
    ids = unique.tolist() if unique.shape[0] < 1024 else None
    if unique.shape[0]:
        low, high = (ids[0], ids[-1]) if ids else (int(unique[0]), int(unique[-1]))
        if low < 0 or high >= num_inner:
            wrong = low if low < 0 else high
            raise IndexError(
                f"`{call}(index=...)` must lie in [0, {num_inner - 1}] (num_inner={num_inner}) "
                f"but contains: {wrong}."
            )
    # From host to device nobody needs to wait; the other way the numbers would not be there yet.
    device, ahead = like.device, like.device.type == "cuda"
    if index.device != device or kind != torch.int64:
        unique = unique.to(device, torch.int64, non_blocking=ahead)
        inverse = inverse.to(device, non_blocking=ahead)
    if weights is None:
        # In the table's precision, because dividing by integers is slower.
        total = multiplicity.to(device, like.dtype, non_blocking=ahead)
    else:
        total = segment(weights, inverse, len(unique))
    return Layout(unique, inverse, total, weights, ids)


def _checked_counts(call: str, counts: Tensor, entries: int, like: Tensor) -> Tensor:
    if counts.shape != (entries,) or not bool(((counts > 0) & torch.isfinite(counts)).all()):
        raise ValueError(
            f"`{call}(counts=...)` must be {entries} positive numbers of samples, one per entry "
            f"(an empty group has no mean: leave it out of the batch), but is: {counts}."
        )
    return counts.to(like)
