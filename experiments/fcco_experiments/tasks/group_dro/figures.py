"""Figures of a model on a part of the data: losses and accuracies of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fcco
from fcco._distributed import Group

from ...data.grouped import GroupedPart
from ...task import Row

__all__ = ["FEW", "figures", "group_means", "measured", "shown", "summary"]

FEW = 64
"""Up to so many groups are shown one by one, more as quantiles."""


@torch.no_grad()
def measured(
    scores: Callable[[Tensor], Tensor],
    part: GroupedPart,
    chunks: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    group: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss of each sample and whether it was classified rightly, in float64, on the CPU.

    Args:
        scores: the model.
        part: labels.
        chunks: places in the part, and their inputs.
        device: of the model.
        group: ranks that share the chunks.
    """
    label = part.label.to(device)
    loss, right, seen = (
        torch.zeros(len(part), dtype=torch.float64, device=device) for _ in range(3)
    )
    for places, inputs in chunks:
        own = places.to(device)
        found = scores(inputs)
        loss[own] = cross_entropy(found, label[own], reduction="none").double()
        right[own] = (found.argmax(1) == label[own]).double()
        seen[own] = 1.0
    if group is not None:
        for each in (loss, right, seen):
            torch.distributed.all_reduce(each, group=group.handle)
    return (loss / seen).cpu(), (right / seen).cpu()


def group_means(values: Tensor, ids: Tensor, number: int) -> Tensor:
    """The mean of the values over each group."""
    total = torch.zeros(number, dtype=values.dtype).index_add_(0, ids, values)
    return total / torch.bincount(ids, minlength=number)


def summary(accuracies: Tensor, how: str) -> float:
    """The accuracy that is reported of many groups: the worst, or the tenth percentile."""
    return (accuracies.min() if how == "worst" else accuracies.quantile(0.1)).item()


def shown(values: Tensor) -> list[float]:
    """Values by group, or their 0, 10, ..., 100 % quantiles when there are many."""
    if len(values) <= FEW:
        return values.tolist()
    levels = torch.linspace(0, 1, 11, dtype=torch.float64)
    return values.double().quantile(levels).tolist()


def figures(
    name: str, part: GroupedPart, loss: Tensor, right: Tensor, ratio: float, how: str
) -> tuple[Row, Tensor]:
    """The figures of a part, and the loss of each of its groups.

    Args:
        name: `train`, `val` or `test`, for the keys.
        part: the groups.
        loss: of each sample.
        right: 1 where the class was right.
        ratio: r of the CVaR.
        how: see `summary`.
    """
    losses = group_means(loss, part.group, len(part.group_names))
    accuracies = group_means(right, part.reported, len(part.reported_names))
    row: Row = {
        f"{name}_cvar": fcco.CVaR(ratio)(losses).item(),
        f"{name}_loss": loss.mean().item(),
        f"{name}_group_loss": losses.mean().item(),
        f"{name}_worst_loss": losses.max().item(),
        f"{name}_accuracy": right.mean().item(),
        f"{name}_worst_accuracy": summary(accuracies, how),
        f"{name}_group_accuracy": accuracies.mean().item(),
    }
    if name == "test":
        row["test_reported"] = shown(accuracies)
        row["test_smallest"] = int(torch.bincount(part.reported).min())
    return row, losses
