"""The three forms in which inner values travel: entries, a batch of blocks, tracked values.

`Entries` are what the user's function gave, one row per sample or per block. A batch may name a
block several times and, on several ranks, in several places; all of these are samples of the same
g_i, so they are pooled into a `Batch`: sums and counts are added and the mean is taken once, over
everything (means of means would be wrong as soon as the counts differ). `Tracked` joins the updated
u_i to the entries, whose gradients they stand for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._distributed import Group, gather_rows
from ..index import are_memberships, read_memberships
from .error import per_row
from .update import value_of

__all__ = [
    "Batch",
    "Blocks",
    "Entries",
    "Tracked",
    "carrier_counts",
    "find_blocks",
    "over_ranks",
    "per_row",
    "segment",
]

_EXACT_ADDITIONS = 4096
"""Above so many entries a float32 sum is accumulated in float64: long float32 sums lose their
digits (the mean of 2^25 entries of 0.1 would be 0.0625)."""


def segment(entries: Tensor, inverse: Tensor, size: int, log: bool = False) -> Tensor:
    """Sum of the rows of each block, (E,) or (E, d1) -> (size,) or (size, d1), differentiable.

    With `log`, rows are logarithms and so is the result; every block must own a row then.
    """
    dtype = entries.dtype
    many = entries.shape[0] > _EXACT_ADDITIONS
    if many and dtype != torch.float64 and entries.device.type != "mps":
        return segment(entries.double(), inverse, size, log).to(dtype)
    start = entries.new_zeros((size, *entries.shape[1:]))
    if not log:
        # In place is faster, but autograd wants a new tensor for entries with gradient.
        return (start.index_add if entries.requires_grad else start.index_add_)(0, inverse, entries)
    rows = per_row(inverse, entries).expand_as(entries)
    largest = start.scatter_reduce(0, rows, entries.detach(), "amax", include_self=False)
    sums = start.index_add(0, inverse, torch.exp(entries - largest[inverse]))
    return largest + sums.log()


class Blocks(NamedTuple):
    """Which distinct blocks the entries of a batch belong to.

    Attributes:
        size: number of values that the call gives: E, or the number of samples where `rows` says
            which of them each entry is.
        index: the distinct block ids, increasing, shape (B1,).
        inverse: position of each entry's block in `index`, shape (E,); None when entry k is
            block k for all blocks.
        counts: samples per block, shape (B1,).
        ids: `index` as Python numbers, when these are known without waiting for a GPU.
        whole: entry k is the only sample of block k, for all blocks.
        rows: the sample of each entry, shape (E,), where a sample may be in several blocks or in
            none; None when entry k is sample k.
    """

    size: int
    index: Tensor  # type: ignore[assignment]
    inverse: Tensor | None
    counts: Tensor
    ids: list[int] | None = None
    whole: bool = False
    rows: Tensor | None = None

    def sums(self, values: Tensor, log: bool = False) -> Tensor:
        """Sum over the samples of each block, (E, ...) -> (B1, ...)."""
        if self.inverse is None:
            return values
        return segment(values, self.inverse, self.index.shape[0], log)

    def of_entries(self, rows: Tensor) -> Tensor:
        """Rows of blocks, (B1, ...), repeated for the entries of each, (E, ...)."""
        return rows if self.inverse is None else rows.index_select(0, self.inverse)

    def select(self, keep: Tensor) -> Blocks:
        """The blocks of the entries where `keep` is true; those without entries disappear."""
        inverse = self.of_entries(torch.arange(len(self.index), device=keep.device))
        left, inverse = torch.unique(inverse[keep], return_inverse=True)
        counts = segment(self.counts.new_ones(len(inverse)), inverse, len(left))
        return Blocks(len(inverse), self.index[left], inverse, counts)


class Entries(NamedTuple):
    """The values of one term in a batch, one row per entry, in the table's shape and precision.

    Attributes:
        blocks: the blocks of `fresh` and `previous`.
        fresh: g_i(w_t), shape (E,) or (E, d1).
        previous: g_i(w_{t-1}) of the same samples; None without correction.
        carrier: the values that carry the gradient: `fresh`, a differentiable stand-in of the
            same entries, or an independent batch of the same blocks.
        carrier_blocks: the blocks of `carrier`.
    """

    blocks: Blocks
    fresh: Tensor
    previous: Tensor | None
    carrier: Tensor
    carrier_blocks: Blocks

    @property
    def independent(self) -> bool:
        """Whether the gradient comes from another batch than the values."""
        return self.carrier_blocks is not self.blocks

    def batch(self, log: bool = False) -> Batch:
        """Pool the values over the entries of each block, without gradient."""
        blocks, previous = self.blocks, self.previous
        past = None if previous is None else blocks.sums(previous.detach(), log)
        fresh = blocks.sums(self.fresh.detach(), log)
        return Batch(blocks.index, blocks.counts, fresh, past, log, blocks.ids, blocks.whole)

    def without_nonfinite(self) -> tuple[Entries, int]:
        """Drop entries with a NaN or infinite value; also return how many were dropped."""
        blocks, fresh, previous, carrier, carrier_blocks = self
        keep, keep_carrier = _finite_rows(fresh), _finite_rows(carrier)
        if previous is not None:
            keep = keep & _finite_rows(previous)
        if not self.independent:
            keep = keep_carrier = keep & keep_carrier
        dropped = int((~keep).sum()) + (int((~keep_carrier).sum()) if self.independent else 0)
        if dropped == 0:
            return self, 0
        if self.independent:  # both batches must keep the same blocks
            block, carrier_block = (b.of_entries(b.index) for b in (blocks, carrier_blocks))
            empty = [
                b.index[~torch.isin(b.index, left)]
                for b, left in (
                    (blocks, block[keep]),
                    (carrier_blocks, carrier_block[keep_carrier]),
                )
            ]
            gone = torch.cat(empty)
            keep = keep & ~torch.isin(block, gone)
            keep_carrier = keep_carrier & ~torch.isin(carrier_block, gone)
        left = blocks.select(keep)
        carrier_left = carrier_blocks.select(keep_carrier) if self.independent else left
        past = None if previous is None else previous[keep]
        return Entries(left, fresh[keep], past, carrier[keep_carrier], carrier_left), dropped


class Batch(NamedTuple):
    """The blocks of one step, pooled over entries and ranks, without gradient.

    Attributes:
        index: the distinct block ids, increasing, shape (B1,).
        counts: samples per block, shape (B1,).
        fresh: sum over samples of g_i(w_t), shape (B1,) or (B1, d1).
        previous: sum over samples of g_i(w_{t-1}), or None.
        log: the sums are logarithms.
        ids: `index` as Python numbers, when these are known.
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
        counts = self.counts if sums.dim() == 1 else self.counts.unsqueeze(1)
        return sums - counts.log() if self.log else sums / counts

    def merge(self, other: Batch) -> Batch:
        """Pool two batches: samples of the same block add up."""
        previous = None  # if one has none, the whole step goes without correction
        if self.previous is not None and other.previous is not None:
            previous = torch.cat([self.previous, other.previous])
        return _pooled(
            torch.cat([self.index, other.index]),
            torch.cat([self.counts, other.counts]),
            torch.cat([self.fresh, other.fresh]),
            previous,
            self.log,
        )

    def finite(self) -> Tensor:
        """Which blocks have finite values at w_t and w_{t-1}, shape (B1,)."""
        finite = _finite_rows(self.fresh)
        return finite if self.previous is None else finite & _finite_rows(self.previous)


