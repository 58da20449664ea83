"""Proximal Lagrangians: OSS and ICPPAC.

The estimator moves the multipliers before the step or, for rules that follow the step, the update
moves them after it.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..methods.lagrangian import LagrangianTerm, ProximalRound
from ..rules.proximal import proximal_value, pull_strength, regularised, running_average
from ..terms.limits import excess, side
from .estimators import Parts, limits_of, numbers_of
from .numbers import Numbers, Template
from .run import Estimate, Run, State, Unsupported, block_means, choose
from .updates import read_torch_optimizer

__all__ = ["Lagrangian", "RoundUpdate"]


@dataclass(frozen=True)
class Lagrangian:
    """The gradient of g_0 + sum_i y_i g_i, and how y moves."""

    rule: Template

    @property
    def needs_previous(self) -> bool:
        """Where y moves before the step."""
        return not self.rule.example.follows_step

    @classmethod
    def of(cls, term: LagrangianTerm) -> Parts:
        rule, numbers = Template.of(term.rule, "rule")
        numbers |= {"coefficient": term.rounds.coefficient, "inner_steps": term.rounds.inner_steps}
        state = {"multiplier": term.multiplier.clone(), "last": term.last.clone()}
        if term.rule.follows_step:
            state["values"] = term.tracker.rows.clone()
        _load_forward_mode()
        return cls(rule), numbers | numbers_of(term.limits), state

    def gradient(self, run: Run) -> Estimate:
        """G_t of one run, without the pull to the anchor."""
        rule, y, data = self.rule.example, run.state["multiplier"], run.data
        if not rule.warm_start:
            warm = y
            y = choose(data.begins, lambda: torch.zeros_like(warm), lambda: warm)
        if rule.follows_step:
            values, blocks, forward = run.passes(y)
            measured = block_means(values, blocks)  # NaN for a constraint that is not in the batch
            changed = {"multiplier": y, "values": measured}
        else:
            point = run.previous
            move = run.state["weights"] - point
            measured, change = run.along(point, move, data.batch, data.index, y)
            changed = self.ascended(run, point, move, measured, change, y)
            forward = run.differentiate(y)
        slope = changed["multiplier"] * side(y, *limits_of(run))
        return forward.estimate(slope, changed, forward.values, measured)

    def ascended(
        self, run: Run, point: Tensor, move: Tensor, values: Tensor, change: Tensor, y: Tensor
    ) -> State:
        """The next multipliers, from g(x) and its change along v, with x = `point`, v = `move`."""
        numbers, begins, limits = run.numbers, run.data.begins, limits_of(run)
        anchor = choose(begins, lambda: run.state["weights"], lambda: run.state["anchor"])
        proximal = numbers["coefficient"] * proximal_value(point - anchor, move)
        change = change * side(values, *limits)
        now = regularised(excess(values, *limits, numbers["margin"]), change, proximal)
        before = choose(begins, lambda: now, lambda: run.state["last"])
        y = self.rule.build(numbers).dual(y, now, before, numbers["inner_steps"])
        return {"multiplier": y, "last": now}


@functools.cache
def _load_forward_mode() -> None:
    """Torch scripts some rules of forward mode when they are first used, with a warning."""
    one = torch.ones(())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sin, (one,), (one,))


@dataclass(frozen=True)
class RoundUpdate:
    """Steps of `primal` around an anchor that end at their average; some rules then move y."""

    primal: Any
    lagrangian: Lagrangian

    @classmethod
    def of(cls, optimizer: ProximalRound) -> tuple[RoundUpdate, Numbers, int]:
        if optimizer.inner_step:
            raise Unsupported("A fleet starts between rounds, but ProximalRound is within one.")
        primal, numbers = read_torch_optimizer(optimizer.wrapped[0])
        rule, _ = Template.of(optimizer.rule, "rule")
        return cls(primal, Lagrangian(rule)), numbers, optimizer.inner_steps

    def start(self, weights: Tensor) -> State:
        average = weights.to(torch.promote_types(weights.dtype, torch.float32), copy=True)
        count = weights.new_zeros((), dtype=torch.float64)
        state = {"anchor": weights.clone(), "average": average, "inner_step": count}
        return {**state, **self.primal.start(weights)}

    def step(self, run: Run, gradient: Tensor, state: State) -> State:
        """One inner step; where a round ends, the weights become the average."""
        data, exact, point, y = run.data, run.exact, state["weights"], state["multiplier"]
        anchor = choose(data.begins, lambda: point, lambda: state["anchor"])
        strength = pull_strength(run.numbers["coefficient"], y.sum())
        gradient = gradient + (point - anchor) * strength.to(point)
        rule = self.lagrangian.rule.build(exact)
        lr = exact["lr"] * rule.step(exact["inner_steps"])
        scaled = {"exact": {**exact, "lr": lr}, "numbers": {**run.numbers, "lr": lr.to(point)}}
        changed = self.primal.step(run._replace(**scaled), gradient, state)
        reached = changed["weights"]
        if rule.follows_step:
            move = reached - point
            _, change = run.along(point, move, *run.gradient_batch, y)
            changed |= self.lagrangian.ascended(run, point, move, state["values"], change, y)
        count, average = state["inner_step"], state["average"]
        count = choose(data.begins, lambda: torch.zeros_like(count), lambda: count) + 1
        average = choose(data.begins, lambda: anchor.to(average), lambda: average)
        average = running_average(average, reached, count)
        changed["weights"] = choose(data.ends, lambda: average.to(reached), lambda: reached)
        return {**changed, "anchor": anchor, "average": average, "inner_step": count}
