"""Runs of one kind that are trained together, as fleets, each run as it would be alone.

A finished run leaves one line, with the content of `result.json` of a run that was trained alone,
in `fleet/lines-NUMBER.jsonl`, with the number of its job. Fleets under way have checkpoints there.
"""

from __future__ import annotations

import gc
import math
import os
import re
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import environment, store, tasks
from ..config import from_plain
from ..store import FLEET_FOLDER, Event, Kind, Outcome, RunSpec
from ..task import FleetTraining, Method, Problem, Row
from . import engine
from .engine import Job, Loop, Stop, Tell, threads

_ON_CPU = 64
"""More runs at a time do not fit into the caches of a CPU and take longer each."""


@dataclass(frozen=True)
class Fleets:
    """How runs are put together.

    Args:
        device: `"auto"`, `"cpu"` or `"cuda"`; a field `device` of the config rules.
        chunk: runs of a fleet at most; unless given, 64 on a CPU, on a GPU all. A fleet that does
            not fit into memory is halved until it does.
    """

    device: str = "auto"
    chunk: int | None = None

    def wanted(self, like: RunSpec) -> str:
        """The device for runs such as this."""
        return like.config.preferred_device or self.device

    def jobs(
        self, specs: Sequence[RunSpec], out: Path, problem: Problem, gpus: int | None = None
    ) -> list[Fleet]:
        """Jobs of the runs that a fleet can hold, checkpoints of earlier ones first.

        `gpus` is how many there are for jobs that several processes do, 0 for CPUs; None where they
        come one after another in this process.
        """
        data, like = problem.fingerprint(), specs[0]
        done, numbers = _finished(out, data), sorted(_numbers(out))
        here = Fleet((), out, self.wanted(like), 0, self.chunk, data)
        jobs = list[Fleet]()
        for number in numbers:
            job = replace(here, number=number)
            if runs := job.under_way(like, done):
                jobs.append(replace(job, specs=tuple(runs)))
        held = {spec.label for job in jobs for spec in job.specs}
        kinds: dict[Hashable, list[RunSpec]] = {}
        for spec in specs:
            if spec.label not in held:
                kinds.setdefault(problem.fleet_kind(spec.method, spec.seed), []).append(spec)
        kinds.pop(None, None)
        parts = list[list[RunSpec]]()
        for kind in kinds.values():
            own = math.ceil(len(kind) / gpus) if gpus else _ON_CPU
            parts += [kind] if gpus is None else cut(kind, self.chunk or own)
        first = 1 + max(numbers, default=-1)
        return jobs + [replace(here, specs=tuple(p), number=k) for k, p in enumerate(parts, first)]


def cut(specs: list[RunSpec], size: int) -> list[list[RunSpec]]:
    """Parts of at most so many runs, and of nearly equal size."""
    number = math.ceil(len(specs) / size)
    return [specs[k::number] for k in range(number)]


def _numbers(out: Path) -> set[int]:
    """Of the jobs that have left checkpoints or lines in the folder `fleet`."""
    names = (re.match(r"(?:checkpoint|lines)-(\d+)", path.name) for path in store.fleet_files(out))
    return {int(name[1]) for name in names if name is not None}


def _finished(out: Path, data: str) -> set[str]:
    """Runs that have a line; refuses lines of other data."""
    lines = store.read_fleet_lines(out)
    for name, line in lines.items():
        if line["fingerprint"] != data:
            words = f"those of {name} were {line['fingerprint'][:12]} and are {data[:12]} now"
            store.refuse(f"{out} has runs on other data", [words])
    return set(lines)


class _FleetRun(Loop):
    """Runs of one kind in memory.

    They are evaluated before the first step, at every quarter and at the end. A run that diverges
    keeps the last finite figures that it had.
    """

    training: FleetTraining

    def __init__(
        self, title: str, specs: list[RunSpec], training: FleetTraining, job: Fleet, tell: Tell
    ) -> None:
        super().__init__(title, specs[0].config, training, job.data, job.path, tell)
        self.specs, self.job = specs, job
        self.rows = [{} for _ in specs]
        self.reasons: list[str | None] = [None] * len(specs)  # why each diverged
        self.quarters = {math.ceil(k * self.total / 4) for k in range(1, 5)}

    def load(self, saved: Mapping[str, Any]) -> None:
        super().load(saved)
        self.reasons = list(saved["reasons"])

    def over(self) -> bool:
        return super().over() or (self.step in self.quarters and None not in self.reasons)

    def evaluates(self) -> bool:
        return self.step in self.quarters

    def saves(self) -> bool:
        return not self.over() and self.every(self.config.checkpoint_every)

    def record(self) -> dict[str, Any]:
        specs = [spec.plain() for spec in self.specs]
        return {
            "spec": {key: specs[0][key] for key in ("task", "config")},
            "runs": [{key: spec[key] for key in ("name", "seed", "method")} for spec in specs],
            "reasons": self.reasons,
        }

    def evaluate(self) -> None:
        """Figures of the runs that have not diverged."""
        died, seconds = self.training.died, self.seconds / len(self.specs)
        for place, figures in enumerate(self.training.evaluate()):
            if self.reasons[place] is not None:
                continue
            row = self.row(figures, seconds)
            wrong = [key for key, value in figures.items() if not math.isfinite(value)]
            if died[place] >= 0:
                self.reasons[place] = f"after {died[place]} steps: not finite"
            elif wrong:
                self.reasons[place] = f"not finite at epoch {row['epoch']:g}: {', '.join(wrong)}"
            else:
                self.rows[place] = row

    def end(self) -> list[Outcome]:
        """Add a line for each run to those of the job, and how each has ended."""
        task, results = tasks.get(self.specs[0].task), dict[str, Row]()
        ends = zip(self.specs, self.rows, self.reasons, self.training.died, strict=True)
        for spec, row, reason, died in ends:
            step = self.step if died < 0 else died
            results[spec.label] = engine.result_of(
                spec, task, row, end={}, diverged=reason, seconds=self.seconds / len(self.specs),
                samples=step * self.samples_per_step, fingerprint=self.data,
                step=step, epoch=self.epoch(step),
            )  # fmt: skip
        lines = store.read_results(self.job.lines) | results
        store.write_rows(self.job.lines, lines.values())
        self.path.unlink(missing_ok=True)
        reasons = [reason for reason in self.reasons if reason is not None]
        text = f"{len(reasons):,} of them diverged, the first {reasons[0]}" if reasons else ""
        self.tell("finished", text)
        return [engine.outcome_of(label, result) for label, result in results.items()]

    def tell(self, kind: Kind, text: str = "") -> None:
        epoch = self.epoch(self.step)
        count = len(self.specs)
        self.on_event(Event(kind, self.title, epoch, self.config.epochs, text=text, count=count))


