"""Tables of the page as plain data: what stands in each cell and how it is marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import stats
from ..stats import fixed, plain
from ..store import SavedRun
from ..task import Metric, Rule
from .plots import numbers
from .style import setting, title

Runs = Mapping[str, Sequence[SavedRun]]
_HINTS = {"higher": "higher is better", "lower": "lower is better", "none": ""}


@dataclass(frozen=True)
class Cell:
    """One value, with its standard deviation and a second, small line."""

    text: str
    spread: str = ""
    note: str = ""
    best: bool = False  # of its metric
    met: bool | None = None  # whether it is within the limit, where there is one


@dataclass(frozen=True)
class Head:
    """Name of a row or column, with the direction of good and a second, small line."""

    text: str
    arrow: str = ""
    hint: str = ""  # the arrow in words
    method: str = ""  # whose swatch stands before it
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table with its caption; each line has a head and its cells."""

    caption: str
    corner: str
    heads: Sequence[Head]
    lines: Sequence[tuple[Head, Sequence[Cell]]]


def metric_head(metric: Metric, rule: Rule | None = None) -> Head:
    """A metric's label with its direction; that of the judged constraint with its limit."""
    limited = rule is not None and rule.constraint == metric.key
    note = f"limit {rule.limit:g}" if limited and rule is not None else ""
    return Head(metric.label, stats.ARROWS[metric.better], _HINTS[metric.better], note=note)


def _method_head(name: str, runs: Sequence[SavedRun], several: bool) -> Head:
    """A method's name, and what its figures rest on where that is not simply all its runs."""
    diverged = sum(run.diverged is not None for run in runs)
    unfinished = sum(run.result is None for run in runs)
    notes = [f"{diverged} of {len(runs)} diverged"] if diverged else []
    notes += [f"{unfinished} of {len(runs)} unfinished"] if unfinished else []
    notes += ["no run"] if not runs and several else []
    return Head(name, method=name, note=", ".join(notes))


def scores(
    runs: Runs,
    values: stats.Table,
    metrics: Sequence[Metric],
    caption: str,
    rule: Rule | None = None,
    *,
    across: bool = True,
) -> Table:
    """Mean and deviation of each metric.

    The best mean of a metric is marked, and all that look the same at its digits, but never a
    method of which a run diverged (its figures are those of a shorter training). The judged
    constraint is marked as met or not instead.

    Args:
        runs: by method.
        values: from `stats.table`.
        metrics: in order.
        caption: of the table.
        rule: what is judged.
        across: one row per method; otherwise one row per metric.
    """
    columns = [_column(runs, values, metric, rule) for metric in metrics]
    heads = [metric_head(metric, rule) for metric in metrics]
    there = any(runs.values())
    methods = [_method_head(name, group, there) for name, group in runs.items()]
    if across:
        lines = [(head, [column[k] for column in columns]) for k, head in enumerate(methods)]
        return Table(caption, "Method", heads, lines)
    return Table(caption, "Figure", methods, list(zip(heads, columns, strict=True)))


def _column(runs: Runs, values: stats.Table, metric: Metric, rule: Rule | None) -> list[Cell]:
    limited = rule is not None and rule.constraint == metric.key
    best: set[str] = set() if limited else _best(values, metric)
    cells = []
    for name in runs:
        row = values.get(name, {})
        if metric.key not in row:
            cells.append(Cell("–"))
            continue
        met = stats.met(row, rule) if limited else None
        text, spread = stats.cell(row[metric.key], metric.digits)
        cells.append(Cell(text, spread, best=name in best, met=met))
    return cells


def _best(values: stats.Table, metric: Metric) -> set[str]:
    means = {
        name: row[metric.key]["mean"]
        for name, row in values.items()
        if metric.key in row and stats.DIVERGED not in row
    }
    means = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    if metric.better == "none" or len(means) < 2:
        return set()
    top = fixed((max if metric.better == "higher" else min)(means.values()), metric.digits)
    shown = {name for name, mean in means.items() if fixed(mean, metric.digits) == top}
    return set() if len(shown) == len(means) else shown


