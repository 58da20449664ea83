"""The fleets of one process: cut to what fits, trained one after another, gathered at the end."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import distributed, environment, fleet_files, fleet_memory, store, tasks
from .distributed import fingerprint
from .fleet_files import FleetCheckpoint
from .fleet_run import Best, FleetRun
from .store import FLEET_FOLDER, FLEET_LINES, Event, Outcome, RunSpec
from .workers import Tell

__all__ = ["Fleets"]

_FEW = 16
"""So many runs are not worth the question how many fit."""
_ON_CPU = 64
"""More runs at a time do not fit into the caches of a CPU and take longer each."""


class Fleets:
    """All fleets of this process, one after another.

    Args:
        problem: data and model.
        like: any of the runs.
        out: folder of the comparison.
        device: where to train.
        chunk: runs of a fleet at most.
        tell: told what happens.
        stop: whether to save and stop.
    """

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
        self.task = tasks.get(like.task)
        self.data = distributed.run_on_all(lambda: fingerprint(problem))
        self.best = Best(self.task)
        self.outcomes: dict[str, Outcome] = {}
        own = distributed.rank()
        self.path = out / FLEET_FOLDER / f"checkpoint-{own}.pt"
        self.lines = out / (
            FLEET_LINES if distributed.world_size() == 1 else f"{FLEET_FOLDER}/lines-{own}.jsonl"
        )

    def run(self, kinds: dict[Hashable, list[RunSpec]]) -> dict[str, Outcome]:
        """Outcomes of all runs, those of other ranks too; what was not begun is left out."""
        done = self._collect()
        distributed.run_on_first(lambda: fleet_files.check_data(self.out, self.data))
        held = distributed.run_on_all(self._claimed)
        taken = {label for labels in distributed.all_gather(self._labels(held)) for label in labels}
        taken |= done.keys()
        left = {
            kind: [spec for spec in group if spec.label not in taken]
            for kind, group in kinds.items()
        }
        if held or any(left.values()):
            distributed.run_on_first(self._describe)
        for path in held:
            self._resumed(path)
        for group in left.values():
            self._kind(group[distributed.rank() :: distributed.world_size()])
        return done | self._gathered()

    # What lies in the folder.

    def _collect(self) -> dict[str, Outcome]:
        """Put the lines of single processes into the table; outcomes of all runs in it."""
        lines = distributed.run_on_all(
            lambda: [
                line
                for p in fleet_files.parts(self.out)
                for line in store.read_fleet_lines(p).values()
            ]
        )
        every = [line for some in distributed.all_gather(lines) for line in some]
        if every:
            distributed.run_on_first(lambda: fleet_files.add(self.out / FLEET_LINES, every))
        for path in fleet_files.parts(self.out):
            path.unlink(missing_ok=True)
        there = distributed.run_on_first(
            lambda: store.read_fleet_lines(self.out / FLEET_LINES) if every else {}
        )
        return {name: _outcome(name, line["diverged"]) for name, line in there.items()}

    def _claimed(self) -> list[Path]:
        """Checkpoints that this process goes on with: its own, and those of ranks that are gone."""
        there = fleet_files.checkpoints(self.out)
        mine = [
            p
            for n, p in sorted(there.items())
            if n % distributed.world_size() == distributed.rank()
        ]
        finished = store.read_fleet_lines(self.out / FLEET_LINES)
        kept = []
        for path in mine:
            held = FleetCheckpoint.read(path, self.like, self.data)
            if all(store.label(each) in finished for each in held.runs):
                path.unlink()  # it ended between two files
            else:
                kept.append(path)
        return kept

    def _labels(self, paths: Sequence[Path]) -> list[str]:
        held = (FleetCheckpoint.read(path, self.like, self.data) for path in paths)
        return [store.label(each) for checkpoint in held for each in checkpoint.runs]

    def _describe(self) -> None:
        path = self.out / FLEET_FOLDER / store.ENVIRONMENT
        path.parent.mkdir(parents=True, exist_ok=True)
        said = environment.describe(self.device)
        if path.is_file():
            before = store.read_json(path)
            again = f"{said['start']}, fcco {said['fcco']}, device {said['device']}"
            said = before | {"resumed": [*before.get("resumed", ()), again]}
        store.write_json(path, said)

    # Training.

    def _resumed(self, path: Path) -> None:
        if self.stop():
            return
        specs = FleetCheckpoint.read(path, self.like, self.data).specs(self.like.config)
        if not self._train(specs, path, _title(specs), resumed=True):
            self._kind(specs, max(1, len(specs) // 2))

    def _kind(self, specs: list[RunSpec], size: int | None = None) -> None:
        """All runs of one kind, as many at a time as fit."""
        whole, number = len(specs), 0
        while specs and not self.stop():
            try:
                size = self._size(specs) if size is None else size
            except Exception as error:  # not one run fits, or the task cannot make a fleet
                self._failed(specs, _title(specs), error)
                return
            number += 1
            here = [specs[place] for place in fleet_memory.chunks(len(specs), size)[0]]
            title = _title(here) + (f", part {number}" if len(here) < whole else "")
            if self._train(here, self.path, title):
                specs = specs[len(here) :]
            else:
                size = max(1, len(here) // 2)

    def _size(self, specs: Sequence[RunSpec]) -> int:
        """How many runs fit into one fleet."""
        if self.chunk is not None or len(specs) <= _FEW:
            return self.chunk or len(specs)
        most = len(specs) if self.device.type == "cuda" else min(len(specs), _ON_CPU)

        def make(runs: int) -> Any:  # settings far apart: neighbours in a grid are alike
            return self._fleet([specs[place * len(specs) // runs] for place in range(runs)])

        def step(fleet: Any) -> None:
            fleet.step()
            fleet.step()
            fleet.state_dict()

        return fleet_memory.capacity(make, step, most, self.device)

    def _fleet(self, specs: Sequence[RunSpec]) -> Any:
        return self.problem.fleet([(spec.method, spec.seed) for spec in specs], self.device)

    def _train(
        self, specs: list[RunSpec], path: Path, title: str, *, resumed: bool = False
    ) -> bool:
        """One fleet. False when it does not fit into memory: with fewer runs it may."""
        try:
            self._through(specs, path, title, resumed)
            return True
        except Exception as error:
            if isinstance(error, store.FolderError) and distributed.world_size() == 1:
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

    def _through(self, specs: list[RunSpec], path: Path, title: str, resumed: bool) -> None:
        training = self._fleet(specs)
        fleet = FleetRun(specs, training, self.task, self.data, path, title, self.tell, self.best)
        if resumed:
            fleet.load(FleetCheckpoint.read(path, self.like, self.data))
        if fleet.go(self.stop):
            self._end(fleet)
        else:
            self._note(Outcome(spec.label, "stopped") for spec in specs)

    def _end(self, fleet: FleetRun) -> None:
        lines = fleet.lines()
        fleet_files.add(self.lines, lines)
        fleet.path.unlink(missing_ok=True)
        self._note(_outcome(store.label(line), line["diverged"]) for line in lines)
        wrong = [line["diverged"] for line in lines if line["diverged"] is not None]
        said = [f"{len(wrong):,} of them diverged, the first {wrong[0]}"] if wrong else []
        best, epochs = self.best, fleet.config.epochs
        text = "; ".join([*said, *filter(None, [best.words])])
        self.tell(
            Event("finished", fleet.title, epochs, epochs, best.figures, text, count=len(lines))
        )

    def _failed(self, specs: Sequence[RunSpec], title: str, error: Exception) -> None:
        """A fleet that breaks does not stop the others."""
        path = self.out / FLEET_FOLDER / f"failure-{distributed.rank()}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(path, "".join(traceback.format_exception(error)))
        text = str(error) or type(error).__name__
        self.tell(Event("failed", title, text=text, details=str(path), count=len(specs)))
        self._note(Outcome(spec.label, "failed", text) for spec in specs)

    def _note(self, outcomes: Iterable[Outcome]) -> None:
        self.outcomes |= {outcome.run: outcome for outcome in outcomes}

    def _gathered(self) -> dict[str, Outcome]:
        """The outcomes of all ranks, when the lines of all are in the table."""
        if distributed.world_size() == 1:
            return self.outcomes
        self._collect()
        found = distributed.all_gather(self.outcomes)
        others = {
            k: v
            for rank, some in enumerate(found)
            if rank != distributed.rank()
            for k, v in some.items()
        }
        ended = [each for each in others.values() if each.kind in ("finished", "diverged")]
        if ended:
            epochs = self.like.config.epochs
            title = "runs of other processes"
            self.tell(Event("finished", title, epochs, epochs, count=len(ended)))
        return self.outcomes | others


def _outcome(label: str, diverged: str | None) -> Outcome:
    return Outcome(label, "finished" if diverged is None else "diverged", diverged or "")


def _title(specs: Sequence[RunSpec]) -> str:
    """The methods and the number of runs."""
    names = list(dict.fromkeys(spec.name.partition("@")[0] for spec in specs))
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{shown}: {len(specs):,} runs together"
