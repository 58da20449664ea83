"""What torchrun says in the environment of the processes that it starts."""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

import torch

from .yaml_text import ConfigError

__all__ = ["device", "launched", "local_rank", "meet", "name", "restarted", "speaks", "words"]


def launched() -> bool:
    """Whether torchrun (or what sets the same variables) started several processes."""
    return _number("WORLD_SIZE", 1) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def speaks() -> bool:
    """Whether this process is the first of them, or alone."""
    return not launched() or _number("RANK") == 0


def local_rank() -> int:
    """The number of this process on its machine."""
    return _number("LOCAL_RANK") if launched() else 0


def name() -> str | None:
    """The id of this start of torchrun, which its restarts share; None without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def restarted() -> bool:
    """Whether torchrun started this process again after one was lost."""
    return name() is not None and _number("TORCHELASTIC_RESTART_COUNT") > 0


def words() -> list[str]:
    """The command line of torchrun, as far as its processes know; empty without it."""
    if not launched():
        return []
    machines, restarts = _number("GROUP_WORLD_SIZE", 1), _number("TORCHELASTIC_MAX_RESTARTS")
    return [
        "torchrun",
        *(["--standalone"] if machines == 1 else ["--nnodes", str(machines)]),
        *["--nproc-per-node", str(_number("LOCAL_WORLD_SIZE", 1))],
        *(["--max-restarts", str(restarts)] if restarts else []),
    ]


def meet(store: Any, own: int, number: int) -> str:
    """A name that the ranks of this start have and no earlier one had.

    A rank asks with a word of its own, and rank 0 answers each word that it finds. The numbers of
    restarts that torchrun tells would not do: they differ between machines.
    """
    word = uuid.uuid4().hex
    if own > 0:
        store.set(f"fcco/asks/{own}", word)
        meeting = store.get(f"fcco/answer/{word}").decode()
        store.set(f"{meeting}/{own}", "here")
        return meeting
    meeting, missing = f"fcco/{word}", list(range(1, number))
    while missing:
        for other in missing:
            if store.check([f"fcco/asks/{other}"]):
                asked = store.get(f"fcco/asks/{other}").decode()
                store.set(f"fcco/answer/{asked}", meeting)
        missing = [other for other in missing if not store.check([f"{meeting}/{other}"])]
        time.sleep(0.01)
    return meeting


def device(wanted: str = "auto") -> torch.device:
    """The device of this process.

    Args:
        wanted: `"auto"` takes a GPU when there is one; `"cpu"`; `"cuda"`.

    Raises:
        ConfigError: when there is no GPU for this process.
    """
    there = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not there):
        return torch.device("cpu")
    if not there:
        raise ConfigError("`device` is cuda but torch sees no GPU; cpu or auto will do.")
    if not launched():
        return torch.device("cuda", torch.cuda.current_device())
    if (own := _number("LOCAL_WORLD_SIZE", 1)) > there:  # on every rank, or some would wait
        raise ConfigError(
            f"torchrun started {own} processes on a machine with {there} GPUs: give "
            f"--nproc-per-node {there}, or train on the CPU with --device cpu."
        )
    return torch.device("cuda", local_rank())


def _number(variable: str, missing: int = 0) -> int:
    return int(os.environ.get(variable) or missing)
