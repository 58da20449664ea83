"""Equal budgets: the same number of settings for each method, chosen and measured on other seeds.

Half of the settings are spread over the ranges, which all methods of a problem share; the other
half lies near the best of these. All runs of a method are one or two batched programs. Settings are
compared on the tuning seeds only, and the figures are those of the chosen settings on the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from .engine import Trace, run
from .entries import Entry
from .methods import Values
from .problems import Problem


@dataclass(frozen=True)
class Log:
    """Log-uniform between two numbers."""

    low: float
    high: float

    def at(self, share: Tensor) -> Tensor:
        """The number at a share in [0, 1) of the range."""
        return self.low * (self.high / self.low) ** share


@dataclass(frozen=True)
class OneOf:
    """One of some numbers, all equally likely."""

    numbers: tuple[float, ...]

    def at(self, share: Tensor) -> Tensor:
        """The number at a share in [0, 1) of the list."""
        table = torch.tensor(self.numbers, dtype=torch.float64)
        return table[(share * len(table)).long()]


# Step sizes have the scale of a problem.
STEPS: dict[str, Log] = {
    "S1": Log(3e-4, 1.0),
    "S2": Log(1e-4, 0.5),
    "S3": Log(3e-5, 0.1),
    "S3b": Log(1e-4, 0.3),
    "S4": Log(1e-4, 0.3),
    "logistic": Log(5e-4, 0.5),
}

# Two hyperparameters are searched in their natural units. The smoothing lambda as the width
# lambda C_f of the zone that it smooths, in standard deviations of a tracked value: noise smooths
# that much by itself, and more than a few times that is bias. The weight rho of a squared hinge as
# the loop gain lr rho lag, which decides whether the lag of u and v makes a run swing.
CHOICES: dict[str, Log | OneOf] = {
    "width": Log(0.3, 30.0),
    "gain": Log(0.03, 30.0),
    "gamma": Log(0.002, 0.98),
    "beta": Log(0.003, 1.0),
    "correction": OneOf((1, 2)),  # auto, theory
    "theta": OneOf((0, 0.125)),  # that of the theory, that of the paper's experiments
    "nu": Log(0.03, 3.0),
    "inner_steps": OneOf((5, 20, 80)),
    "round_steps": OneOf(
        (10, 100, 1000, 3000)
    ),  # OSS ends about multiplier / sqrt(T) off the limit
    "proximal": Log(0.01, 10.0),
    "tau": Log(1.0, 10_000.0),
    "weight_lr": Log(1e-5, 3.0),
    "tolerance": Log(3e-4, 0.3),
    "polyak": OneOf((0, 1)),
    "value_samples": OneOf((1, 4, 16, 64, 256, 1024)),
    "refresh_samples": OneOf((16, 64, 256, 1024, 4096)),
    "refresh": OneOf((5, 20, 80, 320)),
}


def ranges_of(entry: Entry, problem: Problem) -> dict[str, Log | OneOf]:
    """What a method tunes on a problem."""
    own = STEPS[problem.name]
    lr = Log(entry.scale * own.low, entry.scale * own.high)
    shared = {**CHOICES, "lr": lr, "eta": lr, "constraint_lr": lr}
    return {name: shared[name] for name in entry.tunes}


def first_points(entry: Entry, problem: Problem, number: int, seed: int = 0) -> Tensor:
    """Points of a scrambled Sobol sequence over the unit cube of the method's ranges."""
    engine = SobolEngine(len(ranges_of(entry, problem)), scramble=True, seed=seed)
    return engine.draw(number, dtype=torch.float64).clamp(max=_BELOW_ONE)


def nearby_points(
    entry: Entry, problem: Problem, centres: Tensor, number: int, seed: int = 0
) -> Tensor:
    """Points around given ones, in turn: a tenth of each range away, or another choice."""
    generator = torch.Generator().manual_seed(seed)
    ranges = ranges_of(entry, problem)
    chosen = centres[torch.arange(number) % len(centres)]
    away = 0.1 * torch.randn(chosen.shape, generator=generator, dtype=torch.float64)
    anew = torch.rand(chosen.shape, generator=generator, dtype=torch.float64)
    other = torch.rand(chosen.shape, generator=generator) < 0.25
    listed = torch.tensor([isinstance(each, OneOf) for each in ranges.values()])
    moved = torch.where(listed, torch.where(other, anew, chosen), chosen + away)
    return moved.clamp(0.0, _BELOW_ONE)


def settings(entry: Entry, problem: Problem, points: Tensor) -> Values:
    """The hyperparameters at points of the unit cube, each of shape (settings, 1)."""
    ranges = ranges_of(entry, problem)
    h = {name: ranges[name].at(points[:, k : k + 1]) for k, name in enumerate(ranges)}
    if "width" in h:
        noise = entry.tracked_noise(problem, h)
        h["smoothing"] = h.pop("width") * noise / problem.steepness
    if "gain" in h:
        h["penalty"] = h.pop("gain") / (h["lr"] * entry.lag(problem, h))
    return h


_BELOW_ONE = 1 - 1e-9


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


def cheapest(pool: Pool, output: str, level: float) -> int | None:
    """The setting that was cheapest for an accuracy on the tuning seeds."""
    samples = pool.samples(output, slice(pool.budget.tuning), MARGIN * level)
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
    trace = run(
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
