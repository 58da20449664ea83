"""The methods as batched programs, all settings and seeds at once: slopes, single and double loops,
OOA, SSG, Liu and Xu, and the proximal Lagrangians OSS and ICPPAC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fcco.outer import AbstractOuter, CVaR, Hinge, SquaredHinge
from fcco.rules.group_weights import mirror_ascent
from fcco.rules.proximal import proximal_step
from fcco.tracker import track

from .engine import Runs
from .problems import Batch, Problem

Values = dict[str, Tensor]  # hyperparameters by name, each of shape (settings, 1)


@dataclass(frozen=True)
class Elementwise:
    """y_i = f'(u_i), or f_lambda'(u_i) with smoothing."""

    outer: AbstractOuter
    smoothing: Tensor | None

    def read(self, table: Tensor) -> Reading:
        """Everything that depends on the whole table: nothing here."""
        return Reading(self, table, table)

    def of(self, reading: Reading, blocks: Tensor) -> Tensor:
        """The slopes of some blocks."""
        u = reading.table.gather(-1, blocks)
        if self.smoothing is None:
            return self.outer.gradient(u)
        return self.outer.envelope_gradient(u, self.smoothing)


@dataclass(frozen=True)
class Tail:
    """The same for CVaR: y_i = f'(u_i - s), where s is the best threshold of the whole table."""

    ratio: float
    smoothing: Tensor | None

    def read(self, table: Tensor) -> Reading:
        """The threshold of a table; without smoothing the slopes of all blocks."""
        if self.smoothing is None:
            return Reading(self, table, table.shape[-1] * CVaR(self.ratio).gradient(table))
        return Reading(self, table, smoothed_threshold(table, self.ratio, self.smoothing))

    def of(self, reading: Reading, blocks: Tensor) -> Tensor:
        """The slopes of some blocks."""
        if self.smoothing is None:
            return reading.known.gather(-1, blocks)
        u = reading.table.gather(-1, blocks)
        return Hinge(1 / self.ratio).envelope_gradient(u - reading.known, self.smoothing)


Slopes = Elementwise | Tail


@dataclass(frozen=True)
class Reading:
    """A table and what the slopes need to know of all of it, computed once."""

    slopes: Slopes
    table: Tensor
    known: Tensor

    def of(self, blocks: Tensor) -> Tensor:
        """The slopes of some blocks."""
        return self.slopes.of(self, blocks)


def smoothed_threshold(table: Tensor, ratio: float, smoothing: Tensor) -> Tensor:
    r"""The s that minimises s + (1/n) sum_i f_lambda(u_i - s), row by row.

    With s eliminated the weights are p = grad CVaR_{n lambda}(u), the projection of u / (n lambda)
    onto the capped simplex, and p_i = (u_i - s) / (n lambda) wherever 0 < p_i < cap. So s is the
    smallest u_i - n lambda p_i of the blocks with weight (the largest s, where it is not unique).
    """
    step = smoothing * table.shape[-1]
    weights = CVaR(ratio).envelope_gradient(table, step)
    reached = torch.where(weights > 0, table - step * weights, torch.inf)
    return reached.amin(-1, keepdim=True)


def slopes_of(problem: Problem, h: Values, *, smoothed: bool, squared: bool = False) -> Slopes:
    """The slopes that a method uses on a problem; the squared hinge has a weight of its own."""
    smoothing = h["smoothing"] if smoothed else None
    if problem.kind == "cvar":
        return Tail(problem.ratio, smoothing)
    if squared:
        weight: float = h["penalty"]  # type: ignore[assignment]
        return Elementwise(SquaredHinge(weight), None)
    return Elementwise(problem.outer, smoothing)


