"""The network that is made for a table: the encoding of the features, a wide and a deep part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["PIECES", "Encoding", "WideAndDeep"]

Array = NDArray[Any]

PIECES = 8
"""Pieces of a number, for the network that is made here."""

KNOT_ROWS, START_ROWS = 8192, 8192
"""Rows that knots are taken from, and that the wide part starts from, at most."""

ITERATIONS = 15
"""Of L-BFGS."""

FAR = 1e15
"""Scaled features are at most this, so that the network's sums stay within float32."""


class Encoding(NamedTuple):
    r"""Scales features and, with knots, adds piecewise linear functions of them.

    A column x with knots :math:`t_0 < \dots < t_k` is followed, after all columns, by k more

    .. math::
        e_j(x) = \min\bigl(\max\bigl(\tfrac{x - t_{j-1}}{t_j - t_{j-1}}, 0\bigr), 1\bigr).

    A linear function of these is any piecewise linear function of x with these knots. All columns
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
        some = X[:: -(-len(X) // KNOT_ROWS)]
        knots = tuple(_knots(column, pieces) for column in some.T)
        tables = [X, *cls(knots, np.zeros(0), np.zeros(0)).pieces(X)]
        scale = np.concatenate([table.std(0) for table in tables])
        # Rounding gives a column of equal numbers such as 0.1 a deviation of 1e-17, not 0.
        scale[np.concatenate([table.min(0) == table.max(0) for table in tables])] = 1.0
        return cls(knots, np.concatenate([table.mean(0) for table in tables]), scale)

    def pieces(self, X: Array) -> list[Array]:
        """The pieces of each column that has knots, not scaled."""
        return [
            np.clip((column[:, None] - knots[:-1]) / np.diff(knots), 0.0, 1.0)
            for column, knots in zip(X.T, self.knots, strict=True)
            if knots is not None
        ]

    def __call__(self, X: Array) -> Tensor:
        """The encoded table, float32."""
        found, start = np.empty((len(X), len(self.mean)), dtype=np.float32), 0
        for table in (X, *self.pieces(X)):
            end = start + table.shape[1]
            scaled = (table - self.mean[start:end]) / self.scale[start:end]
            found[:, start:end] = np.clip(scaled, -FAR, FAR)
            start = end
        return torch.as_tensor(found)


def _knots(column: Array, pieces: int) -> Array | None:
    if pieces < 2:
        return None
    values = np.unique(column)
    number = min(pieces, len(values) - 1)
    if number < 2:  # a straight line, which the scaled column is already
        return None
    return np.unique(np.quantile(values, np.linspace(0, 1, number + 1)))


class WideAndDeep(nn.Module):
    """A linear function of encoded features, plus a network of the scaled ones.

    The network has two hidden layers and starts at 0.

    Args:
        encoding: of the features.
        outputs: 1, or the number of classes.
        hidden: units of a layer.

    References:
        H.-T. Cheng et al., Wide & deep learning for recommender systems, 2016.
    """

    def __init__(self, encoding: Encoding, outputs: int, hidden: int = 16) -> None:
        super().__init__()
        self.features = len(encoding.knots)
        self.wide = nn.Linear(len(encoding.mean), outputs)
        last = nn.Linear(hidden, outputs, bias=False)
        self.deep = nn.Sequential(
            nn.Linear(self.features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), last
        )
        nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both parts."""
        return self._linear(x) + self.deep(x[:, : self.features])

    def _linear(self, x: Tensor) -> Tensor:
        if self.training:
            return self.wide(x)
        # A matrix product rounds a row as its place among the rows wants; a sum over it does not.
        scores = [(x * weight).sum(1) for weight in self.wide.weight]
        return torch.stack(scores, dim=1) + self.wide.bias

    def start(self, x: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
        """Fit the wide part by some steps of L-BFGS, with the squared norm / 2 n as penalty.

        Args:
            x: encoded features, (n, d).
            loss: a function of the scores, (n, outputs).
        """
        for parameter in self.wide.parameters():
            nn.init.zeros_(parameter)
        lbfgs = torch.optim.LBFGS(
            self.wide.parameters(), max_iter=ITERATIONS, line_search_fn="strong_wolfe"
        )

        def penalized() -> Tensor:
            lbfgs.zero_grad()
            value = loss(self.wide(x)) + self.wide.weight.square().sum() / (2 * len(x))
            value.backward()
            return value

        lbfgs.step(penalized)
        lbfgs.zero_grad()
