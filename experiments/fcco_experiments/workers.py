"""Many runs, in this process or over several worker processes: the same, bit for bit.

Each worker has a pipe of its own: one that is killed takes no lock and no other run with it, as it
would with a shared queue.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from . import distributed, engine, store, tasks
from .environment import available_cores
from .store import Event, Outcome, RunSpec
from .task import Problem, Progress

__all__ = ["LoadError", "Stop", "Tell", "fetch", "interruptible", "load", "run"]

Tell = Callable[[Event], None]
FAILURE = "failure.txt"


class LoadError(Exception):
    """The data of a task cannot be loaded, so no run can start.

    Args:
        message: why.
        details: a traceback, when the reason is not the user's.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message, details)
        self.details = details

    def __str__(self) -> str:
        return self.args[0]


@dataclass(frozen=True)
class Order:
    """What is the same for all runs.

    Args:
        out: folder of the comparison.
        resume: go on from checkpoints.
        tensorboard: whether to write scalars for TensorBoard.
        threads: of torch.
    """

    out: Path
    resume: bool = False
    tensorboard: bool = False
    threads: int = 1


def load(spec: RunSpec, tell: Tell) -> Problem:
    """Data and model of a run, and of all others of its experiment.

    Raises:
        LoadError: whatever goes wrong.
    """
    tell(Event("loading", spec.label, text=spec.config.data))
    with _loading():
        return tasks.get(spec.task).load(spec.config)


def fetch(spec: RunSpec, progress: Progress) -> None:
    """Let the task of a run bring its data to this machine, if it has a way to.

    Raises:
        LoadError: whatever goes wrong.
    """
    with _loading():
        tasks.get(spec.task).fetch(spec.config, progress)


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Our own errors and those about files and values say all there is to say.
        ours = type(error).__module__.partition(".")[0] == "fcco"
        said = ours or isinstance(error, (OSError, ValueError))
        text = str(error) or type(error).__name__
        raise LoadError(text, "" if said else traceback.format_exc()) from error


def one(
    spec: RunSpec, problem: Problem, order: Order, tell: Tell, stop: Callable[[], bool]
) -> Outcome:
    """A run whose failure is an outcome; its traceback lies in `failure.txt`."""
    folder = spec.folder(order.out)
    (folder / FAILURE).unlink(missing_ok=True)
    try:
        return engine.train(
            spec, folder, problem, resume=order.resume, stop=stop, on_event=tell,
            tensorboard=order.tensorboard,
        )  # fmt: skip
    except Exception as error:
        return _failed(spec, folder, error, tell)


def _failed(spec: RunSpec, folder: Path, error: Exception, tell: Tell) -> Outcome:
    """Keep the traceback and say what it was, once; ranks that are out of step cannot go on."""
    cause, in_step = distributed.first_failure(error), distributed.raised_on_all(error)
    if in_step:
        cause = cause._replace(rank=0)  # all have it: the first speaks
    text = (
        cause.text if in_step else f"{cause.text} (rank {cause.rank} of {distributed.world_size()})"
    )
    mine = cause.rank == distributed.rank()
    if mine or distributed.rank() == 0:  # not every machine may have the same disk
        folder.mkdir(parents=True, exist_ok=True)
        store.write_text(folder / FAILURE, cause.details)
    if mine:
        tell(Event("failed", spec.label, text=text, details=str(folder / FAILURE)))
    if not in_step:
        raise distributed.OutOfStep(text)
    return Outcome(spec.label, "failed", text)


def run(
    specs: Sequence[RunSpec],
    out: Path,
    *,
    workers: int | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    on_event: Tell = lambda event: None,
    threads: int = 1,
) -> list[Outcome]:
    """Do all runs; one that diverges or fails does not stop the others.

    On Ctrl-C (or SIGTERM) every run under way ends its step, saves itself and is `"stopped"`, as
    are those not begun. A second Ctrl-C kills.

    On several ranks (torchrun) the runs come one after another, each on all ranks.

    Args:
        specs: of one experiment.
        out: folder of the comparison.
        workers: processes; unless given, as many as this process has cores, or one on a GPU,
            whose memory they would share; 1 works in this process, as several ranks always do.
        resume: go on from checkpoints.
        tensorboard: whether to write scalars for TensorBoard.
        on_event: told what happens, in this process.
        threads: of torch in each process; another number may round differently.

    Raises:
        LoadError: when the task cannot load its data.
    """
    order = Order(out, resume, tensorboard, threads)
    number = min(_usual(specs) if workers is None else workers, len(specs))
    with interruptible() as asked:
        if number > 1 and distributed.world_size() == 1:
            outcomes = Pool(specs, order, on_event, asked, number).run()
        else:
            outcomes = _here(specs, order, on_event, asked)
    ended = {outcome.run: outcome for outcome in outcomes}
    return [ended.get(spec.label, Outcome(spec.label, "stopped")) for spec in specs]