class Tracking(Runs):
    """Parameters and tracked values of all runs; the part that all tracking methods share."""

    def __init__(self, problem: Problem, h: Values, slopes: Slopes, seeds: int) -> None:
        super().__init__(problem, h, seeds)
        self.slopes = slopes
        self.previous = self.w
        self.u = self.w.new_zeros(0)

    def warm_up(self, batch: Batch) -> None:
        """Start u from one batch of every block."""
        self.u = self.problem.values(self.w, batch)

    def tracked(self, at: Tensor, batch: Batch, blocks: Tensor) -> Tensor:
        """The table after the update of the drawn blocks."""
        fresh, old = self.problem.values(at, batch), self.u.gather(-1, blocks)
        correction = self.h.get("correction")
        before = None if correction is None else self.problem.values(self.previous, batch)
        weight = 0.0 if correction is None else correction
        _, after = track(old, None, fresh, before, self.h["gamma"], weight)
        return self.u.scatter(-1, blocks, after)

    def gradient(self, at: Tensor, batch: Batch, slope: Tensor) -> Tensor:
        """G = grad g_0 + (1/B) sum_i y_i grad g_i."""
        pulled = self.problem.pull(at, batch, slope / slope.shape[-1])
        base = self.problem.base(at)
        return pulled if base is None else pulled + base


class SingleLoop(Tracking):
    """w, u, v of A0: read the old or the new u, then no momentum, an average, or STORM.

    Args:
        problem, h, slopes, seeds: the runs.
        momentum: `"none"`, `"average"` (weight `beta`) or `"storm"`.
        fresh: read the new u, with the gradient of a second batch (ALEXR).
    """

    def __init__(
        self,
        problem: Problem,
        h: Values,
        slopes: Slopes,
        seeds: int,
        momentum: str = "none",
        fresh: bool = False,
    ) -> None:
        super().__init__(problem, h, slopes, seeds)
        self.momentum, self.fresh = momentum, fresh
        self.v: Tensor | None = None
        self.older: Reading | None = None

    def step(self, batch: Batch, other: Batch) -> None:
        """One step; `other` is an independent batch of the same blocks, used by ALEXR only."""
        blocks = batch.blocks.unsqueeze(1).expand(-1, self.w.shape[1], -1)
        table = self.tracked(self.w, batch, blocks)
        # The threshold of CVaR, too, is that of the table which the gradient reads.
        reading = self.slopes.read(table if self.fresh else self.u)
        gradient = self.gradient(self.w, other if self.fresh else batch, reading.of(blocks))
        moved = self.w - self.h["lr"] * self._direction(gradient, batch, blocks)
        self.previous, self.w = self.w, self.problem.project(moved)
        self.older, self.u = reading, table

    def _direction(self, gradient: Tensor, batch: Batch, blocks: Tensor) -> Tensor:
        if self.momentum == "none":
            return gradient
        if self.v is None or self.older is None:
            self.v = gradient
        elif self.momentum == "average":
            self.v = torch.lerp(self.v, gradient, self.h["beta"])
        else:
            past = self.gradient(self.previous, batch, self.older.of(blocks))
            self.v = gradient + (1 - self.h["beta"]) * (self.v - past)
        return self.v


class DoubleLoop(Tracking):
    """ALEXR2: inner steps on z around the anchor w, and after `inner_steps` of them one on w."""

    def __init__(self, problem: Problem, h: Values, slopes: Slopes, seeds: int) -> None:
        super().__init__(problem, h, slopes, seeds)
        self.z = self.w
        self.v = torch.zeros_like(self.w)
        self.count = 0

    def step(self, batch: Batch, other: Batch) -> None:
        """One inner step, the outer one after it where a round ends."""
        h, blocks = self.h, batch.blocks.unsqueeze(1).expand(-1, self.w.shape[1], -1)
        table = self.tracked(self.z, batch, blocks)
        gradient = self.gradient(self.z, other, self.slopes.read(table).of(blocks))
        z = proximal_step(self.z, self.w, gradient, h["eta"], h["nu"])
        self.previous, self.z, self.u = self.z, self.problem.project(z), table
        self.count += 1
        ends = self.count % h["inner_steps"] == 0
        if bool(ends.any()):
            self._end_rounds(ends)

    def _end_rounds(self, ends: Tensor) -> None:
        h = self.h
        pull = (self.w - self.z) / h["nu"]
        first = h["inner_steps"] == self.count
        v = torch.where(first, pull, torch.lerp(self.v, pull, h["beta"]))
        w = self.problem.project(self.w - h["lr"] * v)
        self.v = torch.where(ends, v, self.v)
        self.w = torch.where(ends, w, self.w)
        # A round starts at z_{-1} = z_0 = w.
        self.z = torch.where(ends, self.w, self.z)
        self.previous = torch.where(ends, self.w, self.previous)


