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

from .. import environment, store, tasks
from ..config import ConfigError, from_plain, plain
from ..store import COMPARISON, Event, FolderError, Outcome, RunSpec, differences
from ..task import Experiment, Problem, Progress
from . import engine, jobs, workers
from .fleets import Fleets


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison."""

    task: str  # a name that every process knows, or `module:attribute`
    config_name: str  # for the folder
    config: Experiment  # with all methods and seeds
    specs: tuple[RunSpec, ...]
    quick: bool = False  # whether it is the fast version


def plan(task: str, config_name: str, config: Experiment, *, quick: bool = False) -> Plan:
    """Every method with every seed; the first seed of all methods comes first."""
    task = tasks.portable(task)
    for name in config.methods:
        if not store.is_folder_name(name):
            raise ConfigError(
                f"methods: {name!r} cannot be the name of a method, because a folder gets that "
                "name: no slashes, and no dot at its start."
            )
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
    fleets: Fleets | None = None,
    ray: str | None = None,
) -> list[Outcome]:
    """Do the runs that are not finished yet.

    Args:
        plan: the runs.
        out: their folder; one that cannot be used is refused before anything in it is changed.
        resume: go on with the runs in the folder; their methods and seeds stay in the comparison.
        overwrite: delete the runs in the folder, after all checks.
        workers_: processes.
        tensorboard: whether to write scalars for TensorBoard.
        on_event: called with each event.
        fetching: entered while the task downloads its data; yields the `Progress` to call.
        fleets: trains the runs that a fleet can hold together.
        ray: the address of a Ray cluster that trains, with `out` on a path that all machines see.
    """
    with contextlib.ExitStack() as lock:
        meta, done_before = _open(plan, out, resume, overwrite, lock)
        todo = [spec for spec in plan.specs if spec.label not in done_before]
        problem: Problem | None = None
        if todo and (ray is None or fleets is not None):  # else each machine of Ray fetches its own
            with fetching or contextlib.nullcontext(lambda *download: None) as progress:
                problem = jobs.fetch(todo[0], progress)
        if fleets is None and workers.processes(todo, workers_) > 1:
            problem = None  # each process loads its own
        _begin(out, meta, overwrite)
        for label in done_before:
            on_event(Event("finished", label, text="was finished"))
        ended = workers.run(
            todo, out.resolve() if ray else out, workers=workers_, resume=resume,
            tensorboard=tensorboard, on_event=on_event, problem=problem, fleets=fleets, ray=ray,
        )  # fmt: skip
    done = {label: Outcome(label, "finished", "was finished") for label in done_before}
    done |= {outcome.run: outcome for outcome in ended}
    return [done[spec.label] for spec in plan.specs]


def _open(
    plan: Plan, out: Path, resume: bool, overwrite: bool, lock: contextlib.ExitStack
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Check and lock a folder: its new `comparison.json`, and the labels of finished runs."""
    store.prepare(out, resume=resume, overwrite=overwrite)
    lock.enter_context(store.locked(out))
    # Again: another process may have been at work until now.
    store.prepare(out, resume=resume, overwrite=overwrite)
    if not resume:
        return _meta(plan, {}), ()
    with store.reading(out):
        meta = _meta(plan, _before(plan, out))
        lines = store.finished_in_fleets(out, plan.specs)
        return meta, tuple(
            spec.label
            for spec in plan.specs
            if spec.label in lines
            or engine.finished_result(spec, spec.folder(out), resume=True) is not None
        )


def _begin(out: Path, meta: dict[str, Any], overwrite: bool) -> None:
    if overwrite:
        store.remove_runs(out)
    store.write_json(out / COMPARISON, meta)


def _before(plan: Plan, out: Path) -> dict[str, Any]:
    """`comparison.json` of earlier runs; refused when they are of another experiment."""
    if not (out / COMPARISON).exists():
        return {}
    meta = store.read_meta(out)
    if meta["task"] == plan.task:
        saved = from_plain(type(plan.config), meta["config"], str(out / COMPARISON))
        meta |= {"config": saved}
        changes = differences(
            _common(saved, plan.config), _common(plan.config, saved), plan.config.incidental
        )
    else:
        changes = [f"`task` was {meta['task']!r} and is {plan.task!r} now"]
    if changes:
        raise FolderError(
            f"{out} has runs of another config: {'; '.join(changes)}. Choose another place with "
            "--out, or start anew with --overwrite."
        )
    return meta


def _common(config: Experiment, other: Experiment) -> dict[str, Any]:
    """What must be the same in both: all but the seeds and the methods that only one has."""
    values = plain(config)
    del values["seeds"]
    methods = values.pop("methods")
    return {"config": values, "methods": {k: methods[k] for k in methods if k in other.methods}}


def _meta(plan: Plan, before: dict[str, Any]) -> dict[str, Any]:
    """The new `comparison.json`, with the methods and seeds of earlier runs first."""
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
