"""Tables from saved runs: mean and standard deviation over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .record import Comparison
from .task import Metric

__all__ = ["ARROWS", "cells", "markdown", "spread", "table"]

Table = dict[str, dict[str, dict[str, float]]]
DIVERGED = "diverged"
ARROWS = {"higher": "↑", "lower": "↓", "none": ""}


def table(comparison: Comparison, metrics: Sequence[Metric]) -> Table:
    """Mean and standard deviation (n - 1; 0 for one seed) of each metric of each method.

    A run that diverged counts with its last finite figures, so that it does not flatter its method;
    `diverged` is then the share of such runs. A figure that no run has is left out.
    """
    result: Table = {}
    for name in comparison.meta["methods"]:
        finished = [run for run in comparison.of(name) if run.result is not None]
        if not finished:
            continue
        figures = [run.figures for run in finished]
        row = result[name] = {}
        for metric in metrics:
            values = [each[metric.key] for each in figures if _is_number(each.get(metric.key))]
            if values:
                row[metric.key] = dict(zip(("mean", "std"), spread(values), strict=True))
        if diverged := sum(run.diverged is not None for run in finished):
            row[DIVERGED] = {"mean": diverged / len(finished), "std": 0.0}
    return result


def cells(shown: Table, metrics: Sequence[Metric], *, full: bool = False) -> list[list[str]]:
    """A table as text: a header, then a row for each method.

    Args:
        shown: from `table`.
        metrics: columns, in order.
        full: all of them, not the headline alone.
    """
    columns = [metric for metric in metrics if full or metric.headline]
    columns = [m for m in columns if any(m.key in row for row in shown.values())]
    rows = [["method", *(f"{each.label} {ARROWS[each.better]}".rstrip() for each in columns)]]
    for name, row in shown.items():
        texts = [_cell(row.get(each.key), each.digits) for each in columns]
        share = row.get(DIVERGED)
        rows.append([name if share is None else f"{name} ({share['mean']:.0%} diverged)", *texts])
    return rows


def markdown(shown: Table, metrics: Sequence[Metric]) -> str:
    """The headline table and the full one, as a Markdown file."""
    parts = []
    for title, full in (("Headline", False), ("All figures", True)):
        head, *rows = cells(shown, metrics, full=full)
        lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"## {title}\n\n{body}\n")
    meanings = [f"* **{each.label}**: {each.meaning}" for each in metrics if each.meaning]
    note = "Mean ± standard deviation over seeds.\n"
    return "\n".join([*parts, note, *meanings]).rstrip() + "\n"


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and standard deviation over runs (0 of a single one); NaN of nothing or NaN."""
    kept = list(values)
    if not kept or not all(map(math.isfinite, kept)):
        return math.nan, math.nan
    return statistics.fmean(kept), statistics.stdev(kept) if len(kept) > 1 else 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Mapping[str, float] | None, digits: int) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value["mean"]):
        return "not finite"
    return f"{value['mean']:.{digits}f} ± {value['std']:.{digits}f}"
