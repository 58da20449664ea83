"""All weights of a run as one vector: rules that step them are then a few large operations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

__all__ = ["Packing"]


@dataclass(frozen=True)
class Packing:
    """Which part of the vector is which parameter.

    Args:
        names: of the parameters, in order.
        shapes: of each.

    Example:
        >>> import torch
        >>> weights = {"a": torch.ones(2, 1), "b": torch.zeros(1)}
        >>> packing = Packing.of(weights)
        >>> packing.pack(weights)
        tensor([1., 1., 0.])
        >>> packing.unpack(torch.arange(3.0))["b"]
        tensor([2.])
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> Self:
        """The packing of some parameters."""
        return cls(tuple(weights), tuple(tuple(each.shape) for each in weights.values()))

    @property
    def sizes(self) -> list[int]:
        """Numbers of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    def pack(self, weights: Mapping[str, Tensor]) -> Tensor:
        """One vector (P,)."""
        return torch.cat([weights[name].reshape(-1) for name in self.names])

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters as views of a vector (..., P)."""
        parts = vector.split(self.sizes, dim=-1)
        lead = vector.shape[:-1]
        return {
            name: part.view(*lead, *shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }
