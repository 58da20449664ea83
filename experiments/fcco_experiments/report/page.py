"""Content of the page of a comparison, as plain data for its template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import stats
from ..prose import paragraphs
from ..store import Comparison, SavedRun
from ..task import Metric, Page, Panel, Row, Rule, Task
from . import plots, tables
from .style import COLOURS, SHAPES, TOKENS, count, seeds, setting, styles, title

__all__ = [
    "Alert",
    "alerts",
    "by_method",
    "common",
    "content",
    "final_rows",
    "glossary",
    "other_data",
]

Runs = Mapping[str, Sequence[SavedRun]]
_MULTIPLIERS = "multipliers"


def by_method(comparison: Comparison) -> dict[str, list[SavedRun]]:
    """Runs of each method, in the order of the comparison, methods without a run included."""
    runs: dict[str, list[SavedRun]] = {str(name): [] for name in comparison.meta.get("methods", ())}
    for run in sorted(comparison.runs, key=lambda run: run.seed):
        runs.setdefault(run.name, []).append(run)
    return runs


def final_rows(runs: Runs) -> dict[str, list[Row]]:
    """Final rows of each method that has a finished run."""
    rows = {name: [run.figures for run in group if run.figures] for name, group in runs.items()}
    return {name: own for name, own in rows.items() if own}


def content(comparison: Comparison, task: Task, config: Any) -> dict[str, Any]:
    """Everything the template of a comparison asks for."""
    page, meta = task.page(config), comparison.meta
    runs, rule = by_method(comparison), stats.judged_by(task, config)
    look = styles({name: _word(name, group) for name, group in runs.items()})
    values = stats.table(comparison, page.metrics)
    final = final_rows(runs)
    top = stats.columns(page.metrics, rule, wide=True)
    top = [metric for metric in top if any(metric.key in row for row in values.values())]
    ends = tables.end_keys(runs)
    steady = [metric for metric in page.metrics if metric.key not in ends]
    panels = [_judged(panel, rule) for panel in page.panels]
    drawn = _plots(runs, replace(page, panels=tuple(panels)), look)
    several = any(len(rows) > 1 for rows in final.values())
    return common(comparison, task) | {
        **drawn,
        "title": page.title,
        "summary": _summary(runs, meta),
        "alerts": alerts(task, config, runs, list(meta.get("seeds", ()))),
        "verdict": task.verdict(config, final) if final else (),
        "headline": tables.scores(runs, values, top, "Final figures", page.references, rule),
        "differences": _differences(comparison, values, page, rule),
        "limited": rule is not None and any(metric.key == rule.constraint for metric in top),
        "rule": rule,
        "several": several,
        "diverged": any(run.diverged is not None for run in comparison.runs),
        "references": [name for name in page.references if name in runs],
        "methods": [(name, text) for name, text in page.glossary.items() if name in runs],
        "glossary": glossary(top),
        "all_glossary": glossary([m for m in page.metrics if m not in top]),
        "next_steps": task.next_steps(config, final) if final else (),
        "question": page.question,
        "entries": _entries(runs, page),
        "constraints": any(p.reference is not None for p in page.panels if p.kind == "family"),
        "full": tables.scores(runs, values, steady, "All figures", page.references, across=False),
        "ending": tables.ending(runs, page.metrics, "Figures at the end of training"),
        "settings": tables.settings(runs, "What each method ran with"),
        "listing": tables.listing(runs, "Runs of each method"),
        "example": next((f"{run.name}/seed-{run.seed}/" for run in comparison.runs
                         if run.folder != comparison.folder), ""),
        "looks": look,
    }  # fmt: skip


def common(comparison: Comparison, task: Task) -> dict[str, Any]:
    """What the pages of comparisons and of sweeps have alike: metadata and palette."""
    meta = comparison.meta
    return {
        "task": meta.get("task", task.name),
        "experiment": _experiment(meta),
        "machine": _machine(comparison.runs),
        "command": str(meta.get("command") or ""),
        "version": meta.get("fcco", ""),
        "shapes": SHAPES,
        "tokens": TOKENS,
        "colours": COLOURS,
    }


def _word(name: str, group: Sequence[SavedRun]) -> str:
    return str(group[0].method.get("method", name)) if group else name


def _judged(panel: Panel, rule: Rule | None) -> Panel:
    """A trade-off of the judged constraint shows its limit."""
    if rule is None or not rule.constraint or panel.kind != "tradeoff":
        return panel
    if panel.x == rule.constraint and panel.x_reference is None:
        return replace(panel, x_reference=rule.limit)
    if panel.y == rule.constraint and panel.reference is None:
        return replace(panel, reference=rule.limit)
    return panel


def _differences(
    comparison: Comparison, values: stats.Table, page: Page, rule: Rule | None
) -> tables.Table | None:
    first = stats.winner(values, page.metrics, rule, page.references)
    if first is None or rule is None:
        return None
    found = stats.against(comparison, rule.objective, first)
    metric = next(metric for metric in page.metrics if metric.key == rule.objective)
    return tables.differences(found, metric, first, page.references) if found else None


def _plots(runs: Runs, page: Page, look: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the page by section."""
    found: dict[str, list[Any]] = {"tradeoffs": [], "curves": [], "families": [], "by_entry": []}
    for k, panel in enumerate(page.panels):
        prefix, names = f"f{k}", plots.entry_names(runs, panel.y, page.entries.get(panel.y, ()))
        if panel.kind == "tradeoff":
            drawing = plots.tradeoff(runs, panel, look, page.metrics, page.references, prefix)
            found["tradeoffs"] += [drawing] if drawing else []
        elif panel.kind == "curve":
            drawing = plots.curves(runs, panel, look, prefix)
            found["curves"] += [drawing] if drawing else []
        elif panel.kind == "family":
            drawings = plots.families(runs, panel, names, look, prefix)
            found["families"] += [(panel, drawings)] if drawings else []
        else:
            drawing = plots.by_entry(runs, panel, names, look, prefix)
            found["by_entry"] += [drawing] if drawing else []
    return found


