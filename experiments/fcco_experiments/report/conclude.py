"""What is made of saved runs: a table, a page, and what the command line says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import report, results, stats, store
from ..config import dump
from ..stats import Table
from ..store import COMPARISON, Comparison
from ..task import Metric, Rule, Task
from . import sweep as sweeps
from .page import alerts, by_method, final_rows, next_steps


@dataclass(frozen=True)
class Conclusion:
    """What the command line shows after a comparison or a sweep."""

    metrics: Sequence[Metric]
    table: Table  # mean and deviation by method and metric
    report: Path  # the HTML page
    rule: Rule | None = None  # what the table marks; None where nothing is judged
    verdict: tuple[str, ...] = ()  # who won, or how it was chosen; none where no run has finished
    winners: tuple[str, ...] = ()  # of a sweep, a line for each method
    next_steps: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # a line for each kind, with the runs it is about
    compare: str = ""  # the command that compares the winners, where they were kept


def conclude(out: Path) -> Conclusion:
    """Write `table.json`, `table.md` and the report of runs or of a sweep, from saved data alone.

    Published results are left as they are, but for the report.
    """
    comparison = store.load_comparison(out)
    task, config = results.problem(comparison)
    if (sweep := store.read_sweep(out)) is not None:
        return _conclude_sweep(out, comparison, task, config, sweep)
    page, rule = task.page(config), task.judged(config)
    table = results.table(comparison, page.metrics)
    if (out / COMPARISON).is_file():
        results.write_table(out, table)
        store.write_text(out / "table.md", stats.markdown(table, page.metrics, rule))
        store.write_text(out / store.CONFIG, dump(config))  # what proposed commands begin with
    final = final_rows(by_method(comparison))
    path = out / "report.html"
    store.write_text(path, report.render(comparison, table, task, config))
    said = alerts(task, config, comparison) if comparison.runs else ()
    return Conclusion(
        page.metrics, table, path, rule,
        verdict=task.verdict(config, final) if final else (),
        next_steps=next_steps(task, config, comparison, final),
        warnings=tuple(f"{each.who}: {each.text}" for each in said),
    )  # fmt: skip


def _conclude_sweep(
    out: Path, comparison: Comparison, task: Task, config: Any, sweep: Mapping[str, Any]
) -> Conclusion:
    """Its figures are those of the winners, none of them on test data."""
    trials = sweeps.read(sweep)
    shown = sweeps.metrics(task.page(config), trials)
    table = sweeps.winners_table(comparison, trials, shown)
    if "meta" not in sweep:
        store.write_json(out / store.TABLE, {"methods": table})
        store.write_text(out / "table.md", stats.markdown(table, shown))
    path = out / "report.html"
    store.write_text(path, report.render_sweep(comparison, sweep, task, config))
    lines = []
    for name, ranked in trials.families.items():
        text = "none came to its end"
        if won := trials.winners.get(name):
            values = {key.removeprefix("settings."): v for key, v in won.values.items()}
            text = ", ".join(f"{key} {value}" for key, value in values.items())
            text += "" if won.feasible or not trials.limited else "; not feasible"
        lines.append(f"{name}: {text} (best of {len(ranked)})")
    kept = (out / store.WINNERS).is_file()
    return Conclusion(
        shown, table, path, verdict=(f"Chosen by: {trials.rule}.",), winners=tuple(lines),
        compare=sweeps.compare_winners(comparison) if kept else "",
    )  # fmt: skip