class Tracked(NamedTuple):
    """Tracked values of the blocks of a batch, and the entries that carry their gradient.

    Attributes:
        value: u_i, without gradient, shape (B1,) or, for d1 > 1, (B1, d1).
        index: the distinct block ids, increasing, shape (B1,).
        entries: this rank's values that carry the gradient, shape (E,) or (E, d1).
        blocks: their blocks.
        counts: samples behind the entries of each block, over all ranks, shape (B1,).
        ranks: number of ranks.
        position: position in `index` of each of `blocks`, when these differ (several ranks).
        log: entries and values are logarithms.
    """

    value: Tensor
    index: Tensor  # type: ignore[assignment]
    entries: Tensor
    blocks: Blocks
    counts: Tensor
    ranks: int = 1
    position: Tensor | None = None
    log: bool = False

    def as_loss(self, value: Tensor | float, slope: Tensor) -> Tensor:
        r"""A scalar with this value and the gradient :math:`\sum_i \langle s_i, \nabla g_i\rangle`.

        The linear function :math:`\sum_i \langle s_i, g_i\rangle` of the entries, with the slopes
        :math:`s_i = \nabla f(u_i)` held constant, has exactly the gradient of the paper's
        estimator (Alg. 1, line 9). Its value means nothing, and is replaced by that of the
        objective.

        Args:
            value: the scalar's value.
            slope: s_i, the gradient with respect to u, of the shape of `self.value`.
        """
        entries, factors = self.entries, self.factors(slope)
        if entries.dim() > 1:
            entries, factors = entries.reshape(-1), factors.reshape(-1)
        loss = torch.dot(entries, factors)
        # In place: the backward pass of a dot product looks at its factors only, never at its
        # result. `value_of` would say the same with two more nodes in the graph.
        if isinstance(value, Tensor):
            loss.detach().copy_(value)
        else:
            loss.detach().fill_(value)
        return loss

    def carrying_gradient(self) -> Tensor:
        """The values u_i as a tensor whose gradient is that of g_i."""
        position = self.entry_positions()
        carrier = self.entries * self.factors(torch.ones_like(self.value))
        if position is not None:
            carrier = segment(carrier, position, len(self.index))
        return value_of(self.value, gradient_of=carrier)

    def factors(self, slope: Tensor) -> Tensor:
        """d(loss) / d(entry), from d(loss) / d(u_i); pure."""
        factors, position = slope, self.blocks.inverse
        if self.ranks > 1:
            position = self.entry_positions()
        if not self.blocks.whole or self.ranks > 1:
            factors = slope / (self.counts if slope.dim() == 1 else self.counts.unsqueeze(1))
        if position is not None:
            factors = factors.index_select(0, position)
        if self.ranks > 1:  # data-parallel training averages gradients over the ranks
            factors = factors * self.ranks
        if self.log:  # d(log u) = dg / u, formed from logarithms
            u = self.value if position is None else self.value.index_select(0, position)
            # Held below e^60, so that a block that grew beyond all bounds gives no NaN.
            factors = factors * torch.exp((self.entries.detach() - u).clamp(max=60))
        return factors

    def entry_positions(self) -> Tensor | None:
        """Position in `index` of the block of each entry; None when entry k is block k."""
        inverse = self.blocks.inverse
        if self.position is None:
            return inverse
        return self.position if inverse is None else self.position[inverse]


