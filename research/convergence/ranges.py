"""Where hyperparameters are searched: one range for each, shared by all methods of a problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from .entries import Entry
from .problem import Problem
from .slopes import Values

__all__ = [
    "CHOICES",
    "STEPS",
    "Log",
    "OneOf",
    "first_points",
    "nearby_points",
    "ranges_of",
    "settings",
]


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
