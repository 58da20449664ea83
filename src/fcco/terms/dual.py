r"""Dual variables for non-smooth outer functions: ALEXR's second version.

A convex f is a maximum over its conjugate, f(u) = max_y <y, u> - f*(y), so the coupled problem has
one dual variable y_i per block. Ascent with the Euclidean distance is

.. math::
    y_i^+ = \mathrm{prox}_{\alpha f^*}(y_i + \alpha\tilde g_i)
          = \nabla f_{1/\alpha}(v_i), \qquad v_i = \tilde g_i + y_i/\alpha,

by Moreau's identity: the prox of f is enough, for every convex f. The tracker's table holds the
v_i, from which both follow: y_i = grad f_{1/alpha}(v_i), and v_i - y_i/alpha estimates g_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .. import _checks
from ..outer import AbstractOuter
from ..rules.arrays import Array, Number, per_row, tensor, where
from ..tracker import Batch, InnerTracker, Tracked
from ..tracker.tracker import Update
from .coupled import CoupledTerm
from .limits import Limits, Tolerance

__all__ = ["DualAscent", "DualTerm"]


@dataclass(frozen=True)
class DualAscent:
    r"""The update of v_i = g~_i + y_i/alpha, for `InnerTracker(rule=...)`.

    .. math::
        v_i^+ = \tilde g_i + \tfrac1\alpha \nabla f_{1/\alpha}(v_i), \qquad
        \tilde g_i = g_i(w_t;\mathcal B) + \theta\,\bigl(g_i(w_t;\mathcal B)
            - g_i(w_{t-1};\mathcal B)\bigr)

    A block starts at y_i = 0. Theta is the tracker's `correction`; its `gamma` has no meaning here.
    Pure and branch-free.

    Args:
        outer: f, convex.
        dual_step: alpha.

    Example:
        >>> import torch, fcco
        >>> rule = DualAscent(fcco.outer.Hinge(1.0), dual_step=0.5)
        >>> v, g = torch.tensor([0.0]), torch.tensor([0.8])
        >>> for _ in range(3):
        ...     v = rule(v, None, g, None, 1.0, 0.0)[1]
        ...     rule.dual(v)  # clip(y + 0.5 * 0.8, 0, 1)
        tensor([0.4000])
        tensor([0.8000])
        tensor([1.])
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
        """The v before and after; the arguments are those of `fcco.rules.track.track`."""
        value = fresh if previous is None else fresh + correction * (fresh - previous)
        dual = self.dual(tensor(old))  # outer functions know tensors alone
        kept = (dual if isinstance(old, Tensor) else dual.numpy()) / self.dual_step
        return old, value + (kept if seen is None else where(seen, kept, 0 * kept))


class _KeepsLatest(InnerTracker):
    """A tracker that also keeps the mean of each block in its last step, in `latest`."""

    latest: Tensor
    may_be_nan = ("latest",)

    def __init__(self, num_inner: int, dim: int, **options: Any) -> None:
        super().__init__(num_inner, dim, **options)
        self.register_buffer("latest", torch.full_like(self.rows, torch.nan))

    def close(self, update: Update) -> None:
        """Write an update, and the values that made it."""
        super().close(update)
        index, fresh = tensor(update.batch.index), tensor(update.fresh)
        if update.came is not None:
            fresh = torch.where(per_row(update.came, fresh), fresh, self.latest[index])
        self.latest.index_copy_(0, index, fresh)

    def set_batch(self, batch: Batch) -> None:
        """Set v_i to the means of a batch, which are kept too."""
        super().set_batch(batch)
        self.latest[tensor(batch.index)] = tensor(batch.mean(batch.fresh))


