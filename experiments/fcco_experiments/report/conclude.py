"""What is made of saved runs: a table, a page, and what the command line says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import report, results, stats, store
from ..config import dump
from ..stats import Table
from ..store import COMPARISON
from ..task import Metric, Page, Rule
from . import sweep as sweeps
from .page import alerts, by_method, final_rows, next_steps


@dataclass(frozen=True)
class Conclusion:
    """What the command line shows after a comparison."""

    page: Page
    rule: Rule | None  # None for a task that judges nothing
    verdict: tuple[str, ...]  # who won, paragraphs; empty where no run has finished
    next_steps: tuple[str, ...]
    table: Table  # mean and deviation by method and metric
    warnings: tuple[str, ...]  # a line for each kind, with the runs it is about
    report: Path  # the HTML page


def conclude(out: Path) -> Conclusion:
    """Write `table.json`, `table.md` and the report, from saved runs alone."""
    comparison = store.load_comparison(out)
    task, config = results.problem(comparison)
    page, rule = task.page(config), task.judged(config)
    table = results.table(comparison, page.metrics)
    if (out / COMPARISON).is_file():  # published results are left as they are
        results.write_table(out, table)
        store.write_text(out / "table.md", stats.markdown(table, page.metrics, rule))
        store.write_text(out / store.CONFIG, dump(config))  # what proposed commands begin with
    final = final_rows(by_method(comparison))
    verdict = task.verdict(config, final) if final else ()
    steps = next_steps(task, config, comparison, final)
    said = alerts(task, config, comparison) if comparison.runs else ()
    warnings = tuple(f"{each.who}: {each.text}" for each in said)
    path = out / "report.html"
    store.write_text(path, report.render(comparison, table, task, config))
    return Conclusion(page, rule, verdict, steps, table, warnings, path)


@dataclass(frozen=True)
class SweepConclusion:
    """What it shows after a sweep: the winners' figures, none of test data, and the page."""

    metrics: tuple[Metric, ...]
    table: Table
    report: Path
    compare: str  # a command


def conclude_sweep(out: Path, sweep: Mapping[str, Any]) -> SweepConclusion:
    """Write `table.json` and `table.md` of the winners and the report, from saved data alone.

    Args:
        out: folder of the sweep.
        sweep: from `store.read_sweep`.
    """
    comparison = store.load_comparison(out)
    task, config = results.problem(comparison)
    trials = sweeps.read(sweep)
    shown = sweeps.metrics(task.page(config), trials)
    table = sweeps.winners_table(comparison, trials, shown)
    if "meta" not in sweep:  # published sweeps are left as they are
        store.write_json(out / store.TABLE, {"methods": table})
        store.write_text(out / "table.md", stats.markdown(table, shown))
    path = out / "report.html"
    store.write_text(path, report.render_sweep(comparison, sweep, task, config))
    return SweepConclusion(tuple(shown), table, path, sweeps.compare_winners(comparison))
