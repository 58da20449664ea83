"""Samplers of groups and of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _checks
from .counted import AbstractSampler

__all__ = ["BlockSampler", "GroupBatchSampler"]

Ints = NDArray[np.int64]


class GroupBatchSampler(AbstractSampler[list[int]]):
    r"""Batches of B1 groups with B2 samples each, for `DataLoader(batch_sampler=...)`.

    Each batch takes `groups_per_batch` groups uniformly without replacement, so that the mean
    over them is unbiased for the mean over all groups, and `per_group` samples of each. A group's
    samples are walked through in shuffled passes: within an epoch each is used once before any is
    used again (a batch in which one pass ends and the next begins may hold a sample twice).
    The indices come group by group, by increasing group id: the order of `group_mean`.

    On several ranks the batch is cut into `world_size` contiguous slices of nearly equal length,
    and each rank takes its own. A group may lie on two ranks, and the slices together are exactly
    the batch of a single process; hence a run may be resumed with another number of ranks.

    Args:
        groups: group id of each sample, (N,), a sequence, array or tensor of integers; every id
            in 0, ..., n - 1 must occur.
        groups_per_batch: B1.
        per_group: B2.
        batches_per_epoch: ceil(N / (B1 B2)) unless given.
        seed: seed of all draws.
        rank: this process; taken from `torch.distributed`, if initialised, unless given.
        world_size: number of processes; likewise.
        small_groups: what to do with a group of fewer than B2 samples: "repeat" goes through it
            again (fixed batch shape), "all" takes each sample once.

    Example:
        >>> from fcco.groups import GroupBatchSampler
        >>> sampler = GroupBatchSampler([0, 0, 0, 1, 1, 1, 2, 2, 2], 2, 2, seed=1)
        >>> [len(batch) for batch in sampler]
        [4, 4, 4]
        >>> batch = sampler.draw()
        >>> sampler.state_dict()
        {'seed': 1, 'epoch': 1, 'consumed': 1}

        With a loader, `for batch in sampler.consume(loader): ...` counts exactly what the loop
        has seen; see `advance` and `draw` for loops of other shapes.
    """

    def __init__(
        self,
        groups: Sequence[int] | NDArray[Any] | Tensor,
        groups_per_batch: int,
        per_group: int,
        *,
        batches_per_epoch: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        small_groups: str = "repeat",
    ) -> None:
        call = "GroupBatchSampler"
        ids = _as_ids(call, groups)
        _checks.integer(call, "groups_per_batch", groups_per_batch, 1)
        _checks.integer(call, "per_group", per_group, 1)
        _checks.one_of(call, "small_groups", small_groups, ("repeat", "all"))
        self._members = np.argsort(ids, kind="stable")
        in_order = ids[self._members]
        self._starts = np.flatnonzero(np.diff(in_order, prepend=-1))
        self._sizes = np.diff(self._starts, append=len(ids))
        present = in_order[self._starts]
        absent = np.flatnonzero(present != np.arange(len(present)))
        if len(absent):
            raise ValueError(
                f"`{call}(groups=...)` must hold every id up to its largest, {in_order[-1]}, "
                f"but group {absent[0]} has no samples."
            )
        _check_draw(call, "groups_per_batch", groups_per_batch, len(present), "groups")
        self.groups_per_batch = groups_per_batch
        self._wanted = np.full(len(present), per_group)
        if small_groups == "all":
            self._wanted = np.minimum(self._wanted, self._sizes)
        self.rank, self.world_size = _ranks(call, rank, world_size)
        smallest = int(np.sort(self._wanted)[:groups_per_batch].sum())
        if smallest < self.world_size:
            raise ValueError(
                f"`{call}(world_size=...)` must be at most the smallest batch, {smallest}, "
                f"but is: {self.world_size} (a rank would get no samples)."
            )
        if batches_per_epoch is None:
            batches_per_epoch = -(-len(ids) // (groups_per_batch * per_group))
        super().__init__(call, batches_per_epoch, seed)

    @property
    def num_groups(self) -> int:
        """The number of groups, n."""
        return len(self._sizes)

    def _stream(self, generator: np.random.Generator) -> Iterator[list[int]]:
        members, place = self._members.copy(), self._sizes.copy()
        while True:
            chosen = generator.choice(
                self.num_groups, self.groups_per_batch, replace=False, shuffle=False
            )
            chosen.sort()
            batch = self._walk(chosen, members, place, generator)
            low, high = (len(batch) * r // self.world_size for r in (self.rank, self.rank + 1))
            yield batch[low:high].tolist()

    def _walk(
        self, chosen: Ints, members: Ints, place: Ints, generator: np.random.Generator
    ) -> Ints:
        """The next samples of the chosen groups; `members` and `place` hold the current passes."""
        left = self._wanted[chosen]
        end = np.cumsum(left)
        batch = np.empty(end[-1], dtype=np.int64)
        # Once, unless a group's pass ends within the batch: then its next pass fills the rest.
        while left.any():
            worn = chosen[(left > 0) & (place[chosen] == self._sizes[chosen])]
            if len(worn):
                self._shuffle(worn, members, generator)
                place[worn] = 0
            take = np.minimum(left, self._sizes[chosen] - place[chosen])
            source = _ranges(self._starts[chosen] + place[chosen], take)
            batch[_ranges(end - left, take)] = members[source]
            place[chosen] += take
            left = left - take
        return batch

    def _shuffle(self, groups: Ints, members: Ints, generator: np.random.Generator) -> None:
        sizes = self._sizes[groups]
        slots = _ranges(self._starts[groups], sizes)
        # One sort shuffles all groups: the integer part keeps each within its own slots.
        keys = generator.random(len(slots)) + np.repeat(np.arange(len(groups)), sizes)
        members[slots] = members[slots[np.argsort(keys)]]


class BlockSampler(AbstractSampler[Tensor]):
    r"""B1 of n blocks per step, uniformly without replacement: for constraint sampling.

    Args:
        num_blocks: n, the number of blocks (m constraints).
        blocks_per_batch: B1.
        seed: seed of all draws; the same on all ranks gives the same blocks.
        batches_per_epoch: ceil(n / B1) unless given; it only sets the length of an iteration.

    Example:
        >>> from fcco.groups import BlockSampler
        >>> blocks = BlockSampler(num_blocks=14, blocks_per_batch=4, seed=0)
        >>> index = blocks.draw()
        >>> index.shape, index.dtype, len(blocks)
        (torch.Size([4]), torch.int64, 4)
    """

    def __init__(
        self,
        num_blocks: int,
        blocks_per_batch: int,
        seed: int = 0,
        *,
        batches_per_epoch: int | None = None,
    ) -> None:
        call = "BlockSampler"
        _checks.integer(call, "num_blocks", num_blocks, 1)
        _checks.integer(call, "blocks_per_batch", blocks_per_batch, 1)
        _check_draw(call, "blocks_per_batch", blocks_per_batch, num_blocks, "blocks")
        self.num_blocks = num_blocks
        self.blocks_per_batch = blocks_per_batch
        if batches_per_epoch is None:
            batches_per_epoch = -(-num_blocks // blocks_per_batch)
        super().__init__(call, batches_per_epoch, seed)

    def _stream(self, generator: np.random.Generator) -> Iterator[Tensor]:
        while True:
            chosen = generator.choice(
                self.num_blocks, self.blocks_per_batch, replace=False, shuffle=False
            )
            yield torch.from_numpy(np.sort(chosen))


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """The ranges start, ..., start + length - 1, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)