def _entries(runs: Runs, page: Page) -> list[dict[str, Any]]:
    """Tables of the lists that have names; multipliers stand with the first list."""
    limits = {panel.y: panel.reference for panel in page.panels if panel.kind == "family"}
    named = {p.y: p.label for p in page.panels if p.kind in ("change", "dots") and p.label}
    multipliers = _MULTIPLIERS
    found = []
    for key in (key for key in page.entries if key != _MULTIPLIERS):
        same = (limits[other] for other in limits if key == other or key.endswith(f"_{other}"))
        limit = next((limit for limit in same if limit is not None), None)  # test_... as train's
        name = named.get(key) or title(key)
        name = name[:1].upper() + name[1:]
        names = plots.entry_names(runs, key, page.entries[key])
        table = tables.entries(runs, key, names, limit, f"{name} at the end", multipliers)
        if table is None:
            continue
        notes = [cell.note for line in table.lines for cell in line.cells]
        found.append({
            "title": name,
            "table": table,
            "limit": limit,
            "seeds": any("seeds" in note for note in notes),
            "multipliers": any("ν" in note for note in notes),
        })  # fmt: skip
        multipliers = ""
    return found


def glossary(metrics: Sequence[Metric]) -> list[tuple[str, str]]:
    """Labels and meanings; figures with the same meaning share a line.

    >>> glossary([Metric(f"{p}_auc", f"AUC, {p}", meaning="area") for p in ("test", "train")])
    [('AUC, test and train', 'area')]
    """
    said: dict[str, list[str]] = {}
    for metric in metrics:
        if metric.meaning:
            said.setdefault(metric.meaning, []).append(metric.label)
    result = []
    for meaning, labels in said.items():
        parts = [label.rpartition(", ") for label in labels]
        stems = {stem for stem, _, _ in parts}
        joined = "; ".join(labels)
        if len(labels) > 1 and len(stems) == 1 and "" not in stems:
            joined = f"{stems.pop()}, {' and '.join(part for _, _, part in parts)}"
        result.append((joined, meaning))
    return result


def _summary(runs: Runs, meta: Mapping[str, Any]) -> str:
    config = meta.get("config") or {}
    parts = [f"data: {config['data']}"] if config.get("data") else []
    parts += [count(len(runs), "method"), count(sum(map(len, runs.values())), "run")]
    parts += [count(config["epochs"], "epoch")] if config.get("epochs") else []
    parts += ["quick version"] if meta.get("quick") else []
    parts += [str(meta["created"])[:10]] if meta.get("created") else []
    return " · ".join(parts)


