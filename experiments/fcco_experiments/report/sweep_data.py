"""A sweep as its page needs it: every setting with its runs, ranked, without test figures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..stats import frontier, spread
from ..store import Comparison
from ..task import Metric, Page, Panel, Row, Rule
from .plots import number

__all__ = [
    "Profile",
    "Scatter",
    "Sweep",
    "Trial",
    "decisive",
    "metrics",
    "panels",
    "profiles",
    "read",
    "robust",
    "scatter",
    "varied",
]

Limits = tuple[float, float]
_FAR = 3.0
"""Quartile ranges beyond the quartiles: what is farther is outside the frame (Tukey)."""


@dataclass(frozen=True)
class Trial:
    """A setting of a method.

    Attributes:
        name: of its runs, `NAME@k`.
        family: its method.
        values: what was chosen, by dotted key.
        score: of the rule, the smaller the better; None where a run diverged or is missing.
        feasible: whether it has a score and exceeds no limit.
        figures: means over its finished runs.
        runs: figures of each run that counts: finished, not diverged.
        begun: number of its runs.
        finished: those that came to an end.
        diverged: those of them that diverged.
    """

    name: str
    family: str
    values: Mapping[str, Any]
    score: tuple[float, ...] | None
    feasible: bool
    figures: Row
    runs: tuple[Row, ...]
    begun: int
    finished: int
    diverged: int

    def spread(self, key: str) -> tuple[float, float]:
        """Mean and deviation of a figure over the runs that count; of a lone mean, no deviation."""
        values = [number(row[key]) for row in self.runs if key in row]
        return spread(values) if values else (number(self.figures.get(key)), math.nan)

    def at(self, panel: Panel) -> tuple[float, float]:
        """Means of the two figures of a plot."""
        return number(self.figures.get(panel.x)), number(self.figures.get(panel.y))


@dataclass(frozen=True)
class Sweep:
    """A sweep.

    Attributes:
        rule: by which winners were chosen, in words.
        seeds: of the tuning runs.
        families: settings of each method, the best first.
        winners: those methods whose best setting has a score, and that setting.
        words: the method word of each method.
        limited: whether the rule asks for feasibility before anything else.
        saved: whether runs are there; otherwise all that is known are means over seeds.
    """

    rule: str
    seeds: tuple[int, ...]
    families: Mapping[str, tuple[Trial, ...]]
    winners: Mapping[str, Trial]
    words: Mapping[str, str]
    limited: bool
    saved: bool

    @property
    def trials(self) -> list[Trial]:
        """Settings of all methods."""
        return [trial for family in self.families.values() for trial in family]


def read(comparison: Comparison, told: Mapping[str, Any], rule: Rule | None) -> Sweep:
    """What a sweep has found.

    Args:
        comparison: its runs; there may be none, where only the means were kept.
        told: from `fcco_experiments.sweep.read`.
        rule: of the task: whether it has a limit, for sweeps that do not say so.
    """
    runs: dict[str, list[Any]] = {}
    for run in comparison.runs:
        runs.setdefault(run.name, []).append(run)
    limited = bool(told.get("limited", rule is not None and rule.limited))
    methods = (comparison.meta.get("config") or {}).get("methods") or {}
    trials: dict[str, Trial] = {}
    words: dict[str, str] = {}
    for entry in told["settings"]:
        name, parts = entry["name"], entry["score"]
        own = runs.get(name, [])
        method = own[0].method if own else methods.get(name) or {}
        words.setdefault(entry["method"], str(method.get("method", entry["method"])))
        counted = (run for run in own if run.result is not None and run.diverged is None)
        # Infinities are null in the file.
        score = tuple(math.inf if p is None else float(p) for p in parts) if parts else None
        trials[name] = Trial(
            name=name,
            family=entry["method"],
            values=dict(_flat(entry["setting"])),
            score=score,
            feasible=limited and score is not None and entry.get("feasible", score[0] <= 0),
            figures=_untested(entry.get("figures") or {}),
            runs=tuple(_untested(run.figures) for run in counted),
            begun=len(own),
            finished=int(entry.get("finished") or 0),
            diverged=int(entry.get("diverged") or 0),
        )
    return Sweep(
        rule=str(told["rule"]),
        seeds=tuple(told.get("seeds") or comparison.meta.get("seeds") or ()),
        families={n: tuple(trials[each] for each in own) for n, own in told["ranking"].items()},
        winners={name: trials[won] for name, won in told["winners"].items()},
        words={name: words.get(name, name) for name in told["ranking"]},
        limited=limited,
        saved=bool(comparison.runs),
    )


def _untested(row: Mapping[str, Any]) -> Row:
    """Figures without those of test data, which a sweep must not look at."""
    return {key: value for key, value in row.items() if not key.startswith("test")}


def _flat(values: Mapping[str, Any], head: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{head}{key}.")
        else:
            yield f"{head}{key}", value


def metrics(page: Page, sweep: Sweep) -> list[Metric]:
    """Those of the page that settings have; validation takes the place of test, once."""
    there = {key for trial in sweep.trials for key in trial.figures}
    known = {metric.key: metric for metric in page.metrics}
    result: dict[str, Metric] = {}
    for metric in page.metrics:
        key = _validation(metric.key)
        if key is None or key not in there:
            continue
        own = known.get(key) or replace(metric, key=key, label=_reworded(metric.label))
        headline = metric.headline or (key in result and result[key].headline)
        result[key] = replace(own, headline=headline)
    return list(result.values())


def panels(page: Page, sweep: Sweep) -> list[Panel]:
    """Plots of two figures against each other that the settings have, none of test data.

    Without `Page.clouds`, the trade-offs of the page with validation in the place of test.
    """
    there = {key for trial in sweep.trials for key in trial.figures}
    given = page.clouds or tuple(panel for panel in page.panels if panel.kind == "tradeoff")
    result: dict[tuple[str, str], Panel] = {}
    for panel in given:
        x, y = _validation(panel.x), _validation(panel.y)
        if x is None or y is None or not {x, y} <= there:
            continue
        if (x, y) != (panel.x, panel.y):
            texts = (_reworded(text) for text in (panel.title, panel.label, panel.x_label))
            title, label, x_label = texts
            panel = replace(panel, x=x, y=y, title=title, label=label, x_label=x_label)
        result.setdefault((x, y), panel)
    return list(result.values())


def _validation(key: str) -> str | None:
    """The key of the same figure on validation data; None for a test figure without one."""
    if not key.startswith("test"):
        return key
    return f"val_{key.removeprefix('test_')}" if key.startswith("test_") else None


def _reworded(text: str) -> str:
    return re.sub(r"\btest\b", "validation", text)


def decisive(sweep: Sweep, shown: Sequence[Metric], part: int) -> Metric | None:
    """The figure that a part of the score is, found by its values; None where it is none of them.

    Args:
        sweep: all of it.
        shown: figures to look among.
        part: of the score.
    """
    scored = [t for t in sweep.trials if t.score is not None and len(t.score) > part]
    for metric in shown:
        values = [(number(t.figures.get(metric.key)), t.score[part]) for t in scored if t.score]
        for sign, shift in ((1.0, 0.0), (-1.0, 0.0), (-1.0, 1.0)):
            if values and all(math.isclose(sign * v + shift, s) for v, s in values):
                return metric
    return None


@dataclass(frozen=True)
class Scatter:
    """Two figures of every run.

    Attributes:
        panel: keys and words.
        good: whether a higher x, a higher y is better.
        dots: by method, a row per run: x, y and whether its setting is feasible.
        fronts: settings of each method whose means no other setting's means beat, ordered by x.
        winners: means of the setting that was chosen, by method.
        x_limits: of the frame.
        y_limits: of the frame.
    """

    panel: Panel
    good: tuple[bool, bool]
    dots: Mapping[str, np.ndarray]
    fronts: Mapping[str, tuple[Trial, ...]]
    winners: Mapping[str, tuple[float, float]]
    x_limits: Limits
    y_limits: Limits

    def inside(self, points: np.ndarray) -> np.ndarray:
        """Which points (rows) are in the frame."""
        low, high = zip(self.x_limits, self.y_limits, strict=True)
        return ((points[:, :2] >= low) & (points[:, :2] <= high)).all(axis=1)

    def shows(self, point: tuple[float, float]) -> bool:
        """Whether a point is in the frame."""
        return bool(self.inside(np.array([point]))[0])

    @property
    def outside(self) -> int:
        """How many dots are not in the frame."""
        return sum(int((~self.inside(own)).sum()) for own in self.dots.values())


def scatter(sweep: Sweep, panel: Panel, shown: Sequence[Metric]) -> Scatter | None:
    """Dots, frontiers and frame; None where no run has both figures.

    Frontiers go through means over seeds of settings that have a score: one lucky seed is no
    frontier, and a setting with a run that diverged cannot be chosen. Without saved runs the dots
    are means too.

    Args:
        sweep: all of it.
        panel: which figures.
        shown: metrics, for the direction of good; without it, high y and low x are.
    """
    better = {metric.key: metric.better for metric in shown}
    good = better.get(panel.x) == "higher", better.get(panel.y) != "lower"
    dots, fronts = {}, {}
    for name, trials in sweep.families.items():
        points = []
        for trial in trials:
            means = (trial.figures,) if trial.score is not None else ()
            points += [
                (number(row.get(panel.x)), number(row.get(panel.y)), float(trial.feasible))
                for row in (trial.runs if sweep.saved else means)
            ]
        table = np.array(points, dtype=float).reshape(-1, 3)
        table = table[np.isfinite(table).all(axis=1)]
        if table.size:
            dots[name] = table
        scored = [trial for trial in trials if trial.score is not None]
        x, y = zip(*(trial.at(panel) for trial in scored), strict=True) if scored else ((), ())
        fronts[name] = tuple(scored[i] for i in frontier(x, y, *good))
    if not dots:
        return None
    winners = {name: won.at(panel) for name, won in sweep.winners.items()}
    winners = {name: point for name, point in winners.items() if all(map(math.isfinite, point))}
    must = [winners[name] for name in winners if sweep.winners[name].feasible]
    sides = []
    for axis, line in ((0, panel.x_reference), (1, panel.reference)):
        values = np.concatenate([own[:, axis] for own in dots.values()])
        keep = [point[axis] for point in must] + ([line] if axis == 0 and line is not None else [])
        low, high = robust(values, *keep)
        may = [point[axis] for point in winners.values()] + ([] if line is None else [line])
        near = [value for value in may if 2 * low - high <= value <= 2 * high - low]
        sides.append(robust(values, *keep, *near))
    return Scatter(panel, good, dots, fronts, winners, sides[0], sides[1])


def robust(values: np.ndarray, *keep: float | None) -> Limits:
    """Limits of an axis that a few far values cannot squeeze.

    All that is less than three quartile ranges beyond the quartiles is in the frame, and what must
    be kept; never more than there is.

    >>> low, high = robust(np.array([1.0, 2.0, 3.0, 4.0, 1e9]))
    >>> round(low, 2), round(high, 2)
    (0.85, 4.15)
    """
    finite = values[np.isfinite(values)]
    kept = [value for value in keep if value is not None and math.isfinite(value)]
    if not finite.size:
        low, high = (min(kept), max(kept)) if kept else (0.0, 1.0)
    else:
        first, third = np.quantile(finite, (0.25, 0.75))
        reach = _FAR * (third - first)
        if reach == 0:  # most are the same: the next that says something about the width
            reach = float(np.subtract(*np.quantile(finite, (0.95, 0.05))))
        near = finite[(finite >= first - reach) & (finite <= third + reach)]
        low, high = min([float(near.min()), *kept]), max([float(near.max()), *kept])
    margin = 0.05 * (high - low) or max(abs(high) * 0.05, 1e-3)
    return low - margin, high + margin


@dataclass(frozen=True)
class Profile:
    """A hyperparameter of a method.

    Attributes:
        key: dotted.
        values: those that were tried, in order.
        groups: settings with each of them, the best first.
        best: the first of each group by the rule; None where none has a score.
        part: of the score that is compared: 0 is what is beyond the limit, where there is one.
        lost: values that reach no feasible setting while another one does.
        range: largest less smallest of that part among the values that can be compared.
    """

    key: str
    values: tuple[Any, ...]
    groups: tuple[tuple[Trial, ...], ...]
    best: tuple[Trial | None, ...]
    part: int
    lost: tuple[Any, ...]
    range: float

    @property
    def name(self) -> str:
        """The hyperparameter as a reader knows it."""
        return self.key.removeprefix("settings.")

    @property
    def order(self) -> list[int]:
        """Places of the values whose best setting has a score, the winner's first."""
        scored = [(t.score, k) for k, t in enumerate(self.best) if t and t.score is not None]
        return [k for _, k in sorted(scored)]


