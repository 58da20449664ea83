"""One run: a method with a setting on a problem, from a seed."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import cooper_side, hct_side, ours
from .problems import Problem
from .stepper import Builder, Setting

__all__ = ["LIMIT", "TAIL", "Trace", "builders", "train"]

LIMIT = 0.01  # the largest violation that counts as reached
TAIL = 0.2  # share of the checkpoints that is averaged at the end


@dataclass(frozen=True)
class Trace:
    """What one run showed at its checkpoints, on all training data.

    Attributes:
        evaluations: gradient evaluations at each checkpoint.
        objective: there.
        violation: the largest, there.
        seconds: of the steps alone.
        extra_forwards: passes without gradient for each gradient evaluation.
    """

    evaluations: list[int]
    objective: list[float]
    violation: list[float]
    seconds: float
    extra_forwards: float

    @property
    def tail_objective(self) -> float:
        """Mean over the last checkpoints; infinite when the run diverged."""
        return self._tail(self.objective)

    @property
    def tail_violation(self) -> float:
        """Mean over the last checkpoints; infinite when the run diverged."""
        return self._tail(self.violation)

    def _tail(self, values: list[float]) -> float:
        last = values[-max(1, round(TAIL * len(values))) :]
        return statistics.fmean(last) if all(map(math.isfinite, last)) else math.inf

    def settled(self, limit: float = LIMIT) -> int | None:
        """Evaluations after which every checkpoint has a violation within the limit."""
        first = None
        for done, violation in zip(self.evaluations, self.violation, strict=True):
            if not violation <= limit:
                first = None
            elif first is None:
                first = done
        return first

    def reached(self, objective: float, limit: float = LIMIT) -> int | None:
        """Evaluations at the first checkpoint with both the objective and the violation."""
        points = zip(self.evaluations, self.objective, self.violation, strict=True)
        return next((n for n, f, v in points if v <= limit and f <= objective), None)

    def best(self, share: float, limit: float = LIMIT) -> float:
        """The least objective within the limit in the first `share` of the evaluations."""
        until = share * self.evaluations[-1]
        points = zip(self.evaluations, self.objective, self.violation, strict=True)
        found = [f for n, f, v in points if n <= until and v <= limit]
        return min(found, default=math.inf)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in five digits."""
        fields = asdict(self)
        for name in ("objective", "violation"):
            fields[name] = [float(f"{value:.5g}") for value in fields[name]]
        return {**fields, "seconds": round(self.seconds, 3)}


def builders() -> dict[str, Builder]:
    """Every method whose package is installed."""
    found = dict(ours.METHODS)
    for side in (cooper_side, hct_side):
        if side.installed():
            found.update(side.METHODS)
    return found


def train(
    problem: Problem, method: str, setting: Setting, seed: int, builder: Builder | None = None
) -> Trace:
    """Same initial weights and batches for every method that is given the same seed.

    Args:
        problem: the problem.
        method: name in `builders()`.
        setting: of the method.
        seed: of the initial weights and of the batches.
        builder: of a method that has no name there.
    """
    torch.manual_seed(seed)
    model = problem.model()
    draw = problem.batches(seed)
    stepper = (builder or builders()[method])(problem, model, setting)
    schedule = problem.schedule
    done, seconds = 0, 0.0
    evaluations, objectives, violations = [], [], []
    while done < schedule.evaluations:
        stepper.set_factor(schedule.factor(done))
        until = (done // schedule.every + 1) * schedule.every
        batches = [draw() for _ in range(math.ceil((until - done) / stepper.gradients))]
        start = time.perf_counter()
        for batch in batches:
            stepper.step(batch)
        seconds += time.perf_counter() - start
        done += stepper.gradients * len(batches)
        score = problem.score(model)
        evaluations.append(done)
        objectives.append(score.objective)
        violations.append(score.violation)
        if not math.isfinite(score.objective):
            break
    return Trace(
        evaluations,
        objectives,
        violations,
        seconds,
        stepper.extra_forwards / stepper.gradients,
    )
