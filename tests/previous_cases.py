"""A small network and steps on it, for the tests of the previous parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import fcco

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


def network(*middle: nn.Module) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), *middle, nn.Linear(5, 1)).double()


def moved(model: nn.Module, extra=(), optimizer=None, steps: int = 2, **options: Any):
    """Take steps; return the object under test and a copy of the model at w_{t-1}."""
    if optimizer is None:
        optimizer = torch.optim.SGD([*model.parameters(), *extra], lr=0.3)
    previous = fcco.previous.PreviousParameters(model, optimizer, **options)
    for _ in range(steps):
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
    return previous, before, optimizer


def state(model: nn.Module) -> dict:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
