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

MARGIN = 0.2
"""Margin in units of sqrt(2 ln m) errors of u_i, which the largest of m is off by chance."""

FORGET = 0.01
"""Share of omega that is forgotten in a step."""

INTEGRAL, FASTEST, PROPORTIONAL = 0.01, 0.03, 0.25
"""Gains in units of kappa: of nu in a step, its bound, and of the part proportional to x."""

LEAST = 0.03
"""Share of the variance of all losses so far that counts as noise of the loss at least."""

LATE = 4.0
"""How many times `INTEGRAL` is added to it for an excess that lasts."""

FORCED, CHANCE, ALIKE = 5.0, 0.5, 4.0
"""Limits are relaxed when constraints act with more than `FORCED` times sigma_0 / A, and one of
them is violated by more than `CHANCE` in units of noise all the same. Noise is alike that differs
by a factor of at most `ALIKE`."""

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
    level: Number  # the mean of all losses
    range: Number  # their variance
    pressure: Number  # the largest c_i sigma_i of the last steps, in units of sigma_0 / A
    typical: Number  # the sigma_i of constraints that act

    def with_loss(self, loss: Number) -> Scales:
        """After a step with this loss."""
        on: Any = Tensors if isinstance(self.omega, Tensor) else Numbers
        noise, steps = self.loss_noise, self.losses
        loss = on.choose(loss - loss == 0, loss, self.loss)  # NaN and infinity are left out
        # One outlier must not make all constraints act many times harder.
        bound = noise * (100 - 91 * (steps > 10)) + HUGE * ((steps <= 2) | (noise == 0))
        most = on.smaller((2 * bound) ** 0.5, 1e15)
        moved = on.larger(on.smaller(loss - self.loss, most), -most)
        loss, change = self.loss + moved, moved**2 / 2
        early = (steps <= 10) & (change < 1e-4 * noise)  # what came before was one
        noise = noise + early * (change - noise)
        weight = (steps > 0) / on.smaller(on.larger(steps, 1.0), 1 / 0.03)
        noise = noise + weight * (change - noise)
        level, share = self.level + early * (loss - self.level), 1 / (steps + 1)
        off, spread = loss - level, self.range - early * self.range
        return self._replace(
            loss=loss,
            loss_noise=noise,
            losses=steps + 1,
            level=level + share * off,
            range=spread + share * ((1 - share) * off**2 - spread),
        )

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
            coherence=self.coherence + begins * (on.larger(start, 0.1) - self.coherence),
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
        pressure = largest * on.larger(coherence, 0.1) ** 0.5 / self.deviation()
        pressure = on.larger(self.pressure * (1 - FORGET), pressure)
        share = abs(slope) * noise
        typical = on.number((share * noise).sum()) / on.larger(on.number(share.sum()), TINY)
        typical = self.typical + weight * (typical - self.typical)
        return self._replace(active=active, coherence=coherence, pressure=pressure, typical=typical)

    def deviation(self) -> Number:
        """sigma_0, at least a share of all variation; 1 for a loss that is constant."""
        on: Any = Tensors if isinstance(self.omega, Tensor) else Numbers
        square = on.larger(self.loss_noise, LEAST * self.range)
        return (square + (square == 0)) ** 0.5

    def unit(self) -> Number:
        """kappa_i sigma_i^2, that is sigma_0 / (A max(omega, 1))."""
        on: Any = Tensors if isinstance(self.omega, Tensor) else Numbers
        scale = on.larger(self.coherence, 0.1) ** 0.5 * on.larger(self.omega, 1.0)
        return (self.coherence > 0) * self.deviation() / scale

    def slack(self, noise: Array) -> Array:
        """By how much limits are relaxed: 0 unless they cannot all hold.

        Where noise is alike, limits are in like units and all are relaxed by as much; others by as
        much in units of their noise.
        """
        on: Any = Tensors if isinstance(self.omega, Tensor) else Numbers
        beyond = on.larger(self.pressure / FORCED - 1, 0.0) * on.larger(self.omega - CHANCE, 0.0)
        beyond = on.smaller(beyond, self.omega)
        return beyond * (0 * noise + self.typical).clip(noise / ALIKE, noise * ALIKE)


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
    margin: Array  # that of the error of u_i less the slack, after the last visit


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
    number: int,
    steps: Number,
) -> tuple[Multipliers, Scales]:
    """Measure the units of the constraints of a step; after the warm-up move nu too.

    Args:
        rows: the state before.
        targets: the limits.
        shown: by the step.
        scales: with its `sampling` and its loss.
        number: of all constraints.
        steps: number of steps, this one included.
    """
    on: Any = Tensors if isinstance(scales.omega, Tensor) else Numbers
    fresh, old, after, known, statistics, pooled, came = shown
    again = statistics.visits > 1
    # One value alone tells no noise: sigma_i^2 is then that of all, now and when it is read later.
    squares = statistics.squares(pooled)
    variance, error = squares / 2, (squares * statistics.relative_error(pooled, number)) ** 0.5
    moves = variance > 0
    # The noise of a pair of opposite constraints cancels: between them is no room. That of others
    # adds up, as independent noise or stronger.
    room = on.smaller(scales.joint / on.larger(scales.separate, TINY), 1.0)
    margin = MARGIN * math.sqrt(2 * math.log(max(number, 2))) * room * error * again
    if targets.sides is not None:  # at most to the middle of the interval
        margin = margin.clip(max=targets.sides[3] - targets.margin)
    inside = margin + targets.margin
    excess = after - targets.limit + inside
    # A value that does not move has no noise: its violation is its unit.
    outside = targets.outside(excess, 1.0, margin)
    variance = variance + ~moves * outside**2
    variance = variance + HUGE * (variance == 0)
    noise, innovation = variance**0.5, fresh - old
    if known is not None:  # a first value is no surprise
        innovation = innovation * known
    if came is not None:
        innovation = innovation * came
    relative = innovation / noise
    if targets.sides is not None:  # towards the limit, which is below for lower ones
        relative = relative * (2 * targets.sides[1] - 1)
    scales = scales.with_innovations(relative, steps)
    multiplier = rows.multiplier
    slack = scales.slack(noise * moves)
    margin, excess, inside = margin - slack, excess - slack, inside - slack
    if isinstance(steps, Tensor) or steps >= WARM_UP:
        # Noise from as many steps. Nothing acts before the first violation that counts.
        measured = pooled.steps >= WARM_UP - 1
        violation = outside * measured / noise
        violation = violation if targets.sides is None else abs(violation)
        violation = violation if came is None else violation * came
        scales = scales.with_violation(violation, known)
        kappa = scales.unit() / variance
        gain = PROPORTIONAL * scales.sampling**0.5 * kappa
        slope = targets.outside(multiplier + excess * gain, gain, margin) * moves
        slope = slope if came is None else slope * came
        # An excess in u and in its average over many steps alike, beyond half the error of u. A
        # violation above noise, omega > 1, shows in the first steps.
        now, lasting = excess, statistics.slow - targets.limit + inside
        if targets.sides is not None:  # from the lower limit where that is the one that matters
            width, has_upper, has_lower, _ = targets.sides
            across = (width - 2 * margin) * has_lower
            across = across * ((multiplier < 0) | (excess + across < 0) | (has_upper == 0))
            now, lasting = now + across, lasting + across
        late = (lasting * now > 0) * abs(lasting).clip(max=abs(now)) - error / 2
        omega = on.larger(scales.omega, 1.0)
        late = (late.clip(0) / (noise * omega)).clip(max=1) / omega
        rate = (INTEGRAL * scales.sampling * (1 + LATE * late)).clip(max=FASTEST) * kappa
        x = fresh - targets.limit + inside
        multiplier = targets.outside(multiplier + x * rate, rate, margin)
        scales = scales.with_action(slope, innovation, noise)
    new = Multipliers(multiplier, variance * again, margin)
    if came is not None:
        new = Multipliers(*(where(came, b, a) for a, b in zip(rows, new, strict=True)))
    return new, scales
