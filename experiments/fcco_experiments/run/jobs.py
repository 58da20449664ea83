"""What one process does at a time: a run, or runs that are trained together."""

from __future__ import annotations

import contextlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import store, tasks
from ..store import FAILURE, Event, FolderError, Outcome, RunSpec
from ..task import Problem, Progress
from . import engine
from .engine import Tell

Stop = Callable[[], bool]


class LoadError(Exception):
    """The data of a task cannot be loaded; `details` is a traceback, where one is needed."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message, details)
        self.details = details

    def __str__(self) -> str:
        return str(self.args[0])


def load(spec: RunSpec, tell: Tell) -> Problem:
    """Data and model of a run, and of all others of its experiment; all errors are `LoadError`."""
    tell(Event("loading", spec.label, text=spec.config.data))
    with _loading():
        return tasks.get(spec.task).load(spec.config)


def fetch(spec: RunSpec, progress: Progress) -> Problem | None:
    """Let the task of a run bring its data to this machine; the problem, if that builds it."""
    with _loading():
        return tasks.get(spec.task).fetch(spec.config, progress)


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Our own errors and those about files and values say all there is to say.
        ours = type(error).__module__.partition(".")[0] in ("fcco", "fcco_experiments")
        clear = ours or isinstance(error, (OSError, ValueError))
        text = str(error) or type(error).__name__
        raise LoadError(text, "" if clear else traceback.format_exc()) from error


def keep_traceback(path: Path, error: Exception) -> str:
    """Write the traceback of an error to a file; the file, or "" when there is no room for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(path, "".join(traceback.format_exception(error)))
    except (OSError, FolderError):
        return ""
    return str(path)


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

    def died(self, how: str, tell: Tell) -> list[Outcome]:
        """The outcomes when the process of this job has died."""
        text = f"its process died ({how}); --resume goes on with it"
        tell(Event("failed", self.title, text=text, count=len(self.specs)))
        return [Outcome(spec.label, "failed", text) for spec in self.specs]


@dataclass(frozen=True)
class Run(Job):
    """One run."""

    resume: bool = False
    tensorboard: bool = False

    @property
    def title(self) -> str:
        return self.specs[0].label

    def do(self, problem: Problem, tell: Tell, stop: Stop) -> list[Outcome]:
        """Train. A failure is an outcome."""
        (spec,) = self.specs
        folder = spec.folder(self.out)
        try:
            (folder / FAILURE).unlink(missing_ok=True)
            ended = engine.train(
                spec, folder, problem, stop=stop, on_event=tell, resume=self.resume,
                tensorboard=self.tensorboard,
            )  # fmt: skip
        except Exception as error:
            text = str(error) or type(error).__name__
            details = keep_traceback(folder / FAILURE, error)
            tell(Event("failed", spec.label, text=text, details=details))
            ended = Outcome(spec.label, "failed", text)
        return [ended]
