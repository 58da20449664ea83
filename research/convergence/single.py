"""Single-loop methods as one batched program: SONEX, SONX, SOX, MSVR, ALEXR are its settings."""

from __future__ import annotations

import torch
from torch import Tensor

from fcco.optim import proximal_step
from fcco.tracker import track

from .problem import Batch, Problem
from .slopes import Reading, Slopes, Values

__all__ = ["DoubleLoop", "SingleLoop"]


class Tracking:
    """Parameters and tracked values of all runs; the part that all tracking methods share."""

    def __init__(self, problem: Problem, h: Values, slopes: Slopes, seeds: int) -> None:
        self.problem, self.h, self.slopes = problem, h, slopes
        self.w = problem.start.expand(seeds, len(h["lr"]), -1).clone()
        self.previous = self.w
        self.u = self.w.new_zeros(0)

    @property
    def point(self) -> Tensor:
        """The iterate that is measured."""
        return self.w

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
