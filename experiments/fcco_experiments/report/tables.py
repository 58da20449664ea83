"""Tables of the page as plain data: what stands in each cell and how it is marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..stats import ARROWS, spread
from ..store import SavedRun
from ..task import Metric
from .palette import family_of
from .runs import finished, number, numbers
from .words import duration, fixed, plain, seeds, setting, title

__all__ = [
    "HINTS",
    "Cell",
    "Head",
    "Line",
    "Table",
    "ending",
    "entries",
    "listing",
    "scores",
    "settings",
]

Runs = Mapping[str, Sequence[SavedRun]]
Values = Mapping[str, Mapping[str, Mapping[str, float]]]
HINTS = {"higher": "higher is better", "lower": "lower is better", "none": ""}


@dataclass(frozen=True)
class Cell:
    """One value.

    Args:
        text: the value.
        spread: standard deviation over seeds, or empty.
        note: a second, small line.
        best: best of its metric.
        broken: above the limit.
        wide: words that may take several lines.
    """

    text: str
    spread: str = ""
    note: str = ""
    best: bool = False
    broken: bool = False
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


def method_head(name: str, runs: Sequence[SavedRun]) -> Head:
    """A method's name, and what its figures rest on where that is not simply all its runs."""
    diverged = sum(run.diverged is not None for run in runs)
    unfinished = sum(run.result is None for run in runs)
    notes = [f"{diverged} of {len(runs)} diverged"] if diverged else []
    notes += [f"{unfinished} of {len(runs)} unfinished"] if unfinished else []
    notes += [] if runs else ["no run"]
    return Head(name, method=family_of(name), note=", ".join(notes))


def scores(
    runs: Runs,
    values: Values,
    metrics: Sequence[Metric],
    caption: str,
    across: bool,
    references: Sequence[str] = (),
) -> Table:
    """Mean and deviation of each metric; `across` puts the methods into rows.

    The best mean of a metric is marked, and all that look the same at its digits, but never a
    method of which a run diverged (its figures are those of a shorter training), nor a reference.

    Args:
        runs: by method.
        values: mean and deviation, from `summary.table`.
        metrics: in order.
        caption: of the table.
        across: one row per method; otherwise one row per metric.
        references: methods that are no candidates for a mark.
    """
    columns = [_column(runs, values, metric, references) for metric in metrics]
    heads = tuple(
        Head(metric.label, ARROWS[metric.better], HINTS[metric.better]) for metric in metrics
    )
    methods = tuple(method_head(name, group) for name, group in runs.items())
    if across:
        lines = [
            Line(head, tuple(column[k] for column in columns)) for k, head in enumerate(methods)
        ]
        return Table(caption, "Method", heads, tuple(lines))
    rows = (Line(head, tuple(column)) for head, column in zip(heads, columns, strict=True))
    return Table(caption, "Figure", methods, tuple(rows))


def _column(runs: Runs, values: Values, metric: Metric, references: Sequence[str]) -> list[Cell]:
    found = {name: values.get(name, {}).get(metric.key) for name in runs}
    means = {name: math.nan if each is None else each["mean"] for name, each in found.items()}
    ranked = {name: mean for name, mean in means.items() if name not in references}
    best = _best(runs, ranked, metric)
    return [
        _score(found[name], metric.digits, len(finished(group)) > 1, name in best)
        for name, group in runs.items()
    ]


def _score(value: Mapping[str, float] | None, digits: int, several: bool, best: bool) -> Cell:
    if value is None:
        return Cell("–")
    deviation = f"± {fixed(value['std'], digits)}" if several else ""
    if not math.isfinite(value["mean"]):
        deviation = ""
    return Cell(fixed(value["mean"], digits), deviation, best=best)


