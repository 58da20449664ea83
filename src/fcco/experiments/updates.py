"""What steps the weights: the optimizer of a method."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fcco import adam_type, checks, momentum_type

from .task import Method

__all__ = ["optimizer"]


def optimizer(parameters: Iterable[Tensor], method: Method) -> torch.optim.Optimizer:
    """Adam (weight decay decoupled), SGD with the momentum of the paper, or plain SGD.

    Args:
        parameters: the weights.
        method: its `update`, `lr`, `beta` and `weight_decay` are used.
    """
    checks.one_of("Method", "update", method.update, ("adam", "momentum", "sgd"))
    checks.in_interval("Method", "beta", method.beta, 0, 1, open_low=True)
    decay = method.weight_decay
    if method.update == "adam":
        return adam_type(parameters, method.lr, method.beta, weight_decay=decay)
    if method.update == "momentum":
        return momentum_type(parameters, method.lr, method.beta, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=method.lr, weight_decay=decay)
