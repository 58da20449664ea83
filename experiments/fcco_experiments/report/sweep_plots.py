"""The figures of a sweep: a dot for every run, and what each hyperparameter does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .plots import SIZE, SMALL, canvas, dress, element, frame, line_at, number, place_names
from .plots import spans_decades as _spans_decades
from .style import TOKENS, Style, setting, title
from .sweep_data import Profile, Scatter, Sweep, Trial, is_number, robust

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FINE", "Axis", "dots_path", "overview", "places", "quantiles", "sensitivity", "single"]

FINE = 4
"""Steps of a point (1/72 inch) to which dots are rounded."""
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
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_ROW, _TOP, _LETTER = 1.55, 0.30, 0.075
"""Inches of a row of a sensitivity plot, of the words above it, and of a letter below it."""


def dots_path(x: np.ndarray, y: np.ndarray) -> str:
    """The data of a path with a dot at each place, about 8 bytes each; equal places are one.

    Args:
        x: points from the left.
        y: points from the top.

    >>> dots_path(np.array([1.0, 1.5, 1.01]), np.array([2.0, 1.0, 2.0]))
    'M4 8h0m2-4h0'
    """
    where = np.unique(np.rint(FINE * np.column_stack([x, y])).astype(int), axis=0)
    if not len(where):
        return ""
    steps = np.diff(where, axis=0)
    moves = (f"m{a}{'' if b < 0 else ' '}{b}h0" for a, b in steps.tolist())
    return f"M{where[0, 0]} {where[0, 1]}h0" + "".join(moves)


def overview(scatter: Scatter, look: Mapping[str, Style], prefix: str) -> str:
    """All methods: dots of runs, a frontier for each, a star for each winner, and the limit.

    Args:
        scatter: what to draw.
        look: of the methods.
        prefix: of ids; the dots of method k get `prefix-k`, see `single`.
    """
    names = list(scatter.dots)
    with canvas(*SIZE) as (figure, axes):
        _axes(figure, axes, scatter)
        for name in names:
            _front(axes, scatter, name, look[name])
        shown = {name: at for name, at in scatter.winners.items() if scatter.shows(at)}
        if 0 < len(shown) <= _LABELLED:
            corners = [t.at(scatter.panel) for front in scatter.fronts.values() for t in front]
            few = corners[:: max(1, len(corners) // 200)]
            place_names(figure, axes, shown, look, few, scatter.panel)
        below = sorted(range(len(names)), key=lambda k: -len(scatter.dots[names[k]]))
        groups = "".join(  # few dots are not hidden by many
            _dots(figure, axes, scatter, names[k], look[names[k]], f"{prefix}-{k}") for k in below
        )
        return element(figure, prefix, {"dots": groups})


def single(scatter: Scatter, name: str, style: Style, prefix: str, place: int) -> str:
    """One method in the frame of all; its dots are those of the overview, used again.

    Args:
        scatter: what to draw.
        name: of the method.
        style: its look.
        prefix: that of the overview.
        place: of the method among those of the overview.
    """
    with canvas(*_SINGLE) as (figure, axes):
        _axes(figure, axes, scatter)
        _front(axes, scatter, name, style)
        left, top = (72 * inches * (1 - _SHRUNK) for inches in (0.58, 0.30))
        size = _DOT * FINE * _weight(len(scatter.dots[name])) / _SHRUNK
        use = (
            f'<use href="#{prefix}-{place}" stroke-width="{size:.2f}" '
            f'transform="translate({left:.2f} {top:.2f}) scale({_SHRUNK:.4f})"/>'
        )
        return element(figure, f"{prefix}s{place}", {"dots": use})


def _weight(total: int) -> float:
    """1 for thousands of dots, up to 2 for few: then each of them counts."""
    return float(np.clip((3000 / max(total, 1)) ** 0.25, 1.0, 2.0))


def _axes(figure: Figure, axes: Axes, scatter: Scatter) -> None:
    panel, (good_x, good_y) = scatter.panel, scatter.good
    axes.grid(axis="x", color=TOKENS["grid"][0], linewidth=0.8)
    axes.set_xlim(*scatter.x_limits)
    axes.set_ylim(*scatter.y_limits)
    line_at(axes, panel.reference)
    line_at(axes, panel.x_reference, vertical=True)
    # Dots are put here afterwards: above the lines of the grid, below the frontiers.
    axes.plot([np.mean(scatter.x_limits)], [np.mean(scatter.y_limits)], gid="dots", zorder=1.6)
    frame(
        figure,
        axes,
        f"{panel.x_label or title(panel.x)}  ({'→' if good_x else '←'} better)",
        f"{panel.label or title(panel.y)}  ({'↑' if good_y else '↓'} better)",
    )


def _front(axes: Axes, scatter: Scatter, name: str, style: Style) -> None:
    points = [trial.at(scatter.panel) for trial in scatter.fronts[name]]
    x, y = [point[0] for point in points], [point[1] for point in points]
    axes.plot(x, y, color=TOKENS["page"][0], linewidth=3.0, alpha=0.7, zorder=2.0)
    axes.plot(
        x, y, color=style.colour, linewidth=1.5, dashes=style.dash or (None, None),
        marker=style.marker, markersize=3.4, markeredgewidth=0, zorder=2.2,
    )  # fmt: skip
    if name in scatter.winners:
        axes.plot(
            *([value] for value in scatter.winners[name]), color=style.colour, marker="*",
            markersize=15, markeredgecolor=TOKENS["page"][0], markeredgewidth=1.1, zorder=4,
        )  # fmt: skip


def _dots(figure: Figure, axes: Axes, scatter: Scatter, name: str, style: Style, group: str) -> str:
    """The dots of a method: those of feasible settings deep, the others pale."""
    own = scatter.dots[name]
    own = own[scatter.inside(own)]
    pixels = axes.transData.transform(own[:, :2]) * 72 / figure.dpi
    x, y = pixels[:, 0], figure.get_figheight() * 72 - pixels[:, 1]
    parts, weight = [], _weight(sum(map(len, scatter.dots.values())))
    some_feasible = any(each[:, 2].any() for each in scatter.dots.values())
    for wanted, depth in ((0.0, 0.17 if some_feasible else 0.32), (1.0, 0.42)):
        chosen = np.flatnonzero(own[:, 2] == wanted)
        for layer in range(_LAYERS):
            path = dots_path(x[chosen[layer::_LAYERS]], y[chosen[layer::_LAYERS]])
            if path:
                parts.append(f'<path d="{path}" stroke-opacity="{depth * weight:.2g}"/>')
    return (
        f'<g stroke-width="{_DOT * FINE * weight:.2f}"><g id="{group}" class="dots" '
        f'stroke="var(--method-{style.number})">'
        f'<g transform="scale({1 / FINE:g})">{"".join(parts)}</g></g></g>'
    )


@dataclass(frozen=True)
class Axis:
    """An upright axis of a sensitivity plot: a figure, its label, and a line across."""

    key: str
    label: str
    limit: float | None = None


def places(values: Sequence[Any]) -> list[float]:
    """Where values stand on an axis: by their logarithm where they span decades, words in steps.

    >>> places([0.01, 0.1, 1]), places([0.1, 0.5]), places(["a", "b"])
    ([-2.0, -1.0, 0.0], [0.1, 0.5], [0.0, 1.0])
    """
    if not all(map(is_number, values)):
        return [float(k) for k in range(len(values))]
    log = _spans_decades([float(value) for value in values])
    return [math.log10(value) if log else float(value) for value in values]


def quantiles(sweep: Sweep, group: Sequence[Trial], key: str) -> tuple[float, ...] | None:
    """10, 25, 50, 75 and 90 per cent of a figure over the runs of some settings."""
    rows = [row for trial in group for row in trial.runs]
    if not sweep.saved:
        rows = [trial.figures for trial in group if trial.score is not None]
    finite = [value for row in rows if math.isfinite(value := number(row.get(key)))]
    return tuple(np.quantile(finite, _QUANTILES).tolist()) if finite else None


def sensitivity(
    sweep: Sweep, profile: Profile, shown: Sequence[Axis], style: Style, prefix: str
) -> str:
    """A hyperparameter of a method: bars of quantiles and the best setting, by value.

    Args:
        sweep: all of it.
        profile: of the hyperparameter.
        shown: an axis for each figure.
        style: of the method.
        prefix: of ids.
    """
    at = places(profile.values)
    height = 0.48 + _ROW * len(shown)
    with canvas(SMALL[0], height) as (figure, first):
        left, width = first.get_position().x0, first.get_position().width
        rows: list[Axes] = []
        for k, axis in enumerate(shown):
            tall = _ROW - _TOP - 0.12 * (k + 1 < len(shown))
            box = (left, (height - k * _ROW - _TOP - tall) / height, width, tall / height)
            axes = first if k == 0 else figure.add_axes(box)
            axes.set_position(box)
            dress(axes)
            figure.text(
                0.004, 1 - (k * _ROW + 0.03) / height, axis.label,
                va="top", fontsize=9, color=TOKENS["ink"][0],
            )  # fmt: skip
            gaps = np.diff(sorted(at))
            room = (max(at) - min(at)) * 0.08 + 0.5 * float(gaps.min(initial=1.0)) * (len(at) < 4)
            axes.set_xlim(min(at) - room, max(at) + room)
            line_at(axes, axis.limit)
            _bars(axes, sweep, profile, at, axis, style)
            rows.append(axes)
        for axes in rows[:-1]:
            axes.set_xticks(at, [""] * len(at))
        scale = width * SMALL[0] / (rows[-1].get_xlim()[1] - rows[-1].get_xlim()[0])
        rows[-1].set_xticks(at, _labels(profile.values, [scale * x for x in at]))
        rows[-1].set_xlabel(profile.name, loc="right", fontsize=9, color=TOKENS["ink"][0])
        return element(figure, prefix)


def _bars(
    axes: Axes, sweep: Sweep, profile: Profile, at: Sequence[float], axis: Axis, style: Style
) -> None:
    colour = style.colour
    bars = [quantiles(sweep, group, axis.key) for group in profile.groups]
    for x, bar in zip(at, bars, strict=True):
        if bar is None:
            continue
        for (low, high), width in (((bar[0], bar[4]), 1.2), ((bar[1], bar[3]), 5.0)):
            axes.plot(
                [x, x], [low, high], color=colour, alpha=0.38, linewidth=width,
                solid_capstyle="butt", zorder=2,
            )  # fmt: skip
        axes.plot([x], [bar[2]], marker="_", markersize=7, markeredgewidth=1.4, color=colour)
    best = [(x, t) for x, t in zip(at, profile.best, strict=True) if t is not None]
    y = [number(t.figures.get(axis.key)) for _, t in best]
    axes.plot([x for x, _ in best], y, color=colour, linewidth=1.3, zorder=3)
    for (x, trial), value in zip(best, y, strict=True):
        won = sweep.winners.get(trial.family) is trial
        filled = trial.feasible or not sweep.limited
        axes.plot(
            [x], [value], marker="*" if won else "o", markersize=11 if won else 4.8,
            color=colour, markerfacecolor=colour if filled else TOKENS["page"][0],
            markeredgecolor=colour, markeredgewidth=1.0, zorder=4 if won else 3.5,
        )  # fmt: skip
    # The profile must be seen, but for a value that is far off.
    seen = np.array([value for value in y if math.isfinite(value)])
    near = robust(seen) if seen.size else (0.0, 0.0)
    ends = [value for bar in bars if bar for value in (bar[0], bar[4])]
    keep = [value for value in seen.tolist() if near[0] <= value <= near[1]]
    low, high = robust(np.array(ends), axis.limit, *keep)
    axes.set_ylim(low - 0.03 * (high - low), high + 0.05 * (high - low))  # a star is large


def _labels(values: Sequence[Any], inches: Sequence[float]) -> list[str]:
    """Names of marks; one that would touch its neighbour is left out."""
    names, end = [], -math.inf
    for value, x in zip(values, inches, strict=True):
        text = setting(value)
        half = _LETTER * len(text) / 2
        names.append(text if x - half > end else "")
        end = x + half + 0.04 if names[-1] else end
    return names
