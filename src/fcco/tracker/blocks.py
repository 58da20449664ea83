"""The three forms in which inner values travel: entries, a batch of blocks, tracked values.

`Entries` are what the user's function gave, one row per sample or per block. A batch may name a
block several times and, on several ranks, in several places; all of these are samples of the same
g_i, so they are pooled into a `Batch`: sums and counts are added and the mean is taken once, over
everything (means of means would be wrong as soon as the counts differ). `Tracked` joins the updated
u_i to the entries, whose gradients they stand for. What a step changes is kept in an `OpenStep`
until the optimizer has made its own.

Arrays are NumPy's where the table of u is on the CPU, tensors elsewhere (`fcco.rules.arrays`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._distributed import Group, gather_rows
from ..rules.arrays import Array, Number, concatenate, finite, per_row, tensor, view
from ..rules.track import value_of

_EXACT_ADDITIONS = 4096
"""Above so many entries a float32 sum is accumulated in float64: long float32 sums lose their
digits (the mean of 2^25 entries of 0.1 would be 0.0625)."""


def segment(entries: Array, inverse: Array, size: int, log: bool = False) -> Array:
    """Sum of the rows of each block, (E,) or (E, d1) -> (size,) or (size, d1).

    With `log`, rows are logarithms and so is the result; every block must own a row then.
    """
    if not isinstance(entries, Tensor):
        if log:
            return segment(tensor(entries), tensor(inverse), size, log).numpy()
        if entries.ndim == 1:
            return np.bincount(inverse, entries, size).astype(entries.dtype)
        columns = [np.bincount(inverse, column, size) for column in entries.T]
        return np.stack(columns, 1).astype(entries.dtype)
    dtype = entries.dtype
    many = entries.shape[0] > _EXACT_ADDITIONS
    if many and dtype != torch.float64 and entries.device.type != "mps":
        return segment(entries.double(), inverse, size, log).to(dtype)
    start = entries.new_zeros((size, *entries.shape[1:]))
    if not log:
        return start.index_add(0, inverse, entries)
    rows = per_row(inverse, entries).expand_as(entries)
    largest = start.scatter_reduce(0, rows, entries.detach(), "amax", include_self=False)
    sums = start.index_add(0, inverse, torch.exp(entries - largest[inverse]))
    return largest + sums.log()


class Blocks(NamedTuple):
    """Which distinct blocks the entries of a batch belong to.

    Attributes:
        size: number of values that the call gives: E, or the number of samples where
            `sample_of_entry` says which of them each entry is.
        index: the distinct block ids, increasing, shape (B1,). None: not found yet; `inverse` then
            holds the block id of each entry (`InnerTracker.blocks(later=True)`), `counts` is None.
        inverse: position of each entry's block in `index`, shape (E,); None when entry k is block k
            for all blocks.
        counts: samples per block, shape (B1,).
        whole: entry k is the only sample of block k, for all blocks.
        sample_of_entry: shape (E,), a tensor, where a sample may be in several blocks or in none;
            None when entry k is sample k.
        valid: which entries have a block id in [0, n); None for all.
        weights: samples that each entry counts for, shape (E,); None for one each.
        source: row to copy from; padding rows (`found_in`) repeat the last real block, others
            themselves. None without padding.
    """

    size: int
    index: Array  # type: ignore[assignment]
    inverse: Array | None
    counts: Array
    whole: bool = False
    sample_of_entry: Tensor | None = None
    valid: Tensor | None = None
    source: Tensor | None = None
    weights: Array | None = None

    @classmethod
    def found_in(cls, ids: Tensor, number: int, like: Tensor) -> Blocks:
        """The blocks of some ids, padded to a fixed number of rows: no device synchronisation.

        Blocks that no entry names have a count of 0. With fewer entries than blocks, padding rows
        repeat the last block, with a count of 0. Entries with an invalid id do not count.
        """
        valid = (ids >= 0) & (ids < number)
        ids, ones, size = torch.where(valid, ids, 0), valid.to(like.dtype), len(ids)
        if number <= size:
            index, inverse, source = torch.arange(number, device=ids.device), ids, None
        else:
            ordered, order = ids.sort()
            place = torch.cat([ordered.new_zeros(1), (ordered.diff() != 0).long()]).cumsum(0)
            inverse = torch.empty_like(ids).scatter(0, order, place)
            source = torch.arange(size, device=ids.device).clamp(max=place[-1])
            index = torch.empty_like(ids).scatter(0, place, ordered)[source]
        counts = like.new_zeros(len(index)).index_add(0, inverse, ones)
        return cls(size, index, inverse, counts, valid=valid, source=source)

    def weighted(self, weights: Array) -> Blocks:
        """The same, where entries count for more than one sample each, (E,): tokens, say."""
        assert self.inverse is not None
        counts = segment(weights, self.inverse, self.index.shape[0])
        return self._replace(counts=counts, weights=weights)

    def sums(self, values: Array, log: bool = False) -> Array:
        """Sum over the samples of each block, (E, ...) -> (B1, ...)."""
        if self.inverse is None:
            return values
        if self.weights is not None:
            values = values * per_row(self.weights, values)
        return segment(values, self.inverse, self.index.shape[0], log)

    def of_entries(self, rows: Array) -> Array:
        """Rows of blocks, (B1, ...), repeated for the entries of each, (E, ...)."""
        return rows if self.inverse is None else rows[self.inverse]

    def as_tensors(self) -> Blocks:
        """The same, for values that carry a gradient."""
        inverse = None if self.inverse is None else tensor(self.inverse)
        index, counts = tensor(self.index), tensor(self.counts)
        weights = None if self.weights is None else tensor(self.weights)
        return self._replace(index=index, inverse=inverse, counts=counts, weights=weights)

    def select(self, keep: Array) -> Blocks:
        """The blocks of the entries where `keep` is true; those without entries disappear."""
        left, inverse, counts = _unique(self.of_entries(self.index)[keep])
        left = Blocks(len(inverse), left, inverse, _like(counts, self.counts))
        return left if self.weights is None else left.weighted(self.weights[keep])


class Entries(NamedTuple):
    """The values of one term in a batch, one row per entry, in the table's shape and precision.

    Attributes:
        blocks: the blocks of `fresh` and `previous`.
        fresh: g_i(w_t), shape (E,) or (E, d1), an array without gradient.
        previous: g_i(w_{t-1}) of the same samples; None without correction.
        carrier: the values that carry the gradient: `fresh`, a differentiable stand-in of the
            same entries, or an independent batch of the same blocks.
        carrier_blocks: the blocks of `carrier`.
        independent: whether the gradient comes from another batch than the values.
        stand_in: whether `carrier` are other values than `fresh`.
    """

    blocks: Blocks
    fresh: Array
    previous: Array | None
    carrier: Tensor
    carrier_blocks: Blocks
    independent: bool = False
    stand_in: bool = False

    def batch(self, log: bool = False) -> Batch:
        """Pool the values over the entries of each block, without gradient."""
        blocks, previous = self.blocks, self.previous
        past = None if previous is None else blocks.sums(previous, log)
        fresh = self.fresh
        if blocks.valid is not None:
            fresh = blocks.sums(torch.where(per_row(blocks.valid, fresh), fresh, 0), log)
            own = (blocks.index, blocks.counts, fresh, past, log, False)
            return Batch(*own, blocks.counts > 0, blocks.source)
        fresh = blocks.sums(fresh, log)
        return Batch(blocks.index, blocks.counts, fresh, past, log, blocks.whole)

    def without_nonfinite(self, limit: float) -> tuple[Entries, int]:
        """Drop entries with a NaN, or beyond a limit; also return how many were dropped."""
        blocks, fresh, previous, carrier, carrier_blocks, independent, stand_in = self
        keep = _finite_rows(fresh, limit)
        if previous is not None:
            keep = keep & _finite_rows(previous, limit)
        keep, keep_carrier = tensor(keep), _finite_rows(carrier)
        if not independent:
            keep = keep_carrier = keep & keep_carrier
        dropped = int((~keep).sum()) + independent * int((~keep_carrier).sum())
        if dropped == 0:
            return self, 0
        if independent:  # both batches must keep the same blocks
            block, other = (tensor(b.of_entries(b.index)) for b in (blocks, carrier_blocks))
            left, other_left = block[keep], other[keep_carrier]
            keep = keep & torch.isin(block, other_left)
            keep_carrier = keep_carrier & torch.isin(other, left)
        kept = view(keep)
        own = blocks.select(kept)
        carrier_own = carrier_blocks.select(view(keep_carrier)) if independent else own
        past = None if previous is None else previous[kept]
        parts = (own, fresh[kept], past, carrier[keep_carrier], carrier_own, independent, stand_in)
        return Entries(*parts), dropped


class Batch(NamedTuple):
    """The blocks of one step, pooled over entries and ranks, without gradient.

    Attributes:
        index: the distinct block ids, increasing, shape (B1,).
        counts: samples per block, shape (B1,).
        fresh: sum over samples of g_i(w_t), shape (B1,) or (B1, d1).
        previous: sum over samples of g_i(w_{t-1}), or None.
        log: the sums are logarithms.
        whole: all blocks in order, one sample each.
        present: which rows are blocks of the batch, not padding; None for all.
        source: see `Blocks`.
    """

    index: Array  # type: ignore[assignment]
    counts: Array
    fresh: Array
    previous: Array | None
    log: bool = False
    whole: bool = False
    present: Tensor | None = None
    source: Tensor | None = None

    def mean(self, sums: Array) -> Array:
        """The sums divided by the number of samples."""
        if self.whole:
            return sums
        counts = self.counts if sums.ndim == 1 else self.counts[:, None]
        if not self.log:
            return sums / counts
        return sums - (counts.log() if isinstance(counts, Tensor) else np.log(counts))

    @property
    def number(self) -> Number:
        """How many blocks there are."""
        return self.index.shape[0] if self.present is None else self.present.sum().to(self.counts)

    def filled(self, rows: Any) -> Any:
        """Rows of the blocks, with padding rows copied from their source; None stays None."""
        return rows if self.source is None or rows is None else rows[self.source]

    def merge(self, other: Batch, number: int = 0) -> Batch:
        """Pool two batches: samples of the same block add up; `number` is n, for `found_in`."""
        previous = None  # if one has none, the whole step goes without correction
        if self.previous is not None and other.previous is not None:
            previous = concatenate([self.previous, other.previous])
        index, counts, fresh = (
            concatenate([a, b]) for a, b in zip(self[:3], other[:3], strict=True)
        )
        if self.present is None:
            return _pooled(index, counts, fresh, previous, self.log)
        blocks = Blocks.found_in(index, number, counts)
        counts, fresh = blocks.sums(counts), blocks.sums(fresh, self.log)
        return Batch(blocks.index, counts, fresh, None, self.log, False, counts > 0, blocks.source)

    def finite(self) -> Array:
        """Which blocks have finite values at w_t and w_{t-1}, shape (B1,)."""
        good = _finite_rows(self.fresh)
        return good if self.previous is None else good & _finite_rows(self.previous)


@dataclass
class OpenStep:
    """Changes that calls have prepared, which become final when the optimizer steps.

    An objective has one; a call proposes a new one, and one assignment makes it that of the
    objective: an interrupt finds the one before or the one after.

    Attributes:
        updates: by tracker.
        writes: functions and their arguments, by owner; see `write`.
        notes: by term, what a call leaves for later calls of the same step.
        counters: by tracker, its last update and the number of this step. Overrides the tracker's
            own counters during CUDA graph replay.
        packed: flattened result of a replayed call, instead of all of the above.
        numbers: by tracker, the number of the step of a replayed call.
    """

    updates: dict[Any, Any] = field(default_factory=dict)
    writes: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=dict)
    notes: dict[Any, Any] = field(default_factory=dict)
    counters: Mapping[Any, tuple[Any, Any]] | None = None
    packed: Any = None
    numbers: dict[Any, int] = field(default_factory=dict)

    def copy(self) -> OpenStep:
        parts = (self.updates, self.writes, self.notes)
        return OpenStep(*map(dict, parts), None, self.packed, dict(self.numbers))  # type: ignore[arg-type]

    def write(self, owner: Any, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function when the step ends; a later call for the same owner takes its place.

        To write twice must be to write once: all writes are repeated after an interrupt, and where
        they turn out not to fit into a CUDA graph.
        """
        self.writes[owner] = (function, arguments)


