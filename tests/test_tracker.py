"""The tracker equals what is computed by hand in NumPy."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from reference import tracked as by_hand

import fcco


def gradient(tensor: torch.Tensor) -> Any:
    return tensor.grad


@pytest.mark.parametrize("read", ["old", "new"])
@pytest.mark.parametrize("as_counts", [False, True])
def test_repeated_ids_are_samples_of_one_block_and_others_stay_bitwise(read, as_counts):
    """Means over unequal counts; the gradient of a block is the mean over its samples."""
    rng = np.random.default_rng(0)
    start, n = rng.normal(size=(9, 2)), 9
    tracker = fcco.InnerTracker(n, 2, gamma=0.3, correction=0.7, read=read, dtype=torch.float64)
    tracker.set_values(torch.arange(8), torch.as_tensor(start[:8]))  # block 8 is new
    before = tracker.value.clone()
    ids = np.array([5, 1, 5, 8, 5, 1])
    fresh, past, slope = (rng.normal(size=(k, 2)) for k in (6, 6, 3))
    blocks = np.array([1, 5, 8])
    mean = lambda x: np.stack([x[ids == b].mean(0) for b in blocks])  # noqa: E731
    old, new = by_hand(start[blocks], (blocks < 8)[:, None], mean(fresh), mean(past), 0.3, 0.7)
    if as_counts:
        g = torch.as_tensor(mean(fresh)).requires_grad_()
        found = tracker(
            g, torch.as_tensor(blocks), torch.as_tensor(mean(past)), counts=torch.tensor([2, 3, 1])
        )
        expected = slope
    else:
        g = torch.as_tensor(fresh).requires_grad_()
        found = tracker(g, torch.as_tensor(ids), torch.as_tensor(past))
        expected = (slope / np.array([[2], [3], [1]]))[np.searchsorted(blocks, ids)]
    np.testing.assert_allclose(found.detach(), old if read == "old" else new, atol=1e-14)
    np.testing.assert_allclose(tracker.value[torch.as_tensor(blocks)], new, atol=1e-14)
    untouched = torch.tensor([0, 2, 3, 4, 6, 7])
    assert torch.equal(tracker.value[untouched], before[untouched])
    assert tracker.seen.all() and tracker.steps == 1
    (found * torch.as_tensor(slope)).sum().backward()
    np.testing.assert_allclose(gradient(g), expected, atol=1e-14)


def test_a_measured_value_is_tracked_and_its_surrogate_carries_the_gradient():
    tracker = fcco.ema_tracker(3, 0.25, dtype=torch.float64)
    tracker.set_values(None, torch.tensor([0.2, 0.4, 0.8], dtype=torch.float64))
    right = torch.tensor([True, False, True, True])  # 0/1, without gradient
    surrogate = torch.tensor([9.0, 8.0, 7.0, 6.0], requires_grad=True)
    blocks = tracker.blocks(torch.tensor([2, 2, 0, 2]))
    tracked = tracker.update(tracker.entries(blocks, right, carrier=surrogate))
    np.testing.assert_allclose(tracked.value, [0.2, 0.8])
    np.testing.assert_allclose(tracker.value[:, 0], [0.2 * 0.75 + 0.25, 0.4, 0.6 + 0.25 * 2 / 3])
    (tracked.carrying_gradient() * torch.tensor([3.0, 6.0])).sum().backward()
    np.testing.assert_allclose(gradient(surrogate), [2.0, 2.0, 3.0, 2.0])


def test_an_independent_carrier_batch_may_have_other_entries_but_not_other_blocks():
    tracker = fcco.ema_tracker(5, 0.5, read="new", dtype=torch.float64)
    tracker.set_values(None, torch.zeros(5, dtype=torch.float64))
    values = torch.tensor([2.0, 1.0, 5.0])
    carrier = torch.tensor([7.0, 8.0, 9.0, 10.0], requires_grad=True)

    def update(carrier_index):
        blocks = [tracker.blocks(torch.tensor(ids)) for ids in ([4, 1, 1], carrier_index)]
        return tracker.update(tracker.entries(blocks[0], values, None, carrier, blocks[1]))

    tracked = update([1, 4, 4, 4])
    np.testing.assert_allclose(tracked.value, [1.5, 1.0])
    tracked.as_loss(torch.tensor(0.0), torch.tensor([1.0, 6.0], dtype=torch.float64)).backward()
    np.testing.assert_allclose(gradient(carrier), [1.0, 2.0, 2.0, 2.0])
    kept = tracker.value.clone()
    for other in ([1, 1, 1, 1], [1, 4, 3, 3], [1, 2, 2, 2]):
        with pytest.raises(ValueError, match="same blocks as the value batch"):
            update(other)
    assert torch.equal(tracker.value, kept) and tracker.steps == 1


def test_bounds_hold_for_every_u_that_is_stored_or_read():
    tracker = fcco.InnerTracker(3, gamma=0.5, correction=3.0, bounds=(0.5, 2.0))
    assert tracker(torch.tensor([-1.0, 9.0, 1.0])).tolist() == [0.5, 2.0, 1.0]
    assert tracker.value[:, 0].tolist() == [0.5, 2.0, 1.0]
    far = torch.tensor([9.0, -9.0, 1.5])
    assert tracker(far, previous=-far).tolist() == [0.5, 2.0, 1.0]
    assert tracker.value[:, 0].tolist() == [2.0, 0.5, 2.0]
    tracker.set_values(torch.tensor([1]), torch.tensor([7.0]))
    assert tracker.value[1].item() == 2.0


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_evaluation_returns_fresh_means_and_changes_nothing(how):
    tracker = fcco.msvr_tracker(3, 0.3, on_nonfinite="skip")
    tracker(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]))
    kept = (tracker.value.clone(), tracker.seen.clone(), tracker.steps, tracker.skipped)
    index = torch.tensor([1, 2, 2, 0])
    g = torch.tensor([1.0, 3.0, 4.0, torch.nan], requires_grad=True)
    if how == "eval":
        tracker.eval()
        u = tracker(g, index, previous=g - 1)
        u.sum().backward()
        np.testing.assert_allclose(gradient(g), [1.0, 0.5, 0.5, 0.0])
    else:
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            u = tracker(g, index, previous=g - 1)
    assert u.tolist() == [1.0, 3.5]
    assert torch.equal(tracker.value, kept[0]) and torch.equal(tracker.seen, kept[1])
    assert (tracker.steps, tracker.skipped) == kept[2:]


@pytest.mark.parametrize("narrow", [lambda t: t.half(), lambda t: t.to(torch.bfloat16)])
def test_u_is_never_narrowed_but_widens_and_moves(narrow):
    tracker = fcco.ema_tracker(3, 0.1)
    tracker.set_values(None, torch.tensor([1.0001, 2.0003, 1e-9], dtype=torch.float64))
    kept, inside = tracker.value.clone(), torch.nn.Sequential(torch.nn.Linear(1, 1), tracker)
    narrow(inside)
    assert tracker.value.dtype == torch.float32 and torch.equal(tracker.value, kept)
    inside.double()
    assert tracker.seen.dtype == torch.bool and torch.equal(tracker.value, kept.double())
    inside.to("meta", torch.bfloat16)
    assert tracker.value.device.type == tracker.seen.device.type == "meta"
    assert tracker.value.dtype == torch.float64


@pytest.mark.parametrize("waits", [False, True])
def test_a_block_marked_unseen_starts_anew_also_after_many_steps(waits):
    """By hand or by loading an earlier state; a long run must not remember a mask that was full."""
    tracker = fcco.msvr_tracker(3, 0.5, 0.3, dtype=torch.float64)
    if waits:
        tracker.wait_for_close()
    fresh = copy.deepcopy(tracker.state_dict())
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def call(v, index=None):
        tracker(v, index, previous=v - 1)
        tracker.close()

    for _ in range(200):
        call(values)
    np.testing.assert_allclose(tracker.value[:, 0], values + 0.6)
    tracker.seen[1] = False
    call(10 * values)
    np.testing.assert_allclose(tracker.value[:, 0], [6.1, 20.0, 17.1])
    for _ in range(200):
        call(values)
    tracker.load_state_dict(fresh)
    call(10 * values[:2], torch.tensor([0, 1]))
    assert tracker.value[:, 0].tolist() == [10.0, 20.0, 0.0]
    assert tracker.seen.tolist() == [True, True, False]
