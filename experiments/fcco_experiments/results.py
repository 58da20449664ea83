"""Published results: small files that anyone can check, and that a page can be made from again.

A comparison is `table.json` (`methods`: mean, deviation and number of runs of each method and
metric; `meta`: task, config, seeds, versions and machine) and `runs.jsonl.gz` (a line for each run:
settings, every figure at its end, and the curves of the page, thinned). Results of which single
runs were not kept have `table.json` alone. A sweep is `sweep.json.gz`: every setting with its
means on validation data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import stats, store, tasks
from .config import fields_of, from_plain
from .store import COMPARISON, RUNS, SWEEP, TABLE, Comparison, FolderError, SavedRun
from .task import Metric, Page, Row, Task

EVALUATIONS = 20  # of a run that are published, at most
DIGITS = 6  # significant ones of a figure of a run
LONGEST = 64  # a longer list is not published


def problem(comparison: Comparison) -> tuple[Task, Any]:
    """Task and config of saved runs; fields that the config had in earlier versions are ignored."""
    task = tasks.get(comparison.meta["task"], saved=True)
    known = fields_of(task.config)
    saved = {key: value for key, value in comparison.meta["config"].items() if key in known}
    return task, from_plain(task.config, saved, str(comparison.folder))


def table(comparison: Comparison, metrics: Sequence[Metric]) -> stats.Table:
    """From the runs, or the published one where these were not kept.

    Raises:
        FolderError: when no run has finished.
    """
    if any(run.result is not None for run in comparison.runs):
        return stats.table(comparison, metrics)
    if (comparison.folder / COMPARISON).is_file():
        raise FolderError(
            f"{comparison.folder}: no run is finished, so there is nothing to report."
        )
    methods = store.read_json(comparison.folder / TABLE)["methods"]
    return {
        name: {key: store.numbers(value) for key, value in row.items()}
        for name, row in methods.items()
    }


def write_table(folder: Path, new: stats.Table, meta: Mapping[str, Any] | None = None) -> None:
    """Write `table.json`; refuse to replace one that rests on more runs than the new one.

    Args:
        folder: where.
        new: by method and metric.
        meta: of published results.
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
    told = {"methods": new} if meta is None else {"meta": meta, "methods": _rounded(new, 8)}
    text = json.dumps(store.clean(told), indent=1)
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
    """Write the small files of a folder of runs, or of a sweep.

    Args:
        folder: as `fcco compare` or `fcco sweep` left it.
        target: where to; results that rest on more runs are not replaced.

    Raises:
        FolderError: when no run has finished, or results with more runs would be lost.
    """
    meta = store.read_meta(folder)  # refuses what is published already
    comparison = store.load_comparison(folder)
    meta |= {
        "command": re.sub(r" --(out|data-folder)[ =]('[^']*'|\S+)", "", meta["command"]),
        "environment": environment(comparison.runs),
    }
    found = store.read_sweep(folder)
    if found is not None:
        target.mkdir(parents=True, exist_ok=True)
        store.write_rows(target / SWEEP, [_small_sweep(found, meta)])
        return [target / SWEEP]
    task, config = problem(comparison)
    page = task.page(config)
    write_table(target, table(comparison, page.metrics), meta)
    finished = [run for run in comparison.runs if run.result is not None]
    store.write_rows(target / RUNS, [_line(run, page) for run in finished])
    return [target / TABLE, target / RUNS]


def environment(runs: Sequence[SavedRun]) -> dict[str, str]:
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


def _line(run: SavedRun, page: Page) -> dict[str, Any]:
    """A run: all of its result but long lists, and what the plots of a page need of its rows."""
    assert run.result is not None
    curves = {"epoch", *(panel.y for panel in page.panels if panel.kind == "curve")}
    changes = {panel.y for panel in page.panels if panel.kind == "change"}
    count = min(EVALUATIONS, len(run.rows))
    kept = sorted({round(k * (len(run.rows) - 1) / max(1, count - 1)) for k in range(count)})
    rows = [
        {k: v for k, v in run.rows[i].items() if k in curves or (i == 0 and k in changes)}
        for i in kept
    ]
    result = run.result | {key: _short(run.result[key]) for key in ("final", "end")}
    figures = _rounded({"result": result, "rows": [_short(row) for row in rows]}, DIGITS)
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
