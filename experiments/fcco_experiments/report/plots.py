"""The figures of a comparison, each as one SVG element for light and dark pages.

matplotlib draws with the light palette; `element` replaces its colours with CSS variables of the
page, so that one drawing serves both colour schemes.
"""

from __future__ import annotations

import bisect
import io
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stats import frontier
from ..store import SavedRun
from ..task import Metric, Panel
from .style import COLOURS, TOKENS, Style, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[SavedRun]]
Point = tuple[float, float]
Limits = tuple[float, float]
Look = Mapping[str, Style]
SIZE = 5.2, 3.3  # inches of a plot
INK, MUTED, GRID, LIMIT, PAGE = (TOKENS[n][0] for n in ("ink", "muted", "grid", "limit", "page"))
_VARIABLES = {pair[0]: f"var(--{name})" for name, pair in TOKENS.items()} | {
    pair[0]: f"var(--method-{k})" for k, pair in enumerate(COLOURS)
}


@dataclass(frozen=True)
class Plot:
    """A figure, and what the template says about it."""

    svg: str
    title: str
    panel: Panel
    facts: Mapping[str, Any] = field(default_factory=dict)


# Numbers out of runs. A run may have no evaluations but the last, or none at all.


@dataclass(frozen=True)
class Curve:
    """A figure over the epochs where any run has a finite value: mean, smallest, largest."""

    epochs: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def number(value: object) -> float:
    """A float; what is no number becomes NaN."""
    return float(value) if isinstance(value, int | float) else math.nan


def curve(runs: Iterable[SavedRun], key: str) -> Curve:
    """`key` over epochs."""
    seen: dict[float, list[float]] = {}
    for run in runs:
        for row in run.rows:
            epoch, value = number(row.get("epoch", 0)), number(row.get(key))
            if math.isfinite(epoch) and math.isfinite(value):
                seen.setdefault(epoch, []).append(value)
    epochs = sorted(seen)
    ways = (statistics.fmean, min, max)
    mean, low, high = ([way(seen[epoch]) for epoch in epochs] for way in ways)
    return Curve(epochs, mean, low, high)


def steady(runs: Sequence[SavedRun]) -> Sequence[SavedRun]:
    """Runs without those that diverged, unless all did: a mean must not jump where one ends."""
    return [run for run in runs if run.diverged is None] or runs


# The drawing surface.


@contextmanager
def canvas(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure of that many inches, whatever the user's matplotlibrc says."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({
            "font.family": "DejaVu Sans",  # comes with matplotlib and is wide: what is drawn fits
            "font.size": 9.0,
            "text.parse_math": False,
            "svg.fonttype": "none",
        })  # fmt: skip
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        dress(axes)
        yield figure, axes


def dress(axes: Axes) -> None:
    """Quiet axes: a line below, a grid across, and few marks."""
    axes.set_facecolor("none")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
    axes.tick_params(axis="x", length=3)
    axes.locator_params(axis="both", nbins=6)


def label(axes: Axes, x_label: str, y_label: str) -> None:
    """Horizontal labels of both axes."""
    axes.set_title(y_label, loc="left", fontsize=9, color=INK)
    axes.set_xlabel(x_label, loc="right", fontsize=9, color=INK)


def line_at(axes: Axes, value: float | None, vertical: bool = False) -> None:
    """A reference, such as the limit of a constraint."""
    if value is not None:
        draw = axes.axvline if vertical else axes.axhline
        draw(value, color=LIMIT, linewidth=1.1, linestyle=(0, (2, 2)), zorder=1.5)


def robust(values: Iterable[float], *keep: float | None) -> Limits:
    """Limits of an axis that a few far values cannot squeeze.

    In the frame is what must be kept, and all that is less than eight times farther from the median
    than the median distance; everything where that would double the frame at most, or where there
    are fewer than five values.

    >>> low, high = robust([1.0, 2.0, 3.0, 4.0, 1e9])
    >>> round(low, 2), round(high, 2)
    (0.85, 4.15)
    """
    finite = np.array([value for value in values if math.isfinite(value)])
    inside = [value for value in keep if value is not None and math.isfinite(value)]
    if finite.size:
        away = np.abs(finite - np.median(finite))
        near = finite[away <= (8 * np.median(away) or np.quantile(away, 0.95))]
        whole = finite.size < 5 or np.ptp(finite) <= 2 * np.ptp(near)
        inside += (finite if whole else near).tolist()
    low, high = (min(inside), max(inside)) if inside else (0.0, 1.0)
    margin = 0.05 * (high - low) or max(abs(high) * 0.05, 1e-3)
    return low - margin, high + margin


