"""What a constrained problem is, for all sides alike, and what a method ready to step is."""

from __future__ import annotations

import abc
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

import fcco
from fcco.terms.limits import Limit, bounds

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
        schedule: the training that every method gets.
        num_constraints: m.
        sampled: whether a batch holds some of the constraints only.
        shift: training is for g_i(w) <= shift (a margin when negative), the score is for 0.
    """

    schedule: Schedule
    num_constraints: int
    sampled = False
    shift = 0.0

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """A fresh model; its weights follow torch's global seed."""

    @abc.abstractmethod
    def batches(self, seed: int) -> Callable[[], Batch]:
        """A stream of batches that depends on the seed alone."""

    @abc.abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss and constraint values of a batch, the values less the shift."""

    @abc.abstractmethod
    def score(self, model: nn.Module) -> Score:
        """Objective and largest violation on all training data, without the shift."""

    def tolerance(self) -> list[Any]:
        """The limits of `values`, as `fcco.constrained` takes them."""
        return [0.0] * self.num_constraints

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The loss and what `tolerance` is for."""
        return self.measure(model, batch)

    def shifted(self, shift: float) -> Self:
        """The same problem with looser (positive) or stricter constraints in training."""
        other = copy.copy(self)
        other.shift = shift
        return other


class Stated(Problem):
    """A problem in the words of `fcco.constrained`: values, and limits of any kind.

    `measure` has each side of each limit; the score is in units.

    Args:
        schedule: of the training.
        limits: as `fcco.constrained` takes them.
        inputs: (groups, N, d); a batch has as many rows of each group.
        targets: (groups, N).
        rows: of each group in a batch.
        units: the scale of each limit.
        hidden: units of a hidden layer; 0 for a linear score.
        bias: whether a linear score has one.
    """

    few = False  # a batch is a tenth of the usual one
    least = 0.0  # the largest excess, in units, that can be had; 0 where all limits can hold

    def __init__(
        self,
        schedule: Schedule,
        limits: Sequence[Limit],
        inputs: Tensor,
        targets: Tensor,
        rows: int = 64,
        units: Any = 1.0,
        hidden: int = 0,
        bias: bool = False,
    ) -> None:
        self.schedule, self.inputs, self.targets, self.rows = schedule, inputs, targets, rows
        self.hidden, self.bias = hidden, bias
        self.units = torch.as_tensor(units).expand(len(limits))
        pairs = [bounds("limits", k, limit) for k, limit in enumerate(limits)]
        self.low, self.high = torch.tensor(pairs).T
        self.num_constraints = int(self.low.isfinite().sum() + self.high.isfinite().sum())

    def model(self) -> nn.Module:
        width = self.inputs.shape[-1]
        if not self.hidden:
            return nn.Sequential(nn.Linear(width, 1, bias=self.bias), nn.Flatten(0))
        layers = nn.Linear(width, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1)
        return nn.Sequential(*layers, nn.Flatten(0))

    @abc.abstractmethod
    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The loss and what is limited."""

    def tolerance(self) -> list[Any]:
        wider = self.shift * self.units * (self.low < self.high)
        pairs = torch.stack([self.low - wider, self.high + wider], 1).tolist()
        return [tuple(pair) for pair in pairs]

    def excess(self, values: Tensor, index: Tensor | None, shift: float) -> Tensor:
        """By how much each side of each limit is exceeded."""
        low, high, units = self.low, self.high, self.units
        if index is not None:
            low, high, units = low[index], high[index], units[index]
        above, below = values - high - shift * units, low - values - shift * units
        return torch.cat([above[high.isfinite()], below[low.isfinite()]])

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and the excesses; a hard rate has the gradient of its stand-in."""
        loss, values = self.values(model, batch)
        if isinstance(values, fcco.Measured):
            soft = values.surrogate
            values = values.value + (soft - soft.detach())
        return loss, self.excess(values, batch.index, self.shift)

    def batches(self, seed: int) -> Callable[[], Batch]:
        """Independent draws."""
        generator = torch.Generator().manual_seed(seed)
        number = max(1, round(self.rows / 10)) if self.few else self.rows
        return lambda: self.draw(generator, number)

    def draw(self, generator: torch.Generator, number: int) -> Batch:
        """So many rows of each group, one group after the other."""
        groups, total, width = self.inputs.shape
        rows = torch.randint(total, (groups, number), generator=generator)
        inputs = self.inputs.gather(1, rows[..., None].expand(-1, -1, width))
        return Batch(inputs.flatten(0, 1), self.targets.gather(1, rows).flatten())

    def every(self) -> Batch:
        """All data."""
        return Batch(self.inputs.flatten(0, 1), self.targets.flatten())

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        loss, values = self.values(model, self.every())
        values = values.value if isinstance(values, fcco.Measured) else values
        units = torch.cat([self.units[self.high.isfinite()], self.units[self.low.isfinite()]])
        worst = (self.excess(values, None, 0.0) / units).max()
        return Score(loss.item(), worst.item() - self.least)


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
    """

    step: Callable[[Batch], None]
    optimizers: list[torch.optim.Optimizer]
    gradients: int = 1
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