def _best(runs: Runs, means: Mapping[str, float], metric: Metric) -> set[str]:
    steady = {
        name: mean
        for name, mean in means.items()
        if math.isfinite(mean) and all(run.diverged is None for run in runs[name])
    }
    if metric.better == "none" or len(steady) < 2:
        return set()
    top = (max if metric.better == "higher" else min)(steady.values())
    shown = {n for n in steady if fixed(steady[n], metric.digits) == fixed(top, metric.digits)}
    return set() if len(shown) == len(steady) else shown


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
    count = max(len(row) for group in values.values() for row in group)
    lines = []
    for k in range(count):
        head = names[k] if k < len(names) else f"{title(key)} {k + 1}"
        cells = (_entry(values[name], weights[name], k, limit) for name in values)
        lines.append(Line(Head(head), tuple(cells)))
    heads = tuple(method_head(name, runs[name]) for name in values)
    return Table(caption, "Entry", heads, tuple(lines))


def _lists(runs: Sequence[SavedRun], key: str) -> list[list[float]]:
    rows = (numbers(run.figures.get(key)) for run in finished(runs))
    return [row for row in rows if row]


def _entry(
    rows: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], k: int, limit: float | None
) -> Cell:
    values = [row[k] for row in rows if k < len(row)]
    mean = spread(values)[0]
    notes = []
    above = sum(value > limit for value in values) if limit is not None else 0
    if 0 < above < len(values):
        notes.append(f"{above} of {len(values)} seeds")
    multiplier = spread(row[k] for row in weights if k < len(row))[0]
    if not math.isnan(multiplier):
        notes.append(f"ν {plain(multiplier, 2)}")
    broken = limit is not None and mean > limit
    return Cell(fixed(mean, 4), note=" · ".join(notes), broken=broken)


def ending(runs: Runs, known: Sequence[Metric], caption: str) -> Table | None:
    """Figures taken once, at the end, such as the KKT residuals: three digits whatever their size.

    Args:
        runs: by method.
        known: metrics, for the labels.
        caption: of the table.
    """
    keys = end_keys(runs)
    if not keys:
        return None
    labels = {each.key: Head(each.label, ARROWS[each.better], HINTS[each.better]) for each in known}
    lines = []
    for name, group in runs.items():
        rows = [run.figures for run in finished(group)]
        columns = ([number(row[key]) for row in rows if key in row] for key in keys)
        lines.append(Line(method_head(name, group), tuple(map(_spread_cell, columns))))
    return Table(
        caption, "Method", tuple(labels.get(k) or Head(title(k)) for k in keys), tuple(lines)
    )


def end_keys(runs: Runs) -> list[str]:
    """Keys of the numbers that only the end of a run has."""
    ends = (run.result["end"] for group in runs.values() for run in group if run.result)
    keys = (key for row in ends for key, value in row.items() if isinstance(value, int | float))
    return list(dict.fromkeys(keys))


def _spread_cell(values: Sequence[float]) -> Cell:
    if not values:
        return Cell("–")
    mean, deviation = spread(values)
    several = len(values) > 1 and math.isfinite(mean)
    return Cell(plain(mean), f"± {plain(deviation, 2)}" if several else "")


def settings(runs: Runs, caption: str) -> Table:
    """What each method ran with."""
    flat: dict[str, dict[str, Any]] = {}
    for name, group in runs.items():
        method = dict(group[0].method) if group else {}
        further = method.pop("settings", None) or {}
        flat[name] = {**method, **further}
    keys = list(dict.fromkeys(key for values in flat.values() for key in values))
    lines = (
        Line(
            Head(name, method=family_of(name)),
            tuple(Cell(setting(flat[name].get(key))) for key in keys),
        )
        for name in runs
    )
    return Table(caption, "Method", tuple(Head(key) for key in keys), tuple(lines))


def listing(runs: Runs, caption: str) -> Table:
    """One line per method: its runs, how long they took and what they have drawn."""
    lines = []
    for name, group in runs.items():
        took = [number(run.result.get("seconds")) for run in finished(group) if run.result]
        drawn = [number(run.result.get("samples")) for run in finished(group) if run.result]
        mean, deviation = spread(took)
        cells = (
            Cell(seeds([run.seed for run in group], 0) if group else "none"),
            Cell(duration(mean), f"± {duration(deviation)}" if took[1:] else ""),
            Cell(f"{spread(drawn)[0]:,.0f}" if drawn else "–"),
        )
        lines.append(Line(method_head(name, group), cells))
    heads = ("Runs", "Time a run", "Samples drawn")
    return Table(caption, "Method", tuple(map(Head, heads)), tuple(lines))
