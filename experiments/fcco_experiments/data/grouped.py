"""Data whose samples belong to groups, and how a seed splits them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .samples import Samples, Vectors
from .sources import digest

PARTS = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)


@dataclass(frozen=True)
class GroupedPart:
    """Training, validation or test data: M rows of the samples with their labels and groups."""

    rows: Tensor  # places in the samples, (M,)
    label: Tensor  # class of each row, (M,)
    # Id of each row, (M,), or of each membership where groups overlap, (K,); every id from 0 to the
    # largest occurs.
    group: Tensor
    group_names: tuple[str, ...]  # by id
    # Id of the group that each row counts in where accuracies are reported, (M,): groups large
    # enough for an accuracy to mean something.
    reported: Tensor
    reported_names: tuple[str, ...]  # by id
    # Place of each membership in `rows`, (K,), where these may be in several groups or in none;
    # None where each is in one.
    member: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def by_group(self, values: Tensor) -> Tensor:
        """Values of the rows, for each id in `group`."""
        return values if self.member is None else values[self.member]

    def memberships(self) -> GroupedPart:
        """The part with one row for each pair of a row and one of its groups."""
        if self.member is None:
            return self
        rows, label = self.by_group(self.rows), self.by_group(self.label)
        return replace(self, rows=rows, label=label, member=None)


@dataclass(frozen=True)
class GroupedData:
    """A data set with groups."""

    name: str
    kind: Literal["image", "text", "vector"]  # of the samples
    samples: Samples  # all of them
    class_names: tuple[str, ...]  # of the labels
    cut: Callable[[int], Mapping[str, GroupedPart]]  # from a seed to the parts
    fingerprint: str  # changes when the data do
    # How the accuracies of the reported groups become one figure: the worst, or the tenth
    # percentile as Amazon-WILDS has it.
    summary: Literal["worst", "tenth"] = "worst"
    inputs: str = ""  # changes when the samples do, but not with their labels; empty where unknown
    feature_names: tuple[str, ...] = ()  # of the columns of vectors; `column=value` for a category


def part(
    rows: Tensor,
    label: Tensor,
    group: Tensor,
    group_names: Sequence[str],
    reported: Tensor | None = None,
    reported_names: Sequence[str] = (),
) -> GroupedPart:
    """A part from columns of the whole data set; groups that do not occur in it lose their id."""

    def occupied(ids: Tensor, names: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
        present, own = torch.unique(ids, return_inverse=True)
        return own, tuple(str(names[index]) for index in present.tolist())

    own, names = occupied(group[rows], group_names)
    shown = (own, names) if reported is None else occupied(reported[rows], reported_names)
    return GroupedPart(rows, label[rows], own, names, *shown)


def overlapping_part(
    rows: Tensor, label: Tensor, members: Tensor, group_names: Sequence[str]
) -> GroupedPart:
    """A part from columns of the whole data set, `members` with a column for each group."""
    own = members[rows]
    present = torch.nonzero(own.any(0)).squeeze(1)
    names = tuple(str(group_names[index]) for index in present.tolist())
    place, group = own[:, present].nonzero(as_tuple=True)
    return GroupedPart(rows, label[rows], group, names, group, names, place)


def rarest_group(members: Tensor) -> Tensor:
    """The smallest group of each row of a boolean matrix, or the number of groups for none.

    Example:
        >>> rarest_group(torch.tensor([[1, 0], [1, 1], [0, 0]], dtype=torch.bool))
        tensor([0, 1, 2])
    """
    sizes = members.sum(0).expand_as(members)
    found = sizes.masked_fill(~members, len(members) + 1).argmin(1)
    return found.masked_fill(~members.any(1), members.shape[1])


def cut_within_groups(
    group: Tensor, seed: int, shares: tuple[float, float, float] = (0.8, 0.1, 0.1)
) -> dict[str, Tensor]:
    """Rows of training, validation and test data: each group is shuffled and cut by `shares`.

    A group of at least three samples is in every part, a smaller one in the first alone; the rows
    come in increasing order. A part whose share is zero stays empty.

    Example:
        >>> rows = cut_within_groups(torch.tensor([0] * 10 + [1] * 20), seed=0)
        >>> {name: len(own) for name, own in rows.items()}
        {'train': 24, 'validation': 3, 'test': 3}
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[Tensor]] = {name: [] for name in PARTS}
    for index in torch.unique(group).tolist():
        rows = torch.nonzero(group == index).squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        aside = [max(1, round(len(rows) * share)) if share else 0 for share in shares[1:]]
        if len(rows) < 3:
            aside = [0, 0]
        for name, own in zip(PARTS, rows.split([len(rows) - sum(aside), *aside]), strict=True):
            found[name].append(own)
    return {name: torch.cat(own).sort().values for name, own in found.items()}


