"""A comparison: several methods and seeds, one table, one report."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcco import __version__

from .. import environment, store, tasks
from ..config import plain
from ..store import COMPARISON, FLEET_FOLDER, Event, FolderError, Outcome, RunSpec, differences
from ..task import Experiment, Problem
from . import engine
from .cluster import Cluster
from .engine import Job, Run, Stop, Tell
from .fleets import Fleets
from .workers import pool, stoppable


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
    workers: int | None = None,
    on_event: Tell = lambda event: None,
    fleets: Fleets | None = None,
    ray: str | None = None,
) -> list[Outcome]:
    """Do the runs that are not finished yet; one that diverges or fails does not stop the others.

    On Ctrl-C (or SIGTERM, SIGHUP) every run under way ends its step, saves itself and is
    `"stopped"`, as are those not begun. A second Ctrl-C kills.

    Args:
        plan: the runs.
        out: their folder; one that cannot be used is refused before anything in it is changed.
        resume: go on with the runs in the folder; their methods and seeds stay in the comparison.
        overwrite: delete the runs in the folder, after all checks.
        workers: processes; unless given, as many as this process has cores, or one on a GPU, whose
            memory they would share; 1 works in this process.
        on_event: called with each event, in this process.
        fleets: trains the runs that a fleet can hold together, before the others.
        ray: the address of a Ray cluster that trains, with `out` on a path that all machines see.
    """

    def look() -> tuple[dict[str, Any], list[RunSpec]]:
        """`comparison.json` of earlier runs, and what is to be done; nothing is changed."""
        store.prepare(out, resume=resume, overwrite=overwrite)
        if not (resume and out.exists()):
            return {}, list(plan.specs)
        with store.reading(out):
            return _earlier(plan, out), _unfinished(plan, out)

    _, todo = look()
    problem: Problem | None = None
    # Wrong data are refused before anything is changed, and features are made once; on a cluster
    # each machine has its own.
    if todo and (ray is None or fleets is not None):
        problem = engine.load(todo[0], on_event)
    with contextlib.ExitStack() as stack:
        stack.enter_context(store.locked(out))
        before, todo = look()  # another process may have been at work until now
        if overwrite:
            store.remove_runs(out)
        store.write_json(out / COMPARISON, _meta(plan, before))
        left = {spec.label for spec in todo}
        finished = [spec.label for spec in plan.specs if spec.label not in left]
        done = {label: Outcome(label, "finished", "was finished") for label in finished}
        for label in finished:
            on_event(Event("finished", label, text="was finished"))
        if todo:
            tell, stop = stack.enter_context(stoppable(on_event))
            cluster = None if ray is None else stack.enter_context(Cluster(ray))
            place = out.resolve() if ray else out
            jobs: list[Job] = []
            if fleets is not None:
                problem = problem or engine.load(todo[0], tell)
                gpus = None if cluster is None else cluster.gpus(fleets.wanted(todo[0]))
                jobs += fleets.jobs(todo, place, problem, gpus)
            held = {spec.label for job in jobs for spec in job.specs}
            device = plan.config.preferred_device or "cpu"
            alone = [s for s in todo if s.label not in held]
            runs: list[Job] = [Run((s,), place, device) for s in alone]
            if cluster is not None:
                ended = cluster.run([*jobs, *runs], tell, stop)
            else:
                ended = _do(jobs, problem, tell, stop)
                if (number := processes(alone, workers)) > 1:
                    problem = None  # each process loads its own
                    ended += pool(runs, number, tell, stop)
                elif runs:
                    with engine.threads(1):
                        ended += _do(runs, problem, tell, stop)
            done |= {outcome.run: outcome for outcome in ended}
    return [done.get(spec.label, Outcome(spec.label, "stopped")) for spec in plan.specs]


def _do(jobs: Sequence[Job], problem: Problem | None, tell: Tell, stop: Stop) -> list[Outcome]:
    """One job after another, in this process."""
    outcomes: list[Outcome] = []
    for job in jobs:
        if stop():
            break
        problem = problem or engine.load(job.specs[0], tell)
        outcomes += job.do(problem, tell, stop)
    return outcomes


def processes(specs: Sequence[RunSpec], workers: int | None) -> int:
    """How many processes train runs of one experiment; 1 means none but this."""
    if workers is None and specs:
        device = environment.device(specs[0].config.preferred_device or "cpu")
        workers = 1 if device.type == "cuda" else environment.available_cores()
    return min(workers or 1, len(specs))


def _unfinished(plan: Plan, out: Path) -> list[RunSpec]:
    """The runs that have no result yet; refuses a folder with runs of other settings."""
    lines, left = store.read_fleet_lines(out), list[RunSpec]()
    for spec in plan.specs:
        if spec.label in lines:
            saved = {"method": lines[spec.label]["method"]}
            changes = differences(saved, {"method": plain(spec.method)})
            store.refuse(f"{out / FLEET_FOLDER} has another run {spec.label}", changes)
        elif engine.finished_result(spec, spec.folder(out)) is None:
            left.append(spec)
    return left


def _earlier(plan: Plan, out: Path) -> dict[str, Any]:
    """`comparison.json` of earlier runs; refused when they are of another experiment."""
    if not (out / COMPARISON).exists():
        return {}
    meta, now = store.read_meta(out), plain(plan.config)
    if not isinstance(meta["config"].get("methods"), dict):
        raise FolderError(f"{out / COMPARISON} is damaged: its config has no methods.")
    if meta["task"] == plan.task:
        saved = _common(meta["config"], now)
        changes = differences(saved, _common(now, meta["config"]), plan.config.incidental)
    else:
        changes = [f"`task` was {meta['task']!r} and is {plan.task!r} now"]
    store.refuse(f"{out} has runs of another config", changes)
    return meta


def _common(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in both: all but the seeds and the methods that only one has."""
    methods = {name: m for name, m in config["methods"].items() if name in other["methods"]}
    values = {key: value for key, value in config.items() if key not in ("seeds", "methods")}
    return {"config": values, "methods": methods}


def _meta(plan: Plan, before: dict[str, Any]) -> dict[str, Any]:
    """The new `comparison.json`, with the methods and seeds of earlier runs first."""
    config = plain(plan.config)
    if before:
        config["methods"] = before["config"]["methods"] | config["methods"]
        config["seeds"] = list(dict.fromkeys(before["seeds"] + config["seeds"]))
    return {
        "task": plan.task,
        "config_name": before.get("config_name", plan.config_name),
        "config": config,
        "command": before.get("command", environment.command()),
        "created": before.get("created", environment.now()),
        "fcco": __version__,
        "methods": list(config["methods"]),
        "seeds": config["seeds"],
        "quick": before.get("quick", plan.quick),
    }
