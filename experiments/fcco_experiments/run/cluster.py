"""Jobs on a Ray cluster: the same runs as here, bit for bit, wherever each of them is trained.

A job is a task of Ray that asks for a core, or for a GPU where the runs use one. Ray starts it anew
elsewhere when its machine is lost, and it goes on from its checkpoint: the folder of the runs must
be one that all machines see, under the same path. Events and the wish to stop go through an actor
on the machine of the command.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch

from ..config import ConfigError
from ..store import Event, Outcome
from ..task import Problem
from .engine import Job, LoadError, Stop, Tell, load

REPEATS = 20
"""How often a job is begun anew because its machine or its process was lost."""
_VARIABLES = ("FCCO_DATA", "FCCO_CACHE")


@dataclass(frozen=True)
class _Here:
    """What every process must know of this one."""

    jobs: tuple[Job, ...]
    folder: str
    words: tuple[str, ...]  # the command line
    variables: Mapping[str, str]
    mailbox: Any


class _Mailbox:
    """An actor: what jobs tell, and whether they are to stop."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.begun: list[int] = []
        self.stopped = False

    def tell(self, events: list[Event], begun: list[int]) -> bool:
        self.events += events
        self.begun += begun
        return self.stopped

    def take(self, stop: bool) -> tuple[list[Event], list[int]]:
        """All that is new."""
        new, self.stopped = (self.events, self.begun), stop
        self.events, self.begun = [], []
        return new


class Cluster:
    """A connection to a Ray cluster; use it in `with`.

    Args:
        address: of the head, as `10.0.0.1:6379`, or `auto`: that of the cluster of this machine.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def __enter__(self) -> Cluster:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ConfigError("--ray needs ray: pip install ray") from error
        self.ray: Any = ray
        place = urlsplit(self.address if "://" in self.address else f"ray://{self.address}")
        try:
            if self.address != "auto":  # Ray itself waits for minutes
                socket.create_connection((place.hostname, place.port), timeout=20).close()
            ray.init(address=self.address, log_to_driver=False, logging_level="error")
        except (OSError, ValueError, RuntimeError) as error:
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"--ray {self.address}: no Ray cluster can be used: {text}"
            ) from error
        return self

    def __exit__(self, *error: object) -> None:
        self.ray.shutdown()

    def gpus(self, device: str) -> int:
        """How many GPUs there are for jobs on a device; 0 where they use none."""
        there = int(self.ray.cluster_resources().get("GPU", 0))
        return {"auto": there, "cuda": max(there, 1)}.get(device, 0)

    def run(self, jobs: Sequence[Job], tell: Tell, stop: Stop) -> list[Outcome]:
        """The outcomes of the jobs that were begun; on `stop` those under way save themselves."""
        ray = self.ray
        if any(job.device == "cuda" for job in jobs) and not self.gpus("auto"):
            tell(Event("note", "", text="The cluster has no GPU now; the runs wait for one."))
        own = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        mailbox = ray.remote(_Mailbox).options(num_cpus=0, scheduling_strategy=own).remote()
        variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        words = tuple(sys.argv)
        here = ray.put(_Here(tuple(jobs), os.getcwd(), words, variables, mailbox))
        asked: Any = {"num_cpus": 1, "max_retries": REPEATS, "scheduling_strategy": "SPREAD"}
        gpus = {device: min(1, self.gpus(device)) for device in {job.device for job in jobs}}
        tasks = {d: ray.remote(_do).options(num_gpus=number, **asked) for d, number in gpus.items()}
        left = {tasks[job.device].remote(k, here): k for k, job in enumerate(jobs)}
        begun: set[int] = set()
        outcomes: list[Outcome] = []
        stopped = False
        while left:
            ended, _ = ray.wait(list(left), timeout=0.2)
            for number in self._hear(mailbox, tell, stopped):
                if number in begun:
                    text = "its process was lost; another one goes on from its checkpoint"
                    tell(Event("note", "", text=f"{jobs[number].title}: {text}."))
                begun.add(number)
            for done in ended:
                outcomes += self._outcomes(done, jobs[left.pop(done)], tell)
            if stop() and not stopped:
                stopped = True
                begun.update(self._hear(mailbox, tell, stopped))
                for waiting, number in left.items():
                    if number not in begun:
                        ray.cancel(waiting)
        self._hear(mailbox, tell, stopped)
        return outcomes

    def _hear(self, mailbox: Any, tell: Tell, stop: bool) -> list[int]:
        """Pass events on, and say whether to stop; the numbers of the jobs that were begun."""
        events, begun = self.ray.get(mailbox.take.remote(stop))
        for event in events:
            tell(event)
        return begun

    def _outcomes(self, done: Any, job: Job, tell: Tell) -> list[Outcome]:
        ray = self.ray
        try:
            return ray.get(done)
        except ray.exceptions.TaskCancelledError:
            return [Outcome(spec.label, "stopped") for spec in job.specs]
        except ray.exceptions.RayTaskError as error:  # raised by the job itself
            raise error.cause from None
        except ray.exceptions.RayError as error:
            return job.died(type(error).__name__, tell)


_loaded: list[Problem] = []
"""Data and model, once for all jobs of this process."""


def _do(number: int, here: _Here) -> list[Outcome]:
    """A task of Ray: one job, in a process on any machine."""
    job = here.jobs[number]
    sys.argv[:] = here.words
    os.environ.update(here.variables)
    with contextlib.suppress(OSError):  # where the paths of the command begin
        os.chdir(here.folder)
    torch.set_num_threads(1)  # another number may round differently
    with _Link(here.mailbox, number) as link:
        if link.stop():
            return [Outcome(spec.label, "stopped") for spec in job.specs]
        if not _loaded:
            like = job.specs[0]  # what is loaded is the same for all
            try:
                _loaded.append(load(like, link.tell))
            except LoadError as error:
                raise LoadError(
                    f"{error.args[0]} (on {socket.gethostname()})", *error.args[1:]
                ) from error
        return job.do(_loaded[0], link.tell, link.stop)


class _Link:
    """A job's way to the command. When that cannot be reached, the job saves itself and stops.

    A thread of its own waits for the answers: a task that waits in its main thread gives its core
    back to Ray, which begins another one there.
    """

    def __init__(self, mailbox: Any, number: int) -> None:
        self.mailbox, self.number = mailbox, number
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.tell = self.events.put
        self.stopped = self.over = False
        self.answered = threading.Event()
        self.thread = threading.Thread(target=self._exchange, daemon=True)

    def __enter__(self) -> _Link:
        self.thread.start()
        self.answered.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self.over = True
        self.thread.join()

    def stop(self) -> bool:
        return self.stopped

    def _exchange(self) -> None:
        import ray

        begun, last = [self.number], False
        while not last:
            last, events = self.over, list[Event]()
            while not self.events.empty():
                events.append(self.events.get())
            try:
                self.stopped |= ray.get(self.mailbox.tell.remote(events, begun))
            except ray.exceptions.RayError:
                self.stopped = last = True
            begun = []
            self.answered.set()
            if not last:
                time.sleep(0.2)
