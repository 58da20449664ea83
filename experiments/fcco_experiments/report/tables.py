"""Tables of the page as plain data: what stands in each cell and how it is marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import stats
from ..store import SavedRun
from ..task import Metric, Rule
from .plots import number, numbers
from .style import duration, fixed, plain, seeds, setting, title

__all__ = [
    "Cell",
    "Head",
    "Line",
    "Table",
    "differences",
    "end_keys",
    "ending",
    "entries",
    "listing",
    "metric_head",
    "scores",
    "settings",
]

Runs = Mapping[str, Sequence[SavedRun]]
HINTS = {"higher": "higher is better", "lower": "lower is better", "none": ""}


@dataclass(frozen=True)
class Cell:
    """One value.

    Args:
        text: the value.
        spread: standard deviation over seeds, or empty.
        note: a second, small line.
        best: best of its metric.
        met: whether it is within the limit; None where there is no limit.
        wide: words that may take several lines.
    """

    text: str
    spread: str = ""
    note: str = ""
    best: bool = False
    met: bool | None = None
    wide: bool = False


@dataclass(frozen=True)
class Head:
    """Name of a row or column.

    Args:
        text: the name.
        arrow: direction of good, if any.
        hint: the same in words.
        method: the method whose swatch stands before it, or empty.
        note: a second, small line.
        wide: above words that may take several lines.
    """

    text: str
    arrow: str = ""
    hint: str = ""
    method: str = ""
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Line:
    """A row: its head and its cells."""

    head: Head
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """A table with its caption."""

    caption: str
    corner: str
    heads: tuple[Head, ...]
    lines: tuple[Line, ...]


def metric_head(metric: Metric, rule: Rule | None = None) -> Head:
    """A metric's label with its direction; that of the judged constraint with its limit."""
    limited = rule is not None and rule.constraint == metric.key
    note = f"limit {rule.limit:g}" if limited and rule is not None else ""
    return Head(metric.label, stats.ARROWS[metric.better], HINTS[metric.better], note=note)


def _method_head(name: str, runs: Sequence[SavedRun]) -> Head:
    """A method's name, and what its figures rest on where that is not simply all its runs."""
    diverged = sum(run.diverged is not None for run in runs)
    unfinished = sum(run.result is None for run in runs)
    notes = [f"{diverged} of {len(runs)} diverged"] if diverged else []
    notes += [f"{unfinished} of {len(runs)} unfinished"] if unfinished else []
    notes += [] if runs else ["no run"]
    return Head(name, method=name, note=", ".join(notes))


def scores(
    runs: Runs,
    values: stats.Table,
    metrics: Sequence[Metric],
    caption: str,
    references: Sequence[str] = (),
    rule: Rule | None = None,
    *,
    across: bool = True,
) -> Table:
    """Mean and deviation of each metric.

    The best mean of a metric is marked, and all that look the same at its digits, but never a
    method of which a run diverged (its figures are those of a shorter training), nor a reference.
    The judged constraint is marked as met or not instead.

    Args:
        runs: by method.
        values: from `stats.table`.
        metrics: in order.
        caption: of the table.
        references: methods that are no candidates for a mark.
        rule: what is judged.
        across: one row per method; otherwise one row per metric.
    """
    columns = [_column(runs, values, metric, references, rule) for metric in metrics]
    heads = tuple(metric_head(metric, rule) for metric in metrics)
    methods = tuple(_method_head(name, group) for name, group in runs.items())
    if across:
        rows = (tuple(column[k] for column in columns) for k in range(len(methods)))
        lines = tuple(Line(head, row) for head, row in zip(methods, rows, strict=True))
        return Table(caption, "Method", heads, lines)
    rows = (Line(head, tuple(column)) for head, column in zip(heads, columns, strict=True))
    return Table(caption, "Figure", methods, tuple(rows))


def _column(
    runs: Runs,
    values: stats.Table,
    metric: Metric,
    references: Sequence[str],
    rule: Rule | None,
) -> list[Cell]:
    limited = rule is not None and rule.constraint == metric.key
    best: set[str] = set() if limited else _best(values, metric, references)
    cells = []
    for name in runs:
        row = values.get(name, {})
        value = row.get(metric.key)
        if value is None:
            cells.append(Cell("–"))
            continue
        several = value["runs"] > 1 and math.isfinite(value["mean"])
        deviation = f"± {fixed(value['std'], metric.digits)}" if several else ""
        met = stats.met(row, rule) if limited else None
        text = fixed(value["mean"], metric.digits)
        cells.append(Cell(text, deviation, best=name in best, met=met))
    return cells


def _best(values: stats.Table, metric: Metric, references: Sequence[str]) -> set[str]:
    means = {
        name: row[metric.key]["mean"]
        for name, row in values.items()
        if metric.key in row and name not in references and stats.DIVERGED not in row
    }
    means = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    if metric.better == "none" or len(means) < 2:
        return set()
    top = fixed((max if metric.better == "higher" else min)(means.values()), metric.digits)
    shown = {name for name, mean in means.items() if fixed(mean, metric.digits) == top}
    return set() if len(shown) == len(means) else shown


