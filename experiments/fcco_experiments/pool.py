"""Worker processes, each with a pipe of its own.

One that is killed takes no lock and no other run with it, as it would with a shared queue.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .events import Event, Outcome
from .spec import RunSpec
from .work import LoadError, Order, Tell, load, one

__all__ = ["Pool"]

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
