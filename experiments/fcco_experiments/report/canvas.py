"""Drawing surface of the plots: quiet axes, the reader's own font, the same bytes each time."""

from __future__ import annotations

import base64
import io
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .palette import TOKENS, dark

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "SIZE",
    "SMALL",
    "bounds",
    "canvas",
    "data_uri",
    "dress",
    "frame",
    "line_at",
    "log_axis",
    "on_page",
    "spans_decades",
    "svg_of",
    "ticks",
    "twice",
    "usual",
]

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",  # wide, and comes with matplotlib: what is measured always fits
    "font.size": 9.0,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fcco",
    "path.simplify": True,
    "axes.unicode_minus": True,
}
SIZE, SMALL = (5.2, 3.3), (3.6, 2.5)
"""Inches of a plot and of a small one among many."""
_INK, _MUTED, _GRID, _LIMIT = (TOKENS[name][0] for name in ("ink", "muted", "grid", "limit"))


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
    """Labels that read without turning the head."""
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


def usual(groups: Sequence[Sequence[float]]) -> list[float]:
    """Values of all methods but those that are so far off that the others would be one line."""
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


def log_axis(axes: Axes, limits: tuple[float, float], upright: bool = False) -> None:
    """A logarithmic axis between `limits`, with round numbers."""
    if upright:
        axes.set_yscale("log")
        axes.set_ylim(*limits)
    else:
        axes.set_xscale("log")
        axes.set_xlim(*limits)
    decades = math.log10(limits[1] / limits[0])
    heads = (1, 2, 5) if decades < 2.5 else (1,)
    if decades < 0.8:
        heads = (1, 1.5, 2, 3, 4, 5, 6, 8)
    ticks(axes, [head * 10.0**k for k in range(-12, 13) for head in heads], upright)


def ticks(axes: Axes, values: Sequence[float], upright: bool = False) -> None:
    """Marks at those of `values` that are in the frame, and nowhere else."""
    low, high = axes.get_ylim() if upright else axes.get_xlim()
    inside = [value for value in values if low <= value <= high]
    names = [f"{value:g}".replace("-", "\N{MINUS SIGN}") for value in inside]
    axis = axes.yaxis if upright else axes.xaxis
    axis.set_ticks(inside, names)
    axis.set_ticks([], minor=True)


def svg_of(figure: Figure) -> str:
    """The figure as text: no date, short numbers, fonts of the reader."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = stream.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bd="([^"]*)"', lambda path: f'd="{_short(path[1])}"', svg)
    svg = svg.replace("'DejaVu Sans'", _FONT)
    return svg[svg.index("<svg") :]


def _short(path: str) -> str:
    rounded = re.sub(r"-?\d+\.\d{3,}", lambda figure: f"{float(figure[0]):.2f}", path)
    return " ".join(rounded.split())


def on_page(svg: str) -> str:
    """The drawing with a ground of its own, for a file that is opened by itself."""
    return svg.replace("<svg ", f'<svg style="background: {TOKENS["page"][0]}" ', 1)


def data_uri(svg: str) -> str:
    """The drawing as an address that needs no file."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def twice(svg: str) -> tuple[str, str]:
    """Addresses of the light and of the dark drawing."""
    return data_uri(svg), data_uri(dark(svg))
