"""Several processes for one run, as torchrun starts them. In a single process all this is idle.

Messages between ranks go over a gloo group of their own: they never mix with what a training sends,
and no GPU waits for them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fcco import NonFiniteValue

from .config import ConfigError
from .store import FolderError, RunSpec, differences
from .task import Problem

T = TypeVar("T")

_TIMEOUT = timedelta(hours=3)
"""Ranks wait while one downloads or loads; a process that dies is noticed at once."""
_ALONE = 60.0  # seconds that a rank which diverged waits for the others
_ASK_EVERY = 0.5  # seconds between two questions whether to stop
_GO_ON, _STOP, _DIVERGED = range(3)

_group: tuple[Any, Any] = (None, None)  # the default group, and the one for messages


class OutOfStep(Exception):
    """This rank cannot go on while the others wait for it: its process must end."""


class Diverged(Exception):
    """Training has left the finite numbers after so many steps."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text, step)
        self.step = step

    def __str__(self) -> str:
        return self.args[0]


# --- what torchrun says in the environment -------------------------------------------------------


def _number(variable: str, missing: int = 0) -> int:
    return int(os.environ.get(variable) or missing)


def _launched() -> bool:
    """Whether torchrun (or what sets the same variables) started several processes."""
    return _number("WORLD_SIZE", 1) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def _local_rank() -> int:
    return _number("LOCAL_RANK") if _launched() else 0


def launch_command() -> list[str]:
    """The command line of torchrun, as far as its processes know; empty without it."""
    if not _launched():
        return []
    machines = _number("GROUP_WORLD_SIZE", 1)
    return [
        "torchrun",
        *(["--standalone"] if machines == 1 else ["--nnodes", str(machines)]),
        *["--nproc-per-node", str(_number("LOCAL_WORLD_SIZE", 1))],
    ]


def device(wanted: str = "auto") -> torch.device:
    """The device of this process: `"cpu"`, `"cuda"`, or `"auto"`, a GPU when there is one."""
    gpus = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise ConfigError("`device` is cuda but torch sees no GPU; cpu or auto will do.")
    if not _launched():
        return torch.device("cuda", torch.cuda.current_device())
    if (processes := _number("LOCAL_WORLD_SIZE", 1)) > gpus:  # on every rank, or some would wait
        raise ConfigError(
            f"torchrun started {processes} processes on a machine with {gpus} GPUs: give "
            f"--nproc-per-node {gpus}, or train on the CPU with --device cpu."
        )
    return torch.device("cuda", _local_rank())


# --- the process group ---------------------------------------------------------------------------


def _ready() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Processes that work together, 1 outside of `process_group`."""
    return dist.get_world_size() if _ready() else 1


def rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if _ready() else 0


def is_first() -> bool:
    """Whether this process writes and prints; known outside of `process_group`, too."""
    return rank() == 0 if _ready() else not _launched() or _number("RANK") == 0


@contextlib.contextmanager
def process_group(wanted: str = "cpu") -> Iterator[None]:
    """Join the processes that torchrun started (on a `device`); does nothing for a single one.

    Inside, an error that all ranks have (see `run_on_first` and `run_on_all`) leaves as usual. Any
    other ends this process at once, because the other ranks wait for it.
    """
    if not _launched() or _ready():
        yield
        return
    place, backend = device(wanted), "gloo"
    if place.type == "cuda":
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    try:
        yield
    except Exception as error:
        if not raised_on_all(error):
            if not isinstance(error, OutOfStep):
                traceback.print_exc()
            # Closing the group in good order could wait for the others.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        _close()
        raise
    _close()


def _close() -> None:
    with contextlib.suppress(RuntimeError):  # another rank may be gone by now
        barrier()
    dist.destroy_process_group()


def _messages() -> Any:
    """The group for messages, made when it is first used."""
    global _group
    if _group[0] is not dist.group.WORLD:
        _group = dist.group.WORLD, dist.new_group(backend="gloo", timeout=_TIMEOUT)
    return _group[1]


# --- messages ------------------------------------------------------------------------------------


def _maximum(numbers: Sequence[int], patience: float | None = None) -> list[int]:
    """Elementwise maximum over ranks; `RuntimeError` after so many seconds."""
    if world_size() == 1:
        return list(numbers)
    values = torch.tensor(list(numbers))
    work: Any = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=_messages(), async_op=True)
    work.wait() if patience is None else work.wait(timedelta(seconds=patience))
    return values.tolist()


def barrier() -> None:
    """Wait for all ranks."""
    _maximum([0])


def any_rank(flag: bool) -> bool:
    """Whether any rank says so."""
    return _maximum([int(flag)])[0] > 0


def broadcast(value: T) -> T:
    """The value of rank 0. Tensors must lie on the CPU, here and below."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_messages())
    return values[0]


