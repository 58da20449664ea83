"""Features as a network likes them: scaled, and numbers also in pieces."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Encoding"]

Array = NDArray[Any]


class Encoding(NamedTuple):
    r"""Scales features and, with knots, adds piecewise linear functions of them.

    A column x with knots :math:`t_0 < \dots < t_k` is followed by k columns

    .. math::
        e_j(x) = \min\bigl(\max\bigl(\tfrac{x - t_{j-1}}{t_j - t_{j-1}}, 0\bigr), 1\bigr).

    A network of few units then finds thresholds in a column whatever its distribution. All columns
    have mean 0 and deviation 1 over the rows that the encoding was made from.

    References:
        Y. Gorishniy, I. Rubachev and A. Babenko, On embeddings for numerical features in tabular
        deep learning, 2022. (Knots there are quantiles of the samples; here of the distinct values,
        so that a column which is mostly 0 is cut where its other values are.)
    """

    knots: tuple[Array | None, ...]
    mean: Array
    scale: Array

    @classmethod
    def of(cls, X: Array, pieces: int) -> Encoding:
        """The encoding of a table.

        Args:
            X: its rows, (n, d), float64.
            pieces: the most pieces of a column; 1 for scaling alone.
        """
        knots = tuple(_knots(column, pieces) for column in X.T)
        plain = cls(knots, np.zeros(1), np.ones(1))
        table = plain.columns(X)
        scale = table.std(0)
        scale[scale == 0] = 1.0
        return cls(knots, table.mean(0), scale)

    def columns(self, X: Array) -> Array:
        """The columns and their pieces, not scaled."""
        pieces = [
            np.clip((column[:, None] - knots[:-1]) / np.diff(knots), 0.0, 1.0)
            for column, knots in zip(X.T, self.knots, strict=True)
            if knots is not None
        ]
        return np.concatenate([X, *pieces], axis=1)

    def __call__(self, X: Array) -> Tensor:
        """The encoded table, float32."""
        return torch.as_tensor((self.columns(X) - self.mean) / self.scale, dtype=torch.float32)


def _knots(column: Array, pieces: int) -> Array | None:
    values = np.unique(column)
    number = min(pieces, len(values) - 1)
    if number < 2:  # a straight line, which the scaled column is already
        return None
    return np.unique(np.quantile(values, np.linspace(0, 1, number + 1)))