def element(figure: Figure, prefix: str) -> str:
    """A figure as an element of the page: colours and font of the page, no ids but those in use.

    No other drawing of the page may have the `prefix`: ids are made from it.
    """
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": prefix}):
        data: Any = {"Date": None, "Creator": None}
        figure.savefig(stream, format="svg", transparent=True, metadata=data)
    svg = stream.getvalue()
    box = re.search(r'viewBox="[^"]*"', svg)
    svg = svg[svg.index(">", svg.index("<svg")) + 1 :].replace("xlink:href", "href")
    # A style sheet inside would hold for the whole page, and fonts are those of the page.
    noise = r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->| font-family: [^;\"]*;"
    svg = re.sub(noise, "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    head = f'<svg class="drawing" {box[0] if box else ""} aria-hidden="true" focusable="false">'
    return head + svg.strip()


# The figures.


def final_points(runs: Runs, panel: Panel) -> dict[str, list[Point]]:
    """The two figures of a trade-off at the end of each run; methods without any are left out."""
    points = {
        name: [(number(r.figures.get(panel.x)), number(r.figures.get(panel.y))) for r in group]
        for name, group in runs.items()
    }
    finite = {n: [p for p in own if all(map(math.isfinite, p))] for n, own in points.items()}
    return {name: own for name, own in finite.items() if own}


def scatter(
    runs: Runs, panel: Panel, look: Look, metrics: Sequence[Metric], prefix: str
) -> Plot | None:
    """`panel.y` against `panel.x`: a small dot per run, large ones for means, and their frontier.

    `metrics` say which direction is better.
    """
    points = final_points(runs, panel)
    if not points:
        return None
    means = {
        name: tuple(map(statistics.fmean, zip(*own, strict=True))) for name, own in points.items()
    }
    good = directions(panel, metrics)
    with canvas(*SIZE) as (figure, axes):
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        for name, own in sorted(points.items(), key=lambda pair: -len(pair[1])):  # few above many
            shape: Any = {"color": look[name].colour, "marker": look[name].marker}
            axes.scatter(*zip(*own, strict=True), s=14, alpha=0.45, lw=0, zorder=2, **shape)
            axes.scatter(*means[name], s=62, edgecolors=PAGE, lw=0.9, zorder=4, **shape)
        line_at(axes, panel.x_reference, vertical=True)
        line_at(axes, panel.reference)
        x, y = zip(*means.values(), strict=True)
        front = [list(means)[k] for k in frontier(x, y, *good)]
        corners = np.array([means[name] for name in front])
        axes.plot(*corners.T, color=MUTED, linewidth=1.4, zorder=1.8)
        x_label = f"{panel.x_label or title(panel.x)}  ({'→' if good[0] else '←'} better)"
        y_label = f"{panel.label or title(panel.y)}  ({'↑' if good[1] else '↓'} better)"
        label(axes, x_label, y_label)
        svg = element(figure, prefix)
    alone = len(front) == 1 < len(means)
    several = any(len(own) > 1 for own in points.values())
    return Plot(svg, panel.title, panel, {"front": front, "alone": alone, "several": several})


def directions(panel: Panel, metrics: Sequence[Metric]) -> tuple[bool, bool]:
    """Whether a higher x, a higher y is better; without their metrics, low x and high y are."""
    better = {metric.key: metric.better for metric in metrics}
    return better.get(panel.x) == "higher", better.get(panel.y) != "lower"


def curves(runs: Runs, panel: Panel, look: Look, prefix: str) -> Plot | None:
    """`panel.y` over epochs: mean over seeds in a band from the smallest to the largest.

    The frame is set for most methods and for what follows the first fifth of training; `cut` says
    whether some of it is outside.
    """
    lines = {name: curve(steady(group), panel.y) for name, group in runs.items()}
    lines = {name: line for name, line in lines.items() if line.epochs}
    if not any(len(line.epochs) > 1 for line in lines.values()):
        return None
    last = max(line.epochs[-1] for line in lines.values())
    ends, values = list[float](), list[float]()
    with canvas(*SIZE) as (figure, axes):
        line_at(axes, panel.reference)
        for k, (name, line) in enumerate(lines.items()):
            style, every = look[name], max(1, len(line.epochs) // 6)
            if line.low != line.high:
                band: Any = {"color": style.colour, "alpha": 0.16, "linewidth": 0}
                axes.fill_between(line.epochs, line.low, line.high, **band)
            # A few markers, at other epochs for each line, and one at the end.
            marked = {*range(k % every, len(line.epochs), every), len(line.epochs) - 1}
            way: Any = {"color": style.colour, "dashes": style.dash or (None, None)}
            way |= {"linewidth": 1.7, "marker": style.marker, "markersize": 4.5}
            axes.plot(line.epochs, line.mean, markevery=sorted(marked), **way)
            values += [*line.low, *line.high]
            start = bisect.bisect_left(line.epochs, 0.2 * last)
            if late := [*line.low[start:], *line.high[start:]]:
                ends += [min(late), max(late)]
        low, high = robust(ends, panel.reference)
        axes.set_xlim(-0.02 * last, 1.02 * last)
        axes.set_ylim(low, high)
        label(axes, "epoch", panel.label or title(panel.y))
        svg = element(figure, prefix)
    return Plot(svg, panel.title, panel, {"cut": min(values) < low or max(values) > high})
