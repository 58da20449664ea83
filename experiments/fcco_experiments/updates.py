"""What steps the weights: the optimizer of a method."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fcco import _checks, adam_type, momentum_type

from .task import Method

__all__ = ["Stepped", "optimizer"]


@dataclass
class Stepped:
    """A method on a task: what makes its loss and what steps it; tasks add what they need.

    Attributes:
        objective: what makes the loss; None where it is a plain average.
        optimizer: what is stepped.
        scheduled: the optimizer whose learning rate follows the schedule.
    """

    objective: Any
    optimizer: torch.optim.Optimizer
    scheduled: torch.optim.Optimizer

    def set_rate(self, lr: float) -> None:
        """Use this learning rate from now on."""
        for group in self.scheduled.param_groups:
            group["lr"] = lr

    def settled(self) -> AbstractContextManager[None]:
        """Inside, the weights are those between the rounds of a double loop."""
        anchored = getattr(self.optimizer, "anchored", nullcontext)
        return anchored()


def optimizer(parameters: Iterable[Tensor], method: Method) -> torch.optim.Optimizer:
    """Adam (weight decay decoupled), SGD with the momentum of the paper, or plain SGD.

    Args:
        parameters: the weights.
        method: its `update`, `lr`, `beta` and `weight_decay` are used.
    """
    _checks.one_of("Method", "update", method.update, ("adam", "momentum", "sgd"))
    _checks.in_interval("Method", "beta", method.beta, 0, 1, open_low=True)
    decay = method.weight_decay
    if method.update == "adam":
        return adam_type(parameters, method.lr, method.beta, weight_decay=decay)
    if method.update == "momentum":
        return momentum_type(parameters, method.lr, method.beta, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=method.lr, weight_decay=decay)
