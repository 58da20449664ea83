"""What the integrations of training frameworks have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..constraints import ConstrainedObjective
from ..group_dro import GroupObjective
from ..groups import GroupBatchSampler, ResumableSampler
from ..optim import MethodOptimizer
from ..previous import parameters_of, unwrap
from ..previous.swap import any_sharded
from ..report import ConstraintReport, GroupReport

__all__ = [
    "check_ranks", "load_objective", "log_values", "report_of", "sampler_of", "start_epoch",
    "stepped_by",
]  # fmt: skip

_MOST_ROWS = 10
"""Groups or constraints that are logged one by one, at most."""


def sampler_of(loader: Any) -> ResumableSampler[Any] | None:
    """The resumable sampler that a loader draws its batches from, or None."""
    if not isinstance(loader, DataLoader):
        return None
    if isinstance(loader.batch_sampler, ResumableSampler):
        return loader.batch_sampler
    if not isinstance(loader.sampler, ResumableSampler):
        return None
    if loader.batch_size is not None:
        raise ValueError(
            f"`DataLoader(sampler=...)` is a {type(loader.sampler).__name__}, which draws whole "
            "batches: give it as `DataLoader(batch_sampler=...)`."
        )
    return loader.sampler


def check_ranks(sampler: ResumableSampler[Any], rank: int, world_size: int, remedy: str) -> None:
    """Raise unless the sampler gives this process its own share of each batch."""
    # Other samplers draw the same on every rank.
    ours = isinstance(sampler, GroupBatchSampler)
    if ours and (sampler.rank, sampler.world_size) != (rank, world_size):
        raise ValueError(
            f"The {type(sampler).__name__} of the training data was made for rank {sampler.rank} "
            f"of {sampler.world_size} but this process is rank {rank} of {world_size}: the ranks "
            f"would not get the parts of one batch. {remedy}"
        )


def start_epoch(sampler: ResumableSampler[Any]) -> None:
    """Leave the rest of an epoch that was cut short."""
    if sampler.consumed:
        sampler.set_epoch(sampler.epoch + 1)


def stepped_by(outer: MethodOptimizer, objects: Sequence[Any]) -> list[int]:
    """The places of the optimizers among some objects that the optimizer of a method steps."""
    inner = {id(unwrap(each)) for each in outer.wrapped}
    return [
        k
        for k, each in enumerate(objects)
        if isinstance(each, torch.optim.Optimizer) and id(unwrap(each)) in inner
    ]


def load_objective(objective: Any, state: dict[str, Any]) -> None:
    """Restore an objective from the one file that all ranks read.

    With sharded parameters (FSDP2) it has w_{t-1} of the first rank only, which is then dropped.
    """
    objective.load_state_dict(state)
    previous = objective.previous
    if previous is not None and any_sharded(
        parameter for each in previous.optimizers for parameter in parameters_of(each)
    ):
        previous.forget()


def report_of(objective: nn.Module) -> GroupReport | ConstraintReport | None:
    """The report of an objective that has one, once it has seen a value."""
    if not isinstance(objective, (GroupObjective, ConstrainedObjective)):
        return None
    return objective.report() if bool(objective.term.tracker.seen.any()) else None


def log_values(report: GroupReport | ConstraintReport) -> dict[str, float]:
    """The numbers of `objective.report()` for a log, by name.

    | of groups | of constraints |
    |---|---|
    | `worst_group_loss`, `worst_group_error` | `worst_violation`, `worst_violation_error` |
    | `cvar`, `mean_group_loss` | `constraints_met`, `largest_multiplier` |
    | `groups_seen` | `constraints_seen` |

    The error is the standard error of the estimate. With ten groups or constraints at most also
    `group_loss/NAME`, or `violation/NAME` and `multiplier/NAME`, of each. What is not known yet is
    left out.

    Example:
        >>> import torch, fcco
        >>> from fcco.integrations.accelerate import log_values
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> dro = fcco.CVaRGroupDRO(model, optimizer, num_groups=2, ratio=0.5)
        >>> loss = dro(lambda: 0 * model(torch.ones(2, 2)).squeeze(1) + 1.0, [0, 1])
        >>> log_values(dro.report())["worst_group_loss"]
        1.0
    """
    worst = next(row for row in report.rows if row.name == report.worst)
    few = report.rows if len(report.rows) <= _MOST_ROWS else ()
    if isinstance(report, GroupReport):
        values = {
            "worst_group_loss": worst.value,
            "worst_group_error": worst.error,
            "cvar": report.cvar,
            "mean_group_loss": report.mean,
            "groups_seen": float(report.seen),
        }
        values |= {f"group_loss/{row.name}": row.value for row in few}
    else:
        values = {
            "worst_violation": report.violation,
            "worst_violation_error": worst.error,
            "constraints_met": float(report.seen - report.violated),
            "constraints_seen": float(report.seen),
            "largest_multiplier": report.multiplier,
        }
        for row in few:
            values[f"violation/{row.name}"] = math.nan if row.excess is None else row.excess
            values[f"multiplier/{row.name}"] = row.weight
    return {name: value for name, value in values.items() if not math.isnan(value)}
