"""A comparison: several methods and seeds, one table, one report."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcco import __version__

from . import distributed, engine, environment, stats, store, tasks, workers
from .config import from_plain, plain
from .stats import Table
from .store import COMPARISON, Event, FolderError, Outcome, RunSpec, differences
from .task import Experiment, Page, Progress, Rule
from .workers import fetch

__all__ = ["Conclusion", "Plan", "conclude", "execute", "plan"]

Runner = Callable[..., list[Outcome]]
"""Does runs, as `workers.run` does, or `fleets.run`, which trains them together."""


@dataclass(frozen=True)
class Plan:
    """What will be run, apart from how.

    Args:
        task: a name that every process knows, or `"module:attribute"`.
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
    task = tasks.portable(task)
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
    fetching: AbstractContextManager[Progress] | None = None,
    runner: Runner = workers.run,
) -> list[Outcome]:
    """Do what is not finished yet.

    Args:
        plan: the runs.
        out: their folder.
        resume: go on with what lies there; its methods and seeds stay in the comparison.
        overwrite: delete the runs that lie there, after all checks.
        workers_: processes.
        tensorboard: whether to write scalars for TensorBoard.
        on_event: told what happens.
        fetching: entered while the task brings its data to this machine, which it is told about.
        runner: what does the runs.

    Raises:
        FolderError: when the folder cannot be used; nothing in it was touched then.
        LoadError: when the task cannot bring or load its data.
    """
    distributed.run_on_all(lambda: distributed.check_same_plan(plan.specs))
    with contextlib.ExitStack() as held:
        ready = distributed.run_on_first(lambda: _open(plan, out, resume, overwrite, held))
        todo = [spec for spec in plan.specs if spec.label not in ready.done]
        if todo:
            with fetching or contextlib.nullcontext(_silent) as progress:
                distributed.run_on_each_machine(lambda: fetch(todo[0], progress))
        distributed.run_on_first(lambda: _begin(out, ready))
        for label in ready.done:
            on_event(Event("finished", label, text="was finished"))
        ended = runner(
            todo,
            out,
            workers=workers_,
            resume=ready.resume,
            tensorboard=tensorboard,
            on_event=on_event,
        )
    done = {label: Outcome(label, "finished", "was finished") for label in ready.done}
    done |= {outcome.run: outcome for outcome in ended}
    return [done[spec.label] for spec in plan.specs]


@dataclass(frozen=True)
class _Ready:
    """How to go on with a folder that may be used.

    Attributes:
        resume: from the checkpoints that are there.
        overwrite: delete what is there.
        meta: what the folder will say.
        done: labels of the runs that are finished.
    """

    resume: bool
    overwrite: bool
    meta: dict[str, Any]
    done: tuple[str, ...]


def _open(
    plan: Plan, out: Path, resume: bool, overwrite: bool, held: contextlib.ExitStack
) -> _Ready:
    """Check and lock a folder; nothing in it is touched."""
    store.prepare(out, resume=resume, overwrite=overwrite)
    held.enter_context(store.locked(out))
    # Again: another process may have been at work until now.
    store.prepare(out, resume=resume, overwrite=overwrite)
    meta = _meta(plan, _before(plan, out) if resume else {})
    lines = store.finished_in_fleets(out, plan.specs) if resume else set()
    labels = (
        spec.label
        for spec in plan.specs
        if spec.label in lines
        or (resume and engine.check_folder(spec, spec.folder(out), resume=True))
    )
    return _Ready(resume, overwrite, meta, tuple(labels))


def _begin(out: Path, ready: _Ready) -> None:
    if ready.overwrite:
        store.remove_runs(out)
    store.write_json(out / COMPARISON, ready.meta)


def _silent(what: str, done: int, total: int | None) -> None:
    """Tell nobody about downloads."""


def _before(plan: Plan, out: Path) -> dict[str, Any]:
    """What the folder says of its runs; refused when they are of another experiment."""
    if not (out / COMPARISON).exists():
        return {}
    meta = store.read_meta(out)
    if meta["task"] == plan.task:
        saved = from_plain(type(plan.config), meta["config"], str(out / COMPARISON))
        meta |= {"config": saved}
        found = differences(
            _common(saved, plan.config), _common(plan.config, saved), plan.config.incidental
        )
    else:
        found = [f"`task` was {meta['task']!r} and is {plan.task!r} now"]
    if found:
        raise FolderError(
            f"{out} has runs of another config: {'; '.join(found)}. Choose another place with "
            "--out, or start anew with --overwrite."
        )
    return meta


def _common(config: Experiment, other: Experiment) -> dict[str, Any]:
    """What must be the same in both: all but the methods that only one has, and the seeds."""
    values = plain(config)
    methods = {name: values["methods"][name] for name in config.methods if name in other.methods}
    rest = {key: value for key, value in values.items() if key not in ("methods", "seeds")}
    return {"config": rest, "methods": methods}


def _meta(plan: Plan, before: dict[str, Any]) -> dict[str, Any]:
    """What the folder will say, with the methods and seeds of its earlier runs first."""
    config = plan.config
    if before:
        saved: Experiment = before["config"]
        config = dataclasses.replace(
            config,
            methods=saved.methods | config.methods,
            seeds=tuple(dict.fromkeys((*saved.seeds, *config.seeds))),
        )
    return {
        "task": plan.task,
        "config_name": before.get("config_name", plan.config_name),
        "config": plain(config),
        "command": before.get("command", environment.command()),
        "created": before.get("created", environment.now()),
        "fcco": __version__,
        "methods": list(config.methods),
        "seeds": list(config.seeds),
        "quick": before.get("quick", plan.quick),
    }


@dataclass(frozen=True)
class Conclusion:
    """What is known after the runs.

    Attributes:
        page: words and metrics of the task.
        rule: what is judged, None for a task that judges nothing.
        verdict: who won, paragraphs; empty where no run has finished.
        next_steps: what to try next.
        table: mean and deviation by method and metric.
        warnings: a line for each kind, with the runs it is about.
        report: the HTML page.
    """

    page: Page
    rule: Rule | None
    verdict: tuple[str, ...]
    next_steps: tuple[str, ...]
    table: Table
    warnings: tuple[str, ...]
    report: Path


def conclude(out: Path) -> Conclusion:
    """Write `table.json`, `table.md` and the report, from saved runs alone."""
    from . import report, results
    from .report.page import alerts, by_method, final_rows

    comparison = store.load_comparison(out)
    task, config = results.problem(comparison)
    page, rule = task.page(config), stats.judged_by(task, config)
    table = results.table(comparison, page.metrics)
    if (out / COMPARISON).is_file():  # published results are left as they are
        results.write_table(out, table)
        store.write_text(out / "table.md", stats.markdown(table, page.metrics, rule))
    runs = by_method(comparison)
    final = final_rows(runs)
    verdict = task.verdict(config, final) if final else ()
    steps = task.next_steps(config, final) if final else ()
    said = alerts(task, config, runs, comparison.meta["seeds"]) if comparison.runs else ()
    warnings = tuple(f"{each.who}: {each.text}" for each in said)
    path = out / "report.html"
    store.write_text(path, report.render(comparison, table, task, config))
    return Conclusion(page, rule, verdict, steps, table, warnings, path)
