"""Proximal Lagrangians: OSS and ICPPAC.

The estimator moves the multipliers before the step or, for rules that follow the step, the update
moves them after it; so both use the numbers of the term.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..methods.lagrangian import (
    LagrangianTerm,
    ProximalRound,
    proximal_value,
    pull_strength,
    regularised,
    running_average,
)
from .hyperparameters import Hyperparameter, LimitHyperparameters, Template
from .run import Estimate, Run, State, Unsupported, choose
from .updates import Update, read_torch_optimizer

__all__ = ["Lagrangian", "RoundUpdate"]


class LagrangianHyperparameters(NamedTuple):
    """The numbers of a `LagrangianTerm` and its rounds."""

    limits: LimitHyperparameters
    coefficient: Hyperparameter  # c of the proximal term
    inner_steps: Hyperparameter  # T
    rule: dict[str, Hyperparameter]  # those of the dual rule


@dataclass(frozen=True)
class Lagrangian:
    """The gradient of g_0 + sum_i y_i g_i, see `fcco.methods.lagrangian`."""

    rule: Template

    @property
    def needs_previous(self) -> bool:
        """Whether it evaluates values at w_{t-1}: where y moves before the step."""
        return not self.rule.example.follows_step

    @classmethod
    def of(cls, term: LagrangianTerm) -> tuple[Lagrangian, LagrangianHyperparameters, State]:
        """The estimator of a term, its numbers and its state."""
        rule, of_rule = Template.of(term.rule)
        limits, rounds = LimitHyperparameters.of(term.limits), term.rounds
        state = {"multiplier": term.multiplier.clone(), "last": term.last.clone()}
        if term.rule.follows_step:
            state["values"] = term.tracker.rows.clone()
        _load_forward_mode()
        numbers = LagrangianHyperparameters(limits, rounds.coefficient, rounds.inner_steps, of_rule)
        return cls(rule), numbers, state

    def gradient(self, run: Run, hyperparameters: LagrangianHyperparameters) -> Estimate:
        """G_t of one run, without the pull to the anchor."""
        numbers: LagrangianHyperparameters = run.narrow(hyperparameters)
        data, rule = run.data, self.rule.example
        y = run.state["multiplier"]
        if not rule.warm_start:
            warm = y
            y = choose(run.flags.begins, lambda: torch.zeros_like(warm), lambda: warm)
        changed: State = {"multiplier": y}
        if rule.follows_step:
            values, forward = run.passes(y)
            # NaN when a constraint is missing from the batch.
            measured, _ = run.means(values, data.index, y)
            changed["values"] = measured
        else:
            previous = run.previous
            move = run.weights - previous
            values, change = run.along(previous, move, data.batch, data.index, y)
            measured = linearised(run, numbers, previous, move, values, change)
            changed = ascended(run, self.rule.build(numbers.rule), numbers, y, measured)
            forward = run.differentiate(y)
        return forward.estimate(changed["multiplier"], changed, forward.values, measured)


def linearised(
    run: Run,
    numbers: LagrangianHyperparameters,
    point: Tensor,
    move: Tensor,
    values: Tensor,
    change: Tensor,
) -> Tensor:
    """l_t: the regularised constraints at a point x, linear along a move v.

    Args:
        run: the run.
        numbers: in the precision of the weights.
        point: x.
        move: v.
        values: g(x).
        change: <grad g(x), v>.
    """
    anchor = choose(run.flags.begins, lambda: run.weights, lambda: run.state["anchor"])
    proximal = numbers.coefficient * proximal_value(point - anchor, move)
    return regularised(numbers.limits.excess(values), change, proximal)


def ascended(
    run: Run, rule: Any, numbers: LagrangianHyperparameters, y: Tensor, values: Tensor
) -> State:
    """The next multipliers, from y and l_t = `values`."""
    before = choose(run.flags.begins, lambda: values, lambda: run.state["last"])
    return {"multiplier": rule.dual(y, values, before, numbers.inner_steps), "last": values}


def inner_step(run: Run) -> Tensor:
    """t, the step within the round."""
    count = run.state["inner_step"]
    return choose(run.flags.begins, lambda: torch.zeros_like(count), lambda: count)


@functools.cache
def _load_forward_mode() -> None:
    """Torch scripts some rules of forward mode when they are first used, with a warning."""
    one = torch.ones(())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sin, (one,), (one,))


@dataclass(frozen=True)
class RoundUpdate:
    """Primal steps around an anchor that end at their average, see `fcco.methods.lagrangian`.

    Args:
        primal: makes the steps.
        rule: the dual rule; one that follows the step moves y here.
    """

    primal: Update
    rule: Template

    @classmethod
    def of(cls, optimizer: ProximalRound) -> tuple[RoundUpdate, Any, int]:
        """The update of an optimizer, the numbers of its primal steps, and the length of rounds."""
        if optimizer.inner_step:
            raise Unsupported("A fleet starts between rounds, but ProximalRound is within one.")
        primal, numbers = read_torch_optimizer(optimizer.wrapped[0])
        rule, _ = Template.of(optimizer.rule)
        return cls(primal, rule), numbers, optimizer.inner_steps

    def start(self, weights: Tensor) -> State:
        """Anchor, average, counters, and the state of the primal steps."""
        wide = torch.promote_types(weights.dtype, torch.float32)
        zero = weights.new_zeros((), dtype=torch.float64)
        return {
            "anchor": weights.clone(),
            "average": weights.to(wide, copy=True),
            "inner_step": zero,
            **self.primal.start(weights),
        }

    def step(self, run: Run, hyperparameters: Any, gradient: Tensor, state: State) -> State:
        """One inner step; where a round ends, the weights become the average."""
        begins, point, y = run.flags.begins, state["weights"], state["multiplier"]
        exact: LagrangianHyperparameters = run.hyperparameters.estimator
        numbers: LagrangianHyperparameters = run.narrow(exact)
        anchor = choose(begins, lambda: point, lambda: state["anchor"])
        strength = pull_strength(numbers.coefficient, y.sum())
        gradient = gradient + (point - anchor) * strength.to(point)
        rule, t = self.rule.build(exact.rule), inner_step(run)
        primal = hyperparameters._replace(lr=hyperparameters.lr * rule.step(exact.inner_steps))
        changed = self.primal.step(run, primal, gradient, state)
        reached = changed["weights"]
        if rule.follows_step:
            move = reached - point
            _, change = run.along(point, move, *run.gradient_batch, y)
            ahead = linearised(run, numbers, point, move, state["values"], change)
            changed |= ascended(run, self.rule.build(numbers.rule), numbers, y, ahead)
        average = state["average"]
        average = choose(begins, lambda: anchor.to(average), lambda: average)
        average = running_average(average, reached, t + 1)
        changed["weights"] = choose(run.flags.ends, lambda: average.to(reached), lambda: reached)
        return {**changed, "anchor": anchor, "average": average, "inner_step": t + 1}
