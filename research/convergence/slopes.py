"""The slope y_i of the outer function at tracked values, for a table of many runs at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fcco.outer import AbstractOuter, CVaR, CVaRHinge, SquaredHinge

from .problem import Problem

__all__ = ["Elementwise", "Reading", "Slopes", "Tail", "Values", "slopes_of", "smoothed_threshold"]

Values = dict[str, Tensor]  # hyperparameters by name, each of shape (settings, 1)


@dataclass(frozen=True)
class Elementwise:
    """y_i = f'(u_i), or f_lambda'(u_i) with smoothing."""

    outer: AbstractOuter
    smoothing: Tensor | None

    def read(self, table: Tensor) -> Reading:
        """Everything that depends on the whole table: nothing here."""
        return Reading(self, table, table)

    def of(self, reading: Reading, blocks: Tensor) -> Tensor:
        """The slopes of some blocks."""
        u = reading.table.gather(-1, blocks)
        if self.smoothing is None:
            return self.outer.gradient(u)
        return self.outer.envelope_gradient(u, self.smoothing)


@dataclass(frozen=True)
class Tail:
    """The same for CVaR: y_i = f'(u_i - s), where s is the best threshold of the whole table."""

    ratio: float
    smoothing: Tensor | None

    def read(self, table: Tensor) -> Reading:
        """The threshold of a table; without smoothing the slopes of all blocks."""
        if self.smoothing is None:
            return Reading(self, table, table.shape[-1] * CVaR(self.ratio).gradient(table))
        return Reading(self, table, smoothed_threshold(table, self.ratio, self.smoothing))

    def of(self, reading: Reading, blocks: Tensor) -> Tensor:
        """The slopes of some blocks."""
        if self.smoothing is None:
            return reading.known.gather(-1, blocks)
        u = reading.table.gather(-1, blocks)
        return CVaRHinge(self.ratio).envelope_gradient(u - reading.known, self.smoothing)


Slopes = Elementwise | Tail


@dataclass(frozen=True)
class Reading:
    """A table and what the slopes need to know of all of it, computed once."""

    slopes: Slopes
    table: Tensor
    known: Tensor

    def of(self, blocks: Tensor) -> Tensor:
        """The slopes of some blocks."""
        return self.slopes.of(self, blocks)


def smoothed_threshold(table: Tensor, ratio: float, smoothing: Tensor) -> Tensor:
    r"""The s that minimises s + (1/n) sum_i f_lambda(u_i - s), row by row.

    With s eliminated the weights are p = grad CVaR_{n lambda}(u), the projection of u / (n lambda)
    onto the capped simplex, and p_i = (u_i - s) / (n lambda) wherever 0 < p_i < cap. So s is the
    smallest u_i - n lambda p_i of the blocks with weight (the largest s, where it is not unique).
    """
    step = smoothing * table.shape[-1]
    weights = CVaR(ratio).envelope_gradient(table, step)
    reached = torch.where(weights > 0, table - step * weights, torch.inf)
    return reached.amin(-1, keepdim=True)


def slopes_of(problem: Problem, h: Values, *, smoothed: bool, squared: bool = False) -> Slopes:
    """The slopes that a method uses on a problem; the squared hinge has a weight of its own."""
    smoothing = h["smoothing"] if smoothed else None
    if problem.kind == "cvar":
        return Tail(problem.ratio, smoothing)
    if squared:
        weight: float = h["penalty"]  # type: ignore[assignment]
        return Elementwise(SquaredHinge(weight), None)
    return Elementwise(problem.outer, smoothing)