class Tracked(NamedTuple):
    """Tracked values of the blocks of a batch, and the entries that carry their gradient.

    Attributes:
        u: u_i, without gradient, shape (B1,) or, for d1 > 1, (B1, d1).
        ids: the distinct block ids, increasing, shape (B1,).
        entries: this rank's values that carry the gradient, shape (E,) or (E, d1).
        blocks: their blocks.
        counts: samples behind the entries of each block, over all ranks, shape (B1,).
        ranks: number of ranks.
        position: position in `index` of each of `blocks`, when these differ (several ranks).
        log: entries and values are logarithms.
        step: what changes when the optimizer steps; None in an evaluation.
        present: which rows are blocks of the batch, see `AbstractTerm.branch_free`; None for all.
    """

    u: Array
    ids: Array
    entries: Tensor
    blocks: Blocks
    counts: Array
    ranks: int = 1
    position: Array | None = None
    log: bool = False
    step: OpenStep | None = None
    present: Tensor | None = None

    @property
    def number(self) -> Number:
        """How many blocks there are, at least 1."""
        if self.present is None:
            return max(self.u.shape[0], 1)
        return self.present.sum().clip(min=1).to(self.u)

    @property
    def value(self) -> Tensor:
        """u_i as a tensor."""
        return tensor(self.u)

    @property
    def index(self) -> Tensor:  # type: ignore[override]
        """The distinct block ids as a tensor."""
        return tensor(self.ids)

    def as_loss(self, value: Any, slope: Array) -> Tensor:
        r"""A scalar with this value and the gradient :math:`\sum_i \langle s_i, \nabla g_i\rangle`.

        The linear function :math:`\sum_i \langle s_i, g_i\rangle` of the entries, with the slopes
        :math:`s_i = \nabla f(u_i)` held constant, has exactly the gradient of the paper's
        estimator (Alg. 1, line 9). Its value means nothing, and is replaced by that of the
        objective.

        Args:
            value: the scalar's value.
            slope: s_i, the gradient with respect to u, of the shape of u.
        """
        entries, factors = self.entries, self.factors(slope)
        factors = factors if isinstance(factors, Tensor) else torch.from_numpy(factors)
        if factors.dim() > 1:
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
        position, u = self.entry_positions(), self.value
        carrier = self.entries * tensor(self.factors(torch.ones_like(u)))
        if position is not None:
            carrier = segment(carrier, tensor(position), len(u))
        return value_of(u, gradient_of=carrier)

    def factors(self, slope: Array) -> Array:
        """d(loss) / d(entry), from d(loss) / d(u_i)."""
        factors = slope
        if isinstance(slope, Tensor) and not isinstance(self.counts, Tensor):
            factors = view(slope.detach())
        position = self.blocks.inverse if self.ranks == 1 else self.entry_positions()
        if not self.blocks.whole or self.ranks > 1:
            factors = factors / (self.counts if factors.ndim == 1 else self.counts[:, None])
        if position is not None:
            factors = factors[position]
        if self.blocks.weights is not None:
            factors = factors * per_row(self.blocks.weights, factors)
        if self.blocks.valid is not None:
            factors = torch.where(per_row(self.blocks.valid, factors), factors, 0)
        if self.ranks > 1:  # data-parallel training averages gradients over the ranks
            factors = factors * self.ranks
        if self.log:  # d(log u) = dg / u, formed from logarithms
            u = self.value if position is None else self.value[tensor(position)]
            # Held below e^60, so that a block that grew beyond all bounds gives no NaN.
            factors = tensor(factors) * torch.exp((self.entries.detach() - u).clamp(max=60))
        return factors

    def entry_positions(self) -> Array | None:
        """Position in `index` of the block of each entry; None when entry k is block k."""
        inverse = self.blocks.inverse
        if self.position is None:
            return inverse
        return self.position if inverse is None else self.position[inverse]


