"""One run of a fleet, as the ordinary objects that would train it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Fixed", "Member", "Numbers", "State", "Unsupported", "stacked", "trained"]

State = dict[str, Tensor]
"""What a run changes, by name; in a fleet every tensor has one row per run."""
Numbers = dict[str, Tensor]
"""The settings of a run that may differ between runs, by name."""
Fixed = dict[str, Tensor]
"""Buffers of the model that no step changes, by name."""


class Unsupported(ValueError):
    """A run that cannot be part of a fleet; train it alone."""


@dataclass(frozen=True)
class Member:
    """One run: a model, what steps it, and what makes its loss.

    The objects are read once and never changed. Runs that differ in their first weights alone may
    share an optimizer and an objective; the weights are those of `model`.

    Args:
        model: with the first weights and buffers.
        optimizer: what you would step: your own optimizer or `objective.optimizer`.
        objective: what makes the loss; None where it is a plain average.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Any = None


def trained(member: Member) -> tuple[str, ...]:
    """Names of the parameters that the optimizer moves, in the order of the model."""
    held = [p for group in member.optimizer.param_groups for p in group["params"]]
    own = dict(member.model.named_parameters())
    ids = {id(p) for p in held}
    moving = {name: p for name, p in own.items() if p.requires_grad}
    if {id(p) for p in own.values()} & ids:  # an optimizer of this very model
        return tuple(name for name, p in moving.items() if id(p) in ids)
    shapes = [tuple(p.shape) for p in held if p.requires_grad]
    if shapes != [tuple(p.shape) for p in moving.values()]:
        raise Unsupported(
            "`Member(optimizer=...)` holds parameters of another model than `model`, and of other "
            f"shapes: {shapes}."
        )
    return tuple(moving)


def stacked(members: Sequence[Member]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The trained weights of all runs by name, (R, ...), and everything else that they hold.

    Raises:
        Unsupported: when models differ in their shape.
    """
    names = trained(members[0])
    if not names:
        raise Unsupported("`Member(optimizer=...)` moves no parameter of `model`.")
    held = {id(each.model): _held(each.model) for each in members}
    rows = [held[id(each.model)] for each in members]
    for place, row in enumerate(rows):
        shapes = {name: tuple(value.shape) for name, value in row.items()}
        if shapes != {name: tuple(value.shape) for name, value in rows[0].items()}:
            raise Unsupported(f"The model of run {place} has another shape than that of run 0.")
    table = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {name: table.pop(name) for name in names}, table


def _held(model: nn.Module) -> dict[str, Tensor]:
    both = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach() for name, value in both}
