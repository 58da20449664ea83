"""Equal budgets: the same number of settings for each method, chosen and measured on other seeds.

Half of the settings are spread over the ranges, which all methods of a problem share; the other
half lies near the best of these. All runs of a method are one or two batched programs. Settings are
compared on the tuning seeds only, and the figures are those of the chosen settings on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from studies.runner import Job

from .methods import ENTRIES, Entry, Values
from .problems import PROBLEMS, Batch, Problem, draw_blocks

OUTPUTS = ("last", "average")


Range = Callable[[Tensor], Tensor]
"""The number at a share in [0, 1)."""


def log(low: float, high: float) -> Range:
    """Log-uniform between two numbers."""
    return lambda share: low * (high / low) ** share


def one_of(*numbers: float) -> Range:
    """One of some numbers, all equally likely."""
    table = torch.tensor(numbers, dtype=torch.float64)
    return lambda share: table[(share * len(table)).long()]


# Step sizes have the scale of a problem.
STEPS = {
    "S1": (3e-4, 1.0),
    "S2": (1e-4, 0.5),
    "S3": (3e-5, 0.1),
    "S3b": (1e-4, 0.3),
    "logistic": (5e-4, 0.5),
}

# Two hyperparameters are searched in their natural units. The smoothing lambda as the width
# lambda C_f of the zone that it smooths, in standard deviations of a tracked value: noise smooths
# that much by itself, and more than a few times that is bias. The weight rho of a squared hinge as
# the loop gain lr rho lag, which decides whether the lag of u and v makes a run swing.
CHOICES: dict[str, Range] = {
    "width": log(0.3, 30.0),
    "gain": log(0.03, 30.0),
    "gamma": log(0.002, 0.98),
    "beta": log(0.003, 1.0),
    "correction": one_of(1, 2),  # auto, theory
    "theta": one_of(0, 0.125),  # that of the theory, that of the paper's experiments
    "nu": log(0.03, 3.0),
    "inner_steps": one_of(5, 20, 80),
    "round_steps": one_of(10, 100, 1000, 3000),
    "proximal": log(0.01, 10.0),
    "tau": log(1.0, 10_000.0),
}


LISTED = ("correction", "theta", "inner_steps", "round_steps")  # those that are one of some numbers


def ranges_of(entry: Entry, problem: Problem) -> dict[str, Range]:
    """What a method tunes on a problem."""
    low, high = STEPS[problem.name]
    lr = log(entry.scale * low, entry.scale * high)
    shared = {**CHOICES, "lr": lr, "eta": lr}
    return {name: shared[name] for name in entry.tunes}


def first_points(entry: Entry, number: int, seed: int = 0) -> Tensor:
    """Points of a scrambled Sobol sequence over the unit cube of the method's ranges."""
    engine = SobolEngine(len(entry.tunes), scramble=True, seed=seed)
    return engine.draw(number, dtype=torch.float64).clamp(max=_BELOW_ONE)


def nearby_points(entry: Entry, centres: Tensor, number: int, seed: int = 0) -> Tensor:
    """Points around given ones, in turn: a tenth of each range away, or another choice."""
    generator = torch.Generator().manual_seed(seed)
    chosen = centres[torch.arange(number) % len(centres)]
    away = 0.1 * torch.randn(chosen.shape, generator=generator, dtype=torch.float64)
    anew = torch.rand(chosen.shape, generator=generator, dtype=torch.float64)
    other = torch.rand(chosen.shape, generator=generator) < 0.25
    listed = torch.tensor([name in LISTED for name in entry.tunes])
    moved = torch.where(listed, torch.where(other, anew, chosen), chosen + away)
    return moved.clamp(0.0, _BELOW_ONE)


def settings(entry: Entry, problem: Problem, points: Tensor) -> Values:
    """The hyperparameters at points of the unit cube, each of shape (settings, 1)."""
    ranges = ranges_of(entry, problem)
    h = {name: ranges[name](points[:, k : k + 1]) for k, name in enumerate(ranges)}
    if "width" in h:
        # The deviation of a tracked value where nothing moves.
        noise = problem.noise[0] * (h["gamma"] / (2 - h["gamma"]) / problem.samples).sqrt()
        h["smoothing"] = h.pop("width") * noise / problem.steepness
    if "gain" in h:
        # How many steps late the outer gradient acts: 1/gamma for the moving average of u, 1/beta
        # for that of v.
        h["penalty"] = h.pop("gain") / (h["lr"] * (1 / h["gamma"] + 1 / h["beta"]))
    return h


_BELOW_ONE = 1 - 1e-9
_WORST = 1e3  # error of a run that has left the numbers: very bad, not missing


def checkpoints(steps: int, ratio: float = 1.06) -> np.ndarray:
    """Steps at which to measure, growing by `ratio`."""
    number = int(np.log(steps) / np.log(ratio)) + 2
    return np.unique(np.geomspace(1, steps, number).round().astype(int))


