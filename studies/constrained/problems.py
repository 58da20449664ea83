"""What a constrained problem is, for all sides alike, and what a method ready to step is."""

from __future__ import annotations

import abc
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

Form = Literal["signed", "absolute", "pairs"]

NAMES = ("adult", "compas", "convex", "sampled")


class Batch(NamedTuple):
    """Samples of one step; `index` names the sampled constraints, None means all."""

    inputs: Tensor
    targets: Tensor
    index: Tensor | None = None


class Score(NamedTuple):
    """Objective and largest violation on all training data."""

    objective: float
    violation: float


@dataclass(frozen=True)
class Schedule:
    """How all methods are trained: gradient evaluations, checkpoints, Adam's learning rate.

    The learning rate falls to a tenth after half and after three quarters of the evaluations.
    """

    evaluations: int
    every: int
    lr: float

    def factor(self, done: int) -> float:
        """What the learning rate is multiplied with after `done` evaluations."""
        share = done / self.evaluations
        return 1.0 if share < 0.5 else 0.1 if share < 0.75 else 0.01


class Problem(abc.ABC):
    """An objective under constraints g_i(w) <= 0 whose values are known from samples only.

    Attributes:
        name: of the problem.
        schedule: the training that every method gets.
        num_constraints: m, of the signed form.
        sampled: whether a batch holds some of the constraints only.
        forms: ways to state the constraints; `"signed"` (all problems) is unbiased, `"absolute"`
            is |gap| - kappa, `"pairs"` the two rates whose gap counts.
        shift: training is for g_i(w) <= shift (a margin when negative), the score is for 0.
        optimum: the objective of the solution, where it is known.
    """

    name: str
    schedule: Schedule
    num_constraints: int
    sampled = False
    forms: tuple[Form, ...] = ("signed",)
    shift = 0.0
    optimum: float | None = None

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """A fresh model; its weights follow torch's global seed."""

    @abc.abstractmethod
    def batches(self, seed: int) -> Callable[[], Batch]:
        """A stream of batches that depends on the seed alone."""

    @abc.abstractmethod
    def measure(
        self, model: nn.Module, batch: Batch, form: Form = "signed"
    ) -> tuple[Tensor, Tensor]:
        """Loss and constraint values of a batch, the values less the shift (not in pairs)."""

    @abc.abstractmethod
    def score(self, model: nn.Module) -> Score:
        """Objective and largest violation on all training data, without the shift."""

    def tolerance(self) -> list[Any]:
        """The limits of `values`, as `fcco.constrained` takes them."""
        return [0.0] * self.num_constraints

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The loss and what `tolerance` is for: the signed form, unless there is a plainer one."""
        return self.measure(model, batch)

    def shifted(self, shift: float) -> Self:
        """The same problem with looser (positive) or stricter constraints in training."""
        other = copy.copy(self)
        other.shift = shift
        return other


@functools.lru_cache
def make(name: str) -> Problem:
    """The problem of that name; raises `MissingData` when it needs a file that is not there."""
    from . import convex, fairness

    torch.set_num_threads(1)
    if name in ("adult", "compas"):
        return fairness.RocFairness.load(name)
    return {"convex": convex.GroupLosses, "sampled": convex.Segments}[name]()


Setting = Mapping[str, Any]


@dataclass
class Stepper:
    """A step, what it costs, and the optimizers whose learning rate follows the schedule.

    Attributes:
        step: trains on one batch.
        optimizers: their learning rates are multiplied by the schedule's factor.
        gradients: gradient evaluations of one step.
        extra_forwards: passes without gradient of one step, beside those.
    """

    step: Callable[[Batch], None]
    optimizers: list[torch.optim.Optimizer]
    gradients: int = 1
    extra_forwards: int = 0
    _initial: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._initial = [g["lr"] for o in self.optimizers for g in o.param_groups]

    def set_factor(self, factor: float) -> None:
        """Multiply the first learning rates with `factor`."""
        groups = [group for each in self.optimizers for group in each.param_groups]
        for group, initial in zip(groups, self._initial, strict=True):
            group["lr"] = factor * initial


Builder = Callable[[Problem, nn.Module, Setting], Stepper]


def adam(problem: Problem, model: nn.Module) -> torch.optim.Optimizer:
    """The primal optimizer of every method."""
    return torch.optim.Adam(model.parameters(), lr=problem.schedule.lr)


def training_step(optimizer: Any, loss: Callable[[Batch], Tensor]) -> Callable[[Batch], None]:
    """Backward pass and step of an optimizer on the loss of a batch."""

    def step(batch: Batch) -> None:
        loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
