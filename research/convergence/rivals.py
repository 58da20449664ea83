"""Rivals of another shape: OOA, SSG, Liu and Xu, and the proximal Lagrangians OSS and ICPPAC."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fcco.constraints import DualRule
from fcco.terms.group_weights import mirror_ascent
from fcco.tracker import track

from .problem import Batch, Problem
from .single import Tracking
from .slopes import Slopes, Values

__all__ = ["Lagrangian", "Online", "Spider", "Switching"]


class Online:
    """OOA on CVaR: mirror ascent on the group weights p, then descent on w with the new p.

    Args:
        problem, h, seeds: the runs.
        geometry: the mirror map of the weights, `"kl"` or `"euclidean"`.
    """

    def __init__(
        self, problem: Problem, h: Values, seeds: int, geometry: Literal["kl", "euclidean"]
    ) -> None:
        self.problem, self.h = problem, h
        self.geometry: Literal["kl", "euclidean"] = geometry
        self.cap = 1 / (problem.ratio * problem.total)
        self.w = problem.start.expand(seeds, len(h["lr"]), -1).clone()
        self.p = self.w.new_full((*self.w.shape[:-1], problem.total), 1 / problem.total)
        self.v: Tensor | None = None

    @property
    def point(self) -> Tensor:
        """The iterate that is measured."""
        return self.w

    def warm_up(self, batch: Batch) -> None:
        """Nothing to start: the weights are uniform."""

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


class Switching:
    """SSG: a step on the objective where the largest constraint seems met, else on that one."""

    def __init__(self, problem: Problem, h: Values, seeds: int) -> None:
        self.problem, self.h = problem, h
        self.w = problem.start.expand(seeds, len(h["lr"]), -1).clone()
        self.feasible = self.w

    @property
    def point(self) -> Tensor:
        """The last iterate that seemed feasible: the method's output is drawn from those."""
        return self.feasible

    def warm_up(self, batch: Batch) -> None:
        """Nothing to start."""

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


class Lagrangian:
    """OSS and ICPPAC: primal-dual steps on a proximal Lagrangian, in rounds that end at averages.

    Args:
        problem, h, seeds: the runs; `lr` is the step, `proximal` c, `round_steps` T.
        rules: the library's dual rule for each length T of a round.
    """

    def __init__(self, problem: Problem, h: Values, seeds: int, rules: dict[int, DualRule]) -> None:
        self.problem, self.h, self.rules = problem, h, rules
        self.w = problem.start.expand(seeds, len(h["lr"]), -1).clone()
        self.x = self.previous = self.total = self.w
        self.y = self.w.new_zeros(*self.w.shape[:-1], problem.total)
        self.before = self.y
        self.inside = torch.zeros_like(h["lr"])  # t within the round
        self.follows = next(iter(rules.values())).follows_step
        self.keeps = next(iter(rules.values())).warm_start

    @property
    def point(self) -> Tensor:
        """The anchor: the output of the last round."""
        return self.w

    def warm_up(self, batch: Batch) -> None:
        """Nothing to start: y = 0."""

    def step(self, batch: Batch, other: Batch) -> None:
        """One inner step; with ConEx the first batch is the dual one and the second the primal."""
        h, c = self.h, self.h["proximal"]
        begins = self.inside == 0
        self.total = torch.where(begins, torch.zeros_like(self.total), self.total)
        if not self.keeps:
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
            factor = torch.where(self.h["round_steps"] == t, rule.step(0, t), factor)
        return factor

    def _ascend(self, now: Tensor, begins: Tensor) -> None:
        before = torch.where(begins, now, self.before)
        y = self.y
        for t, rule in self.rules.items():
            mine = self.h["round_steps"] == t
            y = torch.where(mine, rule.dual(self.y, now, before, 0, t), y)
        self.y, self.before = y, now
