r"""Running averages: the update of u, how far u is off, and the best weight of a new value.

Every tracker of the library is one formula (Alg. 1, line 7),

.. math::
    u_i^+ = (1-\gamma)\,u_i + \gamma\, g_i(w_t) + \gamma'\,\bigl(g_i(w_t) - g_i(w_{t-1})\bigr),

with :math:`\gamma' = 0` (moving average, SOX), MSVR's :math:`\gamma'` (SONX, SONEX) or
:math:`\theta\gamma` (ALEXR).

The error of u comes from the batches alone. With noise of variance :math:`\sigma^2` in a batch
value, and a g_i that moves between visits by steps of variance q, the error of u after any weights
w of the new values is

.. math::
    \mathbb E(u_i-g_i)^2 = a_i\,\sigma^2 + b_i\,q, \qquad
    a_i \leftarrow (1-w)^2 a_i + w^2, \quad b_i \leftarrow (1-w)^2 (b_i + 1),

with a = 1 and b = 0 after the first visit. A block that is visited again shows two things. Its
batch value differs from the last one, by noise and a little motion; and it differs from u, by noise
and all the motion that u has not followed yet:

.. math::
    D = \mathbb E(\text{fresh}_t - \text{fresh}_{t-1})^2 = 2\sigma^2 + q, \qquad
    V = \mathbb E(\text{fresh}_t - u_t)^2 = (1+a)\,\sigma^2 + (b+1)\,q.

Averages over many visits, of both squares and of the factors 1 + a and b + 1 that belong to them,
are two equations for two unknowns. For :math:`\gamma=1`, or while all blocks come for the second
time, they are the same equation; all of it then counts as noise. The constant weight with the
smallest error (the gain of a Kalman filter) solves :math:`\gamma^2\sigma^2 = (1-\gamma)\,q`.

Samples of a small block come in passes: those of a batch make up for those of the last, and its
values have a correlation :math:`-\kappa`. With :math:`a = w/(2-w)`, of a constant weight w,

.. math::
    D = 2(1+\kappa)\,\sigma^2 + q, \quad D_2 = \mathbb E(\text{fresh}_t - \text{fresh}_{t-2})^2
    = 2\sigma^2 + 2q, \quad V = (1+a+2\kappa a)\,\sigma^2 + (b+1)\,q,

so that :math:`b\,q = V - aD - (1-a)D_2/2`, whatever :math:`\kappa` is, and u has the squared error
:math:`a\,(1-2\kappa\frac{1-a}{1+a})\,\sigma^2 + b\,q`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .arrays import Array, Number, where

HORIZON = 100
"""Visits of a block that its own statistics look back."""

POOLED_HORIZON = 50
"""Steps that the statistics of all blocks together look back."""

GAMMA_RANGE = (0.05, 0.95)
"""What `best_gamma` is kept in. Below, u would hardly notice that the drift has grown again; above,
noise and drift can hardly be told apart."""

OPPOSED = 2.5
"""After 10 steps correlations of noise count from 2.5 standard errors on, and less one: what chance
would add to the drift makes the rounded kink too wide."""

MEMORY = 3.0
"""With `gamma="auto"`, the k-th value after the first has weight 3 / (k + 3) or more. With
1 / (k + 1) u would follow late where the drift is not seen: samples of a small group come in
passes, those of a batch make up for those of the last, and so they differ by more than noise."""

FEW, MIXED = 20, 8
"""Visits up to which the noise of a block is mixed with that of all, which counts as 8."""

CLIP, EARLY = 100.0, 10
"""Squares are clipped to 100 V before they enter D and V (to 10^4 V while V is the mean of fewer
than 10), unless a square as large came before: in the same batch (then the model has moved), or in
the same block (then it is a rare event)."""

OUTLIER, AGREES = 900.0, 1e-5
"""Innovations larger than 30 sqrt(V) are clipped to that distance. Two consecutive such values that
agree reset the block: its mean has jumped. The third value of a block also resets it if it agrees
with one of the first two, 300 times better than with their mean: the other was an outlier."""

Formula = Callable[[Array, Any, Array, Any, Number, Number], tuple[Array, Array]]
"""From (u, which blocks have one or None, fresh values, those at w_{t-1} or None, gamma, gamma')
to u before (the fresh value on a first visit) and after."""


# The update of u.


def track(
    old: Array, seen: Any, fresh: Array, previous: Any, gamma: Number, correction: Number
) -> tuple[Array, Array]:
    r"""One tracking update (Alg. 1, line 7); a first visit starts at the fresh value.

    Args:
        old: u_i, shape (B,) or (B, d1).
        seen: whether block i has a value yet, of a shape that goes with `old`; None when all have.
        fresh: g_i(w_t; B_i).
        previous: g_i(w_{t-1}; B_i), the same samples; None leaves the correction out.
        gamma: weight of the fresh value.
        correction: gamma', weight of the difference.

    Example:
        >>> import torch
        >>> u, g = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 5.0])
        >>> track(u, torch.tensor([True, False]), g, g - 1.0, gamma=0.5, correction=0.1)
        (tensor([1., 5.]), tensor([1.6000, 5.0000]))
    """
    before = old if seen is None else where(seen, old, fresh)
    # From the nearer end: exact at gamma = 0 and 1, also when |before| is much above |fresh|.
    if isinstance(gamma, (int, float)) and gamma < 0.5:
        after = before + gamma * (fresh - before)
    else:
        after = fresh - (1 - gamma) * (fresh - before)
    if previous is not None:
        change = fresh - previous
        after = after + correction * (change if seen is None else change * seen)
    return before, after


def log_track(
    old: Array, seen: Any, fresh: Array, previous: Any, gamma: Number, correction: Number
) -> tuple[Array, Array]:
    r"""The same update for u = exp(nu), on nu = log u, without overflow.

    .. math::
        \nu^+ = \log\bigl((1-\gamma)e^{\nu} + \gamma e^{\ell} + \gamma'(e^{\ell} - e^{\ell'})\bigr)

    where ell and ell' are the logarithms of the fresh and previous value. A correction can make
    the sum negative; it is floored at one thousandth of the uncorrected average.
    """
    xp: Any = torch if isinstance(old, Tensor) else np
    before = old if seen is None else where(seen, old, fresh)
    average = xp.logaddexp(before + _log(1 - gamma), fresh + _log(gamma))
    after = average
    if previous is not None:
        largest = xp.maximum(average, fresh)
        # Where the previous value is larger by e^50, the sum is negative in any case.
        gone = xp.exp((previous - largest).clip(max=50))
        difference = xp.exp(fresh - largest) - gone
        total = xp.exp(average - largest) + correction * difference
        total = total.clip(min=float(xp.finfo(total.dtype).tiny))
        after = xp.maximum(largest + xp.log(total), average + math.log(1e-3))
    return before, after if seen is None else where(seen, after, fresh)


def scent_track(
    old: Array, seen: Any, fresh: Array, _: Any, gamma: Number, __: Any, middle: Any = None
) -> tuple[Array, Array]:
    r"""SCENT's update of u = exp(nu): each block has a weight of its own.

    .. math::
        \gamma_i = \sigma(\log\alpha + \nu_i), \qquad
        \log\alpha = \log\tfrac{\gamma}{1-\gamma} - \text{middle}

    Args:
        old: nu, and the other arguments, as in `log_track`.
        gamma: the weight of a block in the middle.
        middle: where that is; the median of the blocks unless given.
    """
    xp: Any = torch if isinstance(old, Tensor) else np
    before = old if seen is None else where(seen, old, fresh)
    if middle is None:
        middle = xp.quantile(before, 0.5)
    logit = before - middle + (_log(gamma) - _log(1 - gamma))
    kept = xp.logaddexp(0 * logit, logit)  # -log(1 - gamma_i)
    after = xp.logaddexp(before - kept, fresh + logit - kept)
    return before, after if seen is None else where(seen, after, fresh)


def _log(weight: Number) -> Number:
    if isinstance(weight, Tensor):
        return weight.log()
    return math.log(weight) if weight > 0 else -math.inf


def value_of(value: Tensor, gradient_of: Tensor) -> Tensor:
    """A tensor with the value of one and the gradient of the other.

    `outer(value_of(u, gradient_of=g))` then differentiates to grad f(u) * grad g, the paper's
    estimator. The difference below is exactly zero, so the value is u to the last bit (adding
    `(u - g).detach()` to g instead would lose u when |g| is much larger than |u|).

    Example:
        >>> import torch
        >>> g = torch.tensor(1e8, requires_grad=True)
        >>> u = value_of(torch.tensor(0.001), gradient_of=g)
        >>> u.square().backward()
        >>> u.item() == torch.tensor(0.001).item(), g.grad
        (True, tensor(0.0020))
    """
    return value + (gradient_of - gradient_of.detach())


def theory_correction(gamma: Number, num_inner: int, blocks: Number) -> Number:
    r"""MSVR's correction weight, gamma' = (n - B1) / (B1 (1 - gamma)) + (1 - gamma).

    Above 1 as soon as fewer than half of the blocks are sampled. It multiplies every change of a
    value, noise included, so it wants tiny learning rates: on a deep network use "auto" or none.

    Example:
        >>> round(theory_correction(0.1, num_inner=30, blocks=8), 2)
        3.96
    """
    if not isinstance(blocks, Tensor) and blocks in (0, num_inner):
        # Nothing to correct; or every block is seen, and gamma = 1 is allowed.
        return 1 - gamma if blocks else 0.0
    return (num_inner - blocks) / (blocks * (1 - gamma)) + (1 - gamma)


def correction_weight(
    correction: Number | str, gamma: Number, num_inner: int, blocks: Number
) -> Number:
    """The number gamma' of a step that samples `blocks` blocks.

    Args:
        correction: gamma' itself, `"theory"` (MSVR) or `"auto"`: (1 - gamma) B1 / n.
        gamma: weight of the fresh value.
        num_inner: n.
        blocks: B1.

    Example:
        >>> correction_weight("auto", 0.1, num_inner=30, blocks=10)
        0.3
    """
    if not isinstance(correction, str):
        return correction
    if correction == "theory":
        return theory_correction(gamma, num_inner, blocks)
    return (1 - gamma) * blocks / num_inner


# The error of u.


def best_gamma(noise: Number, drift: Number) -> Number:
    """The weight of the new value with the smallest error, within `GAMMA_RANGE`.

    Example:
        >>> gamma = best_gamma(2.0, 1.0)
        >>> gamma, gamma**2 * 2.0 - (1 - gamma) * 1.0
        (0.5, 0.0)
    """
    ratio = (drift + 1e-30) / (noise + 1e-30)
    # The stable form of (sqrt(ratio^2 + 4 ratio) - ratio) / 2.
    return _within(2 / (1 + (1 + 4 / ratio) ** 0.5), *GAMMA_RANGE)


def _within(value: Number, low: Number, high: Number) -> Number:
    return min(max(low, value), high) if isinstance(value, float) else value.clip(low, high)


WIDTH_BY_NOISE, ANSWER, LOOP = 4.0, 32, 128
"""Width of the rounded kink with `smoothing="auto"`. Weights and losses are a loop with the memory
of the optimizer and of u, which answers late: in a zone narrower than what a loss moves meanwhile,
the weights swing. The width is the sum of errors of u by noise; of what one loss drifts in `ANSWER`
steps of the optimizer; and of what all fall together in `LOOP` steps, times how much faster one
falls that has the largest weight instead of the mean one."""

ENOUGH = 50
"""Squares of which D and V are means before they tell how wide the rounded kink must be."""


def automatic_width(
    pooled: Pooled, number: int, reach: Number = 1.0, widest: Number = math.inf
) -> tuple[Number, Number]:
    """The width of the rounded kink with `smoothing="auto"`, and whether that is known.

    Args:
        pooled: what is known of all blocks.
        number: of the numbers that are tracked, n d1.
        reach: the largest weight of a block over the mean one, 1/r for CVaR.
        widest: the largest useful width, for weakly convex functions.
    """
    noise, drift, _ = pooled.noise_and_drift()
    by_noise = (noise * abs(pooled.of_noise - 1)) ** 0.5  # below 0 by rounding
    drifted = ANSWER * (pooled.values / number) * drift**0.5
    # Strictly positive: the envelope divides by lambda.
    width = WIDTH_BY_NOISE * by_noise + drifted + reach * abs(pooled.progress) + 1e-12
    width = width.clip(max=widest) if isinstance(width, Tensor) else min(width, widest)
    return width, pooled.values * pooled.steps >= ENOUGH


class Pooled(NamedTuple):
    """What is known of all blocks together, over the last steps in which some came again."""

    difference: Number  # D, the mean of squared changes
    squared_innovation: Number  # V, the mean of squared innovations
    of_noise: Number  # 1 + a, the factor of sigma^2 in V
    of_drift: Number  # b + 1, that of q
    values: Number  # how many squares a step gives
    progress: Number  # the mean of u - slow: how far all moved together in `LOOP` steps
    gap: Number  # D - D_2 of the blocks that came twice before, times their share
    squared_gap: Number  # the mean of its square over steps, for its error
    share: Number  # of the values that are of such blocks
    steps: Number  # how many steps these are, up to `POOLED_HORIZON`
    gain: Number  # the weight of the new value that was best so far

    def noise_and_drift(self) -> tuple[Number, Number, Number]:
        r"""Solve for :math:`\sigma^2`, q and :math:`\kappa`, all at least 0.

        Example:
            >>> noise, drift, a, b = 4.0, 1.0, 0.2, 1.5
            >>> for kappa in (0.0, 0.3):
            ...     innovation = (1 + a + 2 * kappa * a) * noise + (b + 1) * drift
            ...     change, turn = 2 * (1 + kappa) * noise + drift, 2 * kappa * noise - drift
            ...     pooled = Pooled(change, innovation, 1 + a, b + 1, 9, 0, turn, turn**2, 1, 50, 1)
            ...     print([round(each, 2) for each in pooled.noise_and_drift()])
            [4.0, 1.0, 0.0]
            [4.0, 1.0, 0.3]
        """
        difference, innovation, one_a, one_b = self[:4]
        zero, share = 0 * difference, self.share + (self.share == 0)
        gap, steps = self.gap / share, self.steps + (self.steps == 0)

        def solved(drift: Number, told_apart: Number) -> Number:  # 0 where they are not told apart
            return _within(drift * told_apart / (told_apart**2 + 1e-3), zero, difference)

        alike = solved(2 * innovation - one_a * difference, 2 * one_b - one_a)  # if kappa is 0
        half = (difference - gap) / 2  # of D_2
        drift = innovation - (one_a - 1) * difference - (2 - one_a) * half
        drift = solved(drift, one_b - 1)
        against, noise = (gap + drift) / 2, half - drift
        chance = (abs(self.squared_gap - self.gap**2) / steps) ** 0.5 / share / 2
        opposed = (self.share > 0) * (steps > EARLY) * (against > OPPOSED * chance) * (noise > 0)
        drift = alike + opposed * (drift - alike)
        both = (difference - drift) / 2  # (1 + kappa) sigma^2
        against = _within(opposed * (against - chance), zero, both / 3)
        noise = both - against
        return noise, drift, against / (noise + (noise == 0))

    def after(self, sums: Sequence[Number], automatic: bool) -> Pooled:
        """After a step.

        Args:
            sums: of (fresh_t - fresh_{t-1})^2, (fresh_t - u_t)^2, a, b and u - slow over the blocks
                that came again; of (fresh_t - fresh_{t-1})^2 - (fresh_t - fresh_{t-2})^2 over those
                that came twice before; and how many numbers both are.
            automatic: whether u is averaged with the gain, which then moves.
        """
        *_, of_noise, of_drift, progress, gap, share, number = sums
        some = (number > 0) * 1.0
        count = number + (1 - some)
        steps = self.steps + some * (self.steps < POOLED_HORIZON)
        weight = some / (steps + (steps == 0))
        new = (
            sums[0] / count, sums[1] / count, 1 + of_noise / count, 1 + of_drift / count, number,
            progress / count, gap / count, (gap / count) ** 2, share / count,
        )  # fmt: skip
        # Of two first samples the smaller is taken where they do not fit: the other is an outlier.
        misfit = (steps == 2) * (self.squared_innovation > 100 * new[1]) * some
        weight = misfit + (1 - misfit) * weight
        means = [old + weight * (now - old) for old, now in zip(self[:9], new, strict=True)]
        found = Pooled(*[*means, steps, self.gain])
        if automatic:
            best = best_gamma(*found.noise_and_drift()[:2])
            found = found._replace(gain=self.gain + (best - self.gain) * some / POOLED_HORIZON)
        return found


class Statistics(NamedTuple):
    """What is known of some blocks."""

    latest: Array  # the last batch value of each, (B,) or (B, d1)
    difference: Array  # D of each
    visits: Array  # how often each was visited, up to `HORIZON`, (B,) or (B, 1); D needs two
    of_noise: Array  # a of each, the factor of sigma^2 in the squared error of u; like visits
    of_drift: Array  # b of each, that of q; like visits
    largest: Array  # the largest squared innovation of each that was clipped
    slow: Array  # the average of u over the visits in `LOOP` steps, up to `HORIZON`, of each
    before: Array  # the batch value before the last of each

    def squares(self, pooled: Pooled) -> Array:
        """D of each; after few visits mixed with that of all blocks."""
        own = (self.visits - 1).clip(0)
        mixed = (self.difference * own + MIXED * pooled.difference) / (own + MIXED)
        return self.difference + (self.visits <= FEW) * (mixed - self.difference)

    def errors(self, pooled: Pooled, number: int) -> Array:
        """The standard error of u as an estimate of what g_i is now; NaN where it is not known.

        A block has noise of its own, at first that of all; its drift is that of all, in proportion.
        Since its last visit it has drifted on, in expectation by a visit's share.

        Args:
            pooled: what is known of all blocks.
            number: of the numbers that are tracked, n d1.
        """
        known = (self.visits > 0) & (pooled.steps > 0)
        squared = self.squares(pooled) * self.relative_error(pooled, number)
        return where(known, squared**0.5, math.nan)

    def relative_error(self, pooled: Pooled, number: int) -> Array:
        """The squared error of u in units of D; see `errors`."""
        noise, drift, kappa = pooled.noise_and_drift()
        noise = noise * (1 - 2 * kappa * (1 - self.of_noise) / (1 + self.of_noise))
        lag = self.of_drift + (1 - pooled.values / number)
        parts = self.of_noise * noise + lag * drift
        return parts / (pooled.difference + (pooled.difference == 0))

    def clipped(self, pooled: Pooled, fresh: Array, old: Array) -> tuple[Array, Array]:
        """Batch values for the statistics, and those to track, with clipped innovations.

        Args:
            pooled: what is known of all blocks.
            fresh: batch values; those of a block that did not come must be `old`.
            old: u before the visit.
        """
        if not isinstance(fresh, Tensor) and pooled.steps == 0:
            return fresh, fresh
        innovation = fresh - old
        scale = self.difference.clip(pooled.squared_innovation) ** 0.5
        limit = (OUTLIER**0.5 * scale).clip(self.largest**0.5)
        limit = limit.clip(_second_largest(abs(innovation)))
        # A first value is what it is; so is one after another that was as far.
        free = (self.visits == 0) | (scale == 0) | (abs(self.latest - old) > limit)
        free = free | (abs(innovation) <= limit)
        held = where(free, fresh, old + innovation.clip(-limit, limit))
        most = largest_square_root(fresh)
        return fresh.clip(-most, most), held

    def after(
        self,
        pooled: Pooled,
        fresh: Array,
        old: Array,
        came: Any,
        gamma: Number,
        u: Array,
        share: Number,
        automatic: bool,
    ) -> tuple[Statistics, Pooled]:
        """After a visit, see `CLIP` and `OUTLIER` for the treatment of outliers.

        Args:
            pooled: what is known of all blocks.
            fresh: batch values; those of a block that did not come must be `latest`.
            old: u before the visit; on a first visit it does not count.
            came: which blocks came; True for all.
            gamma: weight of the fresh value in u; on a first visit it does not count.
            u: after the visit.
            share: of all blocks that come in a step.
            automatic: see `Pooled.after`.
        """
        seen_before = self.visits.clip(max=1)
        again = seen_before * came  # the first visit has nothing to compare with
        new = (1 - (1 - gamma) * seen_before) * came  # the weight of the fresh value
        kept = (1 - new) ** 2
        of_noise, of_drift = kept * self.of_noise + new * new, kept * (self.of_drift + came)
        slow = (1 / (self.visits + 1)).clip(1 / (1 + LOOP * share)) * came
        slow = self.slow + slow * (u - self.slow)
        weight = again / (self.visits + (self.visits == 0))
        visits, extreme = self.visits + (self.visits < HORIZON) * came, self.largest
        before = where(again > 0, self.latest, self.before)
        squares = [(fresh - other) ** 2 for other in (self.latest, old, self.before)]
        if (
            isinstance(fresh, Tensor)  # a look at the values would synchronise
            or pooled.steps < 3
            or not (squares[0] + squares[1] + squares[2]).max(initial=0.0)
            <= CLIP * pooled.squared_innovation
        ):
            found = self._robust(pooled, fresh, old, again, visits, *squares)
            squares, again, visits, extreme = found
        squared_change, squared_innovation, squared_lag_2 = squares
        statistics = Statistics(
            latest=fresh,
            difference=self.difference + weight * (squared_change - self.difference),
            visits=visits,
            of_noise=of_noise,
            of_drift=of_drift,
            largest=extreme,
            slow=slow,
            before=before,
        )
        each, shares = again + 0 * squared_change, (self.of_noise, self.of_drift)
        rows = each if each.ndim == 1 else each.sum(1, keepdims=True)
        third = each * (self.visits > 1)
        pairs = ((each, squared_change), (each, squared_innovation))
        pairs = (*pairs, *((rows, share) for share in shares), (each, u - slow))
        pairs = (*pairs, (third, squared_change - squared_lag_2), (third, third))
        if isinstance(fresh, Tensor):
            sums = [*((one * other).sum() for one, other in pairs), each.sum()]
        else:  # Python's numbers are the fastest
            sums = [float(np.vdot(one, other)) for one, other in pairs]
            sums.append(float(each.sum()))
        return statistics, pooled.after(sums, automatic)

    def _robust(
        self,
        pooled: Pooled,
        fresh: Array,
        old: Array,
        again: Array,
        visits: Array,
        squared_change: Array,
        squared_innovation: Array,
        squared_lag_2: Array,
    ) -> tuple[list[Array], Array, Array, Array]:
        """Clip the squares, and reset blocks whose mean has jumped; see `CLIP` and `OUTLIER`.

        Returns:
            The squares; which blocks came again and are not reset; visits after this one, 0 of a
            block that is reset; `largest` after it.
        """
        xp: Any = torch if isinstance(fresh, Tensor) else np
        v = pooled.squared_innovation
        scale, before = self.difference.clip(v), (self.latest - old) ** 2
        has_scale = scale > 0
        # Two consecutive outliers that agree: the mean has jumped.
        jumped = (squared_innovation > OUTLIER * scale) & (before > OUTLIER * scale) & has_scale
        jumped = jumped & (squared_change < squared_innovation / 9)
        # At the third visit u is a mean of the first value and `latest`, one of them an outlier.
        first = old + MEMORY * (old - self.latest)
        agrees = (squared_change < AGREES * squared_innovation) | (
            (fresh - first) ** 2 < AGREES * squared_innovation
        )
        third = (self.visits == 2) & agrees & (before > 0)
        third = third & ((squared_innovation > CLIP * v) | (pooled.steps < 3))
        reset = (jumped | third) & (again > 0)
        # As if it had never been visited: the next value takes the place of u.
        visits = visits * ~(reset if reset.ndim == 1 else reset.any(1)[:, None])
        # Squares are clipped, unless one as large came before: in this batch, or in this block.
        bound = CLIP * (1 + 99 * (pooled.steps * again.sum() < EARLY))
        again = again * ~reset
        bound = bound * scale
        most = xp.where(has_scale, bound.clip(_second_largest(squared_change * again)), math.inf)
        changes = [xp.where(each < most, each, most) for each in (squared_change, squared_lag_2)]
        most = xp.where(bound < self.largest, self.largest, bound)
        most = most.clip(_second_largest(squared_innovation * again))
        most = xp.where(has_scale, most, math.inf)
        clipped = (squared_innovation > most) & (again > 0)
        largest = xp.where(clipped, squared_innovation, self.largest)
        squared_innovation = xp.where(squared_innovation < most, squared_innovation, most)
        return [changes[0], squared_innovation, changes[1]], again, visits, largest


class Rows(NamedTuple):
    """The state of a tracker: of some blocks, or of all of them in a fleet."""

    u: Array  # (B,) or (B, d1)
    seen: Any  # which have a value, (B,) or (B, 1); None when all have
    statistics: Statistics | None = None
    pooled: Pooled | None = None


class Visit(NamedTuple):
    """The result of a tracking update of some blocks."""

    before: Array  # u_i before it (the fresh value on a first visit)
    after: Array  # u_i after it
    clipped: Array  # the batch values, with clipped innovations
    statistics: Statistics | None
    pooled: Pooled | None


@dataclass(frozen=True)
class Track:
    """The update of an `InnerTracker`; in a fleet its numbers are tensors, one entry per run.

    Args:
        number: n.
        gamma: weight of the fresh value; None takes the gain that is measured.
        correction: gamma', or the word for a formula, see `correction_weight`.
        formula: the update of u.
        least: the smallest gain that is taken.
    """

    number: int
    gamma: Number | None
    correction: Number | str
    formula: Formula = track
    least: float = 0.0

    def step(
        self,
        rows: Rows,
        fresh: Array,
        previous: Any = None,
        *,
        blocks: Number = 0,
        came: Any = None,
        repeated: Any = False,
        refresh: bool = False,
        skip_clipping: bool = False,
    ) -> Visit:
        """Update u and what is known of its error.

        Args:
            rows: the state before.
            fresh: g_i(w_t), the means over the samples of a batch.
            previous: g_i(w_{t-1}) on the same samples, or None.
            blocks: B1, how many blocks the batch has, for a correction.
            came: which of the rows the batch has, shaped like `rows.seen`; None for all. Others
                keep their values.
            repeated: the batch is that of the step before: no new visit.
            refresh: take the fresh value itself (SPIDER).
            skip_clipping: the values are known to be so near u that none has to be clipped.
        """
        old, seen, statistics, pooled = rows
        absent = None if came is None else ~came
        fresh = fresh if absent is None else where(absent, old, fresh)
        clipped = fresh
        if statistics is not None and pooled is not None and not skip_clipping:
            fresh, clipped = statistics.clipped(pooled, fresh, old)
        gamma: Any = self.gamma
        if gamma is None:
            assert statistics is not None and pooled is not None
            gamma = (MEMORY / (statistics.visits + MEMORY)).clip(pooled.gain).clip(self.least)
        correction: Any = 0.0
        if previous is not None:
            correction = correction_weight(self.correction, gamma, self.number, blocks)
        gamma = 1.0 if refresh else gamma
        before, after = self.formula(old, seen, clipped, previous, gamma, correction)
        if absent is not None:
            before, after = where(absent, old, before), where(absent, old, after)
        if statistics is not None and pooled is not None:
            visited: Any = True
            if absent is not None:
                visited, fresh = came, where(absent, statistics.latest, fresh)
            if repeated is not False:
                first = ~repeated if isinstance(repeated, Tensor) else not repeated
                visited = first & visited
            share = pooled.values / (self.number * (1 if old.ndim == 1 else old.shape[1]))
            statistics, pooled = statistics.after(
                pooled, fresh, old, visited, gamma, after, share, self.gamma is None
            )
        return Visit(before, after, clipped, statistics, pooled)


def largest_square_root(like: Array) -> float:
    """The largest number whose square is small enough for sums, in the precision of an array."""
    xp: Any = torch if isinstance(like, Tensor) else np
    return float(xp.finfo(like.dtype).max) ** 0.5 / 1000


def _second_largest(values: Array) -> Number:
    """The second largest of some values, 0 if there is one alone."""
    flat = values.reshape(-1)
    if flat.shape[0] < 2:
        return 0 * flat.sum()
    ordered = flat.sort().values if isinstance(flat, Tensor) else np.partition(flat, -2)
    return ordered[-2]
