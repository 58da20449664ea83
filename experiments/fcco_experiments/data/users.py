"""Users as groups: whole users go to one part; those with few samples are pooled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .grouped import PARTS, GroupedPart, part

__all__ = ["UNUSED", "ByUser"]

TRAIN, VALIDATION, TEST = range(3)
UNUSED = -1
SHARES = (0.6, 0.2)  # of the users with enough samples; the others test


@dataclass(frozen=True, eq=False)
class ByUser:
    """From a seed to parts that share no user.

    In training data each user is a group. In validation and test data, users with fewer than
    `pool` samples are shuffled by the seed and put together, in that order, until they have as many
    as that; what is left over joins the last pool.

    Args:
        label: of all samples.
        user: of all samples.
        counts: how many samples each user has; they may be more than are kept here.
        fewest: samples that a user needs to train on.
        pool: samples that a group of validation and test data has at least.
        part_of: of each user, a place in `PARTS` or `UNUSED`. Unless given, the seed shuffles the
            users with at least `fewest` samples and cuts them 60:20:20; of the others one half
            goes to validation, the other half to test data.
    """

    label: Tensor
    user: Tensor
    counts: Tensor
    fewest: int
    pool: int
    part_of: Tensor | None = None

    def __call__(self, seed: int) -> Mapping[str, GroupedPart]:
        """The parts."""
        generator = torch.Generator().manual_seed(seed)
        part_of = self._drawn(generator) if self.part_of is None else self.part_of
        part_of = part_of.masked_fill((part_of == TRAIN) & (self.counts < self.fewest), UNUSED)
        group = torch.arange(len(self.counts))
        names = [f"user {number}" for number in range(1, len(self.counts) + 1)]
        for held in (VALIDATION, TEST):
            small = torch.nonzero((part_of == held) & (self.counts < self.pool)).squeeze(1)
            order = small[torch.randperm(len(small), generator=generator)]
            own = self._pooled(order)
            group[order] = len(names) + own
            names += [
                f"pool {number}" for number in range(1, int(own.max()) + 2 if len(own) else 1)
            ]
        return {
            name: part(
                torch.nonzero(part_of[self.user] == place).squeeze(1),
                self.label,
                group[self.user],
                names,
            )
            for place, name in enumerate(PARTS)
        }

    def _drawn(self, generator: torch.Generator) -> Tensor:
        enough = self.counts >= self.fewest
        many, few = (torch.nonzero(which).squeeze(1) for which in (enough, ~enough))
        many, few = (each[torch.randperm(len(each), generator=generator)] for each in (many, few))
        first, second = (round(share * len(many)) for share in SHARES)
        part_of = torch.full((len(self.counts),), TEST)
        part_of[many[:first]] = TRAIN
        part_of[many[first : first + second]] = VALIDATION
        part_of[few[: len(few) // 2]] = VALIDATION
        return part_of

    def _pooled(self, order: Tensor) -> Tensor:
        """The pool of each of these users."""
        pools: list[int] = []
        number = size = 0
        for count in self.counts[order].tolist():
            pools.append(number)
            size += count
            if size >= self.pool:
                number, size = number + 1, 0
        full = max(number - 1, 0)  # the last pool that is large enough
        return torch.tensor([min(each, full) for each in pools], dtype=torch.int64)
