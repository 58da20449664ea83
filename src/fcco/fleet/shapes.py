"""Pure functions whose numbers differ between runs: outer functions, dual rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .member import Numbers, Unsupported

__all__ = ["Shape"]


@dataclass(frozen=True)
class Shape:
    """A dataclass without its numbers, such as an outer function or a rule.

    Every field of a number (`float`) may differ between runs; all else must be the same.

    Args:
        template: one of them, for what all share.
        kind: its class.
        rest: fields that are no numbers.
        numbers: names of the fields that are.
        nested: fields that are such dataclasses themselves.
        prefix: of these names among all numbers of a run.
    """

    template: Any = dataclasses.field(compare=False)
    kind: type
    rest: tuple[tuple[str, object], ...]
    numbers: tuple[str, ...]
    nested: tuple[tuple[str, Shape], ...]
    prefix: str

    @classmethod
    def of(cls, value: Any, prefix: str) -> tuple[Shape, dict[str, float]]:
        """The shape of a dataclass, and its numbers by name."""
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            raise Unsupported(
                f"{value!r} is no dataclass: a fleet cannot tell which of its numbers may differ."
            )
        found: dict[str, float] = {}
        rest, own, nested = [], [], []
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if dataclasses.is_dataclass(part) and not isinstance(part, type):
                shape, inner = cls.of(part, f"{prefix}.{field.name}")
                nested.append((field.name, shape))
                found |= inner
            elif "float" in str(field.type) and isinstance(part, (int, float)):
                own.append(field.name)
                found[f"{prefix}.{field.name}"] = float(part)
            elif isinstance(part, Tensor) or not isinstance(part, Hashable):
                raise Unsupported(
                    f"A fleet cannot compare `{type(value).__name__}.{field.name}`, "
                    f"a {type(part).__name__}, between runs."
                )
            else:
                rest.append((field.name, part))
        shape = cls(value, type(value), tuple(rest), tuple(own), tuple(nested), prefix)
        return shape, found

    def build(self, numbers: Numbers) -> Any:
        """The object of one run."""
        own: dict[str, Any] = {name: numbers[f"{self.prefix}.{name}"] for name in self.numbers}
        nested = {name: shape.build(numbers) for name, shape in self.nested}
        return dataclasses.replace(self.template, **own, **nested)
