"""What is made of saved runs: tables, one HTML file with every plot inside, small published files.

A published comparison is `table.json` (`methods`: mean, deviation and number of runs of each method
and metric; `meta`: task, config, seeds, versions and machine) and `runs.jsonl.gz` (a line for each
run: settings, every figure at its end, and the curves of the page, thinned). A published sweep is
`sweep.json.gz`: every setting with its means on validation data.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import stats, store, tasks
from .. import sweep as sweeps
from ..config import dump
from ..stats import Table
from ..store import COMPARISON, RUNS, SWEEP, TABLE, Comparison, FolderError, SavedRun
from ..task import Metric, Page, Row, Rule, Task
from . import page

__all__ = ["Conclusion", "conclude", "publish", "render"]

EVALUATIONS = 20  # of a run that are published, at most
DIGITS = 6  # significant ones of a published figure of a run
LONGEST = 64  # a longer list is not published


@dataclass(frozen=True)
class Conclusion:
    """What the command line shows after a comparison or a sweep."""

    metrics: Sequence[Metric]
    table: Table  # mean and deviation by method and metric
    report: Path  # the HTML page; of a sweep the table of all settings
    rule: Rule | None = None  # what the table marks; None where nothing is judged
    verdict: tuple[str, ...] = ()  # who won, or how it was chosen; none where no run has finished
    winners: tuple[str, ...] = ()  # of a sweep, a line for each method
    next_steps: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # a line for each kind, with the runs it is about
    compare: str = ""  # the command that compares the winners


def conclude(out: Path) -> Conclusion:
    """Write `table.json` and the report of runs, or the table of a sweep, from saved data alone.

    Published results are left as they are, except for the report.

    Raises:
        FolderError: when no run has finished.
    """
    comparison = store.load_comparison(out)
    task, config = tasks.saved(comparison)
    if (found := store.read_sweep(out)) is not None:
        return _conclude_sweep(comparison, task.metrics(config), found)
    metrics, rule = task.metrics(config), task.judged(config)
    table = _table(comparison, metrics)
    if (out / COMPARISON).is_file():
        _write_table(out, table)
        store.write_text(out / store.CONFIG, dump(config))  # what proposed commands begin with
    final = page.final_rows(page.by_method(comparison))
    path = out / "report.html"
    store.write_text(path, render(comparison, table, task, config))
    return Conclusion(
        metrics, table, path, rule,
        verdict=task.verdict(config, final),
        next_steps=page.next_steps(task, config, comparison, final),
        warnings=_lines(page.alerts(task, config, comparison)),
    )  # fmt: skip


def _lines(alerts: Sequence[page.Alert]) -> tuple[str, ...]:
    return tuple(f"{alert.who}: {alert.text}" for alert in alerts)


def _conclude_sweep(
    comparison: Comparison, metrics: Sequence[Metric], found: Mapping[str, Any]
) -> Conclusion:
    """The chosen setting of each method with its figures, none of them on test data."""
    shown, out = sweeps.validated(metrics, found), comparison.folder
    names = {name: family for family, name in found["winners"].items()}
    table = stats.table(comparison, shown, names)
    store.write_json(out / TABLE, {"methods": table})
    rows = sweeps.rows(found)
    text = io.StringIO()
    lines = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    lines.writeheader()
    lines.writerows(rows)
    store.write_text(out / store.SETTINGS, text.getvalue())
    entries = {entry["name"]: entry for entry in found["settings"]}
    said = []
    for family, ranked in found["ranking"].items():
        words = "no setting finished all its runs"
        if won := entries.get(found["winners"].get(family)):
            values = {key.removeprefix("settings."): v for key, v in won["setting"].items()}
            words = ", ".join(f"{key} {value}" for key, value in values.items())
            words += "" if won["feasible"] or not found["limited"] else "; exceeds the limit"
        said.append(f"{family}: {words} (best of {len(ranked)})")
    return Conclusion(
        shown, table, out / store.SETTINGS, verdict=(f"Chosen by: {found['rule']}.",),
        winners=tuple(said), warnings=_lines(page.other_data(comparison.runs)),
        compare=page.command(comparison, "compare", f"{out}-winners") if names else "",
    )  # fmt: skip


def _table(comparison: Comparison, metrics: Sequence[Metric]) -> Table:
    if not any(run.result is not None for run in comparison.runs):
        raise FolderError(
            f"{comparison.folder}: no run is finished, so there is nothing to report."
        )
    return stats.table(comparison, metrics)


def _write_table(folder: Path, new: Table, meta: Mapping[str, Any] | None = None) -> None:
    """Write `table.json`; refuse to replace one that rests on more runs than the new one.

    `meta` is that of published results.
    """
    path = folder / TABLE
    before = store.read_json(path).get("methods", {}) if path.is_file() else {}
    counts = {name: (_runs(row), _runs(new.get(name, {}))) for name, row in before.items()}
    lost = [f"{name} {now} of {old}" for name, (old, now) in counts.items() if now < old]
    if lost:
        raise FolderError(
            f"{path} rests on more runs than there are now ({', '.join(lost)}). It is left as it "
            "is; delete it to write another one."
        )
    folder.mkdir(parents=True, exist_ok=True)
    content = {"methods": new} if meta is None else {"meta": meta, "methods": _rounded(new, 8)}
    text = json.dumps(store.clean(content), indent=1)
    one_line = lambda figure: "{" + " ".join(figure[1].split()) + "}"  # noqa: E731
    text = re.sub(r"\{\s+(\"mean\"[^}]*?)\s+\}", one_line, text)
    store.write_text(path, text + "\n")


def _runs(row: Mapping[str, Mapping[str, float]]) -> int:
    return max((int(value.get("runs", 0)) for value in row.values()), default=0)


def _rounded(value: Any, digits: int) -> Any:
    """Floats with so many significant digits."""
    if isinstance(value, Mapping):
        return {key: _rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def publish(folder: Path, target: Path) -> list[Path]:
    """Write the small files of a folder that `fcco compare` or `fcco sweep` left.

    Raises:
        FolderError: when no run has finished, or results with more runs would be lost.
    """
    meta = store.read_meta(folder)  # refuses what is published already
    comparison = store.load_comparison(folder)
    meta |= {
        "command": re.sub(r" --(out|data-folder)[ =]('[^']*'|\S+)", "", meta["command"]),
        "environment": page.machine(comparison.runs),
    }
    found = store.read_sweep(folder)
    if found is not None:
        target.mkdir(parents=True, exist_ok=True)
        store.write_rows(target / SWEEP, [_small_sweep(found, meta)])
        return [target / SWEEP]
    task, config = tasks.saved(comparison)
    words = task.page(config)
    _write_table(target, _table(comparison, words.metrics), meta)
    finished = [run for run in comparison.runs if run.result is not None]
    store.write_rows(target / RUNS, [_line(run, words) for run in finished])
    return [target / TABLE, target / RUNS]


def _line(run: SavedRun, words: Page) -> dict[str, Any]:
    """A run: all of its result but long lists, and what the plots of a page need of its rows."""
    assert run.result is not None
    curves = {"epoch", *(panel.y for panel in words.panels if panel.kind == "curve")}
    count = min(EVALUATIONS, len(run.rows))
    kept = sorted({round(k * (len(run.rows) - 1) / max(1, count - 1)) for k in range(count)})
    rows = [{key: run.rows[i][key] for key in run.rows[i] if key in curves} for i in kept]
    result = run.result | {key: _short(run.result[key]) for key in ("final", "end")}
    figures = _rounded({"result": result, "rows": rows}, DIGITS)
    return {"name": run.name, "seed": run.seed, "method": run.method, **figures}


def _short(row: Row) -> Row:
    return {k: v for k, v in row.items() if not isinstance(v, list | tuple) or len(v) <= LONGEST}


def _small_sweep(sweep: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """A sweep with rounded figures; of the methods in its config, the first setting of each."""
    first: dict[str, str] = {}
    for entry in sweep["settings"]:
        first.setdefault(entry["method"], entry["name"])
    methods = {name: meta["config"]["methods"][own] for name, own in first.items()}
    meta = {**meta, "methods": list(methods), "config": {**meta["config"], "methods": methods}}
    return {**_rounded(sweep, DIGITS), "meta": meta}


def render(comparison: Comparison, values: Table, task: Task, config: Any) -> str:
    """The page as text, for what `task.page` says of a config; the same runs give the same bytes.

    `values` are from `stats.table`.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    from .style import setting, title

    def marked(text: str) -> Markup:
        """Escaped, with `code` between backticks."""
        parts = str(text).split("`")
        if len(parts) % 2 == 0:
            return escape(text)
        return Markup("").join(
            Markup("<code>%s</code>") % part if k % 2 else escape(part)
            for k, part in enumerate(parts)
        )

    environment = Environment(
        loader=PackageLoader("fcco_experiments", "report/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"marked": marked, "setting": setting, "label": title}
    css = Markup((Path(__file__).parent / "templates/page.css").read_text(encoding="utf-8"))
    content = page.content(comparison, values, task, config)
    return environment.get_template("page.html.j2").render(css=css, **content)
