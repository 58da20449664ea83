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
    parameter of your optimizer: weight decay and Adam's sign-like steps both harm it. The gradient
    of a step reads the minimiser s of the formula in `fcco.rules.cvar` over these u_i:

    | `read` | `smoothing` | u_i |
    |---|---|---|
    | `"new"` | any | after this batch |
    | `"old"` | `"auto"` | before this batch; fresh values of blocks that come for the first time |
    | `"old"` | a number, a schedule, `Width` | after the last step; in the first step as above |

    (`fcco.fleet.estimators.CVaR` finds the same s anew in each step, from u_i and lambda alone.)

    Args:
        tracker: the tracker of g_i.
        ratio: r.
        smoothing: lambda (the quadratic zone has width lambda / r), 0, or a schedule; a `Width`; or
            `"auto"`, see `OuterTerm`. Until 50 values have come again, all groups then count alike.
    """

    threshold: Tensor
    tie_slope: Tensor
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
        self._ahead = tracker.read == "old" and not self.automatic  # s is found a step ahead
        self.branch_free = not self._ahead and (
            self.automatic or not callable(self.smoothing_schedule)
        )
        # s, NaN before the first batch; and the subgradient taken at u_i = s, since the exact s of
        # the hard CVaR is always one of the u_i.
        self.register_buffer("threshold", tracker.value.new_tensor(math.nan))
        self.register_buffer("tie_slope", tracker.value.new_tensor(0.0))

    def loss(self, tracked: Tracked) -> Tensor:
        """CVaR of the tracked values, with the slopes of f_lambda(u_i - s) at the sampled blocks.

        In `eval()` mode it is CVaR of the batch.
        """
        u, step, ratio, tracker = tracked.u, tracked.step, self.ratio, self.tracker
        if u.shape[0] == 0:
            return tracked.as_loss(0.0, u)
        latest = self._latest(step)
        if step is None:
            after, smoothing = (u, None), self.smoothing
            s, tie_slope = latest or rules.threshold(u, ratio, smoothing)
        else:
            # u_i and which of them count: after the step, and as the gradient reads them.
            table = after = tracker.table_with(step)
            if tracker.read == "old" and (latest is None or not self._ahead):
                table = tracker.table_with(step, tracked)
            width = self.width_of(step, partial(rules.width_at_first, *table, ratio))
            smoothing = self.smoothing if width is None else width * ratio
            if latest is None or not self._ahead:
                start = None if latest is None else latest[0]
                latest = rules.threshold(table[0], ratio, smoothing, table[1], start=start)
            s, tie_slope = following = step.notes[self] = latest
            if self._ahead:
                smoothing_then = self.smoothing_at(step.updates[tracker].number)
                following = rules.threshold(after[0], ratio, smoothing_then, after[1], start=s)
            step.writes[self] = (self._set, (following, width))
        blocks = u.shape[0] if tracked.present is None else tracked.number
        slope = rules.slopes(u, s, ratio, smoothing, tie_slope, blocks)
        return tracked.as_loss(rules.mean_of_worst(after[0], ratio, after[1]), slope)

    def _latest(self, step: OpenStep | None) -> tuple[Any, Any] | None:
        """The s of an earlier call of the step, or the kept one, and its slope; None at first."""
        if step is not None and self in step.notes:
            return step.notes[self]
        found = self._views.found
        if "kept" not in found:
            if bool(self.threshold.isnan()):
                return None
            kept = self.threshold, self.tie_slope
            on_host = not isinstance(view(self.threshold), Tensor)
            found["kept"] = (kept[0].item(), kept[1].item()) if on_host else kept
        return found["kept"]

    def _set(self, kept: tuple[Any, Any], width: Any) -> None:
        """Keep s and the slope at u_i = s for the next step, and the width of this one."""
        found = self._views.found
        if "tables" not in found:
            buffers = (self.threshold, self.tie_slope, self.width)
            found["tables"] = [view(buffer) for buffer in buffers if buffer is not None]
        # On a GPU a graph replays the writes alone: only the buffers are those of the last step.
        found["kept"] = found["tables"][:2] if isinstance(kept[0], Tensor) else kept
        for table, value in zip(found["tables"], (*kept, width), strict=False):
            table[...] = value

    def value(self) -> Tensor:
        """CVaR of the tracked values, with the exact threshold; NaN before the first."""
        table = self.table()
        return CVaR(self.ratio)(table) if len(table) else table.new_tensor(math.nan)

    def group_weights(self) -> Tensor:
        """The weight p_i = (1/n) f_lambda'(u_i - s) that each block has in the gradient."""
        u, seen, settings = self.tracker.rows, self.tracker.seen, (self.ratio, self.smoothing)
        slope = rules.slopes(u, self.threshold, *settings, self.tie_slope, len(u))
        return torch.where(seen, slope, torch.nan)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if no training can have led to this state."""
        super().check_state(state)
        threshold = state.get("threshold", self.threshold)
        steps = int(state.get("tracker._extra_state", torch.zeros(2))[0])
        if steps and not bool(threshold.isfinite()):
            raise ValueError("`threshold` is NaN, although there were steps.")
