r"""Dual ascent for non-smooth outer functions: ALEXR's second version.

A convex f is a maximum over its conjugate, f(u) = max_y <y, u> - f*(y), so the coupled problem has
one dual variable y_i per block. Ascent with the Euclidean distance is

.. math::
    y_i^+ = \mathrm{prox}_{\alpha f^*}(y_i + \alpha\tilde g_i)
          = \nabla f_{1/\alpha}(v_i), \qquad v_i = \tilde g_i + y_i/\alpha,

by Moreau's identity: the prox of f is enough, for every convex f. The tracker's table holds the
v_i, which know everything: y_i = grad f_{1/alpha}(v_i), and v_i - y_i/alpha estimates g_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _checks
from .limits import Limits
from .outer.base import AbstractOuter
from .terms import CoupledTerm
from .tracker import InnerTracker, Tracked
from .tracker.blocks import Batch, Layout
from .tracker.entries import shaped
from .tracker.update import Number

__all__ = ["DualAscent", "DualTerm", "ExcessTracker"]


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
        >>> rule = DualAscent(fcco.Hinge(1.0), dual_step=0.5)
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
        old: Tensor,
        seen: Tensor | None,
        fresh: Tensor,
        previous: Tensor | None,
        gamma: Number,
        correction: Number,
    ) -> tuple[Tensor, Tensor]:
        """The v before and after; the arguments are those of `fcco.tracker.track`."""
        value = fresh if previous is None else fresh + correction * (fresh - previous)
        kept = self.dual(old) / self.dual_step
        if seen is not None:
            kept = torch.where(seen, kept, torch.zeros_like(kept))
        return old, value + kept


class ExcessTracker(InnerTracker):
    """A tracker of g_i - tolerance_i + margin, the excess over the limits of its term.

    The buffer `excess` holds its last value, which v_i does not tell: while y_i is free, a larger
    violation is a larger y_i.

    Args:
        arguments: as for `InnerTracker`.
        options: as for `InnerTracker`.
    """

    excess: Tensor
    _limits: tuple[Limits, ...] = ()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_buffer("excess", torch.full_like(self.value[:, 0], torch.nan))

    def _commit(self, batch: Batch) -> Tensor:
        self.excess[batch.index] = batch.mean(batch.fresh)
        return super()._commit(batch)

    def _batch(self, *entries: Any, **options: Any) -> Batch:
        batch = super()._batch(*entries, **options)
        if self._plain:
            return batch
        shift = self._shift(batch.index) * batch.counts
        past = None if batch.previous is None else batch.previous - shift
        return batch._replace(fresh=batch.fresh - shift, previous=past)

    def pool(self, values: Tensor, where: Layout) -> Batch:
        """The batch of some g_i, not yet less their limits: `set_values` takes those off."""
        return super()._batch(shaped("values", values, where.entries, self.value), where)

    def set_values(self, index: Tensor | None, values: Tensor) -> None:
        """Start blocks at g_i and y_i = 0; entries of one block are averaged."""
        if not self._plain:
            rows = self._shift(index)
            values = values - (rows.unsqueeze(-1) if values.dim() > 1 and rows.dim() else rows)
        super().set_values(index, values)
        blocks = slice(None) if index is None else index
        self.excess[blocks] = self.value[blocks, 0]

    @property
    def _plain(self) -> bool:
        return not self._limits or self._limits[0].plain

    def _shift(self, index: Tensor | None) -> Tensor:
        (limits,) = self._limits
        return limits.of(index) - limits.margin


class DualTerm(CoupledTerm):
    r"""(weight/n) sum_i f(g_i(w)) with one dual variable y_i per block.

    .. math::
        \min_w \max_y \frac{\text{weight}}n\sum_i \langle y_i, g_i(w)\rangle - f^*(y_i), \qquad
        G_t = \frac{\text{weight}}{B_1}\sum_{i\in\mathcal B_1}
            \nabla g_i(w_t;\tilde{\mathcal B})\, y_i^{t+1}

    The value of the loss is the mean of <y_i, c_i> - f*(y_i) = f(c_i) at c_i = v_i - y_i/alpha,
    which is g~_i as soon as y_i rests; in `eval()` mode it is f of the batch. `multipliers()` are
    weight/n times y_i; `value()` reads c_i.

    Args:
        tracker: a tracker with `rule=DualAscent(outer, dual_step)` and `read="new"`.
        weight: factor in front of the sum.
        tolerance: subtracted from scalar g_i, one number or one per block: g_i <= tolerance_i. It
            needs an `ExcessTracker`.
        margin: train for g_i <= tolerance_i - margin.
        names: names of the blocks, for values given by name.

    Example:
        >>> import torch, fcco
        >>> rule = DualAscent(fcco.Hinge(3.0), dual_step=2.0)
        >>> term = DualTerm(fcco.InnerTracker(2, gamma=1.0, read="new", rule=rule))
        >>> _ = term.tracker(torch.tensor([0.5, -1.0]))
        >>> term.dual(), term.multipliers()
        (tensor([1., 0.]), tensor([0.5000, 0.0000]))
    """

    def __init__(
        self,
        tracker: InnerTracker,
        *,
        weight: float = 1.0,
        tolerance: float | Sequence[float] | Tensor = 0.0,
        margin: float = 0.0,
        names: Sequence[str] | None = None,
    ) -> None:
        rule = tracker.rule
        if not isinstance(rule, DualAscent) or tracker.read != "new":
            raise ValueError(
                "`DualTerm(tracker=...)` must have rule=DualAscent(outer, dual_step) and "
                "read='new': its table holds dual variables, and the gradient uses the new ones."
            )
        if tracker.log_space or tracker.bounds is not None or tracker.refresh_every is not None:
            raise ValueError(
                "`DualTerm(tracker=...)` tracks dual variables: `log_space`, `bounds` and "
                "`refresh_every` are for inner values and have no meaning for it."
            )
        super().__init__(
            rule.outer,
            tracker,
            smoothing=1 / rule.dual_step,
            weight=weight,
            tolerance=tolerance,
            margin=margin,
            names=names,
        )
        self.rule = rule
        if isinstance(tracker, ExcessTracker) and tracker.dim == 1:
            tracker._limits = (self.limits,)  # a tuple hides it: the term has it already
        elif not self.limits.plain:
            raise ValueError(
                "`DualTerm(tolerance=..., margin=...)` needs an `ExcessTracker` of scalar values: "
                "the limit is part of what is tracked."
            )

    def loss(self, tracked: Tracked) -> Tensor:
        """The mean of f(c_i) over the sampled blocks, with y_i as slope."""
        if self.training and torch.is_grad_enabled():
            slope = self.rule.dual(tracked.value)
            values = self.outer(tracked.value - slope / self.rule.dual_step)
        else:  # the tracker returned the inner values themselves
            values, slope = self.outer.value_and_gradient(tracked.value)
        share = self.weight / max(tracked.index.shape[0], 1)
        return tracked.attach(values.sum() * share, slope * share)

    def value(self) -> Tensor:
        """Mean of weight * f(c_i), the excess over the limits, over the blocks seen."""
        return self.weight * self.outer(self.table() - self.limits.margin).mean()

    def dual(self) -> Tensor:
        """The y_i, shape (n,) or (n, d1), NaN where never seen."""
        return self._where_seen(self.rule.dual)

    def multipliers(self) -> Tensor:
        """weight/n times y_i along the constraint, NaN where never seen."""
        slope = self._where_seen(lambda v: self.outer.slope(self.rule.dual(v)))
        return self.weight / self.tracker.num_inner * slope

    def violation(self) -> Tensor:
        """How far each constraint is exceeded (positive: violated), NaN where never seen.

        In the last batch, for an `ExcessTracker`; else at c_i.
        """
        if isinstance(self.tracker, ExcessTracker):
            return self.outer.violation(self.tracker.excess) - self.limits.margin
        return self._where_seen(lambda v: self.outer.violation(self.rule.point(v)))

    def table(self) -> Tensor:
        """The c_i of the blocks seen so far, shape (seen,) or (seen, d1)."""
        return self.rule.point(super().table())
