"""A comparison: several methods and seeds, one table, one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from . import engine, environment, record, summary, tasks, workers
from .config import from_plain, plain
from .events import Event, Outcome
from .record import COMPARISON, Comparison
from .spec import RunSpec
from .summary import Table
from .task import Experiment, Page, Task

__all__ = ["Conclusion", "Plan", "conclude", "execute", "plan"]

Runner = Callable[..., list[Outcome]]
"""Does runs, as `workers.run` does. An engine that trains them together can take its place."""


@dataclass(frozen=True)
class Plan:
    """What will be run, apart from how.

    Args:
        task: its name, or `"module:attribute"`.
        config_name: of the config, for the folder.
        config: with all methods and seeds.
        specs: one for each run.
        quick: whether it is the fast version.
    """

    task: str
    config_name: str
    config: Experiment
    specs: tuple[RunSpec, ...]
    quick: bool = False


def plan(task: str, config_name: str, config: Experiment, *, quick: bool = False) -> Plan:
    """Every method with every seed; the first seed of all methods comes first."""
    specs = tuple(
        RunSpec(task, name, method, seed, config)
        for seed in config.seeds
        for name, method in config.methods.items()
    )
    return Plan(task, config_name, config, specs, quick)


def execute(
    plan: Plan,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    workers_: int | None = None,
    tensorboard: bool = False,
    on_event: Callable[[Event], None] = lambda event: None,
    runner: Runner = workers.run,
) -> list[Outcome]:
    """Do what is not finished yet.

    Args:
        plan: the runs.
        out: their folder.
        resume: go on with what lies there.
        overwrite: delete what lies there.
        workers_: processes.
        tensorboard: whether to write scalars for TensorBoard.
        on_event: told what happens.
        runner: what does the runs.

    Raises:
        FolderError: when the folder cannot be used; nothing was touched then.
    """
    done: dict[str, Outcome] = {}
    if resume:
        for spec in plan.specs:
            if engine.check_folder(spec, spec.folder(out), resume=True):
                done[spec.label] = Outcome(spec.label, "finished", "was finished")
    record.prepare(out, resume=resume, overwrite=overwrite)
    with record.locked(out):
        record.write_json(out / COMPARISON, _meta(plan, out))
        for label in done:
            on_event(Event("finished", label, text="was finished"))
        ended = runner(
            [spec for spec in plan.specs if spec.label not in done],
            out,
            workers=workers_,
            resume=resume,
            tensorboard=tensorboard,
            on_event=on_event,
        )
    done |= {outcome.run: outcome for outcome in ended}
    return [done[spec.label] for spec in plan.specs]


def _meta(plan: Plan, out: Path) -> dict[str, Any]:
    before = record.read_json(out / COMPARISON) if (out / COMPARISON).exists() else {}
    return {
        "task": plan.task,
        "config_name": plan.config_name,
        "config": plain(plan.config),
        "command": before.get("command", environment.command()),
        "created": before.get("created", environment.now()),
        "fcco": __version__,
        "methods": list(plan.config.methods),
        "seeds": list(plan.config.seeds),
        "quick": plan.quick,
    }


@dataclass(frozen=True)
class Conclusion:
    """What is known after the runs.

    Attributes:
        comparison: as it lies on disk.
        page: words and metrics of the task.
        table: mean and deviation by method and metric.
        warnings: each once, with the runs it is about.
        report: the HTML page, if it was asked for.
    """

    comparison: Comparison
    page: Page
    table: Table
    warnings: tuple[str, ...]
    report: Path | None


def conclude(out: Path, *, report: bool = True, plots: bool = True) -> Conclusion:
    """Write `table.json`, `table.md`, the report and the plots of each run, from saved runs alone.

    Args:
        out: folder of the comparison.
        report: whether to write the page.
        plots: whether to draw the curves of each run that has none yet.
    """
    comparison = record.load_comparison(out)
    task = tasks.get(comparison.meta["task"])
    config = from_plain(task.config, comparison.meta["config"], str(out / COMPARISON))
    page = task.page(config)
    table = summary.table(comparison, page.metrics)
    record.write_json(out / "table.json", {"methods": table})
    record.write_text(out / "table.md", summary.markdown(table, page.metrics))
    if plots:
        _draw(comparison, page)
    written = _report(comparison, task, config) if report else None
    return Conclusion(comparison, page, table, _warnings(comparison), written)


def _report(comparison: Comparison, task: Task, config: Experiment) -> Path:
    from . import report

    return report.write(comparison, task, config)


def _draw(comparison: Comparison, page: Page) -> None:
    from .report import plots

    for run in comparison.runs:
        if run.result is not None and not (run.folder / "plots").exists():
            plots.save_run(run, page)


def _warnings(comparison: Comparison) -> tuple[str, ...]:
    said: dict[str, list[str]] = {}
    for run in comparison.runs:
        label = f"{run.name}/seed-{run.seed}"
        if run.diverged is not None:
            said.setdefault(f"diverged {run.diverged}", []).append(label)
        for text in run.result["warnings"] if run.result is not None else ():
            said.setdefault(text, []).append(label)
    data = {run.result["fingerprint"] for run in comparison.runs if run.result is not None}
    if len(data) > 1:
        said["The runs were made on different data; do not compare them."] = ["all"]
    return tuple(f"{', '.join(_few(labels))}: {text}" for text, labels in said.items())


def _few(labels: Sequence[str]) -> list[str]:
    return [*labels[:3], f"{len(labels) - 3} more"] if len(labels) > 4 else list(labels)