class Online(Runs):
    """OOA on CVaR: mirror ascent on the group weights p, then descent on w with the new p.

    Args:
        problem, h, seeds: the runs.
        geometry: the mirror map of the weights, `"kl"` or `"euclidean"`.
    """

    def __init__(
        self, problem: Problem, h: Values, seeds: int, geometry: Literal["kl", "euclidean"]
    ) -> None:
        super().__init__(problem, h, seeds)
        self.geometry: Literal["kl", "euclidean"] = geometry
        self.cap = 1 / (problem.ratio * problem.total)
        self.p = self.w.new_full((*self.w.shape[:-1], problem.total), 1 / problem.total)
        self.v: Tensor | None = None

    def step(self, batch: Batch, other: Batch) -> None:
        """One step of each player; the scale n/B1 makes the sampled vectors unbiased."""
        blocks = batch.blocks.unsqueeze(1).expand(-1, self.w.shape[1], -1)
        scale = self.problem.total / blocks.shape[-1]
        values = self.problem.values(self.w, batch) * scale
        ascent = torch.zeros_like(self.p).scatter(-1, blocks, self.h["weight_lr"] * values)
        self.p = mirror_ascent(self.p, ascent, 1.0, self.cap, self.geometry)
        gradient = self.problem.pull(self.w, batch, self.p.gather(-1, blocks) * scale)
        base = self.problem.base(self.w)
        gradient = gradient if base is None else gradient + base
        self.v = gradient if self.v is None else torch.lerp(self.v, gradient, self.h["beta"])
        self.w = self.problem.project(self.w - self.h["lr"] * self.v)


def averaged(problem: Problem, w: Tensor, batch: Batch, number: Tensor) -> Tensor:
    """All g_i(w) with the noise of a mean of `number` samples, one number per setting."""
    exact = problem.exact(w)
    return exact + (problem.values(w, batch) - exact) * number.rsqrt()


class Switching(Runs):
    """SSG: a step on the objective where the largest constraint seems met, else on that one."""

    def __init__(self, problem: Problem, h: Values, seeds: int) -> None:
        super().__init__(problem, h, seeds)
        self.feasible = self.w

    @property
    def point(self) -> Tensor:
        """The last iterate that seemed feasible: the method's output is drawn from those."""
        return self.feasible

    def step(self, batch: Batch, other: Batch) -> None:
        """One step; values from one batch of all constraints, the gradient from another."""
        h = self.h
        worst, which = averaged(self.problem, self.w, batch, h["value_samples"]).max(-1, True)
        met = worst <= h["tolerance"]
        self.feasible = torch.where(met, self.w, self.feasible)
        chosen = torch.zeros(*self.w.shape[:-1], self.problem.total, dtype=self.w.dtype)
        constraint = self.problem.pull(self.w, other, chosen.scatter(-1, which, 1.0))
        polyak = worst / constraint.square().sum(-1, keepdim=True).clamp(min=1e-12)
        length = torch.where(h["polyak"] > 0, polyak, h["constraint_lr"])
        base = self.problem.base(self.w)
        assert base is not None
        step = torch.where(met, h["lr"] * base, length * constraint)
        self.w = self.problem.project(self.w - step)


