"""One run of a method on a problem, and many: processes, progress, a file of finished jobs."""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import ours, peers
from .problems import Builder, Problem, Setting, make

LIMIT = 0.01  # the largest violation that counts as reached
TAIL = 0.2  # share of the checkpoints that is averaged at the end


@dataclass(frozen=True)
class Trace:
    """What one run showed at its checkpoints, on all training data.

    Attributes:
        evaluations: gradient evaluations at each checkpoint.
        objective: there.
        violation: the largest, there.
        seconds: of the steps alone.
        extra_forwards: passes without gradient for each gradient evaluation.
    """

    evaluations: list[int]
    objective: list[float]
    violation: list[float]
    seconds: float
    extra_forwards: float

    @property
    def tail_objective(self) -> float:
        """Mean over the last checkpoints; infinite when the run diverged."""
        return self._tail(self.objective)

    @property
    def tail_violation(self) -> float:
        """Mean over the last checkpoints; infinite when the run diverged."""
        return self._tail(self.violation)

    def _tail(self, values: list[float]) -> float:
        last = values[-max(1, round(TAIL * len(values))) :]
        return statistics.fmean(last) if all(map(math.isfinite, last)) else math.inf

    def settled(self, limit: float = LIMIT) -> int | None:
        """Evaluations after which every checkpoint has a violation within the limit."""
        first = None
        for done, violation in zip(self.evaluations, self.violation, strict=True):
            if not violation <= limit:
                first = None
            elif first is None:
                first = done
        return first

    def reached(self, objective: float, limit: float = LIMIT) -> int | None:
        """Evaluations at the first checkpoint with both the objective and the violation."""
        points = zip(self.evaluations, self.objective, self.violation, strict=True)
        return next((n for n, f, v in points if v <= limit and f <= objective), None)

    def best(self, share: float, limit: float = LIMIT) -> float:
        """The least objective within the limit in the first `share` of the evaluations."""
        until = share * self.evaluations[-1]
        points = zip(self.evaluations, self.objective, self.violation, strict=True)
        found = [f for n, f, v in points if n <= until and v <= limit]
        return min(found, default=math.inf)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in five digits."""
        fields = asdict(self)
        for name in ("objective", "violation"):
            fields[name] = [float(f"{value:.5g}") for value in fields[name]]
        return {**fields, "seconds": round(self.seconds, 3)}


def builders() -> dict[str, Builder]:
    """Every method whose package is installed."""
    return {**ours.METHODS, **peers.methods()}


def train(
    problem: Problem, method: str, setting: Setting, seed: int, builder: Builder | None = None
) -> Trace:
    """Same initial weights and batches for every method that is given the same seed.

    Args:
        problem: the problem.
        method: name in `builders()`.
        setting: of the method.
        seed: of the initial weights and of the batches.
        builder: of a method that has no name there.
    """
    torch.manual_seed(seed)
    model = problem.model()
    draw = problem.batches(seed)
    stepper = (builder or builders()[method])(problem, model, setting)
    schedule = problem.schedule
    done, seconds = 0, 0.0
    evaluations, objectives, violations = [], [], []
    while done < schedule.evaluations:
        stepper.set_factor(schedule.factor(done))
        until = (done // schedule.every + 1) * schedule.every
        batches = [draw() for _ in range(math.ceil((until - done) / stepper.gradients))]
        start = time.perf_counter()
        for batch in batches:
            stepper.step(batch)
        seconds += time.perf_counter() - start
        done += stepper.gradients * len(batches)
        score = problem.score(model)
        evaluations.append(done)
        objectives.append(score.objective)
        violations.append(score.violation)
        if not math.isfinite(score.objective):
            break
    return Trace(
        evaluations,
        objectives,
        violations,
        seconds,
        stepper.extra_forwards / stepper.gradients,
    )


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
        if waiting and self.show is not None:
            print(f"{title}: {len(waiting)} jobs", file=self.show, flush=True)
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
