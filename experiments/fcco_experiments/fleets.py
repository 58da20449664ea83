"""Runs of one kind that are trained together, as fleets, each run as it would be alone.

A finished run leaves one line, with the content of `result.json` of a run that was trained alone:
in `fleet.jsonl`, or in `fleet/lines-RANK.jsonl` where torchrun started several processes. Each of
these trains a part of the runs on a device of its own; they exchange messages at the start and at
the end. Fleets under way have checkpoints in the folder `fleet`.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from . import distributed, engine, environment, store, tasks
from .config import from_plain
from .engine import Tell
from .store import FLEET_FOLDER, FLEET_LINES, Event, FolderError, Kind, Outcome, RunSpec
from .task import FleetTraining, Method, Problem, Row
from .workers import keep_traceback, load

_ON_CPU = 64
"""More runs at a time do not fit into the caches of a CPU and take longer each."""


def train(
    specs: Sequence[RunSpec],
    out: Path,
    problem: Problem | None,
    tell: Tell,
    stop: Callable[[], bool],
    *,
    device: str = "auto",
    chunk: int | None = None,
) -> tuple[Problem, dict[str, Outcome]]:
    """Train the runs that a fleet can hold; the problem, and outcomes by label.

    They leave one line each and no curves. Each rank trains an equal part of the runs of each kind.

    Args:
        specs: of one experiment; runs that no fleet can hold are left out.
        out: folder of the comparison.
        problem: data and model, if they are loaded already.
        tell: called with each event.
        stop: asked after each step; when true, the fleet saves itself and ends.
        device: `"auto"`, `"cpu"` or `"cuda"`; a field `device` of the config rules.
        chunk: runs of a fleet at most; unless given, 64 on a CPU, on a GPU as many as fit. A fleet
            that does not fit into memory is halved until it does.
    """
    wanted = specs[0].config.preferred_device or device
    place = distributed.run_on_all(lambda: distributed.device(wanted))
    with _prepared(place):
        loaded = distributed.run_on_all(lambda: problem or load(specs[0], tell))
        kinds: dict[Hashable, list[RunSpec]] = {}
        for spec in specs:
            kinds.setdefault(loaded.fleet_kind(spec.method, spec.seed), []).append(spec)
        kinds.pop(None, None)
        return loaded, _Fleets(loaded, specs[0], out, place, chunk, tell, stop).run(kinds)


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
        engine.write_checkpoint(self.path, content)
        self.saved_at = time.perf_counter()
        self.save_took = self.saved_at - start

    def _tell(self, kind: Kind, title: str) -> None:
        epoch = engine.epochs_of(self.step, self.training.steps_per_epoch)
        self.tell(Event(kind, title, epoch, self.config.epochs, count=len(self.specs)))


class _Fleets:
    """All fleets of this process, one after another; `like` is any of the runs."""

    def __init__(
        self,
        problem: Problem,
        like: RunSpec,
        out: Path,
        device: torch.device,
        chunk: int | None,
        tell: Tell,
        stop: Callable[[], bool],
    ) -> None:
        self.problem, self.like, self.out, self.device = problem, like, out, device
        self.chunk, self.tell, self.stop = chunk, tell, stop
        self.data = distributed.run_on_all(lambda: distributed.fingerprint(problem))
        self.outcomes: dict[str, Outcome] = {}
        self.rank, self.ranks = distributed.rank(), distributed.world_size()
        self.folder = out / FLEET_FOLDER
        self.path = self.folder / f"checkpoint-{self.rank}.pt"
        own = self.folder / f"lines-{self.rank}.jsonl"
        self.lines = out / FLEET_LINES if self.ranks == 1 else own

    def run(self, kinds: dict[Hashable, list[RunSpec]]) -> dict[str, Outcome]:
        """Outcomes of all runs, those of other ranks too; what was not begun is left out."""
        done = distributed.run_on_first(self._finished)
        claimed = distributed.run_on_all(lambda: self._claim(done))
        labels = [store.label(line) for saved in claimed.values() for line in saved["runs"]]
        under_way = set().union(*distributed.all_gather(labels))
        left = [[s for s in group if s.label not in under_way] for group in kinds.values()]
        if under_way or any(left):
            distributed.run_on_first(self._describe)
        for path, saved in claimed.items():
            self._resume(path, saved)
        for group in left:
            self._train_all(group[self.rank :: self.ranks])
        everywhere: dict[str, Outcome] = {}
        for outcomes in distributed.all_gather(self.outcomes):
            everywhere |= outcomes
        ends = [everywhere[name].kind for name in everywhere.keys() - self.outcomes.keys()]
        if count := ends.count("finished") + ends.count("diverged"):
            epochs = self.like.config.epochs
            self.tell(Event("finished", "runs of other processes", epochs, epochs, count=count))
        return everywhere

    def _finished(self) -> set[str]:
        """Runs that have a line; refuses lines of other data."""
        lines = store.read_fleet_lines(self.out)
        for name, line in lines.items():
            if line["fingerprint"] != self.data:
                raise FolderError(
                    f"{self.out} has runs on other data: those of {name} were "
                    f"{line['fingerprint'][:12]} and are {self.data[:12]} now. Choose another "
                    "place with --out, or start anew with --overwrite."
                )
        return set(lines)

    def _claim(self, done: set[str]) -> dict[Path, dict[str, Any]]:
        """Checkpoints that this process goes on with: its own, and those of ranks that are gone."""

        def differences(saved: Mapping[str, Any]) -> list[str]:
            spec = {key: self.like.plain()[key] for key in ("task", "config")}
            return store.differences(saved, spec, self.like.config.incidental)

        warn = lambda text: self.tell(Event("note", "", text=text))  # noqa: E731
        names = [re.match(r"checkpoint-(\d+)", path.name) for path in self.folder.glob("*.pt")]
        claimed = {}
        for number in sorted({int(name[1]) for name in names if name is not None}):
            if number % self.ranks != self.rank:
                continue
            path = self.folder / f"checkpoint-{number}.pt"
            saved = engine.read_checkpoint(path, differences, self.data, warn)
            if saved is not None and all(store.label(line) in done for line in saved["runs"]):
                engine.remove_checkpoint(path)  # the process died between two files
            elif saved is not None:
                claimed[path] = saved
        return claimed

    def _describe(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        environment.write(self.folder / store.ENVIRONMENT, self.device, "fleets", True)

    def _resume(self, path: Path, saved: dict[str, Any]) -> None:
        if self.stop():
            return
        specs = [
            RunSpec(
                self.like.task, line["name"], from_plain(Method, line["method"], "checkpoint"),
                line["seed"], self.like.config,
            )
            for line in saved["runs"]
        ]  # fmt: skip
        if not self._train(specs, path, _title(specs), saved):
            self._train_all(specs, len(specs) // 2)

    def _train_all(self, specs: list[RunSpec], size: int | None = None) -> None:
        """All runs of one kind, at most `size` at a time, in parts of nearly equal size."""
        whole, number = len(specs), 0
        while specs and not self.stop():
            size = size or self._size(specs)
            number += 1
            part = specs[: math.ceil(len(specs) / math.ceil(len(specs) / size))]
            title = _title(part) + (f", part {number}" if len(part) < whole else "")
            if self._train(part, self.path, title):
                specs = specs[len(part) :]
            else:
                size = len(part) // 2

    def _size(self, specs: list[RunSpec]) -> int:
        """How many runs fit into one fleet."""

        def make(runs: int) -> FleetTraining:  # settings far apart: neighbours in a grid are alike
            return self._fleet([specs[place * len(specs) // runs] for place in range(runs)])

        if self.chunk is None and self.device.type == "cuda":
            return capacity(make, len(specs), self.device)
        return self.chunk or _ON_CPU

    def _fleet(self, specs: Sequence[RunSpec]) -> FleetTraining:
        return self.problem.fleet([(spec.method, spec.seed) for spec in specs], self.device)

    def _train(
        self, specs: list[RunSpec], path: Path, title: str, saved: dict[str, Any] | None = None
    ) -> bool:
        """One fleet. False when it does not fit into memory: with fewer runs it may."""
        try:
            fleet = _FleetRun(specs, self._fleet(specs), self.data, path, self.tell)
            if saved is not None:
                fleet.load(saved)
            if fleet.go(title, self.stop):
                self._end(fleet, title)
            else:
                self._note(Outcome(spec.label, "stopped") for spec in specs)
            return True
        except Exception as error:  # a fleet that breaks does not stop the others
            if not isinstance(error, torch.OutOfMemoryError) or len(specs) == 1:
                details = keep_traceback(self.folder / f"failure-{self.rank}.txt", error)
                text = str(error) or type(error).__name__
                self.tell(Event("failed", title, text=text, details=details, count=len(specs)))
                self._note(Outcome(spec.label, "failed", text) for spec in specs)
                return True
        gc.collect()
        torch.cuda.empty_cache()
        engine.remove_checkpoint(path)
        text = f"{title}: they do not fit into the memory of {self.device}; trying half of them."
        self.tell(Event("note", title, text=text))
        return False

    def _end(self, fleet: _FleetRun, title: str) -> None:
        results, epochs = fleet.results(), fleet.config.epochs
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        store.write_rows(self.lines, (store.read_results(self.lines) | results).values())
        engine.remove_checkpoint(fleet.path)
        self._note(engine.outcome_of(label, result) for label, result in results.items())
        reasons = [result["diverged"] for result in results.values() if result["diverged"]]
        text = f"{len(reasons):,} of them diverged, the first {reasons[0]}" if reasons else ""
        self.tell(Event("finished", title, epochs, epochs, text=text, count=len(results)))

    def _note(self, outcomes: Iterable[Outcome]) -> None:
        self.outcomes |= {outcome.run: outcome for outcome in outcomes}


def _title(specs: Sequence[RunSpec]) -> str:
    """The methods and the number of runs."""
    names = list(dict.fromkeys(spec.name.partition("@")[0] for spec in specs))
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{shown}: {len(specs):,} runs together"
