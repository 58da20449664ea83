r"""Constraints without settings: the method of multipliers, in units of the measured noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tracker import InnerTracker, Tracked
from ..tracker.tracker import Update
from .base import AbstractTerm
from .coupled import Limits, Tolerance

__all__ = ["MultiplierTerm", "Scales"]

WARM_UP = 10
"""Steps that only measure."""

FEW = 10
"""Visits up to which the noise of a constraint is mixed with that of all, which counts as 5."""

MARGIN = 0.06
"""Margin in units of sqrt(2 ln m) sigma_i, which the largest of m batch values is off by chance."""

FORGET = 0.01
"""Share of omega that is forgotten in a step."""

INTEGRAL, FASTEST, PROPORTIONAL = 0.01, 0.03, 0.25
"""Gains in units of kappa: of nu in a step, its bound, and of the part proportional to x."""

TINY, HUGE = 1e-30, 1e30
"""The least number to divide by; and the variance of a constraint that does not move at all, which
has no unit: with 0 for it, no other constraint would count beside it."""

Numbers = Any
"""Tensors; or on the CPU NumPy arrays, which share their memory, and Python's floats. An operation
on a short vector takes a third of torch's time there. The formulas are the same arithmetic."""


def larger(a: Numbers, b: Numbers) -> Numbers:
    """The larger of two numbers."""
    return a.clip(min=b) if isinstance(a, Tensor) else max(a, b)


def smaller(a: Numbers, b: Numbers) -> Numbers:
    """The smaller of two numbers."""
    return a.clip(max=b) if isinstance(a, Tensor) else min(a, b)


def choose(condition: Numbers, yes: Numbers, no: Numbers) -> Numbers:
    """One of two numbers."""
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


class Scales(NamedTuple):
    """What is measured of all constraints together, and of the loss."""

    omega: Numbers  # the largest violation of the last steps, in units of noise
    coherence: Numbers  # A^2; 0 until the first violation, and nothing acts before
    active: Numbers  # steps in which some c_i was not 0
    sampling: Numbers  # m/B1 of the last step
    loss: Numbers  # of the last step
    loss_noise: Numbers  # sigma_0^2
    losses: Numbers  # steps with a loss
    joint: Numbers  # the square of the sum of all e_i / sigma_i
    separate: Numbers  # the sum of their squares

    def with_loss(self, loss: Numbers) -> Scales:
        """After a step with this loss; pure."""
        noise, steps = self.loss_noise, self.losses
        loss = choose(loss - loss == 0, loss, self.loss)  # NaN and infinity are left out
        # One outlier must not make all constraints act many times harder.
        bound = choose((steps > 2) & (noise > 0), choose(steps > 10, 9 * noise, 100 * noise), HUGE)
        change = smaller(smaller(larger(loss - self.loss, -1e15), 1e15) ** 2 / 2, bound)
        early = (steps <= 10) & (change < 1e-4 * noise)  # what came before was one
        noise = choose(early, change, noise)
        weight = choose(steps > 0, 1 / smaller(larger(steps, 1.0), 1 / 0.03), 0.0)
        noise = noise + weight * (change - noise)
        return self._replace(loss=loss, loss_noise=noise, losses=steps + 1)

    def with_violation(self, worst: Numbers, largest: Numbers, total: Numbers) -> Scales:
        """After a step with these violations, in units of noise; pure.

        Args:
            worst: the largest of constraints that were seen before.
            largest: of all.
            total: the sum of all.
        """
        start = (self.sampling * total / larger(largest, TINY)) ** 2
        begins = (self.coherence == 0) & (largest > 0)
        return self._replace(
            omega=larger(self.omega * (1 - FORGET), worst),
            coherence=choose(begins, larger(start, 0.1), self.coherence),
        )

    def with_action(self, joint: Numbers, largest: Numbers) -> Scales:
        """After a step in which constraints acted; pure.

        Args:
            joint: the sum of c_i times the new part of g_i.
            largest: of the c_i sigma_i; 0 when no constraint acts.
        """
        acts = choose(largest > 0, 1.0, 0.0)
        active = self.active + acts
        square = self.sampling * (joint / larger(largest, TINY)) ** 2
        weight = acts / smaller(active + 10, 50.0)
        coherence = larger(self.coherence + weight * (square - self.coherence), 0.1)
        coherence = choose(self.coherence > 0, coherence, 0.0)
        return self._replace(active=active, coherence=coherence)

    def with_innovations(self, total: Numbers, squares: Numbers, step: int) -> Scales:
        """After a step with these sums of e_i / sigma_i and of their squares; pure."""
        weight = max(0.02, 1 / step)
        return self._replace(
            joint=self.joint + weight * (total**2 - self.joint),
            separate=self.separate + weight * (squares - self.separate),
        )

    def room(self) -> Numbers:
        """How much of its margin a constraint has room for, from 0 to 1; pure.

        The noise of a pair of opposite constraints cancels: between them is no room. That of
        others adds up, as independent noise or stronger.
        """
        return smaller(self.joint / larger(self.separate, TINY), 1.0)

    def unit(self) -> Numbers:
        """kappa_i sigma_i^2, that is sigma_0 / (A max(omega, 1)); pure."""
        scale = larger(self.coherence, 0.1) ** 0.5 * larger(self.omega, 1.0)
        return choose(self.coherence > 0, self.loss_noise**0.5 / scale, 0.0)


