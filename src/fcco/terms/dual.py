r"""Dual variables for non-smooth outer functions: ALEXR.

A convex f is max_y <y, u> - f*(y), so there is one dual variable y_i per block. Ascent is

.. math::
    y_i^+ = \mathrm{prox}_{\alpha f^*}(y_i + \alpha\tilde g_i)
          = \nabla f_{1/\alpha}(v_i), \qquad v_i = \tilde g_i + y_i/\alpha,

by Moreau's identity: the prox of f is enough, for every convex f. The tracker's table holds the
v_i, from which both follow: y_i = grad f_{1/alpha}(v_i), and v_i - y_i/alpha estimates g_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..outer import AbstractOuter
from ..rules.arrays import Array, Number, per_row, tensor, where
from ..tracker import InnerTracker, Tracked
from ..tracker.tracker import Update
from .coupled import CoupledTerm
from .limits import Limits

__all__ = ["DualAscent", "DualTerm"]


@dataclass(frozen=True)
class DualAscent:
    r"""The update of v_i = g~_i + y_i/alpha, for `InnerTracker(rule=...)`.

    .. math::
        v_i^+ = \tilde g_i + \tfrac1\alpha \nabla f_{1/\alpha}(v_i), \qquad
        \tilde g_i = g_i(w_t;\mathcal B) + \theta\,\bigl(g_i(w_t;\mathcal B)
            - g_i(w_{t-1};\mathcal B)\bigr)

    A block starts at y_i = 0. Theta is the tracker's `correction`; its `gamma` has no meaning.
    """

    outer: AbstractOuter
    dual_step: float

    def __post_init__(self) -> None:
        _checks.requires("DualAscent", self.outer, "convex")
        _checks.positive("DualAscent", "dual_step", self.dual_step)

    def dual(self, v: Tensor) -> Tensor:
        """The dual variable y = grad f_{1/alpha}(v), in the domain of f*."""
        return self.outer.envelope_gradient(v, 1 / self.dual_step)

    def point(self, v: Tensor) -> Tensor:
        """The point c = v - y/alpha = prox_{f/alpha}(v), where y is a subgradient of f."""
        return v - self.dual(v) / self.dual_step

    def __call__(
        self,
        old: Array,
        seen: Array | None,
        fresh: Array,
        previous: Array | None,
        gamma: Number,
        correction: Number,
    ) -> tuple[Array, Array]:
        """The v before and after, called as `fcco.rules.track.track`."""
        value = fresh if previous is None else fresh + correction * (fresh - previous)
        dual = self.dual(tensor(old))  # outer functions know tensors alone
        kept = (dual if isinstance(old, Tensor) else dual.numpy()) / self.dual_step
        return old, value + (kept if seen is None else where(seen, kept, 0 * kept))


class DualTerm(CoupledTerm):
    r"""(1/n) sum_i f(g_i(w) - tolerance_i) with one dual variable y_i per block.

    .. math::
        \min_w \max_y \frac1n\sum_i \langle y_i, g_i(w)\rangle - f^*(y_i), \qquad
        G_t = \frac1{B_1}\sum_{i\in\mathcal B_1} \nabla g_i(w_t;\tilde{\mathcal B})\, y_i^{t+1}

    The value of the loss is the mean of <y_i, c_i> - f*(y_i) = f(c_i) at c_i = v_i - y_i/alpha,
    which is g~_i when y_i no longer changes; in `eval()` mode it is f of the batch. `value()` reads
    c_i; `violation()` uses the values of the last step, because v_i mixes value and dual variable.

    Args:
        outer: f, convex.
        num_inner: n.
        dual_step: alpha.
        theta: extrapolation.
        dim: d1.
        table: `dtype`, `device` and `on_nonfinite` of the `InnerTracker`.
        limits: see `CoupledTerm`; upper ones alone.

    Attributes:
        latest: the mean of each block in its last step, NaN before.
    """

    latest: Tensor
    may_be_nan = ("latest",)

    def __init__(
        self,
        outer: AbstractOuter,
        num_inner: int,
        *,
        dual_step: float,
        theta: float = 0.0,
        dim: int = 1,
        table: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        rule, options = DualAscent(outer, dual_step), dict(table or {})
        like = torch.zeros((), dtype=options.get("dtype"), device=options.get("device"))
        known = Limits(num_inner, like, **{"call": "DualTerm", **limits})
        if not known.upper:
            raise ValueError(
                "`alexr` has upper limits alone: write value >= b as -value <= -b, an interval as "
                "two limits."
            )
        # The limit is part of what is tracked: v_i holds the excess over it.
        options["offset"] = None if known.plain else known.tolerance - known.margin
        tracker = InnerTracker(
            num_inner, dim, gamma=1.0, correction=theta, read="new", rule=rule, **options
        )
        super().__init__(outer, tracker, smoothing=1 / dual_step, **limits)
        self.rule = rule
        self.register_buffer("latest", torch.full_like(tracker.rows, torch.nan))

    def loss(self, tracked: Tracked) -> Tensor:
        """The mean of f(c_i) over the sampled blocks, with y_i as slope."""
        if tracked.step is not None:
            tracked.step.write(self, self._keep, tracked.step.updates[self.tracker])
            slope = self.rule.dual(tracked.value)
            values = self.outer(tracked.value - slope / self.rule.dual_step)
        else:  # the tracker returned the inner values themselves
            values, slope = self.outer.value_and_gradient(tracked.value)
        share = 1 / max(tracked.index.shape[0], 1)
        return tracked.as_loss(values.sum() * share, slope * share)

    def _keep(self, update: Update) -> None:
        index, fresh = tensor(update.batch.index), tensor(update.fresh)
        if update.came is not None:
            fresh = torch.where(per_row(update.came, fresh), fresh, self.latest[index])
        self.latest.index_copy_(0, index, fresh)

    def value(self) -> Tensor:
        """Mean of f(c_i), the excess over the limits, over the blocks seen."""
        return self.outer(self.table() - self.limits.margin).mean()

    @property
    def kink_width(self) -> None:
        """None: f is not smoothed, and v_i is no estimate of g_i."""

    def dual(self) -> Tensor:
        """The y_i, shape (n,) or (n, d1), NaN where never seen."""
        return self.where_seen(self.rule.dual(self.tracker.rows))

    def values(self) -> Tensor:
        """The g_i of the last step, without the extrapolation."""
        high, _ = self.limits.of(None, self.tracker.dim)
        latest = torch.where(self.latest.isnan(), self.tracker.rows, self.latest)  # a warm start
        return latest + (high - self.limits.margin)

    def multipliers_at(self, values: Tensor) -> Tensor:
        """y_i/n along the constraint, at any values."""
        return self.outer.slope(self.rule.dual(self.tracker.rows)) * (1 / self.tracker.num_inner)

    def capped(self, values: Tensor | None) -> Tensor:
        return self._capped(self.tracker.rows, self.violation())

    def table(self) -> Tensor:
        """The c_i of the blocks seen so far, shape (seen,) or (seen, d1)."""
        return self.rule.point(super().table())
