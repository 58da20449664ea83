"""What a tracker is asked to do in one step, checked for all terms and ranks before any does it."""

from __future__ import annotations

from typing import Any

import torch

from ._distributed import Group, sum_over_ranks
from .tracker import InnerTracker
from .tracker.entries import shaped

__all__ = ["Job", "empty_job", "is_bad", "on_all_ranks", "refuse"]

Job = dict[str, Any]  # the arguments of `InnerTracker.update`


def empty_job(tracker: InnerTracker, corrects: bool, independent: bool) -> Job:
    """The job of a term that this rank has no entries of."""
    nothing, where = tracker.value[:0], tracker.layout(torch.empty(0, dtype=torch.int64))
    return {
        "fresh": nothing,
        "where": where,
        "previous": nothing if corrects else None,
        "carrier": nothing if independent else None,
        "carrier_where": tracker.layout(where.index) if independent else None,
    }


def is_bad(tracker: InnerTracker, job: Job) -> bool:
    """Whether the tracker would refuse a value; also checks their shapes."""
    finite = True
    for key in ("fresh", "previous", "carrier"):
        if job[key] is not None:
            where = (key == "carrier" and job["carrier_where"]) or job["where"]
            values = shaped(key, job[key], where.entries, tracker.value)
            if tracker.on_nonfinite == "raise":
                finite &= bool(torch.isfinite(values).all())
    return not finite


def refuse(names: list[str]) -> None:
    """Raise if any term has a bad value."""
    if names:
        terms = " and ".join(f"`{name}`" for name in names)
        raise ValueError(
            f"Inner values of {terms} are NaN or infinite; nothing was updated. Use "
            "on_nonfinite='skip' in the tracker to drop such entries instead."
        )


def on_all_ranks(
    trackers: dict[str, InnerTracker],
    jobs: dict[str, Job],
    group: Group,
    corrects: bool,
    independent: bool,
) -> dict[str, Job]:
    """The jobs that any rank has, in one order; refused by all ranks if one has a bad value."""
    names = list(trackers)
    flags = [
        [name in jobs for name in names],
        [name in jobs and is_bad(trackers[name], jobs[name]) for name in names],
    ]
    device = trackers[names[0]].value.device
    held, bad = sum_over_ranks(torch.tensor(flags, dtype=torch.int64, device=device), group)
    refuse([name for name, number in zip(names, bad, strict=True) if number])
    result = {}
    for name, number in zip(names, held, strict=True):
        if number:
            result[name] = jobs.get(name) or empty_job(trackers[name], corrects, independent)
    return result
