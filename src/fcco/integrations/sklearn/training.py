"""Training a network on a table: parts of the data, the loop, the choice of the iterate."""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["Assessment", "Part", "Settings", "Task", "Trained", "mlp", "split_rows", "train"]


class Part(NamedTuple):
    """Rows of a table."""

    x: Tensor
    """Features, (n, d), scaled."""
    y: Tensor
    """Number of the class, (n,), int64."""
    members: Tensor
    """Whether a sample is in a group, (n, G)."""

    def rows(self, index: Tensor) -> Part:
        """Some of the rows."""
        return Part(self.x[index], self.y[index], self.members[index])


class Assessment(NamedTuple):
    """How good an iterate is: the least excess counts, then the largest merit."""

    excess: float
    merit: float


class Task(abc.ABC):
    """What is trained for: an objective of fcco, what it is called with, and how to judge."""

    @abc.abstractmethod
    def objective(self, module: nn.Module, optimizer: torch.optim.Optimizer, part: Part) -> Any:
        """The objective of a training part."""

    @abc.abstractmethod
    def loss(self, objective: Any, module: nn.Module, batch: Part, rows: Tensor) -> Tensor:
        """The loss of a batch, which are these rows of the training part."""

    @abc.abstractmethod
    def assess(self, scores: Tensor, part: Part) -> Assessment:
        """Judge the scores of a part."""


@dataclass(frozen=True)
class Settings:
    """Numbers of the training loop."""

    max_epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    patience: int | None
    report: Callable[[dict[str, float]], None]


class Trained(NamedTuple):
    """A trained network."""

    module: nn.Module
    objective: Any
    history: list[dict[str, float]]


def mlp(features: int, outputs: int, hidden: int = 64) -> nn.Module:
    """Two hidden layers of 64 units."""
    layers = nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


def split_rows(
    cells: NDArray[Any], fraction: float, random: np.random.RandomState
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to train on and rows to validate on, the same share of every cell.

    Args:
        cells: the cell of each sample, (n, k): its label and groups.
        fraction: the share of the second part.
        random: the source of randomness.
    """
    number = len(cells)
    cell = np.unique(cells, axis=0, return_inverse=True)[1].reshape(-1)
    # Rows in the order of their cells, at random within each: every k-th of them is set aside.
    order = np.lexsort((random.random_sample(number), cell))
    marks = np.floor(np.arange(number) * fraction + random.random_sample())
    aside = np.diff(marks, prepend=marks[0]) > 0
    return np.sort(order[~aside]), np.sort(order[aside])


def train(module: nn.Module, task: Task, part: Part, held: Part, settings: Settings) -> Trained:
    """Train and return the best iterate, as judged on held-out rows.

    Adam with a learning rate that rises over the first tenth of the steps and falls to 0 by a
    cosine.
    """
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    objective = task.objective(module, optimizer, part)
    per_epoch = max(1, math.ceil(len(part.x) / settings.batch_size))
    total = settings.max_epochs * per_epoch
    history: list[dict[str, float]] = []
    best, waited, state = Assessment(math.inf, -math.inf), 0, copy.deepcopy(module.state_dict())
    step = 0
    for epoch in range(settings.max_epochs):
        module.train()
        losses = []
        for rows in batches(len(part.x), per_epoch):
            rate = schedule((step + 1) / total)
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate
            rows = rows.to(part.x.device)
            loss = task.loss(objective, module, part.rows(rows), rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            step += 1
        found = assess(module, task, part), assess(module, task, held)
        now = Assessment(max(each.excess for each in found), found[1].merit)
        history.append(
            {
                "epoch": epoch + 1,
                "loss": float(torch.stack(losses).mean()),
                "excess": found[0].excess,
                "validation_excess": found[1].excess,
                "merit": found[0].merit,
                "validation_merit": found[1].merit,
            }
        )
        settings.report(history[-1])
        waited += 1
        late = epoch >= 0.7 * settings.max_epochs  # the multipliers have settled
        if not late or now.merit - 10 * max(now.excess, 0) >= best.merit - 10 * max(best.excess, 0):
            best, waited, state = now, 0, copy.deepcopy(module.state_dict())
        if settings.patience is not None and waited >= settings.patience:
            break
    module.load_state_dict(state)
    module.eval()
    return Trained(module, objective, history)


def schedule(progress: float) -> float:
    """The learning rate, relative to its largest, after a share of the steps."""
    if progress < 0.1:
        return progress / 0.1
    return 0.5 * (1 + math.cos(math.pi * (progress - 0.1) / 0.9))


def batches(number: int, count: int) -> Iterator[Tensor]:
    """All rows in random order, in parts of equal size."""
    yield from torch.tensor_split(torch.randperm(number), count)


@torch.no_grad()
def assess(module: nn.Module, task: Task, part: Part) -> Assessment:
    """Judge the module on a part."""
    module.eval()
    return task.assess(module(part.x), part)
