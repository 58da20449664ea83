"""Tables from saved runs, and differences between methods seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .store import Comparison
from .task import Metric

__all__ = ["ARROWS", "Interval", "Table", "cells", "markdown", "paired", "spread", "table"]

Table = dict[str, dict[str, dict[str, float]]]
DIVERGED = "diverged"
ARROWS = {"higher": "↑", "lower": "↓", "none": ""}


@dataclass(frozen=True)
class Interval:
    """A mean difference and where it lies with a given confidence.

    Attributes:
        mean: of the differences.
        low: end of the interval; NaN for a single pair.
        high: the other end.
        pairs: how many differences there are.
    """

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 0, so that seeds alone do not explain the difference."""
        return self.low > 0 or self.high < 0


def paired(left: Sequence[float], right: Sequence[float], level: float = 0.95) -> Interval:
    r"""Student's t interval of the mean of left - right, pair by pair.

    .. math::
        \bar d \pm t_{n-1,\,(1+\text{level})/2}\; s_d / \sqrt n

    Args:
        left: a figure of one method, one value for each seed.
        right: that of another, seeds in the same order.
        level: confidence.

    Example:
        >>> found = paired([0.5, 0.6, 0.7], [0.4, 0.4, 0.4])
        >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3), found.decided
        (0.2, -0.048, 0.448, False)
    """
    if len(left) != len(right) or not left:
        raise ValueError(f"`paired` needs pairs but got {len(left)} and {len(right)} values.")
    gaps = [a - b for a, b in zip(left, right, strict=True)]
    number, mean = len(gaps), math.fsum(gaps) / len(gaps)
    if number < 2:
        return Interval(mean, math.nan, math.nan, number)
    from scipy import stats

    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / (number - 1))
    reach = float(stats.t.ppf((1 + level) / 2, number - 1)) * deviation / math.sqrt(number)
    return Interval(mean, mean - reach, mean + reach, number)


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
