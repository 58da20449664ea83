"""The result of one tracking step: values u_i, and the way back to the gradients of g_i."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Layout, per_row, segment
from .update import value_of

__all__ = ["Tracked"]


class Tracked(NamedTuple):
    """Tracked values of the blocks of a batch, and the entries that carry their gradient.

    Attributes:
        value: u_i, without gradient, shape (B1,) or, for d1 > 1, (B1, d1).
        index: the distinct block ids, increasing, shape (B1,).
        entries: this rank's values that carry the gradient, shape (E,) or (E, d1).
        where: their layout.
        counts: samples behind the entries of each block, over all ranks, shape (B1,).
        ranks: number of ranks.
        position: position in `index` of each block of `where`, when these differ (several ranks).
        log: entries and values are logarithms.
    """

    value: Tensor
    index: Tensor  # type: ignore[assignment]
    entries: Tensor
    where: Layout
    counts: Tensor
    ranks: int = 1
    position: Tensor | None = None
    log: bool = False

    def attach(self, value: Tensor, slope: Tensor) -> Tensor:
        """A scalar with this value and the gradient sum_i <slope_i, grad g_i>.

        Data-parallel training averages gradients over ranks; the slope is multiplied by their
        number, so that this average is the gradient on the global batch.

        Args:
            value: the scalar's value.
            slope: the gradient with respect to u, of the shape of `self.value`.
        """
        entries, factors = self.entries, self.factors(slope)
        if entries.dim() > 1:
            entries, factors = entries.reshape(-1), factors.reshape(-1)
        scalar = torch.dot(entries, factors)
        # Another value in the same place: no node of the graph looks at it, and two fewer are made
        # than by `value_of`, which is a tenth of the backward pass of a small network.
        scalar.detach().copy_(value)
        return scalar

    def carrying_gradient(self) -> Tensor:
        """The values as a tensor whose gradient is that of g_i."""
        where = self._entry_positions()
        carrier = self.entries * self.factors(torch.ones_like(self.value))
        if where is not None:
            carrier = segment(carrier, where, len(self.index))
        return value_of(self.value, gradient_of=carrier)

    def factors(self, slope: Tensor) -> Tensor:
        """d(scalar) / d(entry), from d(scalar) / d(u_i); pure."""
        factors = slope if self._whole else slope / per_row(self.counts, slope)
        where = self._entry_positions()
        if where is not None:
            factors = factors.index_select(0, where)
        if self.ranks > 1:
            factors = factors * self.ranks
        if self.where.weights is not None:
            factors = factors * per_row(self.where.weights, factors)
        if self.log:  # d(log u) = dg / u, formed from logarithms
            u = self.value if where is None else self.value.index_select(0, where)
            # Held below e^60, so that a block that grew beyond all bounds gives no NaN.
            factors = factors * torch.exp((self.entries.detach() - u).clamp(max=60))
        return factors

    @property
    def _whole(self) -> bool:
        return self.where.whole and self.ranks == 1

    def _entry_positions(self) -> Tensor | None:
        if self.position is None:
            return self.where.inverse
        return self.position if self.where.inverse is None else self.position[self.where.inverse]
