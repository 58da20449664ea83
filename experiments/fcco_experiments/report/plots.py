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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..stats import frontier, spread
from ..store import SavedRun
from ..task import Metric, Panel
from .style import COLOURS, TOKENS, Style, fixed, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

__all__ = [
    "SIZE",
    "SMALL",
    "Curve",
    "Plot",
    "bounds",
    "by_entry",
    "canvas",
    "curve",
    "curves",
    "dress",
    "element",
    "entry_names",
    "families",
    "frame",
    "line_at",
    "number",
    "numbers",
    "place_names",
    "spans_decades",
    "tradeoff",
]

Runs = Mapping[str, Sequence[SavedRun]]
Point = tuple[float, float]
SIZE, SMALL = (5.2, 3.3), (3.6, 2.5)
"""Inches of a plot and of a small one among many."""
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib and is wide: what it measures fits
    "font.size": 9.0,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fcco",
    "path.simplify": True,
    "axes.unicode_minus": True,
}
_INK, _MUTED, _GRID, _LIMIT, _PAGE = (
    TOKENS[name][0] for name in ("ink", "muted", "grid", "limit", "page")
)
_VARIABLES = {pair[0]: f"var(--{name})" for name, pair in TOKENS.items()} | {
    pair[0]: f"var(--method-{k})" for k, pair in enumerate(COLOURS)
}
_LATE = 0.2
"""Share of training after which the frame of a curve must show everything."""
_KINDS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("solid", ()),
    ("dashed", (4, 1.6)),
    ("dotted", (1.2, 1.2)),
)


@dataclass(frozen=True)
class Plot:
    """A figure, and what the template says about it.

    Args:
        svg: the element.
        title: above it.
        panel: which it draws.
        facts: of its note and its text for who cannot see it.
    """

    svg: str
    title: str
    panel: Panel
    facts: Mapping[str, Any] = field(default_factory=dict)


# Numbers out of runs. A run may have no evaluations but the last, or none at all.


@dataclass(frozen=True)
class Curve:
    """A figure over epochs, over all runs that have it.

    Args:
        epochs: where any run has a finite value.
        mean: over runs.
        low: smallest.
        high: largest.
    """

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
        for row in _rows(run):
            value = number(row.get(key))
            if entry is not None:
                items = numbers(row.get(key))
                value = items[entry] if entry < len(items) else math.nan
            epoch = number(row.get("epoch", 0))
            if math.isfinite(epoch) and math.isfinite(value):
                seen.setdefault(epoch, []).append(value)
    epochs = sorted(seen)
    return Curve(
        epochs,
        [sum(seen[epoch]) / len(seen[epoch]) for epoch in epochs],
        [min(seen[epoch]) for epoch in epochs],
        [max(seen[epoch]) for epoch in epochs],
    )


def _rows(run: SavedRun) -> Sequence[Mapping[str, Any]]:
    return run.rows or [run.figures]


def _entry_curves(runs: Sequence[SavedRun], key: str) -> list[Curve]:
    count = max((len(numbers(row.get(key))) for run in runs for row in _rows(run)), default=0)
    return [curve(runs, key, entry) for entry in range(count)]


def _steady(runs: Sequence[SavedRun]) -> Sequence[SavedRun]:
    """Runs without those that diverged, unless all did: a mean must not jump where one ends."""
    return [run for run in runs if run.diverged is None] or runs


def entry_names(runs: Runs, key: str, given: Sequence[str]) -> Sequence[str]:
    """Names of the entries of a list: those that a run gave at its end, as `<key>_names`.

    Args:
        runs: by method.
        key: of the list.
        given: names of the page, for runs that have none; not taken for a list of another length.
    """
    figures = [run.figures for group in runs.values() for run in group]
    for row in figures:
        if f"{key}_names" in row:
            return [str(name) for name in row[f"{key}_names"]]
    lengths = {len(numbers(row.get(key))) for row in figures} - {0}
    return given if lengths <= {len(given)} else ()


# The drawing surface.


