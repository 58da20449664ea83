"""A coupled term (1/n) sum_i f_i(g_i(w)): an outer function and a tracker."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .. import _checks
from .._schedules import Schedule, Smoothing, Width
from ..outer import AbstractOuter, MoreauEnvelope
from ..rules.arrays import view
from ..rules.track import automatic_width
from ..tracker import InnerTracker, OpenStep, Tracked
from .base import AbstractTerm
from .limits import Limits, Tolerance

__all__ = ["CoupledTerm", "OuterTerm", "as_lambda", "weighted_mean", "widest"]


def weighted_mean(
    outer: AbstractOuter, excess: Tensor, weight: float | Tensor, blocks: int | Tensor
) -> tuple[Tensor, Tensor]:
    r"""The estimate of a coupled term and its slopes, pure and branch-free.

    .. math::
        \frac{\text{weight}}{B_1}\sum_{i\in\mathcal B_1} f(u_i), \qquad
        \frac{\text{weight}}{B_1}\nabla f(u_i)

    Args:
        outer: f.
        excess: u_i.
        weight: factor in front.
        blocks: B1, the number of blocks in the batch.
    """
    values, slope = outer.value_and_gradient(excess)
    share = weight / blocks
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

    With `smoothing="auto"` the rounded kink is as wide as the estimates are wrong:

    .. math::
        \lambda\cdot\text{jump} = 4\,\text{error of } u \text{ by noise}
            + 8\,\text{error of } u \text{ by lag},

    wide while the estimates lag behind a model that moves, and narrow when only noise is left. See
    `fcco.rules.track` for the two.

    Args:
        outer: f.
        tracker: the running estimates u_i.
        smoothing: lambda, 0 for f itself, or a function of the step; a `Width`; or `"auto"`, which
            needs a tracker with `measure=True` or `gamma="auto"`.
    """

    width: Tensor | None
    never_negative = ("width",)

    def __init__(self, outer: AbstractOuter, tracker: InnerTracker, smoothing: Smoothing) -> None:
        super().__init__(tracker)
        if tracker.dim != (outer.dim or max(tracker.dim, 2)):
            raise ValueError(
                f"{outer!r} acts on inner values of dimension {outer.dim or 'two or more'} but the "
                f"tracker has `dim={tracker.dim}`."
            )
        schedule = as_lambda(type(self).__name__, outer, smoothing)
        self.outer, self.smoothing_schedule = outer, schedule
        self.automatic = isinstance(schedule, str)  # lambda follows the error of the estimates
        self._smoothed: tuple[float, AbstractOuter] | None = None
        # The width of the last step, for evaluations and reports.
        self.register_buffer("width", self._first_width(schedule))
        if isinstance(schedule, str):
            return
        first = schedule(0) if callable(schedule) else schedule
        if not (isinstance(first, float) and first > 0):
            _checks.at_least(type(self).__name__, "smoothing", first, 0.0)
        self.smoothed_by(first)  # one above 1/weak_convexity is refused at once

    @property
    def smoothing(self) -> Any:
        """The current lambda; a schedule is a function of the steps this term had a part in.

        With `"auto"` it is a tensor where the state is on a GPU, so that nobody waits for it.
        """
        width = self.width
        if width is None:
            return self.smoothing_at(self.step)
        return (width.item() if width.device.type == "cpu" else width[0]) / self._jump

    def smoothing_at(self, step: int) -> Any:
        """The lambda that a number or a schedule gives."""
        schedule: Any = self.smoothing_schedule
        return schedule(step) if callable(schedule) else schedule

    @smoothing.setter
    def smoothing(self, value: Smoothing) -> None:
        schedule = as_lambda(type(self).__name__, self.outer, value)
        self.width, self.smoothing_schedule = self._first_width(schedule), schedule
        self.automatic = isinstance(schedule, str)

    def _first_width(self, schedule: Schedule | Literal["auto"]) -> Tensor | None:
        """The width before any step, None unless it is automatic."""
        if not isinstance(schedule, str):
            return None
        if self.tracker.estimate is None:
            raise ValueError(
                f"`{type(self).__name__}(smoothing='auto')` needs a tracker that measures its own "
                "error: `InnerTracker(..., measure=True)` or `gamma='auto'`."
            )
        self._jump: Any = self.outer.jump
        self._widest = widest(self.outer)
        return self.tracker.value.new_full((1,), 1e-12)

    def width_of(self, step: OpenStep | None, at_first: Callable[[], Any] | None = None) -> Any:
        """The width of the rounded kink in a training call with an automatic lambda; else None.

        Args:
            step: the open step; None in an evaluation.
            at_first: gives the width while the error of u is not known; 0 unless given.
        """
        if step is None or not self.automatic:
            return None
        tracker = self.tracker
        pooled, gamma = step.updates[tracker].rows.pooled, tracker.rule.gamma
        width = automatic_width(pooled, pooled.gain if gamma is None else gamma, self._widest)
        if at_first is not None and isinstance(width, Tensor):  # to look would make the host wait
            width = torch.where(pooled.steps > 0, width, at_first())
        elif at_first is not None and pooled.steps == 0:
            width = float(at_first())
        return width

    def set_width(self, width: Any) -> None:
        """Keep the width of the last step, for evaluations and reports."""
        assert self.width is not None
        view(self.width)[:] = width

    def excess(self, values: Tensor | None = None) -> Tensor:
        """What f is applied to, for all blocks: u_i less a limit or threshold, where there is one.

        Args:
            values: other values of all blocks than the tracked ones.
        """
        return self.tracker.rows if values is None else values

    @property
    def smoothed(self) -> AbstractOuter:
        """f_lambda for the current lambda, or f itself when that is 0."""
        return self.smoothed_by(self.smoothing)

    def smoothed_by(self, smoothing: float) -> AbstractOuter:
        """f_lambda, or f itself when lambda is 0; the last one is kept."""
        if isinstance(smoothing, Tensor):  # to compare it would make the host wait
            return MoreauEnvelope(self.outer, smoothing)  # type: ignore[arg-type]
        if self._smoothed is None or self._smoothed[0] != smoothing:
            # The envelope refuses a negative lambda, or one above 1/weak_convexity.
            smoothed = MoreauEnvelope(self.outer, smoothing) if smoothing else self.outer
            self._smoothed = (smoothing, smoothed)
        return self._smoothed[1]


