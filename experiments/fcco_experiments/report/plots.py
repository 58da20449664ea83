"""The figures of a comparison, each as one SVG element for light and dark pages.

matplotlib draws with the light palette; `element` replaces its colours with CSS variables of the
page, so that one drawing serves both colour schemes.
"""

from __future__ import annotations

import bisect
import io
import itertools
import math
import re
import statistics
import textwrap
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


def numbers(value: object) -> list[float]:
    """A list of floats; what is no list becomes empty."""
    return [number(item) for item in value] if isinstance(value, list | tuple) else []


def curve(runs: Iterable[SavedRun], key: str, entry: int | None = None) -> Curve:
    """`key` over epochs; with `entry`, that entry of a list."""
    seen: dict[float, list[float]] = {}
    for run in runs:
        for row in run.rows:
            values = [number(row.get(key))] if entry is None else numbers(row.get(key))[entry:]
            epoch = number(row.get("epoch", 0))
            if values and math.isfinite(epoch) and math.isfinite(values[0]):
                seen.setdefault(epoch, []).append(values[0])
    epochs = sorted(seen)
    ways = (statistics.fmean, min, max)
    mean, low, high = ([way(seen[epoch]) for epoch in epochs] for way in ways)
    return Curve(epochs, mean, low, high)


def steady(runs: Sequence[SavedRun]) -> Sequence[SavedRun]:
    """Runs without those that diverged, unless all did: a mean must not jump where one ends."""
    return [run for run in runs if run.diverged is None] or runs


def entry_names(runs: Runs, key: str, given: Sequence[str]) -> list[str]:
    """Names of the entries of a list: those that a run has as `<key>_names`, else the page's.

    Names of the page are not taken for a list of another length.
    """
    figures = [run.figures for group in runs.values() for run in group]
    lists = [len(numbers(row[key])) for row in figures if key in row]
    lists += [len(numbers(row.get(key))) for g in runs.values() for r in g for row in r.rows[:1]]
    named = next((row[f"{key}_names"] for row in figures if f"{key}_names" in row), None)
    names = list(map(str, named if named is not None else given))
    length = max(lists, default=0)
    if named is None and length != len(names):
        names = []
    return [*names, *(f"entry {k + 1}" for k in range(len(names), length))]


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


def means(points: Mapping[str, Sequence[Point]]) -> dict[str, Point]:
    """The middle of the points of each method."""
    middles = {}
    for name, own in points.items():
        x, y = zip(*own, strict=True)
        middles[name] = statistics.fmean(x), statistics.fmean(y)
    return middles


def scatter(
    points: Mapping[str, Sequence[Point]],
    large: Mapping[str, Point],
    panel: Panel,
    look: Look,
    metrics: Sequence[Metric],
    prefix: str,
    references: Sequence[str] = (),
) -> Plot | None:
    """`panel.y` against `panel.x`: small dots, and a large one of each method with their frontier.

    `metrics` say which direction is better; for `references` the frame need not have room.
    """
    if not any(points.values()):
        return None
    methods = [name for name in points if name not in references] or list(points)
    shown = [p for n in methods for p in (*points[n], *([large[n]] if n in large else []))]
    limits = [
        _room([point[k] for point in shown], [line, *(point[k] for point in large.values())])
        for k, line in enumerate((panel.x_reference, panel.reference))
    ]

    def inside(point: Point) -> bool:
        return all(low <= v <= high for v, (low, high) in zip(point, limits, strict=True))

    good = directions(panel, metrics)
    with canvas(*SIZE) as (figure, axes):
        axes.set_xlim(*limits[0])
        axes.set_ylim(*limits[1])
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        for line, (low, high), vertical in zip(
            (panel.x_reference, panel.reference), limits, (True, False), strict=True
        ):
            line_at(axes, line if line is not None and low <= line <= high else None, vertical)
        for name, own in sorted(points.items(), key=lambda pair: -len(pair[1])):  # few above many
            shape: Any = {"color": look[name].colour, "marker": look[name].marker}
            if seen := [point for point in own if inside(point)]:
                axes.scatter(*zip(*seen, strict=True), s=14, alpha=0.45, lw=0, zorder=2, **shape)
            if name in large and inside(large[name]):
                axes.scatter(*large[name], s=62, edgecolors=PAGE, lw=0.9, zorder=4, **shape)
        x, y = zip(*large.values(), strict=True) if large else ((), ())
        front = [list(large)[k] for k in frontier(x, y, *good)]
        corners = np.array([large[name] for name in front]).reshape(-1, 2)
        axes.plot(*corners.T, color=MUTED, linewidth=1.4, zorder=1.8)
        x_label = f"{panel.x_label or title(panel.x)}  ({'→' if good[0] else '←'} better)"
        y_label = f"{panel.label or title(panel.y)}  ({'↑' if good[1] else '↓'} better)"
        label(axes, x_label, y_label)
        svg = element(figure, prefix)
    facts = {
        "front": front,
        "alone": len(front) == 1 < len(large),
        "far": {name: point for name, point in large.items() if not inside(point)},
        "cut": sum(not inside(point) for own in points.values() for point in own),
        "several": any(len(own) > 1 for own in points.values()),
    }
    return Plot(svg, panel.title, panel, facts)


