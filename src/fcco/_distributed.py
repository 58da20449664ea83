"""Communication between ranks: rows of unequal number, gathered on every rank."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DISTRIBUTED = torch.distributed.is_available()
"""Whether this build of torch can communicate at all."""

WAIT = 30.0
"""Seconds after which a rank that waits for the others says so."""


class _Patience:
    """A `with` block of a collective; says if it waits long. torch is silent until its timeout.

    On a GPU the collective only queues the work, and the host waits where it reads the result.
    """

    def __init__(self) -> None:
        self.since: float | None = None  # when the collective that runs now began
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="fcco-ranks", daemon=True)
            self._thread.start()
        self.since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.since = None

    def _watch(self) -> None:
        said = None
        while True:
            time.sleep(WAIT / 10)
            since = self.since
            if since is not None and since != said and time.monotonic() - since > WAIT:
                said = since
                logging.getLogger("fcco").warning(
                    "Rank %d has waited %.0f seconds for other ranks in a call of an objective. "
                    "Every rank must make the same calls and steps: has one of them a batch more, "
                    "left its loop, or failed?", torch.distributed.get_rank(), WAIT,
                )  # fmt: skip


patience = _Patience()


@dataclass(frozen=True)
class Group:
    """A process group of more than one rank."""

    handle: Any
    size: int

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank(self.handle)


def find_group(process_group: Any = "auto") -> Group | None:
    """The ranks to pool over: "auto" takes those of the default group, None never communicates."""
    if process_group is None or not DISTRIBUTED or not torch.distributed.is_initialized():
        return None
    handle = None if process_group == "auto" else process_group
    size = torch.distributed.get_world_size(handle)
    return Group(handle, size) if size > 1 else None


class RanksOutOfStep(RuntimeError):
    """Ranks that would have pooled batches of different steps."""

    def __init__(self, calls: list[int]) -> None:
        self.latest = max(calls)
        super().__init__(
            f"The ranks are in different calls of the objective ({calls}); nothing was updated. "
            "One without samples passes an empty batch."
        )


def row_counts(rows: Tensor, group: Group, call: int | None = None) -> list[int]:
    """How many rows each rank has; refused when the ranks give different numbers as `call`."""
    # The number of the call travels with the number of rows: no second message.
    mine = torch.tensor([len(rows), -1 if call is None else call], device=rows.device)
    parts = [torch.empty_like(mine) for _ in range(group.size)]
    with patience:
        torch.distributed.all_gather(parts, mine, group=group.handle)
        lengths, calls = torch.stack(parts).T.tolist()
    if len(set(calls)) > 1:
        raise RanksOutOfStep(calls)
    return lengths


def gather_rows(
    rows: Tensor, group: Group, counts: list[int] | None = None, call: int | None = None
) -> Tensor:
    """Concatenate the rows (R_k, c) of all ranks, in rank order; R_k may differ or be zero.

    `counts` are all R_k, if `row_counts` told them before; `call` is that of `row_counts`.
    """
    lengths = row_counts(rows, group, call) if counts is None else counts
    padded = rows.new_zeros((max(lengths), rows.shape[1]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(group.size)]
    with patience:
        torch.distributed.all_gather(parts, padded, group=group.handle)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def sum_over_ranks(value: Tensor, group: Group) -> Any:
    """The sum of a tensor over all ranks, as a Python number or (nested) list of numbers."""
    total = value.detach().clone()
    with patience:
        torch.distributed.all_reduce(total, group=group.handle)
        return total.tolist()
