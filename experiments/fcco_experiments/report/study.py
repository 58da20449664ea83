"""A sweep as its report needs it: every setting with its runs, ranked, without test figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..stats import spread
from ..store import Comparison
from ..task import Metric, Page, Panel, Row
from .runs import number

__all__ = ["Study", "Trial", "clouds", "decisive", "metrics", "study", "untested"]

_LIMITED = re.compile(r"feasib|violat|constraint", re.IGNORECASE)


@dataclass(frozen=True)
class Trial:
    """A setting of a method.

    Attributes:
        name: of its runs, `NAME@k`.
        family: its method.
        values: what was chosen, by dotted key.
        score: of the rule, the smaller the better; None where a run diverged or is missing.
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
    figures: Row
    runs: tuple[Row, ...]
    begun: int
    finished: int
    diverged: int

    def spread(self, key: str) -> tuple[float, float]:
        """Mean and deviation of a figure over the runs that count; of a lone mean, no deviation."""
        values = [number(row[key]) for row in self.runs if key in row]
        if values:
            return spread(values)
        return number(self.figures.get(key)), math.nan


@dataclass(frozen=True)
class Study:
    """A sweep.

    Attributes:
        rule: by which winners were chosen, in words.
        seeds: of the tuning runs.
        families: settings of each method, the best first.
        winners: those methods whose best setting has a score, and that setting.
        limited: whether the rule asks for feasibility before anything else.
        saved: whether runs are there; otherwise all that is known are means over seeds.
    """

    rule: str
    seeds: tuple[int, ...]
    families: Mapping[str, tuple[Trial, ...]]
    winners: Mapping[str, Trial]
    limited: bool
    saved: bool

    @property
    def trials(self) -> list[Trial]:
        """Settings of all methods."""
        return [trial for family in self.families.values() for trial in family]

    def feasible(self, trial: Trial) -> bool:
        """Whether nothing is beyond the limit: the first part of the score is 0."""
        return self.limited and trial.score is not None and trial.score[0] == 0


def untested(row: Mapping[str, Any]) -> Row:
    """Figures without those of test data, which a sweep must not look at."""
    return {key: value for key, value in row.items() if not key.startswith("test")}


def study(comparison: Comparison, told: Mapping[str, Any]) -> Study:
    """What a sweep has found.

    Args:
        comparison: its runs; there may be none, where only the means were kept.
        told: `sweep.json`.
    """
    runs: dict[str, list[Any]] = {}
    for run in comparison.runs:
        runs.setdefault(run.name, []).append(run)
    trials: dict[str, Trial] = {}
    for entry in told["settings"]:
        own = runs.get(entry["name"], [])
        counted = (run for run in own if run.result is not None and run.diverged is None)
        trials[entry["name"]] = Trial(
            name=entry["name"],
            family=entry["method"],
            values=dict(_flat(entry["setting"])),
            score=_score(entry["score"]),
            figures=untested(entry.get("figures") or {}),
            runs=tuple(untested(run.figures) for run in counted),
            begun=len(own),
            finished=int(entry.get("finished") or 0),
            diverged=int(entry.get("diverged") or 0),
        )
    families = {
        name: tuple(trials[each] for each in ranked) for name, ranked in told["ranking"].items()
    }
    scores = [trial.score for trial in trials.values() if trial.score is not None]
    parted = any(len(score) > 1 for score in scores) or not scores
    limited = parted and all(score[0] >= 0 for score in scores)
    limited = limited and (bool(_LIMITED.search(told["rule"])) or any(s[0] == 0 for s in scores))
    return Study(
        rule=str(told["rule"]),
        seeds=tuple(told.get("seeds") or comparison.meta.get("seeds") or ()),
        families=families,
        winners={name: trials[won] for name, won in told["winners"].items()},
        limited=limited,
        saved=any(trial.runs for trial in trials.values()) or bool(comparison.runs),
    )


def _flat(values: Mapping[str, Any], head: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{head}{key}.")
        else:
            yield f"{head}{key}", value


def _score(parts: Sequence[Any] | None) -> tuple[float, ...] | None:
    """Infinities are null in the file: as bad as can be."""
    return tuple(math.inf if p is None else float(p) for p in parts) if parts else None


def metrics(page: Page, found: Study) -> list[Metric]:
    """Those of the page that settings have; validation takes the place of test, once."""
    there = {key for trial in found.trials for key in trial.figures}
    known = {metric.key: metric for metric in page.metrics}
    result: dict[str, Metric] = {}
    for metric in page.metrics:
        key = _validation(metric.key)
        if key is None or key not in there:
            continue
        own = known.get(key) or replace(metric, key=key, label=_words(metric.label))
        headline = metric.headline or (key in result and result[key].headline)
        result[key] = replace(own, headline=headline)
    return list(result.values())


def clouds(page: Page, found: Study) -> list[Panel]:
    """Plots of two figures against each other that the settings have, none of test data.

    Without `Page.clouds`, the trade-offs of the page with validation in the place of test.
    """
    there = {key for trial in found.trials for key in trial.figures}
    panels = page.clouds or tuple(panel for panel in page.panels if panel.kind == "tradeoff")
    result: dict[tuple[str, str], Panel] = {}
    for panel in panels:
        x, y = _validation(panel.x), _validation(panel.y)
        if x is None or y is None or not {x, y} <= there:
            continue
        if (x, y) != (panel.x, panel.y):
            words = (_words(text) for text in (panel.title, panel.label, panel.x_label))
            title, label, x_label = words
            panel = replace(panel, x=x, y=y, title=title, label=label, x_label=x_label)
        result.setdefault((x, y), panel)
    return list(result.values())


def decisive(found: Study, shown: Sequence[Metric], part: int) -> Metric | None:
    """The figure that a part of the score is, found by its values; None where it is none of them.

    Args:
        found: the sweep.
        shown: figures to look among.
        part: of the score.
    """
    scored = [t for t in found.trials if t.score is not None and len(t.score) > part]
    for metric in shown:
        values = [(number(t.figures.get(metric.key)), t.score[part]) for t in scored if t.score]
        for sign, shift in ((1.0, 0.0), (-1.0, 0.0), (-1.0, 1.0)):
            if values and all(math.isclose(sign * v + shift, s) for v, s in values):
                return metric
    return None


def _validation(key: str) -> str | None:
    """The key of the same figure on validation data; None for a test figure without one."""
    if not key.startswith("test"):
        return key
    return f"val_{key.removeprefix('test_')}" if key.startswith("test_") else None


def _words(text: str) -> str:
    return re.sub(r"\btest\b", "validation", text)
