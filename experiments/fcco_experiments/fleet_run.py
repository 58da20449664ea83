"""One fleet from its first step, or its checkpoint, to a line for each of its runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .config import plain
from .fleet_files import FleetCheckpoint, Line
from .store import Event, FolderError, Kind, RunSpec
from .sweep import without_test
from .task import FleetTraining, Row, Task

__all__ = ["Best", "FleetRun"]

_EVERY = 0.2  # seconds between two progress events
_QUARTERS = 4
_SHORT, _SHARE = 1.0, 20
"""A checkpoint that takes longer than these seconds waits until it is that part of the time."""


@dataclass
class Best:
    """The best run so far by the rule of a sweep, on validation figures.

    Args:
        task: its `score`, where it has one, and the figures of its page.
    """

    task: Task
    label: str = ""
    score: tuple[float, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Which run it is."""
        return f"best so far {self.label}" if self.label else ""

    def look(self, specs: Sequence[RunSpec], rows: Sequence[Row | None]) -> None:
        """Take new figures into account; None for a run that has none."""
        if not specs:
            return
        config = specs[0].config
        rule = self.task.rule(config)
        if rule is None:
            return
        # A run may have got worse since the last look.
        if any(spec.label == self.label for spec in specs):
            self.label, self.score, self.figures = "", (), {}
        shown = [m.key for m in self.task.page(config).metrics if m.key.startswith("val")]
        for spec, row in zip(specs, rows, strict=True):
            if row is None:
                continue
            score = tuple(rule.score(without_test(row)))
            if not any(map(math.isnan, score)) and (not self.label or score < self.score):
                self.label, self.score = spec.label, score
                self.figures = {key: row[key] for key in shown if key in row}


class FleetRun:
    """Runs of one kind, trained together.

    They are evaluated before the first step, at every quarter and at the end. A run that leaves the
    finite numbers keeps the last figures that it had.

    Args:
        specs: the runs.
        training: of all of them, at the first step.
        task: for its words.
        fingerprint: of the data.
        path: of the checkpoint.
        title: for messages.
        tell: told what happens.
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
        tell: Callable[[Event], None],
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

    @property
    def epoch(self) -> float:
        """Epochs made."""
        return _epoch(self.step, self.training.steps_per_epoch)

    @property
    def total(self) -> int:
        """Steps of all epochs."""
        return self.config.epochs * self.training.steps_per_epoch

    @property
    def marks(self) -> set[int]:
        """Steps after which to evaluate."""
        return {math.ceil(k * self.total / _QUARTERS) for k in range(1, _QUARTERS + 1)}

    def load(self, held: FleetCheckpoint) -> None:
        """Go on from a checkpoint of the same runs."""
        try:
            self.training.load_state_dict(held.training)
        except (KeyError, ValueError, RuntimeError) as error:
            raise FolderError(
                f"The checkpoint {self.path} does not fit: {error} Delete it to start its runs "
                "anew."
            ) from error
        self.step, self.seconds = held.step, held.seconds
        self.rows, self.reasons = list(held.rows), list(held.reasons)

    def go(self, stop: Callable[[], bool]) -> bool:
        """Train to the end (True), or until asked to stop (False): then all is saved."""
        self._tell("started")
        if not self.rows:
            self._evaluate()
        else:
            self.best.look(self.specs, self._last())
        marks, every = self.marks, self.config.checkpoint_every * self.training.steps_per_epoch
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
            if evaluate and all(reason is not None for reason in self.reasons):
                break  # nobody is left
        return True

    def lines(self) -> list[Line]:
        """What is kept of each run."""
        died, seconds = self.training.died, self.seconds / len(self.specs)
        return [
            {
                "name": spec.name,
                "seed": spec.seed,
                "method": plain(spec.method),
                "final": row,
                "end": {},
                "warnings": list(self.task.warnings(self.config, row)) if row else [],
                "seconds": seconds,
                "samples": (step := self.step if dead < 0 else dead)
                * self.training.samples_per_step,
                "diverged": reason,
                "fingerprint": self.fingerprint,
                "step": step,
                "epoch": _epoch(step, self.training.steps_per_epoch),
            }
            for spec, row, reason, dead in zip(
                self.specs, self.rows, self.reasons, died, strict=True
            )
        ]

    def _pause(self) -> None:
        """Stop the clock when the device has done what it was given."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self._start

    def _evaluate(self) -> None:
        """Figures of the runs that are still there; those of the others stay as they were."""
        found = self.training.evaluate()
        died = self.training.died
        facts: Row = {
            "epoch": self.epoch,
            "step": self.step,
            "samples": self.step * self.training.samples_per_step,
            "seconds": self.seconds / len(self.specs),
        }
        before = self.rows or [{} for _ in self.specs]
        self.rows = []
        for place, row in enumerate(found):
            wrong = [key for key, value in row.items() if not math.isfinite(value)]
            if self.reasons[place] is None and died[place] >= 0:
                self.reasons[place] = f"after {died[place]} steps: not finite"
            elif self.reasons[place] is None and wrong:
                self.reasons[place] = f"not finite at epoch {self.epoch:g}: {', '.join(wrong)}"
            good = self.reasons[place] is None
            self.rows.append(facts | row if good else before[place])
        self.best.look(self.specs, self._last())

    def _last(self) -> list[Row | None]:
        both = zip(self.rows, self.reasons, strict=True)
        return [row if reason is None else None for row, reason in both]

    def _worth_it(self) -> bool:
        """Thousands of runs are large: writing them must not take longer than training them."""
        return self._cost < _SHORT or time.perf_counter() - self._saved > _SHARE * self._cost

    def _save(self) -> None:
        begun = time.perf_counter()
        spec = self.specs[0].plain()
        FleetCheckpoint(
            step=self.step,
            seconds=self.seconds,
            task=spec["task"],
            config=spec["config"],
            runs=[
                {"name": each.name, "seed": each.seed, "method": plain(each.method)}
                for each in self.specs
            ],
            rows=self.rows,
            reasons=self.reasons,
            fingerprint=self.fingerprint,
            training=tree_map_only(Tensor, Tensor.cpu, self.training.state_dict()),
        ).save(self.path)
        self._saved = time.perf_counter()
        self._cost = self._saved - begun

    def _tell(self, kind: Kind) -> None:
        self.tell(
            Event(
                kind,
                self.title,
                self.epoch,
                self.config.epochs,
                self.best.figures,
                self.best.words,
                count=len(self.specs),
            )
        )


def _epoch(step: int, per_epoch: int) -> float:
    whole, rest = divmod(step, per_epoch)
    return whole if rest == 0 else step / per_epoch
