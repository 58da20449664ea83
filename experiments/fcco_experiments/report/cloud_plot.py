"""Drawings of a cloud: all methods in one, and each by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .canvas import SIZE, SMALL, canvas, frame, line_at, svg_of
from .cloud import Cloud
from .inline import FINE, dots_path, inline
from .labels import place
from .palette import TOKENS, Style
from .runs import number
from .words import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Drawn", "overview", "single"]

_LAYERS = 3
"""Paths over which dots are spread: where dots lie on each other the colour grows deeper."""
_DOT = 2.2
"""Points of a dot where there are thousands."""
_LABELLED = 8
_AROUND = 0.58 + 0.14, 0.30 + 0.50
"""Inches of `canvas` beside and above the axes."""
_SHRUNK = (SMALL[0] - _AROUND[0]) / (SIZE[0] - _AROUND[0])
_SINGLE = SMALL[0], (SIZE[1] - _AROUND[1]) * _SHRUNK + _AROUND[1]
"""Inches of a small drawing whose axes have the proportions of the large one."""


@dataclass(frozen=True)
class Drawn:
    """A drawing in the page.

    Args:
        svg: the element.
        title: above it.
        note: below it.
    """

    svg: str
    title: str
    note: str


def overview(cloud: Cloud, look: Mapping[str, Style], prefix: str, note: str) -> Drawn:
    """All methods: dots of runs, a frontier for each, a star for each winner, and the limit.

    Args:
        cloud: what to draw.
        look: of the methods.
        prefix: of ids; the dots of method k get `prefix-k`, see `single`.
        note: below the drawing.
    """
    panel = cloud.panel
    names = list(cloud.dots)
    with canvas(*SIZE) as (figure, axes):
        _axes(figure, axes, cloud)
        for name in names:
            _front(axes, cloud, name, look[name])
        shown = {name: at for name, at in cloud.winners.items() if cloud.shows(at)}
        if len(shown) <= _LABELLED:
            _names(figure, axes, cloud, shown, look)
        below = sorted(range(len(names)), key=lambda k: -cloud.dots[names[k]].x.size)
        groups = "".join(  # few dots are not hidden by many
            _group(figure, axes, cloud, names[k], look[names[k]], f"{prefix}-{k}") for k in below
        )
        alt = f"Scatter plot of {_y(cloud)} against {_x(cloud)}, a dot for each run, by method."
        svg = inline(svg_of(figure), prefix, alt, {"dots": groups})
    return Drawn(svg, panel.title, note)


def single(cloud: Cloud, name: str, style: Style, prefix: str, number: int) -> Drawn:
    """One method in the frame of all; its dots are those of the overview, used again.

    Args:
        cloud: what to draw.
        name: of the method.
        style: its look.
        prefix: that of the overview.
        number: of the method among those of the overview.
    """
    with canvas(*_SINGLE) as (figure, axes):
        _axes(figure, axes, cloud)
        _front(axes, cloud, name, style)
        left, top = (72 * inches * (1 - _SHRUNK) for inches in (0.58, 0.30))
        size = _DOT * FINE * _weight(cloud.dots[name].x.size)
        use = (
            f'<use href="#{prefix}-{number}" stroke-width="{size / _SHRUNK:.2f}" '
            f'transform="translate({left:.2f} {top:.2f}) scale({_SHRUNK:.4f})"/>'
        )
        alt = f"The same for {name} alone."
        svg = inline(svg_of(figure), f"{prefix}s{number}", alt, {"dots": use})
    inside = cloud.inside(name)
    front = len(cloud.fronts[name])
    note = f"{len(inside):,} dot{'s' * (len(inside) != 1)}"
    note += f", {np.count_nonzero(~inside):,} of them outside" if not inside.all() else ""
    note += f"; {front} setting{'s' * (front != 1)} on the frontier."
    if name in cloud.winners and not cloud.shows(cloud.winners[name]):
        x, y = cloud.winners[name]
        note += f" Its winner lies outside, at {x:.3g}, {y:.3g}."
    return Drawn(svg, name, note)


def _weight(total: int) -> float:
    """1 for thousands of dots, up to 2 for few: then each of them counts."""
    return float(np.clip((3000 / max(total, 1)) ** 0.25, 1.0, 2.0))


def _x(cloud: Cloud) -> str:
    return cloud.panel.x_label or title(cloud.panel.x)


def _y(cloud: Cloud) -> str:
    return cloud.panel.label or title(cloud.panel.y)


def _axes(figure: Figure, axes: Axes, cloud: Cloud) -> None:
    axes.grid(axis="x", color=TOKENS["grid"][0], linewidth=0.8)
    axes.set_xlim(*cloud.x_limits)
    axes.set_ylim(*cloud.y_limits)
    line_at(axes, cloud.panel.reference)
    line_at(axes, cloud.panel.x_reference, vertical=True)
    # Dots are put here afterwards: above the lines of the grid, below the frontiers.
    axes.plot([np.mean(cloud.x_limits)], [np.mean(cloud.y_limits)], gid="dots", zorder=1.6)
    good_x, good_y = cloud.good
    frame(
        figure,
        axes,
        f"{_x(cloud)}  ({'→' if good_x else '←'} better)",
        f"{_y(cloud)}  ({'↑' if good_y else '↓'} better)",
    )


def _front(axes: Axes, cloud: Cloud, name: str, style: Style) -> None:
    points = [
        (number(t.figures.get(cloud.panel.x)), number(t.figures.get(cloud.panel.y)))
        for t in cloud.fronts[name]
    ]
    halo = {"color": TOKENS["page"][0], "linewidth": 3.0, "alpha": 0.7}
    x, y = [p[0] for p in points], [p[1] for p in points]
    axes.plot(x, y, zorder=2.0, **halo)
    axes.plot(
        x,
        y,
        color=style.colour,
        linewidth=1.5,
        dashes=style.dash or (None, None),
        marker=style.marker,
        markersize=3.4,
        markeredgewidth=0,
        zorder=2.2,
    )
    if name in cloud.winners:
        axes.plot(
            *([value] for value in cloud.winners[name]),
            color=style.colour,
            marker="*",
            markersize=15,
            markeredgecolor=TOKENS["page"][0],
            markeredgewidth=1.1,
            zorder=4,
        )


def _names(
    figure: Figure,
    axes: Axes,
    cloud: Cloud,
    points: Mapping[str, tuple[float, float]],
    look: Mapping[str, Style],
) -> None:
    """Names beside the stars, where there is room."""
    corners = [
        (number(t.figures.get(cloud.panel.x)), number(t.figures.get(cloud.panel.y)))
        for front in cloud.fronts.values()
        for t in front
    ]
    if points:
        place(figure, axes, points, look, _few(corners), cloud.panel)


def _few(points: Sequence[tuple[float, float]], most: int = 200) -> list[tuple[float, float]]:
    return list(points[:: max(1, len(points) // most)])


def _group(figure: Figure, axes: Axes, cloud: Cloud, name: str, style: Style, group: str) -> str:
    """The dots of a method: those of feasible settings deep, the others pale."""
    own, inside = cloud.dots[name], cloud.inside(name)
    pixels = axes.transData.transform(np.column_stack([own.x, own.y])) * 72 / figure.dpi
    x, y = pixels[:, 0], figure.get_figheight() * 72 - pixels[:, 1]
    parts, weight = [], _weight(sum(each.x.size for each in cloud.dots.values()))
    some_feasible = any(each.feasible.any() for each in cloud.dots.values())
    for wanted, depth in ((False, 0.17 if some_feasible else 0.32), (True, 0.42)):
        chosen = np.flatnonzero(inside & (own.feasible == wanted))
        for layer in range(_LAYERS):
            path = dots_path(x[chosen[layer::_LAYERS]], y[chosen[layer::_LAYERS]])
            if path:
                parts.append(f'<path d="{path}" stroke-opacity="{depth * weight:.2g}"/>')
    return (
        f'<g stroke-width="{_DOT * FINE * weight:.2f}"><g id="{group}" class="dots" '
        f'stroke="var(--method-{style.number})">'
        f'<g transform="scale({1 / FINE:g})">{"".join(parts)}</g></g></g>'
    )
