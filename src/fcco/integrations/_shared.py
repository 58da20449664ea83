"""What the integrations of training frameworks have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..constraints import ConstrainedObjective
from ..group_dro import GroupObjective
from ..groups import GroupBatchSampler, ResumableSampler
from ..optim import MethodOptimizer
from ..previous import any_sharded, parameters_of, unwrap
from ..report import ConstraintReport, GroupReport

_MOST_ROWS = 10
"""Groups or constraints that are logged one by one, at most."""


def sampler_of(loader: Any) -> ResumableSampler[Any] | None:
    """The resumable sampler that a loader draws its batches from, or None."""
    if not isinstance(loader, DataLoader):
        return None
    if isinstance(loader.batch_sampler, ResumableSampler):
        return loader.batch_sampler
    if isinstance(loader.sampler, ResumableSampler):
        raise ValueError(
            f"`DataLoader(sampler=...)` is a {type(loader.sampler).__name__}, which draws whole "
            "batches: give it as `DataLoader(batch_sampler=...)`."
        )
    return None


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


class ResumableLoader:
    """A loader that, after a restart, goes on after the batches that the loop has had.

    Args:
        loader: a `DataLoader` with a sampler of `fcco.groups` as its `batch_sampler`; with workers,
            too.

    Attributes:
        batches: the sampler.
        closed: whether there is nothing to read, because the epoch has ended.
    """

    closed = False

    def __init__(self, loader: Any) -> None:
        sampler = sampler_of(loader)
        if sampler is None:
            raise TypeError(
                "`ResumableLoader(loader=...)` must be a DataLoader with a sampler of `fcco.groups`"
                f", which knows its position, but is: {type(loader).__name__}."
            )
        self.loader, self.batches, self.dataset = loader, sampler, loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the sampler's epoch. Nothing is read before the first batch is asked for."""
        if self.closed:
            return
        for batch in self.batches.consume(self.loader):
            position = self.batches.state_dict()
            yield batch
            if self.batches.state_dict() != position:
                raise RuntimeError(
                    "The position of the sampler has changed inside a loop over its loader, by "
                    "`load_state` perhaps: leave the loop first, and begin a new one."
                )

    # What Lightning looks for: a loader that can be resumed, and somebody to tell the epoch.

    def state_dict(self) -> dict[str, Any]:
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state)

    @property
    def sampler(self) -> ResumableLoader:
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch. Later the sampler counts by itself: Lightning may count more."""
        if self.batches.epoch == self.batches.consumed == 0:
            self.batches.set_epoch(epoch)

    def leave_epoch(self) -> None:
        """Leave the rest of an epoch that was cut short."""
        if self.batches.consumed:
            self.batches.set_epoch(self.batches.epoch + 1)


class TrainingState:
    """An objective and samplers by name, which are saved and loaded together."""

    def __init__(self, objective: nn.Module, samplers: Mapping[str, ResumableSampler[Any]]) -> None:
        self.objective, self.samplers = objective, samplers

    def state_dict(self) -> dict[str, Any]:
        samplers = {name: each.state_dict() for name, each in self.samplers.items()}
        return {"objective": self.objective.state_dict(), "samplers": samplers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both from the one file that all ranks read.

        With sharded parameters (FSDP2) it has w_{t-1} of the first rank only, which is dropped.
        """
        positions, objective = state["samplers"], self.objective
        if set(positions) != set(self.samplers):
            raise ValueError(
                f"The checkpoint has the positions of other samplers, {sorted(positions)}, than "
                f"this run, {sorted(self.samplers)}: data would be read again or left out."
            )
        objective.load_state_dict(state["objective"])
        previous: Any = objective.previous
        if previous is not None and any_sharded(
            parameter for each in previous.optimizers for parameter in parameters_of(each)
        ):
            previous.forget()
        for name, sampler in self.samplers.items():
            sampler.load_state_dict(positions[name])


def stepped_by(outer: MethodOptimizer, objects: Sequence[Any]) -> list[int]:
    """The places of the optimizers among some objects that the optimizer of a method steps."""
    inner = {id(unwrap(each)) for each in outer.wrapped}
    return [
        k
        for k, each in enumerate(objects)
        if isinstance(each, torch.optim.Optimizer) and id(unwrap(each)) in inner
    ]


def report_of(objective: nn.Module) -> GroupReport | ConstraintReport | None:
    """The report of an objective that has one, once it has seen a value."""
    if not isinstance(objective, (GroupObjective, ConstrainedObjective)):
        return None
    return objective.report() if bool(objective.term.tracker.seen.any()) else None


def log_values(report: GroupReport | ConstraintReport) -> dict[str, float]:
    """The numbers of `objective.report()` for a log, by name; those not known yet are left out.

    Errors are standard errors of the estimates. With ten groups or constraints at most there are
    also the numbers of each.
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