def _finite_rows(rows: Tensor) -> Tensor:
    finite = torch.isfinite(rows.detach())
    return finite if finite.dim() == 1 else finite.all(1)


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


def over_ranks(batch: Batch, group: Group, call: int | None = None) -> Batch:
    """Pool the batches of all ranks.

    Args:
        batch: of this rank.
        group: the ranks.
        call: number of this call; ranks whose numbers differ are refused.
    """
    sums = [batch.fresh] if batch.previous is None else [batch.fresh, batch.previous]
    dtype, shape = batch.fresh.dtype, batch.fresh.shape[1:]
    # One message of doubles for ids, counts and sums; ids are exact up to 2^53.
    columns = [batch.index, batch.counts, *sums]
    flat = [c.double().unsqueeze(1) if c.dim() == 1 else c.double() for c in columns]
    rows = gather_rows(torch.cat(flat, dim=1), group, call=call)
    parts = [part.reshape(-1, *shape) for part in rows[:, 2:].chunk(len(sums), dim=1)]
    previous = parts[1] if len(parts) > 1 else None
    result = _pooled(rows[:, 0].long(), rows[:, 1], parts[0], previous, batch.log)
    past = None if result.previous is None else result.previous.to(dtype)
    return Batch(result.index, result.counts.to(dtype), result.fresh.to(dtype), past, batch.log)


