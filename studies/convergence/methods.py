"""The methods as batched programs, all settings and seeds at once: what each is made of, where it
is legal, and what it tunes.

A parameter is a tensor of shape (seeds, settings, d), a table of tracked values one of shape
(seeds, settings, n). `fcco.fleet` would take the objectives themselves, but 38 times as long.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fcco.methods import Icppac
from fcco.outer import CVaR, Hinge, SquaredHinge
from fcco.rules.proximal import proximal_step
from fcco.tracker import theory_correction, track

from .problems import Batch, Problem

Values = dict[str, Tensor]  # hyperparameters by name, each of shape (settings, 1)


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


class Runs(abc.ABC):
    """A method at work on all its runs: seeds, and hyperparameters `h` of shape (settings, 1)."""

    def __init__(self, problem: Problem, h: Values, seeds: int) -> None:
        self.problem, self.h = problem, h
        self.w = problem.start.expand(seeds, len(h["lr"]), -1).clone()  # what is measured

    def warm_up(self, batch: Batch) -> None:  # noqa: B027
        """Start from one batch of every block, where there is something to start."""

    @abc.abstractmethod
    def step(self, batch: Batch, other: Batch) -> None:
        """One step; `other` is an independent batch of the same blocks."""

    def blocks(self, batch: Batch) -> Tensor:
        """Those of a batch, for every setting."""
        return batch.blocks.unsqueeze(1).expand(-1, self.w.shape[1], -1)

    def gradient(self, at: Tensor, batch: Batch, weights: Tensor) -> Tensor:
        """The gradient grad g_0 + sum_i weights_i grad g_i."""
        pulled, base = self.problem.pull(at, batch, weights), self.problem.base(at)
        return pulled if base is None else pulled + base


class Tracking(Runs):
    """Parameters and tracked values of all runs.

    With `smoothing` the outer function is its envelope, with `penalty` it is the squared hinge.
    """

    def __init__(self, problem: Problem, h: Values, seeds: int) -> None:
        super().__init__(problem, h, seeds)
        weight: Any = h.get("penalty")
        self.outer = problem.outer if weight is None else SquaredHinge(weight)
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

    def slopes(self, table: Tensor, blocks: Tensor) -> Tensor:
        """y_i = f'(u_i), or f_lambda'(u_i) with smoothing, of the drawn blocks.

        For CVaR f'(u_i - s), where s is the best threshold of the whole table.
        """
        smoothing, ratio = self.h.get("smoothing"), self.problem.ratio
        drawn = table.gather(-1, blocks)
        if self.problem.kind != "cvar":
            if smoothing is None:
                return self.outer.gradient(drawn)
            return self.outer.envelope_gradient(drawn, smoothing)
        if smoothing is None:
            return (table.shape[-1] * CVaR(ratio).gradient(table)).gather(-1, blocks)
        threshold = smoothed_threshold(table, ratio, smoothing)
        return Hinge(1 / ratio).envelope_gradient(drawn - threshold, smoothing)

    def estimate(self, at: Tensor, batch: Batch, table: Tensor, blocks: Tensor) -> Tensor:
        """G = grad g_0 + (1/B) sum_i y_i grad g_i."""
        return self.gradient(at, batch, self.slopes(table, blocks) / blocks.shape[-1])


class SingleLoop(Tracking):
    """w, u, v of A0: read the old u, average with weight `beta` where there is one."""

    def __init__(self, problem: Problem, h: Values, seeds: int) -> None:
        super().__init__(problem, h, seeds)
        self.v: Tensor | None = None

    def step(self, batch: Batch, other: Batch) -> None:
        blocks = self.blocks(batch)
        table = self.tracked(self.w, batch, blocks)
        # The threshold of CVaR, too, is that of the table which the gradient reads.
        gradient = self.estimate(self.w, batch, self.u, blocks)
        if "beta" in self.h:
            first = self.v is None
            self.v = gradient = gradient if first else torch.lerp(self.v, gradient, self.h["beta"])
        moved = self.w - self.h["lr"] * gradient
        self.previous, self.w, self.u = self.w, moved, table


class DoubleLoop(Tracking):
    """ALEXR2: inner steps on z around the anchor w, and after `inner_steps` of them one on w."""

    def __init__(self, problem: Problem, h: Values, seeds: int) -> None:
        # The outer step is nu, so that without momentum w moves to the end of the inner loop.
        super().__init__(problem, {**h, "lr": h["nu"]}, seeds)
        self.z = self.w
        self.v = torch.zeros_like(self.w)
        self.count = 0

    def step(self, batch: Batch, other: Batch) -> None:
        """One inner step, the outer one after it where a round ends."""
        h, blocks = self.h, self.blocks(batch)
        table = self.tracked(self.z, batch, blocks)
        gradient = self.estimate(self.z, other, table, blocks)
        z = proximal_step(self.z, self.w, gradient, h["eta"], h["nu"])
        self.previous, self.z, self.u = self.z, z, table
        self.count += 1
        ends = self.count % h["inner_steps"] == 0
        if bool(ends.any()):
            self._end_rounds(ends)

    def _end_rounds(self, ends: Tensor) -> None:
        h = self.h
        pull = (self.w - self.z) / h["nu"]
        first = h["inner_steps"] == self.count
        v = torch.where(first, pull, torch.lerp(self.v, pull, h["beta"]))
        w = self.w - h["lr"] * v
        self.v = torch.where(ends, v, self.v)
        self.w = torch.where(ends, w, self.w)
        # A round starts at z_{-1} = z_0 = w.
        self.z = torch.where(ends, self.w, self.z)
        self.previous = torch.where(ends, self.w, self.previous)


class Lagrangian(Runs):
    """ICPPAC: primal-dual steps on a proximal Lagrangian, in rounds that end at averages.

    `lr` is the step, `proximal` c, `round_steps` T; w is the anchor, the output of the last round.
    """

    def __init__(self, problem: Problem, h: Values, seeds: int) -> None:
        super().__init__(problem, h, seeds)
        tau: Any = h["tau"]
        # The library's dual rule for each length of a round.
        self.rules = {
            t: Icppac(proximal=1.0, inner_steps=t, tau=tau)
            for t in map(int, h["round_steps"].unique().tolist())
        }
        self.x = self.previous = self.total = self.w
        self.y = self.w.new_zeros(*self.w.shape[:-1], problem.total)
        self.before = self.y
        self.inside = torch.zeros_like(h["lr"])  # t within the round

    def step(self, batch: Batch, other: Batch) -> None:
        """One inner step; the first batch is the dual one and the second the primal."""
        h, c = self.h, self.h["proximal"]
        begins = self.inside == 0
        self.total = torch.where(begins, torch.zeros_like(self.total), self.total)
        self._ascend(self._line(self.previous, self.x, batch), begins)
        strength = 2 * c * (1 + self.y.sum(-1, keepdim=True))
        gradient = self.gradient(self.x, other, self.y) + strength * (self.x - self.w)
        moved = self.x - h["lr"] * gradient
        self.previous, self.x = self.x, moved
        self.total, self.inside = self.total + moved, self.inside + 1
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

    def _ascend(self, now: Tensor, begins: Tensor) -> None:
        before, y = torch.where(begins, now, self.before), self.y
        for t, rule in self.rules.items():
            mine = self.h["round_steps"] == t
            y = torch.where(mine, rule.dual(self.y, now, before), y)
        self.y, self.before = y, now


@dataclass(frozen=True)
class Entry:
    """One method.

    Args:
        name: as in the tables.
        runs: the batched program of (problem, hyperparameters, seeds).
        tunes: the hyperparameters, searched over the ranges of `tuning`; of a squared hinge the
            weight as the loop `gain`, of an envelope the smoothing as its `width`.
        kinds: the kinds of problem it can solve.
        scale: factor of the range of step sizes; 10 where no penalty multiplies the gradient.
        batches: independent batches per step.
        all_blocks: it cannot sample blocks.
        starts: it starts a table of values from B2 samples of every block.
    """

    name: str
    runs: Callable[[Problem, Values, int], Runs]
    tunes: tuple[str, ...]
    kinds: tuple[str, ...] = ("sum", "cvar", "constrained")
    scale: float = 1.0
    batches: int = 1
    all_blocks: bool = False
    starts: bool = True

    def build(self, problem: Problem, h: Values, seeds: int) -> Runs:
        """The program, with choices replaced by their values."""
        return self.runs(problem, with_correction(problem, h), seeds)

    def number(self, problem: Problem) -> int:
        """Blocks per step."""
        return problem.total if self.all_blocks else problem.blocks

    def samples(self, problem: Problem) -> int:
        """Samples per step."""
        return self.batches * self.number(problem) * problem.samples

    def legal(self, problem: Problem) -> bool:
        """Whether a problem meets the method's assumptions."""
        return problem.kind in self.kinds


