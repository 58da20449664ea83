"""A runner that trains runs of one kind together, as fleets, in the place of `workers.run`.

A finished run leaves one line, as `result.json` of a run that was trained alone: in `fleet.jsonl`,
or in `fleet/lines-RANK.jsonl` where torchrun started several processes. Each of these trains a part
of the runs on a device of its own; they meet at the start and at the end. Fleets under way have
checkpoints in the folder `fleet`.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from . import distributed, engine, environment, store, tasks, workers
from .config import from_plain, plain
from .engine import Tell
from .store import FLEET_FOLDER, FLEET_LINES, Event, FolderError, Kind, Outcome, RunSpec
from .task import FleetTraining, Method, Problem, Row

_EVERY = 0.2  # seconds between two progress events
_QUARTERS = 4
_SHORT, _SHARE = 1.0, 20
"""A checkpoint that takes longer than these seconds waits until it is that part of the time."""
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
    problem: Problem | None = None,
    device: str = "auto",
    chunk: int | None = None,
) -> list[Outcome]:
    """Do all runs, as `workers.run` does: those that a fleet can hold together, the others alone.

    Runs of a fleet leave one line each and no curves. Each rank trains an equal part of the runs of
    each kind. The arguments are those of `workers.run`, and:

    Args:
        device: `"auto"`, `"cpu"` or `"cuda"`; a field `device` of the config rules.
        chunk: runs of a fleet at most; unless given as many as fit, on a CPU into its caches.
    """
    from .workers import load, stoppable
    from .workers import run as run_alone

    if not specs:
        return []
    wanted = specs[0].config.preferred_device or device
    place = distributed.run_on_all(lambda: distributed.device(wanted))
    with stoppable(on_event) as (tell, stop), _prepared(place):
        problem = distributed.run_on_all(lambda: problem or load(specs[0], tell))
        # What an earlier command has begun to train alone goes on so.
        begun = distributed.run_on_first(
            lambda: {s.label for s in specs if engine.has_checkpoint(s.folder(out))}
        )
        together: dict[Hashable, list[RunSpec]] = {}
        alone: list[RunSpec] = []
        for spec in specs:
            kind = problem.fleet_kind(spec.method, spec.seed)
            fits = kind is not None and spec.label not in begun
            (together.setdefault(kind, []) if fits else alone).append(spec)
        done = _Fleets(problem, specs[0], out, place, chunk, tell, stop).run(together)
        stopped = distributed.any_rank(stop())
    if alone and not stopped:
        ended = run_alone(
            alone, out, workers=workers, resume=resume, tensorboard=tensorboard, on_event=on_event,
            problem=problem,
        )  # fmt: skip
        done |= {outcome.run: outcome for outcome in ended}
    return [done.get(spec.label, Outcome(spec.label, "stopped")) for spec in specs]


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


def capacity(
    make: Callable[[int], Any],
    step: Callable[[Any], object],
    runs: int,
    device: torch.device,
    share: float = 0.8,
) -> int:
    """How many runs can be in one fleet on a GPU, from the peaks of memory of two small fleets.

    Args:
        make: builds a fleet of so many runs.
        step: makes its most expensive steps.
        runs: the number of all runs.
        device: the GPU.
        share: of the free memory that may be used; peaks are not quite linear.
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
            step(make(size))
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            return size // 2
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        gc.collect()  # the graphs of a fleet may refer to it
        torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    per_run = max(1.0, (peaks[1] - peaks[0]) / (sizes[1] - sizes[0]))
    return max(1, min(runs, sizes[1] + int((share * free - peaks[1]) // per_run)))


class _FleetRun:
    """Runs of one kind, trained together from the first step, or a checkpoint, to their lines.

    They are evaluated before the first step, at every quarter and at the end. A run that leaves the
    finite numbers keeps the last figures that it had.
    """

    def __init__(
        self,
        specs: Sequence[RunSpec],
        training: FleetTraining,
        data: str,
        path: Path,
        title: str,
        tell: Tell,
    ) -> None:
        self.specs, self.training, self.data = list(specs), training, data
        self.path, self.title, self.tell, self.config = path, title, tell, specs[0].config
        self.total = self.config.epochs * training.steps_per_epoch
        self.step, self.seconds = 0, 0.0
        self.rows: list[Row] = []
        self.reasons: list[str | None] = [None] * len(specs)
        self._start = self._saved = time.perf_counter()
        self._cost = 0.0

    @property
    def epoch(self) -> float:
        return engine.epochs_of(self.step, self.training.steps_per_epoch)

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint of the same runs."""
        way_out = f"Delete {self.path} to start its runs anew."
        engine.check_bounds(self.path, saved, self.total, way_out)
        try:
            self.training.load_state_dict(saved["training"])
        except (KeyError, ValueError, RuntimeError) as error:
            text = f"The checkpoint {self.path} does not fit: {error} {way_out}"
            raise FolderError(text) from error
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.rows, self.reasons = list(saved["rows"]), list(saved["reasons"])

    def go(self, stop: Callable[[], bool]) -> bool:
        """Train to the end (True), or until asked to stop (False): then all is saved."""
        self._tell("started")
        if not self.rows:
            self._evaluate()
        marks = {math.ceil(k * self.total / _QUARTERS) for k in range(1, _QUARTERS + 1)}
        every = self.config.checkpoint_every * self.training.steps_per_epoch
        told = self._start = self._saved = time.perf_counter()
        while self.step < self.total:
            self.training.step()
            self.step += 1
            last = self.step == self.total
            asked = not last and stop()
            evaluate = self.step in marks
            due = not last and self.step % every == 0
            if evaluate or asked or due:
                self._pause()
                if evaluate:
                    self._evaluate()
                if asked or (due and self._worth_it()):
                    self._save()
                self._start = time.perf_counter()
            now = time.perf_counter()
            if evaluate or now - told > _EVERY:
                told = now
                self._tell("progress")
            if asked:
                self._tell("stopped")
                return False
            if evaluate and None not in self.reasons:
                break  # nobody is left
        return True

    def lines(self, warnings: Callable[[Row], Iterable[str]]) -> list[Row]:
        """What is kept of each run."""
        lines = []
        ends = zip(self.specs, self.rows, self.reasons, self.training.died, strict=True)
        for spec, row, reason, died in ends:
            step = self.step if died < 0 else died
            line = {
                "name": spec.name,
                "seed": spec.seed,
                "method": plain(spec.method),
                "final": row,
                "end": {},
                "warnings": list(warnings(row)) if row else [],
                "seconds": self.seconds / len(self.specs),
                "samples": step * self.training.samples_per_step,
                "diverged": reason,
                "fingerprint": self.data,
                "step": step,
                "epoch": engine.epochs_of(step, self.training.steps_per_epoch),
            }
            lines.append(line)
        return lines

    def _pause(self) -> None:
        """Stop the clock when the device has done what it was given."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self._start

    def _evaluate(self) -> None:
        """Figures of the runs that are still there; those of the others stay as they were."""
        figures, died = self.training.evaluate(), self.training.died
        facts: Row = {
            "epoch": self.epoch,
            "step": self.step,
            "samples": self.step * self.training.samples_per_step,
            "seconds": self.seconds / len(self.specs),
        }
        before = self.rows or [{} for _ in self.specs]
        self.rows = []
        for place, row in enumerate(figures):
            wrong = [key for key, value in row.items() if not math.isfinite(value)]
            if self.reasons[place] is None and died[place] >= 0:
                self.reasons[place] = f"after {died[place]} steps: not finite"
            elif self.reasons[place] is None and wrong:
                self.reasons[place] = f"not finite at epoch {self.epoch:g}: {', '.join(wrong)}"
            self.rows.append(facts | row if self.reasons[place] is None else before[place])

    def _worth_it(self) -> bool:
        """Thousands of runs are large: writing them must not take longer than training them."""
        return self._cost < _SHORT or time.perf_counter() - self._saved > _SHARE * self._cost

    def _save(self) -> None:
        start = time.perf_counter()
        plain_specs = [spec.plain() for spec in self.specs]
        content = {
            "step": self.step,
            "seconds": self.seconds,
            "task": plain_specs[0]["task"],
            "config": plain_specs[0]["config"],
            "runs": [{key: s[key] for key in ("name", "seed", "method")} for s in plain_specs],
            "rows": self.rows,
            "reasons": self.reasons,
            "fingerprint": self.data,
            "training": tree_map_only(Tensor, Tensor.cpu, self.training.state_dict()),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        engine.write_checkpoint(self.path, content)
        self._saved = time.perf_counter()
        self._cost = self._saved - start

    def _tell(self, kind: Kind) -> None:
        epochs, count = self.config.epochs, len(self.specs)
        self.tell(Event(kind, self.title, self.epoch, epochs, count=count))


class _Fleets:
    """All fleets of this process, one after another; `like` is any of the runs."""

    def __init__(
        self,
        problem: Any,
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
        self.lines = (
            out / FLEET_LINES if self.ranks == 1 else self.folder / f"lines-{self.rank}.jsonl"
        )

    def run(self, kinds: dict[Hashable, list[RunSpec]]) -> dict[str, Outcome]:
        """Outcomes of all runs, those of other ranks too; what was not begun is left out."""
        done = distributed.run_on_first(self._finished)
        claimed = distributed.run_on_all(lambda: self._claim(done))
        labels = [store.label(line) for saved in claimed.values() for line in saved["runs"]]
        under_way = {label for some in distributed.all_gather(labels) for label in some}
        left = {
            kind: [spec for spec in group if spec.label not in done | under_way]
            for kind, group in kinds.items()
        }
        if under_way or any(left.values()):
            distributed.run_on_first(self._describe)
        for path in list(claimed):
            self._resume(path, claimed.pop(path))
        for group in left.values():
            self._train_all(group[self.rank :: self.ranks])
        everywhere: dict[str, Outcome] = {}
        for some in distributed.all_gather(self.outcomes):
            everywhere |= some
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
        names = [re.fullmatch(r"checkpoint-(\d+)\b.*", p.name) for p in self.folder.glob("*.pt")]
        claimed = {}
        for number in sorted({int(name[1]) for name in names if name is not None}):
            path = self.folder / f"checkpoint-{number}.pt"
            if number % self.ranks != self.rank or (saved := self._read(path)) is None:
                continue
            if all(store.label(line) in done for line in saved["runs"]):
                engine.remove_checkpoint(path)  # it ended between two files
            else:
                claimed[path] = saved
        return claimed

    def _read(self, path: Path) -> dict[str, Any] | None:
        """A checkpoint, refused when it is that of another experiment or of other data."""
        way_out = f"Delete {path} to start its runs anew, or give --overwrite for all."
        warn = lambda text: self.tell(Event("note", "", text=text))  # noqa: E731
        saved = engine.read_checkpoint(path, warn, way_out)
        if saved is not None:
            keys, spec = ("task", "config"), self.like.plain()
            changes = store.differences(
                {k: saved[k] for k in keys}, {k: spec[k] for k in keys}, self.like.config.incidental
            )
            engine.refuse_changes(path, changes, saved["fingerprint"], self.data, way_out)
        return saved

    def _describe(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        environment.write(self.folder / store.ENVIRONMENT, self.device, "fleets", True)

    def _resume(self, path: Path, saved: dict[str, Any]) -> None:
        if self.stop():
            return
        specs = [
            RunSpec(
                saved["task"], entry["name"], from_plain(Method, entry["method"], "checkpoint"),
                entry["seed"], self.like.config,
            )
            for entry in saved["runs"]
        ]  # fmt: skip
        if not self._train(specs, path, _title(specs), saved):
            self._train_all(specs, max(1, len(specs) // 2))

    def _train_all(self, specs: list[RunSpec], size: int | None = None) -> None:
        """All runs of one kind, as many at a time as fit, in parts of nearly equal size."""
        whole, number, path = len(specs), 0, self.folder / f"checkpoint-{self.rank}.pt"
        while specs and not self.stop():
            try:
                size = self._size(specs) if size is None else size
            except Exception as error:  # not one run fits, or the task cannot make a fleet
                self._failed(specs, _title(specs), error)
                return
            number += 1
            parts = math.ceil(len(specs) / size)
            part = specs[: math.ceil(len(specs) / parts)]
            title = _title(part) + (f", part {number}" if len(part) < whole else "")
            if self._train(part, path, title):
                specs = specs[len(part) :]
            else:
                size = max(1, len(part) // 2)

    def _size(self, specs: Sequence[RunSpec]) -> int:
        """How many runs fit into one fleet."""
        if self.chunk is not None or self.device.type != "cuda":
            return self.chunk or _ON_CPU

        def make(runs: int) -> Any:  # settings far apart: neighbours in a grid are alike
            return self._fleet([specs[place * len(specs) // runs] for place in range(runs)])

        def step(fleet: Any) -> None:
            fleet.step()
            fleet.step()
            fleet.state_dict()

        return capacity(make, step, len(specs), self.device)

    def _fleet(self, specs: Sequence[RunSpec]) -> FleetTraining:
        return self.problem.fleet([(spec.method, spec.seed) for spec in specs], self.device)

    def _train(
        self, specs: list[RunSpec], path: Path, title: str, saved: dict[str, Any] | None = None
    ) -> bool:
        """One fleet. False when it does not fit into memory: with fewer runs it may."""
        try:
            fleet = _FleetRun(specs, self._fleet(specs), self.data, path, title, self.tell)
            if saved is not None:
                fleet.load(saved)
            if fleet.go(self.stop):
                self._end(fleet)
            else:
                self._note(Outcome(spec.label, "stopped") for spec in specs)
            return True
        except Exception as error:
            if isinstance(error, FolderError) and self.ranks == 1:
                raise
            if not isinstance(error, torch.OutOfMemoryError) or len(specs) == 1:
                self._failed(specs, title, error)
                return True
        gc.collect()
        torch.cuda.empty_cache()
        engine.remove_checkpoint(path)
        text = f"{title}: they do not fit into the memory of {self.device}; trying half of them."
        self.tell(Event("note", title, text=text))
        return False

    def _end(self, fleet: _FleetRun) -> None:
        task, config = tasks.get(self.like.task), fleet.config
        lines = {store.label(ln): ln for ln in fleet.lines(lambda row: task.warnings(config, row))}
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        store.write_rows(self.lines, (store.read_results(self.lines) | lines).values())
        engine.remove_checkpoint(fleet.path)
        self._note(
            Outcome(name, "diverged" if line["diverged"] else "finished", line["diverged"] or "")
            for name, line in lines.items()
        )
        wrong = [line["diverged"] for line in lines.values() if line["diverged"] is not None]
        text = f"{len(wrong):,} of them diverged, the first {wrong[0]}" if wrong else ""
        epochs = config.epochs
        self.tell(Event("finished", fleet.title, epochs, epochs, text=text, count=len(lines)))

    def _failed(self, specs: Sequence[RunSpec], title: str, error: Exception) -> None:
        """A fleet that breaks does not stop the others."""
        details = workers.keep_traceback(self.folder / f"failure-{self.rank}.txt", error)
        text = str(error) or type(error).__name__
        self.tell(Event("failed", title, text=text, details=details, count=len(specs)))
        self._note(Outcome(spec.label, "failed", text) for spec in specs)

    def _note(self, outcomes: Iterable[Outcome]) -> None:
        self.outcomes |= {outcome.run: outcome for outcome in outcomes}


def _title(specs: Sequence[RunSpec]) -> str:
    """The methods and the number of runs."""
    names = list(dict.fromkeys(spec.name.partition("@")[0] for spec in specs))
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{shown}: {len(specs):,} runs together"
