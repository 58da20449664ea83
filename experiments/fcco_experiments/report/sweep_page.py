"""Content of the page of a sweep: rule, winners, a dot per run, what each hyperparameter does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import stats, store, tasks
from ..config import from_plain
from ..store import COMPARISON, Comparison
from ..task import Metric, Task
from . import sweep_data as data
from . import sweep_plots as plots
from .page import Alert, alerts, common, glossary, other_data
from .style import count, fixed, setting, styles, title
from .sweep_data import Profile, Scatter, Sweep, Trial
from .tables import Cell, Head, Line, Table, metric_head

__all__ = ["Conclusion", "conclude", "content"]

_TOP = 10
"""Settings of a method in the table of the best."""
_SINGLES = 2
"""With more methods than these, each has a small scatter plot of its own."""
_STAYS = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Conclusion:
    """What is known after a sweep.

    Attributes:
        metrics: figures that settings have, none of test data.
        table: mean and deviation of the winners in these figures, as `stats.table`.
        report: the HTML page.
    """

    metrics: tuple[Metric, ...]
    table: stats.Table
    report: Path


def conclude(out: Path, told: Mapping[str, Any]) -> Conclusion:
    """Write `table.json` and `table.md` of the winners and the report, from saved data alone.

    Args:
        out: folder of the sweep.
        told: from `fcco_experiments.sweep.read`.
    """
    from . import render_sweep

    comparison = store.load_comparison(out)
    task = tasks.get(comparison.meta["task"], saved=True)
    config = from_plain(task.config, comparison.meta["config"], str(out / COMPARISON))
    sweep = data.read(comparison, told, stats.judged_by(task, config))
    shown = data.metrics(task.page(config), sweep)
    names = {won.name: name for name, won in sweep.winners.items()}
    runs = [run for run in comparison.runs if run.name in names]
    meta = comparison.meta | {"methods": list(names)}
    table = stats.table(dataclasses.replace(comparison, meta=meta, runs=runs), shown)
    table = {names[name]: row for name, row in table.items()}
    store.write_json(out / "table.json", {"methods": table})
    store.write_text(out / "table.md", stats.markdown(table, shown))
    store.write_text(out / "report.html", render_sweep(comparison, told, task, config))
    return Conclusion(tuple(shown), table, out / "report.html")


def content(
    comparison: Comparison, told: Mapping[str, Any], task: Task, config: Any
) -> dict[str, Any]:
    """Everything the template of a sweep asks for."""
    page, meta = task.page(config), comparison.meta
    sweep = data.read(comparison, told, stats.judged_by(task, config))
    look = styles(sweep.words)
    shown = data.metrics(page, sweep)
    top = [metric for metric in shown if metric.headline] or shown
    scatters = [s for panel in data.panels(page, sweep) if (s := data.scatter(sweep, panel, shown))]
    profiles = {name: data.profiles(trials) for name, trials in sweep.families.items()}
    axes = _axes(sweep, scatters, shown)
    order = sorted(sweep.winners, key=lambda name: sweep.winners[name].score or ())
    without = [n for n, own in sweep.families.items() if not any(t.feasible for t in own)]
    return common(comparison, task) | {
        "title": page.title,
        "summary": _summary(sweep, meta),
        "alerts": _alerts(comparison, sweep, task, config),
        "sweep": sweep,
        "several": any(len(trial.runs) > 1 for trial in sweep.trials),
        "feasible": sum(trial.feasible for trial in sweep.trials),
        "order": order,
        "without": without,
        "beyond": [name for name in order if sweep.limited and name in without],
        "diverged": sum(trial.diverged for trial in sweep.trials),
        "tried": _tried(sweep),
        "question": page.question,
        "winners": _winners(sweep, top),
        "glossary": glossary(top),
        "scatters": [_scatter(scatter, look, k) for k, scatter in enumerate(scatters)],
        "sensitivity": [
            {
                "name": name,
                "profiles": own,
                "plots": [
                    plots.sensitivity(sweep, profile, axes, look[name], f"p{k}-{j}")
                    for j, profile in enumerate(own if axes and any(p.order for p in own) else ())
                ],
            }
            for k, (name, own) in enumerate(profiles.items())
        ],
        "axes": axes,
        "parts": [_part(sweep, part, shown)[0] for part in (0, 1)],
        "importance": _importance(sweep, profiles, shown),
        "best": [(name, _best(sweep, name, top)) for name in sweep.families],
        "looks": look,
    }


def _summary(sweep: Sweep, meta: Mapping[str, Any]) -> str:
    config = meta.get("config") or {}
    runs = sum(trial.begun if sweep.saved else trial.finished for trial in sweep.trials)
    parts = [f"data: {config['data']}"] if config.get("data") else []
    parts.append(count(len(sweep.families), "method"))
    parts += [count(len(sweep.trials), "setting"), count(runs, "run")]
    parts += [count(config["epochs"], "epoch")] if config.get("epochs") else []
    parts += ["quick version"] if meta.get("quick") else []
    parts += [str(meta["created"])[:10]] if meta.get("created") else []
    return " · ".join(parts)


def _alerts(comparison: Comparison, sweep: Sweep, task: Task, config: Any) -> list[Alert]:
    """Warnings of the task about the winners; what they say of test data is not for here."""
    names = {won.name: name for name, won in sweep.winners.items()}
    runs: dict[str, list[Any]] = {name: [] for name in sweep.winners}
    for run in comparison.runs:
        if run.name in names:
            own = names[run.name]
            runs[own].append(dataclasses.replace(run, name=own))
    told = alerts(task, config, runs, ())
    about = [each for each in told if "test" not in each.text.lower().split()]
    return about or other_data(comparison.runs)


def _scatter(scatter: Scatter, look: Mapping[str, Any], k: int) -> dict[str, Any]:
    names = list(scatter.dots)
    singles = []
    for j, name in enumerate(names if len(names) > _SINGLES else ()):
        inside, winner = scatter.inside(scatter.dots[name]), scatter.winners.get(name)
        singles.append({
            "name": name,
            "svg": plots.single(scatter, name, look[name], f"c{k}", j),
            "dots": len(inside),
            "outside": int((~inside).sum()),
            "front": len(scatter.fronts[name]),
            "winner": winner if winner and not scatter.shows(winner) else None,
        })  # fmt: skip
    return {
        "panel": scatter.panel,
        "svg": plots.overview(scatter, look, f"c{k}"),
        "singles": singles,
        "total": sum(map(len, scatter.dots.values())),
        "outside": scatter.outside,
        "lost": [name for name, at in scatter.winners.items() if not scatter.shows(at)],
    }


def _axes(sweep: Sweep, scatters: Sequence[Scatter], shown: Sequence[Metric]) -> list[plots.Axis]:
    """What is drawn by hyperparameter: the first scatter's figures, else those of the score."""
    if scatters:
        panel = scatters[0].panel
        pairs = (panel.y, panel.label, panel.reference), (panel.x, panel.x_label, panel.x_reference)
        return [plots.Axis(key, label or title(key), limit) for key, label, limit in pairs]
    parts = [data.decisive(sweep, shown, part) for part in (1, 0)]
    return [plots.Axis(metric.key, metric.label) for metric in parts if metric is not None]


