"""The tracker, its pure updates and its steps equal what is computed by hand in NumPy."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch
from problems import Point
from reference import tracked as by_hand

import fcco
from fcco.tracker import OpenStep, log_track, track, value_of


def gradient(tensor: torch.Tensor) -> Any:
    return tensor.grad


def test_a_measured_value_is_tracked_and_its_surrogate_carries_the_gradient():
    tracker = fcco.tracker.ema_tracker(3, 0.25, dtype=torch.float64)
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
    tracker = fcco.tracker.ema_tracker(5, 0.5, read="new", dtype=torch.float64)
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


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_evaluation_returns_fresh_means_and_changes_nothing(how):
    tracker = fcco.tracker.InnerTracker(3, gamma=0.3, on_nonfinite="skip")
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
    tracker = fcco.tracker.ema_tracker(3, 0.1)
    tracker.set_values(None, torch.tensor([1.0001, 2.0003, 1e-9], dtype=torch.float64))
    kept, inside = tracker.value.clone(), torch.nn.Sequential(torch.nn.Linear(1, 1), tracker)
    narrow(inside)
    assert tracker.value.dtype == torch.float32 and torch.equal(tracker.value, kept)
    inside.double()
    assert tracker.seen.dtype == torch.bool and torch.equal(tracker.value, kept.double())
    inside.to("meta", torch.bfloat16)
    assert tracker.value.device.type == tracker.seen.device.type == "meta"
    assert tracker.value.dtype == torch.float64


def test_a_block_marked_unseen_starts_anew_also_after_many_steps():
    """By hand or by loading an earlier state; a long run must not remember a mask that was full."""
    tracker = fcco.tracker.InnerTracker(3, gamma=0.5, correction=0.3, dtype=torch.float64)
    fresh = copy.deepcopy(tracker.state_dict())
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def call(v, index=None):
        tracker(v, index, previous=v - 1)

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


# The pure updates, and tracking in log space.


def in_logs(old, seen, fresh, previous, gamma, correction):
    """The same on exp, with the floor of a thousandth of the uncorrected average."""
    past = None if previous is None else np.exp(previous)
    before, after = by_hand(np.exp(old), seen, np.exp(fresh), past, gamma, correction)
    average = by_hand(np.exp(old), seen, np.exp(fresh), None, gamma, 0.0)[1]
    return np.log(before), np.log(np.maximum(after, 1e-3 * average))


def test_values_that_have_no_weight_cost_no_digits():
    """A difference with a far old or previous value would swallow the fresh one."""
    fresh, far = torch.tensor([[0.001], [-3e-5]]), torch.tensor([[500.0], [500.0]])
    for rule, old in ((track, [[1e8], [-3e6]]), (log_track, [[500.0], [-500.0]])):
        _, after = rule(torch.tensor(old), torch.tensor([[True], [True]]), fresh, None, 1.0, 0.0)
        assert torch.equal(after, fresh), rule
        _, after = rule(fresh, None, fresh, far, 0.3, 0.0)
        np.testing.assert_allclose(after, fresh, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_value_of_has_the_exact_value_and_the_other_gradient(dtype):
    u = torch.tensor([0.001, -1e-3, 5.0], dtype=dtype, requires_grad=True)
    g = torch.tensor([1e5, -3e7, 1.0], dtype=dtype, requires_grad=True)
    pulled = torch.compile(value_of, fullgraph=True, backend="eager")
    for function in (value_of, torch.func.vmap(value_of), pulled):
        found = function(u.detach(), g)
        assert torch.equal(found, u)
        (gradient,) = torch.autograd.grad((found**2).sum(), g)
        assert torch.equal(gradient, 2 * u.detach())


def test_the_loss_keeps_its_value_when_g_is_much_larger_than_u():
    """u - g + g would lose u: relative error 1 in float32."""
    tracker = fcco.tracker.InnerTracker(2, gamma=0.0, correction=1.0)
    tracker.set_values(None, torch.tensor([0.001, 0.003]))
    g = torch.tensor([1e6, -3e6], requires_grad=True)
    term = fcco.terms.CoupledTerm(fcco.outer.Absolute(2.0), tracker, smoothing=0.5)
    loss = term.loss(tracker.update(tracker.entries(tracker.blocks(), g, g.detach())))
    np.testing.assert_allclose(loss.item(), (0.001**2 + 0.003**2) / (2 * 0.5) / 2, rtol=1e-6)
    loss.backward()
    np.testing.assert_allclose(gradient(g), np.array([0.001, 0.003]) / 0.5 / 2, rtol=1e-6)


@pytest.mark.parametrize("gamma", [0.1, 0.9, 1.0, 0.0])
@pytest.mark.parametrize("sequence", [(500, -500, 500), (-500, -499, 498)])
def test_log_space_survives_values_whose_exponential_overflows(gamma, sequence):
    """float32 holds exp(88); the hand computation in float64 holds exp(709)."""
    correction = 1.0 if gamma == 0 else 0.0 if gamma == 1 else 0.5
    tracker = fcco.tracker.InnerTracker(1, gamma=gamma, correction=correction, log_space=True)
    u = np.array([[float(sequence[0])]])
    tracker.set_values(None, torch.tensor([u.item()]))
    for now, then in zip(sequence[1:], sequence[:-1], strict=True):
        fresh, past = np.array([[float(now)]]), np.array([[float(then)]])
        u = in_logs(u, np.array([[True]]), fresh, past, gamma, correction)[1]
        g = torch.tensor([float(now)], requires_grad=True)
        read = tracker(g, previous=torch.tensor([float(then)]))
        read.sum().backward()
        assert torch.isfinite(read).all() and g.grad is not None and torch.isfinite(g.grad).all()
        np.testing.assert_allclose(tracker.value, u, rtol=1e-4)


# One tracking step per optimizer step: accumulation, evaluation in between.

A = np.array([[1.0, 0.5], [-0.4, 1.2], [0.7, -0.9], [0.3, 0.8]])


def batch(rng: np.random.Generator, per_block: int = 4):
    """Samples of three of four blocks: ids, and offsets that belong to the samples."""
    ids = np.repeat(rng.choice(4, 3, replace=False), per_block)
    return ids, rng.normal(size=len(ids)) * 0.3


def values(w: torch.Tensor, ids, offsets) -> torch.Tensor:
    return (torch.as_tensor(A[ids]) @ w).square() + torch.as_tensor(offsets)


def split(ids, offsets, k):
    """k micro-batches that each hold samples of every block."""
    return [(ids[j::k], offsets[j::k]) for j in range(k)]


@pytest.mark.parametrize("log_space", [False, True])
def test_accumulated_steps_equal_one_batch_for_the_tracker_alone(log_space):
    """First visits too; the blocks of the whole step, not of a part, set the theory's weight."""
    rng = np.random.default_rng(0)
    options: Any = {"log_space": log_space, "dtype": torch.float64}
    options |= {"gamma": 0.3, "correction": "theory"}
    one, several = (fcco.tracker.InnerTracker(5, **options) for _ in range(2))
    for _ in range(20):
        ids = torch.as_tensor(rng.integers(0, 5, 7))
        fresh = torch.as_tensor(rng.normal(size=7))
        past = fresh + 0.1 * torch.as_tensor(rng.normal(size=7))
        one(fresh, ids, past)
        step = OpenStep()
        for part in (slice(0, 2), slice(2, 3), slice(3, 7)):
            blocks = several.blocks(ids[part])
            several.track(several.entries(blocks, fresh[part], past[part]), step)
        several.close(step.updates[several])
        np.testing.assert_allclose(several.value, one.value, rtol=0, atol=1e-13)
        assert torch.equal(several.seen, one.seen)
    assert several.steps == one.steps == 20


