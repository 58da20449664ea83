"""The switching subgradient method (SSG): its branch, and which optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..constraints.steps import decide, polyak_length
from ..constraints.switching import SwitchingTerm
from .member import State
from .run import Outcome, Run, Seen
from .updates import Update, renamed, scaled, unprefixed
from .values import attached, entries, excess, in_two, limit_numbers, pooled

__all__ = ["CONSTRAINT", "PolyakUpdate", "Switch", "SwitchingUpdate"]

CONSTRAINT = "constraint."
"""Before the numbers and the state of the optimizer of the constraints."""


@dataclass(frozen=True)
class Switch:
    """The objective or the worst constraint, see `fcco.constraints.Switching`.

    Args:
        number: m.
    """

    number: int
    remembers = False

    @classmethod
    def read_from(cls, term: SwitchingTerm) -> tuple[Switch, dict[str, Any], State]:
        """The estimator of a term, its numbers and its state."""
        numbers = {"threshold": term.schedule, **limit_numbers(term.limits)}
        own = cls(term.tracker.num_inner)
        tracked = term.tracker.value[:, 0].clone()
        state = {"tracked": tracked, "feasible": torch.tensor(True), "worst": tracked.new_zeros(())}
        return own, numbers, {k: v.to(tracked.device) for k, v in state.items()}

    def gradient(self, run: Run) -> Outcome:
        """G_t of one run: of g_0, or of the worst constraint."""

        def branch(fresh: Tensor) -> tuple[tuple[Tensor, Tensor], State]:
            values, _ = pooled(fresh, run.index, self.number)
            worst, which, feasible = decide(excess(run, values), run.exact["threshold"])
            slope = (torch.arange(self.number, device=values.device) == which).to(values)
            return (feasible, slope), {"tracked": values, "feasible": feasible, "worst": worst}

        def scalar(seen: Seen, decided: tuple[Tensor, Tensor], index: Tensor | None) -> Tensor:
            feasible, slope = decided
            constraint = attached(entries(seen, carrier=True), slope, index)
            return torch.where(feasible, seen.loss, constraint)

        return in_two(run, branch, scalar)


@dataclass(frozen=True)
class PolyakUpdate:
    """Polyak's step on the worst constraint, see `fcco.constraints.PolyakStep`."""

    def start(self, weights: Tensor) -> State:
        """It has no state."""
        return {}

    def step(self, run: Run, point: Tensor, gradient: Tensor, state: State) -> State:
        """One step of one run."""
        wide = gradient.double()
        length = polyak_length(state["worst"].double(), (wide * wide).sum())
        return {"weights": point - (run.exact["lr"] * length).to(point) * gradient}


@dataclass(frozen=True)
class SwitchingUpdate:
    """The step of the optimizer whose branch was taken, see `fcco.constraints.SwitchingOptimizer`.

    Args:
        objective: steps on g_0.
        constraint: steps on the worst constraint; None where the first does.
    """

    objective: Update
    constraint: Update | None

    def start(self, weights: Tensor) -> State:
        """The state of both."""
        other = {} if self.constraint is None else self.constraint.start(weights)
        return {
            **self.objective.start(weights),
            **{CONSTRAINT + name: value for name, value in other.items()},
        }

    def step(self, run: Run, point: Tensor, gradient: Tensor, state: State) -> State:
        """One step of one run; the optimizer of the other branch stays as it was."""
        factor = run.exact["factor"]
        first = self.objective.step(scaled(run, factor), point, gradient, state)
        if self.constraint is None:
            return first
        other, own = renamed(run, CONSTRAINT), unprefixed(state, CONSTRAINT)
        if not isinstance(self.constraint, PolyakUpdate):
            other = scaled(other, factor)
        own["worst"] = state["worst"]
        second = self.constraint.step(other, point, gradient, own)
        yes, weights = state["feasible"], (first.pop("weights"), second.pop("weights"))
        return {
            "weights": torch.where(yes, *weights),
            **{name: torch.where(yes, new, state[name]) for name, new in first.items()},
            **{CONSTRAINT + k: torch.where(yes, own[k], new) for k, new in second.items()},
        }
