"""Saved runs as the page needs them: by method, with missing and broken values made harmless."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..store import Comparison, SavedRun

__all__ = [
    "Curve",
    "by_method",
    "curve",
    "entry_curves",
    "entry_names",
    "finished",
    "number",
    "numbers",
    "steady",
]


@dataclass(frozen=True)
class Curve:
    """A figure over epochs, over all runs that have it.

    Args:
        epochs: where any run has a finite value.
        mean: over runs.
        low: smallest.
        high: largest.
    """

    epochs: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def number(value: object) -> float:
    """A float; what is no number becomes NaN."""
    if isinstance(value, int | float):
        return float(value)
    return math.nan


def numbers(value: object) -> list[float]:
    """A list of floats; what is no list becomes empty."""
    return [number(item) for item in value] if isinstance(value, list | tuple) else []


def by_method(comparison: Comparison) -> dict[str, list[SavedRun]]:
    """Runs of each method, in the order of the comparison, methods without a run included."""
    runs: dict[str, list[SavedRun]] = {str(name): [] for name in comparison.meta.get("methods", ())}
    for run in sorted(comparison.runs, key=lambda run: run.seed):
        runs.setdefault(run.name, []).append(run)
    return runs


def finished(runs: Iterable[SavedRun]) -> list[SavedRun]:
    """Those whose figures count, as in `summary.table`: also a run that diverged."""
    return [run for run in runs if run.result is not None]


def steady(runs: Sequence[SavedRun]) -> Sequence[SavedRun]:
    """Runs without those that diverged, unless all did: a mean must not jump where one ends."""
    return [run for run in runs if run.diverged is None] or runs


def entry_curves(runs: Sequence[SavedRun], key: str) -> list[Curve]:
    """A curve for each entry of a list."""
    count = max((len(numbers(row.get(key))) for run in runs for row in run.rows), default=0)
    return [curve(runs, key, entry) for entry in range(count)]


def entry_names(
    runs: Mapping[str, Sequence[SavedRun]], key: str, given: Sequence[str]
) -> Sequence[str]:
    """Names of the entries of a list: those that a run gave at its end, as `<key>_names`.

    Args:
        runs: by method.
        key: of the list.
        given: names of the page, for runs that have none; not taken for a list of another length.
    """
    figures = [run.figures for group in runs.values() for run in group]
    for row in figures:
        if f"{key}_names" in row:
            return [str(name) for name in row[f"{key}_names"]]
    lengths = {len(numbers(row.get(key))) for row in figures} - {0}
    return given if lengths <= {len(given)} else ()


def curve(runs: Iterable[SavedRun], key: str, entry: int | None = None) -> Curve:
    """`key` over epochs; with `entry`, that entry of a list."""
    seen: dict[float, list[float]] = {}
    for run in runs:
        for row in run.rows:
            epoch = number(row.get("epoch"))
            value = number(row.get(key))
            if entry is not None:
                items = numbers(row.get(key))
                value = items[entry] if entry < len(items) else math.nan
            if math.isfinite(epoch) and math.isfinite(value):
                seen.setdefault(epoch, []).append(value)
    epochs = sorted(seen)
    return Curve(
        epochs,
        [sum(seen[epoch]) / len(seen[epoch]) for epoch in epochs],
        [min(seen[epoch]) for epoch in epochs],
        [max(seen[epoch]) for epoch in epochs],
    )
