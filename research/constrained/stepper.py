"""One method on one problem, ready to be stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .problems import Batch, Problem

__all__ = ["Builder", "Setting", "Stepper", "adam"]

Setting = Mapping[str, Any]


@dataclass
class Stepper:
    """A step, what it costs, and the optimizers whose learning rate follows the schedule.

    Attributes:
        step: trains on one batch.
        optimizers: their learning rates are multiplied by the schedule's factor.
        gradients: gradient evaluations of one step.
        extra_forwards: passes without gradient of one step, beside those.
    """

    step: Callable[[Batch], None]
    optimizers: list[torch.optim.Optimizer]
    gradients: int = 1
    extra_forwards: int = 0
    _initial: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._initial = [g["lr"] for o in self.optimizers for g in o.param_groups]

    def set_factor(self, factor: float) -> None:
        """Multiply the first learning rates with `factor`."""
        groups = [group for each in self.optimizers for group in each.param_groups]
        for group, initial in zip(groups, self._initial, strict=True):
            group["lr"] = factor * initial


Builder = Callable[[Problem, nn.Module, Setting], Stepper]


def adam(problem: Problem, model: nn.Module) -> torch.optim.Optimizer:
    """The primal optimizer of every method."""
    return torch.optim.Adam(model.parameters(), lr=problem.schedule.lr)
