"""The page of `fcco gate`: the verdict, a picture of all segments, a table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from fcco import __version__

from ..environment import command
from . import plots, tables
from .style import COLOURS, SHAPES, TOKENS, count, fixed, setting

_SHADES = {"pass": "best", "fail": "broken", "too few rows": "muted"}
_MOST = 60  # segments in the picture


def content(
    found: Mapping[str, Any], summary: str, old: str, new: str, data: str
) -> dict[str, Any]:
    """Everything the template asks for.

    Args:
        found: what `fcco gate --json` prints.
        summary: the verdict in words.
        old: column of the old model.
        new: column of the new model.
        data: the table.
    """
    rows = sorted(found["segments"], key=lambda row: (row["verdict"] == "pass", -row["difference"]))
    return {
        "task": "gate",
        "title": f"May {new} replace {old}?",
        "summary": f"data: {data} · {count(len(rows), 'segment')}",
        "verdict": summary,
        "passed": found["passed"],
        "tolerance": found["tolerance"],
        "level": f"{100 * found['level']:g} %",
        "svg": picture(rows[:_MOST], found["tolerance"]),
        "hidden": len(rows) - len(rows[:_MOST]),
        "table": table(rows),
        "command": command(),
        "experiment": [("Table", data), ("Loss", found["loss"])]
        + [(key.title(), setting(found[key])) for key in ("tolerance", "level")],
        "machine": [],
        "version": __version__,
        "looks": {},
        "shapes": SHAPES,
        "tokens": TOKENS,
        "colours": COLOURS,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> tables.Table:
    """A line for each segment."""
    heads = [tables.Head(text) for text in ("Rows", "Old", "New", "Worse by", "At most", "Verdict")]
    lines = []
    for row in rows:
        numbers = [row[key] for key in ("old", "new", "difference", "bound")]
        texts = ["unknown" if number is None else fixed(number, 4) for number in numbers]
        met = {"pass": True, "fail": False}.get(row["verdict"])
        cells = [tables.Cell(text) for text in (f"{row['rows']:,}", *texts)]
        lines.append((tables.Head(row["segment"]), [*cells, tables.Cell(row["verdict"], met=met)]))
    return tables.Table("Mean losses by segment", "Segment", heads, lines)


def picture(rows: Sequence[Mapping[str, Any]], tolerance: float) -> str:
    """A dot for the difference of each segment, a line to its bound, and the tolerance."""
    names = ["\n".join(textwrap.wrap(row["segment"], 24, max_lines=2)) for row in rows]
    with plots.canvas(6.2, 0.80 + 0.32 * len(rows)) as (figure, axes):
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x", color=plots.GRID, linewidth=0.8)
        axes.axvline(0, color=plots.MUTED, linewidth=1.0)
        plots.line_at(axes, tolerance, vertical=True)
        ends = [row[key] for row in rows for key in ("difference", "bound")]
        axes.set_xlim(*plots.robust([end for end in ends if end is not None], 0.0, tolerance))
        right = axes.get_xlim()[1]
        for place, row in enumerate(rows):
            shade = TOKENS[_SHADES[row["verdict"]]][0]
            bound = right if row["bound"] is None else row["bound"]
            axes.plot([row["difference"], bound], [place, place], color=shade, linewidth=1.6)
            if row["bound"] is not None:
                axes.plot(bound, place, "|", color=shade, markersize=9, markeredgewidth=1.6)
            axes.plot(row["difference"], place, "o", color=shade, markersize=5.2)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), names)
        axes.tick_params(axis="y", labelsize=8.5, labelcolor=plots.INK)
        plots.label(axes, "new loss minus old loss  (← better)", "")
        return plots.element(figure, "gate")
