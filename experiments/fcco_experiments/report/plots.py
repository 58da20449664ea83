"""The figures of a comparison, each as one SVG element for light and dark pages.

matplotlib draws with the light palette; `element` replaces its colours with CSS variables of the
page, so that one drawing serves both colour schemes.
"""

from __future__ import annotations

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
from .style import COLOURS, TOKENS, Style, fixed, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

Runs = Mapping[str, Sequence[SavedRun]]
Point = tuple[float, float]
Limits = tuple[float, float]
Look = Mapping[str, Style]
SIZE, SMALL = (5.2, 3.3), (3.6, 2.5)  # inches of a plot, and of a small one among many
INK, MUTED, GRID, LIMIT, PAGE = (TOKENS[n][0] for n in ("ink", "muted", "grid", "limit", "page"))
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib and is wide: what it measures fits
    "font.size": 9.0,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "path.simplify": False,  # it would drop the dots of a sweep, lines of no length
}
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
def canvas(width: float, height: float, left: float = 0.58) -> Iterator[tuple[Figure, Axes]]:
    """A figure of that many inches, whatever the user's matplotlibrc says.

    Args:
        width: of the figure.
        height: of the figure.
        left: room for what stands beside the upright axis.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        figure = Figure(figsize=(width, height))
        right, top, bottom = 0.14, 0.30, 0.50
        axes = figure.add_axes(
            (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
        )
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


def frame(figure: Figure, axes: Axes, x_label: str, y_label: str) -> None:
    """Horizontal labels of both axes."""
    figure.text(0.004, 0.99, y_label, va="top", fontsize=9, color=INK)
    axes.set_xlabel(x_label, loc="right", fontsize=9, color=INK)


def frame_tradeoff(figure: Figure, axes: Axes, panel: Panel, good: tuple[bool, bool]) -> None:
    """Grid, labels with the good direction, and the lines of the limits."""
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    for value, ends, vertical in (
        (panel.reference, axes.get_ylim(), False),
        (panel.x_reference, axes.get_xlim(), True),
    ):
        line_at(
            axes, value if value is not None and ends[0] <= value <= ends[1] else None, vertical
        )
    frame(
        figure,
        axes,
        f"{panel.x_label or title(panel.x)}  ({'→' if good[0] else '←'} better)",
        f"{panel.label or title(panel.y)}  ({'↑' if good[1] else '↓'} better)",
    )


def line_at(axes: Axes, value: float | None, vertical: bool = False) -> None:
    """A reference, such as the limit of a constraint."""
    if value is not None:
        draw = axes.axvline if vertical else axes.axhline
        draw(value, color=LIMIT, linewidth=1.1, linestyle=(0, (2, 2)), zorder=1.5)


def robust(values: Iterable[float], *keep: float | None) -> Limits:
    """Limits of an axis that a few far values cannot squeeze.

    All that is less than three quartile ranges beyond the quartiles is in the frame (Tukey), and
    what must be kept.

    >>> low, high = robust([1.0, 2.0, 3.0, 4.0, 1e9])
    >>> round(low, 2), round(high, 2)
    (0.85, 4.15)
    """
    finite = np.array([value for value in values if math.isfinite(value)])
    inside = [value for value in keep if value is not None and math.isfinite(value)]
    if finite.size:
        first, third = np.quantile(finite, (0.25, 0.75))
        reach = 3.0 * (third - first)
        if reach == 0:  # most are the same: the next that says something about the width
            reach = float(np.subtract(*np.quantile(finite, (0.95, 0.05))))
        near = finite[(finite >= first - reach) & (finite <= third + reach)]
        inside += [float(near.min()), float(near.max())]
    low, high = (min(inside), max(inside)) if inside else (0.0, 1.0)
    margin = 0.05 * (high - low) or max(abs(high) * 0.05, 1e-3)
    return low - margin, high + margin


def usual(groups: Iterable[Sequence[float]]) -> list[float]:
    """Values of all methods but those five times farther from the median than is usual."""
    finite = [[v for v in values if math.isfinite(v)] for values in groups]
    finite = [values for values in finite if values]
    every = [value for values in finite for value in values]
    if len(finite) < 3:
        return every
    centre = statistics.median(every)
    away = [max(abs(value - centre) for value in values) for values in finite]
    far = 5 * statistics.median(away)
    return [v for values, d in zip(finite, away, strict=True) if d <= far for v in values]


def spans_decades(values: Iterable[float]) -> bool:
    """Whether a logarithmic axis shows more: all values above 0, the largest 8 times the least."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 8 * min(finite)


