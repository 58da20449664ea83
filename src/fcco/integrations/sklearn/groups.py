"""Reading sensitive features: which samples belong to which group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Groups", "read_groups"]


class Groups(NamedTuple):
    """Who belongs to which group."""

    names: tuple[str, ...]
    """One for each group."""
    members: NDArray[np.bool_]
    """(n, G): whether a sample is in a group. A row may have none or several."""


def read_groups(sensitive_features: Any, number: int) -> Groups:
    """The groups of samples.

    Args:
        sensitive_features: a column of any values; several columns, whose combinations are the
            groups; a boolean table with one column per group, or a list of the groups of each
            sample: groups that may overlap.
        number: n, the number of samples.
    """
    if _lists_groups(sensitive_features):
        return _from_lists(sensitive_features, number)
    table = np.asarray(sensitive_features)
    if table.shape[:1] != (number,) or table.ndim not in (1, 2):
        raise ValueError(
            f"`fit(sensitive_features=...)` must have one row for each of the {number} samples of "
            f"X but has shape: {table.shape}."
        )
    if table.ndim == 2 and table.dtype == bool and table.shape[1] > 1:
        return Groups(_names(sensitive_features, table.shape[1]), table)
    columns = table.reshape(number, -1).T
    keys = np.array([_codes(column) for column in columns]).T
    _, first, code = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    names = tuple(", ".join(str(column[row]) for column in columns) for row in first)
    return Groups(names, code.reshape(-1, 1) == np.arange(len(names)))


def _lists_groups(sensitive_features: Any) -> bool:
    return isinstance(sensitive_features, (list, tuple)) and any(
        isinstance(row, (list, tuple, set, frozenset)) for row in sensitive_features
    )


def _from_lists(rows: Sequence[Any], number: int) -> Groups:
    if len(rows) != number:
        raise ValueError(
            f"`fit(sensitive_features=...)` must list the groups of each of the {number} samples "
            f"of X but lists those of {len(rows)}."
        )
    names = sorted({str(name) for row in rows for name in row})
    position = {name: k for k, name in enumerate(names)}
    members = np.zeros((number, len(names)), dtype=bool)
    for k, row in enumerate(rows):
        members[k, [position[str(name)] for name in row]] = True
    return Groups(tuple(names), members)


def _codes(column: NDArray[Any]) -> NDArray[Any]:
    """A number for each value of a column, of whatever types."""
    try:
        return np.unique(column, return_inverse=True)[1]
    except TypeError:  # values that cannot be compared, such as None beside strings
        return np.unique(column.astype(str), return_inverse=True)[1]


def _names(table: Any, number: int) -> tuple[str, ...]:
    """The names of a DataFrame's columns, or numbers."""
    try:
        return tuple(str(name) for name in table.columns)
    except AttributeError:
        return tuple(f"group {k}" for k in range(number))
