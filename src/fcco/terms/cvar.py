"""CVaR over blocks: the average of the worst values, with its threshold s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from .._schedules import Smoothing
from ..outer import CVaR, Hinge
from ..rules import cvar as rules
from ..rules.arrays import view
from ..tracker import InnerTracker, OpenStep, Tracked
from .coupled import OuterTerm


class CVaRTerm(OuterTerm):
    r"""CVaR of the inner values, with its threshold s kept as state.

    .. math::
        \min_s\; s + \frac1n\sum_i f_\lambda\bigl(g_i(w) - s\bigr), \qquad f = \tfrac1r[\cdot]_+

    The tracker follows g_i, not g_i - s, so that u does not lag behind s. The threshold is no
    parameter of your optimizer: weight decay and Adam's sign-like steps both harm it. Once per
    optimizer step it becomes the minimiser over the table that the gradient reads: with an
    automatic lambda or `read="new"` the table with this batch, otherwise the one after the last
    step. The mathematics is in `fcco.rules.cvar`.

    Args:
        tracker: the tracker of g_i.
        ratio: r.
        smoothing: lambda (the quadratic zone has width lambda / r), 0, or a schedule; a `Width`; or
            `"auto"`, see `OuterTerm`. Until 50 values have come again, all groups then count alike.
    """

    threshold: Tensor
    kink: Tensor
    may_be_nan = ("threshold",)

    def __init__(self, tracker: InnerTracker, ratio: float, *, smoothing: Smoothing = 0.0) -> None:
        _checks.in_interval("CVaRTerm", "ratio", ratio, 0.0, 1.0, open_low=True)
        if tracker.log_space:
            raise ValueError(
                "`CVaRTerm(tracker=...)` compares values with a threshold; `log_space=True` keeps "
                "their logarithms."
            )
        # f is for the checks of lambda and for reports; `loss` uses the closed form.
        super().__init__(Hinge(1 / ratio), tracker, smoothing)
        self.ratio, self.reach = ratio, 1 / ratio
        # The s of the last step, which others read, is not known before the first.
        constant = self.automatic or not callable(self.smoothing_schedule)
        self.branch_free = constant and (self.automatic or tracker.read == "new")
        # s, NaN before the first batch; and the subgradient taken at u_i = s, since the exact s of
        # the hard CVaR always sits on a kink.
        self.register_buffer("threshold", tracker.value.new_tensor(math.nan))
        self.register_buffer("kink", tracker.value.new_tensor(0.0))

    def loss(self, tracked: Tracked) -> Tensor:
        """CVaR of the tracked values, with the slopes of f_lambda(u_i - s) at the sampled blocks.

        In `eval()` mode it is CVaR of the batch.
        """
        u, step, ratio, tracker = tracked.u, tracked.step, self.ratio, self.tracker
        if u.shape[0] == 0:
            return tracked.as_loss(0.0, u)
        old = tracker.read == "old"
        known = self._known(step)
        # An automatic lambda is that of this step: s must be the minimiser for the same one.
        moves = known is None or (step is not None and (self.automatic or not old))
        present = table = (u, None)
        if step is not None:
            present = table = tracker.table_with(step)
            if old and moves:  # what the gradient reads
                table = tracker.table_with(step, tracked)
        width = self.width_of(step, partial(rules.width_at_first, *table, ratio))
        smoothing = self.smoothing if width is None else width * ratio
        if moves:
            last = None if known is None else known[0]
            known = rules.threshold(table[0], ratio, smoothing, table[1], start=last)
        assert known is not None
        s, kink = known
        if step is not None:
            after = known
            if old and not self.automatic:  # of the table after this step, for the next one
                next_one = self.smoothing_at(step.updates[tracker].number)
                after = rules.threshold(present[0], ratio, next_one, present[1], start=s)
            step.writes[self] = (self._set, (known, after, width))
        blocks = u.shape[0] if tracked.present is None else tracked.number
        slope = rules.slopes(u, s, ratio, smoothing, kink, blocks)
        return tracked.as_loss(rules.mean_of_worst(present[0], ratio, present[1]), slope)

    def _known(self, step: OpenStep | None) -> tuple[Any, Any] | None:
        """S and the slope at s, of the open step or of the last; None before the first."""
        if step is not None and self in step.writes:
            return step.writes[self][1][0]
        found = self._views.found
        if "known" not in found:
            threshold, kink = self.threshold, self.kink
            if bool(threshold.isnan()):
                return None
            host = not isinstance(view(kink), Tensor)
            found["known"] = (threshold.item(), kink.item()) if host else (threshold, kink)
        return found["known"]

    def _set(self, _: Any, after: tuple[Any, Any], width: Any = None) -> None:
        """Keep s and the slope at s for the next step, and the width of this one."""
        found = self._views.found
        if "tables" not in found:
            buffers = (self.threshold, self.kink, self.width)
            found["tables"] = [view(buffer) for buffer in buffers if buffer is not None]
        found["known"] = after
        for table, value in zip(found["tables"], (*after, width), strict=False):
            table[...] = value

    def start_threshold(self) -> None:
        """Set s to the best one for the tracked values."""
        table = view(self.table())
        if len(table):
            self._set(None, rules.threshold(table, self.ratio, self.smoothing))

    def value(self) -> Tensor:
        """CVaR of the tracked values, with the exact threshold; NaN before the first."""
        table = self.table()
        return CVaR(self.ratio)(table) if len(table) else table.new_tensor(math.nan)

    def group_weights(self) -> Tensor:
        """The weight p_i = (1/n) f_lambda'(u_i - s) that each block has in the gradient."""
        u, seen, settings = self.tracker.rows, self.tracker.seen, (self.ratio, self.smoothing)
        slope = rules.slopes(u, self.threshold, *settings, self.kink, len(u))
        return torch.where(seen, slope, torch.nan)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if no training can have led to this state."""
        super().check_state(state)
        threshold = state.get("threshold", self.threshold)
        steps = int(state.get("tracker._extra_state", torch.zeros(2))[0])
        if steps and not bool(threshold.isfinite()):
            raise ValueError("`threshold` is NaN, although there were steps.")