def _experiment(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The config without its methods, which have a table of their own."""
    facts = [("Config", str(meta["config_name"]))] if meta.get("config_name") else []
    for key, value in (meta.get("config") or {}).items():
        if key not in ("methods", "seeds"):
            facts.append((title(key), setting(value)))
    if meta.get("seeds"):
        facts.append(("Seeds", setting(list(meta["seeds"]))))
    return facts


def _machine(runs: Sequence[SavedRun]) -> list[tuple[str, str]]:
    """Machine and versions; where runs differ, all that occur."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for key, value in (run.environment or {}).items():
            text = setting(value)
            if key != "command" and text not in found.setdefault(key, []):
                found[key].append(text)
    facts = []
    for key, values in found.items():
        if len(values) > 1 and ("time" in key or "start" in key):
            values = [f"{min(values)} to {max(values)}"]
        facts.append((title(key), "; ".join(values[:4]) + ("; …" if len(values) > 4 else "")))
    return facts


@dataclass(frozen=True)
class Alert:
    """A warning, and the runs it is about."""

    who: str
    text: str


def alerts(task: Task, config: Any, runs: Runs, wanted: Sequence[int]) -> list[Alert]:
    """Diverged, unfinished and missing runs, then warnings of the task.

    The same one of several seeds is told once, and what all methods are told, once for all.

    Args:
        task: gives its warnings about each final row.
        config: of the comparison.
        runs: by method.
        wanted: the seeds that each method should have.
    """
    diverged, unfinished, missing, said = ([] for _ in range(4))
    told = {id(run): _warnings(task, config, run) for group in runs.values() for run in group}
    every = [run for group in runs.values() for run in group]
    shapes = [{_shape(text) for text in told[id(run)]} for run in every if _counts(run)]
    shared = set.intersection(*shapes) if shapes and len(runs) > 1 else set()
    for name, group in runs.items():
        reasons = [(run, run.diverged.rstrip(".")) for run in group if run.diverged is not None]
        diverged += _grouped(name, group, [(r, _text("diverged", why=why)) for r, why in reasons])
        open_ones = [run for run in group if run.result is None]
        unfinished += _grouped(name, group, [(run, _text("unfinished")) for run in open_ones])
        there = {run.seed for run in group}
        if absent := [seed for seed in wanted if seed not in there]:
            missing.append(Alert(f"{name}, {seeds(absent, len(wanted))}", _text("missing")))
        own = [(run, text) for run in group for text in told[id(run)]]
        said += _grouped(name, group, [pair for pair in own if _shape(pair[1]) not in shared])
    pairs = [(run, text) for run in every for text in told[id(run)] if _shape(text) in shared]
    said += [replace(each, who="All methods") for each in _grouped("", every, pairs)]
    return [*other_data(every), *diverged, *unfinished, *missing, *said]


def other_data(runs: Sequence[SavedRun]) -> list[Alert]:
    """A warning where runs were not made on the same data."""
    results = [run.result for run in runs if run.result is not None]
    if len({result.get("fingerprint") for result in results}) < 2:
        return []
    return [Alert("All runs", _text("other_data"))]


def _text(block: str, **values: Any) -> str:
    return " ".join(paragraphs("alerts.j2", block, **values))


def _counts(run: SavedRun) -> bool:
    return run.result is not None and run.diverged is None


def _warnings(task: Task, config: Any, run: SavedRun) -> list[str]:
    if run.result is None or not _counts(run):
        return []
    told = [*task.warnings(config, run.figures), *map(str, run.result.get("warnings") or ())]
    return list(dict.fromkeys(told))


def _shape(text: str) -> str:
    """A text without its numbers."""
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", text)


def _grouped(
    name: str, group: Sequence[SavedRun], told: Iterable[tuple[SavedRun, str]]
) -> Iterator[Alert]:
    """One alert for texts that differ in their numbers alone; the first one's are shown."""
    texts: dict[str, list[tuple[SavedRun, str]]] = {}
    for run, text in told:
        texts.setdefault(_shape(text), []).append((run, text))
    for same in texts.values():
        first, text = same[0]
        if any(other != text for _, other in same):
            where = f"seed {first.seed}"
            where = where if first.name == name else f"{first.name}, {where}"
            text += " " + _text("numbers", where=where)
        some = list(dict.fromkeys(run.seed for run, _ in same))
        yield Alert(f"{name}, {seeds(some, len(group))}", text)