def _finite_rows(rows: Array, limit: float = math.inf) -> Array:
    rows = rows.detach() if isinstance(rows, Tensor) else rows
    good = finite(rows) & (abs(rows) <= limit)
    return good if good.ndim == 1 else good.all(1)


def _unique(ids: Array) -> tuple[Array, Array, Array]:
    """The distinct ids in increasing order, the position of each among them, and their counts."""
    unique: Any = torch.unique if isinstance(ids, Tensor) else np.unique
    return unique(ids, return_inverse=True, return_counts=True)


def _like(counts: Array, like: Array) -> Array:
    """Counts in the precision of the table, because dividing by integers is slower."""
    return counts.to(like) if isinstance(counts, Tensor) else counts.astype(like.dtype)


def _pooled(index: Array, counts: Array, fresh: Array, previous: Array | None, log: bool) -> Batch:
    """Pool rows that may name a block more than once."""
    index, inverse, _ = _unique(index)
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
    fresh = tensor(batch.fresh)
    sums = [fresh] if batch.previous is None else [fresh, tensor(batch.previous)]
    dtype, shape = fresh.dtype, fresh.shape[1:]
    # One message of doubles for ids, counts and sums; ids are exact up to 2^53.
    columns = [tensor(batch.index), tensor(batch.counts), *sums]
    flat = [c.double().unsqueeze(1) if c.dim() == 1 else c.double() for c in columns]
    rows = gather_rows(torch.cat(flat, dim=1), group, call=call)
    parts = [part.reshape(-1, *shape) for part in rows[:, 2:].chunk(len(sums), dim=1)]
    previous = parts[1] if len(parts) > 1 else None
    result = _pooled(rows[:, 0].long(), rows[:, 1], parts[0], previous, batch.log)
    arrays = [None if part is None else view(part.to(dtype)) for part in result[1:4]]
    return Batch(view(result.index), arrays[0], arrays[1], arrays[2], batch.log)


def carrier_counts(carrier: Blocks, batch: Batch, group: Group | None) -> Array:
    """Samples behind each block of an independent gradient batch, aligned with `batch`."""
    index, counts = tensor(carrier.index), tensor(carrier.counts)
    if group is not None:
        rows = gather_rows(torch.stack([index.double(), counts.double()], dim=1), group)
        index, inverse = torch.unique(rows[:, 0].long(), return_inverse=True)
        counts = segment(rows[:, 1], inverse, len(index)).to(counts.dtype)
    if not torch.equal(index, tensor(batch.index)):
        raise ValueError(
            "The independent gradient batch must hold samples of the same blocks as the value "
            "batch (Alg. 2, line 5 draws two batches for each sampled block), but its block ids "
            "differ."
        )
    return view(counts)
