"""The tracker: one running estimate u_i of each inner value g_i(w), kept in buffers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import _checks
from .._distributed import Group
from .._state import KeepsPrecision
from ..index import Memberships, check_range, read_index
from ..rules import track as rules
from ..rules.arrays import Array, Views, tensor, view
from ..rules.track import Pooled, Rows, Statistics, Track, Visit
from .blocks import Batch, Blocks, Entries, OpenStep, Tracked, carrier_counts, over_ranks

MAX_BLOCKS_FOR_BINCOUNT = 100_000
"""Up to so many blocks `bincount` finds those of a batch, faster than sorting its ids."""

MAX_REPEATS = 8
"""A step with the samples of the step before is no new visit, up to so many in a row. From then on,
and until a second batch was seen, the batch is taken for the whole data set: its values have no
noise, and each is a visit."""

SAME_SAMPLES = 0.9
"""Batches with the same index have the same samples if their losses, within blocks, have at least
this correlation."""


class NonFiniteValue(ValueError):
    """An inner value, an ordinary loss or a running estimate that is NaN or infinite."""


class Update(NamedTuple):
    """A computed but not yet written update of the table.

    Attributes:
        batch: the blocks of the whole open step, this batch included.
        rows: their state before the step.
        fresh: g_i(w_t), the means over the samples of the step.
        visit: the result of the update.
        number: of the step, from 1 on.
        came: which rows are blocks with finite values, on a GPU; None for all.
        dropped: entries dropped by `on_nonfinite="skip"`, those of earlier steps included.
        samples: blocks and values of the only call of the step; None if there were several calls.
        repeats: steps since the batch was another one.
        valid_ids: whether all ids were in [0, n), where that is checked later.
    """

    batch: Batch
    rows: Rows
    fresh: Array
    visit: Visit
    number: int
    came: Array | None = None
    dropped: int = 0
    samples: tuple[Blocks, Array] | None = None
    repeats: Any = MAX_REPEATS
    valid_ids: Any = True


@dataclass
class _Progress:
    """Counters and the last step; a plain object, since nn.Module is slow to set attributes of."""

    steps: int = 0
    skipped: int = 0
    blocks: Any = 0  # in the last step; or its batch
    last: Update | None = None
    complete: int = -1  # the version of the mask `seen` with which all blocks have a value


class InnerTracker(KeepsPrecision):
    r"""Running estimates u_i of g_i(w) for i = 1..n; only sampled blocks change.

    .. math::
        u_i^+ = (1-\gamma)\,u_i + \gamma\,g_i(w_t;\mathcal B)
              + \gamma'\,\bigl(g_i(w_t;\mathcal B) - g_i(w_{t-1};\mathcal B)\bigr),
        \qquad i \in \mathcal B_1^t

    Calling it returns a tensor whose *value* is u_i and whose *gradient* is that of g_i, so that
    `outer(tracker(values, index)).mean()` differentiates to the paper's estimator
    :math:`\frac1{B_1}\sum_i \nabla g_i \nabla f(u_i)`.

    Entries of the same block (one per sample, say) are averaged first, so `index` may repeat
    block ids and group losses need no grouping by hand. A first visit sets u_i to the fresh value.
    In `eval()` mode nothing is updated and the fresh values themselves are returned.

    Args:
        num_inner: n, the number of blocks.
        dim: d1, the length of each inner value.
        gamma: weight of the fresh value; 1 keeps no memory, 0 needs `correction=1`. `"auto"`
            weighs the noise of a batch value against the lag of u, see `fcco.rules.track`; a
            block's first values are averaged.
        least: of the gains that `gamma="auto"` takes.
        correction: gamma', a number, `"theory"` (MSVR) or `"auto"`: (1 - gamma) B1 / n, which
            is 1 - gamma when every block is seen at each step and small when few are.
        read: which u enters the gradient: `"old"` (before this batch; unbiased with one batch,
            as the paper's algorithm prints it) or `"new"`.
        log_space: values are logarithms of positive inner values and u is kept as log u.
        refresh_every: every so many steps take the fresh value itself (SPIDER); give that step a
            large batch, `refresh_due` says when.
        sampled: whether a step may hold only a part of the blocks. False refuses such a step,
            for updates that would never learn what they missed.
        measure: estimate the noise and the lag of u from the batches, see `error()`; on by default
            for group losses and constraints.
        on_nonfinite: `"raise"` refuses a NaN or infinite value before anything changes; on a GPU,
            to avoid a synchronisation, such a block keeps its value and a later call raises.
            `"skip"` drops such entries and counts them in `skipped`; their gradient is zero where
            it enters your graph, where 0 * NaN may still be NaN.
        dtype: precision of u, single or double; never narrowed by `.to(...)`.
        device: where the buffers live at first.

    References:
        W. Jiang et al., Multi-block-single-probe variance reduced estimator for coupled
        compositional optimization, 2022 (MSVR).
    """

    value: Tensor
    seen: Tensor
    names: tuple[str, ...] | None = None  # of the blocks, for errors
    of: str = ""  # the term among several, for errors

    def __init__(
        self,
        num_inner: int,
        dim: int = 1,
        *,
        gamma: float | Literal["auto"] = 0.1,
        least: float = 0.0,
        correction: float | Literal["theory", "auto"] = "auto",
        read: Literal["old", "new"] = "old",
        log_space: bool = False,
        refresh_every: int | None = None,
        sampled: bool = True,
        measure: bool = False,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        call = "InnerTracker"
        _checks.integer(call, "num_inner", num_inner, 1)
        _checks.integer(call, "dim", dim, 1)
        automatic = gamma == "auto"
        if automatic and correction not in (0, "auto"):
            raise ValueError(
                "`InnerTracker(gamma='auto')` weighs noise against lag for an average without "
                f"correction, but `correction` is {correction!r}; give a number for `gamma`."
            )
        if automatic:
            measure, correction = True, 0.0
        else:
            _checks.in_interval(call, "gamma", gamma, 0.0, 1.0, open_high=correction == "theory")
        if isinstance(correction, str):
            _checks.one_of(call, "correction", correction, ("theory", "auto"))
        else:
            _checks.in_interval(call, "correction", correction, 0.0, math.inf, open_high=True)
        _checks.one_of(call, "read", read, ("old", "new"))
        _checks.one_of(call, "on_nonfinite", on_nonfinite, ("raise", "skip"))
        if refresh_every is not None:
            _checks.integer(call, "refresh_every", refresh_every, 1)
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"`InnerTracker(dtype=...)` must be float32 or float64: {dtype}.")
        if gamma == 0 and (correction == 0 or measure):
            raise ValueError(
                "`InnerTracker(gamma=0)` is no average: it never moves with `correction=0`, and "
                "`measure=True` does not know its error."
            )
        if not sampled and on_nonfinite == "skip":
            raise ValueError(
                "`InnerTracker(on_nonfinite='skip')` would leave a block out of a step, which "
                "`sampled=False` forbids; use 'raise'."
            )
        if measure and log_space:
            raise ValueError(
                "`InnerTracker(measure=True)` and `gamma='auto'` know the error of averages: they "
                "have no meaning with `log_space`."
            )
        self.num_inner, self.dim, self.read = num_inner, dim, read
        self.log_space, self.refresh_every = log_space, refresh_every
        self.sampled, self.on_nonfinite = sampled, on_nonfinite
        formula = rules.log_track if log_space else rules.track
        number = None if isinstance(gamma, str) else gamma
        self.rule = Track(num_inner, number, correction, formula, least)
        # Whether updates use g_i(w_{t-1}).
        self.needs_previous = correction != 0 and (correction != "auto" or number != 1)
        self._measured = measure
        self._progress, self._flags = _Progress(), LateCheck(num_inner)
        self._views = Views()
        table = torch.zeros((num_inner, dim), dtype=dtype, device=device)
        self.register_buffer("value", table)
        self.register_buffer("seen", torch.zeros(num_inner, dtype=torch.bool, device=device))
        self.estimate: ErrorEstimate | None = ErrorEstimate(self.rows) if measure else None
        # The largest value that can be tracked: statistics are made of squares, and sums of them.
        limit = float(torch.finfo(dtype).max)
        self.largest = rules.largest_square_root(table) if measure else limit

    @property
    def steps(self) -> int:
        """Tracking steps taken."""
        return self._progress.steps

    @property
    def skipped(self) -> int:
        """Entries dropped by `on_nonfinite="skip"`."""
        return self._progress.skipped

    @property
    def blocks_per_step(self) -> int:
        """B1 of the last step; 0 before the first, also of a resumed run."""
        blocks = self._progress.blocks
        return int(blocks.number if isinstance(blocks, Batch) else blocks)

    @property
    def gamma(self) -> float:
        """The weight of the fresh value; with `"auto"` the present one, read from the device."""
        if self.rule.gamma is None:
            assert self.estimate is not None
            return self.estimate.pooled[-1].item()
        return self.rule.gamma

    @property
    def rows(self) -> Tensor:
        """The table u as batches see it: a view of `value`, of shape (n,) when d1 = 1."""
        return self.value.view(-1) if self.dim == 1 else self.value

    def seen_rows(self) -> Tensor:
        """The u_i of the blocks seen so far, shape (seen,) or (seen, d1)."""
        return self.rows if bool(self.seen.all()) else self.rows[self.seen]

    def error(self) -> Tensor:
        """The standard error of each u, from noise and lag, in the shape of `rows`.

        NaN where it is not known: for a block that was visited less than twice, and everywhere
        without `measure=True`. A correction is not taken into account, so that the lag is then
        somewhat overestimated.
        """
        estimate = self.estimate
        if estimate is None:
            return torch.full_like(self.rows, torch.nan)
        rows = [estimate.get_buffer(name) for name in Statistics._fields]
        rows = [r if self.dim == 1 or r.ndim > 1 else r[:, None] for r in rows]
        return Statistics(*rows).errors(Pooled(*estimate.pooled), self.value.numel())

    @property
    def corrects(self) -> bool:
        """Whether the next update uses g_i(w_{t-1}); a refresh does not."""
        return self.needs_previous and not self.refresh_due

    @property
    def refresh_due(self) -> bool:
        """Whether the next step replaces u by the fresh value (see `refresh_every`)."""
        return self.refresh_every is not None and self.steps % self.refresh_every == 0

    @property
    def updating(self) -> bool:
        """Whether a call now is part of the training, not an evaluation."""
        return self.training and torch.is_grad_enabled()

    @property
    def branch_free(self) -> bool:
        """Whether an update never synchronises with the host: a CUDA graph can hold it."""
        return self.refresh_every is None and self.on_nonfinite == "raise" and self.sampled

    def blocks(self, index: Any = None, later: bool = False) -> Blocks:
        """Check an index and find its distinct blocks.

        Args:
            index: the block of each entry, or all blocks of each sample, see
                `fcco.index.read_index`; None means all blocks in order.
            later: leave it to `track` to find the distinct ones of ids, and on a GPU to check them.
        """
        if self._flags.waiting:
            self._flags.poll()
        tables, number = self._views.found or self.views, self.num_inner
        if index is None:  # the same each time
            if "all" not in tables:
                every = view(torch.arange(number, device=self.value.device))
                ones = view(torch.ones_like(self.value[:, 0]))
                tables["all"] = Blocks(number, every, None, ones, whole=True)
            return tables["all"]
        size = sample = None
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() != 1:
            index = read_index("`index`", index, number)
            if isinstance(index, Memberships):
                size, sample = index.samples, index.sample.to(self.value.device, non_blocking=True)
                index = index.group
        like, on_host = tables["u"], not isinstance(tables["u"], Tensor)
        if later and size is None and len(index):
            if index.is_cpu:
                ids = index.numpy()
                check_range("`index`", int(ids.min()), int(ids.max()), number)
            return Blocks(len(index), None, index, None)
        if on_host or index.is_cpu:
            ids = index.cpu().numpy()
            # Negative ids are huge ones without a sign: one look for both.
            highest = int(ids.view(np.uint64).max()) if ids.size else 0
            if highest >= number:
                check_range("`index`", int(ids.min()), int(ids.max()), number)
            if number > MAX_BLOCKS_FOR_BINCOUNT:
                unique, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
            else:
                counts = np.bincount(ids)
                unique = counts.nonzero()[0]
                place = np.empty(highest + 1, np.int64)
                place[unique] = np.arange(unique.size)
                inverse, counts = place[ids], counts[unique]
        else:
            unique, inverse, counts = torch.unique(index, return_inverse=True, return_counts=True)
            if len(unique):
                check_range("`index`", int(unique[0]), int(unique[-1]), number)
        size = index.shape[0] if size is None else size
        if on_host:
            return Blocks(size, unique, inverse, counts.astype(like.dtype), sample_of_entry=sample)
        # Copies from the host to a GPU may be asynchronous.
        unique, inverse, counts = (
            tensor(part).to(like.device, non_blocking=True) for part in (unique, inverse, counts)
        )
        return Blocks(size, unique, inverse, counts.to(like.dtype), sample_of_entry=sample)

    @property
    def views(self) -> dict[str, Any]:
        """The tables as the rules see them, and the tensor `value`; renewed when they move."""
        if not self._views.found:
            tables: dict[str, Any] = {"value": self.value, "mask": self.seen}
            tables |= {"u": view(self.rows), "seen": view(self.seen)}
            if self.estimate is not None:
                tables |= {name: view(part) for name, part in self.estimate.named_buffers()}
            if self.dim > 1:  # to go with rows of u
                by_block = {"seen", "visits", "of_noise", "of_drift"}
                tables |= {name: tables[name][:, None] for name in by_block & tables.keys()}
            self._views.found = tables
        return self._views.found

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._views.found = {}  # `assign=True` takes other tensors
        super()._load_from_state_dict(*arguments)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._views.found = {}
        return super()._apply(fn, recurse)

    def entries(
        self,
        blocks: Blocks,
        fresh: Tensor,
        previous: Tensor | None = None,
        carrier: Tensor | None = None,
        carrier_blocks: Blocks | None = None,
    ) -> Entries:
        """Bring values to the shape and precision of the table.

        Without a correction, previous values are dropped; with one but without previous values,
        w_{-1} = w_0 and the correction is exactly zero.

        Args:
            blocks: the blocks of `fresh` and `previous`.
            fresh: g_i(w_t), (E,) or (E, d1).
            previous: g_i(w_{t-1}).
            carrier: the values that carry the gradient (default: `fresh`).
            carrier_blocks: the blocks of `carrier` when it is an independent batch.
        """
        tables = self._views.found or self.views
        table, host = tables["value"], not isinstance(tables["u"], Tensor)
        shape = (blocks.size,) if self.dim == 1 else (blocks.size, self.dim)
        if fresh.shape != shape or fresh.dtype != table.dtype or blocks.sample_of_entry is not None:
            fresh = self._shaped("values", fresh, blocks)
        past = None
        if self.needs_previous and not self.refresh_due:
            past = (
                fresh if previous is None else self._shaped("values at w_{t-1}", previous, blocks)
            )
            past = past.detach().numpy() if host else past.detach()
        independent, stand_in = carrier_blocks is not None, carrier is not None
        carrier_blocks = carrier_blocks or blocks
        if carrier is None:
            carrier = fresh
        else:
            carrier = self._shaped("values that carry the gradient", carrier, carrier_blocks)
        array = fresh.detach().numpy() if host else fresh.detach().to(table.device)
        return Entries(blocks, array, past, carrier, carrier_blocks, independent, stand_in)

    def _shaped(self, what: str, values: Tensor, blocks: Blocks) -> Tensor:
        """Values in the shape, precision and on the device of the table."""
        shape = (blocks.size,) if self.dim == 1 else (blocks.size, self.dim)
        if values.shape == (*shape, 1) and self.dim == 1:
            values = values.squeeze(1)
        if values.shape != shape:
            each = f"one row per {'entry' if blocks.sample_of_entry is None else 'row'} of `index`"
            hint = (
                ""
                if values.dim()
                else (
                    " Return the losses of the samples themselves, not their mean: `cross_entropy("
                    'model(x), y, reduction="none")`; for limits, the pair (loss, values).'
                )
            )
            if blocks.inverse is None:
                each = "one row for each group or limit in order, because the call has no `index`"
                hint = (
                    " For values of samples pass the group of each sample as `index`."
                    if values.dim()
                    else " For limits return the pair (loss, values); for groups the loss of each "
                    "sample, and pass their groups as `index`."
                )
            raise ValueError(
                f"The {what}{self.of} must have shape {shape}, {each}, but have shape "
                f"{tuple(values.shape)}.{hint}"
            )
        values = values.to(self.value.device, self.value.dtype)
        samples = blocks.sample_of_entry
        return values if samples is None else values.index_select(0, samples)

    def forward(self, fresh: Tensor, index: Any = None, previous: Tensor | None = None) -> Tensor:
        """Update the sampled blocks; return u_i carrying the gradient of g_i.

        Args:
            fresh: g_i(w_t), shape (E,) or (E, d1), with gradient.
            index: block of each entry; None means all n blocks in order.
            previous: g_i(w_{t-1}) on the same samples.

        Returns:
            One row for each distinct block, in increasing order.
        """
        entries = self.entries(self.blocks(index), fresh, previous)
        return self.update(entries).carrying_gradient()

    def update(self, entries: Entries) -> Tracked:
        """Update the blocks of some entries at once, unless this is an evaluation."""
        step = OpenStep() if self.updating else None
        tracked = self.track(entries, step)
        if step is not None:
            self.close(step.updates[self])
        return tracked

    def pool(self, entries: Entries) -> Batch:
        """The batch of some entries of this rank; nothing is updated."""
        return self._pooled(entries.batch(self.log_space), None, None)

    def _pooled(self, batch: Batch, group: Group | None, call: int | None) -> Batch:
        """A batch over all ranks."""
        if group is not None:
            batch = over_ranks(batch, group, call)
        if not self.sampled and batch.index.shape[0] != self.num_inner:
            raise ValueError(
                f"This method looks at all {self.num_inner} blocks (constraints) in each step, but "
                f"the batch has values of {batch.index.shape[0]}; nothing was updated. Methods "
                "whose estimates are running averages (sonex, hinge, squared-hinge) can sample "
                "them."
            )
        return batch

    def track(
        self,
        entries: Entries,
        step: OpenStep | None,
        group: Group | None = None,
        call: int | None = None,
    ) -> Tracked:
        """Compute the update of a batch without writing it (Alg. 1, line 7).

        A second batch before the optimizer steps (gradient accumulation, or a step that a
        GradScaler skipped) holds more samples of the same g_i(w_t): both are pooled and applied as
        one, to the u from before the step. Two corrections for one step would count it twice.

        Args:
            entries: of this rank.
            step: gets the update, and holds those of earlier calls; None in an evaluation.
            group: ranks to pool over.
            call: its number.
        """
        dropped = self._progress.skipped
        if entries.blocks.index is None:
            ids = tensor(entries.blocks.inverse).to(self.value.device, non_blocking=True)
            found = Blocks.found_in(ids, self.num_inner, self.value)
            entries = entries._replace(blocks=found, carrier_blocks=found)
        if self.on_nonfinite == "skip":
            entries, number = entries.without_nonfinite(self.largest)
            dropped += number
        batch = entries.batch(self.log_space)
        if group is not None or not self.sampled:
            batch = self._pooled(batch, group, call)
        current, counts = batch.index, batch.counts
        if entries.independent:
            counts = carrier_counts(entries.carrier_blocks, batch, group)
        if step is None:
            u = batch.mean(batch.fresh)
        else:
            open_step = step.updates.get(self)
            if open_step is not None:
                batch = open_step.batch.merge(batch, self.num_inner)
                dropped += open_step.dropped - self._progress.skipped
            counters = self._progress.last, self._progress.steps + 1
            if step.counters is not None:
                counters = step.counters[self]
            first = open_step is None and group is None
            update = self._updated(batch, entries, dropped, first, *counters)
            if entries.blocks.valid is not None:
                valid = entries.blocks.valid.all()
                valid = valid if open_step is None else valid & open_step.valid_ids
                update = update._replace(valid_ids=valid)
            if entries.stand_in and group is None and self.on_nonfinite == "raise":
                self._check_carrier(entries.carrier)
            step.updates[self] = update
            u = update.visit.before if self.read == "old" else update.visit.after
            if open_step is not None:  # pick the blocks of this call
                xp: Any = torch if isinstance(u, Tensor) else np
                u = u[xp.searchsorted(batch.index, current)]
        carrier, blocks, log = entries.carrier, entries.carrier_blocks, self.log_space
        if group is None:
            present = None if blocks.valid is None else blocks.counts > 0
            return Tracked(u, current, carrier, blocks, counts, log=log, step=step, present=present)
        position = view(torch.searchsorted(tensor(current), tensor(blocks.index)))
        return Tracked(u, current, carrier, blocks, counts, group.size, position, log, step)

    def _updated(
        self,
        batch: Batch,
        entries: Entries,
        dropped: int,
        first: bool,
        last: Update | None,
        number: Any,
    ) -> Update:
        """The update of the blocks of a step.

        Args:
            batch: of the step.
            entries: of the call.
            dropped: entries dropped so far.
            first: `entries` are all of the step.
            last: the update of the last step.
            number: of this step.
        """
        fresh: Any = batch.mean(batch.fresh)
        previous, measured = batch.previous, self._measured
        previous = None if previous is None else batch.mean(previous)
        repeated, repeats = False, MAX_REPEATS if last is None else last.repeats
        if first and measured and last is not None:
            repeated, repeats = self._comes_again(entries, fresh, last)
        rows, came = self._rows(batch), None
        if isinstance(fresh, Tensor):
            came = batch.finite()
            came = came if batch.present is None else came & batch.present
            if rows.statistics is not None:  # from the third visit on, large values are clipped
                came = came & (self._within(fresh) | (rows.statistics.visits.view(len(fresh)) > 1))
        if repeated is not False:  # no new visit: it takes the place of the last one
            assert last is not None
            rows = self._rows_instead(repeated, rows, last.rows)
        refresh = self.refresh_every is not None and self.refresh_due
        pooled: Any = rows.pooled
        if (
            came is None
            and previous is None
            and not refresh
            and pooled is not None
            and pooled.steps >= 3
            and abs(fresh - rows.u).max(initial=0.0)
            <= (rules.OUTLIER * pooled.squared_innovation) ** 0.5
        ):
            # All values are finite then, and none has to be clipped.
            visit = self.rule.step(rows, fresh, skip_clipping=True, repeated=repeated)
        else:
            mask = came if came is None or self.dim == 1 else came[:, None]
            with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
                visit = self.rule.step(
                    rows, fresh, previous, blocks=batch.number, came=mask,
                    repeated=repeated, refresh=refresh,
                )  # fmt: skip
            if came is None:
                good = self._within(visit.after) & batch.finite()
                if not good.all():
                    self._refuse(batch, good)
            elif batch.source is not None:
                filled = tree_map(batch.filled, visit._replace(pooled=None))
                visit = filled._replace(pooled=visit.pooled)
        samples = (entries.blocks, entries.fresh) if first and measured else None
        return Update(batch, rows, fresh, visit, number, came, dropped, samples, repeats)

    def _rows(self, batch: Batch) -> Rows:
        """The state of the blocks of a batch."""
        tables, index, progress = self._views.found or self.views, batch.index, self._progress
        whole = index.shape[0] == self.num_inner  # distinct and in increasing order: all of them
        at = slice(None) if whole else index
        u, seen = tables["u"][at], None
        if whole:
            u = u.clone() if isinstance(u, Tensor) else u.copy()
        if progress.complete != tables["mask"]._version:  # some may have no value yet
            seen = tables["seen"][at]
            seen = seen.clone() if isinstance(seen, Tensor) else None if seen.all() else seen.copy()
        if not self._measured:
            return Rows(u, seen)
        pooled: Any = tables["pooled"]
        pooled = Pooled(*(pooled.unbind() if isinstance(pooled, Tensor) else pooled.tolist()))
        statistics = Statistics(*[tables[name][at] for name in Statistics._fields])
        return Rows(u, seen, statistics, pooled)

    def _rows_instead(self, repeated: Any, now: Rows, before: Rows) -> Rows:
        """The state before the last step, where this batch is that of the last step again."""
        if repeated is True:
            return now._replace(u=before.u, seen=before.seen)
        u = torch.where(repeated, before.u, now.u)
        if now.seen is None or before.seen is None:
            return now._replace(u=u)
        return now._replace(u=u, seen=torch.where(repeated, before.seen, now.seen))

    def _within(self, values: Array) -> Array:
        """Which rows are finite, and not too large."""
        good = abs(values) <= self.largest
        return good if good.ndim == 1 else good.all(1)

    def _check_carrier(self, carrier: Tensor) -> None:
        """Raise if values that only carry the gradient are not finite; a GPU is not asked."""
        # One number to look at, at first; a sum of finite values may overflow.
        if carrier.device.type != "cpu" or math.isfinite(carrier.detach().sum().item()):
            return
        if not bool(torch.isfinite(carrier).all()):
            raise NonFiniteValue(
                f"The values that carry the gradient{self.of} are NaN or infinite; nothing was "
                "updated."
            )

    def _refuse(self, batch: Batch, good: Array) -> None:
        """Raise: some values of a batch, or u after it, are not finite."""
        bad = batch.index[~good].tolist()[:10]
        place = ", ".join(f"`{self.names[k]}`" for k in bad) if self.names else f"blocks {bad}"
        raise NonFiniteValue(
            f"The values{self.of} are NaN or infinite, or so large that their average overflows, "
            f"for {place}; nothing was updated. A mean over no samples is NaN: leave out what a "
            "batch has none of. `on_nonfinite='skip'` drops such values."
        )

    def _comes_again(self, entries: Entries, means: Array, last: Update) -> tuple[Any, Any]:
        """Whether these are the samples of the last step, at other parameters; how often they came.

        The index is the same, and losses vary within their blocks as they did. Both are tensors on
        a GPU, to avoid a device synchronisation.
        """
        repeats = last.repeats
        if last.samples is None:
            return False, repeats
        (blocks, values), (before, earlier) = entries[:2], last.samples
        inverse, on_host = blocks.inverse, not isinstance(values, Tensor)
        if (
            inverse is None
            or before.inverse is None
            or len(values) < len(means) + 8 * (blocks.valid is None)
        ):
            return False, repeats
        if len(values) != len(earlier) or len(blocks.index) != len(before.index):
            return False, 0
        if on_host and not (
            blocks.index[0] == before.index[0]  # seldom, and quick to see
            and np.array_equal(blocks.index, before.index)
            and np.array_equal(inverse, before.inverse)
        ):
            return False, 0
        here = (values - means[inverse]).reshape(-1)
        there = (earlier - last.fresh[inverse]).reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            product, squares = here @ there, (here @ here) * (there @ there)
            same: Any = (product > 0) & (product * product > SAME_SAMPLES**2 * squares)
        if on_host:
            return bool(same) and repeats < MAX_REPEATS, repeats + 1 if same else 0
        same = same & (inverse == before.inverse).all() & (blocks.index == before.index).all()
        if blocks.valid is not None:  # eight samples more than blocks
            same = same & ((blocks.counts > 0).sum() + 8 <= len(values))
        return same & (repeats < MAX_REPEATS), (repeats + 1) * same

    def table_with(
        self, step: OpenStep, tracked: Tracked | None = None
    ) -> tuple[Array, Array | None]:
        """The u_i of all blocks after an open step, and which count; None for all.

        On the CPU those of the blocks seen alone; elsewhere a selection would synchronise.

        Args:
            step: the step.
            tracked: values that take the place of those of the same blocks.
        """
        tables, update = self._views.found or self.views, step.updates[self]
        u, seen, on_device = tables["u"], tables["seen"], isinstance(tables["u"], Tensor)
        complete = self._progress.complete == tables["mask"]._version
        u = u.clone() if on_device else u.copy()
        u[update.batch.index] = update.visit.after
        if not complete:
            seen = seen.clone() if on_device else seen.copy()
            seen[update.batch.index] = update.came is None or self._seen_after(update)
        if tracked is not None:
            u[tracked.ids] = tracked.u
        if on_device or complete or seen.all():
            return u, seen if on_device else None
        return u[seen if self.dim == 1 else seen[:, 0]], None

    def _seen_after(self, update: Update) -> Any:
        """Which blocks of an update have a value after it."""
        came: Any = update.came
        if update.rows.seen is None:
            return True
        return update.batch.filled(update.rows.seen | (came if self.dim == 1 else came[:, None]))

    def close(self, update: Update) -> None:
        """Write an update: the step is over."""
        progress, tables = self._progress, self._views.found or self.views
        self.write(update)
        if update.came is not None:
            self._flags.push(self.good(update), lambda: update)
        elif update.rows.seen is not None and tables["seen"].all():
            progress.complete = tables["mask"]._version
        if update.visit.statistics is not None:
            progress.last = update
        progress.blocks, progress.steps = update.batch, update.number
        progress.skipped = update.dropped

    def record_step(
        self, number: int, blocks: Any, good: Tensor, update: Callable[[], Update]
    ) -> None:
        """Record a step whose rows a CUDA graph has written.

        Args:
            number: of the step.
            blocks: B1.
            good: see the method `good`, checked when it has arrived on the host.
            update: gives the update, for the error.
        """
        progress = self._progress
        progress.steps, progress.blocks = number, blocks
        self._flags.push(good, update)

    def good(self, update: Update) -> Tensor:
        """Two flags, for `LateCheck`: all values of an update are finite, all its ids are valid."""
        values = _finite_or_absent(update).all()
        return torch.stack([values, torch.ones_like(values) & update.valid_ids])

    def write(self, update: Update) -> None:
        """Write the rows of an update."""
        tables, visit, index = self._views.found or self.views, update.visit, update.batch.index
        at = slice(None) if index.shape[0] == self.num_inner else index
        tables["u"][at] = visit.after
        if update.rows.seen is not None:
            tables["seen"][at] = update.came is None or self._seen_after(update)
        if visit.statistics is not None:
            for name, rows in zip(Statistics._fields, visit.statistics, strict=True):
                tables[name][at] = rows
            pooled: Any = visit.pooled
            on_device = isinstance(tables["u"], Tensor)
            tables["pooled"][:] = torch.stack(list(pooled)) if on_device else pooled

    def set_values(self, index: Any, values: Tensor) -> None:
        """Set u_i directly; entries of one block are averaged."""
        batch = self.pool(self.entries(self.blocks(index), values)._replace(previous=None))
        self.check_batch(batch)
        self.set_batch(batch)

    def check_batch(self, batch: Batch) -> None:
        """Raise unless all values of a batch are finite."""
        if not bool((good := batch.finite()).all()):
            self._refuse(batch, good)

    def set_batch(self, batch: Batch) -> None:
        """Set u_i to the means of a batch, which count as first visits."""
        means, index = tensor(batch.mean(batch.fresh)), tensor(batch.index)
        if self.estimate is not None:
            self.estimate.latest[index] = self.estimate.slow[index] = means
            self.estimate.visits[index] = self.estimate.of_noise[index] = 1
            self.estimate.of_drift[index] = 0
        self.rows[index] = means
        self.seen[index] = True

    def get_extra_state(self) -> Tensor:
        """Counters that go into `state_dict()`."""
        return torch.tensor([self.steps, self.skipped])

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if no training can have led to this state."""
        super().check_state(state)
        counters = state.get("_extra_state", self.get_extra_state())
        if counters.shape != (2,) or counters.is_floating_point() or bool((counters < 0).any()):
            raise ValueError(f"`_extra_state` must be two counts but is: {counters.tolist()}.")

    def set_extra_state(self, state: Any) -> None:
        """Restore the counters."""
        self._progress, self._flags = _Progress(*state.tolist()), LateCheck(self.num_inner)

    def extra_repr(self) -> str:
        gamma, correction = self.rule.gamma, self.rule.correction
        return f"{self.num_inner}, {self.dim}, {gamma=}, {correction=}, read={self.read!r}"


class ErrorEstimate(KeepsPrecision):
    """Measured noise and drift, of each block and of all together (`fcco.rules.track`).

    Args:
        like: the table u, whose shape, precision and device they take.
    """

    latest: Tensor
    difference: Tensor
    visits: Tensor
    of_noise: Tensor
    of_drift: Tensor
    largest: Tensor
    slow: Tensor
    before: Tensor
    pooled: Tensor
    never_negative = ("difference", "visits", "of_noise", "of_drift", "largest")

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        for name in ("latest", "difference", "largest", "slow", "before"):
            self.register_buffer(name, torch.zeros_like(like))
        for name in ("visits", "of_noise", "of_drift"):
            self.register_buffer(name, like.new_zeros(len(like)))
        self.register_buffer("pooled", like.new_tensor([0.0] * 10 + [0.5]))

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if no training can have led to this state."""
        super().check_state(state)
        (low, high), rounding = rules.GAMMA_RANGE, 1e-6
        pooled = Pooled(*state.get("pooled", self.pooled).tolist())
        if min(pooled._replace(progress=0.0, gap=0.0)) < 0:
            raise ValueError(f"`pooled` has numbers below 0: {pooled}.")
        if not low - rounding <= pooled.gain <= high + rounding:
            raise ValueError(f"`pooled` has a gain outside {rules.GAMMA_RANGE}: {pooled.gain}.")
        if pooled.steps and not min(pooled.of_noise, pooled.of_drift) >= 1 - rounding:
            raise ValueError(
                f"`pooled` has factors of noise and drift below 1: {pooled.of_noise}, "
                f"{pooled.of_drift}."
            )


class LateCheck:
    """Detects bad values and ids without a device synchronisation.

    Reading a number from a GPU waits for everything before it, and the GPU then idles until new
    work arrives. Here flags are copied beside the computation and looked at in a later step.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: deque[tuple[Tensor, Any, Callable[[], Update]]] = deque()

    def __deepcopy__(self, memo: Any) -> LateCheck:
        return LateCheck(self.number)

    def __reduce__(self) -> Any:
        return LateCheck, (self.number,)

    def push(self, good: Tensor, update: Callable[[], Update]) -> None:
        """Remember whether an update was `good`: its values, and its ids."""
        arrived = None
        if good.device.type == "cuda":
            host = torch.empty(good.shape, dtype=torch.bool, pin_memory=True)
            good, arrived = host.copy_(good, non_blocking=True), torch.cuda.Event()
            arrived.record()
        self.waiting.append((good, arrived, update))

    def poll(self) -> None:
        """Raise if a flag that has arrived is bad."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # to ask an event would end the recording of a graph
        while self.waiting and (self.waiting[0][1] is None or self.waiting[0][1].query()):
            good, _, update = self.waiting.popleft()
            values, ids = good.tolist()
            if values and ids:
                continue
            self.waiting.clear()
            if not ids:
                raise IndexError(
                    f"`index` must lie in [0, {self.number - 1}], but that of an earlier step "
                    "contained others; what had them was left out."
                )
            bad = update()
            blocks = bad.batch.index[~_finite_or_absent(bad)].unique().tolist()[:10]
            raise NonFiniteValue(
                f"Inner values were NaN or infinite for blocks {blocks} in an earlier step; these "
                "blocks kept their value, but the loss of that step, and so the gradient, was not "
                "finite."
            )


def _finite_or_absent(update: Update) -> Tensor:
    """Which rows are blocks with finite values, or padding."""
    came: Any = update.came
    return came if update.batch.present is None else came | ~update.batch.present