def carrier_counts(carrier: Blocks, batch: Batch, group: Group | None) -> Tensor:
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


def find_blocks(index: Any, num_inner: int, like: Tensor) -> Blocks:
    """Check an index and find its distinct blocks.

    Args:
        index: block id of each entry: integers of shape (E,), as a tensor, an array or a list; or
            all blocks of each sample: booleans of shape (samples, n), or a list of lists of ids;
            None means all blocks in order.
        num_inner: n.
        like: the tracked values: counts take their device and precision.
    """
    if index is not None and not isinstance(index, Tensor):
        if are_memberships(index):
            return _of_memberships(index, num_inner, like)
        index = _as_tensor(index)
    if index is None:
        every = torch.arange(num_inner, device=like.device)
        return Blocks(num_inner, every, None, like.new_ones(num_inner), whole=True)
    dtype = index.dtype
    if index.dim() != 1 or dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        if are_memberships(index):
            return _of_memberships(index, num_inner, like)
        binary = index.shape[1:] == (num_inner,)
        raise ValueError(
            "`index` must be a vector of integers, the block of each entry, or (for samples in "
            f"several blocks) a boolean matrix with {num_inner} columns or a list of lists, but "
            f"has shape {tuple(index.shape)} and dtype {index.dtype}."
            + (" A matrix of 0 and 1 becomes boolean by `index.bool()`." if binary else "")
        )
    unique, inverse, multiplicity = torch.unique(index, return_inverse=True, return_counts=True)
    # One short transfer; a long list costs more than two numbers.
    ids = unique.tolist() if unique.shape[0] < 1024 else None
    if unique.shape[0]:
        low, high = (ids[0], ids[-1]) if ids else (int(unique[0]), int(unique[-1]))
        if low < 0 or high >= num_inner:
            raise IndexError(
                f"`index` must lie in [0, {num_inner - 1}] (num_inner={num_inner}) "
                f"but contains: {low if low < 0 else high}."
                + (" Ids start at 0: do yours start at 1?" if 0 < low <= high == num_inner else "")
            )
    # Copies from the host to a GPU may be asynchronous; in the other direction the host would read
    # numbers that have not arrived.
    device, ahead = like.device, like.device.type == "cuda"
    if index.device != device or dtype != torch.int64:
        unique = unique.to(device, torch.int64, non_blocking=ahead)
        inverse = inverse.to(device, non_blocking=ahead)
    # In the table's precision, because dividing by integers is slower.
    counts = multiplicity.to(device, like.dtype, non_blocking=ahead)
    return Blocks(index.shape[0], unique, inverse, counts, ids)


def _of_memberships(index: Any, num_inner: int, like: Tensor) -> Blocks:
    """The blocks of entries that are pairs of a sample and one of its blocks."""
    members = read_memberships("`index`", index, num_inner)
    blocks = find_blocks(members.group, num_inner, like)
    rows = members.sample.to(like.device, non_blocking=like.device.type == "cuda")
    return blocks._replace(size=members.samples, rows=rows)


def _holds_names(values: Any) -> bool:
    return isinstance(values, Iterable) and any(isinstance(each, str) for each in values)


def _as_tensor(values: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            "`index` must be a tensor, an array or a list of numbers but is: "
            f"{type(values).__name__} ({error})."
            + " Names become ids by `numpy.unique(names, return_inverse=True)[1]`."
            * _holds_names(values)
        ) from None
    return tensor.long() if tensor.numel() == 0 else tensor  # an empty list has no dtype
