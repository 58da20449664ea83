"""The result of one tracking step: values u_i, and the way back to the gradients of g_i."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import Layout, segment
from .update import value_of

__all__ = ["Tracked"]


@dataclass(frozen=True)
class Tracked:
    """Tracked values of the blocks of a batch, and the entries that carry their gradient.

    Attributes:
        value: u_i, without gradient, shape (B1,) or, for d1 > 1, (B1, d1).
        index: the distinct block ids, increasing, shape (B1,).
        entries: this rank's values that carry the gradient, shape (E, d1).
        where: their layout.
        scale: ranks divided by the samples of each block over all ranks, shape (B1, 1).
        position: position in `index` of each block of `where`, when these differ (several ranks).
        log: entries and values are logarithms.
    """

    value: Tensor
    index: Tensor
    entries: Tensor
    where: Layout
    scale: Tensor
    position: Tensor | None = None
    log: bool = False

    def attach(self, value: Tensor, slope: Tensor) -> Tensor:
        """A scalar with this value and the gradient sum_i <slope_i, grad g_i>.

        Data-parallel training averages gradients over ranks; `scale` holds their number, so that
        this average is the gradient on the global batch.

        Args:
            value: the scalar's value.
            slope: the gradient with respect to u, of the shape of `self.value`.
        """
        inner = torch.dot(self.entries.reshape(-1), self._factors(slope).reshape(-1))
        return value_of(value, gradient_of=inner)

    def carrying_gradient(self) -> Tensor:
        """The values as a tensor whose gradient is that of g_i."""
        where = self._entry_positions()
        carrier = self.entries * self._factors(torch.ones_like(self.value))
        if where is not None:
            carrier = segment(carrier, where, len(self.index))
        return value_of(self.value, carrier.reshape(self.value.shape))

    def _factors(self, slope: Tensor) -> Tensor:
        """d(scalar) / d(entry), from d(scalar) / d(u_i)."""
        factors = slope.reshape(len(self.index), -1) * self.scale
        where = self._entry_positions()
        if where is not None:
            factors = factors.index_select(0, where)
        if self.where.weights is not None:
            factors = factors * self.where.weights
        if self.log:  # d(log u) = dg / u, formed from logarithms
            u = self.value.reshape(len(self.index), -1)
            u = u if where is None else u.index_select(0, where)
            factors = factors * torch.exp(self.entries.detach() - u)
        return factors

    def _entry_positions(self) -> Tensor | None:
        if self.position is None:
            return self.where.inverse
        return self.position if self.where.inverse is None else self.position[self.where.inverse]
