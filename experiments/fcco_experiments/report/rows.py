"""Plots with a row per entry of a list and a dot per method: before and after, and at the end."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..store import SavedRun
from ..task import Panel
from .canvas import (
    SIZE,
    bounds,
    canvas,
    frame,
    line_at,
    log_axis,
    spans_decades,
    svg_of,
    usual,
)
from .palette import TOKENS, Style, family_of
from .runs import Curve, entry_curves, steady
from .words import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Rows", "rows"]

_CHARACTERS, _LINE = 21, 0.145
"""Of a line of an entry's name, and inches of a line."""
_LANES = 0.036, 0.07
"""Inches between the dots of two methods in a row: of many rows, and of up to eight."""


@dataclass(frozen=True)
class Rows:
    """A plot.

    Args:
        svg: the drawing.
        size: inches; the height grows with the number of entries.
        cut: whether something is out of its frame.
        worst: for each method the name of its largest (`"change"`) or smallest (`"dots"`) entry at
            the end, and that value.
    """

    svg: str
    size: tuple[float, float]
    cut: bool
    worst: dict[str, tuple[str, float]]


def rows(
    runs: Mapping[str, Sequence[SavedRun]],
    panel: Panel,
    entries: Sequence[str],
    look: Mapping[str, Style],
) -> Rows | None:
    """The list `panel.y` with a row per entry, means over seeds.

    A `"change"` has a mark for the value at the first evaluation, a dot per method for that at the
    last, and the way between them; rows are sorted, the largest start on top. `"dots"` have
    whiskers from the smallest to the largest seed, and rows in the order of the list.

    Args:
        runs: by method.
        panel: what to draw.
        entries: names of the entries.
        look: of the methods.
    """
    lines = {name: entry_curves(steady(group), panel.y) for name, group in runs.items()}
    lines = {
        name: {k: line for k, line in enumerate(group) if line.epochs}
        for name, group in lines.items()
    }
    lines = {name: group for name, group in lines.items() if group}
    found = sorted({k for group in lines.values() for k in group})
    if not found:
        return None
    names = {k: entries[k] if k < len(entries) else f"entry {k + 1}" for k in found}
    starts = {k: _middle([own[k].mean[0] for own in lines.values() if k in own]) for k in found}
    change = panel.kind == "change"
    if change:
        found.sort(key=lambda k: -starts[k])
    places = {k: place for place, k in enumerate(found)}
    apart = _LANES[len(found) <= 8]
    room = max(0.30, 0.12 + apart * len(lines))
    width, height = SIZE[0], 0.80 + room * len(found)
    labels = [_short(names[k], int(room / _LINE)) for k in found]
    longest = max(len(part) for label in labels for part in label.split("\n"))
    with canvas(width, height, left=0.22 + 0.073 * longest) as (figure, axes):
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x", color=TOKENS["grid"][0], linewidth=0.8)
        line_at(axes, panel.reference, vertical=True)
        for place in range(0, len(found), 2):
            axes.axhspan(place - 0.5, place + 0.5, color=TOKENS["panel"][0], linewidth=0, zorder=0)
        if change:
            for k, place in places.items():
                axes.plot(
                    [starts[k]] * 2, [place - 0.36, place + 0.36], color=TOKENS["ink"][0],
                    linewidth=1.8, solid_capstyle="butt", zorder=2,
                )  # fmt: skip
        for lane, (name, group) in enumerate(lines.items()):
            shift = (lane - (len(lines) - 1) / 2) * apart / room
            at = {k: places[k] + shift for k in group}
            _dots(axes, group, at, look[family_of(name)], change)
        cut = _fit(axes, list(lines.values()), panel)
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_yticks(range(len(found)), labels)
        axes.tick_params(axis="y", labelsize=8.5, labelcolor=TOKENS["ink"][0])
        frame(figure, axes, panel.label or title(panel.y), "▏before, dots: after" * change)
        pick = max if change else min
        worst = {}
        for name, group in lines.items():
            k = pick(group, key=lambda k, group=group: group[k].mean[-1])
            worst[name] = (names[k], group[k].mean[-1])
        return Rows(svg_of(figure), (width, height), cut, worst)


def _middle(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _short(name: str, lines: int) -> str:
    """As many lines as there is room for; the table has the whole name."""
    return "\n".join(textwrap.wrap(name, _CHARACTERS, max_lines=lines, placeholder=" …")) or name


def _dots(
    axes: Axes, lines: Mapping[int, Curve], at: Mapping[int, float], style: Style, change: bool
) -> None:
    """A method: its ends, and the way to them or their spread over seeds."""
    left = [line.mean[0] if change else line.low[-1] for line in lines.values()]
    right = [line.mean[-1] if change else line.high[-1] for line in lines.values()]
    where = [at[k] for k in lines]
    axes.hlines(where, left, right, color=style.colour, linewidth=1.0, alpha=0.55, zorder=1.8)
    axes.plot(
        [line.mean[-1] for line in lines.values()],
        where,
        color=style.colour,
        marker=style.marker,
        markersize=5.2,
        markeredgecolor=TOKENS["page"][0],
        markeredgewidth=0.5,
        linestyle="",
        zorder=3,
    )


def _fit(axes: Axes, groups: Sequence[Mapping[int, Curve]], panel: Panel) -> bool:
    """Set the axis of values; whether something is out of sight."""
    change = panel.kind == "change"
    reference = [] if panel.reference is None else [panel.reference]
    ends = [
        [v for line in g.values() for v in (line.mean[-1], *(() if change else _extent(line)))]
        for g in groups
    ]
    starts = [line.mean[0] for g in groups for line in g.values()] if change else []
    every = [*starts, *(value for values in ends for value in values)]
    log = panel.log and spans_decades([*every, *reference])
    seen = math.log10 if log else float
    core = [*map(seen, starts), *usual([[seen(value) for value in values] for values in ends])]
    limits = bounds([seen(value) for value in every], *map(seen, reference), core=core)
    assert limits is not None  # curves hold finite values alone
    if log:
        limits = 10 ** limits[0], 10 ** limits[1]
        log_axis(axes, limits)
    else:
        axes.set_xlim(*limits)
    return min(every) < limits[0] or max(every) > limits[1]


def _extent(line: Curve) -> tuple[float, float]:
    return line.low[-1], line.high[-1]