@pytest.mark.parametrize("at, correction", [("here", 0.7), ("average", 0.0), ("anchor", 0.5)])
def test_a_look_between_micro_batches_leaves_the_open_step_alone(at, correction):
    """Evaluations, also at other parameters: they come back, so that no parameter has moved.

    The graph of the batch stays valid too.
    """

    def once(look: bool):
        model = Point(np.array([0.8, -0.6]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        output = fcco.optim.OutputIterate(optimizer, "average")
        proximal = fcco.optim.ProximalPoint(optimizer, nu=0.5, eta=0.2, inner_steps=3)
        stepped, other = (proximal, proximal.anchored) if at == "anchor" else (
            optimizer, output.applied if at == "average" else contextlib.nullcontext
        )  # fmt: skip
        tracker = fcco.tracker.InnerTracker(
            4, gamma=0.3, correction=correction, dtype=torch.float64
        )
        term = fcco.terms.CoupledTerm(fcco.outer.Hinge(2.0), tracker, smoothing=3.0)
        objective = fcco.Compositional(model, stepped, term)
        rng, moved = np.random.default_rng(3), 0.0
        for step in range(5):
            for ids, offsets in split(*batch(rng), 2):
                inner = lambda i=ids, o=offsets: values(model.w, i, o)  # noqa: E731
                loss, here = objective(inner, torch.as_tensor(ids)), model.w.detach().clone()
                if look and step:
                    with other(), torch.no_grad():
                        objective(inner, torch.as_tensor(ids))
                        moved += (model.w - here).abs().sum().item()
                    assert torch.equal(model.w, here)
                    objective.eval()
                    objective(lambda: values(model.w, [0, 1], [0.0, 0.0]), torch.tensor([0, 1]))
                    objective.train()
                loss.backward()
            stepped.step()
            stepped.zero_grad()
        assert tracker.steps == 5 and (moved > 0.01) == (look and at != "here")
        return torch.cat([tracker.value[:, 0], model.w.detach()])

    assert torch.equal(once(False), once(True))
