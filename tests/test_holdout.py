"""Rows set apart: shares of groups by counting, partners of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcco.groups import HoldOut


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.9])
def test_the_same_share_of_every_group_is_set_apart(share):
    sizes = [400, 60, 7, 2]
    group = np.random.default_rng(0).permutation(np.repeat(range(4), sizes))
    held = HoldOut(group, share, seed=1)
    assert sorted([*held.rest.tolist(), *held.apart.tolist()]) == list(range(469))
    counts = np.bincount(group[held.apart], minlength=4)
    for size, count in zip(sizes, counts, strict=True):
        assert 1 <= count < size and abs(count - share * size) <= 1
    assert torch.equal(held.apart, HoldOut(group, share, seed=1).apart)
    assert not torch.equal(held.apart, HoldOut(group, share, seed=2).apart)


def test_groups_that_overlap_and_samples_without_a_group():
    members = torch.rand(3000, 6, generator=torch.Generator().manual_seed(0)) < 0.2
    members[:, 5] = False  # nobody
    members[:2, 5] = True
    held = HoldOut(members, 0.25, seed=0)
    assert bool(members[held.apart].any(1).all())  # who has no group stays
    share = members[held.apart].sum(0) / members.sum(0)
    assert (share[:5] - 0.25).abs().max() < 0.02 and share[5] == 0.5
    groups = torch.randint(6, (200,))
    assert bool(members[held.draw(groups), groups].all())
    assert set(held.draw(groups).tolist()) <= set(held.apart.tolist())


def test_partners_are_of_the_same_groups_and_different_while_there_are_enough():
    group = torch.arange(200) % 4
    held = HoldOut(group, 0.1, seed=0)  # 5 of each
    batch, seen = torch.tensor([3, 0, 3, 3, 1, 3, 3]), []
    for _ in range(300):
        same = held.draw(batch)
        assert torch.equal(group[same], batch) and len(set(same.tolist())) == len(batch)
        seen += same.tolist()
    counts = np.bincount(seen, minlength=200)[held.apart]
    assert counts[group[held.apart] == 3].std() == 0  # all five at each call
    assert counts[group[held.apart] == 0].min() > 30  # of 60
    many = held.draw(torch.zeros(12, dtype=torch.int64))
    assert np.bincount(np.unique(many.numpy(), return_counts=True)[1]).tolist() == [0, 0, 3, 2]
    one, two = (held.draw(batch, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("groups", "share", "message"),
    [
        ([0, 0, 1], 0.2, "group 1 has one sample"),
        ([0, 0], 0.0, "share"),
        ([0, 0], 1.0, "share"),
        ([0.5, 0.5], 0.2, "integer id"),
        ([-1, 0], 0.2, "ids from 0"),
    ],
)
def test_wrong_use(groups, share, message):
    with pytest.raises((ValueError, IndexError), match=message):
        HoldOut(groups, share)