def all_gather(value: T) -> list[T]:
    """The values of all ranks in order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_messages())
    return values


# --- calls whose errors all ranks share ----------------------------------------------------------


def run_on_first(call: Callable[[], T]) -> T:
    """The result of rank 0, on every rank; if that is an error, all ranks raise it."""
    if world_size() == 1:
        return call()
    value, error = _attempt(call) if rank() == 0 else (None, None)
    result, failure = broadcast((value, None if error is None else _portable(error)))
    if failure is not None:
        raise _mark(error or failure)
    return result  # type: ignore[return-value]


def run_on_all(call: Callable[[], T]) -> T:
    """Call on every rank; when any has an error, all raise that of the lowest rank."""
    if world_size() == 1:
        return call()
    value, error = _attempt(call)
    failures = all_gather(None if error is None else _portable(error))
    for place, failure in enumerate(failures):
        if failure is not None:
            raise _mark(error if place == rank() and error is not None else failure)
    return value  # type: ignore[return-value]


def run_on_each_machine(call: Callable[[], T]) -> T | None:
    """The result on the first rank of each machine; the others wait and get None."""
    return run_on_all(lambda: call() if _local_rank() == 0 else None)


def raised_on_all(error: BaseException) -> bool:
    """Whether all ranks have raised this error together, so that they are still in step."""
    return world_size() == 1 or _SHARED in error.__dict__


_SHARED = "_of_all_ranks"


def _mark(error: Exception) -> Exception:
    error.__dict__[_SHARED] = True
    return error


def _attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _portable(error: Exception) -> Exception:
    """The error as another process can have it, with its traceback as a note."""
    trace = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(f"On rank {rank()}:\n{trace}")
    return copy


_LOST = re.compile(r"\bgloo\b|\bNCCL\b|connection (closed|reset)", re.IGNORECASE)


def lost_connection(error: Exception) -> bool:
    """Whether an error says that the process of another rank has ended."""
    return (
        world_size() > 1
        and not raised_on_all(error)
        and isinstance(error, RuntimeError)
        and _LOST.search(str(error)) is not None
    )


# --- what all ranks of a run agree on ------------------------------------------------------------


class Consensus:
    """Whether a run goes on, stops or has diverged: the same answer at the same step on all ranks.

    Asking after every step would cost an all-reduce each time. Rank 0 measures the steps and
    chooses after how many to ask again, about half a second apart; a single process never asks.
    Divergence is what the library and torch report as such: `NonFiniteValue`, `FloatingPointError`.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop
        self._several = world_size() > 1
        self._interval, self._next = 1, 0
        self._last_step, self._last_time = 0, time.monotonic()
        self._reason: tuple[int, str] | None = None

    def step(self, call: Callable[[], None], step: int, must_ask: bool) -> bool:
        """Make a step; whether to stop after it.

        A rank that diverges alone keeps stepping until the next question: the others need it in the
        collectives of their steps. Then all raise `Diverged`.

        Args:
            call: `Training.step`, on every rank.
            step: steps made before.
            must_ask: whether other messages follow, so that all ranks must agree first.
        """
        try:
            call()
        except (FloatingPointError, NonFiniteValue) as error:
            self._reason = self._reason or (step, f"after {step} steps: {error}")
        if not self._several:
            self._raise_if_diverged(self._reason is not None)
            return self._stop()
        if not must_ask and step < self._next:
            return False
        now, steps = time.monotonic(), step - self._last_step
        per_second = steps / max(now - self._last_time, 1e-9)
        # At most twice as many as before: the first steps are slow.
        wanted = min(max(int(_ASK_EVERY * per_second), 1), 2 * self._interval)
        status = self._ask(_STOP if self._stop() else _GO_ON, wanted)
        self._next, self._last_step, self._last_time = step + self._interval, step, now
        return status == _STOP

    def run(self, call: Callable[[], T], step: int) -> T:
        """The result of an evaluation, after which all ranks agree that none diverged."""
        value: Any = None
        try:
            value = call()
        except (FloatingPointError, NonFiniteValue) as error:
            self._reason = step, f"after {step} steps: {error}"
        self._ask(_GO_ON, self._interval)
        return value

    def _ask(self, status: int, interval: int) -> int:
        """The highest status of all ranks; the interval is that of rank 0."""
        if self._reason is not None:
            status = _DIVERGED
        try:
            patience = _ALONE if self._reason is not None else None
            given = interval if rank() == 0 else 0
            status, self._interval = _maximum([status, given], patience)
        except RuntimeError as late:  # the others wait in the middle of a step
            if self._reason is None:
                raise
            raise RuntimeError(f"rank {rank()} alone diverged {self._reason[1]}") from late
        self._raise_if_diverged(status == _DIVERGED)
        return status

    def _raise_if_diverged(self, diverged: bool) -> None:
        if diverged:
            step, text = min(filter(None, all_gather(self._reason)))
            raise Diverged(text, step)


def check_same_plan(specs: Sequence[RunSpec]) -> None:
    """Refuse ranks that want other runs than rank 0: their config files differ."""
    plans = all_gather([spec.plain() for spec in specs])
    for place, other in enumerate(plans):
        first, here = ({str(at): spec for at, spec in enumerate(p)} for p in (plans[0], other))
        if changes := differences(first, here, ()):
            raise ConfigError(
                f"Rank {place} has another plan than rank 0, run.setting: {changes[0]}. Give every "
                "machine the same files and the same command."
            )


def fingerprint(problem: Problem) -> str:
    """Of the data, which must be the same on all ranks."""
    prints = all_gather(problem.fingerprint())
    for place, other in enumerate(prints):
        if other != prints[0]:
            raise FolderError(
                f"The data of rank {place}, {other[:12]}, are not those of rank 0, "
                f"{prints[0][:12]}: give every machine the same files."
            )
    return prints[0]