def _fit(
    axes: Axes,
    panel: Panel,
    groups: Sequence[Sequence[float]],
    every: Sequence[float],
    upright: bool,
) -> Limits:
    """Set the axis of values for the usual methods; logarithmic where that shows more."""
    reference = [] if panel.reference is None else [panel.reference]
    log = panel.log and spans_decades([*every, *reference])
    seen = math.log10 if log else float
    core = usual([[seen(value) for value in values] for values in groups])
    low, high = robust(core, *map(seen, reference))
    whole = robust((), *map(seen, every), *map(seen, reference))
    if whole[1] - whole[0] <= 2 * (high - low):  # nothing is far off
        low, high = whole
    axis = axes.yaxis if upright else axes.xaxis
    if log:
        low, high = 10**low, 10**high
        (axes.set_yscale if upright else axes.set_xscale)("log")
        heads = (1, 2, 5) if high < 300 * low else (1,)
        marks = [head * 10.0**k for k in range(-12, 13) for head in heads]
        inside = [value for value in marks if low <= value <= high]
        axis.set_ticks(inside, [f"{value:g}" for value in inside])
        axis.set_ticks([], minor=True)
    (axes.set_ylim if upright else axes.set_xlim)(low, high)
    return low, high


def element(figure: Figure, prefix: str) -> str:
    """A figure as an element of the page: no date, short numbers, colours and font of the page.

    Args:
        figure: drawn with the light palette.
        prefix: no other drawing of the page may have it: ids are made from it.
    """
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": prefix}):
        data: Any = {"Date": None, "Creator": None}
        figure.savefig(stream, format="svg", transparent=True, metadata=data)
    svg = stream.getvalue()
    box = re.search(r'viewBox="[^"]*"', svg)
    svg = svg[svg.index(">", svg.index("<svg")) + 1 :]
    # A style sheet inside would hold for the whole page.
    noise = r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>|<!--.*?-->"
    svg = re.sub(noise, "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r" font-family: [^;\"]*;| transform=\"rotate\(-0 [^\"]*\"", "", svg)
    svg = re.sub(r'="[^"<>]*\.\d{3}[^"<>]*"', lambda attribute: _short(attribute[0]), svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r"[ \n]+", " ", re.sub(r">\s+<(?!/?tspan)", "><", svg))
    svg = svg.replace("<g/>", "").replace(' " ', '" ')
    head = f'<svg class="drawing" {box[0] if box else ""} aria-hidden="true" focusable="false">'
    return head + svg.strip()


def _short(text: str) -> str:
    return re.sub(r"\d+\.\d{3,}", lambda value: f"{float(value[0]):.2f}", text)


# The figures.

_SIDES = [(9, 0), (-9, 0), (0, 8), (0, -8), (9, 9), (9, -9), (-9, 9), (-9, -9)]


def write(
    axes: Axes,
    text: str,
    point: Point,
    colour: str,
    taken: list[Bbox],
    busy: Sequence[Point],
    offsets: Sequence[Point] = _SIDES,
    *,
    arrow: bool = False,
) -> Bbox:
    """Write a text beside a point where it covers the fewest of `busy` and nothing of `taken`.

    A text without room is left out, but never one with an arrow. Its box is added to `taken`, and
    returned.

    Args:
        axes: in which.
        text: the text.
        point: in data coordinates.
        colour: of the text.
        taken: boxes of other texts and marks, in pixels.
        busy: points in data coordinates.
        offsets: places of the text in points (1/72 inch), the preferred one first.
        arrow: draw one from the text to the point.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    renderer = FigureCanvasAgg(axes.get_figure(root=True)).get_renderer()
    around = axes.get_window_extent()
    place = axes.transData.transform(point)  # its own mark does not count
    pixels = axes.transData.transform(busy) if busy else []
    pointer: Any = {"arrowstyle": "-|>", "color": colour, "lw": 1.3, "shrinkB": 0}
    notes = []
    for x, y in offsets:
        note = axes.annotate(
            text,
            point,
            (x, y),
            textcoords="offset points",
            annotation_clip=False,  # rounding may put its point outside by a hair
            ha="left" if x > 0 else "right" if x < 0 else "center",
            va="center" if arrow or y == 0 else "bottom" if y > 0 else "top",
            fontsize=8.5,
            color=colour,
            arrowprops=pointer if arrow else None,
            zorder=5,
        )
        note.update_positions(renderer)
        box = Text.get_window_extent(note, renderer)  # without the arrow
        outside = box.x0 < around.x0 or box.x1 > around.x1
        outside = outside or box.y0 < around.y0 or box.y1 > around.y1
        cost = sum(box.padded(2).contains(*pixel) for pixel in pixels)
        hit = sum(box.overlaps(other) for other in taken if not other.contains(*place))
        cost += 1000 * outside + 1000 * hit
        notes.append((cost, note, box))
    best = min(notes, key=lambda note: note[0])
    shown = best[0] < 1000 or arrow
    for note in notes:
        if note is not best or not shown:
            note[1].remove()
    taken += [best[2]] if shown else []
    return best[2]


def boxes(axes: Axes, points: Iterable[Point], reach: float = 5.0) -> list[Bbox]:
    """Boxes around marks, in pixels."""
    from matplotlib.transforms import Bbox

    places = (axes.transData.transform(point) for point in points)
    return [Bbox.from_extents(x - reach, y - reach, x + reach, y + reach) for x, y in places]


def _along(corners: Sequence[Point]) -> list[Point]:
    """Places on a line, where a name would be hard to read."""
    steps = [k / 40 for k in range(1, 40)]
    pairs = itertools.pairwise(corners)
    return [(a + (c - a) * t, b + (d - b) * t) for (a, b), (c, d) in pairs for t in steps]


def directions(panel: Panel, metrics: Sequence[Metric]) -> tuple[bool, bool]:
    """Whether a higher x, a higher y is better; without their metrics, low x and high y are."""
    better = {metric.key: metric.better for metric in metrics}
    return better.get(panel.x) == "higher", better.get(panel.y) != "lower"


def tradeoff(
    runs: Runs,
    panel: Panel,
    look: Look,
    metrics: Sequence[Metric],
    references: Sequence[str],
    prefix: str,
) -> Plot | None:
    """Final `y` against final `x`: a dot per run, a large one per mean, and the frontier of means.

    The frame is set for the methods. A reference, or a method that is far off, is an arrow at the
    border with its numbers.
    """
    dots: dict[str, list[Point]] = {}
    for name, group in runs.items():
        points = [(number(r.figures.get(panel.x)), number(r.figures.get(panel.y))) for r in group]
        if finite := [point for point in points if all(map(math.isfinite, point))]:
            dots[name] = finite
    if not dots:
        return None
    means: dict[str, Point] = {}
    for name, points in dots.items():
        x, y = (statistics.fmean(values) for values in zip(*points, strict=True))
        means[name] = x, y
    methods = [name for name in dots if name not in references] or list(dots)
    limits = _zoom([dots[name] for name in methods], means, panel)
    near = {name: mean for name, mean in means.items() if _inside(mean, limits)}
    good, digits = directions(panel, metrics), {metric.key: metric.digits for metric in metrics}
    with canvas(*SIZE) as (figure, axes):
        axes.set_xlim(*limits[0])
        axes.set_ylim(*limits[1])
        frame_tradeoff(figure, axes, panel, good)
        for name, points in dots.items():
            shape: Any = {"color": look[name].colour, "marker": look[name].marker}
            if seen := [point for point in points if _inside(point, limits)]:
                axes.scatter(*zip(*seen, strict=True), s=14, alpha=0.45, lw=0, zorder=2, **shape)
            if name in near:
                axes.scatter(*means[name], s=62, edgecolors=PAGE, lw=0.9, zorder=4, **shape)
        x, y = zip(*means.values(), strict=True)
        front = [list(means)[i] for i in frontier(x, y, *good)]
        corners = [means[name] for name in front]
        axes.plot(*zip(*corners, strict=True), color=MUTED, linewidth=1.4, zorder=1.8)
        busy = [*_along(corners), *(point for points in dots.values() for point in points)]
        taken = boxes(axes, near.values())
        for name in (name for name in dots if name not in near):
            _arrow(axes, name, means[name], limits, digits, panel, look[name].colour, taken, busy)
        for name, mean in near.items():
            write(axes, name, mean, look[name].colour, taken, busy)
        svg = element(figure, prefix)
    facts = {
        "alone": len(front) == 1 < len(means),
        "front": front,
        "far": [name for name in dots if name not in near],
        "cut": sum(not _inside(point, limits) for name in near for point in dots[name]),
        "several": any(len(points) > 1 for points in dots.values()),
    }
    return Plot(svg, panel.title, panel, facts)


def _inside(point: Point, limits: tuple[Limits, Limits]) -> bool:
    return all(low <= value <= high for value, (low, high) in zip(point, limits, strict=True))


def _zoom(
    groups: Sequence[Sequence[Point]], means: Mapping[str, Point], panel: Panel
) -> tuple[Limits, Limits]:
    """A frame for the points of some methods, with the limits and other means that are near."""
    x, y = (usual([[point[k] for point in points] for points in groups]) for k in (0, 1))
    box = robust(x), robust(y)

    def near(value: float, side: Limits, reach: float) -> bool:
        room = reach * (side[1] - side[0])
        return side[0] - room <= value <= side[1] + room

    keep: tuple[list[float], list[float]] = [], []
    for kept, line, side in zip(keep, (panel.x_reference, panel.reference), box, strict=True):
        kept += [line] if line is not None and near(line, side, 1.0) else []
    for mean in means.values():
        if near(mean[0], box[0], 0.4) and near(mean[1], box[1], 0.4):
            keep[0].append(mean[0])
            keep[1].append(mean[1])
    return robust(x, *keep[0]), robust(y, *keep[1])


def _arrow(
    axes: Axes,
    name: str,
    mean: Point,
    limits: tuple[Limits, Limits],
    digits: Mapping[str, int],
    panel: Panel,
    colour: str,
    taken: list[Bbox],
    busy: list[Point],
) -> None:
    """An arrow at the border towards a mean outside the frame, with its numbers at its tail."""
    pairs = list(zip(mean, limits, strict=True))
    away = [(value > high) - (value < low) for value, (low, high) in pairs]
    x, y = (min(max(value, low), high) for value, (low, high) in pairs)
    side = -away[0] or (1 if x < sum(limits[0]) / 2 else -1)
    shifts = [12.0 * ((k + 1) // 2) * (1 if k % 2 else -1) for k in range(21)]
    places = [(26.0 * side, -20.0 * away[1] + shift) for shift in shifts]
    said = (fixed(v, digits.get(k, 3)) for v, k in zip(mean, (panel.x, panel.y), strict=True))
    text = f"{name} ({', '.join(said)})"
    box = write(axes, text, (x, y), colour, taken, busy, places, arrow=True)
    tail = axes.transData.inverted().transform(((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2))
    busy += _along([(float(tail[0]), float(tail[1])), (x, y)])  # names keep off the arrow


def curves(runs: Runs, panel: Panel, look: Look, prefix: str) -> Plot | None:
    """`panel.y` over epochs: mean over seeds in a band from the smallest to the largest."""
    lines = {name: curve(steady(group), panel.y) for name, group in runs.items()}
    lines = {name: line for name, line in lines.items() if line.epochs}
    if not any(len(line.epochs) > 1 for line in lines.values()):
        return None
    with canvas(*SIZE) as (figure, axes):
        line_at(axes, panel.reference)
        for k, (name, line) in enumerate(lines.items()):
            style, every = look[name], max(1, len(line.epochs) // 6)
            # A few markers, at other epochs for each line, and one at the end.
            marked = {*range(k % every, len(line.epochs), every), len(line.epochs) - 1}
            band: Any = {"color": style.colour, "alpha": 0.16, "linewidth": 0}
            axes.fill_between(line.epochs, line.low, line.high, **band)
            axes.plot(
                line.epochs, line.mean, color=style.colour, linewidth=1.7, marker=style.marker,
                dashes=style.dash or (None, None), markersize=4.5, markevery=sorted(marked),
            )  # fmt: skip
        limits = _fit_curves(axes, list(lines.values()), panel)
        frame(figure, axes, "epoch", panel.label or title(panel.y))
        ends = {name: line.mean[-1] for name, line in lines.items()}
        facts = _outside(ends, limits) | {"cut": _cut(lines.values(), limits)}
        return Plot(element(figure, prefix), panel.title, panel, facts)


def _fit_curves(axes: Axes, lines: Sequence[Curve], panel: Panel) -> Limits:
    """Both axes, the upright one for what follows the first fifth of training."""
    last = max(line.epochs[-1] for line in lines if line.epochs) or 1.0
    axes.set_xlim(-0.02 * last, 1.02 * last)
    triples = [list(zip(x.epochs, x.low, x.high, strict=True)) for x in lines]
    late = [[v for epoch, *pair in own for v in pair if epoch >= 0.2 * last] for own in triples]
    every = [value for own in triples for _, *pair in own for value in pair]
    return _fit(axes, panel, late, every, upright=True)


def _outside(ends: Mapping[str, float], limits: Limits) -> dict[str, Any]:
    return {"outside": {n: v for n, v in ends.items() if not limits[0] <= v <= limits[1]}}


def _cut(lines: Iterable[Curve], limits: Limits) -> bool:
    return any(min(x.low) < limits[0] or max(x.high) > limits[1] for x in lines if x.epochs)


def families(
    runs: Runs, panel: Panel, names: Sequence[str], look: Look, prefix: str
) -> tuple[Plot, ...]:
    """A small plot per method, all with the same axes: a line per entry, the highest one bold."""
    lines = {
        name: [curve(steady(group), panel.y, k) for k in range(len(names))]
        for name, group in runs.items()
    }
    # Two evaluations are a start and an end, not a way between them.
    lines = {n: own for n, own in lines.items() if any(len(line.epochs) > 2 for line in own)}
    # Means alone: the band of one entry would hide the others.
    every = [Curve(x.epochs, x.mean, x.mean, x.mean) for own in lines.values() for x in own]
    found = []
    for j, (name, own) in enumerate(lines.items()):
        ends = [line.mean[-1] if line.mean else -math.inf for line in own]
        top = max(range(len(ends)), key=ends.__getitem__)
        with canvas(*SMALL) as (figure, axes):
            line_at(axes, panel.reference)
            for k, line in enumerate(own):
                way: Any = {"linewidth": 0.9, "alpha": 0.7}
                way = {"linewidth": 2.4, "zorder": 3} if k == top else way
                axes.plot(line.epochs, line.mean, color=look[name].colour, **way)
            limits = _fit_curves(axes, every, panel)
            frame(figure, axes, "epoch", panel.label or title(panel.y))
            facts = {"cut": _cut(every, limits), "entry": names[top], "value": ends[top]}
            facts["above"] = ends[top] > limits[1]
            found.append(Plot(element(figure, f"{prefix}-{j}"), name, panel, facts))
    return tuple(found)


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
    shown = np.argsort(-before, kind="stable").tolist() if change else list(range(len(names)))
    apart = 0.07 if len(shown) <= 8 else 0.036  # inches between the dots of two methods
    room = max(0.30, 0.12 + apart * len(ends))
    labels = [
        "\n".join(textwrap.wrap(names[k], 21, max_lines=int(room / 0.145), placeholder=" …"))
        for k in shown
    ]
    longest = max(len(part) for label in labels for part in label.split("\n"))
    with canvas(SIZE[0], 0.80 + room * len(shown), 0.22 + 0.073 * longest) as (figure, axes):
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x", color=GRID, linewidth=0.8)
        line_at(axes, panel.reference, vertical=True)
        for row in range(0, len(shown), 2):
            axes.axhspan(row - 0.5, row + 0.5, color=TOKENS["panel"][0], linewidth=0, zorder=0)
        rows = np.arange(len(shown))
        if change:
            axes.vlines(before[shown], rows - 0.36, rows + 0.36, color=INK, linewidth=1.8)
        for lane, (name, table) in enumerate(ends.items()):
            style, mean = look[name], table.mean(axis=0)[shown]
            at = rows + (lane - (len(ends) - 1) / 2) * apart / room
            low = before[shown] if change else table.min(axis=0)[shown]
            high = mean if change else table.max(axis=0)[shown]
            axes.hlines(at, low, high, color=style.colour, linewidth=1.0, alpha=0.55, zorder=1.8)
            axes.plot(
                mean, at, color=style.colour, marker=style.marker, markersize=5.2,
                markeredgecolor=PAGE, markeredgewidth=0.5, linestyle="", zorder=3,
            )  # fmt: skip
        means = {name: table.mean(axis=0) for name, table in ends.items()}
        tables = ends.items()
        spots = [[*means[n], *before] if change else table.ravel().tolist() for n, table in tables]
        drawn = list(itertools.chain(*spots))
        limits = _fit(axes, panel, spots, drawn, upright=False)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_yticks(range(len(shown)), labels)
        axes.tick_params(axis="y", labelsize=8.5, labelcolor=INK)
        frame(figure, axes, panel.label or title(panel.y), "▏before, dots: after" * change)
        worst = {}
        for name, mean in means.items():
            k = int(mean.argmax() if change else mean.argmin())
            worst[name] = names[k], float(mean[k])
        cut = min(drawn) < limits[0] or max(drawn) > limits[1]
        return Plot(element(figure, prefix), panel.title, panel, {"cut": cut, "worst": worst})