@contextmanager
def canvas(width: float, height: float, left: float = 0.58) -> Iterator[tuple[Figure, Axes]]:
    """A figure of that many inches with one pair of axes, whatever the user's matplotlibrc says.

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
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)
    axes.tick_params(colors=_MUTED, labelsize=8.5, length=0)
    axes.tick_params(axis="x", length=3)
    axes.locator_params(axis="both", nbins=6)


def frame(figure: Figure, axes: Axes, x_label: str, y_label: str) -> None:
    """Horizontal labels of both axes."""
    figure.text(0.004, 0.99, y_label, va="top", fontsize=9, color=_INK)
    axes.set_xlabel(x_label, loc="right", fontsize=9, color=_INK)


def line_at(axes: Axes, value: float | None, vertical: bool = False) -> None:
    """A reference, such as the limit of a constraint."""
    if value is not None and math.isfinite(value):
        draw = axes.axvline if vertical else axes.axhline
        draw(value, color=_LIMIT, linewidth=1.1, linestyle=(0, (2, 2)), zorder=1.5)


def bounds(
    values: Sequence[float], *keep: float | None, core: Sequence[float] = ()
) -> tuple[float, float] | None:
    """Limits of an axis with a small margin; None without a finite value.

    Args:
        values: all that is drawn.
        keep: must be in the frame.
        core: what matters, the later epochs: where all `values` need three times its room, the
            frame shows it and a third more, and the rest runs out of it.

    >>> low, high = bounds([0.0, 1.0])
    >>> round(low, 3), round(high, 3)
    (-0.05, 1.05)
    """
    kept = [value for value in keep if value is not None and math.isfinite(value)]
    finite = [value for value in values if math.isfinite(value)]
    inner = [value for value in core if math.isfinite(value)]
    if not (finite := finite or kept):
        return None
    low, high = min([*finite, *kept]), max([*finite, *kept])
    if inner:
        core_low, core_high = min([*inner, *kept]), max([*inner, *kept])
        room = core_high - core_low
        if high - low > 3 * room > 0:
            low, high = max(low, core_low - room / 3), min(high, core_high + room / 3)
    margin = 0.05 * (high - low) or max(abs(high) * 0.05, 1e-3)
    return low - margin, high + margin


def _usual(groups: Sequence[Sequence[float]]) -> list[float]:
    """Values of all methods but those five times farther from the median than is usual."""
    every = [value for values in groups for value in values]
    if len(groups) < 3:
        return every
    centre = statistics.median(every)
    away = [max(abs(value - centre) for value in values) for values in groups]
    far = 5 * statistics.median(away)
    return [v for values, d in zip(groups, away, strict=True) if d <= far for v in values]


def spans_decades(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows more: all values above 0, the largest 8 times the least."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 8 * min(finite)


def _fit(
    axes: Axes,
    groups: Sequence[Sequence[float]],
    rest: Sequence[float],
    panel: Panel,
    *,
    upright: bool,
    keep: Sequence[float] = (),
) -> bool:
    """Set the axis of values, logarithmic where that shows more; whether something is outside.

    Args:
        axes: whose axis.
        groups: what matters, by method.
        rest: what else is drawn.
        panel: its reference is in the frame.
        upright: the y axis, or the x axis.
        keep: must be in the frame too.
    """
    reference = [] if panel.reference is None else [panel.reference]
    every = [*rest, *keep, *(value for values in groups for value in values)]
    log = panel.log and spans_decades([*every, *reference])
    seen = math.log10 if log else float
    core = _usual([[seen(value) for value in values] for values in groups if values])
    limits = bounds([seen(value) for value in every], *map(seen, [*reference, *keep]), core=core)
    if limits is None:
        return False
    set_limits = axes.set_ylim if upright else axes.set_xlim
    if log:
        limits = 10 ** limits[0], 10 ** limits[1]
        (axes.set_yscale if upright else axes.set_xscale)("log")
        set_limits(*limits)
        decades = math.log10(limits[1] / limits[0])
        heads = (1, 2, 5) if decades < 2.5 else (1,)
        heads = (1, 1.5, 2, 3, 4, 5, 6, 8) if decades < 0.8 else heads
        marks = [head * 10.0**k for k in range(-12, 13) for head in heads]
        inside = [value for value in marks if limits[0] <= value <= limits[1]]
        axis = axes.yaxis if upright else axes.xaxis
        axis.set_ticks(inside, [f"{value:g}".replace("-", "\N{MINUS SIGN}") for value in inside])
        axis.set_ticks([], minor=True)
    else:
        set_limits(*limits)
    return min(every) < limits[0] or max(every) > limits[1]


def element(figure: Figure, prefix: str, replaced: Mapping[str, str] | None = None) -> str:
    """A figure as an element of the page: no date, short numbers, colours and font of the page.

    Args:
        figure: drawn with the light palette.
        prefix: of its ids; no other drawing of the page may have it.
        replaced: what stands in the place of the groups with these ids.
    """
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    # A style sheet inside would hold for the whole page.
    noise = r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>|<!--.*?-->"
    svg = re.sub(noise, "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bd="([^"]*)"', lambda path: f'd="{_short(path[1])}"', svg)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    for name in replaced or {}:
        svg = re.sub(rf'<g id="{name}"\s*(/>|>.*?</g>)', f"<!--{name}-->", svg, flags=re.DOTALL)
    svg = re.sub(
        r'\sid="([^"]+)"',
        lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "",
        svg,
    )
    svg = re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", svg).replace("xlink:href", "href")
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    for name, content in (replaced or {}).items():
        svg = svg.replace(f"<!--{name}-->", content)
    svg = re.sub(r" font-family: [^;\"]*;| transform=\"rotate\(-0 [^\"]*\"", "", svg)
    svg = re.sub(r'="(\d+\.\d{3,})"', lambda text: f'="{float(text[1]):.2f}"', svg)
    svg = re.sub(r"<g\s*/>", "", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg class="drawing" {box[0] if box else ""} aria-hidden="true" focusable="false">'
    return re.sub(r">\s+<(?!/?tspan)", "><", re.sub(r"^<svg[^>]*>", head, svg.strip()))


def _short(path: str) -> str:
    rounded = re.sub(r"-?\d+\.\d{3,}", lambda value: f"{float(value[0]):.2f}", path)
    return " ".join(rounded.split())


# The figures.


def tradeoff(
    runs: Runs,
    panel: Panel,
    look: Mapping[str, Style],
    metrics: Sequence[Metric],
    references: Sequence[str],
    prefix: str,
) -> Plot | None:
    """Final `y` against final `x`: a dot per run, a large one per mean, and the frontier of means.

    The frame is set for the methods. A reference, or a method that is far off, is an arrow at the
    border with its numbers. Which direction is good is known from `metrics`; without it, high `y`
    and low `x` are.
    """
    known = {metric.key: metric for metric in metrics}
    good = _better(known, panel.x) == "higher", _better(known, panel.y) != "lower"
    dots: dict[str, list[Point]] = {}
    for name, group in runs.items():
        rows = [run.figures for run in group]
        points = [(number(row.get(panel.x)), number(row.get(panel.y))) for row in rows]
        if finite := [point for point in points if all(map(math.isfinite, point))]:
            dots[name] = finite
    if not dots:
        return None
    means = {
        name: (spread(p[0] for p in d)[0], spread(p[1] for p in d)[0]) for name, d in dots.items()
    }
    methods = [name for name in dots if name not in references] or list(dots)
    limits = _zoom({name: dots[name] for name in methods}, means, panel)
    far = [name for name, mean in means.items() if not _inside(mean, limits)]
    candidates = [name for name in methods if name not in far] or methods
    with canvas(*SIZE) as (figure, axes):
        axes.grid(axis="x", color=_GRID, linewidth=0.8)
        axes.set_xlim(*limits[0])
        axes.set_ylim(*limits[1])
        for value, (low, high), vertical in (
            (panel.reference, limits[1], False),
            (panel.x_reference, limits[0], True),
        ):
            line_at(axes, value if value is not None and low <= value <= high else None, vertical)
        for name, points in dots.items():
            shape: Any = {"color": look[name].colour, "marker": look[name].marker}
            if seen := [point for point in points if _inside(point, limits)]:
                axes.scatter(*zip(*seen, strict=True), s=14, alpha=0.45, lw=0, zorder=2, **shape)
            if name not in far:
                axes.scatter(*means[name], s=62, edgecolors=_PAGE, lw=0.9, zorder=4, **shape)
        front = frontier(*zip(*(means[n] for n in candidates), strict=True), *good)
        corners = [means[candidates[i]] for i in front]
        axes.plot(*zip(*corners, strict=True), color=_MUTED, linewidth=1.4, zorder=1.8)
        digits = [known[key].digits if key in known else 3 for key in (panel.x, panel.y)]
        near = {name: means[name] for name in dots if name not in far}
        every = [point for points in dots.values() for point in points]
        taken: list[Bbox] = []
        for name in far:
            said = (fixed(value, n) for value, n in zip(means[name], digits, strict=True))
            text, busy = f"{name} ({', '.join(said)})", [*every, *near.values(), *near.values()]
            colour = look[name].colour
            taken.append(_arrow(figure, axes, text, means[name], limits, colour, busy, taken))
        place_names(figure, axes, near, look, [*every, *_along(corners)], panel, taken)
        frame(
            figure,
            axes,
            f"{panel.x_label or title(panel.x)}  ({'→' if good[0] else '←'} better)",
            f"{panel.label or title(panel.y)}  ({'↑' if good[1] else '↓'} better)",
        )
        svg = element(figure, prefix)
    facts = {
        "alone": len(front) == 1 < len(candidates),
        "front": [candidates[i] for i in front],
        "far": far,
        "cut": sum(not _inside(p, limits) for name in near for p in dots[name]),
        "several": any(len(points) > 1 for points in dots.values()),
    }
    return Plot(svg, panel.title, panel, facts)


def _better(known: Mapping[str, Metric], key: str) -> str:
    return known[key].better if key in known else "none"


Limits = tuple[tuple[float, float], tuple[float, float]]


def _inside(point: Point, limits: Limits) -> bool:
    return all(low <= value <= high for value, (low, high) in zip(point, limits, strict=True))


def _zoom(dots: Mapping[str, Sequence[Point]], means: Mapping[str, Point], panel: Panel) -> Limits:
    """A frame for the methods, with limits and other means that are near."""

    def limits(axis: int, *more: float | None) -> tuple[float, float]:
        groups = [[point[axis] for point in points] for points in dots.values()]
        return bounds(_usual(groups), *more) or (0.0, 1.0)

    def near(value: float, frame: tuple[float, float], reach: float) -> bool:
        room = reach * (frame[1] - frame[0])
        return frame[0] - room <= value <= frame[1] + room

    box = limits(0), limits(1)
    lines = panel.x_reference, panel.reference
    keep: list[list[float]] = [
        [line] if line is not None and near(line, side, 1.0) else []
        for line, side in zip(lines, box, strict=True)
    ]
    for mean in means.values():
        if near(mean[0], box[0], 0.4) and near(mean[1], box[1], 0.4):
            keep[0].append(mean[0])
            keep[1].append(mean[1])
    return limits(0, *keep[0]), limits(1, *keep[1])


def _arrow(
    figure: Figure,
    axes: Axes,
    text: str,
    mean: Point,
    limits: Limits,
    colour: str,
    points: Sequence[Point],
    taken: Sequence[Bbox],
) -> Bbox:
    """An arrow at the border towards a mean outside the frame, with its numbers beside its tail.

    The text takes the nearest place where it covers the fewest of `points` and nothing of `taken`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    around = axes.get_window_extent(renderer)
    away = [(value > high) - (value < low) for value, (low, high) in zip(mean, limits, strict=True)]
    x, y = (min(max(value, low), high) for value, (low, high) in zip(mean, limits, strict=True))
    middle = sum(limits[0]) / 2
    align = {1: "right", -1: "left", 0: "left" if x < middle else "right"}[away[0]]
    pixels = axes.transData.transform(points)
    best: tuple[int, int, Any, Bbox] | None = None
    for k in range(21):
        shift = 12.0 * ((k + 1) // 2) * (1 if k % 2 else -1)
        note = axes.annotate(
            text,
            xy=(x, y),
            xytext=(-26.0 * away[0], -20.0 * away[1] + shift),
            textcoords="offset points",
            annotation_clip=False,  # rounding may put its point outside by a hair
            ha=align,
            va="center",
            fontsize=8.5,
            color=colour,
            arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.3, "shrinkB": 0},
            zorder=5,
        )
        box = note.get_window_extent(renderer)
        covered = sum(box.padded(4).contains(*pixel) for pixel in pixels)
        covered += 100 * any(box.overlaps(other) for other in taken)
        covered += 100 * (box.y0 < around.y0 or box.y1 > around.y1)
        if best is None or covered < best[0]:
            if best is not None:
                best[2].remove()
            best = covered, k, note, box
        else:
            note.remove()
    assert best is not None
    return best[3]


