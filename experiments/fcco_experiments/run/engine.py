"""One run from its first step to its result, or from its checkpoint: the same, bit for bit."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fcco import NonFiniteValue

from .. import environment, store, tasks
from ..config import UserError, dump, plain
from ..data.sources import LOG
from ..store import FAILURE, Event, FolderError, Kind, Outcome, RunSpec
from ..task import Experiment, FleetTraining, Problem, Row, Task, Training

Tell = Callable[[Event], None]
Stop = Callable[[], bool]

_TELL_EVERY = 0.2  # seconds between two progress events of a run


# --- what one process does at a time --------------------------------------------------------------


class LoadError(UserError):
    """The data of a task cannot be loaded: a message, and a traceback where one is needed."""


def load(spec: RunSpec, tell: Tell) -> Problem:
    """Data and model of a run, and of all others of its experiment; all errors are `LoadError`."""
    said = _Said(lambda text: tell(Event("loading", spec.label, text=text)))
    said.tell(spec.config.data)
    LOG.addHandler(said)
    try:
        return tasks.get(spec.task).load(spec.config)
    except Exception as error:
        # Our own errors and those about files and values say all there is to say.
        ours = type(error).__module__.partition(".")[0] in ("fcco", "fcco_experiments")
        clear = ours or isinstance(error, (OSError, ValueError))
        text = str(error) or type(error).__name__
        raise LoadError(text, "" if clear else traceback.format_exc()) from error
    finally:
        LOG.removeHandler(said)


class _Said(logging.Handler):
    """Passes on what is said while data are loaded."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self.tell(record.getMessage())


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Inside, torch uses so many. A run uses one, because another number may round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Job(ABC):
    """Runs of one experiment that a process does together; another process can have it."""

    specs: tuple[RunSpec, ...]
    out: Path  # folder of the comparison
    device: str  # `"cpu"`, `"cuda"`, or `"auto"`, a GPU when there is one

    @property
    @abstractmethod
    def title(self) -> str:
        """For messages."""

    @abstractmethod
    def do(self, problem: Problem, tell: Tell, stop: Stop) -> list[Outcome]:
        """Train, or go on where an earlier process ended; a failure is an outcome."""

    def failed(self, text: str, tell: Tell, details: str = "") -> list[Outcome]:
        """The outcomes when nothing else is known of these runs."""
        tell(Event("failed", self.title, text=text, details=details, count=len(self.specs)))
        return [Outcome(spec.label, "failed", text) for spec in self.specs]

    def died(self, how: str, tell: Tell) -> list[Outcome]:
        """The outcomes when the process of this job has died."""
        return self.failed(f"its process died ({how}); --resume goes on with it", tell)

    def raised(self, error: Exception, path: Path, tell: Tell) -> list[Outcome]:
        """The outcomes after an error, whose traceback goes to a file, if there is room for it."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            store.write_text(path, "".join(traceback.format_exception(error)))
            details = str(path)
        except (OSError, FolderError):
            details = ""
        return self.failed(str(error) or type(error).__name__, tell, details)


@dataclass(frozen=True)
class Run(Job):
    """One run."""

    @property
    def title(self) -> str:
        return self.specs[0].label

    def do(self, problem: Problem, tell: Tell, stop: Stop) -> list[Outcome]:
        (spec,) = self.specs
        folder = spec.folder(self.out)
        try:
            (folder / FAILURE).unlink(missing_ok=True)
            return [train(spec, folder, problem, stop=stop, on_event=tell)]
        except Exception as error:
            return self.raised(error, folder / FAILURE, tell)


def finished_result(spec: RunSpec, folder: Path) -> dict[str, Any] | None:
    """The result of a finished run; refuses the folder of another one."""
    if (folder / store.CONFIG).is_file():
        changes = store.differences(store.read_spec(folder), spec.plain(), spec.config.incidental)
        store.refuse(f"{folder} has another run", changes)
    return store.read_result(folder) if (folder / store.RESULT).is_file() else None


def train(
    spec: RunSpec,
    folder: Path,
    problem: Problem | None = None,
    *,
    stop: Stop = lambda: False,
    on_event: Tell = lambda event: None,
) -> Outcome:
    """Train, evaluate and save as the spec says.

    An epoch is `steps_per_epoch` steps. Evaluations come before the first step, every
    `evaluate_every` epochs and at the end; checkpoints every `checkpoint_every` epochs, at the end
    and when asked to stop.

    A run goes on from its checkpoint, if there is one, and a finished one is left as it is. `stop`
    is asked after each step; when true, the run saves itself and ends.
    """
    result = finished_result(spec, folder)
    if result is not None:
        return outcome_of(spec.label, result)
    task = tasks.get(spec.task)
    problem = problem or task.load(spec.config)
    with store.locked(folder):
        data = problem.fingerprint()
        seed_all(spec.seed)
        training = problem.start(spec.method, spec.seed)
        return _Run(spec, folder, task, training, data, on_event).go(stop)


def outcome_of(label: str, result: Mapping[str, Any]) -> Outcome:
    """How a run with this result ended."""
    reason = result["diverged"]
    return Outcome(label, "finished" if reason is None else "diverged", reason or "")


# --- the loop -------------------------------------------------------------------------------------


class Loop(ABC):
    """The steps of a training, with evaluations, checkpoints (at `path`) and progress between them.

    `data` is the fingerprint of the data.
    """

    def __init__(
        self,
        title: str,
        config: Experiment,
        training: Training | FleetTraining,
        data: str,
        path: Path,
        tell: Tell,
    ) -> None:
        self.title, self.config, self.data, self.path = title, config, data, path
        self.on_event, self.per_epoch = tell, training.steps_per_epoch
        self.samples_per_step = training.samples_per_step
        self.total = config.epochs * self.per_epoch
        self.step, self.seconds, self.rows = 0, 0.0, list[Row]()
        self.training: Any = training

    @abstractmethod
    def evaluates(self) -> bool:
        """Whether an evaluation follows this step."""

    @abstractmethod
    def saves(self) -> bool:
        """Whether a checkpoint follows this step."""

    @abstractmethod
    def evaluate(self) -> None:
        """Measure the figures."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """What a checkpoint holds beside the training: `spec`, and more."""

    def every(self, epochs: int) -> bool:
        """Whether so many epochs, or a multiple, end with this step."""
        return self.step % (epochs * self.per_epoch) == 0

    def over(self) -> bool:
        """Whether all steps are made."""
        return self.step == self.total

    def loop(self, stop: Stop) -> bool:
        """Step until the end (True), or until asked to stop (False): then all is saved."""
        self.tell("started")
        if self.step == 0:
            self.evaluate()
        told = start = time.perf_counter()
        while not self.over():
            self.training.step()
            self.step += 1
            asked = self.step < self.total and stop()
            evaluate, save = self.evaluates(), asked or self.saves()
            if evaluate or save:
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                self.seconds += time.perf_counter() - start
                if evaluate:
                    self.evaluate()
                if save:
                    self.save()
                start = time.perf_counter()
            if evaluate or time.perf_counter() - told > _TELL_EVERY:
                told = time.perf_counter()
                self.tell("progress")
            if asked:
                self.tell("stopped")
                return False
        return True

    def save(self) -> None:
        content = {
            "step": self.step,
            "seconds": self.seconds,
            "rows": self.rows,
            "training": tree_map_only(Tensor, Tensor.cpu, self.training.state_dict()),
            "fingerprint": self.data,
            **self.record(),
        }
        store.write_checkpoint(self.path, content)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self.training.load_state_dict(saved["training"])
        self.step, self.seconds, self.rows = saved["step"], saved["seconds"], list(saved["rows"])

    def row(self, figures: Row, seconds: float) -> Row:
        """An evaluation after this step."""
        return {
            "epoch": self.epoch(self.step),
            "step": self.step,
            "samples": self.step * self.samples_per_step,
            "seconds": seconds,
            **figures,
        }

    def epoch(self, step: int) -> float:
        """Steps in epochs; a whole number where it is one."""
        whole, rest = divmod(step, self.per_epoch)
        return whole if rest == 0 else step / self.per_epoch

    def tell(self, kind: Kind, text: str = "") -> None:
        last = self.rows[-1] if self.rows else {}
        figures = {key: value for key, value in last.items() if isinstance(value, float)}
        epoch = self.epoch(self.step)
        self.on_event(Event(kind, self.title, epoch, self.config.epochs, figures, text))


class _NotFinite(Exception):
    """A figure of an evaluation is not finite."""


class _Run(Loop):
    """A run in memory."""

    def __init__(
        self, spec: RunSpec, folder: Path, task: Task, training: Training, data: str, tell: Tell
    ) -> None:
        path = folder / store.CHECKPOINT
        super().__init__(spec.label, spec.config, training, data, path, tell)
        self.spec, self.folder, self.task = spec, folder, task

    def go(self, stop: Stop) -> Outcome:
        now, free = self.spec.plain(), self.config.incidental
        saved = store.read_checkpoint(self.path, now, free, self.data)
        if saved is not None:
            self.load(saved)
            restore_random(saved["random"])  # last: loading may draw
        self._begin()
        try:
            if not self.loop(stop):
                return Outcome(self.spec.label, "stopped")
            end = store.clean(self.training.finish())
        except _NotFinite as reason:
            return self._end({}, str(reason))
        except (FloatingPointError, NonFiniteValue) as reason:
            return self._end({}, f"after {self.step} steps: {reason}")
        return self._end(end, None)

    def evaluates(self) -> bool:
        return self.over() or self.every(self.config.evaluate_every)

    def saves(self) -> bool:
        return self.over() or self.every(self.config.checkpoint_every)

    def record(self) -> dict[str, Any]:
        return {"spec": self.spec.plain(), "random": random_state()}

    def _begin(self) -> None:
        """Write config, environment and the evaluations of the checkpoint, before the first step.

        Evaluations after the checkpoint belong to steps that will be made again.
        """
        store.write_text(self.folder / store.CONFIG, dump(self.spec.plain()))
        environment.write(
            self.folder / store.ENVIRONMENT, self.training.device, f"step {self.step}", self.step
        )
        store.write_rows(self.folder / store.METRICS, self.rows)

    def evaluate(self) -> None:
        figures = self.training.evaluate()
        row = self.row({k: store.to_list(value) for k, value in figures.items()}, self.seconds)
        wrong = [key for key, value in row.items() if not _is_finite(value)]
        if wrong:
            raise _NotFinite(f"not finite at epoch {row['epoch']:g}: {', '.join(wrong)}")
        self.rows.append(row)
        store.write_rows(self.folder / store.METRICS, self.rows)

    def _end(self, end: Row, diverged: str | None) -> Outcome:
        result = result_of(
            self.spec, self.task, self.rows[-1] if self.rows else {}, end=end, diverged=diverged,
            seconds=self.seconds, samples=self.step * self.samples_per_step, fingerprint=self.data,
        )  # fmt: skip
        store.write_json(self.folder / store.RESULT, result)
        outcome = outcome_of(self.spec.label, result)
        self.tell(outcome.kind, outcome.text)
        return outcome


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


# --- the global random generators -----------------------------------------------------------------


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """What `restore_random` needs."""
    kind, key, *rest = np.random.get_state()
    # One GPU is used; asking all would start work on those of other processes.
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    numpy_state = (kind, np.asarray(key).tolist(), *rest)
    own = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    return {**own, "cuda": cuda}


def restore_random(state: Mapping[str, Any]) -> None:
    """Go back to a state."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