class CoupledTerm(OuterTerm):
    r"""A weighted coupled term, optionally read as penalised constraints.

    .. math::
        \frac{\text{weight}}{n}\sum_{i=1}^n f_\lambda\bigl(g_i(w) - \text{tolerance}_i\bigr)

    Args:
        outer: f.
        tracker: the tracker of g_i.
        smoothing: lambda, 0 for f itself, or a function of the step (annealing); or a `Width`.
        weight: factor in front of the sum, or a function of the step (a ramp).
        tolerance: subtracted from g_i, one number or one per block: g_i <= tolerance_i. For other
            limits (see `Limit`) f must not decrease, and is applied to how far g_i is outside.
        margin: train for g_i <= tolerance_i - margin, to land on the safe side.
        names: names of the blocks, for values given by name and for reports.

    Example:
        >>> import torch, fcco
        >>> tracker = fcco.tracker.InnerTracker(2, gamma=1.0)
        >>> term = fcco.terms.CoupledTerm(fcco.outer.Hinge(3.0), tracker, smoothing=0.1)
        >>> term.tracker.set_values(torch.tensor([0, 1]), torch.tensor([0.2, -1.0]))
        >>> term.value()
        tensor(0.3000)
        >>> term.violation(), term.multipliers()
        (tensor([ 0.2000, -1.0000]), tensor([1., 0.]))
    """

    def __init__(
        self,
        outer: AbstractOuter,
        tracker: InnerTracker,
        *,
        smoothing: Smoothing = 0.0,
        weight: Schedule = 1.0,
        tolerance: Tolerance = 0.0,
        margin: float = 0.0,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(outer, tracker, smoothing)
        if not callable(weight) and weight != 1:
            _checks.positive("CoupledTerm", "weight", weight)
        self.weight_schedule = weight
        self.limits = Limits(
            tracker.num_inner, tracker.value, tolerance, margin, names, call="CoupledTerm"
        )
        self.names = self.limits.names
        if margin != 0 and not outer.monotone:
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

    @property
    def weight(self) -> float:
        """The current factor; a schedule is a function of the steps this term had a part in."""
        schedule = self.weight_schedule
        return schedule(self.step) if callable(schedule) else schedule

    def excess(self, values: Tensor | None = None) -> Tensor:
        """The u_i - tolerance_i + margin, or those of given values of all blocks."""
        return self.limits.excess(super().excess(values), dim=self.tracker.dim)

    def loss(self, tracked: Tracked) -> Tensor:
        """The mean of f_lambda over the sampled blocks, which estimates the mean over all."""
        step, weight = tracked.step, self.weight
        width = self.width_of(step)
        smoothing = self.smoothing if width is None else width / self._jump
        if width is not None and step is not None:
            step.write(self, self.set_width, width)
        excess = self.limits.excess(tracked.value, tracked.index, self.tracker.dim)
        blocks = max(tracked.u.shape[0], 1)
        value, slope = weighted_mean(self.smoothed_by(smoothing), excess, weight, blocks)
        if not self.limits.upper:
            slope = slope * self.limits.side(tracked.value, tracked.index)
        return tracked.as_loss(value, slope)

    def value(self) -> Tensor:
        """Mean of weight * f(u_i - tolerance_i) over the blocks seen."""
        beyond = self.limits.violation(self.table(), self.tracker.seen, self.tracker.dim)
        return self.weight * self.outer(beyond).mean()

    def violation(self) -> Tensor:
        """How far each constraint is exceeded (positive: violated), NaN where never seen."""
        return self.where_seen(lambda u: self.at(u)[0])

    def multipliers(self) -> Tensor:
        """(weight/n) grad f_lambda(u_i - tolerance_i), NaN where never seen.

        Read from the tracked u, they carry its noise divided by lambda; `fcco.diagnostics.kkt`
        recomputes them on full data.
        """
        return self.where_seen(lambda u: self.at(u)[1])

    def at(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Violations and multipliers of all constraints at given values g_i."""
        limits, dim = self.limits, self.tracker.dim
        slope = self.smoothed.multiplier(limits.excess(values, dim=dim)) * limits.side(values)
        violation = self.outer.violation(limits.violation(values, dim=dim))
        return violation, slope * (self.weight / self.tracker.num_inner)

    def where_seen(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of the table, NaN for blocks that were never seen."""
        result = function(self.tracker.rows)
        seen = self.tracker.seen.view(-1, *(1 for _ in result.shape[1:]))
        return torch.where(seen, result, torch.nan)
