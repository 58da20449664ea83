"""Content of the page of a comparison, tables too, as plain data for its template."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import stats
from ..stats import fixed
from ..store import CONFIG, WINNERS, Comparison, SavedRun
from ..task import Metric, Page, Row, Rule, Task
from ..tasks.base import paragraphs
from . import plots
from .style import COLOURS, SHAPES, TOKENS, count, setting, styles, title

Runs = Mapping[str, Sequence[SavedRun]]


def by_method(comparison: Comparison) -> dict[str, list[SavedRun]]:
    """Runs of each method, in the order of the comparison, methods without a run included."""
    runs: dict[str, list[SavedRun]] = {str(name): [] for name in comparison.meta["methods"]}
    for run in sorted(comparison.runs, key=lambda run: run.seed):
        runs.setdefault(run.name, []).append(run)
    return runs


def final_rows(runs: Runs) -> dict[str, list[Row]]:
    """Final rows, with their seeds, of each method that has a finished run."""
    rows = {
        name: [{**run.figures, "seed": run.seed} for run in group if run.figures]
        for name, group in runs.items()
    }
    return {name: own for name, own in rows.items() if own}


def is_published(comparison: Comparison) -> bool:
    """Whether runs have no folders of their own."""
    return not any(run.folder != comparison.folder for run in comparison.runs)


def next_steps(
    task: Task, config: Any, comparison: Comparison, final: Mapping[str, list[Row]]
) -> tuple[str, ...]:
    """What to try next, for whoever has the folder of the runs."""
    if is_published(comparison):
        return ()
    steps = task.next_steps(config, dict(final))
    return tuple(whole_commands(text, comparison) for text in steps)


def whole_commands(text: str, comparison: Comparison) -> str:
    """A text in which options and sweeps between backticks are commands that work as printed.

    They take the config beside the runs, of a sweep that of the winners. More seeds go on in the
    same folder, all else in another.
    """
    folder = str(comparison.folder)

    def whole(found: re.Match[str]) -> str:
        option = shlex.split(found[1])
        if option[0] == "fcco":
            return f"`{command(comparison, 'sweep', f'{folder}-sweep')}`"
        other = "-".join([folder, option[0][2:], *option[1:]])
        place = folder if option[0] == "--seeds" else other
        return f"`{command(comparison, 'compare', place, *option)}`"

    return re.sub("`(--[^`]+|fcco sweep [^`]+)`", whole, text)


def command(comparison: Comparison, kind: str, out: str, *options: str) -> str:
    """A command that begins with the config beside runs, that of the winners beside a sweep."""
    called = shlex.split(str(comparison.meta.get("command", "")))
    start = next((k for k, word in enumerate(called) if word in ("compare", "run", "sweep")), 0)
    file = WINNERS if (comparison.folder / WINNERS).is_file() else CONFIG
    data = [word for k, word in enumerate(called) if "--data-folder" in (word, called[k - 1])]
    data += [word for word in called if word.startswith("--data-folder=")]
    words = [kind, comparison.meta["task"], "--config", f"{comparison.folder}/{file}", *data]
    return shlex.join([*(called[:start] or ["fcco"]), *words, *options, "--out", out, "--resume"])


def content(comparison: Comparison, values: stats.Table, task: Task, config: Any) -> dict[str, Any]:
    """Everything the template asks for; `values` are from `stats.table`."""
    page, meta = task.page(config), comparison.meta
    runs, rule = by_method(comparison), task.judged(config)
    methods = _methods(comparison, runs)
    look = styles({name: str(method.get("method", name)) for name, method in methods.items()})
    final = final_rows(runs)
    top = [
        metric
        for metric in stats.columns(page.metrics, rule, wide=True)
        if any(metric.key in row for row in values.values())
    ]
    every = [metric for metric in page.metrics if any(metric.key in v for v in values.values())]
    counts = count(len(runs), "method"), count(sum(map(len, runs.values())), "run")
    return {
        **_plots(runs, page, look),
        "task": task.name,
        "title": page.title,
        "summary": summary(meta, *counts),
        "alerts": alerts(task, config, comparison),
        "verdict": task.verdict(config, final) if final else (),
        "headline": scores(runs, values, top, "Final figures", rule),
        "limited": rule is not None and any(metric.key == rule.constraint for metric in top),
        "rule": rule,
        "several": any(value["runs"] > 1 for row in values.values() for value in row.values()),
        "diverged": any(stats.DIVERGED in row for row in values.values()),
        "glossary": glossary(every),
        "next_steps": next_steps(task, config, comparison, final),
        "question": page.question,
        "full": scores(runs, values, every, "All figures", across=False),
        "settings": settings_table(methods),
        "published": is_published(comparison),
        "epochs": meta["config"].get("epochs"),
        "looks": look,
        **_origin(comparison),
        "shapes": SHAPES,
        "tokens": TOKENS,
        "colours": COLOURS,
    }


def _origin(comparison: Comparison) -> dict[str, Any]:
    """What was run, by which command, where."""
    meta = comparison.meta
    config = [("Config", str(meta["config_name"]))] if meta.get("config_name") else []
    config += [
        (title(key), setting(value))
        for key, value in meta["config"].items()
        if key not in ("methods", "seeds")  # methods have a table of their own
    ]
    environment = meta.get("environment") or machine(comparison.runs)
    return {
        "experiment": [*config, ("Seeds", setting(list(meta["seeds"])))],
        "machine": [(title(key), value) for key, value in environment.items()],
        "command": str(meta.get("command") or ""),
        "version": meta.get("fcco", ""),
    }


def machine(runs: Sequence[SavedRun]) -> dict[str, str]:
    """Machine and versions of runs; where they differ, all that occur."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for key, value in run.environment.items():
            if key != "command" and value is not None:
                found.setdefault(key, []).append(str(value))
    texts = {}
    for key, values in found.items():
        several = list(dict.fromkeys(values))
        texts[key] = "; ".join(several[:4]) + "; …" * (len(several) > 4)
        if key == "start" and len(several) > 1:
            texts[key] = f"{min(several)} to {max(several)}"
    return texts