@dataclass(frozen=True, eq=False)
class Cut(abc.ABC):
    """From a seed to parts."""

    label: Tensor  # of all samples
    group: Tensor  # of all samples
    group_names: tuple[str, ...]  # by id
    # Place in `PARTS` of each sample, or of each group where these stay whole; unless given, the
    # seed draws it.
    split: Tensor | None = None

    @abc.abstractmethod
    def __call__(self, seed: int) -> dict[str, GroupedPart]:
        """The parts."""


def _at(
    place: Tensor, label: Tensor, group: Tensor, group_names: Sequence[str]
) -> dict[str, GroupedPart]:
    """The parts, from the place of each sample in `PARTS`; -1 is none."""
    rows = (torch.nonzero(place == number).squeeze(1) for number in range(len(PARTS)))
    return {
        name: part(own, label, group, group_names) for name, own in zip(PARTS, rows, strict=True)
    }


@dataclass(frozen=True, eq=False)
class WithinGroups(Cut):
    """Each group is cut by the seed.

    A split without validation samples leaves a tenth of the training samples of each group to them.
    """

    reported: Tensor | None = None  # see `GroupedPart`; the same as `group` unless given
    reported_names: tuple[str, ...] = ()
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1)  # of training, validation and test data
    # Which samples are in which group, (N, n), where groups overlap; `group` is then what is cut,
    # see `rarest_group`.
    members: Tensor | None = None

    def __call__(self, seed: int) -> dict[str, GroupedPart]:
        if self.split is None:
            rows = cut_within_groups(self.group, seed, self.shares)
        else:
            places = [torch.nonzero(self.split == place).squeeze(1) for place in range(3)]
            rows = dict(zip(PARTS, places, strict=True))
            if not len(rows["validation"]):
                own = cut_within_groups(self.group[rows["train"]], seed, (0.9, 0.1, 0.0))
                rows["validation"] = rows["train"][own["validation"]]
                rows["train"] = rows["train"][own["train"]]
        if self.members is not None:
            every = (self.label, self.members, self.group_names)
            return {name: overlapping_part(rows[name], *every) for name in PARTS}
        columns = (self.label, self.group, self.group_names, self.reported, self.reported_names)
        return {name: part(rows[name], *columns) for name in PARTS}


SHARES = (0.6, 0.2)  # of the groups that stay whole; the others test
FEWEST = 5  # samples that a user needs to train on
POOL = 20  # samples that a group of users in validation and test data has at least


