"""Samples that belong to several groups or blocks at once, or to none."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Memberships", "are_memberships", "read_memberships"]


class Memberships(NamedTuple):
    """Pairs of a sample and one of its groups.

    Attributes:
        sample: (M,), increasing.
        group: (M,).
        samples: number of samples, also of those without a group.
        groups: number of groups: the columns of a matrix, or the largest id of lists and 1.
    """

    sample: Tensor
    group: Tensor
    samples: int
    groups: int


def are_memberships(groups: Any) -> bool:
    """Whether groups are given as a boolean matrix or as a list of lists, not one per sample."""
    if isinstance(groups, Tensor):
        return groups.dim() == 2 and groups.dtype == torch.bool
    if isinstance(groups, np.ndarray):
        return groups.ndim == 2 and groups.dtype == np.bool_
    return isinstance(groups, (list, tuple)) and len(groups) > 0 and np.ndim(groups[0]) == 1


def read_memberships(call: str, groups: Any, number: int | None = None) -> Memberships:
    """The memberships of a boolean matrix or a list of lists.

    Args:
        call: what the user calls it, for the error text.
        groups: booleans, a row per sample and a column per group; or for each sample the list of
            its group ids.
        number: of groups, if it is known; it is not compared with the ids of lists.
    """
    if isinstance(groups, (list, tuple)):
        return _of_lists(call, groups, number)
    table = groups if isinstance(groups, Tensor) else torch.from_numpy(np.array(groups))
    if number is not None and table.shape[1] != number:
        raise ValueError(
            f"{call} as a boolean matrix must have a row per sample and a column for each of the "
            f"{number} blocks but has shape {tuple(table.shape)}."
        )
    sample, group = table.to_dense().nonzero(as_tuple=True)
    return Memberships(sample, group, *table.shape)


def _of_lists(call: str, rows: Any, number: int | None) -> Memberships:
    try:
        lengths = [len(row) for row in rows]
        group = torch.as_tensor([each for row in rows for each in row])
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{call} must hold an integer id of each sample, or a list of integer ids of each, "
            f"not a mixture ({error})."
        ) from None
    if group.dtype == torch.bool and len(set(lengths)) == 1:
        return read_memberships(call, group.reshape(len(lengths), -1), number)
    group = group.long() if group.numel() == 0 else group  # an empty list has no dtype
    if group.dim() != 1 or group.dtype == torch.bool or group.is_floating_point():
        raise ValueError(
            f"{call} as lists must hold the integer ids of each sample, or equally many booleans "
            f"for each, but holds {group.dtype}."
        )
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    lowest, groups = (int(group.min()), int(group.max()) + 1) if len(group) else (0, 0)
    if lowest < 0:
        raise ValueError(f"{call} must hold ids from 0 but holds: {lowest}.")
    pairs, times = torch.unique(sample * groups + group, return_counts=True)
    if len(pairs) < len(group):
        row, twice = divmod(int(pairs[times > 1][0]), groups)
        raise ValueError(
            f"{call} as lists must name each group of a sample once, but sample {row} has group "
            f"{twice} more than once. (A matrix of 0 and 1 must be boolean.)"
        )
    # Of all matrices of 0 and 1, those with two columns, one of them true, have no id twice.
    if (
        number in (None, 2)
        and set(lengths) == {groups} == {2}
        and not bool((group[::2] == 0).all())
    ):
        raise ValueError(
            f"{call} as lists puts every sample into both groups, or is a matrix of 0 and 1: make "
            "that boolean (and lists of ids, sorted)."
        )
    return Memberships(sample, group, len(lengths), groups)
