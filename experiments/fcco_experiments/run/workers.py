"""Many runs, in this process or in several worker processes: the same numbers, bit for bit.

Each worker has a pipe of its own. With a shared queue, a worker that is killed could keep its lock,
and the others would wait for ever.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from .. import environment
from ..store import Event, Outcome, RunSpec
from ..task import Problem
from .cluster import Cluster
from .engine import Tell
from .fleets import Fleets
from .jobs import Job, LoadError, Run, Stop, load


def run(
    specs: Sequence[RunSpec],
    out: Path,
    *,
    workers: int | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    on_event: Tell = lambda event: None,
    problem: Problem | None = None,
    fleets: Fleets | None = None,
    ray: str | None = None,
) -> list[Outcome]:
    """Do all runs; one that diverges or fails does not stop the others.

    On Ctrl-C (or SIGTERM, SIGHUP) every run under way ends its step, saves itself and is
    `"stopped"`, as are those not begun. A second Ctrl-C kills.

    Args:
        specs: of one experiment.
        out: folder of the comparison.
        workers: processes; unless given, as many as this process has cores, or one on a GPU,
            whose memory they would share; 1 works in this process.
        resume: go on from checkpoints.
        tensorboard: whether to write scalars for TensorBoard.
        on_event: called with each event, in this process.
        problem: data and model, if they are loaded already; worker processes load their own.
        fleets: trains the runs that a fleet can hold together, before the others.
        ray: the address of a Ray cluster that does all of this, see `cluster.Cluster`.
    """
    if not specs:
        return []
    jobs: list[Job] = []
    outcomes: list[Outcome] = []
    with contextlib.ExitStack() as stack:
        tell, stop = stack.enter_context(stoppable(on_event))
        cluster = None if ray is None else stack.enter_context(Cluster(ray))
        if fleets is not None:
            problem = problem or load(specs[0], tell)
            gpus = None if cluster is None else cluster.gpus(fleets.wanted(specs[0]))
            jobs += fleets.jobs(specs, out, problem, tell, gpus)
        held = {spec.label for job in jobs for spec in job.specs}
        again = resume or cluster is not None  # there, a run may be begun twice
        device = specs[0].config.preferred_device or "cpu"
        alone = [Run((s,), out, device, again, tensorboard) for s in specs if s.label not in held]
        if cluster is not None:
            outcomes = cluster.run([*jobs, *alone], tell, stop)
        else:
            for job in jobs:
                outcomes += [] if stop() else job.do(problem, tell, stop)  # type: ignore[arg-type]
            if alone and not stop():
                number = processes([job.specs[0] for job in alone], workers)
                if number > 1:
                    outcomes += _Pool(deque(alone), tell, stop, number).run()
                else:
                    outcomes += _run_here(alone, tell, stop, problem)
    done = {outcome.run: outcome for outcome in outcomes}
    return [done.get(spec.label, Outcome(spec.label, "stopped")) for spec in specs]


def processes(specs: Sequence[RunSpec], workers: int | None) -> int:
    """How many processes `run` will start; 1 means none but this."""
    if not specs:
        return 1
    if workers is None:
        device = environment.device(specs[0].config.preferred_device or "cpu")
        workers = 1 if device.type == "cuda" else environment.available_cores()
    return min(workers, len(specs))


def _run_here(
    jobs: Sequence[Job], tell: Tell, stop: Stop, problem: Problem | None
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # another number may round differently
    try:
        loaded = problem or load(jobs[0].specs[0], tell)
        for job in jobs:
            if stop():
                break
            outcomes += job.do(loaded, tell, stop)
    finally:
        torch.set_num_threads(threads)
    return outcomes


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


@dataclass(eq=False)
class _Worker:
    """The parent's view of a worker."""

    process: Any
    pipe: Connection
    job: Job | None = None  # what it does

    def send(self, message: Job | None) -> None:
        with contextlib.suppress(OSError):  # it is dead, which `_Pool._receive` notices
            self.pipe.send(message)


@dataclass
class _Pool:
    """Workers (`number` processes), and the jobs that wait for them."""

    waiting: deque[Job]
    tell: Tell
    stop: Stop
    number: int
    outcomes: list[Outcome] = field(default_factory=list)
    workers: list[_Worker] = field(default_factory=list)

    def run(self) -> list[Outcome]:
        """The outcomes of the jobs that were begun, in the order of their ends."""
        stopped = False
        try:
            while self.workers or self.waiting:
                if self.stop() and not stopped:
                    stopped = True
                    self.waiting.clear()
                    for worker in self.workers:
                        worker.send(None)
                while self.waiting and len(self.workers) < self.number:
                    self.workers.append(worker := self._start())
                    self._assign(worker)
                pipes: dict[Any, _Worker] = {worker.pipe: worker for worker in self.workers}
                for ready in wait(list(pipes), timeout=0.1):
                    self._receive(pipes[ready])
        finally:
            for worker in self.workers:
                worker.process.kill()
                worker.process.join()
        return self.outcomes

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
        ours, theirs = context.Pipe()
        # Not a daemon: those may not have processes of their own, which data loaders need.
        process = context.Process(target=_work, args=(theirs,))
        with _blocked_signals():
            process.start()
        theirs.close()  # or the end of the worker would not end the pipe
        return _Worker(process, ours)

    def _assign(self, worker: _Worker) -> None:
        """Send the next job, or None, after which the worker ends."""
        worker.job = self.waiting.popleft() if self.waiting else None
        worker.send(worker.job)

    def _receive(self, worker: _Worker) -> None:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self._ended(worker)
            return
        if isinstance(message, list):
            self.outcomes += message
            self._assign(worker)
        elif isinstance(message, Event):
            self.tell(message)
        else:
            raise message

    def _ended(self, worker: _Worker) -> None:
        """Remove a worker; one that ended during a run was killed, unless it was asked to stop."""
        worker.process.join()
        worker.pipe.close()
        self.workers.remove(worker)
        code = worker.process.exitcode
        if worker.job is None or (code == 0 and self.stop()):
            return
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self.outcomes += worker.job.died(how, self.tell)


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
