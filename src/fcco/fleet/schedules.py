"""The settings of all runs as tensors, and those that are functions of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .member import Numbers

__all__ = ["Schedules"]


class Schedules:
    """Settings by name; a setting is a number, a tensor or a function of the step.

    Args:
        given: of each run.
        device: of the tensors.

    Example:
        >>> schedules = Schedules([{"lr": 0.1}, {"lr": lambda step: 1 / (step + 1)}], "cpu")
        >>> numbers = schedules.at(0)
        >>> schedules.move(numbers, 3)
        >>> numbers["lr"].tolist()
        [0.1, 0.25]
    """

    def __init__(
        self, given: Sequence[Mapping[str, Any]], device: torch.device | str | None
    ) -> None:
        self.device = device
        self._given = {name: [each[name] for each in given] for name in given[0]}
        self.moving = [n for n, values in self._given.items() if any(map(callable, values))]

    def _row(self, name: str, step: int) -> Tensor:
        values = [each(step) if callable(each) else each for each in self._given[name]]
        wide = [torch.as_tensor(each, dtype=torch.float64) for each in values]
        return torch.stack(wide).to(self.device)

    def at(self, step: int) -> Numbers:
        """All settings at a step, in double precision."""
        return {name: self._row(name, step) for name in self._given}

    def move(self, numbers: Numbers, step: int) -> None:
        """Put those that are functions of the step where they belong at a step."""
        for name in self.moving:
            numbers[name].copy_(self._row(name, step))