def batches(
    entry: Entry, problem: Problem, seeds: int, steps: int, seed: int = 0, chunk: int = 256
) -> Iterator[tuple[Batch, Batch]]:
    """First a batch of every block, then a pair of batches for each step.

    The second batch of a pair has the same blocks and its own samples, if the method has two.
    """
    generator = torch.Generator().manual_seed(seed)
    every = torch.arange(problem.total).expand(1, seeds, -1)
    first = problem.draw(generator, every).at(0)
    yield first, first
    while steps > 0:
        shape = (min(chunk, steps), seeds)
        blocks = draw_blocks(generator, shape, problem.total, entry.number(problem))
        one = problem.draw(generator, blocks)
        two = problem.draw(generator, blocks) if entry.batches > 1 else one
        for k in range(shape[0]):
            batch = one.at(k)
            yield batch, two.at(k) if entry.batches > 1 else batch
        steps -= shape[0]


def trace(
    entry: Entry, problem: Problem, h: Values, seeds: int, steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The checkpoints, and the exact errors there, (outputs, checkpoints, seeds, settings).

    The outputs are the last iterate and the average of all with weights growing like t^3.
    """
    steps = steps // 4 if entry.all_blocks else steps
    runs, marks = entry.build(problem, h, seeds), checkpoints(steps)
    errors: list[np.ndarray] = []
    stream = batches(entry, problem, seeds, steps, seed)
    runs.warm_up(next(stream)[0])
    average, wanted = runs.w, set(marks.tolist())
    for count, (batch, other) in enumerate(stream, start=1):
        runs.step(batch, other)
        average = torch.lerp(average, runs.w, 4 / (count + 3))
        if count in wanted:
            both = problem.error(torch.stack([runs.w, average]))
            errors.append(both.nan_to_num(nan=_WORST, posinf=_WORST).clamp(max=_WORST).numpy())
    return marks, np.stack(errors, axis=1)


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
        cost: samples per step.
        steps: the checkpoints.
        errors: there, (outputs, checkpoints, seeds, settings).
        budget: what was tried.
    """

    h: Values
    first: int
    cost: int
    steps: np.ndarray
    errors: np.ndarray
    budget: Budget

    def means(self, output: str, seeds: slice) -> np.ndarray:
        """Window means of the median over seeds, shape (checkpoints, settings)."""
        chosen = self.errors[OUTPUTS.index(output)][:, seeds]
        return window_means(self.steps, np.median(chosen, axis=1))

    def samples(self, output: str, seeds: slice, level: float) -> np.ndarray:
        """Samples that each setting needs for an accuracy, `inf` where it is not reached."""
        return self.first + self.cost * reached(self.steps, self.means(output, seeds), level)

    def cheapest(self, output: str, level: float) -> int | None:
        """The setting that was cheapest for an accuracy on the tuning seeds."""
        samples = self.samples(output, slice(self.budget.tuning), MARGIN * level)
        best = int(samples.argmin())
        return best if np.isfinite(samples[best]) else None


def accuracies(problem: Problem, number: int = 18) -> list[float]:
    """Half the first error, and from there down by factors of the square root of 2."""
    return (float(problem.error(problem.start)) * 0.5 * 2 ** (-0.5 * np.arange(number))).tolist()


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
    points = first_points(entry, half, seed)
    wide = _pool(entry, problem, points, budget, seed)
    # The cheapest setting of each accuracy, the hardest first; without any, the least error.
    best = [wide.cheapest("last", level) for level in accuracies(problem)[::-1]]
    least = int(wide.means("last", slice(budget.tuning))[-1].argmin())
    centres = list(dict.fromkeys([*(k for k in best if k is not None), least]))
    points = nearby_points(entry, points[centres], budget.settings - half, seed)
    near = _pool(entry, problem, points, budget, seed)
    errors = np.concatenate([wide.errors, near.errors], axis=-1)
    h = {name: torch.cat([wide.h[name], near.h[name]]) for name in wide.h}
    return Pool(h, wide.first, wide.cost, wide.steps, errors, budget)


def _pool(entry: Entry, problem: Problem, points: Tensor, budget: Budget, seed: int) -> Pool:
    h = settings(entry, problem, points)
    found = trace(entry, problem, h, budget.seeds, budget.steps, seed)
    first = problem.total * problem.samples if entry.starts else 0
    return Pool(h, first, entry.samples(problem), *found, budget)


def run(job: Job) -> dict[str, Any]:
    """For each accuracy the chosen setting, and its samples on fresh seeds.

    The setting of the job is its budget. None stands for an accuracy that is not reached.
    """
    torch.set_num_threads(1)
    entry, problem = ENTRIES[job.method], PROBLEMS[job.problem]
    budget = Budget(**job.setting)
    pool, row = tune(entry, problem, budget, job.seed), dict[str, Any]()
    for output in OUTPUTS:
        chosen, samples = [], []
        for level in accuracies(problem):
            best, count = pool.cheapest(output, level), np.inf
            if best is not None:
                fresh = slice(budget.tuning, budget.seeds)
                count = float(pool.samples(output, fresh, level)[best])
            chosen.append(best)
            samples.append(count if np.isfinite(count) else None)
        hyperparameters = [
            None if k is None else {name: float(f"{float(h[k]):.4g}") for name, h in pool.h.items()}
            for k in chosen
        ]
        row[output] = {"samples": samples, "hyperparameters": hyperparameters}
    return row
