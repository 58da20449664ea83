"""One run of a method on a problem."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch

from .problems import Builder, Problem, Setting

TAIL = 0.2  # share of the checkpoints that is averaged at the end


@dataclass(frozen=True)
class Figures:
    """What one run ends with, on all training data, in the units of the original problem.

    Attributes:
        objective: mean over the last fifth of the checkpoints; infinite when the run diverged.
        violation: the largest, likewise.
        seconds: of all steps.
    """

    objective: float
    violation: float
    seconds: float = 0.0


def train(problem: Problem, builder: Builder, setting: Setting, seed: int) -> Figures:
    """Same initial weights and batches for every method that is given the same seed."""
    torch.manual_seed(seed)
    model = problem.model()
    draw = problem.batches(seed)
    stepper = builder(problem, model, setting)
    schedule = problem.schedule
    done, seconds = 0, 0.0
    objectives, violations = [], []
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
        objectives.append(score.objective)
        violations.append(score.violation)
        if not math.isfinite(score.objective):
            break
    return Figures(_tail(objectives), _tail(violations), round(seconds, 2))


def _tail(values: list[float]) -> float:
    last = values[-max(1, round(TAIL * len(values))) :]
    return statistics.fmean(last) if all(map(math.isfinite, last)) else math.inf
