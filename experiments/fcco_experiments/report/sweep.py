"""The report of a sweep: rule, winners, the whole cloud, what each hyperparameter does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import stats, store, tasks
from ..config import from_plain
from ..store import COMPARISON, Comparison
from ..task import Metric, Task
from . import sweep_tables as tables
from .cloud import Cloud, cloud
from .cloud_plot import Drawn, overview, single
from .facts import experiment_facts, machine_facts
from .meanings import meanings
from .notices import Notice, notices, other_data
from .palette import METHODS, SHAPES, TOKENS, Style, styles
from .profile import Profile, profiles
from .sensitivity import Figure, sensitivity
from .study import Study, clouds, decisive, metrics, study
from .sweep_words import Words, words
from .template import fill
from .words import title

__all__ = ["Conclusion", "conclude", "content", "render"]

_SINGLES = 2
"""With more methods than these, each has a small plot of its own."""


@dataclass(frozen=True)
class Conclusion:
    """What is known after a sweep.

    Attributes:
        metrics: figures that settings have, none of test data.
        table: mean and deviation of the winners, by method and metric, as `stats.table`.
        report: the HTML page.
    """

    metrics: tuple[Metric, ...]
    table: stats.Table
    report: Path


def conclude(out: Path, told: Mapping[str, Any]) -> Conclusion:
    """Write `table.json` and `table.md` of the winners and the report, from saved data alone.

    Args:
        out: folder of the sweep.
        told: its `sweep.json`.
    """
    comparison = store.load_comparison(out)
    task = tasks.get(comparison.meta["task"], saved=True)
    config = from_plain(task.config, comparison.meta["config"], str(out / COMPARISON))
    page, found = task.page(config), study(comparison, told)
    shown = metrics(page, found)
    table = _winners(comparison, found, shown)
    store.write_json(out / "table.json", {"methods": table})
    store.write_text(out / "table.md", stats.markdown(table, shown))
    store.write_text(out / "report.html", render(comparison, told, task, config))
    return Conclusion(tuple(shown), table, out / "report.html")


def _winners(comparison: Comparison, found: Study, known: Sequence[Metric]) -> stats.Table:
    names = {won.name: name for name, won in found.winners.items()}
    runs = [run for run in comparison.runs if run.name in names]
    meta = comparison.meta | {"methods": list(names)}
    table = stats.table(dataclasses.replace(comparison, meta=meta, runs=runs), known)
    return {names[name]: row for name, row in table.items()}


def render(comparison: Comparison, told: Mapping[str, Any], task: Task, config: Any) -> str:
    """The page as text; the same data give the same bytes."""
    shown = content(comparison, told, task, config)
    return fill("sweep.html.j2", ("page.css", "sweep.css"), shown)


def content(
    comparison: Comparison, told: Mapping[str, Any], task: Task, config: Any
) -> dict[str, Any]:
    """Everything the template asks for."""
    page, meta = task.page(config), comparison.meta
    found = study(comparison, told)
    look = styles(found.families)
    shown = metrics(page, found)
    top = [metric for metric in shown if metric.headline] or shown
    every = [each for panel in clouds(page, found) if (each := cloud(found, panel, shown))]
    said = words(found, meta, every, top)
    by_method = {name: profiles(found, trials) for name, trials in found.families.items()}
    drawn = _clouds(every, look, said)
    figures = _figures(found, every, shown)
    sensitive = _sensitivity(found, by_method, figures, look, shown)
    return {
        "title": page.title,
        "kicker": f"fcco sweep · {meta.get('task', task.name)}",
        "summary": said.summary,
        "contents": _contents(bool(drawn), bool(sensitive)),
        "notices": _notices(comparison, found, task, config),
        "rule": found.rule.rstrip("."),
        "chosen": said.chosen,
        "tried": tables.tried(found),
        "tried_note": said.tried,
        "question": page.question,
        "won": said.won,
        "winners": tables.winners(found, top),
        "figures_note": said.figures,
        "compare": said.compare,
        "meanings": meanings(top),
        "clouds": drawn,
        "cloud_note": said.cloud,
        "further": said.further,
        "sensitivity": sensitive,
        "profile_note": said.profile,
        "importance": tables.importance(found, by_method, shown),
        "importance_note": said.importance,
        "drawn_note": said.drawn if figures else "",
        "best": [(name, tables.best(found, name, top)) for name in found.families],
        "experiment": experiment_facts(meta),
        "machine": machine_facts(comparison.runs),
        "command": str(meta.get("command") or ""),
        "files": said.files,
        "footer": f"Written by fcco {meta.get('fcco', '')}".strip() + " from saved runs.",
        "looks": look,
        "shapes": SHAPES,
        "tokens": TOKENS,
        "colours": METHODS,
    }


def _contents(cloud: bool, sensitive: bool) -> list[tuple[str, str]]:
    return [
        ("rule", "The rule"),
        ("winners", "The winners"),
        *([("cloud", "The whole cloud")] if cloud else []),
        *([("sensitivity", "What each hyperparameter does")] if sensitive else []),
        ("best", "The best settings"),
        ("repeat", "Repeat it"),
    ]


def _clouds(every: Sequence[Cloud], look: Mapping[str, Style], said: Words) -> list[dict[str, Any]]:
    found = []
    for k, each in enumerate(every):
        names = list(each.dots)
        singles = [single(each, name, look[name], f"c{k}", j) for j, name in enumerate(names)]
        large = overview(each, look, f"c{k}", said.clouds[k])
        found.append({"overview": large, "singles": singles if len(names) > _SINGLES else []})
    return found


def _figures(found: Study, every: Sequence[Cloud], shown: Sequence[Metric]) -> list[Figure]:
    """What is drawn by hyperparameter: the first cloud's figures, else those of the score."""
    if every:
        panel = every[0].panel
        pairs = (panel.y, panel.label, panel.reference), (panel.x, panel.x_label, panel.x_reference)
        return [Figure(key, label or title(key), limit) for key, label, limit in pairs]
    parts = [decisive(found, shown, part) for part in (1, 0)]
    return [Figure(metric.key, metric.label) for metric in parts if metric is not None]


def _sensitivity(
    found: Study,
    by_method: Mapping[str, Sequence[Profile]],
    figures: Sequence[Figure],
    look: Mapping[str, Style],
    shown: Sequence[Metric],
) -> list[tuple[str, str, list[Drawn]]]:
    result = []
    for k, (name, own) in enumerate(by_method.items()):
        sentence = tables.matters(found, name, own, shown)
        plots = []
        if figures and any(each.top is not None for each in own):
            plots = [
                sensitivity(found, each, figures, look[name], f"p{k}-{j}")
                for j, each in enumerate(own)
            ]
        result.append((name, sentence, plots))
    return result


def _notices(comparison: Comparison, found: Study, task: Task, config: Any) -> list[Notice]:
    """Warnings of the task about the winners; what they say of test data is not for here."""
    names = {won.name: name for name, won in found.winners.items()}
    runs: dict[str, list[Any]] = {name: [] for name in found.winners}
    for run in comparison.runs:
        if run.name in names:
            own = names[run.name]
            runs[own].append(dataclasses.replace(run, name=own))
    told = notices(task, config, runs, ())
    about = [each for each in told if "test" not in each.text.lower().split()]
    return about or other_data({"": comparison.runs})
