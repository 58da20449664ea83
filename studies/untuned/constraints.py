"""Twelve constrained problems, four variants of each, and methods that nobody has tuned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

import fcco
from fcco.terms.limits import bounds
from studies.constrained import peers
from studies.constrained.convex import GroupLosses, Segments
from studies.constrained.fairness import RocFairness
from studies.constrained.problems import (
    NAMES,
    Batch,
    Builder,
    Problem,
    Score,
    Setting,
    Stated,
    Stepper,
    adam,
    training_step,
)
from studies.constrained.problems import make as make_problem
from studies.constrained.training import Figures, train
from studies.runner import Job

from . import tuned
from .kinds import KINDS

LEVEL = 0.005  # the largest violation that is accepted, in the units of the original problem
PROBLEMS = (*NAMES, *KINDS)
VARIANTS = ("values x 100", "loss x 100", "10 of each", "tenth batch")


class Variant(Problem):
    """Another statement of a problem: same solution, same score, same batches.

    Args:
        base: the problem.
        loss: what its loss is multiplied with.
        values: what its constraint values are multiplied with.
        copies: how often every constraint is listed.
    """

    def __init__(
        self, base: Problem, loss: float = 1.0, values: float = 1.0, copies: int = 1
    ) -> None:
        self.base, self.scales, self.copies = base, (loss, values), copies
        self.schedule, self.sampled = base.schedule, base.sampled
        self.num_constraints = copies * base.num_constraints

    def model(self) -> nn.Module:
        return self.base.model()

    def batches(self, seed: int) -> Callable[[], Batch]:
        """Those of the base; a drawn constraint comes with all its copies."""
        draw, number = self.base.batches(seed), self.base.num_constraints

        def repeated() -> Batch:
            batch = draw()
            if batch.index is None or self.copies == 1:
                return batch
            index = torch.cat([batch.index + k * number for k in range(self.copies)])
            return batch._replace(index=index)

        return repeated

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss and values of the base, scaled, the values repeated."""
        return self._stated(*self.base.measure(model, self._first(batch)))

    def tolerance(self) -> list[Any]:
        factor = self.scales[1]
        pairs = [bounds("limits", "", limit) for limit in self.base.tolerance()]
        return [(factor * low, factor * high) for low, high in pairs] * self.copies

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        return self._stated(*self.base.values(model, self._first(batch)))

    def _first(self, batch: Batch) -> Batch:
        """With the first copies alone."""
        if batch.index is None:
            return batch
        return batch._replace(index=batch.index[: len(batch.index) // self.copies])

    def _stated(self, loss: Tensor, values: Any) -> tuple[Tensor, Any]:
        if isinstance(values, fcco.Measured):
            values = fcco.Measured(*(self._stated(loss, each)[1] for each in values))
        else:
            values = self.scales[1] * values.repeat(self.copies)
        return self.scales[0] * loss, values

    def score(self, model: nn.Module) -> Score:
        """In the units of the base."""
        return self.base.score(model)

    def shifted(self, shift: float) -> Self:
        """The shift is in the units of the base, too."""
        other = copy.copy(self)
        other.base = self.base.shifted(shift)
        return other


def tenth(problem: Problem) -> Problem:
    """A tenth of the samples in a batch, at least one of each kind."""
    other = copy.copy(problem)
    if isinstance(other, RocFairness):
        other.per_cell = 3  # of 32
    elif isinstance(other, GroupLosses):
        other.batch_size, other.per_group = 6, 1  # of 64 and 8
    elif isinstance(other, Segments):
        other.batch_size, other.segments = 6, 6  # of 64, each with its 4 rows
    elif isinstance(other, Stated):
        other.few = True
    return other


def make(name: str) -> Problem:
    """A problem such as `"adult"` or `"adult / values x 100"`."""
    first, _, variant = name.partition(" / ")
    base = KINDS[first]() if first in KINDS else make_problem(first)
    match variant:
        case "":
            return base
        case "values x 100":
            return Variant(base, values=100.0)
        case "loss x 100":
            return Variant(base, loss=100.0)
        case "10 of each":
            return Variant(base, copies=10)
        case "tenth batch":
            return tenth(base)
    raise ValueError(f"`make({name!r})`: the variant must be one of {', '.join(VARIANTS)}.")


def ours(problem: Problem, model: nn.Module, _: Setting) -> Stepper:
    """`fcco.constrained` as a reader of its first line would call it."""
    primal = adam(problem, model)
    limits = problem.tolerance()
    objective = fcco.constrained(model, primal, len(limits), tolerance=limits)
    step = training_step(
        objective.optimizer,
        lambda batch: objective(lambda: problem.values(model, batch), batch.index),
    )
    return Stepper(step, [primal])


def by_hand(problem: Problem, model: nn.Module, setting: Setting) -> Stepper:
    """Loss + weight * sum of the violations of the batch, as one would write it first."""
    primal = adam(problem, model)

    def loss(batch: Batch) -> Tensor:
        loss, values = problem.measure(model, batch)
        return loss + setting["weight"] * values.relu().sum()

    return Stepper(training_step(primal, loss), [primal])


OWN: dict[str, Builder] = {
    "fcco": ours,
    "penalty by hand": by_hand,
    "plain loss": by_hand,
    **tuned.METHODS,
}

# Defaults of the peers, read in cooper-optim 1.0.1 and humancompatible-train 0.4.2.
# Cooper: the README has SGD(lr=1e-2, maximize=True) for the multipliers and the simultaneous
# optimizer; a penalty coefficient has no default, 1 is what one would write. nuPI with the defaults
# of its class (Kp = 0) is that same ascent, so it has no row.
# HCT: the defaults of each class; `peers` says `is_ineq`, and PBM wants the length of an epoch.
PEERS: dict[str, dict[str, Any]] = {
    "Cooper simultaneous": {"dual_lr": 0.01},
    "Cooper alternating": {"dual_lr": 0.01},
    "Cooper augmented": {"dual_lr": 0.01, "penalty": 1.0},
    "HCT ALM": {"dual_range": [-100.0, 100.0]},
    "HCT nuPI": {"dual_range": [-100.0, 100.0]},
    "HCT PBM": {"epochs": 8},
    "HCT SSG": {},
    "penalty by hand": {"weight": 1.0},
    "plain loss": {"weight": 0.0},
}


def installed() -> dict[str, dict[str, Any]]:
    """The peers that can be imported."""
    return {name: peer for name, peer in PEERS.items() if can_run(name)}


def can_run(method: str) -> bool:
    """Whether the package of a method is installed; our own need none."""
    return method in OWN or method in peers.methods()


def run(job: Job) -> Figures:
    """Train as the job says; its problem is a name of `make`."""
    torch.set_num_threads(1)
    problem = make(job.problem).shifted(job.shift)
    if job.evaluations is not None:
        every = max(1, job.evaluations // 20)
        problem.schedule = replace(problem.schedule, evaluations=job.evaluations, every=every)
    builder = {**OWN, **peers.methods()}[job.method]
    return train(problem, builder, job.setting, job.seed)
