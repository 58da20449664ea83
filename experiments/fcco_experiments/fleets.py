"""Trains runs of one kind together, as fleets, in the place of `workers.run`.

A run of a fleet leaves one line in `fleet.jsonl`, as `result.json` of a run that is trained alone,
and no curves. In the folder `fleet` lie checkpoints of the fleets under way. With several processes
(torchrun) each trains a part of the runs on a device of its own, with lines and checkpoints of its
own; they communicate at the start and at the end only.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from . import distributed, environment, fleet_memory, store, tasks
from .config import from_plain, plain
from .store import FLEET_FOLDER, FLEET_LINES, Event, FolderError, Kind, Outcome, RunSpec
from .sweep import without_test
from .task import FleetTraining, Method, Problem, Row, Task
from .workers import Stop, Tell, interruptible, load
from .workers import run as run_alone

__all__ = ["Best", "FleetCheckpoint", "FleetRun", "Fleets", "run"]

Line = dict[str, Any]
_PROGRESS = 0.2  # seconds between two progress events
_EVALUATIONS = 4  # after the first one
_SHORT, _SHARE = 1.0, 20
"""A checkpoint that takes longer than these seconds waits until it is that part of the time."""
_FEW = 16
"""So many runs are trained together without a measurement of how many fit."""
_ON_CPU = 64
"""More runs at a time do not fit into the caches of a CPU and take longer each."""


def run(
    specs: Sequence[RunSpec],
    out: Path,
    *,
    workers: int | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    on_event: Tell = lambda event: None,
    device: str = "auto",
    chunk: int | None = None,
) -> list[Outcome]:
    """Do all runs, as `workers.run` does: those that a fleet can hold together, the others alone.

    Each rank trains an equal part of the runs of each kind.

    Args:
        specs: of one experiment, whose problem has `fleet_kind` and `fleet`.
        out: folder of the comparison.
        workers: processes for the runs that no fleet can hold.
        resume: go on from checkpoints.
        tensorboard: for runs that no fleet can hold.
        on_event: called with what happens.
        device: `"auto"`, `"cpu"` or `"cuda"`; a config with a device of its own wins.
        chunk: runs of a fleet at most; unless given as many as fit, on a CPU into its caches.

    Raises:
        LoadError: when the task cannot load its data.
        FolderError: when the folder holds fleets of other runs.
    """
    if not specs:
        return []
    wanted = specs[0].config.preferred_device or device
    used = distributed.run_on_all(lambda: distributed.device(wanted))
    with interruptible() as asked, _prepared(used):
        stop = Stop(asked, on_event)
        problem = distributed.run_on_all(lambda: load(specs[0], on_event))
        begun = distributed.run_on_first(lambda: _begun(specs, out) if resume else set[str]())
        together: dict[Hashable, list[RunSpec]] = {}
        alone: list[RunSpec] = []
        for spec in specs:
            kind = problem.fleet_kind(spec.method, spec.seed)
            fits = kind is not None and spec.label not in begun
            (together.setdefault(kind, []) if fits else alone).append(spec)
        outcomes = Fleets(problem, specs[0], out, used, chunk, on_event, stop).run(together)
        stopped = distributed.any_rank(stop())
    if alone and not stopped:
        ended = run_alone(
            alone, out, workers=workers, resume=resume, tensorboard=tensorboard, on_event=on_event
        )
        outcomes |= {outcome.run: outcome for outcome in ended}
    return [outcomes.get(spec.label, Outcome(spec.label, "stopped")) for spec in specs]


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


def _begun(specs: Sequence[RunSpec], out: Path) -> set[str]:
    """Runs that an earlier command has begun to train alone: they go on so."""
    return {spec.label for spec in specs if (spec.folder(out) / store.CHECKPOINT).is_file()}


# --- All fleets of a process ----------------------------------------------------------------------


class Fleets:
    """All fleets of this process, one after another, each as large as fits.

    Args:
        problem: data and model.
        like: any of the runs.
        out: folder of the comparison.
        device: where to train.
        chunk: runs of a fleet at most.
        tell: called with what happens.
        stop: whether to save and stop.
    """

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
        self.task = tasks.get(like.task)
        self.data = distributed.run_on_all(lambda: distributed.fingerprint(problem))
        self.best = Best(self.task)
        self.outcomes: dict[str, Outcome] = {}
        self.folder, self.table = out / FLEET_FOLDER, out / FLEET_LINES
        rank = distributed.rank()
        self.path = self.folder / f"checkpoint-{rank}.pt"
        alone = distributed.world_size() == 1
        self.lines = self.table if alone else self.folder / f"lines-{rank}.jsonl"

    def run(self, kinds: dict[Hashable, list[RunSpec]]) -> dict[str, Outcome]:
        """Outcomes of all runs, those of other ranks too; what was not begun is left out."""
        outcomes = self._collect()
        distributed.run_on_first(self._check_data)
        checkpoints = distributed.run_on_all(self._checkpoints)
        resumed = [store.label(run) for saved in checkpoints.values() for run in saved.runs]
        taken = {label for labels in distributed.all_gather(resumed) for label in labels}
        taken |= outcomes.keys()
        left = [[spec for spec in specs if spec.label not in taken] for specs in kinds.values()]
        if checkpoints or any(left):
            distributed.run_on_first(self._describe)
        for path, saved in checkpoints.items():
            if self.stop():
                break
            specs = saved.specs(self.like)
            if not self._train(specs, path, _title(specs), saved):
                self._train_all(specs, max(1, len(specs) // 2))
        for specs in left:
            self._train_all(specs[distributed.rank() :: distributed.world_size()])
        return outcomes | self._gather()

    # What lies in the folder.

    def _collect(self) -> dict[str, Outcome]:
        """Put the lines of single processes into the table; outcomes of all runs in it."""
        files = sorted(self.folder.glob("lines-*.jsonl"))
        mine = distributed.run_on_all(
            lambda: [line for file in files for line in store.read_fleet_lines(file).values()]
        )
        lines = [line for part in distributed.all_gather(mine) for line in part]
        if lines:
            distributed.run_on_first(lambda: _add_lines(self.table, lines))
        for file in files:
            file.unlink(missing_ok=True)
        table = distributed.run_on_first(
            lambda: store.read_fleet_lines(self.table) if lines else {}
        )
        return {label: _outcome(label, line["diverged"]) for label, line in table.items()}

    def _check_data(self) -> None:
        """Refuse lines of other data."""
        for label, line in store.read_fleet_lines(self.table).items():
            if line["fingerprint"] != self.data:
                raise FolderError(
                    f"{self.table} has runs on other data: those of {label} were "
                    f"{line['fingerprint'][:12]} and are {self.data[:12]} now. Choose another "
                    "place with --out, or start anew with --overwrite."
                )

    def _checkpoints(self) -> dict[Path, FleetCheckpoint]:
        """Those that this process goes on with: its own, and those of ranks that are gone."""
        numbers: dict[int, Path] = {}
        for path in self.folder.glob("checkpoint-*.pt"):
            if match := re.fullmatch(r"checkpoint-(\d+)\.pt", path.name):
                numbers[int(match[1])] = path
        finished = store.read_fleet_lines(self.table)
        checkpoints = {}
        for number, path in sorted(numbers.items()):
            if number % distributed.world_size() != distributed.rank():
                continue
            saved = FleetCheckpoint.read(path, self.like, self.data)
            if all(store.label(run) in finished for run in saved.runs):
                path.unlink()  # the process ended between writing the lines and deleting this
            else:
                checkpoints[path] = saved
        return checkpoints

    def _describe(self) -> None:
        path = self.folder / store.ENVIRONMENT
        path.parent.mkdir(parents=True, exist_ok=True)
        now = environment.describe(self.device)
        if path.is_file():
            before = store.read_json(path)
            again = f"{now['start']}, fcco {now['fcco']}, device {now['device']}"
            now = before | {"resumed": [*before.get("resumed", ()), again]}
        store.write_json(path, now)

    # Training.

    def _train_all(self, specs: list[RunSpec], size: int | None = None) -> None:
        """All runs of one kind, as many at a time as fit."""
        whole, number = len(specs), 0
        while specs and not self.stop():
            try:
                size = self._size(specs) if size is None else size
            except Exception as error:  # not one run fits, or the task cannot make a fleet
                self._failed(specs, _title(specs), error)
                return
            number += 1
            part = specs[: len(fleet_memory.chunks(len(specs), size)[0])]
            title = _title(part) + (f", part {number}" if len(part) < whole else "")
            if self._train(part, self.path, title):
                specs = specs[len(part) :]
            else:
                size = max(1, len(part) // 2)

    def _size(self, specs: Sequence[RunSpec]) -> int:
        """How many runs fit into one fleet."""
        if self.chunk is not None or len(specs) <= _FEW:
            return self.chunk or len(specs)
        most = len(specs) if self.device.type == "cuda" else min(len(specs), _ON_CPU)

        def make(runs: int) -> FleetTraining:  # settings far apart: neighbours in a grid are alike
            return self._fleet([specs[k * len(specs) // runs] for k in range(runs)])

        def step(fleet: FleetTraining) -> None:
            fleet.step()
            fleet.step()
            fleet.state_dict()

        return fleet_memory.capacity(make, step, most, self.device)

    def _fleet(self, specs: Sequence[RunSpec]) -> FleetTraining:
        return self.problem.fleet([(spec.method, spec.seed) for spec in specs], self.device)

    def _train(
        self, specs: list[RunSpec], path: Path, title: str, saved: FleetCheckpoint | None = None
    ) -> bool:
        """One fleet. False when it does not fit into memory: with fewer runs it may."""
        try:
            fleet = FleetRun(
                specs, self._fleet(specs), self.task, self.data, path, title, self.tell, self.best
            )
            if saved is not None:
                fleet.load(saved)
            if fleet.train(self.stop):
                self._finish(fleet)
            else:
                self._note(Outcome(spec.label, "stopped") for spec in specs)
            return True
        except Exception as error:
            if isinstance(error, FolderError) and distributed.world_size() == 1:
                raise
            if not isinstance(error, torch.OutOfMemoryError) or len(specs) == 1:
                self._failed(specs, title, error)
                return True
        gc.collect()
        torch.cuda.empty_cache()
        path.unlink(missing_ok=True)
        text = f"{title}: they do not fit into the memory of {self.device}; trying half of them."
        self.tell(Event("note", title, text=text))
        return False

    def _finish(self, fleet: FleetRun) -> None:
        lines = fleet.lines()
        _add_lines(self.lines, lines)
        fleet.path.unlink(missing_ok=True)
        self._note(_outcome(store.label(line), line["diverged"]) for line in lines)
        reasons = [line["diverged"] for line in lines if line["diverged"] is not None]
        texts = [f"{len(reasons):,} of them diverged, the first {reasons[0]}"] if reasons else []
        best, epochs = self.best, fleet.config.epochs
        text = "; ".join([*texts, *filter(None, [best.text])])
        self.tell(
            Event("finished", fleet.title, epochs, epochs, best.figures, text, count=len(lines))
        )

    def _failed(self, specs: Sequence[RunSpec], title: str, error: Exception) -> None:
        """A fleet that breaks does not stop the others."""
        path = self.folder / f"failure-{distributed.rank()}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(path, "".join(traceback.format_exception(error)))
        text = str(error) or type(error).__name__
        self.tell(Event("failed", title, text=text, details=str(path), count=len(specs)))
        self._note(Outcome(spec.label, "failed", text) for spec in specs)

    def _note(self, outcomes: Iterable[Outcome]) -> None:
        self.outcomes |= {outcome.run: outcome for outcome in outcomes}

    def _gather(self) -> dict[str, Outcome]:
        """The outcomes of all ranks, when the lines of all are in the table."""
        if distributed.world_size() == 1:
            return self.outcomes
        self._collect()
        parts = distributed.all_gather(self.outcomes)
        del parts[distributed.rank()]
        others = {label: outcome for part in parts for label, outcome in part.items()}
        ended = sum(outcome.kind in ("finished", "diverged") for outcome in others.values())
        if ended:
            epochs = self.like.config.epochs
            self.tell(Event("finished", "runs of other processes", epochs, epochs, count=ended))
        return self.outcomes | others


def _add_lines(path: Path, lines: Iterable[Line]) -> None:
    """Put lines beside those of a file, which is written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = store.read_fleet_lines(path) | {store.label(line): line for line in lines}
    store.write_rows(path, table.values())


