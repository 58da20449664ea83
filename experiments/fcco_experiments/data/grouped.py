"""Data whose samples belong to groups: what every reader gives and every backbone takes.

All samples of a data set lie in one sequence; a seed cuts it into parts. So features of frozen
networks are computed once for all seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

__all__ = ["PARTS", "GroupedData", "GroupedPart", "Samples", "Vectors", "cut_within_groups", "part"]

PARTS = ("train", "validation", "test")


class Samples(Protocol):
    """Inputs by row: images of one size as uint8 (3, H, W), strings, or vectors."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, row: int, /) -> Tensor | str:
        """The sample of a row."""
        ...


@dataclass(frozen=True)
class Vectors:
    """Samples that are rows of a tensor in memory: vectors, token ids, or decoded images.

    Args:
        values: (N, ...).
    """

    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> Tensor:
        return self.values[row]


@dataclass(frozen=True)
class GroupedPart:
    """Training, validation or test data: rows of the samples with their labels and groups.

    Attributes:
        rows: places in the samples, (M,).
        label: class of each row, (M,).
        group: id of each row, (M,); every id from 0 to the largest occurs.
        group_names: by id.
        reported: id of the group that each row counts in where accuracies are reported, (M,).
            These are groups large enough for an accuracy to mean something.
        reported_names: by id.
    """

    rows: Tensor
    label: Tensor
    group: Tensor
    group_names: tuple[str, ...]
    reported: Tensor
    reported_names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse parts whose pieces do not fit."""
        lengths = {len(each) for each in (self.rows, self.label, self.group, self.reported)}
        if len(lengths) != 1 or not len(self.rows):
            raise ValueError(f"`GroupedPart` must have rows, all columns alike but: {lengths}.")
        for name in ("group", "reported"):
            names = getattr(self, f"{name}_names")
            present = torch.unique(getattr(self, name)).tolist()
            if present != list(range(len(names))):
                raise ValueError(
                    f"`GroupedPart({name}=...)` must hold every id below {len(names)}, the number "
                    f"of names, but {len(present)} different ones occur."
                )

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class GroupedData:
    """A data set with groups.

    Attributes:
        name: of the data set.
        kind: what the samples are.
        samples: all of them.
        class_names: of the labels.
        cut: from a seed to the parts. Data sets with official parts give the same for each seed.
        fingerprint: changes when the data do.
        summary: how the accuracies of the reported groups become one figure: the `"worst"`, or the
            `"tenth"` percentile as Amazon-WILDS has it.
        facts: what a reader may want to know, such as which copy of the data was found.
    """

    name: str
    kind: Literal["image", "text", "vector"]
    samples: Samples
    class_names: tuple[str, ...]
    cut: Callable[[int], Mapping[str, GroupedPart]]
    fingerprint: str
    summary: Literal["worst", "tenth"] = "worst"
    facts: Mapping[str, str] = field(default_factory=dict)


def part(
    rows: Tensor,
    label: Tensor,
    group: Tensor,
    group_names: Sequence[str],
    reported: Tensor | None = None,
    reported_names: Sequence[str] | None = None,
) -> GroupedPart:
    """A part from columns of the whole data set; groups that do not occur in it lose their id.

    Args:
        rows: of the part.
        label: of all samples.
        group: of all samples.
        group_names: by id.
        reported: of all samples; the groups unless given.
        reported_names: by id.
    """
    own, names = _occupied(group[rows], group_names)
    if reported is None or reported_names is None:
        shown, shown_names = own, names
    else:
        shown, shown_names = _occupied(reported[rows], reported_names)
    return GroupedPart(rows, label[rows], own, names, shown, shown_names)


def _occupied(ids: Tensor, names: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    present, own = torch.unique(ids, return_inverse=True)
    return own, tuple(str(names[index]) for index in present.tolist())


def cut_within_groups(
    group: Tensor, seed: int, shares: tuple[float, float, float] = (0.8, 0.1, 0.1)
) -> dict[str, Tensor]:
    """Rows of training, validation and test data: each group is shuffled and cut by `shares`.

    A group of at least three samples is in every part; the rows come in increasing order.

    Args:
        group: id of each sample.
        seed: of the shuffles.
        shares: of the three parts; a part whose share is zero stays empty.

    Example:
        >>> rows = cut_within_groups(torch.tensor([0] * 10 + [1] * 20), seed=0)
        >>> {name: len(own) for name, own in rows.items()}
        {'train': 24, 'validation': 3, 'test': 3}
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[Tensor]] = {name: [] for name in PARTS}
    for index in torch.unique(group).tolist():
        members = torch.nonzero(group == index).squeeze(1)
        members = members[torch.randperm(len(members), generator=generator)]
        held = [max(1, round(len(members) * share)) if share else 0 for share in shares[1:]]
        if len(members) < 3:
            held = [0, 0]
        sizes = [len(members) - sum(held), *held]
        for name, own in zip(PARTS, members.split(sizes), strict=True):
            found[name].append(own)
    return {name: torch.cat(own).sort().values for name, own in found.items()}