@dataclass(frozen=True, eq=False)
class ByUser(Cut):
    """Groups are users, each in one part alone.

    In training data each user with at least `FEWEST` samples is a group. In validation and test
    data, users with fewer than `POOL` samples are shuffled by the seed and put together, in that
    order, until they have as many as that; what is left over joins the last pool. Unless there is a
    split, the seed shuffles the users with at least `FEWEST` samples and cuts them 60:20:20; of the
    others one half goes to validation, the other half to test data.
    """

    counts: Tensor = field(kw_only=True)  # samples of each user; may be more than are kept here

    def __call__(self, seed: int) -> dict[str, GroupedPart]:
        generator = torch.Generator().manual_seed(seed)
        part_of = self._drawn(generator) if self.split is None else self.split
        part_of = part_of.masked_fill((part_of == TRAIN) & (self.counts < FEWEST), -1)
        group = torch.arange(len(self.counts))
        names = [f"user {number}" for number in range(1, len(self.counts) + 1)]
        for place in (VALIDATION, TEST):
            small = torch.nonzero((part_of == place) & (self.counts < POOL)).squeeze(1)
            order = small[torch.randperm(len(small), generator=generator)]
            pools = self._pooled(order)
            group[order] = len(names) + pools
            number = int(pools.max()) + 1 if len(pools) else 0
            names += [f"pool {index}" for index in range(1, number + 1)]
        return _at(part_of[self.group], self.label, group[self.group], names)

    def _drawn(self, generator: torch.Generator) -> Tensor:
        enough = self.counts >= FEWEST
        many, small = (torch.nonzero(which).squeeze(1) for which in (enough, ~enough))
        many, small = (own[torch.randperm(len(own), generator=generator)] for own in (many, small))
        part_of = _places(many, len(self.counts))
        part_of[small[: len(small) // 2]] = VALIDATION
        return part_of

    def _pooled(self, order: Tensor) -> Tensor:
        """The pool of each of these users."""
        pools: list[int] = []
        number = size = 0
        for count in self.counts[order].tolist():
            pools.append(number)
            size += count
            if size >= POOL:
                number, size = number + 1, 0
        last = max(number - 1, 0)  # the last pool that is large enough
        return torch.tensor([min(pool, last) for pool in pools], dtype=torch.int64)


def _places(order: Tensor, number: int) -> Tensor:
    """Places in `PARTS`: in that order, groups train and validate by `SHARES`; the rest test."""
    part_of = torch.full((number,), TEST)
    first, second = (round(share * len(order)) for share in SHARES)
    part_of[order[:first]], part_of[order[first : first + second]] = TRAIN, VALIDATION
    return part_of


@dataclass(frozen=True, eq=False)
class WholeGroups(Cut):
    """Parts share no group, such as the documents of one query; the seed cuts groups 60:20:20.

    A split without validation groups leaves a fifth of the training groups to them.
    """

    def __call__(self, seed: int) -> dict[str, GroupedPart]:
        number = len(self.group_names)
        order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))
        part_of = _places(order, number) if self.split is None else self.split.clone()
        if not (part_of == VALIDATION).any():
            train = order[part_of[order] == TRAIN]
            part_of[train[: max(1, round(SHARES[1] * len(train)))]] = VALIDATION
        return _at(part_of[self.group], self.label, self.group, self.group_names)


