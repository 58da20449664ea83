"""The numbers of a run by name: `lr`, `gamma`, `outer.scale`."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..outer import AbstractOuter
from .run import Unsupported

__all__ = ["Numbers", "put_numbers", "take_numbers"]

Numbers = dict[str, Any]
"""Numbers, tensors or functions of the step by name."""

_ANY = torch.zeros(())
"""Stands for a number: the very same object, so that values without their numbers are equal."""


def take_numbers(value: Any, path: str) -> tuple[Any, Numbers]:
    """An outer function or a dual rule without its numbers, and these by their path.

    Example:
        >>> import torch, fcco
        >>> hinge, numbers = take_numbers(fcco.outer.Hinge(2.0), "outer")
        >>> numbers, hinge == take_numbers(fcco.outer.Hinge(5.0), "outer")[0]
        ({'outer.scale': 2.0}, True)
        >>> put_numbers(hinge, "outer", {"outer.scale": torch.tensor(3.0)})
        Hinge(scale=tensor(3.))
    """
    if not dataclasses.is_dataclass(value):
        raise Unsupported(
            f"{value!r} is no dataclass: a fleet cannot tell which of its numbers may differ."
        )
    numbers: Numbers = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        # What f declares of itself (`dim`, `lipschitz`) selects code, and is no number.
        declared = field.name in dir(AbstractOuter)
        if isinstance(part, (int, float)) and not (isinstance(part, bool) or declared):
            numbers[f"{path}.{field.name}"] = float(part)
        elif isinstance(part, Tensor) or not isinstance(part, Hashable):
            raise Unsupported(
                f"A fleet cannot compare `{type(value).__name__}.{field.name}`, "
                f"a {type(part).__name__}, between runs."
            )
    return put_numbers(value, path, dict.fromkeys(numbers, _ANY)), numbers


def put_numbers(value: Any, path: str, numbers: Numbers) -> Any:
    """The value with the numbers of a run, which may be tensors."""
    names = {field.name: f"{path}.{field.name}" for field in dataclasses.fields(value)}
    own = {name: numbers[key] for name, key in names.items() if key in numbers}
    return dataclasses.replace(value, **own)
