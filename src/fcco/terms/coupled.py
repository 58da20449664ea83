"""A coupled term (1/n) sum_i f_i(g_i(w)): an outer function and a tracker."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from .. import _checks
from .._schedules import Schedule, Smoothing, Width, at_step
from ..outer import AbstractOuter, MoreauEnvelope
from ..rules.arrays import per_row, view
from ..rules.track import automatic_width
from ..tracker import InnerTracker, OpenStep, Tracked
from .base import AbstractTerm
from .limits import ConstraintTerm


def block_mean(
    outer: AbstractOuter, excess: Tensor, blocks: int | Tensor, present: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""The mean of f(u_i) over B1 = `blocks` blocks and its slopes, pure and branch-free."""
    values, slope = outer.value_and_gradient(excess)
    share = 1 / blocks
    values = values if present is None else torch.where(present, values, 0)
    return values.sum() * share, slope * share


def widest(outer: AbstractOuter) -> Any:
    """The largest width that is useful: a weakly convex f asks for lambda below 1/weak_convexity.

    At half of that lambda its envelope is as smooth as it can be.
    """
    rho, jump = outer.weak_convexity, outer.jump
    assert jump is not None
    return math.inf if isinstance(rho, (int, float)) and rho == 0 else jump / (2 * rho)


def as_lambda(call: str, outer: AbstractOuter, smoothing: Smoothing) -> Schedule | Literal["auto"]:
    """Read `smoothing=...`: lambda as it is, or from the `Width` of the rounded kink of f."""
    if isinstance(smoothing, str):
        _checks.one_of(call, "smoothing", smoothing, ("auto",))
    elif not isinstance(smoothing, Width):
        return smoothing
    if outer.jump is None:
        raise ValueError(
            f"`{call}(smoothing={smoothing!r})` needs a kink whose slope jumps by a known amount, "
            f"which {outer!r} does not declare (`jump`); give lambda itself, a number."
        )
    return "auto" if isinstance(smoothing, str) else smoothing.smoothing(outer.jump)


class OuterTerm(AbstractTerm):
    r"""A term with an outer function f, smoothed or not.

    With `smoothing="auto"` the width of the rounded kink follows the errors and the motion of the
    estimates, see docs/concepts/smoothing.md:

    .. math::
        \lambda\cdot\text{jump} = 4\,\text{error of } u \text{ by noise}
            + \text{drift in 32 steps} + \text{reach}\cdot|\text{progress}|

    Args:
        outer: f.
        tracker: the running estimates u_i.
        smoothing: lambda, 0 for f itself, or a function of the step; a `Width`; or `"auto"`, which
            needs a tracker with `measure=True` or `gamma="auto"`.
        more: arguments of the next base class.
    """

    width: Tensor | None
    never_negative = ("width",)

    reach: float = 1.0  # the largest weight of a block over the mean one, as far as is known

    def __init__(
        self, outer: AbstractOuter, tracker: InnerTracker, smoothing: Smoothing = 0.0, **more: Any
    ) -> None:
        super().__init__(tracker, **more)
        if tracker.dim != (outer.dim or max(tracker.dim, 2)):
            raise ValueError(
                f"{outer!r} acts on inner values of dimension {outer.dim or 'two or more'} but the "
                f"tracker has `dim={tracker.dim}`."
            )
        self.outer = outer
        self._smoothed: tuple[float, AbstractOuter] | None = None
        self.smoothing_schedule = as_lambda(type(self).__name__, outer, smoothing)
        self.automatic = isinstance(self.smoothing_schedule, str)
        # The width of the last step, for evaluations and reports; None unless it is automatic.
        self.register_buffer("width", None)
        if self.automatic:  # lambda follows the error of the estimates
            if tracker.estimate is None:
                raise ValueError(
                    f"`{type(self).__name__}(smoothing='auto')` needs a tracker that measures its "
                    "own error: `InnerTracker(..., measure=True)` or `gamma='auto'`."
                )
            self._jump: Any = outer.jump
            self._widest = widest(outer)
            self.width = tracker.value.new_full((1,), 1e-12)
            return
        first = self.smoothing_at(0)
        if not (isinstance(first, float) and first > 0):
            _checks.at_least(type(self).__name__, "smoothing", first, 0.0)
        self.smoothed_by(first)  # one above 1/weak_convexity is refused at once

    @property
    def smoothing(self) -> Any:
        """The current lambda; an automatic one is kept as a tensor on a GPU: no synchronisation."""
        width = self.width
        if width is None:
            return self.smoothing_at(self.step)
        return (width.item() if width.device.type == "cpu" else width[0]) / self._jump

    def smoothing_at(self, step: int) -> Any:
        """The lambda after so many steps that this term had a part in."""
        schedule: Any = self.smoothing_schedule
        return at_step(schedule, step)

    @property
    def kink_width(self) -> float | None:
        return None if self.outer.jump is None else self.smoothing * self.outer.jump

    def width_of(self, step: OpenStep | None, at_first: Callable[[], Any] | None = None) -> Any:
        """The width of the rounded kink in a training call with an automatic lambda; else None.

        Args:
            step: the open step; None in an evaluation.
            at_first: gives the width while the error of u is not known; 0 unless given.
        """
        if step is None or not self.automatic:
            return None
        pooled = step.updates[self.tracker].rows.pooled
        number = self.tracker.value.numel()
        width, known = automatic_width(pooled, number, self.reach, self._widest)
        if at_first is not None and isinstance(width, Tensor):  # branch-free
            width = torch.where(known, width, at_first())
        elif at_first is not None and not known:
            width = float(at_first())
        return width

    @property
    def smoothed(self) -> AbstractOuter:
        """f_lambda for the current lambda, or f itself when that is 0."""
        return self.smoothed_by(self.smoothing)

    def smoothed_by(self, smoothing: float) -> AbstractOuter:
        """f_lambda, or f itself when lambda is 0; the last one is kept."""
        if isinstance(smoothing, Tensor):  # a comparison would synchronise with the device
            return MoreauEnvelope(self.outer, smoothing)  # type: ignore[arg-type]
        if self._smoothed is None or self._smoothed[0] != smoothing:
            # The envelope refuses a negative lambda, or one above 1/weak_convexity.
            smoothed = MoreauEnvelope(self.outer, smoothing) if smoothing else self.outer
            self._smoothed = (smoothing, smoothed)
        return self._smoothed[1]


