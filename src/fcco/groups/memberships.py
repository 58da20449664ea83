"""A data set of memberships, for samples that are in several groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .._memberships import are_memberships, read_memberships

__all__ = ["GroupMemberships"]


class GroupMemberships(Dataset[Any]):
    """A data set with one item for each pair of a sample and one of its groups.

    A sample that is drawn for one group must count for that group alone: the samples that a group
    shares with others would else come too often in it, and its mean would be biased. Here each item
    carries the group that it is drawn for by `GroupBatchSampler(members.group, ...)`; the groups of
    a batch are the index of the objective. Samples without a group are never drawn.

    Args:
        dataset: your map-style data set of N samples.
        groups: booleans, (N, n), an array or a tensor; or a list with the group ids of each sample,
            from 0 on. Every group needs a sample.
        key: where items that are dicts have the group. It is appended to items that are tuples or
            lists; any other item becomes a pair of itself and the group.

    Attributes:
        sample: position of each item's sample in `dataset`, (M,).
        group: group of each item, (M,).
        num_groups: n.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from fcco.groups import GroupBatchSampler, GroupMemberships
        >>> data = TensorDataset(torch.tensor([10.0, 20.0, 30.0]))
        >>> members = GroupMemberships(data, [[0], [0, 1], []])
        >>> len(members), members.group.tolist(), members.sample.tolist()
        (3, [0, 0, 1], [0, 1, 1])
        >>> members[2]
        (tensor(20.), 1)
        >>> sampler = GroupBatchSampler(members.group, groups_per_batch=2, per_group=1)
        >>> for x, group in sampler.consume(DataLoader(members, batch_sampler=sampler)):
        ...     assert group.tolist() == [0, 1]
    """

    def __init__(self, dataset: Dataset[Any], groups: Any, key: str = "group") -> None:
        call = "`GroupMemberships(groups=...)`"
        if not are_memberships(groups):
            raise ValueError(
                f"{call} must be a boolean matrix with a row per sample and a column per group, or "
                f"a list with the list of ids of each sample, but is: {_described(groups)}. One "
                "group for each sample needs no memberships: `GroupBatchSampler(groups, ...)`."
            )
        members = read_memberships(call, groups)
        self.sample, self.group = members.sample.cpu(), members.group.cpu()
        self.num_groups = members.groups
        number = len(dataset)  # type: ignore[arg-type]
        if members.samples != number:
            raise ValueError(
                f"{call} must have a row for each of the {number} samples of the data set but has "
                f"{members.samples}."
            )
        absent = torch.bincount(self.group, minlength=max(self.num_groups, 1)).eq(0).nonzero()
        if len(absent):
            raise ValueError(
                f"{call}: group {int(absent[0])} has no samples, and so no mean; leave it out."
            )
        self.dataset, self.key = dataset, key

    def __len__(self) -> int:
        return len(self.group)

    def __getitem__(self, position: int) -> Any:
        item = self.dataset[int(self.sample[position])]
        group = int(self.group[position])
        if isinstance(item, Mapping):
            if self.key in item:
                raise ValueError(
                    f"The items of the data set have an entry {self.key!r} already, where "
                    "`GroupMemberships` puts the group: give another `key`."
                )
            return {**item, self.key: group}
        return (*item, group) if isinstance(item, (tuple, list)) else (item, group)


def _described(groups: Any) -> str:
    if isinstance(groups, (Tensor, np.ndarray)):
        return f"{type(groups).__name__} of shape {tuple(groups.shape)} and {groups.dtype}"
    return type(groups).__name__
