"""How a table becomes tensors: the groups of its rows, encoded features, parts of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...index import read_names

Array = NDArray[Any]

PIECES = 8
"""Pieces of a column, for the network that is made here."""

FAR = 1e15
"""Scaled features are at most this, so that the network's sums stay within float32."""


class Part(NamedTuple):
    """Rows of a table: features, (n, d), classes, (n,), and memberships in groups, (n, G)."""

    x: Tensor
    y: Tensor
    members: Tensor

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Features and classes of some rows."""
        return self.x.index_select(0, rows), self.y.index_select(0, rows)

    def of(self, rows: Tensor) -> Part:
        """The part of some rows."""
        return Part(*(each.index_select(0, rows.to(each.device)) for each in self))


class Groups(NamedTuple):
    """The names of G groups and who is in them, (n, G); a row may have none or several."""

    names: tuple[str, ...]
    members: NDArray[np.bool_]


def read_groups(sensitive_features: Any) -> Groups:
    """The groups of samples, in any of the forms that `fit` takes them in."""
    place, given = "`fit(sensitive_features=...)`", sensitive_features
    if not isinstance(given, (list, tuple)):
        given = np.asarray(given)
    one_axis = isinstance(given, (list, tuple)) or given.ndim == 1
    lists = (list, tuple, set, frozenset, np.ndarray)
    if one_axis and any(isinstance(row, lists) for row in given):
        found, names = read_names(place, given)
        if any(isinstance(name, (bool, np.bool_)) for name in names):
            raise ValueError(
                f"{place} must list names of groups but lists booleans. A table with a column for "
                "each group must be an array: np.array(sensitive_features)."
            )
        members = np.zeros((found.samples, found.groups), dtype=bool)
        members[found.sample, found.group] = True
        return Groups(distinct(map(str, names)), members)
    table = np.asarray(given)
    if table.ndim == 2 and table.dtype == bool and table.shape[1] > 1:
        numbered = [f"group {k}" for k in range(table.shape[1])]
        return Groups(distinct(map(str, getattr(sensitive_features, "columns", numbered))), table)
    columns = table.reshape(len(table), -1).T
    keys = np.array([_codes(column) for column in columns]).T
    _, first, code = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    names = distinct(", ".join(str(column[row]) for column in columns) for row in first)
    return Groups(names, code.reshape(-1, 1) == np.arange(len(names)))


def _codes(column: Array) -> Array:
    """A number for each value of a column; objects are equal if they are written alike."""
    # NaN differs from itself, and None cannot be compared with a string: both are values here.
    values = column.astype(str) if column.dtype == object else column
    return np.unique(values, return_inverse=True)[1]


def distinct(names: Iterable[str]) -> tuple[str, ...]:
    """The names, where equal ones get a number: groups and constraints are looked up by name."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return tuple(found)


class Encoding(NamedTuple):
    r"""Scales features and, with knots, adds piecewise linear functions of them.

    A column x with knots :math:`t_0 < \dots < t_k` is followed, after all columns, by k more

    .. math::
        e_j(x) = \min\bigl(\max\bigl(\tfrac{x - t_{j-1}}{t_j - t_{j-1}}, 0\bigr), 1\bigr).

    All have mean 0 and deviation 1 over the rows that the encoding was made from. Knots are
    quantiles of the distinct values: a column that is mostly 0 is cut where its other values are.

    References:
        Y. Gorishniy, I. Rubachev and A. Babenko, On embeddings for numerical features in tabular
        deep learning, 2022.
    """

    knots: tuple[Array | None, ...]
    mean: Array
    scale: Array

    @classmethod
    def of(cls, X: Array, pieces: int) -> Encoding:
        """The encoding of rows, (n, d), with at most so many pieces of a column; 1 only scales."""
        some = X[:: -(-len(X) // 8192)]  # quantiles want no more rows
        knots = tuple(_knots(column, pieces) for column in some.T)
        tables = _tables(X, knots)
        scale = np.concatenate([table.std(0) for table in tables])
        # Rounding gives a column of equal numbers such as 0.1 a deviation of 1e-17, not 0.
        scale[np.concatenate([table.min(0) == table.max(0) for table in tables])] = 1.0
        return cls(knots, np.concatenate([table.mean(0) for table in tables]), scale)

    def __call__(self, X: Array) -> Tensor:
        """The encoded table, float32."""
        found, start = np.empty((len(X), len(self.mean)), dtype=np.float32), 0
        for table in _tables(X, self.knots):
            end = start + table.shape[1]
            scaled = (table - self.mean[start:end]) / self.scale[start:end]
            found[:, start:end] = np.clip(scaled, -FAR, FAR)
            start = end
        return torch.as_tensor(found)


def _tables(X: Array, knots: Sequence[Array | None]) -> list[Array]:
    """The columns, and the pieces of each that has knots, not scaled."""
    pieces = [
        np.clip((column[:, None] - own[:-1]) / np.diff(own), 0.0, 1.0)
        for column, own in zip(X.T, knots, strict=True)
        if own is not None
    ]
    return [X, *pieces]


def _knots(column: Array, pieces: int) -> Array | None:
    values = np.unique(column) if pieces > 1 else column[:1]
    number = min(pieces, len(values) - 1)
    if number < 2:  # a straight line, which the scaled column is already
        return None
    return np.unique(np.quantile(values, np.linspace(0, 1, number + 1)))