class CoupledTerm(OuterTerm, ConstraintTerm):
    r"""An outer function of tracked values; a hinge makes it a penalty for limits.

    .. math::
        \frac1n\sum_{i=1}^n f_\lambda\bigl(g_i(w) - \text{tolerance}_i\bigr)

    Args:
        outer: f.
        tracker: the tracker of g_i.
        smoothing: see `OuterTerm`.
        limits: `tolerance`, `margin` and `names`, see `Limits`. For other limits than upper ones f
            must not decrease, and is applied to how far g_i is outside.
    """

    def __init__(
        self,
        outer: AbstractOuter,
        tracker: InnerTracker,
        *,
        smoothing: Smoothing = 0.0,
        **limits: Any,
    ) -> None:
        super().__init__(outer, tracker, smoothing, **limits)
        constant = self.automatic or not callable(self.smoothing_schedule)
        self.branch_free = constant and type(self).loss is CoupledTerm.loss
        if self.limits.margin != 0 and not outer.monotone:
            raise ValueError(
                f"`CoupledTerm(margin=...)` needs a non-decreasing outer function: {outer!r} "
                "would be moved, not made stricter. Lower its own tolerance instead."
            )
        if not self.limits.upper and not (outer.monotone and tracker.dim == 1):
            raise ValueError(
                "`CoupledTerm(tolerance=...)`: `AtLeast`, `Equal` and (low, high) need a "
                f"non-decreasing outer function of one number, which {outer!r} is not."
            )
        if self.limits.moved and outer.dim != 1 and not outer.monotone:
            raise ValueError(
                f"`CoupledTerm(tolerance=...)` is subtracted from every component of g_i, which "
                f"does not loosen {outer!r}; give the outer function its own tolerance."
            )

    def loss(self, tracked: Tracked) -> Tensor:
        """The mean of f_lambda over the sampled blocks, which estimates the mean over all."""
        step = tracked.step
        width = self.width_of(step)
        smoothing = self.smoothing if width is None else width / self._jump
        if width is not None and step is not None:
            step.write(self, self._set_width, width)
        excess = self.limits.excess(tracked.value, tracked.index, self.tracker.dim)
        outer, present = self.smoothed_by(smoothing), tracked.present
        value, slope = block_mean(outer, excess, tracked.number, present)
        if not self.limits.upper:
            slope = slope * self.limits.side(tracked.value, tracked.index)
        return tracked.as_loss(value, slope)

    def _set_width(self, width: Any) -> None:
        assert self.width is not None
        view(self.width)[:] = width

    def value(self) -> Tensor:
        """Mean of f(u_i - tolerance_i) over the blocks seen."""
        beyond = self.limits.violation(self.table(), self.tracker.seen, self.tracker.dim)
        return self.outer(beyond).mean()

    def violation_at(self, values: Tensor) -> Tensor:
        return self.outer.violation(super().violation_at(values))

    def multipliers_at(self, values: Tensor) -> Tensor:
        """(1/n) grad f_lambda(g_i - tolerance_i); those of u carry its noise divided by lambda."""
        slope = self.smoothed.multiplier(self._excess(values)) * self.limits.side(values)
        return slope * (1 / self.tracker.num_inner)

    def _excess(self, values: Tensor) -> Tensor:
        return self.limits.excess(values, dim=self.tracker.dim)

    def capped(self, values: Tensor | None) -> Tensor:
        values = self.values() if values is None else values
        return self._capped(self._excess(values), self.violation_at(values))

    def _capped(self, excess: Tensor, violation: Tensor) -> Tensor:
        """Where the slope of f is the one without smoothing."""
        hard, soft = self.outer.multiplier(excess), self.smoothed.multiplier(excess)
        capped = (hard != 0) & ((hard - soft).abs() <= 1e-5 * hard.abs())
        if not self.smoothing:  # then it always is: beyond what noise explains, if that is known
            error = self.tracker.error().view(len(capped), -1).amax(1)
            capped = capped & per_row(violation.view(len(capped), -1).amax(1) > 2 * error, capped)
        capped = capped.view(len(capped), -1).any(1)
        return torch.zeros_like(capped) if self.outer.smooth else capped
