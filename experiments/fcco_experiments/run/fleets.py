"""Runs of one kind that are trained together, as fleets, each run as it would be alone.

A finished run leaves one line, with the content of `result.json` of a run that was trained alone:
in `fleet.jsonl`, or in `fleet/lines-NUMBER.jsonl` where several processes do the jobs. Fleets under
way have checkpoints in the folder `fleet`.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import environment, store, tasks
from ..config import from_plain
from ..store import FLEET_FOLDER, FLEET_LINES, Event, FolderError, Kind, Outcome, RunSpec
from ..task import FleetTraining, Method, Problem, Row
from . import checkpoint, engine
from .engine import Tell
from .jobs import Job, Stop, keep_traceback

_ON_CPU = 64
"""More runs at a time do not fit into the caches of a CPU and take longer each."""


@dataclass(frozen=True)
class Fleets:
    """How runs are put together.

    Args:
        device: `"auto"`, `"cpu"` or `"cuda"`; a field `device` of the config rules.
        chunk: runs of a fleet at most; unless given, 64 on a CPU, on a GPU as many as fit. A fleet
            that does not fit into memory is halved until it does.
    """

    device: str = "auto"
    chunk: int | None = None

    def wanted(self, like: RunSpec) -> str:
        """The device for runs such as this."""
        return like.config.preferred_device or self.device

    def jobs(
        self,
        specs: Sequence[RunSpec],
        out: Path,
        problem: Problem,
        tell: Tell,
        gpus: int | None = None,
    ) -> list[Fleet]:
        """Jobs of the runs that a fleet can hold, checkpoints of earlier ones first.

        Args:
            specs: of one experiment; runs that no fleet can hold are left out.
            out: folder of the comparison.
            problem: data and model.
            tell: called with each event.
            gpus: how many there are for jobs that several processes do, 0 for CPUs; None where
                they come one after another in this process.
        """
        data, like = problem.fingerprint(), specs[0]
        done = _finished(out, data)
        here = Fleet((), out, self.wanted(like), 0, FLEET_LINES, self.chunk, data)
        jobs = list[Fleet]()
        for number in sorted(_numbers(out)):
            job = replace(here, number=number)
            if runs := job.under_way(like, done, tell):
                jobs.append(replace(job, specs=tuple(runs)))
        held = {spec.label for job in jobs for spec in job.specs}
        kinds: dict[Hashable, list[RunSpec]] = {}
        for spec in specs:
            if spec.label not in held:
                kinds.setdefault(problem.fleet_kind(spec.method, spec.seed), []).append(spec)
        kinds.pop(None, None)
        if gpus is None:
            return jobs + [replace(here, specs=tuple(kind)) for kind in kinds.values()]
        parts = [
            part
            for kind in kinds.values()
            for part in cut(kind, self.chunk or (math.ceil(len(kind) / gpus) if gpus else _ON_CPU))
        ]
        first = 1 + max(_numbers(out), default=-1)
        jobs += [replace(here, specs=tuple(p), number=k) for k, p in enumerate(parts, first)]
        return [replace(job, lines=f"{FLEET_FOLDER}/lines-{job.number}.jsonl") for job in jobs]


def cut(specs: Sequence[RunSpec], size: int) -> list[list[RunSpec]]:
    """Parts of at most so many runs, and of nearly equal size."""
    parts, left = list[list[RunSpec]](), list(specs)
    while left:
        end = math.ceil(len(left) / math.ceil(len(left) / size))
        parts.append(left[:end])
        left = left[end:]
    return parts


def _numbers(out: Path) -> set[int]:
    """Of the jobs that have left checkpoints or lines in the folder `fleet`."""
    names = (re.match(r"(?:checkpoint|lines)-(\d+)", path.name) for path in store.fleet_files(out))
    return {int(name[1]) for name in names if name is not None}


def _finished(out: Path, data: str) -> set[str]:
    """Runs that have a line; refuses lines of other data."""
    lines = store.read_fleet_lines(out)
    for name, line in lines.items():
        if line["fingerprint"] != data:
            raise FolderError(
                f"{out} has runs on other data: those of {name} were {line['fingerprint'][:12]} "
                f"and are {data[:12]} now. Choose another place with --out, or start anew with "
                "--overwrite."
            )
    return set(lines)


@contextlib.contextmanager
def _prepared(device: torch.device) -> Iterator[None]:
    """All cores for this process, unless the environment says otherwise; and its GPU."""
    threads = torch.get_num_threads()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(environment.available_cores())
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def capacity(make: Callable[[int], FleetTraining], runs: int, device: torch.device) -> int:
    """How many runs fit into one fleet on a GPU, from the peaks of memory of two small fleets.

    `make` builds a fleet of so many runs; there are no more than `runs`.
    """
    sizes, peaks = (16, 64), []
    if runs <= sizes[0]:
        return runs
    for size in sizes:
        try:
            make(size)  # what is loaded once and kept, such as data, is not a part of a fleet
            gc.collect()
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            fleet = make(size)
            fleet.step()
            fleet.step()
            fleet.state_dict()
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            return size // 2
        except Exception:  # which the training of all runs will raise again, and report
            return runs
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        del fleet
        gc.collect()  # the graphs of a fleet may refer to it
        torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    per_run = max(1.0, (peaks[1] - peaks[0]) / (sizes[1] - sizes[0]))
    # Not all of the free memory: peaks are not quite linear.
    return max(1, min(runs, sizes[1] + int((0.8 * free - peaks[1]) // per_run)))


class _FleetRun:
    """Runs of one kind, trained together from the first step, or a checkpoint, to their results.

    They are evaluated before the first step, at every quarter and at the end. A run that diverges
    keeps the last finite figures that it had.
    """

    def __init__(
        self, specs: list[RunSpec], training: FleetTraining, data: str, path: Path, tell: Tell
    ) -> None:
        self.specs, self.training, self.data, self.path = specs, training, data, path
        self.tell, self.config = tell, specs[0].config
        self.total = self.config.epochs * training.steps_per_epoch
        self.step, self.seconds = 0, 0.0
        self.rows: list[Row] = [{} for _ in specs]
        self.reasons: list[str | None] = [None] * len(specs)  # why each diverged
        self.saved_at, self.save_took = 0.0, 0.0

    def load(self, saved: Mapping[str, Any]) -> None:
        self.training.load_state_dict(saved["training"])
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.rows, self.reasons = list(saved["rows"]), list(saved["reasons"])

    def go(self, title: str, stop: Callable[[], bool]) -> bool:
        """Train to the end (True), or until asked to stop (False): then all is saved."""
        self._tell("started", title)
        if self.step == 0:
            self._evaluate()
        quarters = {math.ceil(k * self.total / 4) for k in range(1, 5)}
        every = self.config.checkpoint_every * self.training.steps_per_epoch
        told = start = time.perf_counter()
        while self.step < self.total:
            self.training.step()
            self.step += 1
            last = self.step == self.total
            asked = not last and stop()
            evaluate = self.step in quarters
            save = asked or (not last and self.step % every == 0 and self._worth_saving())
            if evaluate or save:
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                self.seconds += time.perf_counter() - start
                if evaluate:
                    self._evaluate()
                if save:
                    self._save()
                start = time.perf_counter()
            if evaluate or time.perf_counter() - told > engine.TELL_EVERY:
                told = time.perf_counter()
                self._tell("progress", title)
            if asked:
                self._tell("stopped", title)
                return False
            if evaluate and None not in self.reasons:
                break  # all have diverged
        return True

    def results(self) -> dict[str, Row]:
        """What is kept of each run, by label."""
        task, per_epoch = tasks.get(self.specs[0].task), self.training.steps_per_epoch
        ends = zip(self.specs, self.rows, self.reasons, self.training.died, strict=True)
        results = {}
        for spec, row, reason, died in ends:
            step = self.step if died < 0 else died
            results[spec.label] = engine.result_of(
                spec, task, row, end={}, diverged=reason, seconds=self.seconds / len(self.specs),
                samples=step * self.training.samples_per_step, fingerprint=self.data,
                step=step, epoch=engine.epochs_of(step, per_epoch),
            )  # fmt: skip
        return results

    def _evaluate(self) -> None:
        """Figures of the runs that have not diverged."""
        died, seconds = self.training.died, self.seconds / len(self.specs)
        for place, figures in enumerate(self.training.evaluate()):
            if self.reasons[place] is not None:
                continue
            row = engine.evaluation(self.training, self.step, seconds, figures)
            wrong = [key for key, value in figures.items() if not math.isfinite(value)]
            if died[place] >= 0:
                self.reasons[place] = f"after {died[place]} steps: not finite"
            elif wrong:
                self.reasons[place] = f"not finite at epoch {row['epoch']:g}: {', '.join(wrong)}"
            else:
                self.rows[place] = row

    def _worth_saving(self) -> bool:
        """Thousands of runs are large: writing them must not take longer than training them."""
        since = time.perf_counter() - self.saved_at
        return self.save_took < 1 or since > 20 * self.save_took

    def _save(self) -> None:
        start = time.perf_counter()
        specs = [spec.plain() for spec in self.specs]
        content = {
            "step": self.step,
            "seconds": self.seconds,
            "spec": {key: specs[0][key] for key in ("task", "config")},
            "runs": [{key: spec[key] for key in ("name", "seed", "method")} for spec in specs],
            "rows": self.rows,
            "reasons": self.reasons,
            "fingerprint": self.data,
            "training": tree_map_only(Tensor, Tensor.cpu, self.training.state_dict()),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write(self.path, content)
        self.saved_at = time.perf_counter()
        self.save_took = self.saved_at - start

    def _tell(self, kind: Kind, title: str) -> None:
        epoch = engine.epochs_of(self.step, self.training.steps_per_epoch)
        self.tell(Event(kind, title, epoch, self.config.epochs, count=len(self.specs)))


@dataclass(frozen=True)
class Fleet(Job):
    """Runs of one kind, in as many fleets as the memory makes of them, one after another.

    Args:
        specs: the runs; those of a checkpoint come first, in a fleet of their own.
        number: of its checkpoint.
        lines: the file of its results, in the folder of the comparison.
        chunk: runs of a fleet at most.
        data: the fingerprint of the data.
    """

    number: int
    lines: str
    chunk: int | None
    data: str

    @property
    def title(self) -> str:
        names = list(dict.fromkeys(spec.name.partition("@")[0] for spec in self.specs))
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        part = f", part {self.number}" if self.lines != FLEET_LINES else ""
        return f"{shown}: {len(self.specs):,} runs together{part}"

    @property
    def path(self) -> Path:
        """Of its checkpoint."""
        return self.out / FLEET_FOLDER / f"checkpoint-{self.number}.pt"

    def read(self, like: RunSpec, tell: Tell) -> dict[str, Any] | None:
        """Its checkpoint, refused when it is that of another experiment."""

        def differences(saved: Mapping[str, Any]) -> list[str]:
            spec = {key: like.plain()[key] for key in ("task", "config")}
            return store.differences(saved, spec, like.config.incidental)

        warn = lambda text: tell(Event("note", "", text=text))  # noqa: E731
        return checkpoint.read(self.path, differences, self.data, warn)

    def under_way(self, like: RunSpec, done: Collection[str], tell: Tell) -> list[RunSpec]:
        """The runs of its checkpoint, none where all of them have ended."""
        saved = self.read(like, tell)
        if saved is None:
            return []
        if all(store.label(line) in done for line in saved["runs"]):
            checkpoint.remove(self.path)  # the process died between two files
            return []
        return [
            RunSpec(
                like.task, line["name"], from_plain(Method, line["method"], "checkpoint"),
                line["seed"], like.config,
            )
            for line in saved["runs"]
        ]  # fmt: skip

    def do(self, problem: Problem, tell: Tell, stop: Stop) -> list[Outcome]:
        place = environment.device(self.device)
        with _prepared(place):
            return _Fleets(self, problem, place, tell, stop).run()


class _Fleets:
    """The fleets of a job, in the process that does it."""

    def __init__(
        self, job: Fleet, problem: Problem, device: torch.device, tell: Tell, stop: Stop
    ) -> None:
        self.job, self.problem, self.device = job, problem, device
        self.tell, self.stop = tell, stop
        self.lines = job.out / job.lines
        self.outcomes: list[Outcome] = []

    def run(self) -> list[Outcome]:
        """Outcomes of the runs that were begun."""
        folder = self.job.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        environment.write(folder / store.ENVIRONMENT, self.device, "fleets", True)
        done = store.read_results(self.lines)
        own = [spec for spec in self.job.specs if spec.label in done]  # of a process that was lost
        self.outcomes = [engine.outcome_of(spec.label, done[spec.label]) for spec in own]
        left = [spec for spec in self.job.specs if spec.label not in done]
        saved = self.job.read(self.job.specs[0], self.tell)
        held = [store.label(line) for line in saved["runs"]] if saved is not None else []
        known = {spec.label: spec for spec in left}
        if saved is not None and known.keys() >= set(held):
            self._train_all([[known.pop(label) for label in held]], saved)
        if known and not self.stop():
            self._train_all(cut(list(known.values()), self._size(list(known.values()))))
        return self.outcomes

    def _train_all(self, parts: Sequence[list[RunSpec]], saved: Row | None = None) -> None:
        """One fleet after another; from `saved`, where there is one."""
        waiting, number = deque(parts), 0
        while waiting and not self.stop():
            part = waiting.popleft()
            number += 1
            title = replace(self.job, specs=tuple(part)).title
            title += f", part {number}" if number > 1 or waiting else ""
            if not self._train(part, title, saved):
                rest = [spec for each in (part, *waiting) for spec in each]
                waiting = deque(cut(rest, len(part) // 2))
            saved = None

    def _size(self, specs: list[RunSpec]) -> int:
        """How many runs fit into one fleet."""

        def make(runs: int) -> FleetTraining:  # settings far apart: neighbours in a grid are alike
            return self._fleet([specs[place * len(specs) // runs] for place in range(runs)])

        if self.job.chunk is None and self.device.type == "cuda":
            return capacity(make, len(specs), self.device)
        return self.job.chunk or _ON_CPU

    def _fleet(self, specs: Sequence[RunSpec]) -> FleetTraining:
        return self.problem.fleet([(spec.method, spec.seed) for spec in specs], self.device)

    def _train(self, specs: list[RunSpec], title: str, saved: Row | None) -> bool:
        """One fleet. False when it does not fit into memory: with fewer runs it may."""
        try:
            training = self._fleet(specs)
            fleet = _FleetRun(specs, training, self.job.data, self.job.path, self.tell)
            if saved is not None:
                fleet.load(saved)
            if fleet.go(title, self.stop):
                self._end(fleet, title)
            else:
                self.outcomes += [Outcome(spec.label, "stopped") for spec in specs]
            return True
        except Exception as error:  # a fleet that breaks does not stop the others
            if not isinstance(error, torch.OutOfMemoryError) or len(specs) == 1:
                path = self.job.path.with_name(f"failure-{self.job.number}.txt")
                details, text = keep_traceback(path, error), str(error) or type(error).__name__
                self.tell(Event("failed", title, text=text, details=details, count=len(specs)))
                self.outcomes += [Outcome(spec.label, "failed", text) for spec in specs]
                return True
        gc.collect()
        torch.cuda.empty_cache()
        checkpoint.remove(self.job.path)
        text = f"{title}: they do not fit into the memory of {self.device}; trying half of them."
        self.tell(Event("note", title, text=text))
        return False

    def _end(self, fleet: _FleetRun, title: str) -> None:
        results, epochs = fleet.results(), fleet.config.epochs
        store.write_rows(self.lines, (store.read_results(self.lines) | results).values())
        checkpoint.remove(fleet.path)
        self.outcomes += [engine.outcome_of(name, result) for name, result in results.items()]
        reasons = [result["diverged"] for result in results.values() if result["diverged"]]
        text = f"{len(reasons):,} of them diverged, the first {reasons[0]}" if reasons else ""
        self.tell(Event("finished", title, epochs, epochs, text=text, count=len(results)))
