"""The tracker: one running estimate u_i of each inner value g_i(w), kept in buffers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .._distributed import Group
from .._state import KeepsPrecision
from .blocks import Batch, Layout, carrier_counts, layout, over_ranks, per_row
from .entries import finite_blocks, prepared, refuse_nonfinite, shaped, without_nonfinite
from .progress import Progress
from .settings import check_settings
from .tracked import Tracked
from .update import Rule, correction_weight, log_track, track
from .watch import Watch

__all__ = ["InnerTracker"]


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
        gamma: weight of the fresh value; 1 keeps no memory, 0 needs `correction=1`.
        correction: gamma', a number, `"theory"` (MSVR) or `"auto"`: (1 - gamma) B1 / n, which
            is 1 - gamma when every block is seen at each step and small when few are.
        read: which u enters the gradient: `"old"` (before this batch; unbiased with one batch,
            as the paper's algorithm prints it) or `"new"`.
        log_space: values are logarithms of positive inner values and u is kept as log u.
        bounds: clamp u to this interval after each update (the y-form of ALEXR2).
        refresh_every: every so many steps take the fresh value itself (SPIDER); give that step a
            large batch, `refresh_due` says when.
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

    def __init__(
        self,
        num_inner: int,
        dim: int = 1,
        *,
        gamma: float = 0.1,
        correction: float | Literal["theory", "auto"] = "auto",
        read: Literal["old", "new"] = "old",
        log_space: bool = False,
        bounds: tuple[float, float] | None = None,
        refresh_every: int | None = None,
        rule: Rule | None = None,
        on_nonfinite: Literal["raise", "skip", "deferred"] = "raise",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_settings(
            num_inner, dim, gamma, correction, read, bounds, refresh_every, on_nonfinite, dtype
        )
        self.num_inner, self.dim = num_inner, dim
        self.gamma, self.correction, self.read = gamma, correction, read
        self.log_space, self.bounds, self.refresh_every = log_space, bounds, refresh_every
        self.on_nonfinite = on_nonfinite
        self.rule = rule or (log_track if log_space else track)
        self.accumulate = False  # objectives set it: calls belong to one step until `close()`
        self._progress, self._watch = Progress(), Watch()
        self._every: Layout | None = None
        self.register_buffer("value", torch.zeros((num_inner, dim), dtype=dtype, device=device))
        self.register_buffer("seen", torch.zeros(num_inner, dtype=torch.bool, device=device))

    @property
    def steps(self) -> int:
        """Tracking steps taken."""
        return self._progress.steps

    @property
    def skipped(self) -> int:
        """Entries dropped by `on_nonfinite="skip"`."""
        return self._progress.skipped

    @property
    def needs_previous(self) -> bool:
        """Whether the next update uses g_i(w_{t-1})."""
        if isinstance(self.correction, str):
            return self.correction == "theory" or self.gamma < 1
        return self.correction != 0

    @property
    def refresh_due(self) -> bool:
        """Whether the next step replaces u by the fresh value (see `refresh_every`)."""
        return self.refresh_every is not None and self.steps % self.refresh_every == 0

    def correction_weight(self, blocks: int) -> float:
        """The number gamma' for a step that samples `blocks` blocks."""
        if self.correction == "theory" and blocks == 0:
            return 0.0  # nothing to correct, and no number to divide by
        return float(correction_weight(self.correction, self.gamma, self.num_inner, blocks))

    def layout(self, index: Tensor | None, counts: Tensor | None = None) -> Layout:
        """Check `index` and `counts`; find the distinct blocks (used by objectives)."""
        self._watch.poll()
        if index is None and counts is None:  # the same each time
            if self._every is None or self._every.counts.device != self.value.device:
                self._every = layout("InnerTracker", None, self.num_inner, None, self.value)
            return self._every
        return layout("InnerTracker", index, self.num_inner, counts, self.value)

    def forward(
        self,
        fresh: Tensor,
        index: Tensor | None = None,
        previous: Tensor | None = None,
        *,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Update the sampled blocks; return u_i carrying the gradient of g_i, one row per block.

        Args:
            fresh: g_i(w_t), shape (E,) or (E, d1), with gradient.
            index: block of each entry; None means all n blocks in order.
            previous: g_i(w_{t-1}) on the same samples.
            counts: samples behind each entry, when entries are means of unequal size.

        Returns:
            Shape (B1,) or (B1, d1), for the distinct blocks in increasing order.
        """
        return self.update(fresh, self.layout(index, counts), previous).carrying_gradient()

    def update(
        self,
        fresh: Tensor,
        where: Layout,
        previous: Tensor | None = None,
        *,
        carrier: Tensor | None = None,
        carrier_where: Layout | None = None,
        group: Group | None = None,
        commit: bool = True,
    ) -> Tracked:
        """The full form of `forward`.

        Args:
            fresh: the values to track, (E,) or (E, d1); may be a measured, non-differentiable
                statistic when `carrier` is given.
            where: layout of the entries.
            previous: the values at w_{t-1}.
            carrier: the values that carry the gradient (default: `fresh`).
            carrier_where: layout of `carrier` when it is an independent batch.
            group: ranks to pool over.
            commit: False leaves every buffer alone and returns the fresh values, as `eval()` does.
        """
        corrects = self.needs_previous and not self.refresh_due
        entries = prepared(fresh, where, previous, carrier, carrier_where, self.value, corrects)
        dropped = 0
        if self.on_nonfinite == "skip":
            entries, dropped = without_nonfinite(entries)
        fresh, where, previous, carrier, carrier_where = entries
        batch = self._batch(fresh, where, previous, group)
        independent = carrier_where is not where
        if self.on_nonfinite != "deferred":
            refuse_nonfinite(batch, carrier if carrier is not fresh else None)
        total = carrier_counts(carrier_where, batch, group) if independent else batch.counts
        if commit and self.training and torch.is_grad_enabled():
            self._progress.skipped += dropped
            point = self._commit(batch)
        else:
            point = batch.mean(batch.fresh)
        result = Tracked(point, batch.index, carrier, carrier_where, total, log=self.log_space)
        if group is None:
            return result
        position = torch.searchsorted(batch.index, carrier_where.index)
        return result._replace(ranks=group.size, position=position)

    def _batch(
        self,
        fresh: Tensor,
        where: Layout,
        previous: Tensor | None = None,
        group: Group | None = None,
    ) -> Batch:
        """Pool entries over blocks and ranks, without gradient and without an update."""
        log = self.log_space
        past = None if previous is None else where.sums(previous.detach(), log)
        now = where.sums(fresh.detach(), log)
        batch = Batch(where.index, where.counts, now, past, log, where.ids, where.whole)
        return batch if group is None else over_ranks(batch, group)

    def pool(self, values: Tensor, where: Layout) -> Batch:
        """The batch of some values, for a pass that updates nothing."""
        return self._batch(shaped("values", values, where.entries, self.value), where)

    def close(self) -> bool:
        """End the step: what was tracked since the last call is final; say if there was any."""
        return self._progress.close()

    def set_values(self, index: Tensor | None, values: Tensor) -> None:
        """Set u_i directly; entries of one block are averaged."""
        batch = self.pool(values, self.layout(index))
        refuse_nonfinite(batch, None)
        means = batch.mean(batch.fresh)
        self._table()[batch.index] = means if self.bounds is None else means.clamp(*self.bounds)
        self.seen[batch.index] = True
        self._progress.forget()

    def _commit(self, batch: Batch) -> Tensor:
        """Write the update of a batch; return the u that its gradient reads (Alg. 1, lines 7-9)."""
        value, known, progress = self._table(), self.seen, self._progress
        current = batch.index
        if progress.batch is not None:
            batch = progress.take_back(batch, value, known)
        index, fresh, previous = batch.index, batch.mean(batch.fresh), batch.previous
        old = value.clone() if batch.whole else value.index_select(0, index)
        seen = progress.first_visits(known, batch)
        gamma, correction = self.gamma, 0.0
        if previous is not None:
            previous, correction = batch.mean(previous), self.correction_weight(index.shape[0])
        if self.refresh_every is not None and self.refresh_due:
            gamma, previous = 1.0, None
        rows = None if seen is None else per_row(seen, old)
        before, after = self.rule(old, rows, fresh, previous, gamma, correction)
        if self.bounds is not None:  # a first visit reads its own fresh value: bound that too
            before, after = before.clamp(*self.bounds), after.clamp(*self.bounds)
        if self.on_nonfinite == "deferred":
            finite = finite_blocks(batch)
            self._watch.push(finite, index)
            after = torch.where(per_row(finite, old), after, old)
            if seen is not None:
                progress.visit(known, batch, only=seen | finite)
        elif seen is not None:
            progress.visit(known, batch)
        if batch.whole:
            value.copy_(after)
        else:
            value.index_copy_(0, index, after)
        if self.accumulate:
            progress.keep(batch, old, seen)
        else:
            progress.steps += 1
        point = before if self.read == "old" else after
        return point if index is current else point[torch.searchsorted(index, current)]

    def _table(self) -> Tensor:
        """The values u, with the rows of a batch: (n,) when d1 = 1."""
        return self.value.view(-1) if self.dim == 1 else self.value

    def get_extra_state(self) -> dict[str, int]:
        """Counters that go into `state_dict()`."""
        return {"steps": self.steps, "skipped": self.skipped}

    def set_extra_state(self, state: Any) -> None:
        """Restore the counters; an open step is forgotten."""
        self._progress, self._watch = Progress(state["steps"], state["skipped"]), Watch()

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        settings = f"gamma={self.gamma}, correction={self.correction!r}, read={self.read!r}"
        return f"{self.num_inner}, {self.dim}, {settings}"
