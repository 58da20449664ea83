"""The method of multipliers in units of the measured noise, see `fcco.terms.MultiplierTerm`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arrays import Array, Number, Numbers, Tensors, where
from .track import Pooled, Statistics

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


class Scales(NamedTuple):
    """What is measured of all constraints together, and of the loss."""

    omega: Number  # the largest violation of the last steps, in units of noise
    coherence: Number  # A^2; 0 until the first violation, and nothing acts before
    active: Number  # steps in which some c_i was not 0
    sampling: Number  # m/B1 of the last step
    loss: Number  # of the last step
    loss_noise: Number  # sigma_0^2
    losses: Number  # steps with a loss
    joint: Number  # the square of the sum of all e_i / sigma_i
    separate: Number  # the sum of their squares

    def with_loss(self, loss: Number) -> Scales:
        """After a step with this loss."""
        on: Any = Tensors if isinstance(self.omega, Tensor) else Numbers
        noise, steps = self.loss_noise, self.losses
        loss = on.choose(loss - loss == 0, loss, self.loss)  # NaN and infinity are left out
        # One outlier must not make all constraints act many times harder.
        bound = on.choose(
            (steps > 2) & (noise > 0), on.choose(steps > 10, 9 * noise, 100 * noise), HUGE
        )
        change = on.smaller(on.smaller(on.larger(loss - self.loss, -1e15), 1e15) ** 2 / 2, bound)
        early = (steps <= 10) & (change < 1e-4 * noise)  # what came before was one
        noise = on.choose(early, change, noise)
        weight = (steps > 0) / on.smaller(on.larger(steps, 1.0), 1 / 0.03)
        noise = noise + weight * (change - noise)
        return self._replace(loss=loss, loss_noise=noise, losses=steps + 1)

    def with_innovations(self, relative: Array, steps: Number) -> Scales:
        """After a step with these e_i / sigma_i."""
        on: Any = Tensors if isinstance(self.omega, Tensor) else Numbers
        weight = (1 / steps).clip(0.02) if isinstance(steps, Tensor) else max(0.02, 1 / steps)
        total, squares = on.number(relative.sum()), on.number((relative**2).sum())
        return self._replace(
            joint=self.joint + weight * (total**2 - self.joint),
            separate=self.separate + weight * (squares - self.separate),
        )

    def with_violation(self, violation: Array, known: Array | None) -> Scales:
        """After a step with these violations in units of noise; `known`: not seen first in it."""
        on: Any = Tensors if isinstance(self.omega, Tensor) else Numbers
        largest = worst = on.number(violation.max())
        if known is not None:
            worst = on.number((violation * known).max())
        start = (self.sampling * on.number(violation.sum()) / on.larger(largest, TINY)) ** 2
        begins = (self.coherence == 0) & (largest > 0)
        return self._replace(
            omega=on.larger(self.omega * (1 - FORGET), worst),
            coherence=on.choose(begins, on.larger(start, 0.1), self.coherence),
        )

    def with_action(self, slope: Array, innovation: Array, noise: Array) -> Scales:
        """After a step in which constraints acted with these c_i."""
        on: Any = Tensors if isinstance(self.omega, Tensor) else Numbers
        joint, largest = (slope * innovation).sum(), (abs(slope) * noise).max()
        joint, largest = on.number(joint), on.number(largest)
        acts = (largest > 0) * 1.0
        active = self.active + acts
        square = self.sampling * (joint / on.larger(largest, TINY)) ** 2
        weight = acts / on.smaller(active + 10, 50.0)
        coherence = on.larger(self.coherence + weight * (square - self.coherence), 0.1)
        coherence = (self.coherence > 0) * coherence
        return self._replace(active=active, coherence=coherence)

    def room(self) -> Number:
        """How much of its margin a constraint has room for, from 0 to 1.

        The noise of a pair of opposite constraints cancels: between them is no room. That of
        others adds up, as independent noise or stronger.
        """
        on: Any = Tensors if isinstance(self.omega, Tensor) else Numbers
        return on.smaller(self.joint / on.larger(self.separate, TINY), 1.0)

    def unit(self) -> Number:
        """kappa_i sigma_i^2, that is sigma_0 / (A max(omega, 1))."""
        on: Any = Tensors if isinstance(self.omega, Tensor) else Numbers
        scale = on.larger(self.coherence, 0.1) ** 0.5 * on.larger(self.omega, 1.0)
        return (self.coherence > 0) * self.loss_noise**0.5 / scale


class Targets(NamedTuple):
    """The limits of some constraints.

    Attributes:
        limit: to measure from: the upper one, or the only one.
        margin: train for so much less, beside the margin that follows the noise.
        sides: None for upper limits; else the width of the interval (0 with an open side), whether
            there are an upper and a lower limit, and the largest margin, each (B,).
    """

    limit: Array
    margin: Number
    sides: Any = None

    def outside(self, values: Array, factor: Number, margin: Array) -> Array:
        """[nu + k (g - high)]_+ - [-nu - k (g - low)]_+, from nu + k (g - limit + margin) and k."""
        above = values.clip(0)
        if self.sides is None:
            return above
        width, has_upper, has_lower, _ = self.sides
        below = values + factor * (width - 2 * margin)
        return above * has_upper + below.clip(max=0) * has_lower


def targets(high: Tensor, low: Tensor | None, margin: Number) -> Targets:
    """The limits low_i <= g_i <= high_i, infinite where a side is open; None without lower ones."""
    if low is None:
        return Targets(high, margin)
    above, below = high.isfinite(), low.isfinite()
    width = torch.where(above & below, high - low, 0)
    most = torch.where(above & below, width / 2, HUGE)
    sides = torch.stack([width, above.to(low), below.to(low), most])
    return Targets(torch.where(above, high, low), margin, sides)


class Multipliers(NamedTuple):
    """The state of some constraints."""

    multiplier: Array  # nu_i
    variance: Array  # sigma_i^2 after the last visit, 0 before the second
    margin: Array  # that of the noise, after the last visit


def coefficients(
    rows: Multipliers, targets: Targets, excess: Array, noise: Number, scales: Scales
) -> Array:
    """The c_i of some constraints at u_i - limit_i, from the state of the last step.

    Args:
        rows: the state.
        targets: the limits.
        excess: u_i - limit_i.
        noise: sigma^2 over all constraints.
        scales: of the last step.
    """
    variance = where(rows.variance == 0, noise + TINY, rows.variance)
    gain = PROPORTIONAL * scales.sampling**0.5 * scales.unit() / variance
    x = excess + (rows.margin + targets.margin)
    return targets.outside(rows.multiplier + x * gain, gain, rows.margin)


class Constraints(NamedTuple):
    """What a step shows of some constraints."""

    fresh: Array  # batch values
    old: Array  # u before the step
    after: Array  # u after it
    known: Any  # which had a value before, as numbers; None when all had
    statistics: Statistics  # of the tracker, after the step
    pooled: Pooled
    came: Any = None  # which of the rows the batch has; None for all


def step(
    rows: Multipliers,
    targets: Targets,
    shown: Constraints,
    scales: Scales,
    share: float,
    steps: Number,
) -> tuple[Multipliers, Scales]:
    """Measure the units of the constraints of a step; after the warm-up move nu too.

    Args:
        rows: the state before.
        targets: the limits.
        shown: by the step.
        scales: with its `sampling` and its loss.
        share: of sigma_i that a margin has at most.
        steps: number of steps, this one included.
    """
    on: Any = Tensors if isinstance(scales.omega, Tensor) else Numbers
    fresh, old, after, known, statistics, pooled, came = shown
    variance, again = _variance(statistics, pooled)
    noise, innovation = variance**0.5, fresh - old
    if known is not None:  # a first value is no surprise
        innovation = innovation * known
    if came is not None:
        innovation = innovation * came
    relative = innovation / noise
    if targets.sides is not None:  # towards the limit, which is below for lower ones
        relative = relative * (2 * targets.sides[1] - 1)
    scales = scales.with_innovations(relative, steps)
    moves = variance < HUGE
    margin = share * scales.room() * (noise * moves)
    if targets.sides is not None:  # at most to the middle of the interval
        margin = margin.clip(max=targets.sides[3] - targets.margin)
    multiplier = rows.multiplier
    if isinstance(steps, Tensor) or steps >= WARM_UP:
        inside = margin + targets.margin
        excess = after - targets.limit + inside
        # Some constraint came twice. Nothing acts before the first violation that counts.
        measured = (pooled.steps > 0) & (steps >= WARM_UP)
        violation = targets.outside(excess, 1.0, margin) * measured / noise
        violation = violation if targets.sides is None else abs(violation)
        violation = violation if came is None else violation * came
        scales = scales.with_violation(violation, known)
        kappa = scales.unit() / variance
        gain = PROPORTIONAL * scales.sampling**0.5 * kappa
        slope = targets.outside(multiplier + excess * gain, gain, margin) * moves
        slope = slope if came is None else slope * came
        rate = on.smaller(INTEGRAL * scales.sampling, FASTEST) * kappa
        moved = multiplier + (fresh - targets.limit + inside) * rate
        multiplier = targets.outside(moved, rate, margin)
        scales = scales.with_action(slope, innovation, noise)
    new = Multipliers(multiplier, variance * again, margin)
    if came is not None:
        new = Multipliers(*(where(came, b, a) for a, b in zip(rows, new, strict=True)))
    return new, scales


def _variance(statistics: Statistics, pooled: Pooled) -> tuple[Array, Array]:
    """sigma_i^2 of constraints just visited, and which came again.

    One value alone tells no noise: sigma_i^2 is then that of all constraints, now and when it is
    read later.
    """
    own, half = statistics.visits - 1, statistics.difference / 2  # half a squared difference
    mixed = (half * own + 5 * (pooled.difference / 2)) / (statistics.visits + 4)
    variance = half + (statistics.visits <= FEW) * (mixed - half)
    return where(variance == 0, HUGE, variance), own > 0


def largest_margin(number: int) -> float:
    """The share of sigma_i that a margin has at most, for m constraints."""
    return MARGIN * math.sqrt(2 * math.log(max(number, 2)))