def _outcome(label: str, diverged: str | None) -> Outcome:
    return Outcome(label, "finished" if diverged is None else "diverged", diverged or "")


def _title(specs: Sequence[RunSpec]) -> str:
    """The methods and the number of runs."""
    names = list(dict.fromkeys(spec.name.partition("@")[0] for spec in specs))
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{shown}: {len(specs):,} runs together"


# --- One fleet ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FleetCheckpoint:
    """A fleet at a step.

    Attributes:
        step: steps made.
        seconds: training time so far.
        task: its name.
        config: of the experiment, plain, without methods and seeds.
        runs: name, seed and plain method of each.
        rows: the last figures of each; none before the first evaluation.
        reasons: why a run diverged, or None.
        fingerprint: of the data.
        training: the state.
    """

    step: int
    seconds: float
    task: str
    config: dict[str, Any]
    runs: list[dict[str, Any]]
    rows: list[Row]
    reasons: list[str | None]
    fingerprint: str
    training: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with store.atomic(path) as file:
            torch.save(vars(self), file)

    def specs(self, like: RunSpec) -> list[RunSpec]:
        """Its runs, of the experiment of another."""
        methods = [from_plain(Method, run["method"], "checkpoint") for run in self.runs]
        return [
            RunSpec(self.task, run["name"], method, run["seed"], like.config)
            for run, method in zip(self.runs, methods, strict=True)
        ]

    @classmethod
    def read(cls, path: Path, like: RunSpec, fingerprint: str) -> FleetCheckpoint:
        """Read it, and refuse that of another experiment or of other data.

        Args:
            path: the file.
            like: any run that wants to go on.
            fingerprint: of its data.
        """
        way_out = f"Delete {path} to start its runs anew, or give --overwrite for all."
        try:
            saved = cls(**torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            text = f"The checkpoint {path} cannot be read: {reason} {way_out}"
            raise FolderError(text) from error
        now = {key: like.plain()[key] for key in ("task", "config")}
        before = {"task": saved.task, "config": saved.config}
        different = store.differences(before, now, like.config.incidental)
        if saved.fingerprint != fingerprint:
            data = f"the data were {saved.fingerprint[:12]} and are {fingerprint[:12]} now"
            different.append(data)
        if different:
            raise FolderError(
                f"The checkpoint {path} is that of other runs: {'; '.join(different)}. {way_out}"
            )
        return saved


@dataclass
class Best:
    """The best run so far by the rule of a sweep, on validation figures.

    Args:
        task: its rule, where it has one, and the figures of its page.
    """

    task: Task
    label: str = ""
    score: tuple[float, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Which run it is."""
        return f"best so far {self.label}" if self.label else ""

    def update(self, specs: Sequence[RunSpec], rows: Sequence[Row | None]) -> None:
        """Take new figures into account; None for a run that has none."""
        rule = self.task.rule(specs[0].config) if specs else None
        if rule is None:
            return
        # A run may have got worse since the last update.
        if any(spec.label == self.label for spec in specs):
            self.label, self.score, self.figures = "", (), {}
        metrics = self.task.page(specs[0].config).metrics
        shown = [metric.key for metric in metrics if metric.key.startswith("val")]
        for spec, row in zip(specs, rows, strict=True):
            if row is None:
                continue
            score = tuple(rule.score(without_test(row)))
            if not any(map(math.isnan, score)) and (not self.label or score < self.score):
                self.label, self.score = spec.label, score
                self.figures = {key: row[key] for key in shown if key in row}


class FleetRun:
    """Runs of one kind, trained together from the first step, or a checkpoint, to their lines.

    They are evaluated before the first step, at every quarter and at the end. A run that leaves the
    finite numbers keeps the last figures that it had.

    Args:
        specs: the runs.
        training: of all of them, at the first step.
        task: for its warnings.
        fingerprint: of the data.
        path: of the checkpoint.
        title: for messages.
        tell: called with what happens.
        best: so far, of all fleets.
    """

    def __init__(
        self,
        specs: Sequence[RunSpec],
        training: FleetTraining,
        task: Task,
        fingerprint: str,
        path: Path,
        title: str,
        tell: Tell,
        best: Best,
    ) -> None:
        self.specs, self.training, self.task = list(specs), training, task
        self.fingerprint, self.path, self.title = fingerprint, path, title
        self.tell, self.best = tell, best
        self.config = specs[0].config
        self.step, self.seconds = 0, 0.0
        self.rows: list[Row] = []
        self.reasons: list[str | None] = [None] * len(specs)
        self._start = self._saved = time.perf_counter()
        self._cost = 0.0

    def load(self, saved: FleetCheckpoint) -> None:
        """Go on from a checkpoint of the same runs."""
        try:
            self.training.load_state_dict(saved.training)
        except (KeyError, ValueError, RuntimeError) as error:
            raise FolderError(
                f"The checkpoint {self.path} does not fit: {error} Delete it to start its runs "
                "anew."
            ) from error
        self.step, self.seconds = saved.step, saved.seconds
        self.rows, self.reasons = list(saved.rows), list(saved.reasons)

    def train(self, stop: Callable[[], bool]) -> bool:
        """Train to the end (True), or until asked to stop (False): then all is saved."""
        self._tell("started")
        if self.rows:
            self.best.update(self.specs, self._finite_rows())
        else:
            self._evaluate()
        per_epoch = self.training.steps_per_epoch
        total, every = self.config.epochs * per_epoch, self.config.checkpoint_every * per_epoch
        marks = {math.ceil(k * total / _EVALUATIONS) for k in range(1, _EVALUATIONS + 1)}
        shown = self._start = self._saved = time.perf_counter()
        while self.step < total:
            self.training.step()
            self.step += 1
            last = self.step == total
            asked = not last and stop()
            evaluate = self.step in marks
            due = not last and self.step % every == 0
            if evaluate or asked or due:
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                self.seconds += time.perf_counter() - self._start
                if evaluate:
                    self._evaluate()
                if asked or (due and self._worth_saving()):
                    self._save()
                self._start = time.perf_counter()
            now = time.perf_counter()
            if evaluate or now - shown > _PROGRESS:
                shown = now
                self._tell("progress")
            if asked:
                self._tell("stopped")
                return False
            if evaluate and None not in self.reasons:
                break  # all have diverged
        return True

    def lines(self) -> list[Line]:
        """What is kept of each run."""
        lines = []
        for k, spec in enumerate(self.specs):
            row, died = self.rows[k], self.training.died[k]
            step = self.step if died < 0 else died
            lines.append(
                {
                    "name": spec.name,
                    "seed": spec.seed,
                    "method": plain(spec.method),
                    "final": row,
                    "end": {},
                    "warnings": list(self.task.warnings(self.config, row)) if row else [],
                    "seconds": self.seconds / len(self.specs),
                    "samples": step * self.training.samples_per_step,
                    "diverged": self.reasons[k],
                    "fingerprint": self.fingerprint,
                    "step": step,
                    "epoch": self._epoch(step),
                }
            )
        return lines

    def _evaluate(self) -> None:
        """Figures of the runs that are still finite; those of the others stay as they were."""
        rows, died = self.training.evaluate(), self.training.died
        facts: Row = {
            "epoch": self._epoch(self.step),
            "step": self.step,
            "samples": self.step * self.training.samples_per_step,
            "seconds": self.seconds / len(self.specs),
        }
        before = self.rows or [{} for _ in self.specs]
        for k, row in enumerate(rows):
            wrong = [key for key, value in row.items() if not math.isfinite(value)]
            if self.reasons[k] is None and died[k] >= 0:
                self.reasons[k] = f"after {died[k]} steps: not finite"
            elif self.reasons[k] is None and wrong:
                self.reasons[k] = f"not finite at epoch {facts['epoch']:g}: {', '.join(wrong)}"
        self.rows = [
            facts | row if reason is None else old
            for row, reason, old in zip(rows, self.reasons, before, strict=True)
        ]
        self.best.update(self.specs, self._finite_rows())

    def _finite_rows(self) -> list[Row | None]:
        pairs = zip(self.rows, self.reasons, strict=True)
        return [row if reason is None else None for row, reason in pairs]

    def _worth_saving(self) -> bool:
        """Thousands of runs are large: writing them must not take longer than training them."""
        return self._cost < _SHORT or time.perf_counter() - self._saved > _SHARE * self._cost

    def _save(self) -> None:
        start = time.perf_counter()
        spec = self.specs[0].plain()
        FleetCheckpoint(
            step=self.step,
            seconds=self.seconds,
            task=spec["task"],
            config=spec["config"],
            runs=[
                {"name": spec.name, "seed": spec.seed, "method": plain(spec.method)}
                for spec in self.specs
            ],
            rows=self.rows,
            reasons=self.reasons,
            fingerprint=self.fingerprint,
            training=tree_map_only(Tensor, Tensor.cpu, self.training.state_dict()),
        ).save(self.path)
        self._saved = time.perf_counter()
        self._cost = self._saved - start

    def _tell(self, kind: Kind) -> None:
        self.tell(
            Event(
                kind,
                self.title,
                self._epoch(self.step),
                self.config.epochs,
                self.best.figures,
                self.best.text,
                count=len(self.specs),
            )
        )

    def _epoch(self, step: int) -> float:
        whole, rest = divmod(step, self.training.steps_per_epoch)
        return whole if rest == 0 else step / self.training.steps_per_epoch
