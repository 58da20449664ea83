"""The shared loop: all settings and seeds of one method, measured at log-spaced steps."""

from __future__ import annotations

import abc
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .problems import Batch, Problem, draw_blocks


class Runs(abc.ABC):
    """A method at work on all its runs: seeds, and hyperparameters `h` of shape (settings, 1)."""

    def __init__(self, problem: Problem, h: dict[str, Tensor], seeds: int) -> None:
        self.problem, self.h = problem, h
        self.w = problem.start.expand(seeds, len(h["lr"]), -1).clone()

    @property
    def point(self) -> Tensor:
        """The iterate that is measured, shape (seeds, settings, d)."""
        return self.w

    def warm_up(self, batch: Batch) -> None:  # noqa: B027
        """Start from one batch of every block, where there is something to start."""

    @abc.abstractmethod
    def step(self, batch: Batch, other: Batch) -> None:
        """One step; `other` is an independent batch of the same blocks."""


@dataclass(frozen=True)
class Trace:
    """Errors at the checkpoints.

    Attributes:
        steps: the checkpoints, shape (checkpoints,).
        last: errors of the iterate, shape (checkpoints, seeds, settings).
        average: the same for the average of the iterates with weights growing like t^3.
        seconds: of the whole batched program.
    """

    steps: np.ndarray
    last: np.ndarray
    average: np.ndarray
    seconds: float


def checkpoints(steps: int, ratio: float = 1.06) -> np.ndarray:
    """Steps at which to measure, growing by `ratio`."""
    number = int(np.log(steps) / np.log(ratio)) + 2
    grid = np.geomspace(1, steps, number)
    return np.unique(grid.round().astype(int))


def batches(
    problem: Problem, seeds: int, steps: int, number: int, second: bool, seed: int, chunk: int = 256
) -> Iterator[tuple[Batch, Batch]]:
    """First a batch of every block, then a pair of batches of `number` blocks for each step.

    The second batch of a pair has the same blocks and its own samples, if it is asked for.
    """
    generator = torch.Generator().manual_seed(seed)
    every = torch.arange(problem.total).expand(1, seeds, -1)
    first = problem.draw(generator, every).at(0)
    yield first, first
    while steps > 0:
        shape = (min(chunk, steps), seeds)
        blocks = draw_blocks(generator, shape, problem.total, number)
        one = problem.draw(generator, blocks)
        two = problem.draw(generator, blocks) if second else one
        for k in range(shape[0]):
            batch = one.at(k)
            yield batch, two.at(k) if second else batch
        steps -= shape[0]


def run(
    runs: Runs,
    problem: Problem,
    seeds: int,
    steps: int,
    number: int,
    second: bool,
    seed: int = 0,
) -> Trace:
    """Run to the end and measure the exact error at the checkpoints."""
    marks = checkpoints(steps)
    errors: list[np.ndarray] = []
    stream = batches(problem, seeds, steps, number, second, seed)
    begin = time.perf_counter()
    runs.warm_up(next(stream)[0])
    average, wanted = runs.point, set(marks.tolist())
    for count, (batch, other) in enumerate(stream, start=1):
        runs.step(batch, other)
        average = torch.lerp(average, runs.point, 4 / (count + 3))
        if count in wanted:
            both = problem.error(torch.stack([runs.point, average]))
            # A run that has left the numbers counts as very bad, not as missing.
            errors.append(both.nan_to_num(nan=_WORST, posinf=_WORST).clamp(max=_WORST).numpy())
    kept = np.stack(errors)
    return Trace(marks, kept[:, 0], kept[:, 1], time.perf_counter() - begin)


_WORST = 1e3
