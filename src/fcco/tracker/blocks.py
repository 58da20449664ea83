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

from ..distributed import Group, gather_rows

__all__ = ["Batch", "Layout", "carrier_counts", "layout", "over_ranks", "segment"]


def segment(entries: Tensor, inverse: Tensor, size: int, log: bool = False) -> Tensor:
    """Sum of the rows of each block, (E, c) -> (size, c), differentiable.

    With `log`, rows are logarithms and so is the result; every block must own a row then.
    """
    start = entries.new_zeros((size, entries.shape[1]))
    if not log:
        return start.index_add(0, inverse, entries)
    rows = inverse.unsqueeze(1).expand_as(entries)
    largest = start.scatter_reduce(0, rows, entries.detach(), "amax", include_self=False)
    return largest + start.index_add(0, inverse, torch.exp(entries - largest[inverse])).log()


class Layout(NamedTuple):
    """Which distinct blocks the entries of a batch belong to.

    Attributes:
        index: the distinct block ids, increasing, shape (B1,).
        inverse: position of each entry's block in `index`, shape (E,); None when entry k is
            block k for all blocks.
        counts: samples per block, shape (B1, 1).
        weights: samples per entry, shape (E, 1); None when each entry is one sample.
    """

    index: Tensor  # type: ignore[assignment]
    inverse: Tensor | None
    counts: Tensor
    weights: Tensor | None = None

    @property
    def entries(self) -> int:
        """E, the number of entries."""
        return len(self.index) if self.inverse is None else len(self.inverse)

    def sums(self, entries: Tensor, log: bool = False) -> Tensor:
        """Sum over the samples of each block, (E, c) -> (B1, c)."""
        if self.weights is not None:
            entries = entries + self.weights.log() if log else entries * self.weights
        if self.inverse is None:
            return entries
        return segment(entries, self.inverse, len(self.index), log)

    def select(self, keep: Tensor) -> Layout:
        """The layout of the entries where `keep` is true (blocks without entries disappear)."""
        inverse = torch.arange(self.entries, device=keep.device)
        if self.inverse is not None:
            inverse = self.inverse
        left, inverse = torch.unique(inverse[keep], return_inverse=True)
        weights = None if self.weights is None else self.weights[keep]
        samples = self.counts.new_ones((len(inverse), 1)) if weights is None else weights
        return Layout(self.index[left], inverse, segment(samples, inverse, len(left)), weights)


class Batch(NamedTuple):
    """The blocks of one step, pooled over entries and ranks, without gradient.

    Attributes:
        index: the distinct block ids, increasing, shape (B1,).
        counts: samples per block, shape (B1, 1).
        sums: over samples, of g_i(w_t) and, where it is needed, of g_i(w_{t-1}) beside it:
            shape (B1, d1) or (B1, 2 d1).
        log: the sums are logarithms.
    """

    index: Tensor
    counts: Tensor
    sums: Tensor
    log: bool = False

    def means(self) -> Tensor:
        """The sums divided by the number of samples."""
        return self.sums - self.counts.log() if self.log else self.sums / self.counts

    def merge(self, other: Batch) -> Batch:
        """Pool two batches: samples of the same block add up."""
        return _pooled(
            torch.cat([self.index, other.index]),
            torch.cat([self.counts, other.counts]),
            torch.cat([self.sums, other.sums]),
            self.log,
        )


def _pooled(index: Tensor, counts: Tensor, sums: Tensor, log: bool) -> Batch:
    """Pool rows that may name a block more than once."""
    index, inverse = torch.unique(index, return_inverse=True)
    size = len(index)
    return Batch(index, segment(counts, inverse, size), segment(sums, inverse, size, log), log)


def over_ranks(batch: Batch, group: Group) -> Batch:
    """Pool the batches of all ranks."""
    columns = torch.cat([batch.index.unsqueeze(1).double(), batch.counts, batch.sums], dim=1)
    rows = gather_rows(columns.double(), group)
    result = _pooled(rows[:, 0].to(torch.int64), rows[:, 1:2], rows[:, 2:], batch.log)
    kind = batch.sums.dtype
    return Batch(result.index, result.counts.to(kind), result.sums.to(kind), batch.log)


def carrier_counts(carrier: Layout, batch: Batch, group: Group | None) -> Tensor:
    """Samples behind each block of an independent gradient batch, aligned with `batch`."""
    index, counts = carrier.index, carrier.counts
    if group is not None:
        rows = gather_rows(torch.cat([index.unsqueeze(1).double(), counts], dim=1).double(), group)
        index, inverse = torch.unique(rows[:, 0].to(torch.int64), return_inverse=True)
        counts = segment(rows[:, 1:], inverse, len(index)).to(counts.dtype)
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
        ones = like.new_ones((num_inner, 1))
        return Layout(every, None, ones if weights is None else weights, weights)
    kind = index.dtype
    if index.dim() != 1 or kind == torch.bool or kind.is_floating_point or kind.is_complex:
        raise ValueError(
            f"`{call}(index=...)` must be a 1-d tensor of integers but has shape "
            f"{tuple(index.shape)} and dtype {index.dtype}."
        )
    unique, inverse, multiplicity = torch.unique(index, return_inverse=True, return_counts=True)
    if len(unique):
        low, high = unique[0].item(), unique[-1].item()
        if low < 0 or high >= num_inner:
            wrong = low if low < 0 else high
            raise IndexError(
                f"`{call}(index=...)` must lie in [0, {num_inner - 1}] (num_inner={num_inner}) "
                f"but contains: {wrong}."
            )
    unique, inverse = unique.to(like.device, torch.int64), inverse.to(like.device)
    if weights is None:
        total = multiplicity.to(like).unsqueeze(1)
    else:
        total = segment(weights, inverse, len(unique))
    return Layout(unique, inverse, total, weights)


def _checked_counts(call: str, counts: Tensor, entries: int, like: Tensor) -> Tensor:
    if counts.shape != (entries,) or not bool(((counts > 0) & torch.isfinite(counts)).all()):
        raise ValueError(
            f"`{call}(counts=...)` must be {entries} positive numbers of samples, one per entry "
            f"(an empty group has no mean: leave it out of the batch), but is: {counts}."
        )
    return counts.to(like).unsqueeze(1)
