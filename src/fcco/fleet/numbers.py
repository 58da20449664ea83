"""The numbers of all runs: one dict from names to tensors with one row per run.

A member gives numbers, tensors or functions of the step, by name: `lr`, `gamma`, `outer.scale`. A
fleet holds them in double precision; a step reads them in the precision of the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..outer import AbstractOuter
from .run import Unsupported

__all__ = ["Numbers", "Template", "stack"]

Numbers = dict[str, Any]
"""The numbers of one run by name."""


def stack(runs: Sequence[Numbers], name: str, step: int = 0) -> Tensor:
    """A number of all runs at a step, (R, ...).

    Example:
        >>> stack([{"lr": 0.1}, {"lr": lambda step: 1 / (step + 1)}], "lr", step=3).tolist()
        [0.1, 0.25]
    """
    values = [run[name](step) if callable(run[name]) else run[name] for run in runs]
    return torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])


@dataclass(frozen=True)
class Template:
    """An outer function or a dual rule, whose numbers may differ between runs; all else is equal.

    Example:
        >>> import torch, fcco
        >>> template, numbers = Template.of(fcco.outer.Hinge(2.0), "outer")
        >>> numbers
        {'outer.scale': 2.0}
        >>> template.build({"outer.scale": torch.tensor(3.0)})
        Hinge(scale=tensor(3.))
    """

    example: Any = dataclasses.field(compare=False)
    path: str
    constants: tuple[Any, ...]  # its type, and its fields that are no numbers

    @classmethod
    def of(cls, value: Any, path: str) -> tuple[Template, Numbers]:
        """The template of a frozen dataclass, and its numbers by path."""
        if not dataclasses.is_dataclass(value):
            raise Unsupported(
                f"{value!r} is no dataclass: a fleet cannot tell which of its numbers may differ."
            )
        numbers: Numbers = {}
        constants: list[Any] = [type(value)]
        for field in dataclasses.fields(value):
            name, part = f"{path}.{field.name}", getattr(value, field.name)
            # What f declares of itself (`dim`, `lipschitz`) selects code, and is no number.
            declared = field.name in dir(AbstractOuter)
            if isinstance(part, (int, float)) and not (isinstance(part, bool) or declared):
                numbers[name] = float(part)
            elif dataclasses.is_dataclass(part) and not isinstance(part, type):
                template, more = cls.of(part, name)
                numbers |= more
                constants.append(template)
            elif isinstance(part, Tensor) or not isinstance(part, Hashable):
                raise Unsupported(
                    f"A fleet cannot compare `{type(value).__name__}.{field.name}`, "
                    f"a {type(part).__name__}, between runs."
                )
            else:
                constants.append(part)
        return cls(value, path, tuple(constants)), numbers

    def build(self, numbers: Numbers) -> Any:
        """The object with the numbers of another run, which may be tensors."""
        names = [field.name for field in dataclasses.fields(self.example)]
        known = {name: numbers.get(f"{self.path}.{name}") for name in names}
        changes = {name: value for name, value in known.items() if value is not None}
        nested = [part for part in self.constants if isinstance(part, Template)]
        changes |= {part.path.rpartition(".")[2]: part.build(numbers) for part in nested}
        return dataclasses.replace(self.example, **changes)
