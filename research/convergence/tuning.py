"""Equal budgets: the same number of settings for each method, chosen and measured on other seeds.

Half of the settings are spread over the method's ranges; the other half lies near the best of
these. All runs of a method are one or two batched programs. Settings are compared on the tuning
seeds only, and the figures are those of the chosen settings on the other seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .engine import Trace, race
from .entries import Entry
from .problem import Problem
from .ranges import first_points, nearby_points, settings
from .slopes import Values

__all__ = ["Budget", "Pool", "accuracies", "cheapest", "reached", "tune", "window_means"]

WINDOW = 0.3  # share of the run, up to now, over which errors are averaged
MARGIN = 0.85  # settings are chosen to reach this share of the accuracy on the tuning seeds


@dataclass(frozen=True)
class Budget:
    """How much is tried: settings per method, steps per run, seeds for tuning and for figures."""

    settings: int
    steps: int
    tuning: int = 4
    fresh: int = 8

    @property
    def seeds(self) -> int:
        """All seeds."""
        return self.tuning + self.fresh


@dataclass(frozen=True)
class Pool:
    """All runs of a method on a problem.

    Attributes:
        h: the settings.
        first: samples before the first step.
        cost: samples per step of each setting.
        trace: the errors.
        budget: what was tried.
    """

    h: Values
    first: int
    cost: np.ndarray
    trace: Trace
    budget: Budget

    def errors(self, output: str, seeds: np.ndarray | slice) -> np.ndarray:
        """Window means of the median over seeds, shape (checkpoints, settings)."""
        chosen = getattr(self.trace, output)[:, seeds]
        return window_means(self.trace.steps, np.median(chosen, axis=1))

    def samples(self, output: str, seeds: np.ndarray | slice, level: float) -> np.ndarray:
        """Samples that each setting needs for an accuracy, `inf` where it is not reached."""
        steps = reached(self.trace.steps, self.errors(output, seeds), level)
        return self.first + steps * self.cost


def accuracies(problem: Problem, number: int = 18) -> np.ndarray:
    """Half the first error, and from there down by factors of the square root of 2."""
    return float(problem.error(problem.start)) * 0.5 * 2 ** (-0.5 * np.arange(number))


def window_means(steps: np.ndarray, curve: np.ndarray, window: float = WINDOW) -> np.ndarray:
    """Means over the checkpoints in ((1 - window) T, T], for each checkpoint T (first axis)."""
    first = np.searchsorted(steps, (1 - window) * steps, side="right")
    total = np.concatenate([np.zeros((1, *curve.shape[1:])), np.cumsum(curve, axis=0)])
    last = np.arange(1, len(steps) + 1)
    return (total[last] - total[first]) / (last - first).reshape(-1, *[1] * (curve.ndim - 1))


def reached(steps: np.ndarray, means: np.ndarray, level: float) -> np.ndarray:
    """The first checkpoint from which on each setting stays at or below a level, else `inf`.

    Staying there matters: a run may pass through the solution on its way to somewhere else.
    """
    above = means > level
    after = np.where(above.any(0), len(steps) - above[::-1].argmax(0), 0)
    return np.where(after < len(steps), steps[np.minimum(after, len(steps) - 1)], np.inf)


def tune(entry: Entry, problem: Problem, budget: Budget, seed: int = 0) -> Pool:
    """Run half of the settings anywhere, the other half near the best of them."""
    half = budget.settings // 2
    points = first_points(entry, problem, half, seed)
    wide = _run(entry, problem, points, budget, seed)
    centres = points[_best(wide, problem)]
    near = nearby_points(entry, problem, centres, budget.settings - half, seed)
    return _joined(wide, _run(entry, problem, near, budget, seed))


def cheapest(pool: Pool, output: str, level: float, first: int | None = None) -> int | None:
    """The setting that was cheapest for an accuracy on the tuning seeds, among the first few."""
    samples = pool.samples(output, slice(pool.budget.tuning), MARGIN * level)[:first]
    best = int(samples.argmin())
    return best if np.isfinite(samples[best]) else None


def _best(pool: Pool, problem: Problem) -> list[int]:
    """The cheapest setting of each accuracy, the hardest first; without any, the least error."""
    found = [cheapest(pool, "last", level) for level in accuracies(problem)[::-1]]
    known = [index for index in found if index is not None]
    least = int(pool.errors("last", slice(pool.budget.tuning))[-1].argmin())
    return list(dict.fromkeys([*known, least]))


def _run(entry: Entry, problem: Problem, points: torch.Tensor, budget: Budget, seed: int) -> Pool:
    h = settings(entry, problem, points)
    trace = race(
        entry.build(problem, h, budget.seeds),
        problem,
        budget.seeds,
        entry.steps(budget.steps),
        entry.number(problem),
        entry.batches > 1,
        seed,
    )
    first = problem.total * problem.samples if entry.starts else 0
    return Pool(h, first, entry.cost(problem, h).numpy(), trace, budget)


def _joined(one: Pool, two: Pool) -> Pool:
    h = {name: torch.cat([one.h[name], two.h[name]]) for name in one.h}
    trace = Trace(
        one.trace.steps,
        np.concatenate([one.trace.last, two.trace.last], axis=-1),
        np.concatenate([one.trace.average, two.trace.average], axis=-1),
        one.trace.seconds + two.trace.seconds,
    )
    return Pool(h, one.first, np.concatenate([one.cost, two.cost]), trace, one.budget)
