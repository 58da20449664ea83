"""Means over the groups of a batch, without loops over groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._memberships import are_memberships, read_memberships

__all__ = ["GroupMeans", "group_mean"]

Ids = Sequence[int] | NDArray[Any] | Tensor


class GroupMeans(NamedTuple):
    """The means of the G groups present in a batch, by increasing group id."""

    values: Tensor
    """Means, (G,) or (G, d1); differentiable."""
    index: Tensor
    """The distinct group ids, (G,), sorted."""
    counts: Tensor
    """Samples of each group, (G,)."""


def group_mean(
    values: Tensor, group: Ids | Sequence[Sequence[int]], num_groups: int | None = None
) -> GroupMeans:
    r"""Mean of `values` over each group present in the batch.

    .. math::
        g_i(w; B_i) = \frac{1}{|B_i|} \sum_{j \in B_i} \mathrm{values}_j, \qquad
        B_i = \{j : \mathrm{group}_j = i\}.

    Args:
        values: one value per sample, (N,) or (N, d1).
        group: group id of each sample, (N,), a sequence, array or tensor of integers. Or all groups
            of each sample: booleans (N, n), or a list of lists; B_i are then the samples of group i
            among others.
        num_groups: n; ids must then lie below it.

    Example:
        >>> import torch
        >>> from fcco.groups import group_mean
        >>> losses = torch.tensor([1.0, 2.0, 4.0, 6.0])
        >>> means = group_mean(losses, [7, 2, 7, 2])
        >>> means.values, means.index, means.counts
        (tensor([4.0000, 2.5000]), tensor([2, 7]), tensor([2, 2]))
    """
    if are_memberships(group):
        members = read_memberships("`group_mean(group=...)`", group, num_groups)
        if values.shape[:1] != (members.samples,):
            raise ValueError(
                f"`group_mean(group=...)` must have a row for each of the {len(values)} values but "
                f"has {members.samples}."
            )
        values = values[members.sample.to(values.device)]
        group = members.group.to(values.device)
    ids = _as_ids(values, group)
    index, position, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    if len(index):
        smallest, largest = int(index[0]), int(index[-1])
        if smallest < 0:
            raise ValueError(f"`group_mean(group=...)` must hold ids from 0 but holds: {smallest}.")
        if num_groups is not None and largest >= num_groups:
            raise ValueError(
                f"`group_mean(group=...)` must hold ids below num_groups = {num_groups} "
                f"but holds: {largest}."
            )
    sums = values.new_zeros(len(counts), *values.shape[1:]).index_add(0, position, values)
    means = sums / counts.reshape(-1, *(1 for _ in values.shape[1:]))
    return GroupMeans(means, index, counts)


def _as_ids(values: Tensor, ids: Any) -> Tensor:
    """The ids as int64, one for each value."""
    if not isinstance(ids, Tensor):
        # A copy: torch warns when it shares the memory of a read-only array.
        ids = torch.from_numpy(np.array(ids)).to(values.device)
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ValueError(
            f"`group_mean(group=...)` must hold integer ids but has dtype: {ids.dtype}."
        )
    if values.ndim not in (1, 2):
        raise ValueError(
            "`group_mean(values=...)` must have shape (N,) or (N, d1) but has: "
            f"{tuple(values.shape)}."
        )
    if ids.shape != values.shape[:1]:
        raise ValueError(
            f"`group_mean(group=...)` must hold one id for each of the {len(values)} values "
            f"but has shape: {tuple(ids.shape)}."
        )
    return ids.long()
