"""Training a network on a table: what is trained for, the loop, the iterate that is returned."""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim.swa_utils import update_bn

from ...optim import OutputIterate
from .network import START_ROWS, WideAndDeep

__all__ = [
    "STEEP",
    "Batches",
    "Part",
    "Plan",
    "Settings",
    "Shuffled",
    "Task",
    "Trained",
    "adamw",
    "losses_of",
    "outputs",
    "predicted",
    "split_rows",
    "train",
]


STEEP = 4.0
"""Slope of the stand-in of a counted rate, relative to that of the mean probability. Multipliers
start at 0 and move by at most a hundredth of their unit in a step; with steeper values they have a
shorter way to go, which a few hundred steps are enough for."""


class Part(NamedTuple):
    """Rows of a table."""

    x: Tensor
    """Encoded features, (n, d)."""
    y: Tensor
    """Number of the class, (n,), int64."""
    members: Tensor
    """Whether a sample is in a group, (n, G)."""

    def some(self, most: int) -> Part:
        """Every k-th row, so that there are not many more than `most`."""
        return Part(*(each[:: -(-len(self.y) // most)] for each in self))


def losses_of(scores: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of each sample; one column of scores is the logit of the second class."""
    if scores.dim() == 1 or scores.shape[1] == 1:
        scores = scores.reshape(-1)
        return binary_cross_entropy_with_logits(scores, y.to(scores), reduction="none")
    return cross_entropy(scores, y, reduction="none")


def predicted(scores: Tensor) -> Tensor:
    """The class that scores stand for."""
    if scores.dim() == 1 or scores.shape[1] == 1:
        return (scores.reshape(-1) > 0).long()
    return scores.argmax(1)


@dataclass(frozen=True)
class Settings:
    """Numbers of the training loop."""

    max_epochs: int
    more_epochs: int  # for a task that is not done by then
    batch_size: int
    learning_rate: float
    weight_decay: float
    patience: int | None
    seed: int
    progress: Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class Plan:
    """How long to train unless told.

    Attributes:
        passes: epochs, at least.
        per_epoch: batches of an epoch, with at least 128 and at most 2,048 rows in each.
        steps: in all, at least.
        learning_rate: the largest.
    """

    passes: int = 8
    per_epoch: int = 64
    steps: int = 300
    learning_rate: float = 0.005

    def batch_size(self, number: int) -> int:
        """Of a table of some rows."""
        return min(max(number // self.per_epoch, 128), 2048)

    def epochs(self, number: int, batch_size: int) -> int:
        """With some rows in a batch."""
        return max(self.passes, math.ceil(self.steps / max(1, number // batch_size)))


class Batches(Protocol):
    """The batches of an epoch: numbers of rows, or of what a task draws."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class Task(abc.ABC):
    """What is trained for: an objective of fcco, what it is called with, and how to judge.

    Attributes:
        name: of the figure that `value` gives.
        asked: what was asked for, in words.
        plan: for the network that is made for a table.
    """

    name: str
    asked: str
    plan = Plan()

    def unmeasured(self, part: Part) -> list[str]:
        """What is asked for but has no samples in the training part, for a warning."""
        return []

    def start(self, module: nn.Module, part: Part, settings: Settings) -> None:
        """What comes before the objective: the wide part of a network made here fits the losses."""
        if isinstance(module, WideAndDeep):
            some = part.some(START_ROWS)
            module.start(some.x, lambda scores: losses_of(scores, some.y).mean())

    @abc.abstractmethod
    def objective(self, module: nn.Module, optimizer: torch.optim.Optimizer, part: Part) -> Any:
        """The objective of a training part; None for plain cross-entropy."""

    def batches(self, part: Part, settings: Settings) -> Batches:
        """The batches of an epoch, anew at each pass."""
        return Shuffled(len(part.y), settings.batch_size)

    @abc.abstractmethod
    def loss(self, objective: Any, module: nn.Module, part: Part, batch: Any) -> Tensor:
        """The loss of a batch."""

    def report(self, objective: Any) -> Any:
        """The report of the objective at the end of training, None if it makes none."""
        seen = objective.term.tracker.seen.any()  # no batch of a tiny table may have both classes
        return objective.report() if bool(seen) else None

    @abc.abstractmethod
    def value(self, scores: Tensor, part: Part) -> float:
        """The figure that was asked for."""

    def done(self, *parts: tuple[Tensor, Part]) -> bool:
        """Whether training may end, from the scores of the parts."""
        return True

    def missed(self, *parts: tuple[Tensor, Part]) -> str:
        """What was asked for and is clearly not kept on the rows of the fit, for a warning."""
        return ""

    def figures(self, scores: Tensor, part: Part) -> dict[str, float]:
        """Figures for the history."""
        accuracy = (predicted(scores) == part.y).float().mean()
        return {"accuracy": float(accuracy), self.name: self.value(scores, part)}

    @abc.abstractmethod
    def merit(self, training: tuple[Tensor, Part], held: tuple[Tensor, Part]) -> float:
        """How good an iterate is, from its scores of the training part and of held-out rows."""


class Shuffled:
    """All rows in random order, in batches of nearly equal size; another order at each pass."""

    def __init__(self, number: int, batch_size: int) -> None:
        self.number, self.count = number, max(1, round(number / batch_size))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randperm(self.number).tensor_split(self.count))


class Trained(NamedTuple):
    """A trained network."""

    module: nn.Module
    objective: Any
    history: list[dict[str, float]]


def split_rows(
    cells: NDArray[Any], fraction: float, random: np.random.RandomState
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to stay and rows to set aside, the same share of every cell.

    Args:
        cells: the cell of each sample, (n, k): its label and groups.
        fraction: the share that is set aside.
        random: the source of randomness.
    """
    number = len(cells)
    # One number for each row, which is much faster to sort. Two cells that share it are one.
    weights = np.random.RandomState(0).randint(1, 2**31, cells.shape[1])
    cell = cells.astype(np.int64) @ weights
    # Rows in the order of their cells, at random within each: every k-th of them is set aside.
    order = np.lexsort((random.random_sample(number), cell))
    marks = np.floor(np.arange(number + 1) * fraction + random.random_sample())
    aside = np.diff(marks) > 0
    return np.sort(order[~aside]), np.sort(order[aside])


def train(
    module: nn.Module, task: Task, part: Part, held: Part | None, settings: Settings
) -> Trained:
    r"""Train, and return the average iterate of the best epoch.

    AdamW; the learning rate rises over the first tenth of the steps and then falls to 0.3 of its
    largest. Iterates of a constrained problem go around their limit as the multipliers do. Their
    average does not, and is what is judged on held-out rows and returned:

    .. math::
        \bar w_t \propto \sum_{s \le t} s^3 w_s,

    nearly that of the last third. Without held-out rows that of the last epoch is returned.
    """
    task.start(module, part, settings)
    optimizer = adamw(module, settings, part.x.device)
    objective = task.objective(module, optimizer, part)
    average = OutputIterate(optimizer, "average", weight=lambda: float(average.count + 1) ** 3)
    batches = task.batches(part, settings)
    total = settings.max_epochs * len(batches)
    history: list[dict[str, float]] = []
    best, state, best_epoch, step = -math.inf, module.state_dict(), 0, 0
    for epoch in range(1, settings.max_epochs + settings.more_epochs + 1):
        module.train()
        losses = []
        for batch in batches:
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * schedule(min(step / total, 1.0))
            loss = task.loss(objective, module, part, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        with average.applied():
            # Parts of nearly equal size: statistics of one row do not exist.
            update_bn(part.x.tensor_split(max(1, len(part.x) // 1024)), module)
            row, merit, done = judged(module, task, part, held)
            history.append({"epoch": epoch, "loss": float(torch.stack(losses).mean()), **row})
            settings.progress(history[-1])
            if held is None or merit >= best:
                best, best_epoch, state = merit, epoch, copy.deepcopy(module.state_dict())
        waited = settings.patience is not None and epoch - best_epoch >= settings.patience
        if waited or (done and epoch >= settings.max_epochs):
            break
    module.load_state_dict(state)
    module.eval()
    return Trained(module, objective, history)


def adamw(module: nn.Module, settings: Settings, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; for a small network the fused one takes half the time."""
    return torch.optim.AdamW(
        module.parameters(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        fused=device.type in ("cpu", "cuda"),
    )


def schedule(progress: float) -> float:
    """The learning rate, relative to its largest, after a share of the steps."""
    if progress < 0.1:
        return 0.3 + 0.7 * progress / 0.1
    return 0.65 + 0.35 * math.cos(math.pi * (progress - 0.1) / 0.9)


@torch.no_grad()
def outputs(module: nn.Module, x: Tensor) -> Tensor:
    """What a module returns for many rows."""
    module.eval()
    return torch.cat([module(rows) for rows in x.split(65536)])


def judged(
    module: nn.Module, task: Task, part: Part, held: Part | None
) -> tuple[dict[str, float], float, bool]:
    """The figures of an iterate, its merit, and whether the task is done."""
    found = {"training": (outputs(module, part.x), part)}
    if held is not None:
        found["validation"] = (outputs(module, held.x), held)
    row: dict[str, float] = {}
    for name, (scores, rows) in found.items():
        row |= {f"{name} {each}": value for each, value in task.figures(scores, rows).items()}
    merit = 0.0 if held is None else task.merit(found["training"], found["validation"])
    return row, merit, task.done(*found.values())
