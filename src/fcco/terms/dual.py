"""Dual variables for non-smooth outer functions: ALEXR."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..outer import AbstractOuter
from ..rules.arrays import per_row, tensor
from ..tracker import InnerTracker, Tracked
from .coupled import CoupledTerm


class DualTerm(CoupledTerm):
    r"""(1/n) sum_i f(g_i(w) - tolerance_i) with one dual variable y_i per block.

    A convex f is max_y <y, u> - f*(y). The dual step is, by Moreau's identity, for f with a prox

    .. math::
        y_i^+ = \mathrm{prox}_{\alpha f^*}(y_i + \alpha\tilde g_i)
              = \nabla f_{1/\alpha}(v_i), \qquad v_i = \tilde g_i + y_i/\alpha, \qquad
        G_t = \frac1{B_1}\sum_{i\in\mathcal B_1} \nabla g_i(w_t;\tilde{\mathcal B})\, y_i^+

    from y_i = 0. The term keeps the v_i; c_i = v_i - y_i/alpha estimates g_i. The value of the loss
    is the mean of <y_i, c_i> - f*(y_i) = f(c_i), in `eval()` mode f of the batch. `value()` reads
    c_i; `violation()` uses the values of the last step.

    Args:
        outer: f, convex.
        tracker: of the values of the last step: gamma 1, no correction, `read="new"`.
        dual_step: alpha.
        theta: extrapolation; unless it is 0, the tracker asks for the values at w_{t-1} too.
        limits: see `CoupledTerm`; upper ones alone.
    """

    dual_point: Tensor  # v_i, NaN before the first step
    may_be_nan = ("dual_point",)

    def __init__(
        self,
        outer: AbstractOuter,
        tracker: InnerTracker,
        dual_step: float,
        theta: float = 0.0,
        **limits: Any,
    ) -> None:
        _checks.requires("DualTerm", outer, "convex")
        _checks.positive("DualTerm", "dual_step", dual_step)
        super().__init__(outer, tracker, smoothing=1 / dual_step, **limits)
        if not self.limits.upper:
            raise ValueError("`alexr` has upper limits alone: write value >= b as -value <= -b.")
        self.dual_step, self.theta = dual_step, theta
        tracker.needs_previous = theta != 0
        self.register_buffer("dual_point", torch.full_like(tracker.rows, torch.nan))

    def dual_at(self, v: Tensor) -> Tensor:
        """The dual variable y = grad f_{1/alpha}(v), in the domain of f*."""
        return self.outer.envelope_gradient(v, 1 / self.dual_step)

    def point_at(self, v: Tensor) -> Tensor:
        """The point c = v - y/alpha = prox_{f/alpha}(v), where y is a subgradient of f."""
        return v - self.dual_at(v) / self.dual_step

    def ascend(self, ahead: Tensor, index: Tensor) -> Tensor:
        """The next v_i of some blocks, from g~_i."""
        seen = per_row(self.tracker.seen[index], ahead)
        y = torch.where(seen, self.dual_at(self._v(index)), 0.0)
        return self.limits.excess(ahead, index, self.tracker.dim) + y / self.dual_step

    def _v(self, index: Tensor | None = None) -> Tensor:
        """The v_i; after a warm start they are those of the values it gave."""
        rows, v = self.tracker.rows, self.dual_point
        rows, v = (rows, v) if index is None else (rows[index], v[index])
        return torch.where(v.isnan(), self.limits.excess(rows, index, self.tracker.dim), v)

    def loss(self, tracked: Tracked) -> Tensor:
        """The mean of f(c_i) over the sampled blocks, with y_i as slope."""
        step = tracked.step
        if step is None:
            excess = self.limits.excess(tracked.value, tracked.index, self.tracker.dim)
            values, slope = self.outer.value_and_gradient(excess)
        else:  # of several batches of a step, y makes one move
            update = step.updates[self.tracker]
            index, ahead = tensor(update.batch.index), tensor(update.fresh)
            if update.batch.previous is not None:
                past = tensor(update.batch.mean(update.batch.previous))
                ahead = ahead + self.theta * (ahead - past)
            v = self.ascend(ahead, index)
            if update.came is not None:  # what is not finite changes nothing
                v = torch.where(per_row(update.came, v), v, self._v(index))
            step.write(self, self.dual_point.index_copy_, 0, index, v)  # type: ignore[arg-type]
            v = v[torch.searchsorted(index, tracked.index)]
            slope = self.dual_at(v)
            values = self.outer(v - slope / self.dual_step)
        share = 1 / max(tracked.index.shape[0], 1)
        return tracked.as_loss(values.sum() * share, slope * share)

    def value(self) -> Tensor:
        """Mean of f(c_i), the excess over the limits, over the blocks seen."""
        return self.outer(self.table() - self.limits.margin).mean()

    @property
    def kink_width(self) -> None:
        """None: f is not smoothed, and v_i is no estimate of g_i."""

    def dual(self) -> Tensor:
        """The y_i, shape (n,) or (n, d1), NaN where never seen."""
        return self.where_seen(self.dual_at(self._v()))

    def multipliers_at(self, values: Tensor) -> Tensor:
        """y_i/n along the constraint, at any values."""
        return self.outer.slope(self.dual_at(self._v())) * (1 / self.tracker.num_inner)

    def capped(self, values: Tensor | None) -> Tensor:
        return self._capped(self._v(), self.violation())

    def table(self) -> Tensor:
        """The c_i of the blocks seen so far, shape (seen,) or (seen, d1)."""
        return self.point_at(self._v())[self.tracker.seen]
