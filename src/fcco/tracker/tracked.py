"""The result of one tracking step: values u_i, and the way back to the gradients of g_i."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Layout, segment

__all__ = ["Tracked"]


class Tracked(NamedTuple):
    """Tracked values of the blocks of a batch, and the entries that carry their gradient.

    Attributes:
        value: u_i, without gradient, shape (B1,) or, for d1 > 1, (B1, d1).
        index: the distinct block ids, increasing, shape (B1,).
        entries: this rank's values that carry the gradient, shape (E, d1).
        where: their layout.
        counts: samples behind the entries of each block, over all ranks, shape (B1, 1).
        ranks: number of ranks.
        position: position in `index` of each block of `where`, when these differ (several ranks).
        log: entries and values are logarithms.
    """

    value: Tensor
    index: Tensor
    entries: Tensor
    where: Layout
    counts: Tensor
    ranks: int = 1
    position: Tensor | None = None
    log: bool = False

    def attach(self, value: Tensor, slope: Tensor, share: float = 1.0) -> Tensor:
        """A scalar with this value and the gradient share * sum_i <slope_i, grad g_i>.

        Data-parallel training averages gradients over ranks; `share` is multiplied by their
        number, so that this average is the gradient on the global batch.

        Args:
            value: the scalar's value.
            slope: the gradient with respect to u, of the shape of `self.value`.
            share: a common factor, such as weight / B1.
        """
        # The carrier is zero, entry by entry: adding and taking away sums would round the value.
        zero = self.entries - self.entries.detach()
        inner = torch.dot(zero.reshape(-1), self._factors(slope).reshape(-1))
        return torch.add(value, inner, alpha=share * self.ranks)

    def carrying_gradient(self) -> Tensor:
        """The values as a tensor whose gradient is that of g_i."""
        where = self._entry_positions()
        zero = self.entries - self.entries.detach()
        carrier = zero * (self.ranks * self._factors(torch.ones_like(self.value)))
        if where is not None:
            carrier = segment(carrier, where, len(self.index))
        return self.value + carrier.reshape(self.value.shape)

    def _factors(self, slope: Tensor) -> Tensor:
        """d(scalar) / d(entry), from d(scalar) / d(u_i)."""
        factors = slope.reshape(-1, self.entries.shape[1]) / self.counts
        where = self._entry_positions()
        if where is not None:
            factors = factors.index_select(0, where)
        if self.where.weights is not None:
            factors = factors * self.where.weights
        if self.log:  # d(log u) = dg / u, formed from logarithms
            u = self.value.reshape(-1, self.entries.shape[1])
            u = u if where is None else u.index_select(0, where)
            # Held below e^60, so that a block that grew beyond all bounds gives no NaN.
            factors = factors * torch.exp((self.entries.detach() - u).clamp(max=60))
        return factors

    def _entry_positions(self) -> Tensor | None:
        if self.position is None:
            return self.where.inverse
        return self.position if self.where.inverse is None else self.position[self.where.inverse]