def _usual(specs: Sequence[RunSpec]) -> int:
    """Processes when no number was given."""
    wanted = (specs[0].config.preferred_device if specs else None) or "cpu"
    return 1 if distributed.device(wanted).type == "cuda" else available_cores()


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether the user has asked to stop; asking twice raises."""
    times = 0

    def handle(*signal_and_frame: Any) -> None:
        nonlocal times
        times += 1
        if times > 1:
            raise KeyboardInterrupt

    def asked() -> bool:
        return times > 0

    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals reach the main thread alone
        return
    held = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)


class Stop:
    """Whether the user has asked to stop; says so once.

    Args:
        asked: whether.
        tell: told when.
    """

    def __init__(self, asked: Callable[[], bool], tell: Tell) -> None:
        self.asked, self.tell, self.told = asked, tell, False

    def __call__(self) -> bool:
        """Ask."""
        if self.asked() and not self.told:
            self.told = True
            self.tell(Event("stopping", ""))
        return self.told


def _here(
    specs: Sequence[RunSpec], order: Order, tell: Tell, asked: Callable[[], bool]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(order.threads)
    stop = Stop(asked, tell)
    try:
        problem = distributed.run_on_all(lambda: load(specs[0], tell)) if specs else None
        for spec in specs:
            if distributed.any_rank(stop()):
                break
            assert problem is not None
            outcomes.append(one(spec, problem, order, tell, stop))
    finally:
        torch.set_num_threads(threads)
    return outcomes


_LOOK_EVERY = 0.05  # seconds between two looks at the pipe in a worker


def _work(pipe: Connection, order: Order) -> None:
    """A worker process: takes a spec, sends events, then the outcome."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and says so
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(order.threads)
    ear = _Ear(pipe)
    problem = None
    while (spec := ear.next()) is not None:
        if problem is None:
            try:
                problem = load(spec, ear.send)
            except LoadError as error:
                ear.send(error)
                return
            if ear.stop(at_once=True):
                return
        ear.send(one(spec, problem, order, ear.send, ear.stop))


class _Ear:
    """The worker's end of the pipe. When the parent is gone, that means: save and stop."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.stopped, self.looked = pipe, False, 0.0

    def next(self) -> RunSpec | None:
        try:
            return None if self.stopped else self.pipe.recv()
        except (EOFError, OSError):
            return None

    def send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            self.stopped = True

    def stop(self, at_once: bool = False) -> bool:
        now = time.monotonic()
        if not self.stopped and (at_once or now - self.looked > _LOOK_EVERY):
            self.looked = now
            try:
                self.stopped = self.pipe.poll()  # only one thing is said during a run
            except OSError:
                self.stopped = True
        return self.stopped


@dataclass(eq=False)
class _Worker:
    """The parent's view of a worker."""

    process: Any
    pipe: Connection
    spec: RunSpec | None = None


class Pool:
    """Workers, and the runs that wait for them.

    Args:
        specs: the runs.
        order: what is the same for all.
        tell: told what happens.
        asked: whether the user wants to stop.
        number: of processes.
    """

    def __init__(
        self,
        specs: Sequence[RunSpec],
        order: Order,
        tell: Tell,
        asked: Callable[[], bool],
        number: int,
    ) -> None:
        self.waiting, self.order, self.tell, self.asked = deque(specs), order, tell, asked
        self.number, self.outcomes = number, list[Outcome]()
        self.workers: list[_Worker] = []

    def run(self) -> list[Outcome]:
        """The outcomes of the runs that were begun, in the order of their ends."""
        told = False
        try:
            self._fill()
            while self.workers:
                pipes: dict[Any, _Worker] = {worker.pipe: worker for worker in self.workers}
                for ready in wait(list(pipes), timeout=0.1):
                    self._hear(pipes[ready])
                if self.asked() and not told:
                    told = True
                    self.tell(Event("stopping", ""))
                    self.waiting.clear()
                    for worker in self.workers:
                        self._say(worker, None)
        finally:
            for worker in self.workers:
                worker.process.kill()
                worker.process.join()
        return self.outcomes

    def _fill(self) -> None:
        while self.waiting and len(self.workers) < self.number and not self.asked():
            worker = self._start()
            self.workers.append(worker)
            self._next(worker)

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
        ours, theirs = context.Pipe()
        # Not a daemon: those may not have processes of their own, which data loaders need.
        process = context.Process(target=_work, args=(theirs, self.order))
        with _blocked(signal.SIGINT), _threads(self.order.threads):
            process.start()
        theirs.close()  # or the end of the worker would not end the pipe
        return _Worker(process, ours)

    def _next(self, worker: _Worker) -> None:
        worker.spec = self.waiting.popleft() if self.waiting else None
        self._say(worker, worker.spec)
        if worker.spec is None:
            self._dismiss(worker)

    def _say(self, worker: _Worker, message: RunSpec | None) -> None:
        with contextlib.suppress(OSError):  # a dead one is noticed when it is heard
            worker.pipe.send(message)

    def _hear(self, worker: _Worker) -> None:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self._ended(worker)
            return
        if isinstance(message, Outcome):
            self.outcomes.append(message)
            self._next(worker)
        elif isinstance(message, Event):
            self.tell(message)
        else:
            raise message

    def _dismiss(self, worker: _Worker) -> None:
        worker.process.join()
        worker.pipe.close()
        self.workers.remove(worker)

    def _ended(self, worker: _Worker) -> None:
        """A worker went without a word: killed, or asked to stop before its first step."""
        self._dismiss(worker)
        code = worker.process.exitcode
        if worker.spec is None or (code == 0 and self.asked()):
            return
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        text = f"its process died ({how}); --resume goes on with it"
        self.outcomes.append(Outcome(worker.spec.label, "failed", text))
        self.tell(Event("failed", worker.spec.label, text=text))
        self._fill()


@contextlib.contextmanager
def _blocked(number: int) -> Iterator[None]:
    """Hold a signal back while a process starts, which inherits that; deliver it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its own start would let the signal through
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    """Let a new process know at its start how many threads to make."""
    held = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(number)
    try:
        yield
    finally:
        if held is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = held
