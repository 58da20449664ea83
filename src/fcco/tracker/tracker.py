"""The tracker: one running estimate u_i of each inner value g_i(w), kept in buffers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import _checks
from .._distributed import Group
from .._state import KeepsPrecision
from .blocks import (
    Batch,
    Blocks,
    Entries,
    Tracked,
    carrier_counts,
    find_blocks,
    over_ranks,
    per_row,
)
from .error import ErrorEstimate, largest
from .update import Rule, correction_weight, log_track, overlay, track

__all__ = ["InnerTracker", "NonFiniteValue", "Update", "refuse_nonfinite"]


REPEATS = 8
"""A batch may come again so often. From then on, and before any other was seen, it is all the data
there is: values without noise, of which each is news."""

SAME = 0.9
"""Correlation of losses within blocks from which on they are those of the same samples."""


class NonFiniteValue(ValueError):
    """An inner value, an ordinary loss or a running estimate that is NaN or infinite."""


class Update(NamedTuple):
    """A computed but not yet written update of the table.

    Attributes:
        batch: the blocks of the whole open step, this batch included.
        current: the block ids of this batch alone.
        old: u_i before the step.
        seen: which blocks had a value before the step; None when all had.
        fresh: g_i(w_t), the means over the samples of the step.
        counted: the same, but one that is far too large as far as it counts, see `ErrorEstimate`.
        before: u_i before the update (the fresh value on a first visit).
        after: u_i after the update.
        finite: which blocks have finite values, with `on_nonfinite="deferred"`.
        dropped: entries dropped by `on_nonfinite="skip"`.
        samples: the entries of the only call of the step, without gradient; None if there were
            several calls.
        again: the batch is that of the step before, at other parameters.
    """

    batch: Batch
    current: Tensor
    old: Tensor
    seen: Tensor | None
    fresh: Tensor
    counted: Tensor
    before: Tensor
    after: Tensor
    finite: Tensor | None = None
    dropped: int = 0
    samples: tuple[Blocks, Tensor] | None = None
    again: Any = False


@dataclass
class _Progress:
    """Counters and the open step, all that was written since the last optimizer step.

    A plain object, because setting an attribute of an `nn.Module` costs as much as a tensor
    operation.
    """

    steps: int = 0
    skipped: int = 0
    open: Update | None = None
    blocks: int = 0  # in the last step
    last: Update | None = None  # the step before
    repeats: Any = REPEATS  # steps since the batch was another one
    # A cache of the mask `seen`: ids that are known to have a value, valid for one version of the
    # mask. A set answers at once what a look into the mask would cost four tensor operations.
    visited: set[int] = field(default_factory=set)
    version: int = -1
    complete: bool = False  # every block has a value
    seen_ids: tuple[int, Tensor] | None = None  # for `seen_rows`, with its version of the mask


class InnerTracker(KeepsPrecision):
    r"""Track u_i ~ g_i(w) for i = 1..n; touch only the sampled blocks.

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
            weighs the noise of a batch value against the lag of u, see `fcco.tracker.error`; a
            block's first values are averaged.
        correction: gamma', a number, `"theory"` (MSVR) or `"auto"`: (1 - gamma) B1 / n, which
            is 1 - gamma when every block is seen at each step and small when few are.
        read: which u enters the gradient: `"old"` (before this batch; unbiased with one batch,
            as the paper's algorithm prints it) or `"new"`.
        log_space: values are logarithms of positive inner values and u is kept as log u.
        refresh_every: every so many steps take the fresh value itself (SPIDER); give that step a
            large batch, `refresh_due` says when.
        sampled: whether a step may hold only a part of the blocks. False refuses such a step,
            for updates that would never learn what they missed.
        offset: subtracted from g_i before tracking, one number or one per block.
        measure: estimate the noise and the lag of u from the batches, see `error()`; on by default
            for group losses and constraints.
        rule: another update than the formula above, with the arguments of `fcco.tracker.track`.
        on_nonfinite: `"raise"` refuses a NaN or infinite value and leaves every buffer as it was;
            `"skip"` drops such entries and counts them in `skipped`. Their gradient is zero
            where it enters your graph; there 0 * NaN may still be NaN (a NaN in the input, say).
            `"deferred"` leaves those blocks as they were and raises in a later call, so that the
            host never waits for a GPU.
        dtype: precision of u; never narrowed by `.to(...)`. Default float32.
        device: where the buffers live at first.

    Example:
        >>> import torch, fcco
        >>> tracker = fcco.InnerTracker(num_inner=3, gamma=0.5, correction=0.0, read="new")
        >>> g = torch.tensor([1.0, 3.0, 5.0], requires_grad=True)
        >>> tracker(g, torch.tensor([0, 0, 2])).tolist()
        [2.0, 5.0]
        >>> tracker(g * 2, torch.tensor([0, 0, 2])).tolist()
        [3.0, 7.5]
        >>> tracker.seen.tolist()
        [True, False, True]

    References:
        W. Jiang et al., Multi-block-single-probe variance reduced estimator for coupled
        compositional optimization, 2022 (MSVR).
    """

    value: Tensor
    seen: Tensor
    offset: Tensor | None
    names: tuple[str, ...] | None = None  # of the blocks, for errors

    def __init__(
        self,
        num_inner: int,
        dim: int = 1,
        *,
        gamma: float | Literal["auto"] = 0.1,
        correction: float | Literal["theory", "auto"] = "auto",
        read: Literal["old", "new"] = "old",
        log_space: bool = False,
        refresh_every: int | None = None,
        sampled: bool = True,
        offset: Tensor | None = None,
        measure: bool = False,
        rule: Rule | None = None,
        on_nonfinite: Literal["raise", "skip", "deferred"] = "raise",
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
        if isinstance(gamma, str):
            _checks.one_of(call, "gamma", gamma, ("auto",))
            correction = 0.0
        else:
            _checks.in_interval(call, "gamma", gamma, 0.0, 1.0)
        _checks.one_of(call, "read", read, ("old", "new"))
        _checks.one_of(call, "on_nonfinite", on_nonfinite, ("raise", "skip", "deferred"))
        if isinstance(correction, str):
            _checks.one_of(call, "correction", correction, ("theory", "auto"))
            if correction == "theory" and not isinstance(gamma, str):
                _checks.in_interval(call, "gamma", gamma, 0.0, 1.0, open_high=True)
        else:
            _checks.in_interval(call, "correction", correction, 0.0, math.inf, open_high=True)
        if gamma == 0 and correction == 0:
            raise ValueError("`InnerTracker(gamma=0)` with `correction=0` would never move.")
        if refresh_every is not None:
            _checks.integer(call, "refresh_every", refresh_every, 1)
        if not dtype.is_floating_point:
            raise ValueError(f"`InnerTracker(dtype=...)` must be a float type but is: {dtype}.")
        if not sampled and on_nonfinite == "skip":
            raise ValueError(
                "`InnerTracker(on_nonfinite='skip')` would leave a block out of a step, which "
                "`sampled=False` forbids; use 'raise'."
            )
        self.num_inner, self.dim = num_inner, dim
        self.automatic, self.correction, self.read = automatic, correction, read
        self._gamma = 0.5 if isinstance(gamma, str) else gamma
        self.log_space, self.refresh_every = log_space, refresh_every
        self.sampled, self.on_nonfinite = sampled, on_nonfinite
        self.rule = rule or (log_track if log_space else track)
        # In an objective, calls between two optimizer steps are pooled, see `wait_for_close`.
        self._waits_for_close = False
        self._progress = _Progress()
        self._check = DeferredFiniteCheck() if on_nonfinite == "deferred" else None
        self._all_blocks: Blocks | None = None
        table = torch.zeros((num_inner, dim), dtype=dtype, device=device)
        self.register_buffer("value", table)
        self.register_buffer("seen", torch.zeros(num_inner, dtype=torch.bool, device=device))
        # A setting, like limits: it is not part of the state.
        self.register_buffer("offset", None if offset is None else offset.to(table), False)
        measure = measure or automatic
        if measure and (log_space or rule is not None):
            raise ValueError(
                "`InnerTracker(measure=True)` and `gamma='auto'` know the error of averages: they "
                "have no meaning with `log_space` or a `rule` of your own."
            )
        if measure and gamma == 0:
            raise ValueError(
                "`InnerTracker(measure=True)` knows the error of averages, but with `gamma=0` u is "
                "none."
            )
        self.estimate: ErrorEstimate | None = ErrorEstimate(self.rows) if measure else None
        self.__dict__["estimate"] = self.estimate  # from where it is found without a search

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
        return self._progress.blocks

    def error(self) -> Tensor:
        """The standard error of each u, from noise and lag, in the shape of `rows`.

        NaN where it is not known: for a block that was visited less than twice, and everywhere
        without `measure=True`. A correction is not taken into account, so that the lag is then
        somewhat overestimated.
        """
        if self.estimate is None:
            return torch.full_like(self.rows, torch.nan)
        return self.estimate.error(self.constant_gamma)

    @property
    def gamma(self) -> float:
        """The weight of the fresh value; with `"auto"` the present one, read from the device."""
        return self.estimate.gain.item() if self.automatic and self.estimate else self._gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        self._gamma, self.automatic = value, False

    @property
    def constant_gamma(self) -> float | None:
        """The weight of the fresh value, None with `"auto"`."""
        return None if self.automatic else self._gamma

    @property
    def rows(self) -> Tensor:
        """The table u as batches see it: a view of `value`, of shape (n,) when d1 = 1."""
        return self.value.view(-1) if self.dim == 1 else self.value

    def seen_rows(self) -> Tensor:
        """The u_i of the blocks seen so far, shape (seen,) or (seen, d1)."""
        progress, table, seen = self._progress, self.value, self.seen
        rows = table.view(-1) if self.dim == 1 else table
        if progress.complete and progress.version == seen._version:
            return rows
        # Which blocks these are is looked up once for each version of the mask.
        if progress.seen_ids is None or progress.seen_ids[0] != seen._version:
            progress.seen_ids = (seen._version, seen.nonzero().squeeze(1))
        return rows.index_select(0, progress.seen_ids[1])

    @property
    def needs_previous(self) -> bool:
        """Whether updates use g_i(w_{t-1})."""
        return self.correction != 0 and (self.correction != "auto" or self._gamma < 1)

    @property
    def corrects(self) -> bool:
        """Whether the next update uses g_i(w_{t-1}); a refresh does not."""
        # Written out, since a call of two properties is what a step can spare.
        needs = self.correction != 0 and (self.correction != "auto" or self._gamma < 1)
        return needs and (self.refresh_every is None or not self.refresh_due)

    @property
    def refresh_due(self) -> bool:
        """Whether the next step replaces u by the fresh value (see `refresh_every`)."""
        return self.refresh_every is not None and self.steps % self.refresh_every == 0

    @property
    def updating(self) -> bool:
        """Whether a call now is part of the training, not an evaluation."""
        return self.training and torch.is_grad_enabled()

    def blocks(self, index: Any = None) -> Blocks:
        """Check `index`; find the distinct blocks."""
        if self._check is not None:
            self._check.poll()
        if index is not None:
            return find_blocks(index, self.num_inner, self.value)
        # All blocks in order: the same each time.
        if self._all_blocks is None or self._all_blocks.counts.device != self.value.device:
            self._all_blocks = find_blocks(None, self.num_inner, self.value)
        return self._all_blocks

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
        fresh = self._shaped("values", fresh, blocks)
        if not self.corrects:
            previous = None
        elif previous is None:
            previous = fresh.detach()
        else:
            previous = self._shaped("values at w_{t-1}", previous, blocks)
        carrier_blocks = carrier_blocks or blocks
        if carrier is None:
            carrier = fresh
        else:
            carrier = self._shaped("values that carry the gradient", carrier, carrier_blocks)
        return Entries(blocks, fresh, previous, carrier, carrier_blocks)

    def _shaped(self, what: str, values: Tensor, blocks: Blocks) -> Tensor:
        table, shape, expected = self._buffers["value"], tuple(values.shape), blocks.size
        assert table is not None
        if self.dim == 1 and shape == (expected, 1):
            values = values.squeeze(1)
        elif shape != ((expected,) if self.dim == 1 else (expected, self.dim)):
            wanted = f"({expected},)" if self.dim == 1 else f"({expected}, {self.dim})"
            raise ValueError(
                f"The {what} must have shape {wanted}, one row per entry of `index`, but have "
                f"shape {shape}."
            )
        if values.dtype != table.dtype or values.device != table.device:
            values = values.to(table.device, table.dtype)
        return values if blocks.rows is None else values.index_select(0, blocks.rows)

    def forward(self, fresh: Tensor, index: Any = None, previous: Tensor | None = None) -> Tensor:
        """Update the sampled blocks; return u_i carrying the gradient of g_i, one row per block.

        Args:
            fresh: g_i(w_t), shape (E,) or (E, d1), with gradient.
            index: block of each entry; None means all n blocks in order.
            previous: g_i(w_{t-1}) on the same samples.

        Returns:
            Shape (B1,) or (B1, d1), for the distinct blocks in increasing order.
        """
        entries = self.entries(self.blocks(index), fresh, previous)
        return self.update(entries).carrying_gradient()

    def update(self, entries: Entries, group: Group | None = None) -> Tracked:
        """Update the blocks of some entries, unless this is an evaluation."""
        if not self.updating:
            return self.pooled(entries, group)
        update, tracked = self.propose(entries, group)
        apart = {} if entries.carrier is entries.fresh else {"": entries.carrier}
        refuse_nonfinite({"": (self, update)}, None, apart)
        self.write(update)
        return tracked

    def pool(self, entries: Entries, group: Group | None = None, call: int | None = None) -> Batch:
        """The batch of some entries, over all ranks; nothing is updated."""
        batch = entries.batch(self.log_space)
        if group is not None:
            batch = over_ranks(batch, group, call)
        if self._buffers["offset"] is None:
            return batch
        assert self.offset is not None
        offset = self.offset if self.offset.dim() == 0 else self.offset[batch.index]
        shift = per_row(offset * batch.counts, batch.fresh)
        past = None if batch.previous is None else batch.previous - shift
        return batch._replace(fresh=batch.fresh - shift, previous=past)

    def _require_all(self, batch: Batch) -> None:
        if batch.index.shape[0] != self.num_inner:
            raise ValueError(
                f"This method looks at all {self.num_inner} blocks (constraints) in each step, but "
                f"the batch has values of {batch.index.shape[0]}; nothing was updated. Methods "
                "whose estimates are running averages (sonex, hinge, squared-hinge) can sample "
                "them."
            )

    def propose(
        self, entries: Entries, group: Group | None = None, call: int | None = None
    ) -> tuple[Update, Tracked]:
        """Compute the update of a batch without writing it (Alg. 1, line 7).

        A second batch before the optimizer steps (gradient accumulation, or a step that a
        GradScaler skipped) holds more samples of the same g_i(w_t): both are pooled and applied as
        one, to the u from before the step. Two corrections for one step would count it twice.

        Args:
            entries: of this rank.
            group: ranks to pool over.
            call: number of the call, for `RanksOutOfStep`.
        """
        dropped = 0
        if self.on_nonfinite == "skip":
            entries, dropped = entries.without_nonfinite(self._largest)
        batch = self.pool(entries, group, call)
        if not self.sampled:
            self._require_all(batch)
        current, counts = batch.index, batch.counts
        if entries.independent:
            counts = carrier_counts(entries.carrier_blocks, batch, group)
        step = self._progress.open
        if step is not None:
            batch = step.batch.merge(batch)
        old, seen = self.values_before_step(batch.index, batch.ids, batch.whole)
        fresh, previous, again = batch.mean(batch.fresh), batch.previous, False
        counted = fresh
        if self.estimate is not None:
            last = self._progress.last
            if step is None and group is None and last is not None:
                again = self._comes_again(entries, fresh, last)
                if again is not False:  # no new visit: it takes the place of the last one
                    old, seen = _instead(again, last, old, seen)
            fresh, counted = self.estimate.hold(batch.index, fresh, old)
        gamma: Any = self._gamma
        if self.automatic and self.estimate is not None:
            gamma = self.estimate.weights(batch.index)
            gamma = gamma if self.dim == 1 else gamma.unsqueeze(1)
        correction: Any = 0.0
        if previous is not None:
            previous, blocks = batch.mean(previous), batch.index.shape[0]
            correction = correction_weight(self.correction, gamma, self.num_inner, blocks)
        if self.refresh_every is not None and self.refresh_due:
            gamma = 1.0
        mask = None if seen is None else per_row(seen, old)
        before, after = self.rule(old, mask, counted, previous, gamma, correction)
        finite = None
        if self.on_nonfinite == "deferred":
            finite = self._finite(batch, after)
            # The old value stays, also of a block without one (its mask stays False).
            after = torch.where(per_row(finite, old), after, old)
        only = None
        if step is None and self.estimate is not None:
            only = (entries.blocks, entries.fresh.detach())
        update = Update(
            batch, current, old, seen, fresh, counted, before, after, finite, dropped, only, again
        )
        point = before if self.read == "old" else after
        if batch.index is not current:  # the step holds earlier calls too: pick this one's blocks
            point = point[torch.searchsorted(batch.index, current)]
        if group is not None:
            return update, self._of_ranks(point, current, counts, entries, group)
        carrier, blocks = entries.carrier, entries.carrier_blocks
        return update, Tracked(point, current, carrier, blocks, counts, log=self.log_space)

    def _comes_again(self, entries: Entries, means: Tensor, last: Update) -> Any:
        """Whether these are the samples of the last step, at other parameters.

        The index is the same, and losses vary within their blocks as they did. A tensor on a GPU,
        where nobody shall wait for it.
        """
        if last.samples is None:
            return False
        (blocks, values), (before, earlier) = (entries.blocks, entries.fresh), last.samples
        inverse = blocks.inverse
        if (
            inverse is None
            or before.inverse is None
            or values.shape != earlier.shape
            or blocks.ids != before.ids
            or len(values) < len(means) + 8
        ):
            return False
        on_cpu, progress = values.device.type == "cpu", self._progress
        same: Any = (inverse == before.inverse).all()
        if on_cpu and not same:
            progress.repeats = 0
            return False
        here = (values.detach() - means.index_select(0, inverse)).flatten()
        there = (earlier - last.fresh.index_select(0, inverse)).flatten()
        product, squares = torch.dot(here, there), torch.dot(here, here) * torch.dot(there, there)
        same = same & (product > 0) & (product * product > SAME**2 * squares)
        repeats = progress.repeats
        if on_cpu:
            progress.repeats = repeats + 1 if same else 0
            return bool(same) and repeats < REPEATS
        progress.repeats = (repeats + 1) * same
        return same & (repeats < REPEATS)

    def pooled(
        self, entries: Entries, group: Group | None = None, call: int | None = None
    ) -> Tracked:
        """The values of a batch themselves, in the form of tracked ones; nothing is updated."""
        if self.on_nonfinite == "skip":
            entries, _ = entries.without_nonfinite(self._largest)
        batch = self.pool(entries, group, call)
        if not self.sampled:
            self._require_all(batch)
        counts = batch.counts
        if entries.independent:
            counts = carrier_counts(entries.carrier_blocks, batch, group)
        point, carrier, blocks = batch.mean(batch.fresh), entries.carrier, entries.carrier_blocks
        if group is not None:
            return self._of_ranks(point, batch.index, counts, entries, group)
        return Tracked(point, batch.index, carrier, blocks, counts, log=self.log_space)

    def _of_ranks(
        self, point: Tensor, index: Tensor, counts: Tensor, entries: Entries, group: Group
    ) -> Tracked:
        """Tracked values of the global batch, with the entries of this rank."""
        blocks = entries.carrier_blocks
        position = torch.searchsorted(index, blocks.index)
        return Tracked(
            point, index, entries.carrier, blocks, counts, group.size, position, self.log_space
        )

    def values_before_step(
        self, index: Tensor, ids: list[int] | None = None, whole: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The u of some blocks before the open step, and which had a value.

        The mask is None when all are known to have one, the usual case.

        Args:
            index: distinct block ids, increasing.
            ids: the same as Python numbers, if known.
            whole: whether these are all blocks.
        """
        # nn.Module finds a buffer by a slow search: a step takes each from the registry once.
        progress, step, buffers = self._progress, self._progress.open, self._buffers
        table, known = buffers["value"], buffers["seen"]
        assert table is not None and known is not None
        rows = table.view(-1) if self.dim == 1 else table
        value = rows.clone() if whole else rows.index_select(0, index)
        if step is not None:
            value = overlay(value, index, step.batch.index, step.old)
        # The open step has marked its blocks already: its own mask says what was before.
        opened = step is not None and step.seen is not None
        if (
            not opened
            and progress.version == known._version
            and (progress.complete or (ids is not None and progress.visited.issuperset(ids)))
        ):
            return value, None
        seen = known.index_select(0, index)
        if opened:
            assert step is not None and step.seen is not None
            seen = overlay(seen, index, step.batch.index, step.seen)
        return value, seen

    def write(self, update: Update) -> None:
        """Write a proposed update; the step stays open until `close()` if an objective waits."""
        batch, progress = update.batch, self._progress
        progress.skipped += update.dropped
        if update.finite is not None and self._check is not None:
            self._check.push(update.finite, batch.index)
        if update.seen is not None:
            self._mark_seen(batch, update)
        progress.blocks = batch.index.shape[0]
        table = self._buffers["value"]
        assert table is not None
        rows = table.view(-1) if self.dim == 1 else table
        if batch.whole:
            rows.copy_(update.after)
        else:
            rows.index_copy_(0, batch.index, update.after)
        if self._waits_for_close:
            progress.open = update
        else:
            self._measure(update)
            progress.last = update
            progress.steps += 1

    def _mark_seen(self, batch: Batch, update: Update) -> None:
        """Mark the blocks of a batch in the mask `seen`, and in the cache of it."""
        progress = self._progress
        if progress.version != self.seen._version:  # somebody else wrote to the mask
            progress.visited.clear()
            progress.complete = False
        if update.finite is not None:
            assert update.seen is not None
            self.seen.index_copy_(0, batch.index, update.seen | update.finite)
        else:
            self.seen.index_fill_(0, batch.index, True)
            progress.complete = progress.complete or batch.whole
            # Beyond that a set of numbers costs more than a look into the mask.
            if batch.ids is not None and len(progress.visited) < 100_000:
                progress.visited.update(batch.ids)
                progress.complete = progress.complete or len(progress.visited) == self.num_inner
        progress.version = self.seen._version

    def wait_for_close(self) -> None:
        """From now on, calls belong to one step until `close()`; an objective asks for this."""
        self._waits_for_close = True

    @property
    def open_step(self) -> Update | None:
        """What was written since the last optimizer step, if anything."""
        return self._progress.open

    def close(self) -> bool:
        """End the step: what was tracked since the last call is final; return if there was any."""
        progress = self._progress
        if progress.open is None:
            return False
        self._measure(progress.open)
        progress.last, progress.open = progress.open, None
        progress.steps += 1
        return True

    def _measure(self, update: Update) -> None:
        """Take a finished step into account; a step that is rolled back leaves no trace."""
        if self.estimate is not None:
            index, fresh, came = update.batch.index, update.fresh, update.finite
            gamma = None if self.automatic else self._gamma
            if came is not None:
                fresh = torch.where(per_row(came, fresh), fresh, self.estimate.latest[index])
            if update.again is not False:
                first = torch.as_tensor(update.again, device=fresh.device).logical_not()
                came = first.expand(len(index)) if came is None else came & first
            self.estimate.add(index, fresh, update.old, gamma, came)

    def rollback(self) -> None:
        """Undo the open step."""
        step = self._progress.open
        if step is not None:
            self.rows.index_copy_(0, step.batch.index, step.old)
            if step.seen is not None:
                self.seen.index_copy_(0, step.batch.index, step.seen)
            self._progress.open = None

    def set_values(self, index: Any, values: Tensor) -> None:
        """Set u_i directly; entries of one block are averaged."""
        batch = self.pool(self.entries(self.blocks(index), values)._replace(previous=None))
        self.check_batch(batch)
        self.set_batch(batch)

    def check_batch(self, batch: Batch, name: str = "", after: Tensor | None = None) -> None:
        """Raise unless all values of a batch, and u after it, are finite; `name`: of the term."""
        finite = batch.finite() if after is None else self._finite(batch, after)
        bad = batch.index[~finite].tolist()[:10]
        if bad:
            names = ", ".join(f"`{self.names[k]}`" for k in bad) if self.names else f"blocks {bad}"
            raise NonFiniteValue(_message(name, names))

    @property
    def _largest(self) -> float:
        """The largest value that can be tracked; statistics are made of squares."""
        table = self.value
        return torch.finfo(table.dtype).max if self.estimate is None else largest(table)

    def _finite(self, batch: Batch, after: Tensor) -> Tensor:
        """Which blocks have values that can be tracked, and u after them likewise."""
        grown = after.abs() <= self._largest
        return batch.finite() & (grown if grown.dim() == 1 else grown.all(1))

    def set_batch(self, batch: Batch) -> None:
        """Set u_i to the means of a batch."""
        means = batch.mean(batch.fresh)
        if self.estimate is not None:
            self.estimate.restart(batch.index, means)
        self.rows[batch.index] = means
        self.seen[batch.index] = True
        self._progress.open = None

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
        """Restore the counters; an open step is forgotten."""
        self._progress = _Progress(*state.tolist())
        if self._check is not None:
            self._check = DeferredFiniteCheck()

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        gamma = "'auto'" if self.automatic else self._gamma
        settings = f"gamma={gamma}, correction={self.correction!r}, read={self.read!r}"
        return f"{self.num_inner}, {self.dim}, {settings}"


def _instead(
    again: Any, last: Update, old: Tensor, seen: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The u before the last step, and which blocks had one, if `again`; otherwise as they are."""
    if again is True:
        return last.old, last.seen
    if seen is not None or last.seen is not None:
        every = torch.ones(len(old), dtype=torch.bool, device=old.device)
        seen, before = (every if mask is None else mask for mask in (seen, last.seen))
        seen = torch.where(again, before, seen)
    return torch.where(again, last.old, old), seen


def refuse_nonfinite(
    updates: dict[str, tuple[InnerTracker, Update]],
    loss: Tensor | None,
    carriers: dict[str, Tensor] | None = None,
) -> None:
    """Raise before anything is written if a value of a batch is NaN or infinite.

    Args:
        updates: by term. The new u is looked at: it is finite only if all that entered it is, and
            it may overflow by itself. Only other rules hide what entered.
        loss: g0.
        carriers: by term, values that carry the gradient and are not tracked themselves.
    """
    if updates and all(t.on_nonfinite == "deferred" for t, _ in updates.values()):
        return  # looking at a value would make the host wait
    checked = {n: each for n, each in updates.items() if each[0].on_nonfinite == "raise"}
    apart = {n: c.detach() for n, c in (carriers or {}).items() if n in checked}
    parts, squared = [], []
    for tracker, update in checked.values():
        (parts if tracker.estimate is None else squared).append(update.after)
        if tracker.rule is not track:
            entered = (update.batch.fresh, update.batch.previous)
            parts += [part for part in entered if part is not None]
    parts += apart.values()
    if loss is not None:
        parts.append(loss.detach())
    # One number to look at per tensor. A sum of finite values may overflow. Statistics are made of
    # squares, and of sums of them.
    if all(math.isfinite(part.sum().item()) for part in parts) and all(
        torch.dot(part.view(-1), part.view(-1)).item() <= largest(part) ** 2 for part in squared
    ):
        return
    for name, (tracker, update) in checked.items():
        tracker.check_batch(update.batch, name, update.after)
    for name, carrier in apart.items():
        if not bool(torch.isfinite(carrier).all()):
            raise NonFiniteValue(_message(name, "the values that carry the gradient"))
    if loss is not None and not bool(torch.isfinite(loss).all()):
        raise NonFiniteValue(
            "The ordinary loss g0 that your function returned is NaN or infinite; nothing was "
            "updated."
        )


def _message(name: str, place: str) -> str:
    of = f" of `{name}`" if name not in ("", "inner") else ""
    return (
        f"The values{of} are NaN or infinite, or so large that their average overflows, for "
        f"{place}; nothing was updated. A mean over no samples is NaN: leave out what a batch has "
        "none of. `on_nonfinite='skip'` drops such values."
    )


class _Flag(NamedTuple):
    good: Tensor
    arrived: Any
    finite: Tensor
    blocks: Tensor


class DeferredFiniteCheck:
    """Notice a bad value without making the host wait for the device.

    Reading a number from a GPU waits for everything before it, and the GPU then idles until new
    work arrives. Here a flag is copied beside the computation and looked at in a later step.
    """

    def __init__(self) -> None:
        self._flags: deque[_Flag] = deque()

    def push(self, finite: Tensor, blocks: Tensor) -> None:
        """Remember which blocks (B1,) had finite values."""
        good, arrived = finite.all(), None
        if good.device.type == "cuda":
            good = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(good, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._flags.append(_Flag(good, arrived, finite, blocks))

    def poll(self) -> None:
        """Raise if a flag that has arrived is bad."""
        while self._flags and (self._flags[0].arrived is None or self._flags[0].arrived.query()):
            flag = self._flags.popleft()
            if not flag.good.item():
                self._flags.clear()
                blocks = flag.blocks[~flag.finite].tolist()
                raise NonFiniteValue(
                    f"Inner values were NaN or infinite for blocks {blocks[:10]} in an earlier "
                    "step; these blocks kept their value, but the loss of that step, and so the "
                    "gradient, was not finite."
                )
