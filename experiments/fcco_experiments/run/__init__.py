"""Plans of runs, and who does them: this process, or workers, which change no number.

Each worker has a pipe of its own. With a shared queue, a worker that is killed could keep its lock,
and the others would wait for ever. On a signal every run saves itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fcco import __version__

from .. import environment, store
from ..config import plain
from ..store import COMPARISON, FLEET_FOLDER, Event, FolderError, Outcome, RunSpec, differences
from ..task import Experiment, Problem
from . import engine
from .cluster import Cluster
from .engine import Job, LoadError, Run, Stop, Tell, load
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


# --- signals --------------------------------------------------------------------------------------

_SIGNALS = [signal.SIGINT, signal.SIGTERM]
if hasattr(signal, "SIGHUP"):  # the terminal or the connection is gone
    _SIGNALS.append(signal.SIGHUP)


@contextlib.contextmanager
def stoppable(on_event: Tell) -> Iterator[tuple[Tell, Stop]]:
    """Inside, a signal asks to stop; a second one raises `KeyboardInterrupt`.

    Yields `on_event` without the errors of a terminal that is gone, and whether to stop.
    """
    times, told = 0, False

    def handle(*signal_and_frame: Any) -> None:
        nonlocal times
        times += 1
        if times > 1:
            raise KeyboardInterrupt

    def tell(event: Event) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more
            on_event(event)

    def stop() -> bool:
        nonlocal told
        if times and not told:
            told = True
            tell(Event("stopping", ""))
        return told

    before = {}
    if threading.current_thread() is threading.main_thread():  # signals reach it alone
        for number in _SIGNALS:
            before[number] = signal.signal(number, handle)
            if before[number] == signal.SIG_IGN and number != signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)  # `nohup` wants it ignored
    try:
        yield tell, stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- worker processes -----------------------------------------------------------------------------


def _work(pipe: Connection) -> None:
    """A worker process: receives a job, sends events, then the outcomes."""
    for number in _SIGNALS:  # the parent decides, and sends a message
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = _ParentPipe(pipe)
    problem = None
    while (job := parent.next()) is not None:
        if problem is None:
            try:
                problem = load(job.specs[0], parent.send)
            except LoadError as error:
                parent.send(error)
                return
            if parent.stop():
                return
        parent.send(job.do(problem, parent.send, parent.stop))


class _ParentPipe:
    """The worker's end of the pipe. When the parent is gone, the worker saves its run and stops."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.stopped, self.looked = pipe, False, 0.0

    def next(self) -> Job | None:
        try:
            return None if self.stopped else self.pipe.recv()
        except (EOFError, OSError):
            return None

    def send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            self.stopped = True

    def stop(self) -> bool:
        now = time.monotonic()
        if not self.stopped and now - self.looked > 0.05:  # seconds; a look takes microseconds
            self.looked = now
            try:
                self.stopped = self.pipe.poll()  # any message during a run means: stop
            except OSError:
                self.stopped = True
        return self.stopped


class _Worker:
    """The parent's view of a worker."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
        self.pipe, theirs = context.Pipe()
        # Not a daemon: those may not have processes of their own, which data loaders need.
        self.process: Any = context.Process(target=_work, args=(theirs,))
        with _blocked_signals():
            self.process.start()
        theirs.close()  # or the end of the worker would not end the pipe
        self.job: Job | None = None  # what it does

    def assign(self, job: Job | None) -> None:
        """Give it a job, or None, after which it ends."""
        self.job = job
        self.send(job)

    def send(self, message: Job | None) -> None:
        """A message during a job means: stop."""
        with contextlib.suppress(OSError):  # it is dead, which `ended` notices
            self.pipe.send(message)

    def ended(self, stopped: bool, tell: Tell) -> list[Outcome]:
        """The outcomes of a worker that is gone; it was killed, unless it was asked to stop."""
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode
        if self.job is None or (code == 0 and stopped):
            return []
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return self.job.died(how, tell)


def pool(jobs: Sequence[Job], number: int, tell: Tell, stop: Stop) -> list[Outcome]:
    """Do jobs in so many processes; the outcomes of those that were begun."""
    waiting, outcomes, stopped = deque(jobs), list[Outcome](), False
    workers: dict[Any, _Worker] = {}
    try:
        while workers or waiting:
            if stop() and not stopped:
                stopped = True
                waiting.clear()
                for worker in workers.values():
                    worker.send(None)
            while waiting and len(workers) < number:
                worker = _Worker()
                workers[worker.pipe] = worker
                worker.assign(waiting.popleft())
            for pipe in wait(list(workers), timeout=0.1):
                worker = workers[pipe]
                try:
                    message = worker.pipe.recv()
                except (EOFError, OSError):
                    del workers[pipe]
                    outcomes += worker.ended(stopped, tell)
                    continue
                if isinstance(message, Event):
                    tell(message)
                elif isinstance(message, LoadError):
                    raise message
                else:
                    outcomes += message
                    worker.assign(waiting.popleft() if waiting else None)
    finally:
        for worker in workers.values():
            worker.process.kill()
            worker.process.join()
    return outcomes


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Hold Ctrl-C and SIGHUP back while a process starts, which inherits that."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its own start would let the signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
