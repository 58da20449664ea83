"""Means over the groups of a batch, without loops over groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["GroupMeans", "dense_group_mean", "group_mean"]

Ids = Sequence[int] | NDArray[Any] | Tensor


class GroupMeans(NamedTuple):
    """The means of the G groups present in a batch, by increasing group id."""

    values: Tensor
    """Means, (G,) or (G, d1); differentiable."""
    index: Tensor
    """The distinct group ids, (G,), sorted."""
    counts: Tensor
    """Samples of each group, (G,)."""


def group_mean(values: Tensor, group: Ids, num_groups: int | None = None) -> GroupMeans:
    r"""Mean of `values` over each group present in the batch.

    .. math::
        g_i(w; B_i) = \frac{1}{|B_i|} \sum_{j \in B_i} \mathrm{values}_j, \qquad
        B_i = \{j : \mathrm{group}_j = i\}.

    The number of groups present depends on the data; `dense_group_mean` is the variant for
    `torch.func.vmap` and compiled graphs.

    Args:
        values: one value per sample, (N,) or (N, d1).
        group: group id of each sample, (N,), a sequence, array or tensor of integers.
        num_groups: n; ids must then lie below it.

    Returns:
        `values` (G, ...), `index` (G,) and `counts` (G,), where G is the number of distinct ids.

    Example:
        >>> import torch
        >>> from fcco.groups import group_mean
        >>> losses = torch.tensor([1.0, 2.0, 4.0, 6.0])
        >>> means = group_mean(losses, [7, 2, 7, 2])
        >>> means.values, means.index, means.counts
        (tensor([4.0000, 2.5000]), tensor([2, 7]), tensor([2, 2]))
    """
    ids = _as_ids("group_mean", "group", values, group)
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
    return GroupMeans(_means(values, position, counts), index, counts)


def dense_group_mean(values: Tensor, position: Ids, num_groups: int) -> Tensor:
    r"""Mean of `values` at each of the positions 0, ..., G - 1.

    The shape of the result does not depend on the data, so this runs under `torch.func.vmap` (in a
    `Fleet`, for instance) and `torch.compile(fullgraph=True)`. A position without samples gets the
    mean 0 and no gradient.

    Args:
        values: one value per sample, (N,) or (N, d1).
        position: integer position of each sample's group, (N,), in 0, ..., G - 1 (not checked).
        num_groups: G.

    Example:
        >>> import torch
        >>> from fcco.groups import dense_group_mean
        >>> dense_group_mean(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([2, 2, 0]), 3)
        tensor([5., 0., 2.])
    """
    slots = _as_ids("dense_group_mean", "position", values, position)
    counts = slots.new_zeros(num_groups).index_add(0, slots, torch.ones_like(slots))
    return _means(values, slots, counts.clamp(min=1))


def _means(values: Tensor, position: Tensor, counts: Tensor) -> Tensor:
    sums = values.new_zeros(len(counts), *values.shape[1:]).index_add(0, position, values)
    return sums / counts.reshape(-1, *(1 for _ in values.shape[1:]))


def _as_ids(call: str, name: str, values: Tensor, ids: Ids) -> Tensor:
    """The ids as int64. Only dtype and shape are checked: a look at the ids would break vmap."""
    if not isinstance(ids, Tensor):
        ids = torch.from_numpy(np.array(ids)).to(values.device)
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"`{call}({name}=...)` must hold integer ids but has dtype: {ids.dtype}.")
    if values.ndim not in (1, 2):
        raise ValueError(
            f"`{call}(values=...)` must have shape (N,) or (N, d1) but has: {tuple(values.shape)}."
        )
    if ids.shape != values.shape[:1]:
        raise ValueError(
            f"`{call}({name}=...)` must hold one id for each of the {len(values)} values "
            f"but has shape: {tuple(ids.shape)}."
        )
    return ids.long()
