"""Who belongs where: one reader of ids, names, boolean matrices and lists of lists.

Every function takes `place`, the user's argument as its errors name it: "`index`", or
"`group_mean(group=...)`".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Memberships(NamedTuple):
    """Pairs of a sample and one of its groups, for samples in several groups or in none."""

    sample: Tensor  # (M,), increasing
    group: Tensor  # (M,)
    samples: int  # the number of samples, also of those without a group
    groups: int  # the columns of a matrix, or the largest id of lists and 1


def read_index(place: str, values: Any, number: int | None = None) -> Tensor | Memberships:
    """The id of each sample, (N,), or the memberships of samples that are in several groups.

    Those are given as booleans of shape (N, groups), or as a list of lists of ids. Ids are int64,
    on the device where they were given; `check_range` checks them once their ends are known.
    """
    if isinstance(values, (list, tuple)) and values and np.ndim(values[0]) == 1:
        return _of_lists(place, values, number)
    ids = values if isinstance(values, Tensor) else _as_tensor(place, values)
    dtype = ids.dtype
    if ids.dim() == 2 and dtype == torch.bool:
        return _of_matrix(place, ids, number)
    if ids.dim() != 1 or dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        hint = " A matrix of 0 and 1 must be boolean." if ids.dim() == 2 else ""
        raise ValueError(
            f"{place} must hold an integer id of each sample, or all groups of each (a boolean "
            f"matrix, or a list of lists), but has shape {tuple(ids.shape)} and {dtype}.{hint}"
        )
    return ids.long()


def check_range(place: str, low: int, high: int, number: int | None = None) -> None:
    """Raise unless ids from `low` to `high` are those of groups, below `number` if it is known."""
    if low < 0 or (number is not None and high >= number):
        limit = "hold ids from 0" if number is None else f"lie in [0, {number - 1}]"
        hint = " Ids start at 0: do yours start at 1?" if 0 < low <= high == number else ""
        raise IndexError(f"{place} must {limit} but contains: {low if low < 0 else high}.{hint}")


def read_names(place: str, values: Iterable[Any]) -> tuple[Memberships, list[Any]]:
    """Number groups that are given by name, in sorted order; also return the names.

    The values are for each sample its group, None if it has none; or a list of its groups.
    """
    rows = [
        list(value) if isinstance(value, (list, tuple, set, frozenset, np.ndarray)) else [value]
        for value in values
    ]
    pairs = [(row, name) for row, own in enumerate(rows) for name in own if name is not None]
    try:
        names = sorted({name for _, name in pairs})
        missing = any(name != name for name in names)
    except TypeError as error:  # not hashable, or not comparable
        raise ValueError(f"{place} must hold names of one kind: {error}.") from error
    if missing or not names:
        raise ValueError(f"{place} must name groups (None: no group) but holds {names or 'none'}.")
    if len(set(pairs)) < len(pairs):
        row = next(row for row, own in enumerate(rows) if len(set(own)) < len(own))
        raise ValueError(f"{place} must name each group of a sample once, but has: {rows[row]}.")
    number = {name: k for k, name in enumerate(names)}
    # Sorted: the order within a set differs between processes.
    sample, group = torch.tensor(sorted((row, number[name]) for row, name in pairs)).unbind(1)
    return Memberships(sample, group, len(rows), len(names)), names


def _of_matrix(place: str, table: Tensor, number: int | None) -> Memberships:
    if number is not None and table.shape[1] != number:
        raise ValueError(
            f"{place} as a boolean matrix must have a column for each of the {number} blocks but "
            f"has shape {tuple(table.shape)}."
        )
    sample, group = table.to_dense().nonzero(as_tuple=True)
    return Memberships(sample, group, *table.shape)


def _of_lists(place: str, rows: Any, number: int | None) -> Memberships:
    try:
        lengths = [len(row) for row in rows]
        group = torch.as_tensor([each for row in rows for each in row])
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{place} must hold one id, or one list of ids, of each: {error}") from None
    if group.dtype == torch.bool and len(set(lengths)) == 1:
        return _of_matrix(place, group.reshape(len(lengths), -1), number)
    group = group.long() if group.numel() == 0 else group  # an empty list has no dtype
    if group.dim() != 1 or group.dtype == torch.bool or group.is_floating_point():
        raise ValueError(f"{place} as lists must hold integer ids but holds {group.dtype}.")
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    lowest, groups = (int(group.min()), int(group.max()) + 1) if len(group) else (0, 0)
    check_range(place, lowest, groups)
    pairs, times = torch.unique(sample * groups + group, return_counts=True)
    if len(pairs) < len(group):
        row, twice = divmod(int(pairs[times > 1][0]), groups)
        hint = "(A matrix of 0 and 1 must be boolean.)"
        raise ValueError(f"{place} as lists has group {twice} of sample {row} twice. {hint}")
    # Of all matrices of 0 and 1, those with two columns, one of them true, have no id twice.
    columns = number in (None, 2) and set(lengths) == {groups} == {2}
    if columns and not bool((group[::2] == 0).all()):
        raise ValueError(f"{place} as lists is a matrix of 0 and 1, it seems: make it boolean.")
    return Memberships(sample, group, len(lengths), groups)


def _as_tensor(place: str, values: Any) -> Tensor:
    try:
        # A copy: torch warns when it shares the memory of a read-only array.
        tensor = torch.from_numpy(np.array(values))
    except (TypeError, ValueError, RuntimeError) as error:
        named = isinstance(values, Iterable) and any(isinstance(each, str) for each in values)
        hint = " Names become ids by `numpy.unique(names, return_inverse=True)[1]`."
        raise TypeError(
            f"{place} must hold integer ids but is: {type(values).__name__} ({error})."
            + (hint if named else "")
        ) from None
    return tensor.long() if tensor.numel() == 0 else tensor  # an empty list has no dtype