class DualTerm(CoupledTerm):
    r"""(weight/n) sum_i f(g_i(w) - tolerance_i) with one dual variable y_i per block.

    .. math::
        \min_w \max_y \frac{\text{weight}}n\sum_i \langle y_i, g_i(w)\rangle - f^*(y_i), \qquad
        G_t = \frac{\text{weight}}{B_1}\sum_{i\in\mathcal B_1}
            \nabla g_i(w_t;\tilde{\mathcal B})\, y_i^{t+1}

    The value of the loss is the mean of <y_i, c_i> - f*(y_i) = f(c_i) at c_i = v_i - y_i/alpha,
    which is g~_i when y_i no longer changes; in `eval()` mode it is f of the batch. `multipliers()`
    are weight/n times y_i; `value()` reads c_i; `violation()` uses the values of the last step,
    because v_i mixes value and dual variable.

    Args:
        outer: f, convex.
        num_inner: n.
        dual_step: alpha.
        theta: extrapolation.
        dim: d1.
        weight: factor in front of the sum.
        tolerance: subtracted from g_i, one number or one per block: g_i <= tolerance_i.
        margin: train for g_i <= tolerance_i - margin.
        names: names of the blocks, for values given by name.
        on_nonfinite: see `InnerTracker`.
        dtype: precision of y_i.
        device: where the buffers live at first.

    Example:
        >>> import torch, fcco
        >>> term = DualTerm(fcco.outer.Hinge(3.0), 2, dual_step=2.0)
        >>> _ = term.tracker(torch.tensor([0.5, -1.0]))
        >>> term.dual(), term.multipliers()
        (tensor([1., 0.]), tensor([0.5000, 0.0000]))
    """

    tracker: _KeepsLatest  # type: ignore[assignment]

    def __init__(
        self,
        outer: AbstractOuter,
        num_inner: int,
        *,
        dual_step: float,
        theta: float = 0.0,
        dim: int = 1,
        weight: float = 1.0,
        tolerance: Tolerance = 0.0,
        margin: float = 0.0,
        names: Sequence[str] | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        rule = DualAscent(outer, dual_step)
        like = torch.zeros((), dtype=dtype, device=device)
        limits = Limits(num_inner, like, tolerance, margin, names, call="DualTerm")
        if not limits.upper:
            raise ValueError(
                "`alexr` with `penalty` and `dual_step` has upper limits alone: write "
                "value >= b as -value <= -b, an interval as two limits; or leave the two out."
            )
        # The limit is part of what is tracked: v_i holds the excess over it.
        offset = None if limits.plain else limits.tolerance - margin
        tracker = _KeepsLatest(
            num_inner,
            dim,
            gamma=1.0,
            correction=theta,
            read="new",
            rule=rule,
            offset=offset,
            on_nonfinite=on_nonfinite,
            dtype=dtype,
            device=device,
        )
        super().__init__(
            outer,
            tracker,
            smoothing=1 / dual_step,
            weight=weight,
            tolerance=tolerance,
            margin=margin,
            names=names,
        )
        self.rule = rule

    def loss(self, tracked: Tracked) -> Tensor:
        """The mean of f(c_i) over the sampled blocks, with y_i as slope."""
        if tracked.step is not None:
            slope = self.rule.dual(tracked.value)
            values = self.outer(tracked.value - slope / self.rule.dual_step)
        else:  # the tracker returned the inner values themselves
            values, slope = self.outer.value_and_gradient(tracked.value)
        share = self.weight / max(tracked.index.shape[0], 1)
        return tracked.as_loss(values.sum() * share, slope * share)

    def value(self) -> Tensor:
        """Mean of weight * f(c_i), the excess over the limits, over the blocks seen."""
        return self.weight * self.outer(self.table() - self.limits.margin).mean()

    def excess(self, values: Tensor | None = None) -> Tensor:
        """The v_i, which hold the limits already and whose slope is y_i; or as in `CoupledTerm`."""
        return self.tracker.rows if values is None else super().excess(values)

    def dual(self) -> Tensor:
        """The y_i, shape (n,) or (n, d1), NaN where never seen."""
        return self.where_seen(self.rule.dual)

    def at(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Violations at given values g_i; the multipliers are the dual variables at any values."""
        excess = values - self.limits.of(None, self.tracker.dim)
        return self.outer.violation(excess), self.multipliers()

    def multipliers(self) -> Tensor:
        """weight/n times y_i along the constraint, NaN where never seen."""
        slope = self.where_seen(lambda v: self.outer.slope(self.rule.dual(v)))
        return self.weight / self.tracker.num_inner * slope

    def violation(self) -> Tensor:
        """How far each constraint was exceeded in its last step, NaN where never seen."""
        latest = self.tracker.latest - self.limits.margin
        return self.where_seen(lambda _: self.outer.violation(latest))

    def table(self) -> Tensor:
        """The c_i of the blocks seen so far, shape (seen,) or (seen, d1)."""
        return self.rule.point(super().table())
