"""One run from its first step to its result, or from its checkpoint: the same, bit for bit."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fcco import NonFiniteValue

from .. import environment, store, tasks
from ..config import dump, plain
from ..store import Event, FolderError, Kind, Outcome, RunSpec
from ..task import FleetTraining, Problem, Row, Task, Training
from . import checkpoint

Tell = Callable[[Event], None]

TELL_EVERY = 0.2  # seconds between two progress events of a run


def finished_result(spec: RunSpec, folder: Path, *, resume: bool) -> dict[str, Any] | None:
    """The result of a finished run; refuses a folder that cannot be used, and changes nothing."""
    if not store.has_run(folder):
        return None
    if not resume:
        raise FolderError(
            f"{folder} has a run already. Go on with it: --resume. Delete it and start anew: "
            "--overwrite."
        )
    saved = store.read_spec(folder) if (folder / store.CONFIG).is_file() else None
    if saved is not None and (changes := spec.differences(saved)):
        raise FolderError(
            f"{folder} has another run: {'; '.join(changes)}. Choose another place with --out, "
            "or start anew with --overwrite."
        )
    return store.read_result(folder) if (folder / store.RESULT).is_file() else None


def train(
    spec: RunSpec,
    folder: Path,
    problem: Problem | None = None,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_event: Tell = lambda event: None,
    tensorboard: bool = False,
) -> Outcome:
    """Train, evaluate and save as the spec says.

    An epoch is `steps_per_epoch` steps. Evaluations come before the first step, every
    `evaluate_every` epochs and at the end; checkpoints every `checkpoint_every` epochs, at the end
    and when asked to stop.

    With `resume` a run goes on from its checkpoint, if there is one, and a finished one is left as
    it is. `stop` is asked after each step; when true, the run saves itself and ends.
    """
    result = finished_result(spec, folder, resume=resume)
    if result is not None:
        return outcome_of(spec.label, result)
    task = tasks.get(spec.task)
    problem = problem or task.load(spec.config)
    with store.locked(folder):
        return _Run(spec, folder, task, problem, on_event, stop).go(tensorboard)


def outcome_of(label: str, result: Mapping[str, Any]) -> Outcome:
    """How a run with this result ended."""
    reason = result["diverged"]
    return Outcome(label, "finished" if reason is None else "diverged", reason or "")


class _Diverged(Exception):
    """A figure of an evaluation is not finite."""


class _Run:
    """A run in memory: what the checkpoint holds, and the loop."""

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        task: Task,
        problem: Problem,
        on_event: Tell,
        stop: Callable[[], bool],
    ) -> None:
        self.spec, self.folder, self.task = spec, folder, task
        self.on_event, self.stop = on_event, stop
        self.data = problem.fingerprint()
        self.step, self.seconds, self.rows = 0, 0.0, list[Row]()
        checkpoint.seed_all(spec.seed)
        self.training: Training = problem.start(spec.method, spec.seed)
        self.total = spec.config.epochs * self.training.steps_per_epoch
        self.board: Any = None  # a SummaryWriter

    @property
    def epoch(self) -> float:
        return epochs_of(self.step, self.training.steps_per_epoch)

    def go(self, tensorboard: bool) -> Outcome:
        self._load()
        self._begin(tensorboard)
        self._tell("started")
        try:
            if self._loop():
                self._tell("stopped")
                return Outcome(self.spec.label, "stopped")
            end = store.clean(self.training.finish())
        except _Diverged as reason:
            return self._end({}, str(reason))
        except (FloatingPointError, NonFiniteValue) as reason:
            return self._end({}, f"after {self.step} steps: {reason}")
        finally:
            if self.board is not None:
                self.board.close()
        return self._end(end, None)

    def _begin(self, tensorboard: bool) -> None:
        """Write config, environment and the evaluations of the checkpoint, before the first step.

        Evaluations after the checkpoint belong to steps that will be made again.
        """
        store.write_text(self.folder / store.CONFIG, dump(self.spec.plain()))
        environment.write(
            self.folder / store.ENVIRONMENT, self.training.device, f"step {self.step}", self.step
        )
        store.write_rows(self.folder / store.METRICS, self.rows)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]

            shutil.rmtree(self.folder / store.TENSORBOARD, ignore_errors=True)
            self.board = SummaryWriter(str(self.folder / store.TENSORBOARD))
            for row in self.rows:
                self._add_scalars(row)

    def _add_scalars(self, row: Row) -> None:
        """One evaluation for TensorBoard; lists become one scalar for each entry."""
        for key, value in row.items():
            for place, entry in enumerate(value if isinstance(value, list) else [value]):
                name = f"{key}/{place}" if isinstance(value, list) else key
                if isinstance(entry, (int, float)):
                    self.board.add_scalar(name, entry, row["step"])

    def _loop(self) -> bool:
        """Step until the end (False) or until asked to stop (True)."""
        config, per_epoch = self.spec.config, self.training.steps_per_epoch
        if not self.rows:
            self._evaluate()
        told = start = time.perf_counter()
        while self.step < self.total:
            made = self.step + 1
            last = made == self.total
            evaluate = last or made % (config.evaluate_every * per_epoch) == 0
            due = last or made % (config.checkpoint_every * per_epoch) == 0
            self.training.step()
            self.step, asked = made, self.stop()
            save = asked or due
            now = time.perf_counter()
            if evaluate or save:
                self.seconds += now - start
                if evaluate:
                    self._evaluate()
                if save:
                    self._save()
                start = time.perf_counter()
            if evaluate or now - told > TELL_EVERY:
                told = now
                self._tell("progress")
            if asked and not last:
                return True
        return False

    def _evaluate(self) -> None:
        figures = self.training.evaluate()
        figures = {key: store.to_list(value) for key, value in figures.items()}
        row = evaluation(self.training, self.step, self.seconds, figures)
        wrong = [key for key, value in row.items() if not _is_finite(value)]
        if wrong:
            raise _Diverged(f"not finite at epoch {self.epoch:g}: {', '.join(wrong)}")
        self.rows.append(row)
        store.write_rows(self.folder / store.METRICS, self.rows)
        if self.board is not None:
            self._add_scalars(row)

    def _save(self) -> None:
        content = {
            "step": self.step,
            "seconds": self.seconds,
            "rows": self.rows,
            "training": self.training.state_dict(),
            "fingerprint": self.data,
            "spec": self.spec.plain(),
            "random": checkpoint.random_state(),
        }
        checkpoint.write(self.folder / store.CHECKPOINT, content)

    def _load(self) -> None:
        """Go on from the checkpoint, if there is one."""
        path, warn = self.folder / store.CHECKPOINT, lambda text: self._tell("note", text)
        saved = checkpoint.read(path, self.spec.differences, self.data, warn)
        if saved is None:
            return
        self.training.load_state_dict(saved["training"])
        self.step, self.seconds, self.rows = saved["step"], saved["seconds"], saved["rows"]
        checkpoint.restore_random(saved["random"])  # last: loading may draw

    def _end(self, end: Row, diverged: str | None) -> Outcome:
        result = result_of(
            self.spec, self.task, self.rows[-1] if self.rows else {}, end=end, diverged=diverged,
            seconds=self.seconds, samples=self.step * self.training.samples_per_step,
            fingerprint=self.data,
        )  # fmt: skip
        store.write_json(self.folder / store.RESULT, result)
        (self.folder / store.PREVIOUS).unlink(missing_ok=True)
        outcome = outcome_of(self.spec.label, result)
        self._tell(outcome.kind, outcome.text)
        return outcome

    def _tell(self, kind: Kind, text: str = "") -> None:
        last = self.rows[-1] if self.rows else {}
        figures = {key: value for key, value in last.items() if isinstance(value, float)}
        epochs = self.spec.config.epochs
        self.on_event(Event(kind, self.spec.label, self.epoch, epochs, figures, text))


def epochs_of(step: int, per_epoch: int) -> float:
    """Steps in epochs; a whole number where it is one."""
    whole, rest = divmod(step, per_epoch)
    return whole if rest == 0 else step / per_epoch


def evaluation(training: Training | FleetTraining, step: int, seconds: float, figures: Row) -> Row:
    """A row: the figures of a training after so many steps, and what they took."""
    return {
        "epoch": epochs_of(step, training.steps_per_epoch),
        "step": step,
        "samples": step * training.samples_per_step,
        "seconds": seconds,
        **figures,
    }


def result_of(spec: RunSpec, task: Task, final: Row, **facts: Any) -> dict[str, Any]:
    """What is kept of a run that has ended: its last evaluation, warnings and more facts."""
    return {
        "name": spec.name,
        "seed": spec.seed,
        "method": plain(spec.method),
        "final": final,
        "warnings": list(task.warnings(spec.config, final)) if final else [],
        **facts,
    }


def _is_finite(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
