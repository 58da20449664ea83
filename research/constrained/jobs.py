"""Many independent runs: processes, progress, and a file that lets an interrupted race resume."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .problems import make
from .training import Trace, train

__all__ = ["Job", "Runner", "run"]


@dataclass(frozen=True)
class Job:
    """One run, as data.

    Attributes:
        problem: its name.
        method: its name.
        setting: of the method.
        seed: of the initial weights and of the batches.
        shift: of the limits in training.
        evaluations: gradient evaluations, when not those of the problem's schedule.
    """

    problem: str
    method: str
    setting: dict[str, Any]
    seed: int
    shift: float = 0.0
    evaluations: int | None = None

    @property
    def key(self) -> str:
        """A text that tells jobs apart."""
        return json.dumps(asdict(self), sort_keys=True)


def run(job: Job) -> Trace:
    """Train as the job says."""
    torch.set_num_threads(1)
    problem = make(job.problem).shifted(job.shift)
    if job.evaluations is not None:
        problem.schedule = replace(problem.schedule, evaluations=job.evaluations)
    return train(problem, job.method, job.setting, job.seed)


@dataclass
class Runner:
    """Runs jobs, remembers their traces.

    Args:
        workers: processes; 1 runs here.
        cache: a file of JSON lines with finished jobs, read at the start and added to.
        show: where progress goes, None for nowhere.
        run: what is done with a job; a function of a module, since processes import it.
        result: the class of its answer, made again from the fields of `as_dict()`.
    """

    workers: int = 1
    cache: Path | None = None
    show: Any = sys.stderr
    run: Callable[[Job], Any] = run
    result: type[Any] = Trace
    known: dict[str, Any] = field(default_factory=dict)
    _said: float = 0.0

    def __post_init__(self) -> None:
        if self.cache is not None and self.cache.exists():
            for line in self.cache.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the line that was being written when a run was stopped
                self.known[entry["job"]] = self.result(**entry["trace"])

    def __call__(self, jobs: Sequence[Job], title: str) -> list[Any]:
        """The results of the jobs, in their order."""
        waiting = list({job.key: job for job in jobs if job.key not in self.known}.values())
        start = time.monotonic()
        for done, (job, trace) in enumerate(self._finished(waiting), start=1):
            self._keep(job, trace)
            self._say(title, done, len(waiting), start)
        return [self.known[job.key] for job in jobs]

    def _finished(self, jobs: list[Job]) -> Iterator[tuple[Job, Any]]:
        if self.workers <= 1 or len(jobs) <= 1:
            yield from ((job, self.run(job)) for job in jobs)
            return
        # A fresh interpreter for each worker: threads of torch do not survive a fork.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.workers, mp_context=context) as pool:
            futures = {pool.submit(self.run, job): job for job in jobs}
            yield from ((futures[each], each.result()) for each in as_completed(futures))

    def _keep(self, job: Job, trace: Any) -> None:
        # A trace is always what a reader of the file would get.
        entry = {"job": job.key, "trace": trace.as_dict()}
        self.known[job.key] = self.result(**entry["trace"])
        if self.cache is not None:
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            with self.cache.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def _say(self, title: str, done: int, total: int, start: float) -> None:
        """One line that changes; in a log file, one line every half minute."""
        now = time.monotonic()
        live = self.show is not None and self.show.isatty()
        if self.show is None or (done < total and now - self._said < (0.2 if live else 30.0)):
            return
        self._said = now
        left = (now - start) / done * (total - done) / 60
        end = "\n" if done == total or not live else ""
        text = f"{title}: {done}/{total} jobs, {left:.1f} min left"
        print(f"{chr(13) if live else ''}{text}   ", end=end, file=self.show, flush=True)
