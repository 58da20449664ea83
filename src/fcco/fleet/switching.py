"""The switching subgradient method (SSG): its branch, and which optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..methods.switching import (
    PolyakStep,
    SwitchingOptimizer,
    SwitchingTerm,
    decide,
    polyak_length,
)
from .hyperparameters import Hyperparameter, LimitHyperparameters
from .run import Estimate, Run, State, Unsupported
from .updates import Update, only_group, read_torch_optimizer

__all__ = ["Switch", "SwitchingUpdate"]

CONSTRAINT = "constraint."
"""Prefix of the state of the optimizer of the constraints."""


class SwitchHyperparameters(NamedTuple):
    """The numbers of a `SwitchingTerm`."""

    threshold: Hyperparameter  # eps_t
    limits: LimitHyperparameters


@dataclass(frozen=True)
class Switch:
    """The gradient of g_0 or of the worst constraint, see `fcco.methods.Ssg`."""

    number: int  # m
    needs_previous = False

    @classmethod
    def of(cls, term: SwitchingTerm) -> tuple[Switch, SwitchHyperparameters, State]:
        """The estimator of a term, its numbers and its state."""
        if isinstance(term.schedule, str):
            raise Unsupported("A fleet measures no noise: give `threshold` a number.")
        numbers = SwitchHyperparameters(term.schedule, LimitHyperparameters.of(term.limits))
        table = term.tracker.rows.clone()
        feasible = torch.ones((), dtype=torch.bool, device=table.device)
        state = {"tracked": table, "feasible": feasible, "worst": table.new_zeros(())}
        return cls(term.tracker.num_inner), numbers, state

    def gradient(self, run: Run, hyperparameters: SwitchHyperparameters) -> Estimate:
        """G_t of one run."""
        numbers: SwitchHyperparameters = run.narrow(hyperparameters)
        table = run.state["tracked"]
        values, forward = run.passes(table)
        means, _ = run.means(values, run.data.index, table)
        worst, which, feasible = decide(numbers.limits.excess(means), hyperparameters.threshold)
        chosen = torch.arange(self.number, device=means.device) == which
        slope = (chosen & ~feasible).to(means)
        changed = {"tracked": means, "feasible": feasible, "worst": worst}
        # A mean is NaN when a constraint is missing from the batch.
        return forward.estimate(slope, changed, values, means, loss_weight=feasible)


class PolyakHyperparameters(NamedTuple):
    """The number of a `PolyakStep`."""

    lr: Hyperparameter


@dataclass(frozen=True)
class PolyakUpdate:
    """Polyak's step on the worst constraint, see `fcco.methods.switching`."""

    def start(self, weights: Tensor) -> State:
        """It has no state."""
        return {}

    def step(
        self, run: Run, hyperparameters: PolyakHyperparameters, gradient: Tensor, state: State
    ) -> State:
        """One step of one run."""
        point, wide = state["weights"], gradient.double()
        length = polyak_length(state["worst"].double(), (wide * wide).sum())
        return {"weights": point - (hyperparameters.lr * length).to(point) * gradient}


class SwitchingHyperparameters(NamedTuple):
    """The numbers of a `SwitchingOptimizer`."""

    objective: Any
    constraint: Any  # None where one optimizer makes all steps


@dataclass(frozen=True)
class SwitchingUpdate:
    """The step of the optimizer whose branch was taken, see `fcco.methods.switching`.

    Args:
        objective: steps on g_0.
        constraint: steps on the worst constraint; None where the first does.
    """

    objective: Update
    constraint: Update | None

    @classmethod
    def of(
        cls, optimizer: SwitchingOptimizer
    ) -> tuple[SwitchingUpdate, SwitchingHyperparameters, None]:
        """The update of an optimizer, and its numbers; it has no rounds."""
        objective, of_objective = read_torch_optimizer(optimizer.objective_optimizer)
        constraint, of_constraint = None, None
        if isinstance(optimizer.constraint_optimizer, PolyakStep):
            lr = only_group(optimizer.constraint_optimizer)["lr"]
            constraint, of_constraint = PolyakUpdate(), PolyakHyperparameters(float(lr))
        elif len(optimizer.wrapped) > 1:
            constraint, of_constraint = read_torch_optimizer(optimizer.constraint_optimizer)
        numbers = SwitchingHyperparameters(of_objective, of_constraint)
        return cls(objective, constraint), numbers, None

    def start(self, weights: Tensor) -> State:
        """The state of both."""
        others = {} if self.constraint is None else self.constraint.start(weights)
        prefixed = {CONSTRAINT + name: value for name, value in others.items()}
        return {**self.objective.start(weights), **prefixed}

    def step(
        self, run: Run, hyperparameters: SwitchingHyperparameters, gradient: Tensor, state: State
    ) -> State:
        """One step of one run; the optimizer of the other branch stays as it was."""
        first = self.objective.step(run, hyperparameters.objective, gradient, state)
        if self.constraint is None:
            return first
        # The second optimizer sees its own state under the names of the first.
        state_of_second = {**state}
        for name in state:
            if name.startswith(CONSTRAINT):
                state_of_second[name.removeprefix(CONSTRAINT)] = state[name]
        second = self.constraint.step(run, hyperparameters.constraint, gradient, state_of_second)
        feasible = state["feasible"]
        after = {name: torch.where(feasible, new, state[name]) for name, new in first.items()}
        after["weights"] = torch.where(feasible, first["weights"], second.pop("weights"))
        for name, new in second.items():
            after[CONSTRAINT + name] = torch.where(feasible, state[CONSTRAINT + name], new)
        return after
