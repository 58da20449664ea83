"""What a process does with the runs it is given: load once, train each, survive failures."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import engine, ranks, record, tasks
from .events import Event, Outcome
from .spec import RunSpec
from .task import Problem, Progress

__all__ = ["LoadError", "Order", "Progress", "Tell", "fetch", "load", "one"]

Tell = Callable[[Event], None]
FAILURE = "failure.txt"


class LoadError(Exception):
    """The data of a task cannot be loaded, so no run can start.

    Args:
        message: why.
        details: a traceback, when the reason is not the user's.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message, details)
        self.details = details

    def __str__(self) -> str:
        return self.args[0]


@dataclass(frozen=True)
class Order:
    """What is the same for all runs.

    Args:
        out: folder of the comparison.
        resume: go on from checkpoints.
        tensorboard: whether to write scalars for TensorBoard.
        threads: of torch.
    """

    out: Path
    resume: bool = False
    tensorboard: bool = False
    threads: int = 1


def load(spec: RunSpec, tell: Tell) -> Problem:
    """Data and model of a run, and of all others of its experiment.

    Raises:
        LoadError: whatever goes wrong.
    """
    tell(Event("loading", spec.label, text=spec.config.data))
    with _loading():
        return tasks.get(spec.task).load(spec.config)


def fetch(spec: RunSpec, progress: Progress) -> None:
    """Let the task of a run bring its data to this machine, if it has a way to.

    Raises:
        LoadError: whatever goes wrong.
    """
    with _loading():
        tasks.get(spec.task).fetch(spec.config, progress)


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Our own errors and those about files and values say all there is to say.
        ours = type(error).__module__.partition(".")[0] == "fcco"
        said = ours or isinstance(error, (OSError, ValueError))
        text = str(error) or type(error).__name__
        raise LoadError(text, "" if said else traceback.format_exc()) from error


def one(
    spec: RunSpec, problem: Problem, order: Order, tell: Tell, stop: Callable[[], bool]
) -> Outcome:
    """A run whose failure is an outcome; its traceback lies in `failure.txt`."""
    folder = spec.folder(order.out)
    (folder / FAILURE).unlink(missing_ok=True)
    try:
        return engine.train(
            spec, folder, problem, resume=order.resume, stop=stop, on_event=tell,
            tensorboard=order.tensorboard,
        )  # fmt: skip
    except Exception as error:
        return _failed(spec, folder, error, tell)


def _failed(spec: RunSpec, folder: Path, error: Exception, tell: Tell) -> Outcome:
    """Keep the traceback and say what it was, once; ranks that are out of step cannot go on."""
    cause, in_step = ranks.blame(error), ranks.shared(error)
    if in_step:
        cause = cause._replace(rank=0)  # all have it: the first speaks
    text = cause.text if in_step else f"{cause.text} (rank {cause.rank} of {ranks.size()})"
    mine = cause.rank == ranks.rank()
    if mine or ranks.rank() == 0:  # not every machine may have the same disk
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(folder / FAILURE, cause.details)
    if mine:
        tell(Event("failed", spec.label, text=text, details=str(folder / FAILURE)))
    if not in_step:
        raise ranks.OutOfStep(text)
    return Outcome(spec.label, "failed", text)
