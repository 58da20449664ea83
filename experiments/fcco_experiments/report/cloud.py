"""The cloud of a sweep as numbers: a dot per run, a frontier per method, and a frame that fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..task import Metric, Panel
from .frontier import frontier
from .runs import number
from .study import Study, Trial

__all__ = ["Cloud", "Dots", "cloud", "robust"]

Limits = tuple[float, float]
_FAR = 3.0
"""Quartile ranges beyond the quartiles: what is farther out is "far out" (Tukey)."""


@dataclass(frozen=True)
class Dots:
    """Runs of a method.

    Attributes:
        x: first figures.
        y: second figures.
        feasible: whether the setting is, by the rule.
    """

    x: np.ndarray
    y: np.ndarray
    feasible: np.ndarray


@dataclass(frozen=True)
class Cloud:
    """Two figures of every run.

    Attributes:
        panel: keys and words.
        good: whether a higher x, a higher y is better.
        dots: by method.
        fronts: settings of each method whose means no other setting's means beat, ordered by x.
        winners: means of the setting that was chosen, by method.
        x_limits: of the frame.
        y_limits: of the frame.
    """

    panel: Panel
    good: tuple[bool, bool]
    dots: Mapping[str, Dots]
    fronts: Mapping[str, tuple[Trial, ...]]
    winners: Mapping[str, tuple[float, float]]
    x_limits: Limits
    y_limits: Limits

    def inside(self, name: str) -> np.ndarray:
        """Which dots of a method are in the frame."""
        own = self.dots[name]
        across = (own.x >= self.x_limits[0]) & (own.x <= self.x_limits[1])
        return across & (own.y >= self.y_limits[0]) & (own.y <= self.y_limits[1])

    def shows(self, point: tuple[float, float]) -> bool:
        """Whether a point is in the frame."""
        low, high = zip(self.x_limits, self.y_limits, strict=True)
        return all(a <= value <= b for a, value, b in zip(low, point, high, strict=True))

    @property
    def outside(self) -> int:
        """How many dots are not in the frame."""
        return sum(int((~self.inside(name)).sum()) for name in self.dots)


def cloud(found: Study, panel: Panel, metrics: Sequence[Metric]) -> Cloud | None:
    """Dots, frontiers and frame; None where no run has both figures.

    Frontiers go through means over seeds of settings that have a score: one lucky seed is no
    frontier, and a setting with a run that diverged cannot be chosen. Without saved runs the dots
    are means too.

    Args:
        found: the sweep.
        panel: which figures.
        metrics: for the direction of good; without it, high y and low x are.
    """
    better = {metric.key: metric.better for metric in metrics}
    good = better.get(panel.x) == "higher", better.get(panel.y) != "lower"
    dots, fronts = {}, {}
    for name, trials in found.families.items():
        dots[name] = _dots(found, trials, panel)
        scored = [trial for trial in trials if trial.score is not None]
        x, y = ([number(t.figures.get(key)) for t in scored] for key in (panel.x, panel.y))
        fronts[name] = tuple(scored[i] for i in frontier(x, y, *good))
    dots = {name: own for name, own in dots.items() if own.x.size}
    if not dots:
        return None
    winners = {
        name: (number(won.figures.get(panel.x)), number(won.figures.get(panel.y)))
        for name, won in found.winners.items()
    }
    winners = {name: point for name, point in winners.items() if all(map(math.isfinite, point))}
    must = [winners[name] for name in winners if found.feasible(found.winners[name])]
    x = _frame(
        dots, "x", [panel.x_reference, *(p[0] for p in must)], [p[0] for p in winners.values()]
    )
    may = [panel.reference, *(p[1] for p in winners.values())]
    y = _frame(dots, "y", [p[1] for p in must], may)
    return Cloud(panel, good, dots, fronts, winners, x, y)


def _frame(
    dots: Mapping[str, Dots],
    axis: str,
    must: Sequence[float | None],
    may: Sequence[float | None],
) -> Limits:
    """Limits with what must be seen, and what may be if it is no farther off than they are wide."""
    values = np.concatenate([getattr(own, axis) for own in dots.values()])
    low, high = robust(values, *must)
    wide = high - low
    near = [v for v in may if v is not None and low - wide <= v <= high + wide]
    return robust(values, *must, *near)


def _dots(found: Study, trials: Sequence[Trial], panel: Panel) -> Dots:
    points: list[tuple[float, float, bool]] = []
    for trial in trials:
        rows = trial.runs
        if not found.saved and trial.score is not None:
            rows = (trial.figures,)
        good = found.feasible(trial)
        points += [(number(row.get(panel.x)), number(row.get(panel.y)), good) for row in rows]
    table = np.array(points, dtype=float).reshape(-1, 3)
    table = table[np.isfinite(table).all(axis=1)]
    return Dots(table[:, 0], table[:, 1], table[:, 2] > 0)


def robust(values: np.ndarray, *keep: float | None) -> Limits:
    """Limits of an axis that a few far values cannot squeeze.

    All that is less than three quartile ranges beyond the quartiles is in the frame, and what must
    be kept; never more than there is.

    Args:
        values: of all dots.
        keep: must be in the frame, such as a limit.

    >>> low, high = robust(np.array([1.0, 2.0, 3.0, 4.0, 1e9]))
    >>> round(low, 2), round(high, 2)
    (0.85, 4.15)
    """
    finite = values[np.isfinite(values)]
    kept = [value for value in keep if value is not None and math.isfinite(value)]
    if not finite.size:
        low, high = (min(kept), max(kept)) if kept else (0.0, 1.0)
    else:
        first, third = np.quantile(finite, (0.25, 0.75))
        reach = _FAR * (third - first)
        if reach == 0:  # most are the same: the next that says something about the width
            reach = float(np.subtract(*np.quantile(finite, (0.95, 0.05))))
        near = finite[(finite >= first - reach) & (finite <= third + reach)]
        low, high = float(near.min()), float(near.max())
        low, high = min([low, *kept]), max([high, *kept])
    margin = 0.05 * (high - low) or max(abs(high) * 0.05, 1e-3)
    return low - margin, high + margin
