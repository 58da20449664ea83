"""The page of a sweep: a dot for each setting, and the setting that was chosen of each method.

It is made from `sweep.json.gz`, the means of every setting over the tuning seeds, and never shows
a test figure. A table of all settings lies beside it, see `rows`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import stats
from ..store import Comparison
from ..task import Metric, Page, Panel, Row, Task
from . import plots, tables
from .page import command, common, glossary, other_data, summary
from .plots import number
from .style import count, setting, styles
from .tables import Cell, Head, Table, metric_head


@dataclass(frozen=True)
class Trial:
    """A setting of a method."""

    name: str
    method: str
    values: Mapping[str, Any]  # what was chosen, by dotted key
    score: tuple[float, ...] | None  # the smaller the better; None: a run diverged or is missing
    feasible: bool  # it has a score and exceeds no limit
    figures: Row  # means over its runs
    finished: int
    diverged: int

    def at(self, panel: Panel) -> tuple[float, float]:
        """The two figures of a plot."""
        return number(self.figures.get(panel.x)), number(self.figures.get(panel.y))


@dataclass(frozen=True)
class Sweep:
    """A sweep: the settings of each method, the best first, and those that were chosen."""

    rule: str
    seeds: tuple[int, ...]
    methods: Mapping[str, tuple[Trial, ...]]
    winners: Mapping[str, Trial]
    limited: bool  # whether the rule asks for feasibility before anything else

    @property
    def trials(self) -> list[Trial]:
        """Settings of all methods."""
        return [trial for own in self.methods.values() for trial in own]


def read(saved: Mapping[str, Any]) -> Sweep:
    """A sweep from what `fcco_experiments.sweep.read` gives."""
    trials: dict[str, Trial] = {}
    for entry in saved["settings"]:
        parts = entry["score"]
        trials[entry["name"]] = Trial(
            name=entry["name"],
            method=entry["method"],
            values=dict(_flat(entry["setting"])),
            # Infinities are null in the file.
            score=tuple(math.inf if p is None else float(p) for p in parts) if parts else None,
            feasible=bool(saved["limited"] and parts and entry["feasible"]),
            figures={k: v for k, v in entry["figures"].items() if not k.startswith("test")},
            finished=entry["finished"],
            diverged=entry["diverged"],
        )
    return Sweep(
        rule=str(saved["rule"]),
        seeds=tuple(saved["seeds"]),
        methods={n: tuple(trials[name] for name in own) for n, own in saved["ranking"].items()},
        winners={name: trials[won] for name, won in saved["winners"].items()},
        limited=bool(saved["limited"]),
    )


def _flat(values: Mapping[str, Any], head: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{head}{key}.")
        else:
            yield f"{head}{key}", value


def rows(sweep: Sweep) -> list[Row]:
    """A line for each setting, for a table of all: of each method, the best by the rule first."""
    return [
        {
            "method": trial.method, "rank": rank, "name": trial.name,
            "chosen": sweep.winners.get(trial.method) is trial, "feasible": trial.feasible,
            "runs": trial.finished, "diverged": trial.diverged, **trial.values, **trial.figures,
        }
        for own in sweep.methods.values()
        for rank, trial in enumerate(own, 1)
    ]  # fmt: skip


def metrics(page: Page, sweep: Sweep) -> list[Metric]:
    """Those of the page that settings have; validation takes the place of test, once."""
    there = {key for trial in sweep.trials for key in trial.figures}
    known = {metric.key: metric for metric in page.metrics}
    result: dict[str, Metric] = {}
    for metric in page.metrics:
        key = _validation(metric.key)
        if key in there:
            own = known.get(key) or dataclasses.replace(
                metric, key=key, label=_reworded(metric.label)
            )
            headline = metric.headline or (key in result and result[key].headline)
            result[key] = dataclasses.replace(own, headline=headline)
    return list(result.values())


def panel_of(page: Page, sweep: Sweep) -> Panel | None:
    """The first trade-off whose figures the settings have; validation takes the place of test."""
    there = {key for trial in sweep.trials for key in trial.figures}
    for panel in page.clouds or page.panels:
        x, y = _validation(panel.x), _validation(panel.y)
        if panel.kind == "tradeoff" and {x, y} <= there:
            if (x, y) == (panel.x, panel.y):
                return panel
            title, label, x_label = map(_reworded, (panel.title, panel.label, panel.x_label))
            return dataclasses.replace(panel, x=x, y=y, title=title, label=label, x_label=x_label)
    return None


def _validation(key: str) -> str:
    """The key of the same figure on validation data."""
    return re.sub(r"^test_", "val_", key)


def _reworded(text: str) -> str:
    return re.sub(r"\btest\b", "validation", text)


def compare_winners(comparison: Comparison) -> str:
    """The command that compares the winners."""
    return command(comparison, "compare", f"{comparison.folder}-winners")


def winners_table(comparison: Comparison, sweep: Sweep, shown: Sequence[Metric]) -> stats.Table:
    """Figures of the winners by method, without deviations where the runs were not kept."""
    if not comparison.runs:
        return {
            name: {
                metric.key: {
                    "mean": number(won.figures[metric.key]),
                    "std": math.nan,
                    "runs": won.finished,
                }
                for metric in shown
                if metric.key in won.figures
            }
            for name, won in sweep.winners.items()
        }
    names = {won.name: name for name, won in sweep.winners.items()}
    runs = [run for run in comparison.runs if run.name in names]
    meta = comparison.meta | {"methods": list(names)}
    table = stats.table(dataclasses.replace(comparison, meta=meta, runs=runs), shown)
    return {names[name]: row for name, row in table.items()}


def content(
    comparison: Comparison, saved: Mapping[str, Any], task: Task, config: Any
) -> dict[str, Any]:
    """Everything the template of a sweep asks for."""
    page, meta, sweep = task.page(config), comparison.meta, read(saved)
    planned = meta["config"].get("methods") or {}
    words = {}
    for name, own in sweep.methods.items():
        method = planned.get(name) or planned.get(own[0].name) or {}
        words[name] = str(method.get("method", name))
    look, shown = styles(words), metrics(page, sweep)
    top = [metric for metric in shown if metric.headline] or shown
    runs = sum(trial.finished for trial in sweep.trials)
    counts = count(len(sweep.methods), "method"), count(len(sweep.trials), "setting")
    return common(comparison, task) | {
        "title": page.title,
        "summary": summary(meta, *counts, count(runs, "run")),
        "alerts": other_data(comparison.runs),
        "sweep": sweep,
        "several": bool(comparison.runs),
        "compare_winners": compare_winners(comparison),
        "feasible": sum(trial.feasible for trial in sweep.trials),
        "ranked": sum(trial.score is not None for trial in sweep.trials),
        "diverged": sum(trial.diverged for trial in sweep.trials),
        "winners": _winners(sweep, winners_table(comparison, sweep, top), top),
        "glossary": glossary(top),
        "scatter": draw(sweep, page, shown, look),
        "looks": look,
    }


def draw(sweep: Sweep, page: Page, shown: Sequence[Metric], look: plots.Look) -> plots.Plot | None:
    """All settings with a score, and the chosen ones."""
    panel = panel_of(page, sweep)
    if panel is None:
        return None
    points = {
        name: [t.at(panel) for t in own if t.score and all(map(math.isfinite, t.at(panel)))]
        for name, own in sweep.methods.items()
    }
    chosen = {name: won.at(panel) for name, won in sweep.winners.items()}
    chosen = {name: point for name, point in chosen.items() if all(map(math.isfinite, point))}
    return plots.scatter(points, chosen, panel, look, shown, "settings")


def _winners(sweep: Sweep, table: stats.Table, shown: Sequence[Metric]) -> Table:
    """The setting chosen of each method with its figures, or that none came to its end."""
    feasible = [Head("Feasible")] if sweep.limited else []
    heads = [Head("Setting", wide=True), *feasible, *map(metric_head, shown)]
    lines = []
    for name, trials in sweep.methods.items():
        won = sweep.winners.get(name)
        if won is None:
            cells = [Cell("none came to its end", wide=True), *[Cell("–")] * (len(heads) - 1)]
            lines.append((Head(name, method=name), cells))
            continue
        pairs = (f"{k.removeprefix('settings.')} {setting(v)}" for k, v in won.values.items())
        text = " · ".join(pair.replace(" ", "\N{NO-BREAK SPACE}") for pair in pairs)
        cells = [Cell(text or "as in the config", wide=True)]
        cells += [Cell("yes" if won.feasible else "no", met=won.feasible)] if sweep.limited else []
        row = table[name]
        cells += [tables.figure(row[m.key], m.digits) if m.key in row else Cell("–") for m in shown]
        note = f"{won.name}, best of {len(trials):,}"
        lines.append((Head(name, method=name, note=note), cells))
    return Table("The setting chosen of each method", "Method", heads, lines)