def _tried(sweep: Sweep) -> Table:
    """By method: settings, seeds, runs, what diverged, what is feasible."""
    lines = []
    for name, trials in sweep.families.items():
        scored = [trial for trial in trials if trial.score is not None]
        runs = sum(trial.begun if sweep.saved else trial.finished for trial in trials)
        diverged = sum(trial.diverged for trial in trials)
        missing = len(trials) * len(sweep.seeds) - sum(trial.finished for trial in trials)
        cells = [len(trials), len(sweep.seeds), runs, diverged, missing, len(scored)]
        cells += [sum(trial.feasible for trial in trials)] if sweep.limited else []
        lines.append(Line(Head(name, method=name), tuple(Cell(f"{n:,}") for n in cells)))
    heads = ["Settings", "Seeds", "Runs", "Runs that diverged", "Runs missing", "Settings ranked"]
    heads += ["Settings feasible"] if sweep.limited else []
    return Table("What was tried", "Method", tuple(map(Head, heads)), tuple(lines))


def _winners(sweep: Sweep, shown: Sequence[Metric]) -> Table:
    """The setting chosen of each method with its figures, or that none came to its end."""
    limited = (Head("Feasible"),) if sweep.limited else ()
    heads = (Head("Setting", wide=True), *limited, *map(metric_head, shown))
    lines = []
    for name, trials in sweep.families.items():
        won = sweep.winners.get(name)
        if won is None:
            cells = (Cell("none came to its end", wide=True), *[Cell("–")] * (len(heads) - 1))
        else:
            pairs = (
                f"{key.removeprefix('settings.')} {setting(v)}" for key, v in won.values.items()
            )
            text = " · ".join(pair.replace(" ", _STAYS) for pair in pairs)
            cells = (Cell(text or "as in the config", wide=True), *_figures(sweep, won, shown))
        note = f"{won.name}, best of {len(trials):,}" if won else ""
        lines.append(Line(Head(name, method=name, note=note), cells))
    return Table("The setting chosen of each method", "Method", heads, tuple(lines))


