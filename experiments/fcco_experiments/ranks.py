"""Several processes for one run, as torchrun starts them. In a single process all this is idle.

Words between ranks go over a gloo group of their own: they never mix with what a training sends,
and no GPU waits for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from . import launch
from .launch import device

__all__ = [
    "Blame",
    "OutOfStep",
    "any_rank",
    "barrier",
    "begin",
    "blame",
    "broadcast",
    "device",
    "everyone",
    "gather",
    "highest",
    "is_first",
    "is_first_here",
    "on_each_machine",
    "on_first",
    "rank",
    "restarted",
    "scatter",
    "shared",
    "size",
    "together",
]

T = TypeVar("T")

_PATIENCE = timedelta(hours=3)
"""Ranks wait while one downloads or loads; a process that dies is noticed at once."""
_group: tuple[Any, Any] = (None, None)  # the default group, and ours beside it
_store: Any = None  # lies with torchrun, so it outlives a rank
_again = False
_LOST = re.compile(r"\bgloo\b|\bNCCL\b|connection (closed|reset)", re.IGNORECASE)


class OutOfStep(Exception):
    """This rank cannot go on while the others wait for it: its process must end."""


def _ready() -> bool:
    return dist.is_available() and dist.is_initialized()


def size() -> int:
    """Processes that work together, 1 outside of `begin`."""
    return dist.get_world_size() if _ready() else 1


def rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if _ready() else 0


def is_first() -> bool:
    """Whether this process writes and speaks; known before `begin` and after it too."""
    return rank() == 0 if _ready() else launch.speaks()


def is_first_here() -> bool:
    """Whether this process is the first of its machine."""
    return launch.local_rank() == 0


@contextlib.contextmanager
def begin(wanted: str = "cpu") -> Iterator[None]:
    """Join the processes that torchrun started; does nothing for a single one.

    Inside, an error that all ranks have (see `on_first` and `together`) leaves as usual. Any other
    ends this process at once, because the other ranks wait for it.

    Args:
        wanted: the device, see `device`.
    """
    global _store, _again
    if not launch.launched() or _ready():
        yield
        return
    place, backend = device(wanted), "gloo"
    if place.type == "cuda":
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    base, own, number = next(iter(dist.rendezvous("env://")))
    # torchrun keeps the store when it starts processes again: the addresses of dead ones are in it.
    store = dist.PrefixStore(launch.meet(base, own, number), base)
    group = dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=own, world_size=number)
    _store = dist.PrefixStore("fcco", store)
    _again = any_rank(launch.restarted() or (own == 0 and base.add("fcco/starts", 1) > 1))
    try:
        yield
    except Exception as error:
        if not shared(error):
            if not isinstance(error, OutOfStep):
                traceback.print_exc()
            _leave()
        _end()
        raise
    _end()


def restarted() -> bool:
    """Whether torchrun has started these processes before and one was lost."""
    return _again or launch.restarted()


def _end() -> None:
    global _store
    with contextlib.suppress(RuntimeError):  # a rank that was lost meanwhile is no news any more
        barrier()
    _store = None
    dist.destroy_process_group()


def _leave() -> None:
    """End this process. Closing the group in good order could wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _words() -> Any:
    """Our group, made when it is first used."""
    global _group
    if _group[0] is not dist.group.WORLD:
        _group = dist.group.WORLD, dist.new_group(backend="gloo", timeout=_PATIENCE)
    return _group[1]


def barrier() -> None:
    """Wait for all ranks."""
    highest(0)


def any_rank(flag: bool) -> bool:
    """Whether any rank says so."""
    return highest(int(flag)) > 0


def highest(number: int, patience: float | None = None) -> int:
    """The largest number of all ranks.

    Args:
        number: that of this rank.
        patience: seconds until it raises `RuntimeError`.
    """
    if size() == 1:
        return number
    told = torch.tensor([number])
    work: Any = dist.all_reduce(told, op=dist.ReduceOp.MAX, group=_words(), async_op=True)
    work.wait() if patience is None else work.wait(timedelta(seconds=patience))
    return int(told)


def broadcast(value: T) -> T:
    """The value of rank 0. Tensors must lie on the CPU, here and below."""
    if size() == 1:
        return value
    told = [value]
    dist.broadcast_object_list(told, src=0, group=_words())
    return told[0]


def gather(value: T) -> list[T] | None:
    """The values of all ranks in order; None on all ranks but the first."""
    if size() == 1:
        return [value]
    told: Any = [None] * size() if rank() == 0 else None
    dist.gather_object(value, told, dst=0, group=_words())
    return told


def everyone(value: T) -> list[T]:
    """The values of all ranks in order, on every rank."""
    if size() == 1:
        return [value]
    told: list[Any] = [None] * size()
    dist.all_gather_object(told, value, group=_words())
    return told


def scatter(values: Sequence[T] | None) -> T:
    """One value for each rank, from rank 0; the others give None."""
    if size() == 1:
        assert values is not None
        return values[0]
    told: list[Any] = [None]
    given = None if values is None else list(values)
    dist.scatter_object_list(told, given, src=0, group=_words())
    return told[0]


def on_first(call: Callable[[], T]) -> T:
    """What rank 0 makes of it; if that is an error, all ranks raise it."""
    if size() == 1:
        return call()
    value, error = _tried(call) if rank() == 0 else (None, None)
    told, wrong = broadcast((value, None if error is None else _portable(error)))
    if wrong is not None:
        raise _mark(error or wrong)
    return told  # type: ignore[return-value]


def together(call: Callable[[], T]) -> T:
    """Call on every rank; when any has an error, all raise that of the lowest rank."""
    if size() == 1:
        return call()
    value, error = _tried(call)
    wrong = everyone(None if error is None else _portable(error))
    for place, each in enumerate(wrong):
        if each is not None:
            raise _mark(error if place == rank() and error is not None else each)
    return value  # type: ignore[return-value]


def on_each_machine(call: Callable[[], object]) -> None:
    """Call on the first rank of each machine, while the others wait."""
    together(lambda: call() if is_first_here() else None)


def shared(error: BaseException) -> bool:
    """Whether all ranks have raised this error together, so that they are still in step."""
    return size() == 1 or getattr(error, "_of_all_ranks", False)


def _tried(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
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


def _mark(error: Exception) -> Exception:
    error._of_all_ranks = True  # type: ignore[attr-defined]
    return error


class Blame(NamedTuple):
    """The first failure of a run.

    Attributes:
        rank: whose.
        text: the message.
        details: the traceback.
    """

    rank: int
    text: str
    details: str


def blame(error: Exception) -> Blame:
    """Who failed first: this rank, or one whose end is the reason for the error here."""
    text = str(error) or type(error).__name__
    if size() > 1 and isinstance(error, RuntimeError) and _LOST.search(text):
        text = "the connection to another process was lost"
    own = Blame(rank(), text, "".join(traceback.format_exception(error)))
    if shared(error) or _store is None:
        return own
    try:
        return Blame(*json.loads(_store.compare_set("failure", "", json.dumps(own))))
    except (RuntimeError, ValueError):  # torchrun itself is gone
        return own
