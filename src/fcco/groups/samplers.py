"""Samplers of groups and of blocks whose position can be saved and resumed exactly.

Every batch is a function of (seed, epoch, batch number) alone. A resumed sampler repeats the draws
of the epoch up to its position, which reads no data. The draws come from a private NumPy generator,
whose streams are the same across machines, but not across all versions of NumPy.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from .. import _checks
from .._distributed import find_group
from ..index import Memberships, check_range, read_index

Batch_co = TypeVar("Batch_co", covariant=True)
Loaded = TypeVar("Loaded")
Ints = NDArray[np.int64]


class ResumableSampler(Sampler[Batch_co], abc.ABC):
    """Base class that counts batches: its state is (seed, epoch, consumed).

    An iteration starts at the current count, and the count moves on to the next epoch by itself.
    When a batch counts as consumed depends on the loop:

    * `for batch in sampler.consume(loader)`: once the loop body has it, so that a checkpoint
      written after the step holds exactly the batches trained on.
    * `for batch in loader`: when the loader asks for its indices; workers run ahead.
    * `advance(0)` before training, `advance()` after each step: in the loop of a trainer.
    * `batch = sampler.draw()`: at once, without a loader.

    A subclass defines `_stream(generator)`, the endless sequence of batches of one epoch.

    Args:
        batches_per_epoch: the length of an iteration.
        seed: of all draws, the same on all ranks; unless given, a number from torch's global
            generator.
        rank: this process, and `world_size` the number of processes: those of
            `torch.distributed`, if initialised, unless given.
    """

    def __init__(
        self,
        batches_per_epoch: int,
        seed: int | None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        call = type(self).__name__
        _checks.integer(call, "batches_per_epoch", batches_per_epoch, 1)
        self.rank, self.world_size = _rank_and_world_size(call, rank, world_size)
        if seed is None and self.world_size > 1:
            raise ValueError(f"`{call}(seed=...)` is needed on several ranks, the same on all.")
        if seed is None:  # as torch's own samplers do; another one draws other batches
            seed = int(torch.randint(2**31, (), device="cpu"))
        _checks.integer(call, "seed", seed, 0)
        self.seed, self.batches_per_epoch = int(seed), int(batches_per_epoch)
        self.epoch = self.consumed = 0
        self._advanced_by_caller = False  # `advance` was called: iteration no longer counts
        self._open_consume_loops = 0  # while one is open, `consume` counts and iteration does not
        # The stream of `draw`, and the place (epoch, consumed) it stands at.
        self._draw_stream: tuple[tuple[int, int], Iterator[Batch_co] | None] = (0, 0), None

    @abc.abstractmethod
    def _stream(self, generator: np.random.Generator) -> Iterator[Batch_co]: ...

    def __len__(self) -> int:
        return self.batches_per_epoch

    def __iter__(self) -> Iterator[Batch_co]:
        for batch in self._remaining():
            if not (self._advanced_by_caller or self._open_consume_loops):
                self._count(1)
            yield batch

    def consume(self, loader: Iterable[Loaded]) -> Iterator[Loaded]:
        """Yield the batches of a loader that draws from here; each counts when it is yielded.

        Not of an iterator that has begun, whose prefetched batches would be counted twice.
        """
        self._open_consume_loops += 1
        try:
            for batch in loader:
                self._count(1)
                yield batch
        finally:
            self._open_consume_loops -= 1

    def advance(self, batches: int = 1) -> None:
        """Count batches as consumed; from the first call on, plain iteration no longer does."""
        _checks.integer(f"{type(self).__name__}.advance", "batches", batches, 0)
        self._advanced_by_caller = True
        self._count(batches)

    def draw(self) -> Batch_co:
        """The next batch, counted as consumed, for use without a loader; epochs follow on."""
        place, stream = self._draw_stream
        if stream is None or place != (self.epoch, self.consumed):
            stream = self._remaining()  # the count has moved since the last draw
        batch = next(stream)
        # A stream ends with its epoch: the place after its last batch never comes.
        self._draw_stream = (self.epoch, self.consumed + 1), stream
        self._count(1)
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch; no effect if it is the current one, also if half done."""
        _checks.integer(f"{type(self).__name__}.set_epoch", "epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch, self.consumed = int(epoch), 0

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        entries, length = ("seed", "epoch", "consumed"), self.batches_per_epoch
        if not state.keys() >= set(entries) or state["consumed"] >= length:
            raise ValueError(
                f"`{type(self).__name__}.load_state_dict` needs seed, epoch and consumed, below "
                f"the {length} batches of an epoch, but got: {state}."
            )
        self.seed, self.epoch, self.consumed = (int(state[name]) for name in entries)
        self._draw_stream = (0, 0), None

    def __getstate__(self) -> dict[str, Any]:
        # A copy or pickle has the position, not the open loops and streams of the original.
        return {**vars(self), "_open_consume_loops": 0, "_draw_stream": ((0, 0), None)}

    def _remaining(self) -> Iterator[Batch_co]:
        # A generator, so the count is read at the first batch and not at creation: a loader with
        # workers creates two iterators of its sampler and uses the second.
        stream = self._stream(np.random.default_rng([self.seed, self.epoch]))
        yield from itertools.islice(stream, self.consumed, self.batches_per_epoch)

    def _count(self, batches: int) -> None:
        epochs, self.consumed = divmod(self.consumed + batches, self.batches_per_epoch)
        self.epoch += epochs


class GroupBatchSampler(ResumableSampler[list[int]]):
    r"""Batches of some groups with equally many samples each: `DataLoader(batch_sampler=...)`.

    Groups are drawn uniformly without replacement, so that the mean over them is unbiased for the
    mean over all groups. Each group is read in shuffled passes: within an epoch each sample is
    used once before any is used again (a batch in which one pass ends and the next begins may hold
    a sample twice). The indices come by increasing group id, the order of `group_mean`.
    `ResumableSampler` says how batches are counted and resumed.

    On several ranks each gets a contiguous slice of the batch of a single process: a run may be
    resumed with another number of ranks.

    A batch has B1 groups and B2 samples of each. From `batch_size` follow B1 = min(n,
    batch_size / 2), and B2 = batch_size / B1, both rounded down, at most the size of the largest
    group. Many groups, because the estimate of a group that is not in the batch grows old; two
    samples of each, because their difference shows the noise.

    Args:
        groups: group id of each sample, (N,); every id in 0, ..., n - 1 must occur. For samples in
            several groups, the `group` of `GroupMemberships`.
        groups_per_batch: B1.
        per_group: B2, or one number for each group.
        batch_size: instead of these two, the most samples in a batch, on all ranks together.
        batches_per_epoch: ceil(N / (B1 B2)) unless given.
        small_groups: what to do with a group of fewer than B2 samples: "repeat" goes through it
            again (fixed batch shape), "all" takes each sample once.

    The other arguments are those of `ResumableSampler`.
    """

    def __init__(
        self,
        groups: Any,
        groups_per_batch: int | None = None,
        per_group: int | Sequence[int] | None = None,
        *,
        batch_size: int | None = None,
        batches_per_epoch: int | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        small_groups: str = "repeat",
    ) -> None:
        call = type(self).__name__
        ids = _read_ids(call, groups)
        _checks.one_of(call, "small_groups", small_groups, ("repeat", "all"))
        # Samples sorted by group: group i has the slots from _starts[i] to _starts[i] + _sizes[i].
        self._members = np.argsort(ids, kind="stable")
        sorted_ids = ids[self._members]
        self._starts = np.flatnonzero(np.diff(sorted_ids, prepend=-1))  # the first one, too
        self._sizes = np.diff(self._starts, append=len(ids))
        present = sorted_ids[self._starts]
        absent = np.flatnonzero(present != np.arange(len(present)))
        if len(absent):
            raise ValueError(
                f"`{call}(groups=...)` must hold every id up to its largest, {sorted_ids[-1]}, "
                f"but group {absent[0]} has no samples."
            )
        given = groups_per_batch, per_group
        if (None in given) if batch_size is None else (given != (None, None)):
            raise ValueError(f"`{call}` takes `batch_size`, or `groups_per_batch` and `per_group`.")
        if groups_per_batch is None or per_group is None:
            _checks.integer(call, "batch_size", batch_size, 1)
            size, largest = int(batch_size or 0), int(self._sizes.max())
            groups_per_batch = min(len(present), max(1, size // min(2, largest)))
            per_group = min(size // groups_per_batch, largest)
        _checks.integer(call, "groups_per_batch", groups_per_batch, 1)
        _checks.in_interval(call, "groups_per_batch", groups_per_batch, 1, len(present))
        for number in per_group if isinstance(per_group, Sequence) else (per_group,):
            _checks.integer(call, "per_group", number, 1)
        self.groups_per_batch, self.per_group = groups_per_batch, per_group
        self._samples_per_batch = np.broadcast_to(per_group, len(present))  # of each group
        if small_groups == "all":
            self._samples_per_batch = np.minimum(self._samples_per_batch, self._sizes)
        if batches_per_epoch is None:
            batches_per_epoch = -(-len(ids) // (groups_per_batch * int(np.max(per_group))))
        super().__init__(batches_per_epoch, seed, rank, world_size)
        smallest = int(np.sort(self._samples_per_batch)[:groups_per_batch].sum())
        # Every rank gets a sample of every batch.
        _checks.in_interval(call, "world_size", self.world_size, 1, smallest)

    @property
    def num_groups(self) -> int:
        return len(self._sizes)

    def _stream(self, generator: np.random.Generator) -> Iterator[list[int]]:
        # `members` holds the order of each group's current pass, `position` how far it has come.
        # It starts at the end, so that the first visit of a group shuffles it.
        members, position = self._members.copy(), self._sizes.copy()
        while True:
            chosen = _draw_sorted(generator, self.num_groups, self.groups_per_batch)
            batch = self._next_samples(chosen, members, position, generator)
            yield self._of_this_rank(batch).tolist()

    def _of_this_rank(self, batch: Ints) -> Ints:
        low, high = (len(batch) * r // self.world_size for r in (self.rank, self.rank + 1))
        return batch[low:high]

    def _next_samples(
        self, chosen: Ints, members: Ints, position: Ints, generator: np.random.Generator
    ) -> Ints:
        """The next samples of the chosen groups; changes `members` and `position`."""
        missing = self._samples_per_batch[chosen]
        ends = np.cumsum(missing)  # of each group's part of the batch
        batch = np.empty(ends[-1], dtype=np.int64)
        # One round, unless a group's pass ends within the batch: then its next pass fills the rest.
        while missing.any():
            finished = chosen[(missing > 0) & (position[chosen] == self._sizes[chosen])]
            if len(finished):
                self._shuffle(finished, members, generator)
                position[finished] = 0
            take = np.minimum(missing, self._sizes[chosen] - position[chosen])
            source = _ranges(self._starts[chosen] + position[chosen], take)
            batch[_ranges(ends - missing, take)] = members[source]
            position[chosen] += take
            missing = missing - take
        return batch

    def _shuffle(self, groups: Ints, members: Ints, generator: np.random.Generator) -> None:
        sizes = self._sizes[groups]
        slots = _ranges(self._starts[groups], sizes)
        # One sort shuffles all groups: the integer part keeps each within its own slots.
        keys = generator.random(len(slots)) + np.repeat(np.arange(len(groups)), sizes)
        members[slots] = members[slots[np.argsort(keys)]]


class PositiveBatchSampler(GroupBatchSampler):
    """Batches with a fixed number of positives, for data in which they are rare.

    Positives and negatives are the two groups of a `GroupBatchSampler`; on several ranks each gets
    its share of both. Their share in a batch does not change what objectives of `fcco.xrisk`
    estimate (but with several labels, positives of one come more often as negatives of others).

    Args:
        labels: 0 or 1 for each sample, (N,); or (N, T) for T labels: a sample with any of them
            counts as positive, NaN as 0.
        batch_size: samples in a batch, on all ranks together.
        positives: how many of them are positives; half, at most all there are, unless given.
        options: `batches_per_epoch` (one pass over the negatives unless given), `seed`, `rank` and
            `world_size` of `ResumableSampler`.
    """

    def __init__(
        self, labels: Any, batch_size: int = 64, positives: int | None = None, **options: Any
    ) -> None:
        call = "PositiveBatchSampler"
        table = np.asarray(torch.as_tensor(labels).detach().cpu())
        positive = (table == 1) if table.ndim == 1 else (table == 1).any(1)
        number = int(positive.sum())
        if not 0 < number < len(positive):
            raise ValueError(
                f"`{call}(labels=...)` must hold positives (1) and negatives (0), but {number} of "
                f"{len(positive)} samples are positive."
            )
        _checks.integer(call, "batch_size", batch_size, 2)
        if positives is None:
            positives = min(batch_size // 2, number)
        _checks.in_interval(call, "positives", positives, 1, batch_size - 1)
        negatives = batch_size - positives
        options.setdefault("batches_per_epoch", -(-(len(positive) - number) // negatives))
        # Group 0 are the negatives, group 1 the positives.
        super().__init__(positive.astype(np.int64), 2, (negatives, positives), **options)
        self.batch_size, self.positives = batch_size, positives

    def _of_this_rank(self, batch: Ints) -> Ints:
        # Sample rank, rank + world_size, ...: negatives come first in the batch, and a contiguous
        # slice would leave most ranks without a positive.
        return batch[self.rank :: self.world_size]


class BlockSampler(ResumableSampler[Tensor]):
    """Draws some of n groups or constraints for each step, the same on all ranks.

    B1 = `blocks_per_batch` are drawn uniformly without replacement; an epoch has ceil(n / B1)
    batches.
    """

    def __init__(self, num_blocks: int, blocks_per_batch: int, seed: int | None = None) -> None:
        call = "BlockSampler"
        _checks.integer(call, "num_blocks", num_blocks, 1)
        _checks.integer(call, "blocks_per_batch", blocks_per_batch, 1)
        _checks.in_interval(call, "blocks_per_batch", blocks_per_batch, 1, num_blocks)
        self.num_blocks, self.blocks_per_batch = num_blocks, blocks_per_batch
        super().__init__(-(-num_blocks // blocks_per_batch), seed)

    def _stream(self, generator: np.random.Generator) -> Iterator[Tensor]:
        while True:
            chosen = _draw_sorted(generator, self.num_blocks, self.blocks_per_batch)
            yield torch.from_numpy(chosen)


def _draw_sorted(generator: np.random.Generator, available: int, drawn: int) -> Ints:
    # Sorted, so NumPy need not shuffle the subset first.
    return np.sort(generator.choice(available, drawn, replace=False, shuffle=False))


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """The ranges start, ..., start + length - 1, one after another."""
    # arange goes on counting over all ranges; the shift of a range makes it begin at its start.
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)


def _read_ids(call: str, groups: Any) -> Ints:
    place = f"`{call}(groups=...)`"
    ids = read_index(place, groups)
    if isinstance(ids, Memberships):
        raise ValueError(
            f"{place} must hold one id per sample. Draw "
            "`members = fcco.groups.GroupMemberships(dataset, groups)` by their `members.group`."
        )
    if len(ids) == 0:
        raise ValueError(f"{place} must hold one id per sample but is empty.")
    check_range(place, int(ids.min()), int(ids.max()))
    return ids.detach().cpu().numpy()


def _rank_and_world_size(call: str, rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"`{call}(...)` needs both rank and world_size, or neither.")
    if rank is None or world_size is None:
        group = find_group()
        return (0, 1) if group is None else (group.rank, group.size)
    _checks.integer(call, "world_size", world_size, 1)
    _checks.in_interval(call, "rank", rank, 0, world_size - 1)
    return rank, world_size
