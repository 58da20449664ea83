"""Numbers that change with the step, such as an annealed smoothing."""

from __future__ import annotations

from dataclasses import dataclass

from . import _checks

__all__ = ["Annealed"]


@dataclass(frozen=True)
class Annealed:
    """Geometric decay from `start` to `end` over `steps` steps, then constant.

    Example:
        >>> from fcco import Annealed
        >>> smoothing = Annealed(1.0, 0.01, steps=100)
        >>> [round(smoothing(t), 3) for t in (0, 50, 100, 500)]
        [1.0, 0.1, 0.01, 0.01]
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _checks.positive("Annealed", "start", self.start)
        _checks.positive("Annealed", "end", self.end)
        _checks.at_least("Annealed", "steps", self.steps, 1)

    def __call__(self, step: int) -> float:
        """The value after `step` steps."""
        done = min(step / self.steps, 1.0)
        return self.start * (self.end / self.start) ** done
