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
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .config import ConfigError

T = TypeVar("T")

_TIMEOUT = timedelta(hours=3)
"""Ranks wait while one downloads or loads; a process that dies is noticed at once."""

_group: tuple[Any, Any] = (None, None)  # the default group, and the one for messages


class OutOfStep(Exception):
    """This rank cannot go on while the others wait for it: its process must end."""


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
