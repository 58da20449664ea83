"""Plots of saved runs: curves with bands, families of curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..store import SavedRun, write_text
from ..task import Page, Panel
from .canvas import (
    SIZE,
    SMALL,
    bounds,
    canvas,
    frame,
    line_at,
    log_axis,
    on_page,
    spans_decades,
    svg_of,
    usual,
)
from .palette import Style, family_of, styles
from .rows import rows
from .runs import Curve, curve, entry_curves, entry_names, steady
from .words import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Drawing", "Families", "curves", "families", "save_run"]

_LATE = 0.2
"""Share of training after which the frame must show everything."""
_WAYS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("solid", ()),
    ("dashed", (4, 1.6)),
    ("dotted", (1.2, 1.2)),
)
Runs = Mapping[str, Sequence[SavedRun]]


@dataclass(frozen=True)
class Drawing:
    """A plot, and whether something runs out of its frame."""

    svg: str
    cut: bool


def curves(runs: Runs, panel: Panel, look: Mapping[str, Style]) -> Drawing | None:
    """`panel.y` over epochs: mean over seeds in a band from the smallest to the largest."""
    drawn = {name: curve(steady(group), panel.y) for name, group in runs.items()}
    drawn = {name: line for name, line in drawn.items() if line.epochs}
    if not drawn:
        return None
    with canvas(*SIZE) as (figure, axes):
        line_at(axes, panel.reference)
        for k, (name, line) in enumerate(drawn.items()):
            style = look[family_of(name)]
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
                markevery=_some(len(line.epochs), k),
            )
        cut = _fit(axes, [[line] for line in drawn.values()], panel)
        frame(figure, axes, "epoch", panel.label or title(panel.y))
        return Drawing(svg_of(figure), cut)


def _fit(axes: Axes, groups: Sequence[Sequence[Curve]], panel: Panel) -> bool:
    """Set both axes, the upright one for what matters; whether something is out of sight."""
    reference = [] if panel.reference is None else [panel.reference]
    lines = [line for group in groups for line in group]
    last = max((line.epochs[-1] for line in lines if line.epochs), default=0.0) or 1.0
    axes.set_xlim(-0.02 * last, 1.02 * last)
    every = [value for line in lines for value in (*line.low, *line.high)]
    log = panel.log and spans_decades([*every, *reference])
    seen = math.log10 if log else float
    late = [
        [
            seen(value)
            for line in group
            for epoch, *pair in zip(line.epochs, line.low, line.high, strict=True)
            for value in pair
            if epoch >= _LATE * last
        ]
        for group in groups
    ]
    core = usual([values for values in late if values])
    limits = bounds([seen(value) for value in every], *map(seen, reference), core=core)
    if limits is None:
        return False
    if log:
        limits = 10 ** limits[0], 10 ** limits[1]
        log_axis(axes, limits, upright=True)
    else:
        axes.set_ylim(*limits)
    return min(every) < limits[0] or max(every) > limits[1]


def _some(count: int, shift: int) -> list[int]:
    """A few places for markers, others for each line, always with one at the end."""
    every = max(1, count // 6)
    return sorted({*range(shift % every, count, every), count - 1})


@dataclass(frozen=True)
class Families:
    """Small multiples: a drawing per method, and which entry ends highest.

    Args:
        drawings: by method.
        worst: name of the entry that ends highest, and its final mean.
        kinds: what the dashes mean, where the entries come in kinds.
        cut: whether something runs out of the frame.
        top: upper end of the frame.
    """

    drawings: dict[str, str]
    worst: dict[str, tuple[str, float]]
    kinds: dict[str, str]
    cut: bool = False
    top: float = math.inf


def families(
    runs: Runs, panel: Panel, entries: Sequence[str], look: Mapping[str, Style]
) -> Families:
    """One small plot per method, all with the same axes: a line per entry, the worst one bold."""
    lines = {name: _mean_curves(steady(group), panel.y) for name, group in runs.items()}
    lines = {name: group for name, group in lines.items() if any(line.epochs for line in group)}
    count = max(map(len, lines.values()), default=0)
    names = [entries[k] if k < len(entries) else f"entry {k + 1}" for k in range(count)]
    kinds = list(dict.fromkeys(map(_kind, names)))
    ways = dict(zip(kinds, _WAYS, strict=False)) if 1 < len(kinds) <= len(_WAYS) else {}
    found = Families({}, {}, {kind: way for kind, (way, _) in ways.items()})
    for name, group in lines.items():
        ends = [line.mean[-1] if line.mean else -math.inf for line in group]
        top = max(range(len(ends)), key=ends.__getitem__)
        with canvas(*SMALL) as (figure, axes):
            line_at(axes, panel.reference)
            for k, line in enumerate(group):
                dash = ways[_kind(names[k])][1] if ways else ()
                axes.plot(
                    line.epochs,
                    line.mean,
                    color=look[family_of(name)].colour,
                    linewidth=2.4 if k == top else 0.9,
                    alpha=1.0 if k == top else 0.7,
                    dashes=dash or (None, None),
                    marker="o" if len(line.epochs) == 1 else "",
                    markersize=3,
                    zorder=3 if k == top else 2,
                )
            cut = _fit(axes, list(lines.values()), panel)
            frame(figure, axes, "epoch", panel.label or title(panel.y))
            found.drawings[name] = svg_of(figure)
        found.worst[name] = (names[top], ends[top])
        found = replace(found, cut=cut, top=axes.get_ylim()[1])
    return found


def _kind(name: str) -> str:
    """What an entry's name begins with, such as the rate it is about: to a comma, or one word."""
    head, comma, _ = name.partition(",")
    return head if comma else (name.split() or [""])[0]


def _mean_curves(group: Sequence[SavedRun], key: str) -> list[Curve]:
    """Means alone: the band of one entry would hide the others."""
    return [replace(line, low=line.mean, high=line.mean) for line in entry_curves(group, key)]


def save_run(run: SavedRun, page: Page) -> None:
    """Write the curves of one run into its folder, as `plots/<key>.svg`."""
    look = styles([run.name])
    folder = run.folder / "plots"
    folder.mkdir(exist_ok=True)
    for panel in page.panels:
        names = entry_names({run.name: [run]}, panel.y, page.entries.get(panel.y, ()))
        if panel.kind == "curve":
            drawing = curves({run.name: [run]}, panel, look)
            svg = drawing and drawing.svg
        elif panel.kind == "family":
            svg = families({run.name: [run]}, panel, names, look).drawings.get(run.name)
        elif panel.kind in ("change", "dots"):
            drawn = rows({run.name: [run]}, panel, names, look)
            svg = drawn and drawn.svg
        else:
            continue
        if svg is not None:
            name = panel.y if panel.kind in ("curve", "family") else f"{panel.y}-{panel.kind}"
            write_text(folder / f"{name}.svg", on_page(svg))