_SIDES = (
    ((9, 0), "left", "center"),
    ((-9, 0), "right", "center"),
    ((0, 8), "center", "bottom"),
    ((0, -8), "center", "top"),
    ((9, 9), "left", "bottom"),
    ((9, -9), "left", "top"),
    ((-9, 9), "right", "bottom"),
    ((-9, -9), "right", "top"),
)


def place_names(
    figure: Figure,
    axes: Axes,
    points: Mapping[str, Point],
    look: Mapping[str, Style],
    dots: Sequence[Point],
    panel: Panel,
    taken: Sequence[Bbox] = (),
) -> None:
    """Write each name on the best side of its point; a name without room is left out.

    A name never covers another name or another method's point, and covers dots of runs and
    reference lines only where no side is free. The legend names every method in any case.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    renderer = FigureCanvasAgg(figure).get_renderer()
    around = axes.get_window_extent(renderer)

    def box_of(point: Point, reach: float) -> Bbox:
        x, y = axes.transData.transform(point)
        reach *= figure.dpi / 72
        return Bbox.from_extents(x - reach, y - reach, x + reach, y + reach)

    own = {name: box_of(point, 4) for name, point in points.items()}
    names = list(taken)
    soft = [box_of(dot, 2) for dot in dots]
    if panel.x_reference is not None:
        x = axes.transData.transform((panel.x_reference, 0.0))[0]
        soft += [Bbox.from_extents(x - 1, around.y0, x + 1, around.y1)] * 3
    if panel.reference is not None:
        y = axes.transData.transform((0.0, panel.reference))[1]
        soft += [Bbox.from_extents(around.x0, y - 1, around.x1, y + 1)] * 3
    for name, point in points.items():
        hard = [*names, *(box for other, box in own.items() if other != name)]
        free: list[tuple[int, int, Any, Bbox]] = []
        for k, (offset, horizontal, vertical) in enumerate(_SIDES):
            text = axes.annotate(
                name,
                point,
                offset,
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                fontsize=8.5,
                color=look[name].colour,
                zorder=5,
            )
            box = text.get_window_extent(renderer)
            inside = around.x0 <= box.x0 and box.x1 <= around.x1
            inside = inside and around.y0 <= box.y0 and box.y1 <= around.y1
            if inside and not any(box.overlaps(other) for other in hard):
                free.append((sum(box.overlaps(other) for other in soft), k, text, box))
            else:
                text.remove()
        free.sort(key=lambda side: side[:2])
        for _, _, text, _ in free[1:]:
            text.remove()
        names += [side[3] for side in free[:1]]


def _along(corners: Sequence[Point]) -> list[Point]:
    """Places on a line, where a name would be hard to read."""
    steps = [k / 40 for k in range(1, 40)]
    pairs = itertools.pairwise(corners)
    return [(a + (c - a) * t, b + (d - b) * t) for (a, b), (c, d) in pairs for t in steps]


def curves(runs: Runs, panel: Panel, look: Mapping[str, Style], prefix: str) -> Plot | None:
    """`panel.y` over epochs: mean over seeds in a band from the smallest to the largest."""
    drawn = {name: curve(_steady(group), panel.y) for name, group in runs.items()}
    drawn = {name: line for name, line in drawn.items() if line.epochs}
    if not any(len(line.epochs) > 1 for line in drawn.values()):
        return None
    with canvas(*SIZE) as (figure, axes):
        line_at(axes, panel.reference)
        for k, (name, line) in enumerate(drawn.items()):
            style, every = look[name], max(1, len(line.epochs) // 6)
            axes.fill_between(
                line.epochs, line.low, line.high, color=style.colour, alpha=0.16, linewidth=0
            )
            axes.plot(
                line.epochs,
                line.mean,
                color=style.colour,
                linewidth=1.7,
                dashes=style.dash or (None, None),
                marker=style.marker,
                markersize=4.5,
                # A few markers, at other epochs for each line, and one at the end.
                markevery=sorted(
                    {*range(k % every, len(line.epochs), every), len(line.epochs) - 1}
                ),
            )
        cut = _fit_curves(axes, [[line] for line in drawn.values()], panel)
        frame(figure, axes, "epoch", panel.label or title(panel.y))
        return Plot(element(figure, prefix), panel.title, panel, {"cut": cut})


def _fit_curves(axes: Axes, groups: Sequence[Sequence[Curve]], panel: Panel) -> bool:
    """Both axes, the upright one for the later epochs; whether something is outside."""
    lines = [line for group in groups for line in group]
    last = max((line.epochs[-1] for line in lines if line.epochs), default=0.0) or 1.0
    axes.set_xlim(-0.02 * last, 1.02 * last)
    late = [
        [
            value
            for line in group
            for epoch, *pair in zip(line.epochs, line.low, line.high, strict=True)
            for value in pair
            if epoch >= _LATE * last
        ]
        for group in groups
    ]
    every = [value for line in lines for value in (*line.low, *line.high)]
    return _fit(axes, late, every, panel, upright=True)


def families(
    runs: Runs, panel: Panel, entries: Sequence[str], look: Mapping[str, Style], prefix: str
) -> tuple[Plot, ...]:
    """A small plot per method, all with the same axes: a line per entry, the highest one bold.

    The dashes tell kinds of entries apart: what their names begin with, to a comma or one word.
    """
    lines = {name: _entry_curves(_steady(group), panel.y) for name, group in runs.items()}
    lines = {
        # Means alone: the band of one entry would hide the others.
        name: [replace(line, low=line.mean, high=line.mean) for line in group]
        for name, group in lines.items()
        if any(len(line.epochs) > 1 for line in group)
    }
    count = max(map(len, lines.values()), default=0)
    names = [entries[k] if k < len(entries) else f"entry {k + 1}" for k in range(count)]
    kinds = [name.partition(",")[0] if "," in name else (name.split() or [""])[0] for name in names]
    several = list(dict.fromkeys(kinds))
    ways = dict(zip(several, _KINDS, strict=False)) if 1 < len(several) <= len(_KINDS) else {}
    found = []
    for j, (name, group) in enumerate(lines.items()):
        ends = [line.mean[-1] if line.mean else -math.inf for line in group]
        top = max(range(len(ends)), key=ends.__getitem__)
        with canvas(*SMALL) as (figure, axes):
            line_at(axes, panel.reference)
            for k, line in enumerate(group):
                axes.plot(
                    line.epochs,
                    line.mean,
                    color=look[name].colour,
                    linewidth=2.4 if k == top else 0.9,
                    alpha=1.0 if k == top else 0.7,
                    dashes=(ways[kinds[k]][1] if ways else ()) or (None, None),
                    zorder=3 if k == top else 2,
                )
            cut = _fit_curves(axes, list(lines.values()), panel)
            frame(figure, axes, "epoch", panel.label or title(panel.y))
            facts = {
                "cut": cut,
                "kinds": {kind: way for kind, (way, _) in ways.items()},
                "entry": names[top],
                "value": ends[top],
                "above": ends[top] > axes.get_ylim()[1],
            }
            found.append(Plot(element(figure, f"{prefix}-{j}"), name, panel, facts))
    return tuple(found)


_CHARACTERS, _LINE = 21, 0.145
"""Characters of a line of an entry's name, and inches of a line."""
_LANES = 0.036, 0.07
"""Inches between the dots of two methods in a row: of many rows, and of up to eight."""