def with_correction(problem: Problem, h: Values) -> Values:
    """Replace choices by the weight of the correction.

    `correction` is 1 for auto, 2 for theory; `theta`, of ALEXR2, 0 for the theory's, else theta.
    """
    n, blocks = problem.total, problem.blocks
    if "correction" in h:
        gamma: Any = h["gamma"]
        auto, full = (1 - gamma) * blocks / n, theory_correction(gamma, n, blocks)
        return {**h, "correction": torch.where(h["correction"] == 1, auto, full)}
    if "theta" in h:
        full = (1 - h["gamma"] * blocks / n).clamp(min=0.0)
        theta = torch.where(h["theta"] == 0, full, h["theta"])
        return {**h, "correction": theta * h["gamma"]}
    return h


_TRACKS = ("lr", "gamma", "correction")
_LIST = (
    Entry("SONEX", SingleLoop, (*_TRACKS, "beta", "width")),
    Entry("SONX", SingleLoop, _TRACKS),
    Entry("SONX+momentum", SingleLoop, (*_TRACKS, "beta")),
    Entry(
        "ALEXR2", DoubleLoop, ("eta", "gamma", "theta", "beta", "width", "nu", "inner_steps"),
        batches=2,
    ),
    Entry("SOX", SingleLoop, ("lr", "gamma", "beta", "gain"), ("constrained",)),
    Entry(
        "ICPPAC", Lagrangian, ("lr", "proximal", "round_steps", "tau"), ("constrained",),
        scale=10.0, batches=2, all_blocks=True, starts=False,
    ),
)  # fmt: skip
ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _LIST}