def summary(meta: Mapping[str, Any], *counts: str) -> str:
    """The line below the title."""
    config = meta["config"]
    parts = [f"data: {config['data']}"] if config.get("data") else []
    parts += counts
    parts += [count(config["epochs"], "epoch")] if config.get("epochs") else []
    parts += ["quick version"] if meta.get("quick") else []
    parts += [str(meta["created"])[:10]] if meta.get("created") else []
    return " · ".join(parts)


def _methods(comparison: Comparison, runs: Runs) -> dict[str, Mapping[str, Any]]:
    """Settings of each method: those of a run, else of the config."""
    planned = comparison.meta["config"].get("methods") or {}
    return {n: group[0].method if group else planned.get(n, {}) for n, group in runs.items()}


def _plots(runs: Runs, page: Page, look: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the page by section."""
    found: dict[str, list[Any]] = {"tradeoffs": [], "curves": []}
    for k, panel in enumerate(page.panels):
        if panel.kind == "tradeoff":
            drawing = plots.scatter(runs, panel, look, page.metrics, f"f{k}")
        else:
            drawing = plots.curves(runs, panel, look, f"f{k}")
        found[f"{panel.kind}s"] += [drawing] if drawing else []
    return found


def glossary(metrics: Sequence[Metric]) -> list[tuple[str, str]]:
    """Labels and meanings; figures with the same meaning share a line.

    >>> glossary([Metric(f"{p}_auc", f"AUC, {p}", meaning="area") for p in ("test", "train")])
    [('AUC, test; AUC, train', 'area')]
    """
    said: dict[str, list[str]] = {}
    for metric in metrics:
        if metric.meaning:
            said.setdefault(metric.meaning, []).append(metric.label)
    return [("; ".join(labels), meaning) for meaning, labels in said.items()]


@dataclass(frozen=True)
class Alert:
    """A warning, and the runs it is about."""

    who: str
    text: str


def alerts(task: Task, config: Any, comparison: Comparison) -> list[Alert]:
    """Runs that diverged, are unfinished or missing, overfitting, then warnings of the task.

    Warnings that differ in their numbers alone are said once, with those of the first run.
    """
    runs, wanted = by_method(comparison), comparison.meta["seeds"]
    found = other_data(comparison.runs)
    for name, group in runs.items():
        for run in group:
            if not _counts(run):
                state = "unfinished" if run.result is None else "diverged"
                found.append(Alert(run_name(run), _text(state, why=run.diverged or "")))
        if absent := [str(seed) for seed in wanted if seed not in {run.seed for run in group}]:
            found.append(Alert(f"{name}, seed {', '.join(absent)}", _text("missing")))
    found += _overfitted(task, config, runs)
    counted = [run for group in runs.values() for run in group if _counts(run)]
    told: dict[str, list[tuple[SavedRun, str]]] = {}
    for run in counted:
        for text in _warnings(task, config, run):
            told.setdefault(re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", text), []).append((run, text))
    for same in told.values():
        first, text = same[0]
        if any(other != text for _, other in same):
            text += " " + _text("numbers", where=run_name(first))
        names = dict.fromkeys(run.name for run, _ in same)
        everywhere = len(names) > 1 and len(names) == len({run.name for run in counted})
        found.append(Alert("All methods" if everywhere else ", ".join(names), text))
    return [replace(alert, text=whole_commands(alert.text, comparison)) for alert in found]


def _overfitted(task: Task, config: Any, runs: Runs) -> Iterator[Alert]:
    """A warning where the judged figure was best in the first half of the training.

    It is that of validation data; at the end it is worse by a tenth of what was gained, in the mean
    and by the interval over seeds. Not under a limit: for that it may fall.
    """
    rule, page = task.judged(config), task.page(config)
    metric = next((m for m in page.metrics if rule and m.key == rule.objective), None)
    if rule is None or rule.constraint or metric is None or metric.better == "none":
        return
    part = rule.objective.partition("_")[2]
    sign = 1.0 if metric.better == "higher" else -1.0
    for name, group in runs.items():
        counted = [run for run in group if _counts(run)]
        curve = plots.curve(counted, f"val_{part}")
        if len(curve.epochs) < 3:
            continue
        best = max(range(len(curve.epochs)), key=lambda k: (sign * curve.mean[k], -k))
        start, top, end = curve.mean[0], curve.mean[best], curve.mean[-1]
        when, last = curve.epochs[best], curve.epochs[-1]
        rows = ({row.get("epoch"): row.get(f"val_{part}") for row in run.rows} for run in counted)
        ends = [(own.get(when), own.get(last)) for own in rows]
        pairs: list[Any] = [pair for pair in ends if all(map(stats.is_finite, pair))]
        sure = len(counted) == 1 or (
            len(pairs) > 1 and stats.paired([p[0] for p in pairs], [p[1] for p in pairs]).decided
        )
        if 0 < when <= last / 2 and abs(end - top) > 0.1 * abs(top - start) and sure:
            tests = plots.curve(counted, f"test_{part}")
            test = dict(zip(tests.epochs, tests.mean, strict=True)).get(when, math.nan)
            shown = (f"{value:.{metric.digits}f}" for value in (top, end, test))
            words = dict(zip(("top", "end", "test"), shown, strict=True))
            words |= {"label": metric.label.partition(",")[0], "best": f"{when:g}"}
            yield Alert(name, _text("overfitted", last=f"{last:g}", **words))


def run_name(run: SavedRun) -> str:
    """A run in words."""
    return f"{run.name}, seed {run.seed}"


def other_data(runs: Sequence[SavedRun]) -> list[Alert]:
    """A warning where runs were not made on the same data."""
    prints = {run.result.get("fingerprint") for run in runs if run.result is not None}
    return [Alert("All runs", _text("other_data"))] if len(prints) > 1 else []


def _text(block: str, **values: Any) -> str:
    return " ".join(paragraphs("alerts.j2", block, **values))


def _counts(run: SavedRun) -> bool:
    return run.result is not None and run.diverged is None


def _warnings(task: Task, config: Any, run: SavedRun) -> list[str]:
    if run.result is None or not _counts(run):
        return []
    told = [*task.warnings(config, run.figures), *map(str, run.result.get("warnings") or ())]
    return list(dict.fromkeys(told))


# --- tables ---------------------------------------------------------------------------------------

_HINTS = {"higher": "higher is better", "lower": "lower is better", "none": ""}


@dataclass(frozen=True)
class Cell:
    """One value, with its standard deviation."""

    text: str
    spread: str = ""
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
    `across`: one row per method; otherwise one row per metric.
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


def settings_table(methods: Mapping[str, Mapping[str, Any]]) -> Table:
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