def _room(values: Sequence[float], others: Iterable[float | None]) -> Limits:
    """A frame for most of the values, and for others that are not farther than its width."""
    low, high = robust(values)
    near = (v for v in others if v is not None and 2 * low - high <= v <= 2 * high - low)
    return robust(values, *near)


def directions(panel: Panel, metrics: Sequence[Metric]) -> tuple[bool, bool]:
    """Whether a higher x, a higher y is better; without their metrics, low x and high y are."""
    better = {metric.key: metric.better for metric in metrics}
    return better.get(panel.x) == "higher", better.get(panel.y) != "lower"


def curves(runs: Runs, panel: Panel, look: Look, prefix: str) -> Plot | None:
    """`panel.y` over epochs: mean over seeds in a band from the smallest to the largest."""
    lines = {name: curve(steady(group), panel.y) for name, group in runs.items()}
    lines = {name: line for name, line in lines.items() if line.epochs}
    if not any(len(line.epochs) > 1 for line in lines.values()):
        return None
    drawn = []
    for k, (name, line) in enumerate(lines.items()):
        style, every = look[name], max(1, len(line.epochs) // 6)
        # A few markers, at other epochs for each line, and one at the end.
        marked = {*range(k % every, len(line.epochs), every), len(line.epochs) - 1}
        way: Any = {"color": style.colour, "linewidth": 1.7, "dashes": style.dash or (None, None)}
        way |= {"marker": style.marker, "markersize": 4.5, "markevery": sorted(marked)}
        drawn.append((line, way))
    svg, (low, high), cut = _lines(drawn, panel, prefix)
    ends = {name: line.mean[-1] for name, line in lines.items()}
    outside = {name: value for name, value in ends.items() if not low <= value <= high}
    return Plot(svg, panel.title, panel, {"outside": outside, "cut": cut})


def _lines(
    drawn: Sequence[tuple[Curve, Mapping[str, Any]]], panel: Panel, prefix: str
) -> tuple[str, Limits, bool]:
    """Lines over epochs, each with its look, in a band where it has one.

    The axes are set for what follows the first fifth of training; the last of what is returned says
    whether some of it is outside.
    """
    every = [line for line, _ in drawn]
    last = max(line.epochs[-1] for line in every) or 1.0
    values = [value for line in every for value in (*line.low, *line.high)]
    starts = [bisect.bisect_left(line.epochs, 0.2 * last) for line in every]
    late = [(*x.low[k:], *x.high[k:]) for x, k in zip(every, starts, strict=True)]
    with canvas(*SIZE) as (figure, axes):
        line_at(axes, panel.reference)
        for line, way in drawn:
            if line.low != line.high:
                band: Any = {"color": way["color"], "alpha": 0.16, "linewidth": 0}
                axes.fill_between(line.epochs, line.low, line.high, **band)
            axes.plot(line.epochs, line.mean, **way)
        axes.set_xlim(-0.02 * last, 1.02 * last)
        ends = [end for values in late if values for end in (min(values), max(values))]
        limits = robust(ends, panel.reference)
        axes.set_ylim(*limits)
        label(axes, "epoch", panel.label or title(panel.y))
        svg = element(figure, prefix)
    return svg, limits, min(values) < limits[0] or max(values) > limits[1]


def by_entry(
    runs: Runs, panel: Panel, names: Sequence[str], look: Look, prefix: str
) -> Plot | None:
    """The list `panel.y` with a row per entry and a dot per method, means over seeds.

    A `"change"` has a mark for the value at the first evaluation, a dot per method for that at the
    end, and the way between them; rows are sorted, the largest start on top. `"dots"` have
    whiskers from the smallest to the largest seed, and rows in the order of the list.
    """
    change = panel.kind == "change"
    ends: dict[str, np.ndarray] = {}  # a row per seed, a column per entry
    starts = []
    for name, group in runs.items():
        own = [run for run in steady(group) if len(numbers(run.figures.get(panel.y))) == len(names)]
        first = [numbers(run.rows[0].get(panel.y)) for run in own if run.rows]
        if own and names and (not change or {*map(len, first)} == {len(names)}):
            ends[name] = np.array([numbers(run.figures[panel.y]) for run in own])
            starts += first if change else []
    if not ends or not all(np.isfinite(table).all() for table in ends.values()):
        return None
    before = np.mean(starts, axis=0) if change else np.zeros(len(names))
    order = np.argsort(-before, kind="stable") if change else np.arange(len(names))
    apart = 0.07 if len(names) <= 8 else 0.036  # inches between the dots of two methods
    room = max(0.30, 0.12 + apart * len(ends))
    wrap = textwrap.TextWrapper(21, max_lines=int(room / 0.145), placeholder=" …")
    labels = [wrap.fill(names[int(k)]) for k in order]
    rows, drawn = np.arange(len(names)), []
    with canvas(SIZE[0], 0.80 + room * len(names)) as (figure, axes):
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x", color=GRID, linewidth=0.8)
        line_at(axes, panel.reference, vertical=True)
        for row in rows[::2]:
            axes.axhspan(row - 0.5, row + 0.5, color=TOKENS["panel"][0], linewidth=0, zorder=0)
        if change:
            axes.vlines(before[order], rows - 0.36, rows + 0.36, color=INK, linewidth=1.8)
        for lane, (name, table) in enumerate(ends.items()):
            style, mean = look[name], table.mean(axis=0)
            low, high = (before, mean) if change else (table.min(axis=0), table.max(axis=0))
            at = rows + (lane - (len(ends) - 1) / 2) * apart / room
            way: Any = {"color": style.colour, "linewidth": 1.0, "alpha": 0.55, "zorder": 1.8}
            axes.hlines(at, low[order], high[order], **way)
            dot: Any = {"color": style.colour, "marker": style.marker, "linestyle": "", "zorder": 3}
            dot |= {"markersize": 5.2, "markeredgecolor": PAGE, "markeredgewidth": 0.5}
            axes.plot(mean[order], at, **dot)
            drawn.append((*low, *high))
        values = list(itertools.chain(*drawn))
        limits = robust([end for own in drawn for end in (min(own), max(own))], panel.reference)
        axes.set_xlim(*limits)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(rows, labels)
        axes.tick_params(axis="y", labelsize=8.5, labelcolor=INK)
        label(axes, panel.label or title(panel.y), "▏before, dots: after" * change)
        svg = element(figure, prefix)
    worst = {}
    for name, table in ends.items():
        mean = table.mean(axis=0)
        k = int(mean.argmax() if change else mean.argmin())
        worst[name] = names[k], float(mean[k])
    cut = min(values) < limits[0] or max(values) > limits[1]
    return Plot(svg, panel.title, panel, {"cut": cut, "worst": worst})
