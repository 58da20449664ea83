"""Several processes (ranks) for one run, as torchrun starts them. A single process is rank 0 of 1.

Messages go over a gloo group of their own: they never mix with the collectives of a training, and
no GPU waits for them.
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
_AGREE_EVERY = 0.5  # seconds between two exchanges whether to stop

_group: tuple[Any, Any] = (None, None)  # the default group, and the one for messages


class OutOfStep(Exception):
    """This rank cannot go on while the others wait for it: its process must end."""


class Diverged(Exception):
    """Training has left the finite numbers after so many steps."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step


# --- environment variables of torchrun ------------------------------------------------------------


def _number(variable: str, missing: int = 0) -> int:
    return int(os.environ.get(variable) or missing)


def is_launched() -> bool:
    """Whether torchrun (or what sets the same variables) started several processes."""
    return _number("WORLD_SIZE", 1) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def _local_rank() -> int:
    return _number("LOCAL_RANK") if is_launched() else 0


def launch_command() -> list[str]:
    """The command line of torchrun, as far as its processes know it; empty without torchrun."""
    if not is_launched():
        return []
    machines = os.environ.get("GROUP_WORLD_SIZE", "1")
    where = ["--standalone"] if machines == "1" else ["--nnodes", machines]
    return ["torchrun", *where, "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1")]


def device(wanted: str = "auto") -> torch.device:
    """The device of this process: `"cpu"`, `"cuda"`, or `"auto"`, a GPU when there is one."""
    gpus = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise ConfigError("`device` is cuda but torch sees no GPU; cpu or auto will do.")
    if not is_launched():
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
    """Whether this process writes and prints; also right outside of `process_group`."""
    return rank() == 0 if _ready() else not is_launched() or _number("RANK") == 0


@contextlib.contextmanager
def process_group(wanted: str = "cpu") -> Iterator[None]:
    """Join the processes that torchrun started (on a `device`); does nothing for a single one.

    An error that all ranks raise together (see `run_on_first` and `run_on_all`) leaves the block as
    usual. Any other ends this process at once, because the other ranks wait for it.
    """
    if not is_launched() or _ready():
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
    global _group
    with contextlib.suppress(RuntimeError):  # another rank may be gone by now
        all_gather(None)
    _group = None, None  # the threads of a group end with its last reference
    dist.destroy_process_group()


def _messages() -> Any:
    """The group for messages, made when it is first used."""
    global _group
    if _group[0] is not dist.group.WORLD:
        _group = dist.group.WORLD, dist.new_group(backend="gloo", timeout=_TIMEOUT)
    return _group[1]


# --- messages ------------------------------------------------------------------------------------


def any_rank(flag: bool) -> bool:
    """Whether the flag is true on any rank."""
    return any(all_gather(flag))


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
    """Call on rank 0 and return its result on every rank; its error is raised on every rank."""
    return broadcast(run_on_all(lambda: call() if rank() == 0 else None))  # type: ignore[return-value]


def run_on_all(call: Callable[[], T]) -> T:
    """Call on every rank; when any of them raises, all raise the error of the lowest such rank."""
    if world_size() == 1:
        return call()
    value: Any = None
    error = None
    try:
        value = call()
    except Exception as raised:
        error = raised
    errors = all_gather(None if error is None else _portable(error))
    for place, portable in enumerate(errors):
        if portable is not None:
            shared = error if place == rank() and error is not None else portable
            shared.__dict__[_SHARED] = True
            raise shared
    return value


def run_on_each_machine(call: Callable[[], T]) -> T | None:
    """The result on the first rank of each machine; the others wait and get None."""
    return run_on_all(lambda: call() if _local_rank() == 0 else None)


_SHARED = "_of_all_ranks"


def raised_on_all(error: BaseException) -> bool:
    """Whether all ranks have raised this error together, so that they are still in step."""
    return world_size() == 1 or _SHARED in error.__dict__


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

    Messages after every step would be slow. Rank 0 measures the steps and chooses after how many
    the ranks exchange their states again, about half a second apart; a single process need not.
    Divergence is what the library and torch report as such: `NonFiniteValue`, `FloatingPointError`.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop
        self._interval, self._next = 1, 0
        self._last_step, self._last_time = 0, time.monotonic()
        self._diverged: tuple[int, str] | None = None

    def step(self, call: Callable[[], None], step: int, agree: bool) -> bool:
        """Make a step; whether to stop after it.

        A rank that diverges alone keeps stepping until the next exchange: the others need it in the
        collectives of their steps. Then all raise `Diverged`.

        Args:
            call: `Training.step`, on every rank.
            step: steps made before.
            agree: whether other messages follow, so that all ranks must agree first.
        """
        self._attempt(call, step)
        if world_size() > 1 and not agree and step < self._next:
            return False
        now = time.monotonic()
        per_second = (step - self._last_step) / max(now - self._last_time, 1e-9)
        # At most twice as many as before: the first steps are slow.
        interval = min(max(int(_AGREE_EVERY * per_second), 1), 2 * self._interval)
        stop, self._interval = self._exchange(self._stop(), interval)
        self._next, self._last_step, self._last_time = step + self._interval, step, now
        return stop

    def run(self, call: Callable[[], T], step: int) -> T:
        """The result of an evaluation after so many steps, unless any rank diverged."""
        value = self._attempt(call, step)
        self._exchange(False, 0)
        return value  # type: ignore[return-value]

    def _attempt(self, call: Callable[[], T], step: int) -> T | None:
        try:
            return call()
        except (FloatingPointError, NonFiniteValue) as error:
            self._diverged = self._diverged or (step, f"after {step} steps: {error}")
            return None

    def _exchange(self, stop: bool, interval: int) -> tuple[bool, int]:
        """Whether any rank stops, and the interval of rank 0; raises when any has diverged."""
        stops, diverged, intervals = zip(*all_gather((stop, self._diverged, interval)), strict=True)
        if any(diverged):
            step, text = min(filter(None, diverged))
            raise Diverged(text, step)
        return any(stops), intervals[0]


def check_same_plan(specs: Sequence[RunSpec]) -> None:
    """Refuse ranks that want other runs than rank 0: their config files differ."""
    plans = all_gather({str(place): spec.plain() for place, spec in enumerate(specs)})
    for place, other in enumerate(plans):
        if changes := differences(plans[0], other, ()):
            raise ConfigError(
                f"Rank {place} has another plan than rank 0, run.setting: {changes[0]}. Give every "
                "machine the same files and the same command."
            )


def fingerprint(problem: Problem) -> str:
    """The fingerprint of the data, which must be the same on all ranks."""
    prints = all_gather(problem.fingerprint())
    for place, other in enumerate(prints):
        if other != prints[0]:
            raise FolderError(
                f"The data of rank {place}, {other[:12]}, are not those of rank 0, "
                f"{prints[0][:12]}: give every machine the same files."
            )
    return prints[0]