def _as_ids(call: str, groups: Sequence[int] | NDArray[Any] | Tensor) -> Ints:
    ids = groups.detach().cpu().numpy() if isinstance(groups, Tensor) else np.asarray(groups)
    if ids.ndim != 1 or len(ids) == 0:
        raise ValueError(
            f"`{call}(groups=...)` must hold one id per sample, shape (N,), but has: {ids.shape}."
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"`{call}(groups=...)` must hold integer ids but has dtype: {ids.dtype}.")
    if ids.min() < 0:
        raise ValueError(f"`{call}(groups=...)` must hold ids from 0 but holds: {ids.min()}.")
    return ids.astype(np.int64)


def _ranks(call: str, rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"`{call}(...)` needs both rank and world_size, or neither.")
    if rank is None or world_size is None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        return dist.get_rank(), dist.get_world_size()
    _checks.integer(call, "world_size", world_size, 1)
    _checks.integer(call, "rank", rank, 0)
    _checks.below(call, "rank", rank, world_size, "world_size", "ranks count from 0")
    return rank, world_size


def _check_draw(call: str, name: str, drawn: int, available: int, what: str) -> None:
    if drawn > available:
        raise ValueError(
            f"`{call}({name}=...)` must be at most the number of {what}, {available}, "
            f"but is: {drawn} ({what} are drawn without replacement)."
        )