@dataclass(frozen=True)
class Fleet(Job):
    """Runs of one kind, in as many fleets as the memory makes of them, one after another.

    Those of a checkpoint come first, in a fleet of their own.
    """

    number: int  # of its files
    chunk: int | None  # runs of a fleet at most
    data: str  # the fingerprint

    @property
    def title(self) -> str:
        return self.title_of(self.specs)

    def title_of(self, specs: Sequence[RunSpec]) -> str:
        """Of some of the runs."""
        names = list(dict.fromkeys(spec.name.partition("@")[0] for spec in specs))
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        number = f" ({self.number})" if self.number else ""
        return f"{shown}: {len(specs):,} runs together{number}"

    @property
    def path(self) -> Path:  # of its checkpoint
        return self.out / FLEET_FOLDER / f"checkpoint-{self.number}.pt"

    @property
    def lines(self) -> Path:  # its results
        return self.out / FLEET_FOLDER / f"lines-{self.number}.jsonl"

    def read(self, like: RunSpec) -> dict[str, Any] | None:
        """Its checkpoint, refused when it is that of another experiment."""
        now = like.plain()
        spec = {key: now[key] for key in ("task", "config")}
        return store.read_checkpoint(self.path, spec, like.config.incidental, self.data)

    def under_way(self, like: RunSpec, done: Collection[str]) -> list[RunSpec]:
        """The runs of its checkpoint, none where all of them have ended."""
        saved = self.read(like)
        if saved is None:
            return []
        if all(store.label(line) in done for line in saved["runs"]):
            self.path.unlink()  # the process died between two files
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
        chosen = place.type == "cuda" or os.environ.get("OMP_NUM_THREADS")
        with threads(torch.get_num_threads() if chosen else environment.available_cores()):
            return self._do(problem, place, tell, stop)

    def _do(self, problem: Problem, place: torch.device, tell: Tell, stop: Stop) -> list[Outcome]:
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        environment.write(folder / store.ENVIRONMENT, place, "fleets", True)
        done = store.read_results(self.lines)
        own = [spec for spec in self.specs if spec.label in done]  # of a process that was lost
        outcomes = [engine.outcome_of(spec.label, done[spec.label]) for spec in own]
        left = {spec.label: spec for spec in self.specs if spec.label not in done}
        saved = self.read(self.specs[0])
        held = [store.label(line) for line in saved["runs"]] if saved is not None else []
        waiting, number = deque[list[RunSpec]](), 0
        if saved is not None and left.keys() >= set(held):
            waiting.append([left.pop(label) for label in held])
        else:
            saved = None
        if rest := list(left.values()):
            most = len(rest) if place.type == "cuda" else _ON_CPU
            waiting += cut(rest, self.chunk or most)
        while waiting and not stop():
            part = waiting.popleft()
            number += 1
            title = self.title_of(part) + (f", part {number}" if number > 1 or waiting else "")
            ended = self._train(part, title, saved, problem, place, tell, stop)
            if ended is None:
                text = f"they do not fit into the memory of {place}; trying half of them."
                tell(Event("note", title, text=f"{title}: {text}"))
                rest = [spec for each in (part, *waiting) for spec in each]
                waiting = deque(cut(rest, len(part) // 2))
            outcomes += ended or []
            saved = None
        return outcomes

    def _train(
        self, specs: list[RunSpec], title: str, saved: Row | None, problem: Problem,
        place: torch.device, tell: Tell, stop: Stop,
    ) -> list[Outcome] | None:  # fmt: skip
        """One fleet. None when it does not fit into memory: with fewer runs it may."""
        try:
            training = problem.fleet([(spec.method, spec.seed) for spec in specs], place)
            fleet = _FleetRun(title, specs, training, self, tell)
            if saved is not None:
                fleet.load(saved)
            if fleet.loop(stop):
                return fleet.end()
            return [Outcome(spec.label, "stopped") for spec in specs]
        except Exception as error:  # a fleet that breaks does not stop the others
            if not isinstance(error, torch.OutOfMemoryError) or len(specs) == 1:
                path = self.path.with_name(f"failure-{self.number}.txt")
                return replace(self, specs=tuple(specs)).raised(error, path, tell)
        gc.collect()
        torch.cuda.empty_cache()
        self.path.unlink(missing_ok=True)
        return None
