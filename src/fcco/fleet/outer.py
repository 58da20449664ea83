"""Outer functions whose numbers differ between runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..outer.base import AbstractOuter
from .member import Numbers, Unsupported

__all__ = ["OuterShape"]


@dataclass(frozen=True)
class OuterShape:
    """An outer function without its numbers.

    Every field of a number (`float`) may differ between runs; all else must be the same.

    Args:
        template: one of them, for what all share.
        numbers: names of the fields that are numbers.
        prefix: of these names among all numbers of a run.
    """

    template: AbstractOuter = dataclasses.field(compare=False)
    kind: type[AbstractOuter]
    rest: tuple[tuple[str, object], ...]
    numbers: tuple[str, ...]
    nested: tuple[tuple[str, OuterShape], ...]
    prefix: str

    @classmethod
    def of(cls, outer: AbstractOuter, prefix: str = "outer") -> tuple[OuterShape, dict[str, float]]:
        """The shape of an outer function, and its numbers by name."""
        if not dataclasses.is_dataclass(outer):
            raise Unsupported(
                f"{outer!r} is no dataclass: a fleet cannot tell which of its numbers may differ."
            )
        found: dict[str, float] = {}
        rest, own, nested = [], [], []
        for field in dataclasses.fields(outer):
            value = getattr(outer, field.name)
            if isinstance(value, AbstractOuter):
                shape, inner = cls.of(value, f"{prefix}.{field.name}")
                nested.append((field.name, shape))
                found |= inner
            elif "float" in str(field.type) and isinstance(value, (int, float)):
                own.append(field.name)
                found[f"{prefix}.{field.name}"] = float(value)
            else:
                rest.append((field.name, value))
        shape = cls(outer, type(outer), tuple(rest), tuple(own), tuple(nested), prefix)
        return shape, found

    def build(self, numbers: Numbers) -> AbstractOuter:
        """The outer function of one run."""
        own = {name: numbers[f"{self.prefix}.{name}"] for name in self.numbers}
        nested = {name: shape.build(numbers) for name, shape in self.nested}
        return dataclasses.replace(self.template, **own, **nested)  # type: ignore[type-var]
