"""Smoothing that changes with the step, or is given as a width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import _checks

Schedule = float | Callable[[int], float]
"""A number, or a function of the step that gives it."""


def at_step(schedule: Schedule, step: int) -> float:
    """The number of one step."""
    return schedule(step) if callable(schedule) else schedule


@dataclass(frozen=True)
class Width:
    r"""A smoothing, given as the width of the rounded kink in units of the values.

    .. math::
        \lambda = \text{width} / (\text{jump of the slope of } f \text{ at its kink})

    A number lambda makes the kink of a hinge with penalty rho lambda rho wide, that of CVaR with
    ratio r lambda / r, that of rho abs(u) 2 lambda rho. A width keeps its meaning when rho or r
    changes. It may stand wherever a `smoothing` is asked for.

    Args:
        width: a number, 0 for f itself.
    """

    width: float

    def __post_init__(self) -> None:
        _checks.at_least("Width", "width", self.width, 0.0)

    def smoothing(self, jump: float) -> float:
        return self.width / jump


Smoothing = Schedule | Width | Literal["auto"]
"""Lambda, or the width of the rounded kink, or that width from the error of the estimates."""


@dataclass(frozen=True)
class Annealed:
    """A smoothing that falls geometrically from `start` to `end` in `steps` steps, then stays."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _checks.positive("Annealed", "start", self.start)
        _checks.positive("Annealed", "end", self.end)
        _checks.at_least("Annealed", "steps", self.steps, 1)

    def __call__(self, step: int) -> float:
        done = min(step / self.steps, 1.0)
        return self.start * (self.end / self.start) ** done
