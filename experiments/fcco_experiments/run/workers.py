"""Worker processes, which change no number, and signals, on which every run saves itself.

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
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ..store import Event, Outcome
from .engine import Job, LoadError, Stop, Tell, load

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
