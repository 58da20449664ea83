r"""How far running averages are from what they average: noise and lag, from the batches alone.

A block that is visited again shows two things. Its batch value differs from the last one, by noise
and a little motion; and it differs from the running average u, by noise and all the motion that u
has not followed yet. With noise of variance :math:`\sigma^2` in a batch value, a g_i that moves by
steps of variance q between visits, and weight :math:`\gamma` of the new value,

.. math::
    D = \mathbb E(\text{fresh}_t - \text{fresh}_{t-1})^2 = 2\sigma^2 + q, \qquad
    V = \mathbb E(\text{fresh}_t - u_t)^2 = \frac{2\sigma^2 + q/\gamma}{2-\gamma}.

Two equations for two unknowns. The error of u after the visit, and the weight that makes it
smallest (the gain of a Kalman filter), follow:

.. math::
    \mathbb E(u-g)^2 = \frac{\gamma\sigma^2 + q(1-\gamma)^2/\gamma}{2-\gamma}, \qquad
    \gamma^2\sigma^2 = (1-\gamma)\,q.

At :math:`\gamma = 1`, V is D whatever the unknowns are: all of it then counts as noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._state import KeepsPrecision

__all__ = [
    "BlockStatistics",
    "ErrorEstimate",
    "PooledStatistics",
    "best_gamma",
    "new_value_weight",
    "noise_and_drift",
    "standard_errors",
]

HORIZON = 100
"""Visits of a block that its own statistics look back."""

POOLED_HORIZON = 50
"""Steps that the statistics of all blocks together look back."""

GAMMA_RANGE = (0.05, 0.95)
"""What `best_gamma` is kept in. Below, u would hardly notice that the drift has grown again; above,
noise and drift can hardly be told apart."""

CLIP, EARLY = 100.0, 10
"""A square that enters D and V counts up to 100 V, or 10^4 while V is the mean of few numbers,
unless there was one as large before: in the same batch (then the model has moved), or in the same
block (then it is a rare event)."""

FAR, NEAR = 900.0, 1e-5
"""A value whose squared distance to u is beyond 900 V counts as one that is just so far. If two in
a row are and fit each other, the level has changed. And a block starts anew where its third value
fits one of the first two 300 times better than their mean: the other was an outlier."""

Numbers = Any
"""A float, a tensor or a NumPy array: the formulas below are arithmetic that all of them know. On
the CPU they run in NumPy, where an operation on a short vector takes a third of torch's time, and
in Python where there is only one number."""


def _clip(value: Numbers, low: Numbers, high: Numbers) -> Numbers:
    return min(max(value, low), high) if isinstance(value, float) else value.clip(low, high)


def noise_and_drift(
    difference: Numbers, innovation: Numbers, gamma: Numbers
) -> tuple[Numbers, Numbers]:
    r"""Solve for :math:`\sigma^2` and q, both at least 0; pure.

    Args:
        difference: D.
        innovation: V.
        gamma: weight of the new value. Close to 1, where V is D in any case, q is 0.

    Example:
        >>> noise, drift, gamma = 4.0, 1.0, 0.2
        >>> innovation = (2 * noise + drift / gamma) / (2 - gamma)
        >>> found = noise_and_drift(2 * noise + drift, innovation, gamma)
        >>> [round(each, 4) for each in found]
        [4.0, 1.0]
    """
    told_apart = gamma * (gamma <= GAMMA_RANGE[1])
    excess = innovation * (2 - gamma) - difference
    drift = _clip(excess * (told_apart / (1 - told_apart)), 0 * difference, difference)
    return (difference - drift) / 2, drift


def standard_errors(
    difference: Numbers, innovation: Numbers, gamma: Numbers
) -> tuple[Numbers, Numbers]:
    """The standard errors of u after a visit, by noise and by lag, from D and V; pure."""
    noise, drift = noise_and_drift(difference, innovation, gamma)
    by_lag = drift * ((1 - gamma) ** 2 / (gamma * (2 - gamma)))
    return (noise * gamma / (2 - gamma)) ** 0.5, by_lag**0.5


def best_gamma(noise: Numbers, drift: Numbers) -> Numbers:
    """The weight of the new value with the smallest error; pure.

    Example:
        >>> gamma = best_gamma(2.0, 1.0)
        >>> gamma, gamma**2 * 2.0 - (1 - gamma) * 1.0
        (0.5, 0.0)
    """
    ratio = (drift + 1e-30) / (noise + 1e-30)
    # The stable form of (sqrt(ratio^2 + 4 ratio) - ratio) / 2.
    return 2 / (1 + (1 + 4 / ratio) ** 0.5)


def new_value_weight(visits: Tensor, gain: float | Tensor) -> Tensor:
    """The weight of the new value with `gamma="auto"`, by blocks; pure.

    A block's first values are averaged: the k-th has weight 1/k until that is below the gain.
    """
    return (visits + 1).reciprocal().clip(min=gain)  # type: ignore[arg-type]


def largest(like: Tensor) -> float:
    """The largest number whose square is small enough for sums, in the precision of statistics."""
    return torch.finfo(torch.promote_types(like.dtype, torch.float32)).max ** 0.5 / 1000


def per_row(vector: Numbers, like: Numbers) -> Numbers:
    """A vector (R,) shaped so that it multiplies the rows of `like`, (R,) or (R, d1)."""
    return vector if like.ndim == 1 else vector[:, None]


def second_largest(values: Numbers) -> Numbers:
    """The second largest of some values, 0 if there is one alone; pure."""
    flat = values.reshape(-1)
    if flat.shape[0] < 2:
        return 0 * flat.sum()
    ordered = flat.sort().values if isinstance(flat, Tensor) else np.partition(flat, -2)
    return ordered[-2]


class BlockStatistics(NamedTuple):
    """What is known of some blocks.

    Attributes:
        latest: the last batch value of each block, (B,) or (B, d1).
        difference: D of each block.
        innovation: V of each block.
        visits: how often a block was visited, counted up to `HORIZON`; D and V need two.
        largest: the largest square of each block that was too large to count in full.
    """

    latest: Numbers
    difference: Numbers
    innovation: Numbers
    visits: Numbers
    largest: Numbers

    def after(
        self, fresh: Numbers, old: Numbers, pooled: PooledStatistics, came: Numbers = True
    ) -> tuple[BlockStatistics, Sample]:
        """The statistics after a visit, and what it adds to those of all blocks; pure.

        One square counts up to 100 V; a block whose level has changed starts anew.

        Args:
            fresh: batch values; those of a block that did not come must be `latest`.
            old: u before the visit; on a first visit it does not count.
            pooled: what is known of all blocks.
            came: which blocks came; True for all.
        """
        again = (self.visits > 0) * came  # the first visit has nothing to compare with
        weight = again / (self.visits + (self.visits == 0))
        visits, extreme = self.visits + (self.visits < HORIZON) * came, self.largest
        weight, again = per_row(weight, fresh), per_row(again, fresh)
        moved, missed = (fresh - self.latest) ** 2, (fresh - old) ** 2
        beyond = missed > CLIP * pooled.innovation
        if (
            isinstance(moved, Tensor)  # to look would make the host wait
            or pooled.steps < 3
            or beyond.any()
            or moved.max() > CLIP * pooled.innovation
        ):
            clip = CLIP * (1 + 99 * (pooled.steps * again.sum() < EARLY))
            where: Any = torch.where if isinstance(moved, Tensor) else np.where
            scale, before = self.innovation.clip(pooled.innovation), (self.latest - old) ** 2
            far = (missed > FAR * scale) & (before > FAR * scale) & (scale > 0)
            # u is then the mean of two: of the first and this value, if those fit each other.
            fits = (moved < NEAR * missed) | ((fresh + self.latest - 2 * old) ** 2 < NEAR * missed)
            third = per_row(self.visits == 2, fresh) & fits & (before > 0)
            third &= beyond | (pooled.steps < 3)
            changed = ((far & (moved < missed / 9)) | third) & (again > 0)
            again = again * ~changed
            # As if it had never been visited: the next value takes the place of u.
            visits = visits * ~(changed.any(1) if changed.ndim > 1 else changed)
            known, bound = scale > 0, clip * scale
            most = where(known, bound.clip(second_largest(moved * again)), math.inf)
            moved = where(moved < most, moved, most)
            most = where(bound < extreme, extreme, bound).clip(second_largest(missed * again))
            most = where(known, most, math.inf)
            extreme = where((missed > most) & (again > 0), missed, extreme)
            missed = where(missed < most, missed, most)
        after = BlockStatistics(
            latest=fresh,
            difference=self.difference + weight * (moved - self.difference),
            innovation=self.innovation + weight * (missed - self.innovation),
            visits=visits,
            largest=extreme,
        )
        number = (again + 0 * moved).sum()
        return after, Sample((moved * again).sum(), (missed * again).sum(), number)


class Sample(NamedTuple):
    """What one step says of all blocks together: sums over the blocks that came again."""

    moved: Numbers  # of (fresh_t - fresh_{t-1})^2
    missed: Numbers  # of (fresh_t - u_t)^2
    number: Numbers  # of numbers in these sums


class PooledStatistics(NamedTuple):
    """What is known of all blocks together.

    Attributes:
        difference: D over the last steps.
        innovation: V over the last steps.
        steps: the number of these steps, counted up to `POOLED_HORIZON`.
        gain: the weight of the new value that was best so far.
    """

    difference: Numbers
    innovation: Numbers
    steps: Numbers
    gain: Numbers

    def after(self, sample: Sample, automatic: bool) -> PooledStatistics:
        """The statistics after a step; pure.

        Args:
            sample: of the step.
            automatic: whether u is averaged with the gain, which then moves.
        """
        difference, innovation, steps, gain = self
        some = (sample.number > 0) * 1.0
        number, steps = sample.number + (1 - some), steps + some * (steps < POOLED_HORIZON)
        weight = some / (steps + (steps == 0))
        # Of two first samples the smaller is taken where they do not fit: the other is an outlier.
        misfit = (steps == 2) * (innovation * number > 100 * sample.missed) * some
        difference = difference + misfit * (sample.moved / number - difference)
        innovation = innovation + misfit * (sample.missed / number - innovation)
        difference = difference + weight * (sample.moved / number - difference)
        innovation = innovation + weight * (sample.missed / number - innovation)
        if automatic:
            best = best_gamma(*noise_and_drift(difference, innovation, gain))
            gain = gain + (_clip(best, *GAMMA_RANGE) - gain) * some / POOLED_HORIZON
        return PooledStatistics(difference, innovation, steps, gain)


class ErrorEstimate(KeepsPrecision):
    """The statistics D and V, of each block and of all together, as running averages over visits.

    Args:
        like: the table u, whose shape and device they take, and its precision if that is single or
            double.

    Attributes:
        latest, difference, innovation, visits, largest: of each block, see `BlockStatistics`.
        pooled: of all blocks together, see `PooledStatistics`.
    """

    latest: Tensor
    difference: Tensor
    innovation: Tensor
    visits: Tensor
    largest: Tensor
    pooled: Tensor
    never_negative = ("difference", "innovation", "visits", "largest", "pooled")

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        like = like.to(torch.promote_types(like.dtype, torch.float32))
        for name in ("latest", "difference", "innovation", "largest"):
            self.register_buffer(name, torch.zeros_like(like))
        self.register_buffer("visits", like.new_zeros(len(like)))
        self.register_buffer("pooled", like.new_tensor([0.0, 0.0, 0.0, 0.5]))

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if no training can have led to this state."""
        super().check_state(state)
        gain = state["pooled"][3].item() if "pooled" in state else GAMMA_RANGE[0]
        if not GAMMA_RANGE[0] - 1e-6 <= gain <= GAMMA_RANGE[1] + 1e-6:  # rounding
            raise ValueError(f"`pooled` has a gain outside {GAMMA_RANGE}: {gain}.")

    def hold(self, index: Tensor, fresh: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """Batch values for the statistics, and to track: one moves u by a bounded amount.

        Args:
            index: the blocks.
            fresh: their batch values.
            old: their u before the visit.
        """
        state: dict[str, Any] = self._buffers
        if fresh.device.type == "cpu":
            _, typical, steps, _ = state["pooled"].tolist()
            near = (FAR * typical) ** 0.5
            if steps == 0 or len(fresh) == 0 or torch.dist(fresh, old, math.inf) <= near:
                return fresh, fresh
        names = ("latest", "innovation", "largest", "visits")
        latest, own, extreme, visits = (state[name][index] for name in names)
        scale, innovation = torch.maximum(own, state["pooled"][1]).sqrt(), fresh - old
        limit = (FAR**0.5 * scale).maximum(extreme.sqrt()).maximum(second_largest(abs(innovation)))
        # A first value is what it is; so is one after another that was as far.
        free = (per_row(visits, own) == 0) | (scale == 0) | (abs(latest - old) > limit)
        held = torch.where(free, fresh, old + innovation.clip(-limit, limit)).to(fresh.dtype)
        numbers = min(largest(latest), torch.finfo(fresh.dtype).max)
        return fresh.clip(-numbers, numbers), held

    def add(
        self,
        index: Tensor,
        fresh: Tensor,
        old: Tensor,
        gamma: float | None,
        came: Tensor | None = None,
    ) -> None:
        """Take a visit into account.

        Args:
            index: the blocks.
            fresh: their batch values.
            old: their u before the visit; on a first visit it does not count.
            gamma: weight of the new value; None for `gain`, which then moves.
            came: which values count as a visit; None for all.
        """
        if len(index) == 0:
            return
        state: dict[str, Any] = self._buffers
        if fresh.dtype != state["latest"].dtype:
            fresh, old = fresh.to(state["latest"].dtype), old.to(state["latest"].dtype)
        counted: Numbers = True if came is None else came
        at, new, before = index, fresh, old
        on_cpu = index.device.type == "cpu"
        if on_cpu:
            state = {name: buffer.numpy() for name, buffer in state.items()}  # the same memory
            at, new, before = index.numpy(), fresh.numpy(), old.numpy()
            counted = counted if came is None else came.numpy()
        pooled = state["pooled"]
        together = PooledStatistics(*(pooled.tolist() if on_cpu else pooled))
        fields = BlockStatistics._fields
        known = BlockStatistics(*[state[name][at] for name in fields])
        blocks, sample = known.after(new, before, together, counted)
        for name, values in zip(fields, blocks, strict=True):
            state[name][at] = values
        if on_cpu:
            sample = Sample(*map(float, sample))
        statistics = together.after(sample, automatic=gamma is None)
        pooled[0], pooled[1], pooled[2], pooled[3] = statistics

    def restart(self, index: Tensor, values: Tensor) -> None:
        """Count values that were set by hand as the first visit of some blocks.

        Args:
            index: the blocks.
            values: their u.
        """
        self.latest[index] = values.to(self.latest.dtype)
        self.visits[index] = 1

    def weights(self, index: Tensor) -> Tensor:
        """The weight of the new value of some blocks, with `gamma="auto"`."""
        visits, pooled = self._buffers["visits"], self._buffers["pooled"]
        assert visits is not None and pooled is not None
        gain = pooled.tolist()[3] if pooled.device.type == "cpu" else pooled[3]
        return new_value_weight(visits.index_select(0, index), gain)

    @property
    def gain(self) -> Tensor:
        """The weight of the new value that was best so far, which `gamma="auto"` uses."""
        return self.pooled[3]

    def error(self, gamma: float | None) -> Tensor:
        """The standard error of each u; NaN for a block that was not visited twice."""
        weight = self.gain if gamma is None else gamma
        noise, lag = standard_errors(self.difference, self.innovation, weight)
        known = self.visits > 1
        errors = torch.hypot(noise, lag)
        return torch.where(known if errors.dim() == 1 else known.unsqueeze(1), errors, torch.nan)

    def pooled_error(self, gamma: float | None) -> tuple[Numbers, Numbers, Numbers]:
        """The standard errors by noise and by lag of a typical u, and the steps behind them.

        Floats on the CPU; elsewhere tensors, for which nobody has to wait.
        """
        pooled: Any = self._buffers["pooled"]
        if pooled.device.type == "cpu":  # Python's numbers are the fastest
            pooled = pooled.tolist()
        difference, innovation, steps, gain = pooled
        noise, lag = standard_errors(difference, innovation, gain if gamma is None else gamma)
        return noise, lag, steps