def _best(sweep: Sweep, name: str, shown: Sequence[Metric]) -> Table:
    """The ten best settings of a method by the rule."""
    trials = [trial for trial in sweep.families[name] if trial.score is not None][:_TOP]
    keys = list(data.varied(sweep.families[name]))
    limited = [Head("Feasible")] if sweep.limited else []
    heads = [Head(key.removeprefix("settings.")) for key in keys] + limited
    lines = []
    for rank, trial in enumerate(trials, 1):
        values = (Cell(setting(trial.values.get(key))) for key in keys)
        cells = (*values, *_figures(sweep, trial, shown))
        lines.append(Line(Head(f"{rank}", note=trial.name), cells))
    caption = f"The best settings of {name} by the rule"
    return Table(caption, "Rank", (*heads, *map(metric_head, shown)), tuple(lines))


def _figures(sweep: Sweep, trial: Trial, shown: Sequence[Metric]) -> tuple[Cell, ...]:
    """Whether a setting is feasible, where there is a limit, and its figures."""
    cells = [Cell("yes" if trial.feasible else "no", met=trial.feasible)] if sweep.limited else []
    for metric in shown:
        mean, deviation = trial.spread(metric.key)
        several = len(trial.runs) > 1 and math.isfinite(deviation)
        text = f"± {fixed(deviation, metric.digits)}" if several else ""
        cells.append(Cell(fixed(mean, metric.digits), text))
    return tuple(cells)


def _importance(
    sweep: Sweep, profiles: Mapping[str, Sequence[Profile]], shown: Sequence[Metric]
) -> Table:
    """Which hyperparameter matters: best and worst value, and what lies between them."""
    lines = []
    for name, own in profiles.items():
        for profile in own:
            label, digits = _part(sweep, profile.part, shown)
            ends = [setting(profile.values[k]) for k in profile.order] or ["–"]
            lost = ", ".join(map(setting, profile.lost)) or "none"
            cells = (
                Cell(f"{len(profile.values)}"),
                Cell(ends[0]),
                Cell(ends[-1]),
                Cell(fixed(profile.range, digits) if profile.order else "–", note=label),
                *([Cell(lost, wide=True)] if sweep.limited else []),
            )
            lines.append(Line(Head(profile.name, method=name, note=name), cells))
    heads = tuple(map(Head, ("Values", "Best value", "Worst value", "Range of the profile")))
    heads += (Head("Values with nothing feasible", wide=True),) if sweep.limited else ()
    return Table("What matters, by method", "Hyperparameter", heads, tuple(lines))


def _part(sweep: Sweep, part: int, shown: Sequence[Metric]) -> tuple[str, int]:
    """Name of a part of the score, and digits after the point."""
    metric = data.decisive(sweep, shown, part)
    if metric is not None:
        return metric.label, metric.digits
    return ("excess over the limit" if sweep.limited and part == 0 else "score"), 4
