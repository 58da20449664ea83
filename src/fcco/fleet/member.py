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
    names = _trained_by_all(members)
    held = {id(each.model): _held(each.model) for each in members}
    rows = [held[id(each.model)] for each in members]
    facts = {key: _facts(each.model) for key, each in {id(m.model): m for m in members}.items()}
    first = facts[id(members[0].model)]
    for place, member in enumerate(members):
        for word, own in facts[id(member.model)].items():
            if own != first[word]:
                raise Unsupported(
                    f"The model of run {place} has another {word} than that of run 0."
                )
    kinds = {rows[0][name].dtype for name in names}
    if len(kinds) > 1 or not kinds <= {torch.float32, torch.float64}:
        raise Unsupported(
            "A fleet trains weights that are all of single or all of double precision, not of "
            f"{', '.join(sorted(str(each) for each in kinds))}."
        )
    table = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {name: table.pop(name) for name in names}, table


def _trained_by_all(members: Sequence[Member]) -> tuple[str, ...]:
    """What every run trains; runs that share an optimizer train the same."""
    first = trained(members[0])
    if not first:
        raise Unsupported("`Member(optimizer=...)` moves no parameter of `model`.")
    known = {id(members[0].optimizer): first}
    for place, member in enumerate(members):
        key = id(member.optimizer)
        if key not in known:
            known[key] = trained(member)
        if other := sorted(set(known[key]) ^ set(first)):
            raise Unsupported(
                f"All runs of a fleet train the same parameters, but run {place} and run 0 differ "
                f"in: {', '.join(other)}."
            )
    return first


def _facts(model: nn.Module) -> dict[str, object]:
    """What models of one fleet must share, by a word for it.

    Raises:
        Unsupported: when a parameter has hooks.
    """
    for name, value in model.named_parameters():
        if value._backward_hooks or value._post_accumulate_grad_hooks:
            raise Unsupported(f"A fleet cannot follow the hooks of the parameter {name}.")
    held = _held(model)
    modules = [(name, type(each), each) for name, each in model.named_modules()]
    return {
        "shape": {name: tuple(value.shape) for name, value in held.items()},
        "precision": {name: value.dtype for name, value in held.items()},
        "set of frozen parameters": {n: p.requires_grad for n, p in model.named_parameters()},
        "mode (`train` or `eval`)": [each.training for _, _, each in modules],
        "structure": [(name, kind, each.extra_repr()) for name, kind, each in modules],
    }


def _held(model: nn.Module) -> dict[str, Tensor]:
    both = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach() for name, value in both}