def by_entry(
    runs: Runs, panel: Panel, entries: Sequence[str], look: Mapping[str, Style], prefix: str
) -> Plot | None:
    """The list `panel.y` with a row per entry and a dot per method, means over seeds.

    A `"change"` has a mark for the value at the first evaluation, a dot per method for that at the
    last, and the way between them; rows are sorted, the largest start on top. `"dots"` have
    whiskers from the smallest to the largest seed, and rows in the order of the list.
    """
    lines: dict[str, dict[int, Curve]] = {}
    change = panel.kind == "change"
    for name, group in runs.items():
        own = dict(enumerate(_entry_curves(_steady(group), panel.y)))
        if own := {k: line for k, line in own.items() if len(line.epochs) > change}:
            lines[name] = own
    shown = sorted({k for group in lines.values() for k in group})
    if not shown:
        return None
    names = {k: entries[k] if k < len(entries) else f"entry {k + 1}" for k in shown}
    starts = {
        k: statistics.fmean(own[k].mean[0] for own in lines.values() if k in own) for k in shown
    }
    if change:
        shown.sort(key=lambda k: -starts[k])
    apart = _LANES[len(shown) <= 8]
    room = max(0.30, 0.12 + apart * len(lines))
    labels = [
        "\n".join(
            textwrap.wrap(names[k], _CHARACTERS, max_lines=int(room / _LINE), placeholder=" …")
        )
        or names[k]
        for k in shown
    ]
    longest = max(len(part) for label in labels for part in label.split("\n"))
    with canvas(SIZE[0], 0.80 + room * len(shown), 0.22 + 0.073 * longest) as (figure, axes):
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x", color=_GRID, linewidth=0.8)
        line_at(axes, panel.reference, vertical=True)
        for place in range(0, len(shown), 2):
            axes.axhspan(place - 0.5, place + 0.5, color=TOKENS["panel"][0], linewidth=0, zorder=0)
        for place, k in enumerate(shown if change else ()):
            axes.plot(
                [starts[k]] * 2, [place - 0.36, place + 0.36], color=_INK, linewidth=1.8,
                solid_capstyle="butt", zorder=2,
            )  # fmt: skip
        for lane, (name, own) in enumerate(lines.items()):
            shift, colour = (lane - (len(lines) - 1) / 2) * apart / room, look[name].colour
            at = [shown.index(k) + shift for k in own]
            ends = [line.mean[-1] for line in own.values()]
            left = [line.mean[0] if change else line.low[-1] for line in own.values()]
            right = ends if change else [line.high[-1] for line in own.values()]
            axes.hlines(at, left, right, color=colour, linewidth=1.0, alpha=0.55, zorder=1.8)
            axes.plot(
                ends, at, color=colour, marker=look[name].marker, markersize=5.2,
                markeredgecolor=_PAGE, markeredgewidth=0.5, linestyle="", zorder=3,
            )  # fmt: skip
        groups = [
            [
                value
                for line in own.values()
                for value in (line.mean[-1], *(() if change else (line.low[-1], line.high[-1])))
            ]
            for own in lines.values()
        ]
        before = list(starts.values()) if change else []
        cut = _fit(axes, groups, (), panel, upright=False, keep=before)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_yticks(range(len(shown)), labels)
        axes.tick_params(axis="y", labelsize=8.5, labelcolor=_INK)
        frame(figure, axes, panel.label or title(panel.y), "▏before, dots: after" * change)
        pick = max if change else min
        worst = {}
        for name, own in lines.items():
            k = pick(own, key=lambda k, own=own: own[k].mean[-1])
            worst[name] = (names[k], own[k].mean[-1])
        return Plot(element(figure, prefix), panel.title, panel, {"cut": cut, "worst": worst})
