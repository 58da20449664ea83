"""Means over the groups of a batch, and a data set of memberships for groups that overlap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..index import Memberships, check_range, read_index


class GroupMeans(NamedTuple):
    """The means of the G groups in a batch, (G,) or (G, d1), with their sorted ids and sizes."""

    values: Tensor
    index: Tensor
    counts: Tensor


def group_mean(values: Tensor, group: Any, num_groups: int | None = None) -> GroupMeans:
    r"""The mean of `values` in each group of the batch.

    .. math::
        g_i(w; B_i) = \frac{1}{|B_i|} \sum_{j \in B_i} \mathrm{values}_j, \qquad
        B_i = \{j : \mathrm{group}_j = i\}.

    Args:
        values: one value per sample, (N,) or (N, d1).
        group: group id of each sample, (N,); or all groups of each: booleans (N, n), or a list of
            lists.
        num_groups: n; ids must then lie below it.
    """
    if values.ndim not in (1, 2):
        shape = tuple(values.shape)
        raise ValueError(f"`group_mean(values=...)` must have shape (N,) or (N, d1): {shape}.")
    place = "`group_mean(group=...)`"
    ids = read_index(place, group, num_groups)
    samples = ids.samples if isinstance(ids, Memberships) else len(ids)
    if samples != (number := len(values)):
        raise ValueError(f"{place} must have a row for each of the {number} values: {samples}.")
    if isinstance(ids, Memberships):
        values, ids = values[ids.sample.to(values.device)], ids.group
    ids = ids.to(values.device)
    index, position, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    if len(index):
        check_range(place, int(index[0]), int(index[-1]), num_groups)
    sums = values.new_zeros(len(counts), *values.shape[1:]).index_add(0, position, values)
    return GroupMeans(sums / (counts if values.ndim == 1 else counts.unsqueeze(1)), index, counts)


class GroupMemberships(Dataset[Any]):
    """A data set with one item for each pair of a sample and one of its groups.

    A sample that is drawn for one group must count for that group alone: the samples that a group
    shares with others would else come too often in it, and its mean would be biased. Here each item
    carries the group that it is drawn for by `GroupBatchSampler(members.group, ...)`; the groups of
    a batch are the index of the objective. Samples without a group are never drawn.

    Args:
        dataset: your map-style data set of N samples.
        groups: booleans, (N, n), or a list with the group ids of each sample. Every group needs a
            sample.
        key: where items that are dicts have the group; it is appended to tuples and lists, and any
            other item becomes a pair of itself and the group.
    """

    def __init__(self, dataset: Dataset[Any], groups: Any, key: str = "group") -> None:
        place = "`GroupMemberships(groups=...)`"
        members = read_index(place, groups)
        if not isinstance(members, Memberships):
            raise ValueError(f"{place} has one group for each: use `GroupBatchSampler(groups)`.")
        self.sample, self.group = members.sample.cpu(), members.group.cpu()
        self.num_groups = members.groups
        number = len(dataset)  # type: ignore[arg-type]
        if members.samples != number:
            raise ValueError(f"{place} must have {number} rows, one for each item of `dataset`.")
        absent = torch.bincount(self.group, minlength=max(self.num_groups, 1)).eq(0).nonzero()
        if len(absent):
            raise ValueError(f"{place}: group {int(absent[0])} has no samples; leave it out.")
        self.dataset, self.key = dataset, key

    def __len__(self) -> int:
        return len(self.group)

    def __getitem__(self, position: int) -> Any:
        item = self.dataset[int(self.sample[position])]
        group = int(self.group[position])
        if isinstance(item, Mapping):
            if self.key in item:
                raise ValueError(f"Items have an entry {self.key!r} already: give another `key`.")
            return {**item, self.key: group}
        return (*item, group) if isinstance(item, (tuple, list)) else (item, group)
