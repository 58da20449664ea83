"""Group means against loops, and samplers against what they promise."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import DataLoader, Dataset

from fcco.groups import BlockSampler, GroupBatchSampler, PositiveBatchSampler, group_mean

# ---------------------------------------------------------------------------------------- means


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    size, groups = draw(st.integers(1, 30)), draw(st.integers(1, 8))
    dim = draw(st.sampled_from([None, 1, 3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shape = (size,) if dim is None else (size, dim)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, 3 * groups, (size,), generator=generator)


def loop_means(values: torch.Tensor, group: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    index = sorted(set(group.tolist()))
    rows = [[values[j] for j in range(len(values)) if group[j] == i] for i in index]
    return [torch.stack(row).sum(0) / len(row) for row in rows], index


@given(batches())
@settings(max_examples=25, deadline=None)
def test_group_mean_and_gradient_equal_a_loop(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    values, group = batch
    ours = values.clone().requires_grad_()
    theirs = values.clone().requires_grad_()
    result = group_mean(ours, group)
    means, index = loop_means(theirs, group)
    torch.testing.assert_close(result.values, torch.stack(means))
    assert result.index.tolist() == index and result.index.dtype == torch.int64
    assert result.counts.tolist() == [group.tolist().count(i) for i in index]
    result.values.square().sum().backward()
    torch.stack(means).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("kind", ["list", np.int32, np.uint16])
def test_ids_may_be_a_sequence_or_an_array(kind: Any) -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 6.0], requires_grad=True)
    numbers = [3, 0, 3, 3]
    ids: Any = numbers
    if kind != "list":
        ids = np.array(numbers, dtype=kind)
        ids.flags.writeable = False  # torch warns when it shares memory that is read-only
    means = group_mean(values, ids)
    assert means.values.tolist() == [2.0, pytest.approx(11 / 3)]
    assert means.index.tolist() == [0, 3] and means.index.dtype == torch.int64
    assert means.counts.tolist() == [1, 3]
    means.values[1].backward()
    assert values.grad is not None and values.grad.tolist() == pytest.approx(
        [1 / 3, 0, 1 / 3, 1 / 3]
    )


@pytest.mark.parametrize(
    ("values", "group", "num_groups", "message"),
    [
        (torch.ones(3), torch.tensor([0, 1]), None, "3 values: 2"),
        (torch.tensor(1.0), torch.tensor(0), None, r"\(N,\)"),
        (torch.ones(2), torch.tensor([0, -4]), None, "-4"),
        (torch.ones(2), [0.0, 1.0], None, "integer id"),
        (torch.ones(2), torch.tensor([0, 5]), 5, "5"),
    ],
)
def test_group_mean_errors(
    values: torch.Tensor, group: Any, num_groups: int | None, message: str
) -> None:
    with pytest.raises((ValueError, IndexError), match=message):
        group_mean(values, group, num_groups)


# ------------------------------------------------------------------------------------- samplers


def uneven(seed: int = 0, groups: int = 7, low: int = 3, high: int = 30) -> np.ndarray:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(low, high, groups)
    return generator.permutation(np.repeat(np.arange(groups), sizes))


def walk(sampler: GroupBatchSampler, epochs: int = 1) -> list[list[int]]:
    return [batch for _ in range(epochs) for batch in sampler]


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(sampler: GroupBatchSampler, size: int, workers: int, **options: Any) -> DataLoader:
    options = {"prefetch_factor": 3, **options} if workers else {}
    return DataLoader(Numbers(size), batch_sampler=sampler, num_workers=workers, **options)


def test_each_batch_has_distinct_groups_with_the_right_number_of_samples_in_order() -> None:
    ids = uneven()
    sampler = GroupBatchSampler(ids, 3, 4, batches_per_epoch=200)
    for batch in sampler:
        groups = ids[batch]
        assert list(groups) == sorted(groups)
        assert sorted(Counter(groups.tolist()).values()) == [4, 4, 4]


@pytest.mark.parametrize(
    ("number", "samples", "options", "shape"),
    [
        (16, 100, {"batch_size": 64}, (16, 4)),  # best of 2x32, 4x16, 8x8 and 16x4
        (10, 100, {"batch_size": 64}, (10, 6)),  # a batch of 60: never more than 64
        (40, 100, {"batch_size": 64}, (32, 2)),  # two samples of each before one more group
        (164, 1, {"batch_size": 64}, (64, 1)),  # there is no second sample
        (3, 5, {"batch_size": 64}, (3, 5)),  # no sample twice: the batch is all there is
        (9, 100, {"batch_size": 256}, (9, 28)),
        (9, 100, {"groups_per_batch": 9, "per_group": 80}, (9, 80)),
    ],
)
def test_the_shape_of_a_batch(
    number: int, samples: int, options: Any, shape: tuple[int, int]
) -> None:
    ids = np.repeat(np.arange(number), samples)
    sampler = GroupBatchSampler(ids, **options)
    counts = np.unique(ids[sampler.draw()], return_counts=True)[1]
    assert (len(counts), *set(counts.tolist())) == shape
    assert (sampler.groups_per_batch, sampler.per_group) == shape
    assert len(sampler) == -(-len(ids) // (shape[0] * shape[1]))


@pytest.mark.parametrize(
    ("small_groups", "counts"), [("repeat", {0: 10, 1: 10, 2: 10}), ("all", {0: 1, 1: 3, 2: 10})]
)
def test_groups_smaller_than_their_share(small_groups: str, counts: dict[int, int]) -> None:
    ids = np.repeat([0, 1, 2], [1, 3, 100])
    sampler = GroupBatchSampler(ids, batch_size=30, small_groups=small_groups)
    assert Counter(ids[sampler.draw()].tolist()) == counts


@pytest.mark.parametrize("small_groups", ["repeat", "all"])
def test_each_sample_is_used_once_per_pass(small_groups: str) -> None:
    ids = uneven(seed=3, low=1)  # some groups are smaller than per_group
    sampler = GroupBatchSampler(ids, 4, 5, batches_per_epoch=300, small_groups=small_groups)
    for _ in range(2):
        seen = np.array([j for batch in sampler for j in batch])
        for group in range(7):
            members = set(np.flatnonzero(ids == group).tolist())
            own = seen[ids[seen] == group].tolist()
            passes = [own[k : k + len(members)] for k in range(0, len(own), len(members))]
            assert len(passes) > 5
            assert all(set(full) == members for full in passes[:-1])
            assert len(set(passes[-1])) == len(passes[-1])
            if len(members) > 4:
                assert len({tuple(full) for full in passes[:-1]}) > 1, "never reshuffled"


def test_all_subsets_of_groups_and_all_orders_of_samples_are_equally_likely() -> None:
    ids = np.repeat(np.arange(6), 3)
    sampler = GroupBatchSampler(ids, 3, 3, batches_per_epoch=2_000, seed=5)
    subsets: Counter[tuple[int, ...]] = Counter()
    orders: Counter[tuple[int, ...]] = Counter()
    for batch in sampler:
        subsets[tuple(ids[batch[::3]].tolist())] += 1
        orders.update(tuple(j % 3 for j in batch[k : k + 3]) for k in (0, 3, 6))
    assert len(subsets) == 20 and len(orders) == 6
    assert stats.chisquare(list(subsets.values())).pvalue > 1e-3
    assert stats.chisquare(list(orders.values())).pvalue > 1e-3


def test_blocks_are_uniform_subsets() -> None:
    sampler = BlockSampler(6, 2, seed=2)
    counts = Counter(tuple(sampler.draw().tolist()) for _ in range(2000))
    assert all(len(set(subset)) == 2 for subset in counts) and len(counts) == 15
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


@pytest.mark.parametrize(
    ("world_size", "small_groups"), [(2, "repeat"), (3, "all"), (11, "repeat"), (5, "all")]
)
def test_ranks_together_give_the_single_process_batch(world_size: int, small_groups: str) -> None:
    ids = uneven(seed=1, low=2)
    options: Any = {"seed": 4, "small_groups": small_groups, "batches_per_epoch": 25}
    single = walk(GroupBatchSampler(ids, 4, 5, **options), epochs=2)
    ranks = [
        walk(GroupBatchSampler(ids, 4, 5, rank=r, world_size=world_size, **options), epochs=2)
        for r in range(world_size)
    ]
    for batch, *slices in zip(single, *ranks, strict=True):
        assert list(itertools.chain(*slices)) == batch
        assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_ranks_come_from_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = uneven()
    assert GroupBatchSampler(ids, 2, 4).world_size == 1
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda _=None: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _=None: 3)
    sampler = GroupBatchSampler(ids, 2, 4, seed=0)
    assert (sampler.rank, sampler.world_size) == (2, 3)
    given_ranks = GroupBatchSampler(ids, 2, 4, seed=0, rank=0, world_size=2)
    assert (given_ranks.rank, given_ranks.world_size) == (0, 2)
    for make in (lambda: GroupBatchSampler(ids, 2, 4), lambda: BlockSampler(9, 4)):
        with pytest.raises(ValueError, match=r"seed=.* several ranks, the same"):
            make()


def test_batches_depend_on_seed_and_epoch_only() -> None:
    ids = uneven()
    first, second = GroupBatchSampler(ids, 3, 4, seed=1), GroupBatchSampler(ids, 3, 4, seed=1)
    epochs = [walk(first) for _ in range(3)]
    second.set_epoch(2)
    assert walk(second) == epochs[2]
    second.set_epoch(0)
    assert walk(second) == epochs[0]
    assert epochs[0] != epochs[1] != epochs[2]
    assert walk(GroupBatchSampler(ids, 3, 4, seed=2)) != epochs[0]
    as_tensor = GroupBatchSampler(torch.from_numpy(ids), 3, 4, seed=1)
    as_list = GroupBatchSampler(ids.tolist(), 3, 4, seed=1)
    assert walk(as_tensor) == walk(as_list) == epochs[0]


@pytest.mark.parametrize("make", [
    lambda: GroupBatchSampler(uneven(), 3, 4),
    lambda: PositiveBatchSampler(np.arange(60) % 5 == 0, 12),
    lambda: BlockSampler(9, 4),
])  # fmt: skip
def test_a_sampler_made_anew_draws_other_batches(make: Any) -> None:
    """In each epoch, say; the same program draws the same, and a state holds the seed."""

    def drawn() -> list[Any]:
        return [[np.asarray(batch).tolist() for batch in make()] for _ in range(3)]

    torch.manual_seed(0)
    first = drawn()
    assert first[0] != first[1] != first[2]
    torch.manual_seed(0)
    assert drawn() == first
    sampler, other = make(), make()
    sampler.draw()
    other.load_state_dict(sampler.state_dict())
    assert np.array_equal(other.draw(), sampler.draw())


def test_global_random_state_is_neither_read_nor_changed_by_a_seed() -> None:
    ids = uneven()

    def reseed(seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def draws() -> list[Any]:
        blocks = BlockSampler(9, 4, seed=0)
        return [walk(GroupBatchSampler(ids, 3, 4, seed=0), 2), [b.tolist() for b in blocks]]

    reseed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    first = draws()
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # type: ignore[index]
    assert before[2] == random.getstate()
    reseed(1)
    assert draws() == first


# -------------------------------------------------------------------------------------- resuming

workers_may_fork = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@workers_may_fork
@pytest.mark.parametrize("workers", [0, 2])
def test_consume_counts_what_the_loop_has_seen(workers: int) -> None:
    ids = uneven()
    whole = walk(GroupBatchSampler(ids, 2, 3, seed=6), epochs=2)
    length = len(whole) // 2
    for stop in (1, length - 1, length) if workers == 0 else (5,):
        sampler = GroupBatchSampler(ids, 2, 3, seed=6)
        seen, state = [], {}
        for batch in sampler.consume(loader_of(sampler, len(ids), workers)):
            seen.append(batch.tolist())
            if len(seen) == stop:
                state = sampler.state_dict()
                break
        epoch, consumed = divmod(stop, length)
        assert state == {"seed": 6, "epoch": epoch, "consumed": consumed}
        resumed = GroupBatchSampler(ids, 2, 3)
        resumed.load_state_dict(state)
        while resumed.epoch < 2:
            loader = loader_of(resumed, len(ids), workers)
            seen += [batch.tolist() for batch in resumed.consume(loader)]
        assert seen == whole


@workers_may_fork
def test_plain_loop_is_exact_without_workers_and_ahead_with_them() -> None:
    ids = uneven()
    whole = walk(GroupBatchSampler(ids, 2, 3, seed=0))
    for workers in (0, 2):
        sampler = GroupBatchSampler(ids, 2, 3, seed=0)
        iterator = iter(loader_of(sampler, len(ids), workers))
        assert [next(iterator).tolist() for _ in range(4)] == whole[:4]
        assert (sampler.consumed == 4) if workers == 0 else (4 < sampler.consumed <= 4 + 2 * 3)
    sampler = GroupBatchSampler(ids, 2, 3, seed=0)
    loader = loader_of(sampler, len(ids), 2)
    both = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert (
        both[0] == whole and both[1] == walk(GroupBatchSampler(ids, 2, 3, seed=0), 2)[len(whole) :]
    )
    assert sampler.state_dict() == {"seed": 0, "epoch": 2, "consumed": 0}


@workers_may_fork
def test_advance_takes_over_the_counting() -> None:
    ids = uneven()
    whole = walk(GroupBatchSampler(ids, 2, 3, seed=0), epochs=2)
    length = len(whole) // 2
    sampler = GroupBatchSampler(ids, 2, 3, seed=0)
    sampler.advance(0)
    step = 0
    for _ in range(2):
        for batch in loader_of(sampler, len(ids), 2):
            assert batch.tolist() == whole[step]
            assert sampler.epoch * length + sampler.consumed == step
            sampler.advance()
            step += 1
    assert step == 2 * length


def test_consume_hands_the_counting_back() -> None:
    sampler = GroupBatchSampler(uneven(), 2, 3)
    abandoned: Iterator[Any] = sampler.consume(sampler)
    next(abandoned)
    overlapping: Iterator[Any] = sampler.consume(sampler)
    next(overlapping)
    abandoned.close()  # type: ignore[attr-defined]
    overlapping.close()  # type: ignore[attr-defined]
    assert sampler.consumed == 2
    next(iter(sampler))
    assert sampler.consumed == 3


def test_a_copy_goes_on_from_the_position_of_the_original() -> None:
    """Made inside a `consume` loop and after draws, whose streams cannot be copied."""
    ids = np.arange(12) % 3
    whole = list(GroupBatchSampler(ids, 2, 2, seed=0))
    sampler = GroupBatchSampler(ids, 2, 2, seed=0)
    for _ in sampler.consume(DataLoader(ids, batch_sampler=sampler)):  # type: ignore[arg-type]
        made = copy.deepcopy(sampler)
        break
    assert [made.draw() for _ in range(2)] == whole[1:] and made.epoch == 1
    again = pickle.loads(pickle.dumps(made))
    assert list(again) == list(made) and again.epoch == made.epoch == 2


def test_draw_follows_the_count_through_epochs_and_states() -> None:
    whole = [index.tolist() for _ in range(3) for index in _epoch(BlockSampler(7, 2, 3), _)]
    blocks = BlockSampler(7, 2, 3)
    assert [blocks.draw().tolist() for _ in range(6)] == whole[:6]
    resumed = BlockSampler(7, 2)
    resumed.load_state_dict(blocks.state_dict())
    assert [resumed.draw().tolist() for _ in range(6)] == whole[6:12]
    resumed.set_epoch(0)
    assert resumed.draw().tolist() == whole[0]
    resumed.advance(2)
    assert resumed.draw().tolist() == whole[3]


def _epoch(sampler: BlockSampler, epoch: int) -> BlockSampler:
    sampler.set_epoch(epoch)
    return sampler


# ---------------------------------------------------------------------------------------- errors

IDS = [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([0, 1, 2, 4], 1, 1), {}, "group 3 has no samples"),
        ((IDS, 4, 1), {}, "groups_per_batch"),
        ((IDS, 2, 0), {}, "per_group"),
        ((["a", "b"], 1, 1), {}, "numpy.unique"),
        (([], 1, 1), {}, "empty"),
        ((IDS, 2, 1), {"rank": 2, "world_size": 2}, "rank"),
        ((IDS, 2, 1), {"rank": 0}, "both rank and world_size"),
        ((IDS, 2, 1), {"rank": 0, "world_size": 3, "seed": 0}, "world_size"),
        ((IDS, 2, 1), {"small_groups": "drop"}, "small_groups"),
        ((IDS, 2, 1), {"batch_size": 2}, "takes `batch_size`, or `groups"),
        ((IDS, 2), {}, "takes `batch_size`, or `groups"),
    ],
)
def test_group_sampler_errors(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises((ValueError, IndexError, TypeError), match=message):
        GroupBatchSampler(*arguments, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda blocks: BlockSampler(3, 4), "blocks_per_batch"),
        (lambda blocks: BlockSampler(3.0, 2), "num_blocks"),  # type: ignore[arg-type]
        (lambda blocks: blocks.load_state_dict({"seed": 0, "epoch": 0}), "consumed"),
        (lambda blocks: blocks.load_state_dict({"seed": 0, "epoch": 0, "consumed": 3}), "below"),
        (lambda blocks: blocks.set_epoch(-1), "epoch"),
        (lambda blocks: blocks.advance(-1), "batches"),
    ],
)
def test_block_sampler_and_state_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(BlockSampler(3, 1))