class Spider(Tracking):
    """Liu and Xu: recursive values of all constraints, refreshed every `refresh` steps."""

    def __init__(self, problem: Problem, h: Values, slopes: Slopes, seeds: int) -> None:
        super().__init__(problem, h, slopes, seeds)
        self.count = 0

    def step(self, batch: Batch, other: Batch) -> None:
        """One step; the values from one batch of all constraints, the gradient from another."""
        h, blocks = self.h, batch.blocks.unsqueeze(1).expand(-1, self.w.shape[1], -1)
        fresh = averaged(self.problem, self.w, batch, h["value_samples"])
        before = averaged(self.problem, self.previous, batch, h["value_samples"])
        _, moved = track(self.u, None, fresh, before, 0.0, 1.0)
        anew = averaged(self.problem, self.w, batch, h["refresh_samples"])
        self.u = torch.where(self.count % h["refresh"] == 0, anew, moved)
        gradient = self.gradient(self.w, other, self.slopes.read(self.u).of(blocks))
        self.previous = self.w
        self.w = self.problem.project(self.w - h["lr"] * gradient)
        self.count += 1


class Lagrangian(Runs):
    """OSS and ICPPAC: primal-dual steps on a proximal Lagrangian, in rounds that end at averages.

    Args:
        problem, h, seeds: the runs; `lr` is the step, `proximal` c, `round_steps` T.
        rules: the library's dual rule for each length T of a round.
    """

    def __init__(self, problem: Problem, h: Values, seeds: int, rules: dict[int, Any]) -> None:
        super().__init__(problem, h, seeds)
        self.rules = rules
        self.x = self.previous = self.total = self.w
        self.y = self.w.new_zeros(*self.w.shape[:-1], problem.total)
        self.before = self.y
        self.inside = torch.zeros_like(h["lr"])  # t within the round
        self.follows = next(iter(rules.values())).follows_step

    @property
    def point(self) -> Tensor:
        """The anchor: the output of the last round."""
        return self.w

    def step(self, batch: Batch, other: Batch) -> None:
        """One inner step; with ConEx the first batch is the dual one and the second the primal."""
        h, c = self.h, self.h["proximal"]
        begins = self.inside == 0
        self.total = torch.where(begins, torch.zeros_like(self.total), self.total)
        if self.follows:
            self.y = torch.where(begins, torch.zeros_like(self.y), self.y)
        if not self.follows:
            self._ascend(self._line(self.previous, self.x, batch), begins)
        primal = batch if self.follows else other
        base = self.problem.base(self.x)
        assert base is not None
        strength = 2 * c * (1 + self.y.sum(-1, keepdim=True))
        gradient = base + self.problem.pull(self.x, primal, self.y) + strength * (self.x - self.w)
        moved = self.problem.project(self.x - h["lr"] * self._steps() * gradient)
        if self.follows:
            self._ascend(self._line(self.x, moved, batch), begins)
        self.previous, self.x = self.x, moved
        self.total = self.total + moved
        self.inside = self.inside + 1
        ends = self.inside == h["round_steps"]
        if bool(ends.any()):
            self.w = torch.where(ends, self.total / h["round_steps"], self.w)
            self.x = torch.where(ends, self.w, self.x)
            self.previous = torch.where(ends, self.w, self.previous)
            self.inside = torch.where(ends, 0.0, self.inside)

    def _line(self, at: Tensor, to: Tensor, batch: Batch) -> Tensor:
        """The regularised constraints at one point, continued as straight lines to another."""
        move, away = to - at, at - self.w
        proximal = (away * (away + 2 * move)).sum(-1, keepdim=True) * self.h["proximal"]
        return self.problem.values(at, batch) + self.problem.along(at, batch, move) + proximal

    def _steps(self) -> Tensor:
        factor = torch.ones_like(self.h["lr"])
        for t, rule in self.rules.items():
            factor = torch.where(self.h["round_steps"] == t, rule.factor, factor)
        return factor

    def _ascend(self, now: Tensor, begins: Tensor) -> None:
        before = torch.where(begins, now, self.before)
        y = self.y
        for t, rule in self.rules.items():
            mine = self.h["round_steps"] == t
            y = torch.where(mine, rule.dual(self.y, now, before), y)
        self.y, self.before = y, now
