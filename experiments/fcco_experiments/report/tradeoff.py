"""The plot of a trade-off: two final figures against each other, with the frontier."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..stats import spread
from ..store import SavedRun
from ..task import Metric, Panel
from .canvas import (
    SIZE,
    bounds,
    canvas,
    frame,
    line_at,
    log_axis,
    spans_decades,
    svg_of,
    ticks,
)
from .frontier import frontier
from .labels import place
from .palette import TOKENS, Style, family_of
from .runs import finished, number
from .words import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Tradeoff", "tradeoff"]

Point = tuple[float, float]


@dataclass(frozen=True)
class Tradeoff:
    """A plot, and whether one mean beats all others in both directions."""

    svg: str
    beaten: bool


def tradeoff(
    runs: Mapping[str, Sequence[SavedRun]],
    panel: Panel,
    look: Mapping[str, Style],
    metrics: Sequence[Metric],
) -> Tradeoff | None:
    """Final `y` against final `x`: a dot per run, a large one per setting, and the frontier.

    With settings `NAME@i` of a sweep every method has a frontier of its own. Frontiers go through
    means over seeds: one lucky seed is no frontier. Which direction is good is known from
    `metrics`; without it, high `y` and low `x` are.
    """
    better = {metric.key: metric.better for metric in metrics}
    good = better.get(panel.x) == "higher", better.get(panel.y) != "lower"
    dots = {name: _points(group, panel) for name, group in runs.items()}
    dots = {name: points for name, points in dots.items() if points}
    if not dots:
        return None
    means = {name: _mean(points) for name, points in dots.items()}
    sweep = any(family_of(name) != name for name in dots)
    with canvas(*SIZE) as (figure, axes):
        axes.grid(axis="x", color=TOKENS["grid"][0], linewidth=0.8)
        line_at(axes, panel.reference)
        line_at(axes, panel.x_reference, vertical=True)
        for name, points in dots.items():
            _scatter(axes, points, means[name], look[family_of(name)], sweep)
        if sweep:
            front, beaten = [], False
            for family in dict.fromkeys(map(family_of, dots)):
                own = [means[name] for name in means if family_of(name) == family]
                _front(axes, own, good, look[family].colour, look[family].dash)
        else:
            front = _front(axes, list(means.values()), good, TOKENS["muted"][0], ())
            beaten = len(front) == 1
        every = [point for points in dots.values() for point in points]
        _fit(axes, every, panel)
        frame(
            figure,
            axes,
            f"{panel.x_label or title(panel.x)}  ({'→' if good[0] else '←'} better)",
            f"{panel.label or title(panel.y)}  ({'↑' if good[1] else '↓'} better)",
        )
        if not sweep and len(dots) <= 8:
            place(figure, axes, means, look, [*every, *_along(front)], panel)
        return Tradeoff(svg_of(figure), beaten and len(dots) > 1)


def _fit(axes: Axes, points: Sequence[Point], panel: Panel) -> None:
    """Both axes; a logarithmic x where one method is so far off that the others would be a blot."""
    x = [*(point[0] for point in points), *_given(panel.x_reference)]
    typical = statistics.median(map(abs, x))
    if spans_decades(x):
        low, high = math.log10(min(x)), math.log10(max(x))
        margin = 0.05 * (high - low)
        log_axis(axes, (10 ** (low - margin), 10 ** (high + margin)))
    elif typical > 0 and max(map(abs, x)) > 10 * typical:
        start = 10.0 ** math.floor(math.log10(typical))
        axes.set_xscale("symlog", linthresh=start)
        limits = bounds(x) or (-1.0, 1.0)
        axes.set_xlim(min(1.3 * min(x), min(x) - start / 4), limits[1])
        powers = [start * 10.0**k for k in range(12)]
        ticks(axes, [*(-power for power in powers), 0.0, *powers])
    else:
        axes.set_xlim(*(bounds(x) or (0.0, 1.0)))
    axes.set_ylim(*(bounds([point[1] for point in points], panel.reference) or (0.0, 1.0)))


def _given(value: float | None) -> list[float]:
    return [] if value is None else [value]


def _points(runs: Sequence[SavedRun], panel: Panel) -> list[Point]:
    rows = [run.figures for run in finished(runs)]
    points = [(number(row.get(panel.x)), number(row.get(panel.y))) for row in rows]
    return [point for point in points if all(map(math.isfinite, point))]


def _mean(points: Sequence[Point]) -> Point:
    return spread(x for x, _ in points)[0], spread(y for _, y in points)[0]


def _scatter(axes: Axes, points: Sequence[Point], mean: Point, style: Style, sweep: bool) -> None:
    axes.scatter(
        *zip(*points, strict=True),
        s=20 if sweep else 14,
        color=style.colour,
        alpha=0.45,
        linewidths=0,
        marker=style.marker,
        zorder=2,
    )
    if len(points) > 1 or not sweep:
        axes.scatter(
            *mean,
            s=30 if sweep else 62,
            color=style.colour,
            marker=style.marker,
            edgecolors=TOKENS["page"][0],
            linewidths=0.9,
            zorder=4,
        )


def _front(
    axes: Axes, points: Sequence[Point], good: tuple[bool, bool], colour: str, dash: Sequence[float]
) -> list[Point]:
    x, y = [point[0] for point in points], [point[1] for point in points]
    order = frontier(x, y, *good)
    axes.plot(
        [x[i] for i in order],
        [y[i] for i in order],
        color=colour,
        linewidth=1.4,
        dashes=dash or (None, None),
        zorder=1.8,
    )
    return [points[i] for i in order]


def _along(corners: Sequence[Point]) -> list[Point]:
    """Places on a line, where a name would be hard to read."""
    steps = [k / 40 for k in range(1, 40)]
    pairs = itertools.pairwise(corners)
    return [(a + (c - a) * t, b + (d - b) * t) for (a, b), (c, d) in pairs for t in steps]
