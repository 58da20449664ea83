"""What is made of saved runs: tables, one HTML file with every plot inside, and what is said."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import results, stats, store
from ..config import dump
from ..stats import Table
from ..store import COMPARISON, Comparison
from ..task import Metric, Rule, Task
from . import gate, page, sweep

__all__ = ["Conclusion", "conclude", "render", "render_gate", "render_sweep"]


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
    if (saved := store.read_sweep(out)) is not None:
        return _conclude_sweep(out, comparison, task, config, saved)
    metrics, rule = task.metrics(config), task.judged(config)
    table = results.table(comparison, metrics)
    if (out / COMPARISON).is_file():
        results.write_table(out, table)
        store.write_text(out / "table.md", stats.markdown(table, metrics, rule))
        store.write_text(out / store.CONFIG, dump(config))  # what proposed commands begin with
    final = page.final_rows(page.by_method(comparison))
    path = out / "report.html"
    store.write_text(path, render(comparison, table, task, config))
    said = page.alerts(task, config, comparison) if comparison.runs else ()
    return Conclusion(
        metrics, table, path, rule,
        verdict=task.verdict(config, final) if final else (),
        next_steps=page.next_steps(task, config, comparison, final),
        warnings=tuple(f"{each.who}: {each.text}" for each in said),
    )  # fmt: skip


def _conclude_sweep(
    out: Path, comparison: Comparison, task: Task, config: Any, saved: Mapping[str, Any]
) -> Conclusion:
    """Its figures are those of the winners, none of them on test data."""
    trials = sweep.read(saved)
    shown = sweep.metrics(task.page(config), trials)
    table = sweep.winners_table(comparison, trials, shown)
    if "meta" not in saved:
        store.write_json(out / store.TABLE, {"methods": table})
        store.write_text(out / "table.md", stats.markdown(table, shown))
        store.write_text(out / "settings.csv", as_csv(sweep.rows(trials)))
    path = out / "report.html"
    store.write_text(path, render_sweep(comparison, saved, task, config))
    lines = []
    for name, ranked in trials.methods.items():
        text = "none came to its end"
        if won := trials.winners.get(name):
            values = {key.removeprefix("settings."): v for key, v in won.values.items()}
            text = ", ".join(f"{key} {value}" for key, value in values.items())
            text += "" if won.feasible or not trials.limited else "; not feasible"
        lines.append(f"{name}: {text} (best of {len(ranked)})")
    kept = (out / store.WINNERS).is_file()
    return Conclusion(
        shown, table, path, verdict=(f"Chosen by: {trials.rule}.",), winners=tuple(lines),
        compare=sweep.compare_winners(comparison) if kept else "",
    )  # fmt: skip


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def render(comparison: Comparison, values: Table, task: Task, config: Any) -> str:
    """The page as text; the same runs give the same bytes.

    Args:
        comparison: saved runs; there may be none, where only the table was kept.
        values: from `fcco_experiments.results.table`.
        task: its page, verdict and warnings.
        config: what `task.page` asks for.
    """
    return _fill("page.html.j2", page.content(comparison, values, task, config))


def render_sweep(comparison: Comparison, saved: Mapping[str, Any], task: Task, config: Any) -> str:
    """The page of a sweep as text; the same sweep gives the same bytes.

    Args:
        comparison: its runs; there may be none, where only the means were kept.
        saved: from `fcco_experiments.sweep.read`.
        task: its page, rule and warnings.
        config: what `task.page` asks for.
    """
    return _fill("sweep.html.j2", sweep.content(comparison, saved, task, config))


def render_gate(found: Mapping[str, Any], summary: str, old: str, new: str, data: str) -> str:
    """The page of a gate as text; see `gate.content`."""
    return _fill("gate.html.j2", gate.content(found, summary, old, new, data))


def _fill(template: str, content: Mapping[str, Any]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    from .style import count, fixed, plain, setting, title

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
    environment.filters |= {"marked": marked, "fixed": fixed, "plain": plain}
    environment.filters |= {"setting": setting, "count": count, "label": title}
    css = Markup((Path(__file__).parent / "templates/page.css").read_text(encoding="utf-8"))
    return environment.get_template(template).render(css=css, **content)
