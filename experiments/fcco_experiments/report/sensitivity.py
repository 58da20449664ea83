"""How figures depend on a hyperparameter: their spread over all other settings, and the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .canvas import SMALL, canvas, dress, line_at, spans_decades, svg_of
from .cloud import robust
from .cloud_plot import Drawn
from .inline import inline
from .palette import TOKENS, Style
from .profile import Profile, is_number, key_name
from .runs import number
from .study import Study, Trial
from .words import setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Figure", "places", "quantiles", "sensitivity"]

_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_ROW, _TOP, _LETTER = 1.55, 0.30, 0.075
"""Inches of a row, of the words above its axes, and of a letter below them."""


@dataclass(frozen=True)
class Figure:
    """An upright axis.

    Args:
        key: of the figure.
        label: of the axis.
        limit: a line across.
    """

    key: str
    label: str
    limit: float | None = None


def places(values: Sequence[Any]) -> tuple[list[float], bool]:
    """Where values stand on an axis, and whether it is logarithmic; words in equal steps.

    >>> places([0.01, 0.1, 1])
    ([-2.0, -1.0, 0.0], True)
    >>> places([0.1, 0.5]), places(["a", "b"])
    (([0.1, 0.5], False), ([0.0, 1.0], False))
    """
    if not all(map(is_number, values)):
        return [float(k) for k in range(len(values))], False
    if spans_decades([float(value) for value in values]):
        return [math.log10(value) for value in values], True
    return [float(value) for value in values], False


def quantiles(found: Study, group: Sequence[Trial], key: str) -> tuple[float, ...] | None:
    """10, 25, 50, 75 and 90 per cent of a figure over the runs of some settings."""
    rows = [row for trial in group for row in trial.runs]
    if not found.saved:
        rows = [trial.figures for trial in group if trial.score is not None]
    values = [number(row.get(key)) for row in rows]
    finite = [value for value in values if math.isfinite(value)]
    return tuple(np.quantile(finite, _QUANTILES).tolist()) if finite else None


def sensitivity(
    found: Study, profile: Profile, figures: Sequence[Figure], style: Style, prefix: str
) -> Drawn:
    """A hyperparameter of a method: bars of quantiles and the best setting, by value.

    Args:
        found: the sweep.
        profile: of the hyperparameter.
        figures: an axis for each.
        style: of the method.
        prefix: of ids.
    """
    at, _ = places(profile.values)
    gaps = np.diff(sorted(at))
    height = 0.48 + _ROW * len(figures)
    name = key_name(profile.key)
    with canvas(SMALL[0], height) as (figure, first):
        across = first.get_position().x0, first.get_position().width
        rows: list[Axes] = []
        for k, each in enumerate(figures):
            tall = _ROW - _TOP - 0.12 * (k + 1 < len(figures))
            bottom = (height - k * _ROW - _TOP - tall) / height
            box = (across[0], bottom, across[1], tall / height)
            axes = first if k == 0 else figure.add_axes(box)
            axes.set_position(box)
            dress(axes)
            figure.text(
                0.004, 1 - (k * _ROW + 0.03) / height, each.label,
                va="top", fontsize=9, color=TOKENS["ink"][0],
            )  # fmt: skip
            room = (max(at) - min(at)) * 0.08 + 0.5 * float(gaps.min(initial=1.0)) * (len(at) < 4)
            axes.set_xlim(min(at) - room, max(at) + room)
            line_at(axes, each.limit)
            _row(axes, found, profile, at, each, style)
            rows.append(axes)
        for axes in rows[:-1]:
            axes.set_xticks(at, [""] * len(at))
        wide = across[1] * SMALL[0] / (rows[-1].get_xlim()[1] - rows[-1].get_xlim()[0])
        rows[-1].set_xticks(at, _labels(profile.values, [wide * each for each in at]))
        rows[-1].set_xlabel(name, loc="right", fontsize=9, color=TOKENS["ink"][0])
        alt = f"{' and '.join(each.label for each in figures)} by {name}. {_words(profile)}"
        return Drawn(inline(svg_of(figure), prefix, alt), name, _words(profile))


def _row(
    axes: Axes, found: Study, profile: Profile, at: Sequence[float], each: Figure, style: Style
) -> None:
    bars = [quantiles(found, group, each.key) for group in profile.groups]
    for x, bar in zip(at, bars, strict=True):
        if bar is None:
            continue
        for (low, high), width in (((bar[0], bar[4]), 1.2), ((bar[1], bar[3]), 5.0)):
            axes.plot(
                [x, x], [low, high], color=style.colour, alpha=0.38, linewidth=width,
                solid_capstyle="butt", zorder=2,
            )  # fmt: skip
        axes.plot(
            [x], [bar[2]], marker="_", markersize=7, markeredgewidth=1.4,
            color=style.colour, zorder=2.5,
        )  # fmt: skip
    best = [(x, t) for x, t in zip(at, profile.best, strict=True) if t is not None]
    y = [number(t.figures.get(each.key)) for _, t in best]
    axes.plot([x for x, _ in best], y, color=style.colour, linewidth=1.3, zorder=3)
    for (x, trial), value in zip(best, y, strict=True):
        won = found.winners.get(trial.family) is trial
        met = found.feasible(trial) or not found.limited
        axes.plot(
            [x], [value], marker="*" if won else "o", markersize=11 if won else 4.8,
            color=style.colour,
            markerfacecolor=style.colour if met else TOKENS["page"][0],
            markeredgecolor=style.colour, markeredgewidth=1.0, zorder=4 if won else 3.5,
        )  # fmt: skip
    ends = [value for bar in bars if bar for value in (bar[0], bar[4])]
    low, high = robust(np.array(ends), each.limit, *_near(y))
    axes.set_ylim(low - 0.03 * (high - low), high + 0.05 * (high - low))  # a star is large


def _near(values: Sequence[float]) -> list[float]:
    """The profile must be seen, but for a value that is far off."""
    finite = np.array([value for value in values if math.isfinite(value)])
    if not finite.size:
        return []
    low, high = robust(finite)
    return [value for value in finite.tolist() if low <= value <= high]


def _labels(values: Sequence[Any], inches: Sequence[float]) -> list[str]:
    """Names of marks; one that would touch its neighbour is left out."""
    names, end = [], -math.inf
    for value, x in zip(values, inches, strict=True):
        text = setting(value)
        half = _LETTER * len(text) / 2
        names.append(text if x - half > end else "")
        end = x + half + 0.04 if names[-1] else end
    return names


def _words(profile: Profile) -> str:
    top = profile.top
    if top is None:
        return "No setting came to its end with any value."
    text = f"Best: {setting(profile.values[top])}."
    if profile.lost:
        text += f" Nothing feasible with {', '.join(map(setting, profile.lost))}."
    return text