def differences(
    found: Mapping[str, stats.Interval], metric: Metric, first: str, references: Sequence[str]
) -> Table:
    """Each method less the winner in the judged objective, with 95 % intervals over seeds.

    Args:
        found: from `stats.against`.
        metric: the judged objective.
        first: the winner.
        references: methods that are no candidates.
    """
    lines = []
    for name, interval in found.items():
        gap = interval.mean
        worse = gap < 0 if metric.better == "higher" else gap > 0
        sign = "+" if gap > 0 else ""
        reach = (f"{'+' if v > 0 else ''}{fixed(v, metric.digits)}" for v in _ends(interval))
        answer = "worse" if worse else "better"
        answer = answer if interval.decided else "not decided"
        cells = (
            Cell(f"{sign}{fixed(gap, metric.digits)}"),
            Cell(" to ".join(reach) or "–"),
            Cell(f"{interval.pairs}"),
            Cell(answer if interval.pairs > 1 else "one seed: not decided"),
        )
        note = "reference" if name in references else ""
        lines.append(Line(Head(name, method=name, note=note), cells))
    heads = ("Difference", "95 % interval", "Seeds", f"Compared with {first}")
    caption = f"{metric.label}: each method less {first}, seed by seed"
    return Table(caption, "Method", tuple(map(Head, heads)), tuple(lines))


def _ends(interval: stats.Interval) -> tuple[float, ...]:
    return (interval.low, interval.high) if interval.pairs > 1 else ()


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
        head = names[k] if k < len(names) else f"{title(key)} {k + 1}"
        cells = (_entry(values[name], weights[name], k, limit) for name in values)
        lines.append(Line(Head(head), tuple(cells)))
    heads = tuple(_method_head(name, runs[name]) for name in values)
    return Table(caption, "Entry", heads, tuple(lines))


def _lists(runs: Sequence[SavedRun], key: str) -> list[list[float]]:
    rows = (numbers(run.figures.get(key)) for run in runs)
    return [row for row in rows if row]


def _entry(
    rows: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], k: int, limit: float | None
) -> Cell:
    values = [row[k] for row in rows if k < len(row)]
    mean = stats.spread(values)[0]
    notes = []
    above = sum(value > limit for value in values) if limit is not None else 0
    if 0 < above < len(values):
        notes.append(f"{above} of {len(values)} seeds")
    multiplier = stats.spread(row[k] for row in weights if k < len(row))[0]
    if not math.isnan(multiplier):
        notes.append(f"ν {plain(multiplier, 2)}")
    broken = False if limit is not None and mean > limit else None
    return Cell(fixed(mean, 4), note=" · ".join(notes), met=broken)


def ending(runs: Runs, known: Sequence[Metric], caption: str) -> Table | None:
    """Figures taken once, at the end, such as the KKT residuals: three significant digits."""
    keys = end_keys(runs)
    if not keys:
        return None
    labels = {metric.key: metric_head(metric) for metric in known}
    lines = []
    for name, group in runs.items():
        cells = []
        for key in keys:
            values = [number(run.figures[key]) for run in group if key in run.figures]
            mean, deviation = stats.spread(values)
            several = len(values) > 1 and math.isfinite(mean)
            text = f"± {plain(deviation, 2)}" if several else ""
            cells.append(Cell(plain(mean), text) if values else Cell("–"))
        lines.append(Line(_method_head(name, group), tuple(cells)))
    heads = tuple(labels.get(key) or Head(title(key)) for key in keys)
    return Table(caption, "Method", heads, tuple(lines))


def end_keys(runs: Runs) -> list[str]:
    """Keys of the numbers that only the end of a run has."""
    ends = (run.result["end"] for group in runs.values() for run in group if run.result)
    keys = (key for row in ends for key, value in row.items() if isinstance(value, int | float))
    return list(dict.fromkeys(keys))


def settings(runs: Runs, caption: str) -> Table:
    """What each method ran with."""
    flat: dict[str, dict[str, Any]] = {}
    for name, group in runs.items():
        method = dict(group[0].method) if group else {}
        further = method.pop("settings", None) or {}
        flat[name] = {**method, **further}
    keys = list(dict.fromkeys(key for values in flat.values() for key in values))
    lines = (
        Line(Head(name, method=name), tuple(Cell(setting(flat[name].get(key))) for key in keys))
        for name in runs
    )
    return Table(caption, "Method", tuple(Head(key) for key in keys), tuple(lines))


def listing(runs: Runs, caption: str) -> Table:
    """One line per method: its runs, how long they took and what they have drawn."""
    lines = []
    for name, group in runs.items():
        results = [run.result for run in group if run.result is not None]
        took = [number(result["seconds"]) for result in results if "seconds" in result]
        drawn = [number(result["samples"]) for result in results if "samples" in result]
        mean, deviation = stats.spread(took)
        cells = (
            Cell(seeds([run.seed for run in group], 0) if group else "none"),
            Cell(duration(mean), f"± {duration(deviation)}" if took[1:] else ""),
            Cell(f"{stats.spread(drawn)[0]:,.0f}" if drawn else "–"),
        )
        lines.append(Line(_method_head(name, group), cells))
    heads = ("Runs", "Time a run", "Samples drawn")
    return Table(caption, "Method", tuple(map(Head, heads)), tuple(lines))