def stratified(cell: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Places of a share of each of the cells 0 to 3, in increasing order.

    Of a cell with n rows these are the first `round(share * n)` of a permutation by
    `numpy.random.RandomState(seed)`, one for all cells; numpy promises that its stream never
    changes.

    Raises:
        ValueError: when a cell would have no row on one of the sides.
    """
    if not 0 <= share < 1:
        raise ValueError(f"`stratified(share=...)` must be in [0, 1) but is: {share}.")
    random, aside = np.random.RandomState(seed), np.zeros(len(cell), dtype=bool)
    for number in range(4) if share else ():
        rows = (cell == number).nonzero()[0]
        taken = round(share * len(rows))
        if not 0 < taken < len(rows):
            raise ValueError(
                f"A share of {share} leaves no row of group {number // 2}, label {number % 2} on "
                f"one of the sides: there are {len(rows)}. Take another share, or 0 for no "
                "validation part."
            )
        aside[random.permutation(rows)[:taken]] = True
    return aside.nonzero()[0]


TEST_SHARE = 0.2  # of a table without a split column, for fairness


@dataclass(frozen=True, eq=False)
class WithinCells(Cut):
    """Parts have the same share of each cell 2 group + label, of groups and labels 0 and 1.

    Unless there is a split, the seed takes a fifth for tests. None of the parts is empty.
    """

    validation: float = 0.2  # share of the training samples, where no sample is for validation

    def __call__(self, seed: int) -> dict[str, GroupedPart]:
        cell = (2 * self.group + self.label).numpy()
        if self.split is None:
            place = np.full(len(cell), TRAIN)
            place[stratified(cell, TEST_SHARE, seed)] = TEST
        else:
            place = self.split.numpy().copy()
        train = np.flatnonzero(place == TRAIN)
        if not (place == VALIDATION).any():
            place[train[stratified(cell[train], self.validation, seed)]] = VALIDATION
        parts = _at(torch.from_numpy(place), self.label, self.group, self.group_names)
        return {name: own for name, own in parts.items() if len(own)}


def _first_of_each(group: Tensor, most: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows, in increasing order, of as many samples of a group as `most` says of its size.

    They are drawn by one fixed shuffle.
    """
    shuffled = torch.randperm(len(group), generator=torch.Generator().manual_seed(0))
    order = shuffled[torch.argsort(group[shuffled], stable=True)]
    _, sizes = torch.unique(group, return_counts=True)
    place = torch.arange(len(group)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return order[place < most(sizes).repeat_interleave(sizes)].sort().values


def sampled(group: Tensor, number: int) -> Tensor:
    """About `number` rows, of each group its share but at least three; 0 keeps all.

    Example:
        >>> len(sampled(torch.tensor([0] * 80 + [1] * 20), number=50))
        50
    """
    if number < 0:
        raise ValueError(f"`keep` must be 0 (all) or a number of rows but is: {number}.")
    if number == 0 or number >= len(group):
        return torch.arange(len(group))
    return _first_of_each(
        group, lambda sizes: (sizes.double() * number / len(group)).round().clamp(min=3)
    )


def kept(group: Tensor, limit: int) -> Tensor:
    """Rows of at most `limit` samples of each group, a larger limit adds some; 0 keeps all.

    Example:
        >>> len(kept(torch.tensor([0] * 10 + [1] * 4), limit=5))
        9
    """
    if limit < 3 and limit != 0:
        raise ValueError(
            f"`limit` must be 0 (all) or at least 3 but is: {limit} (every group needs a sample "
            "for each of the three parts)."
        )
    return _first_of_each(group, lambda sizes: sizes if limit == 0 else sizes.clamp(max=limit))


# --- A binary label and two groups as arrays -----------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a data set."""

    features: np.ndarray  # (n, d)
    label: np.ndarray  # (n,) of 0 and 1, int64
    group: np.ndarray  # (n,) of 0 and 1, int64

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True, eq=False)
class FairnessData:
    """A data set with one binary label and two groups, split by a seed."""

    train: Part
    validation: Part | None  # None when no share was set aside
    test: Part
    feature_names: tuple[str, ...]  # one for each column; `column=value` for a category
    group_names: tuple[str, str]  # of group 0 and of group 1
    fingerprint: str  # of all the arrays

    def parts(self) -> dict[str, Part]:
        """The parts that there are, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}


def arrays(data: GroupedData, seed: int) -> FairnessData:
    r"""The parts of a seed, with features standardised by the training rows.

    .. math::
        x_j \mapsto \frac{x_j - \mu_j}{\sigma_j}, \qquad \sigma_j = 1 \text{ for a constant column}

    A category that test rows alone have is left out.
    """
    assert isinstance(data.samples, Vectors)
    values, cut = data.samples.values.numpy(), data.cut(seed)
    seen = np.concatenate([own.rows.numpy() for name, own in cut.items() if name != "test"])
    there = (values[seen] != 0).any(axis=0)
    columns = [k for k, name in enumerate(data.feature_names) if there[k] or "=" not in name]
    values = values if len(columns) == values.shape[1] else values[:, columns]
    train = values[cut["train"].rows.numpy()]
    # Not `deviation > 0`: a rounded mean leaves a constant column with about 1e-17.
    constant, mean = (train == train[:1]).all(axis=0), train.mean(axis=0)
    deviation = np.where(constant, 1.0, train.std(axis=0))
    parts = {
        name: Part(
            ((values[own.rows.numpy()] - mean) / deviation).astype(np.float32),
            own.label.numpy(),
            own.group.numpy(),
        )
        for name, own in cut.items()
    }
    every = [array for part in parts.values() for array in (part.features, part.label, part.group)]
    mark = digest(*(part for array in every for part in (array.shape, array.tobytes())))
    names, (first, second) = data.feature_names, cut["train"].group_names
    return FairnessData(
        parts["train"], parts.get("validation"), parts["test"],
        tuple(names[k] for k in columns), (first, second), mark,
    )  # fmt: skip