def differences(
    found: Sequence[tuple[Metric, Mapping[str, stats.Interval]]],
    first: str,
    references: Sequence[str],
) -> Table:
    """Each method minus the first one in the judged figures, with 95 % intervals over seeds.

    Args:
        found: the judged figures, each with the intervals from `Judgement.differences`.
        first: the first of all methods.
        references: methods that are marked so.
    """

    def signed(value: float, digits: int) -> str:
        return f"{'+' if value > 0 else ''}{fixed(value, digits)}"

    heads, lines = [], []
    most = max(interval.pairs for _, intervals in found for interval in intervals.values())
    for metric, _ in found:
        over = Head("95 % interval", note=f"{most} seeds" if most > 1 else "")
        heads += [metric_head(metric), over, Head("")]
    for name in dict.fromkeys(name for _, intervals in found for name in intervals):
        cells = []
        for metric, intervals in found:
            interval = intervals.get(name)
            if interval is None:
                cells += [Cell("–")] * 3
                continue
            better = (interval.mean > 0) == (metric.better == "higher")
            answer = ("better" if better else "worse") if interval.decided else "not decided"
            several = interval.pairs > 1
            ends = (signed(value, metric.digits) for value in (interval.low, interval.high))
            seeds = f"{interval.pairs} seeds" if 1 < interval.pairs < most else ""
            cells += [
                Cell(signed(interval.mean, metric.digits)),
                Cell(" to ".join(ends) if several else "–", note=seeds),
                Cell(answer if several else "one seed: not decided"),
            ]
        note = "reference" if name in references else ""
        lines.append((Head(name, method=name, note=note), cells))
    return Table(f"Each method minus {first}, seed by seed", "Method", heads, lines)


def entries(
    runs: Runs, key: str, names: Sequence[str], limit: float | None, caption: str, multipliers: str
) -> Table | None:
    """Entry by method: final mean over seeds, its multiplier, and a mark above the limit.

    Args:
        runs: by method.
        key: of the list in the rows.
        names: of its entries.
        limit: above it an entry is violated; None where there is no such thing.
        caption: of the table.
        multipliers: key of the list of multipliers, or empty.
    """
    values = {name: _lists(group, key) for name, group in runs.items()}
    weights = {name: _lists(group, multipliers) for name, group in runs.items()}
    values = {name: group for name, group in values.items() if group}
    if not values:
        return None
    lines = []
    for k in range(max(len(row) for group in values.values() for row in group)):
        head = Head(names[k] if k < len(names) else f"{title(key)} {k + 1}")
        lines.append((head, [_entry(values[name], weights[name], k, limit) for name in values]))
    heads = [_method_head(name, runs[name], True) for name in values]
    return Table(caption, "Entry", heads, lines)


def _lists(runs: Sequence[SavedRun], key: str) -> list[list[float]]:
    rows = (numbers(run.figures.get(key)) for run in runs)
    return [row for row in rows if row]


def _entry(
    rows: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], k: int, limit: float | None
) -> Cell:
    values = [row[k] for row in rows if k < len(row)]
    mean = stats.spread(values)[0]
    above = sum(value > limit for value in values) if limit is not None else 0
    notes = [f"{above} of {len(values)} seeds"] if 0 < above < len(values) else []
    multiplier = stats.spread(row[k] for row in weights if k < len(row))[0]
    notes += [] if math.isnan(multiplier) else [f"ν {plain(multiplier, 2)}"]
    broken = False if limit is not None and mean > limit else None
    return Cell(fixed(mean, 4), note=" · ".join(notes), met=broken)


def settings(methods: Mapping[str, Mapping[str, Any]]) -> Table:
    """What each method ran with."""
    flat = {
        name: {k: v for k, v in method.items() if k != "settings"} | (method.get("settings") or {})
        for name, method in methods.items()
    }
    keys = list(dict.fromkeys(key for values in flat.values() for key in values))
    lines = [
        (Head(name, method=name), [Cell(setting(values.get(key))) for key in keys])
        for name, values in flat.items()
    ]
    return Table("What each method ran with", "Method", [Head(key) for key in keys], lines)
