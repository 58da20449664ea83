"""From a seed to training, validation and test data; which samples a quick version keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fcco._checks import integer

from .grouped import PARTS, GroupedPart, cut_within_groups, part

__all__ = ["Official", "OfficialTest", "WithinGroups", "check_classes", "check_limit", "kept"]


@dataclass(frozen=True, eq=False)
class WithinGroups:
    """Each group is shuffled by the seed and cut by `shares`, see `cut_within_groups`.

    Args:
        label: of all samples.
        group: of all samples.
        group_names: by id.
        reported: group of each sample where accuracies are reported; the same unless given.
        reported_names: by id.
        shares: of training, validation and test data.
    """

    label: Tensor
    group: Tensor
    group_names: tuple[str, ...]
    reported: Tensor | None = None
    reported_names: tuple[str, ...] | None = None
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1)

    def __call__(self, seed: int) -> Mapping[str, GroupedPart]:
        """The parts."""
        rows = cut_within_groups(self.group, seed, self.shares)
        columns = (
            self.label,
            self.group,
            self.group_names,
            self.reported,
            self.reported_names,
        )
        return {name: part(rows[name], *columns) for name in PARTS}


@dataclass(frozen=True, eq=False)
class Official:
    """The parts that a data set comes with, whatever the seed."""

    parts: Mapping[str, GroupedPart]

    def __call__(self, seed: int) -> Mapping[str, GroupedPart]:
        """The parts."""
        return self.parts


@dataclass(frozen=True, eq=False)
class OfficialTest:
    """The test data that a data set comes with; the rest is cut 9:1 within groups by the seed.

    Args:
        label: of all samples.
        group: of all samples.
        group_names: by id.
        test: whether a sample is in the official test data, of all samples.
    """

    label: Tensor
    group: Tensor
    group_names: tuple[str, ...]
    test: Tensor

    def __call__(self, seed: int) -> Mapping[str, GroupedPart]:
        """The parts."""
        rest = torch.nonzero(~self.test).squeeze(1)
        cut = cut_within_groups(self.group[rest], seed, shares=(0.9, 0.1, 0.0))
        rows = {
            "train": rest[cut["train"]],
            "validation": rest[cut["validation"]],
            "test": torch.nonzero(self.test).squeeze(1),
        }
        return {name: part(rows[name], self.label, self.group, self.group_names) for name in PARTS}


def check_classes(call: str, classes: Sequence[str]) -> tuple[str, ...]:
    """The names of classes; refuses fewer than two, and repeats."""
    names = (classes,) if isinstance(classes, str) else tuple(classes)
    if len(names) < 2 or len(set(names)) < len(names) or not all(names):
        raise ValueError(
            f"`{call}(classes=...)` must be at least two different names but is: {classes!r}."
        )
    return names


def check_limit(call: str, limit: int) -> None:
    """Refuse limits that would empty a part of some group."""
    integer(call, "limit", limit, 0)
    if 0 < limit < 3:
        raise ValueError(
            f"`{call}(limit=...)` must be 0 (all) or at least 3 but is: {limit} (every group needs "
            "a sample for each of the three parts)."
        )


def kept(group: Tensor, limit: int) -> Tensor:
    """Rows of at most `limit` samples of each group, drawn by one fixed shuffle; 0 keeps all.

    The rows come in increasing order; no group is lost.

    Example:
        >>> len(kept(torch.tensor([0] * 10 + [1] * 4), limit=5))
        9
    """
    rows = torch.arange(len(group))
    if limit == 0:
        return rows
    shuffled = torch.randperm(len(group), generator=torch.Generator().manual_seed(0))
    order = shuffled[torch.argsort(group[shuffled], stable=True)]
    _, sizes = torch.unique(group, return_counts=True)
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    return order[rows - starts < limit].sort().values