class MultiplierTerm(AbstractTerm):
    r"""Constraints low_i <= g_i <= high_i by the method of multipliers; no settings.

    With m constraints of which B1 are in a batch, upper limits, and :math:`x_i = u_i -
    \text{high}_i + \text{margin}_i` from the tracked u_i,

    .. math::
        c_i &= \bigl[\nu_i + \tfrac14\sqrt{m/B_1}\,\kappa_i x_i\bigr]_+, \qquad
        G_t = \nabla g_0 + \frac m{B_1}\sum_{i\in\mathcal B_1} c_i\nabla g_i \\
        \nu_i &\leftarrow \bigl[\nu_i + \min(0.01\,m/B_1,\,0.03)\,\kappa_i\,
            (g_i(w_t;\mathcal B) - \text{high}_i + \text{margin}_i)\bigr]_+ \\
        \kappa_i &= \frac{\sigma_0}{A\,\sigma_i W_i}, \qquad W_i = \sigma_i\max(\omega, 1)

    Where there is a lower limit, :math:`-[-\nu_i - k\,(u_i - \text{low}_i -
    \text{margin}_i)]_+` is added, with the same factor k of x_i (or of its batch value): one
    signed multiplier serves both sides, and an equality has :math:`\nu_i + k x_i`.

    The first line is a smoothed hinge whose limit is shifted by nu_i, so that no violation is left
    when nu_i has found the multiplier. Every factor is measured: nothing changes when losses or
    values are given in other units, and little but the margin when constraints are listed twice.

    * :math:`\sigma_i`, the noise of a batch value of g_i, and :math:`\sigma_0`, that of g_0, both
      from successive differences. A multiplier is a slope of g_0 against g_i: its unit is
      sigma_0/sigma_i.
    * :math:`W_i`, the width in which c_i rises by that unit: the noise or, while there is more to
      repair, the largest violation in units of it, :math:`\omega = \max_i [x_i]_+/\sigma_i`, which
      is forgotten by 1 % a step. A step of nu_i is then a share of the unit, however far w is from
      feasible.
    * A, how strongly constraints act together: the standard deviation of :math:`\sum_i c_i
      (g_i(w_t;\mathcal B) - u_i)` in units of its largest :math:`c_i\sigma_i`. It is 1 for one
      active constraint, k for the same one listed k times.
    * :math:`\text{margin}_i = 0.06\sqrt{2\ln m}\,\sigma_i`, because the largest of m values that
      fluctuate about their limits is above its own. Constraints that come in opposite pairs have
      no room for it: their noise cancels in :math:`\sum_i (g_i(w_t;\mathcal B) - u_i)/\sigma_i`,
      and the margin is multiplied by the square of that sum over the sum of squares, at most 1
      (lower limits count with their sign). It goes at most to the middle of an interval.

    The first 10 steps only measure. The state changes when a step ends, from all of its batches.

    Args:
        tracker: of scalar values, with `gamma="auto"` or `measure=True`.
        tolerance: the limits, one or one per constraint: a number is high_i, others as in
            `fcco.terms.coupled.Limit`.
        margin: train for g_i <= high_i - margin, beside the margin above; likewise for low_i.
        names: names of the constraints, for values given by name and for reports.

    Attributes:
        multiplier: nu_i.
        variance: sigma_i^2 after the last visit of each constraint, 0 before the second.
        margin: that of the noise of each constraint, after its last visit.
        scales: omega, A and sigma_0, see `Scales`.

    Example:
        Minimise (w - 1)^2 / 2 subject to w <= 0.3, both seen with noise: the multiplier is 0.7.

        >>> import torch, fcco
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        >>> tracker = fcco.InnerTracker(1, gamma="auto", correction=0.0, read="new")
        >>> term = fcco.terms.MultiplierTerm(tracker, tolerance=0.3)
        >>> objective = fcco.ConstrainedObjective(model, optimizer, term)
        >>> def loss_and_value():
        ...     w, noise = model.weight.view(1), 0.1 * torch.randn(2)
        ...     return (w - 1 + noise[0]).square().sum() / 2, w + noise[1]
        >>> for _ in range(1000):
        ...     objective(loss_and_value).backward()
        ...     optimizer.step(); optimizer.zero_grad()
        >>> bool((model.weight - 0.3).abs() < 0.05), bool((term.multipliers() - 0.7).abs() < 0.1)
        (True, True)

    References:
        D. P. Bertsekas, Constrained optimization and Lagrange multiplier methods, 1982.
    """

    multiplier: Tensor
    variance: Tensor
    margin: Tensor
    scales: Tensor
    sides: Tensor | None
    watches_objective = True
    never_negative = ("variance", "margin")

    def __init__(
        self,
        tracker: InnerTracker,
        *,
        tolerance: Tolerance = 0.0,
        margin: float = 0.0,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(tracker)
        if tracker.dim != 1:
            raise ValueError(
                "`MultiplierTerm(tracker=...)` needs one number per constraint, but the tracker "
                f"has `dim={tracker.dim}`. For limits on vectors use a `CoupledTerm` with an outer "
                "function."
            )
        if tracker.estimate is None:
            raise ValueError(
                "`MultiplierTerm(tracker=...)` needs a tracker that measures its noise: "
                "`InnerTracker(..., gamma='auto')`, or `measure=True`."
            )
        number, table = tracker.num_inner, tracker.rows
        self.limits = Limits(number, table, tolerance, margin, names, call="MultiplierTerm")
        self.names = self.limits.names
        self._share = MARGIN * math.sqrt(2 * math.log(max(number, 2)))
        self._losses: tuple[Tensor, int] | None = None  # of the open step: their sum and number
        self.register_buffer("multiplier", torch.zeros_like(table))
        self.register_buffer("variance", torch.zeros_like(table))
        self.register_buffer("margin", torch.zeros_like(table))
        self.register_buffer("scales", table.new_zeros(len(Scales._fields)))
        self.register_buffer("sides", self._sides(), persistent=False)

    def _sides(self) -> Tensor | None:
        """None for upper limits; else a limit to measure from, the width of the interval (0 with an
        open side), whether there are an upper and a lower limit, the largest margin.
        """
        low, high = self.limits.low, self.limits.tolerance
        if low is None:
            return None
        above, below = high.isfinite(), low.isfinite()
        width = torch.where(above & below, high - low, 0)
        limit, most = torch.where(above, high, low), torch.where(above & below, width / 2, HUGE)
        return torch.stack([limit, width, above.to(low), below.to(low), most])

    def observe(self, loss: Tensor) -> None:
        """Take note of a loss; the mean over the calls of a step counts."""
        loss, before = loss.to(self.scales), self._losses
        self._losses = (loss, 1) if before is None else (before[0] + loss, before[1] + 1)

    def loss(self, tracked: Tracked) -> Tensor:
        """The sum of c_i (u_i - tolerance_i), estimated from the batch, with c_i as slopes."""
        index = tracked.index
        state = _State(self)
        at = state.rows(index)
        excess = state.array(tracked.value) - state.limit(at)
        slope = self._slopes(state, at, excess)
        if state.sides is not None:
            excess = state.from_side(at, excess, slope)
        slope = torch.as_tensor(slope * (self.tracker.num_inner / max(index.shape[0], 1)))
        return tracked.as_loss(torch.dot(slope, torch.as_tensor(excess)), slope)

    def close(self) -> bool:
        """End an optimizer step."""
        step, losses = self.tracker.open_step, self._losses
        closed = super().close()
        if step is not None:
            self._losses, state = None, _State(self)
            scales = state.scales()
            if losses is not None:
                scales = scales.with_loss(state.number(losses[0] / losses[1]))
            if step.batch.index.shape[0]:
                scales = self._move(step, state, scales)
            state.write(scales)
        return closed

    def rollback(self) -> None:
        """Undo what was done since the last optimizer step."""
        self._losses = None
        super().rollback()

    def _move(self, step: Update, state: _State, scales: Scales) -> Scales:
        """Measure the units of the constraints of a step; after the warm-up move nu too."""
        batch, at = step.batch, state.rows(step.batch.index)
        sampling = self.tracker.num_inner / batch.index.shape[0]
        variance, again = self._variance(state, at)
        new = step.counted
        if step.finite is not None:  # blocks that kept their value have nothing new to say
            new = torch.where(step.finite, new, step.after)
        fresh, old, after = (state.array(part) for part in (new, step.old, step.after))
        limit, noise, innovation = state.limit(at), variance**0.5, fresh - old
        known = None if step.seen is None else state.array(step.seen) * 1.0
        if known is not None:  # a first value is no surprise
            innovation = innovation * known
        relative = innovation / noise
        if state.sides is not None:  # towards the limit, which is below for lower ones
            relative = relative * (2 * state.sides[2][at] - 1)
        total, squares = state.number(relative.sum()), state.number((relative**2).sum())
        scales = scales._replace(sampling=state.constant(sampling))
        scales = scales.with_innovations(total, squares, self.tracker.steps)
        margin = self._share * scales.room() * (noise * (variance < HUGE))
        if state.sides is not None:  # at most to the middle of the interval
            margin = margin.clip(max=state.sides[4][at] - self.limits.margin)
        state.variance[at], state.margin[at] = variance * again, margin
        margin = margin + self.limits.margin
        if self.tracker.steps < WARM_UP:
            return scales
        excess = after - limit
        measured = choose(state.pooled[2] > 0, 1.0, 0.0)  # some constraint came twice
        violation = state.outside(at, excess + margin, 1.0) * (measured / noise)
        violation = violation if state.sides is None else abs(violation)
        largest = worst = state.number(violation.max())
        if known is not None:
            worst = state.number((violation * known).max())
        scales = scales.with_violation(worst, largest, state.number(violation.sum()))
        slope = self._coefficients(state, at, variance, excess + margin, scales)
        slope = slope * (variance < HUGE)
        rate = min(INTEGRAL * sampling, FASTEST) * scales.unit() / variance
        moved = state.multiplier[at] + (fresh - limit + margin) * rate
        state.multiplier[at] = state.outside(at, moved, rate)
        return scales.with_action(
            state.number((slope * innovation).sum()), state.number((abs(slope) * noise).max())
        )

    def _variance(self, state: _State, at: Any) -> tuple[Numbers, Numbers]:
        """sigma_i^2 of constraints just visited, and which came again.

        One value alone tells no noise: sigma_i^2 is then that of all constraints, now and when it
        is read later.
        """
        measured = self.tracker.estimate
        assert measured is not None
        visits, difference = (
            state.array(part)[at] for part in (measured.visits, measured.difference)
        )
        own, half = visits - 1, difference / 2  # half a squared difference is one noise
        mixed = (half * own + 5 * state.noise()) / (visits + 4)
        variance = half + (visits <= FEW) * (mixed - half)
        return variance + (variance == 0) * HUGE, own > 0

    def _coefficients(
        self, state: _State, at: Any, variance: Numbers, x: Numbers, scales: Scales
    ) -> Numbers:
        """The c_i of some constraints."""
        gain = PROPORTIONAL * scales.sampling**0.5 * scales.unit() / variance
        return state.outside(at, state.multiplier[at] + x * gain, gain)

    def _slopes(self, state: _State, at: Any, excess: Numbers) -> Numbers:
        """The c_i of some constraints at u_i - high_i, from the state of the last step."""
        variance = state.variance[at]
        variance = variance + (variance == 0) * (state.noise() + TINY)
        x = excess + (state.margin[at] + self.limits.margin)
        return self._coefficients(state, at, variance, x, state.scales())

    def excess(self, values: Tensor | None = None) -> Tensor:
        """How far u_i, or given values, are outside their limits, margin included."""
        outside = self.limits.violation(self.tracker.rows if values is None else values)
        return outside + (self.margin + self.limits.margin)

    def width(self) -> Tensor:
        """W_i: a violation of this size adds sigma_0/(4 A sigma_i) sqrt(m/B1) to c_i."""
        return self.variance.sqrt() * self.scales[0].clip(1)

    def rise(self) -> Tensor:
        """By how much each nu_i grows in a step at the tracked values."""
        scales, variance = Scales(*self.scales.unbind()), self.variance
        often = scales.sampling.clip(1)  # a constraint comes every so many steps
        rate = (INTEGRAL * often).clip(max=FASTEST) / often * scales.unit()
        return torch.where(variance > 0, self.excess().clip(0) * rate / variance, 0.0)

    def value(self) -> Tensor:
        """The constraints' part of the Lagrangian: the sum of c_i (u_i - high_i), or low_i."""
        state, every, slope = _State(self), slice(None), self.at(self.tracker.rows)[1]
        excess = state.array(self.tracker.rows) - state.limit(every)
        part = torch.as_tensor(state.from_side(every, excess, state.array(slope)))
        return torch.where(self.tracker.seen, slope * part, 0).sum()

    def violation(self) -> Tensor:
        """How far each constraint is exceeded (positive: violated), NaN where never seen."""
        return torch.where(self.tracker.seen, self.at(self.tracker.rows)[0], torch.nan)

    def multipliers(self) -> Tensor:
        """The c_i at the tracked values, NaN where never seen."""
        return torch.where(self.tracker.seen, self.at(self.tracker.rows)[1], torch.nan)

    def at(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Violations and multipliers c_i of all constraints at given values g_i."""
        state, every = _State(self), slice(None)
        excess = state.array(values.detach()) - state.limit(every)
        slope = self._slopes(state, every, excess)
        return self.limits.violation(values), torch.as_tensor(slope)


class _State:
    """The state of a term and of its tracker: tensors, or NumPy arrays of the same memory."""

    def __init__(self, term: MultiplierTerm) -> None:
        estimate = term.tracker.estimate
        assert estimate is not None
        buffers: dict[str, Any] = term._buffers
        limit = term.limits.tolerance
        self.on_host, self._number = limit.device.type == "cpu", term.tracker.num_inner
        self.multiplier, self.variance, self.margin = (
            self.array(buffers[name]) for name in ("multiplier", "variance", "margin")
        )
        self._scales, self._limit = self.array(buffers["scales"]), self.array(limit)
        self.pooled = self.array(estimate.pooled)
        self.sides: Any = buffers["sides"]
        if self.sides is not None:
            self.sides = self.array(self.sides)
            self._limit = self.sides[0]

    def noise(self) -> Numbers:
        """sigma^2 over all constraints."""
        return self.pooled[0] / 2

    def array(self, part: Tensor) -> Numbers:
        """A tensor as the kind of array that the state is in."""
        return part.numpy() if self.on_host else part

    def number(self, value: Numbers) -> Numbers:
        """A number as the kind that formulas use."""
        return float(value) if self.on_host else value

    def constant(self, value: float) -> Numbers:
        """A number of the host as the kind that formulas use."""
        return value if self.on_host else self._scales.new_full((), value)

    def rows(self, index: Tensor) -> Any:
        """What picks the rows of distinct blocks, in increasing order, from a table."""
        return slice(None) if len(index) == self._number else self.array(index)

    def limit(self, at: Any) -> Numbers:
        """The limits to measure from of some blocks: the upper one, or the only one."""
        return self._limit[at] if self._limit.ndim else self._limit

    def outside(self, at: Any, values: Numbers, factor: Numbers) -> Numbers:
        """[nu + k (g - high)]_+ - [-nu - k (g - low)]_+, from nu + k (g - limit + margin) and k."""
        above = values.clip(0)
        if self.sides is None:
            return above
        _, width, has_upper, has_lower, _ = self.sides[:, at]
        below = values + factor * (width - 2 * self.margin[at])
        return above * has_upper + below.clip(max=0) * has_lower

    def from_side(self, at: Any, excess: Numbers, slope: Numbers) -> Numbers:
        """The g - limit of some blocks, or g - low where the slope says that this is the limit."""
        return excess if self.sides is None else excess + self.sides[1][at] * (slope < 0)

    def scales(self) -> Scales:
        """The numbers of the term."""
        return Scales(*(self._scales.tolist() if self.on_host else self._scales.unbind()))

    def write(self, scales: Scales) -> None:
        """Keep the numbers of the term."""
        self._scales[:] = scales if self.on_host else torch.stack(scales)
