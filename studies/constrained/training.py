"""One run of a method on a problem."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from studies.runner import Job

from . import ours, peers
from .problems import Builder, Setting, make

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

    def settled(self) -> int | None:
        """Evaluations after which every checkpoint has a violation within the limit."""
        first = None
        for done, violation in zip(self.evaluations, self.violation, strict=True):
            first = None if not violation <= LIMIT else first or done
        return first

    def reached(self, objective: float) -> int | None:
        """Evaluations at the first checkpoint with both the objective and the violation."""
        points = zip(self.evaluations, self.objective, self.violation, strict=True)
        return next((n for n, f, v in points if v <= LIMIT and f <= objective), None)


def builders() -> dict[str, Builder]:
    """Every method whose package is installed."""
    return {**ours.METHODS, **peers.methods()}


def train(
    problem: Any, method: str, setting: Setting, seed: int, builder: Builder | None = None
) -> Trace:
    """Same initial weights and batches for every method that is given the same seed.

    Args:
        problem: the problem.
        method: name in `builders()`.
        setting: of the method; `form` is that of the constraints.
        seed: of the initial weights and of the batches.
        builder: of a method that has no name there.
    """
    own = dict(setting)
    if form := own.pop("form", None):
        problem = problem.stated(form)
    torch.manual_seed(seed)
    model = problem.model()
    draw = problem.batches(seed)
    stepper = (builder or builders()[method])(problem, model, own)
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
    extra = stepper.extra_forwards / stepper.gradients
    return Trace(evaluations, objectives, violations, seconds, extra)


def run(job: Job) -> Trace:
    """Train as the job says."""
    torch.set_num_threads(1)
    problem = make(job.problem).shifted(job.shift)
    if job.evaluations is not None:
        problem.schedule = replace(problem.schedule, evaluations=job.evaluations)
    return train(problem, job.method, job.setting, job.seed)