def varied(trials: Sequence[Trial]) -> dict[str, list[Any]]:
    """Keys of which several values were tried, and these: numbers in order, others as they came."""
    found: dict[str, dict[str, Any]] = {}
    for trial in trials:
        for key, value in trial.values.items():
            found.setdefault(key, {}).setdefault(_same(value), value)
    several = {key: list(values.values()) for key, values in found.items() if len(values) > 1}
    return {k: sorted(v) if all(map(is_number, v)) else v for k, v in several.items()}


def is_number(value: object) -> bool:
    """Whether a value has a place on an axis; yes and no have none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _same(value: Any) -> str:
    """Equal for values that are: 1 and 1.0 are one value, true is another."""
    return repr(float(value)) if is_number(value) else json.dumps(value, sort_keys=True)


def profiles(trials: Sequence[Trial]) -> list[Profile]:
    r"""The best setting that each value of each hyperparameter reaches, whatever the others are.

    .. math::
        p(v) = \min\{\operatorname{score}(s) : s_{\text{key}} = v\}

    where scores are compared part by part. The hyperparameter that matters most comes first: those
    with values that reach nothing feasible, by the share of such values, then by range.

    Args:
        trials: settings of one method, the best first.
    """
    every = []
    for key, values in varied(trials).items():
        by_value: dict[str, list[Trial]] = {_same(value): [] for value in values}
        for trial in trials:
            if key in trial.values:
                by_value[_same(trial.values[key])].append(trial)
        groups = tuple(map(tuple, by_value.values()))
        best = tuple(next((t for t in group if t.score is not None), None) for group in groups)
        met = [trial is not None and trial.feasible for trial in best]
        part = 1 if any(met) else 0
        lost = tuple(v for v, good in zip(values, met, strict=True) if any(met) and not good)
        parts = [
            trial.score[part]
            for trial, good in zip(best, met, strict=True)
            if trial and trial.score and (good or not any(met))
        ]
        finite = [value for value in parts if math.isfinite(value)]
        apart = max(finite) - min(finite) if finite else 0.0
        every.append(Profile(key, tuple(values), groups, best, part, lost, apart))
    return sorted(every, key=lambda each: (-len(each.lost) / len(each.values), -each.range))
