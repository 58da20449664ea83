"""The pure updates, and tracking in log space, equal hand computations in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from reference import tracked as by_hand

import fcco
from fcco.tracker import log_track, track, value_of

OLD = np.array([[1.0, -0.4], [-2.0, 0.3], [7.0, 0.9]])
SEEN = np.array([[True], [True], [False]])
FRESH = np.array([[0.5, 0.8], [-1.0, -0.6], [3.0, 0.2]])
PREVIOUS = np.array([[0.2, 0.9], [-1.3, -0.1], [9.0, 0.4]])


def gradient(tensor: torch.Tensor) -> Any:
    return tensor.grad


def in_logs(old, seen, fresh, previous, gamma, correction):
    """The same on exp, with the floor of a thousandth of the uncorrected average."""
    past = None if previous is None else np.exp(previous)
    before, after = by_hand(np.exp(old), seen, np.exp(fresh), past, gamma, correction)
    average = by_hand(np.exp(old), seen, np.exp(fresh), None, gamma, 0.0)[1]
    return np.log(before), np.log(np.maximum(after, 1e-3 * average))


def as_tensors(*arrays) -> list[Any]:
    return [None if a is None else torch.as_tensor(a) for a in arrays]


RULES = [(track, by_hand), (log_track, in_logs)]
WEIGHTS = [(0.3, 0.4), (0.8, 2.5), (1.0, 0.0), (0.0, 1.0)]


@pytest.mark.parametrize(("rule", "hand"), RULES)
@pytest.mark.parametrize("previous", [None, PREVIOUS])
@pytest.mark.parametrize("number", [float, torch.tensor])
@pytest.mark.parametrize("compiled", [False, True])
def test_pure_updates_equal_the_formula(rule, hand, previous, number, compiled):
    if compiled:
        torch.compiler.reset()
        run = torch.compile(rule, fullgraph=True, backend="eager")
    else:
        run = rule
    for weights in WEIGHTS:
        found = run(*as_tensors(OLD, SEEN, FRESH, previous), *map(number, weights))
        expected = hand(OLD, SEEN, FRESH, previous, *weights)
        np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("rule", "hand"), RULES)
def test_pure_updates_run_under_vmap_over_settings_and_over_tables(rule, hand):
    gammas, corrections = torch.tensor(WEIGHTS, dtype=torch.float64).T
    tensors = as_tensors(OLD, SEEN, FRESH, PREVIOUS)
    many = torch.func.vmap(lambda g, c: rule(*tensors, g, c)[1])(gammas, corrections)
    tables = torch.stack([tensors[0], 2 * tensors[0]])
    both = torch.func.vmap(lambda old: rule(old, *tensors[1:], 0.3, 0.4)[1])(tables)
    for found, weights in zip(many, WEIGHTS, strict=True):
        np.testing.assert_allclose(found, hand(OLD, SEEN, FRESH, PREVIOUS, *weights)[1], atol=1e-12)
    for found, factor in zip(both, (1, 2), strict=True):
        expected = hand(factor * OLD, SEEN, FRESH, PREVIOUS, 0.3, 0.4)[1]
        np.testing.assert_allclose(found, expected, atol=1e-12)


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
    tracker = fcco.msvr_tracker(2, 0.0, 1.0)
    tracker.set_values(None, torch.tensor([0.001, 0.003]))
    g = torch.tensor([1e6, -3e6], requires_grad=True)
    term = fcco.CoupledTerm(fcco.Absolute(2.0), tracker, smoothing=0.5)
    loss = term.loss(tracker.update(tracker.entries(tracker.blocks(), g, g.detach())))
    np.testing.assert_allclose(loss.item(), (0.001**2 + 0.003**2) / (2 * 0.5) / 2, rtol=1e-6)
    loss.backward()
    np.testing.assert_allclose(gradient(g), np.array([0.001, 0.003]) / 0.5 / 2, rtol=1e-6)


@pytest.mark.parametrize("correction", [0.0, 0.2, "auto"])
def test_log_space_equals_tracking_the_exponentials(correction):
    """With repeated ids; the gradient of log u is that of g over u."""
    rng = np.random.default_rng(1)
    make = lambda log: fcco.InnerTracker(  # noqa: E731
        6, gamma=0.3, correction=correction, log_space=log, dtype=torch.float64
    )
    logs, plain = make(True), make(False)
    level, last = rng.normal(size=6), None
    for _ in range(60):
        last, level = level, level + 0.1 * rng.normal(size=6)
        ids = np.sort(rng.choice(6, 4))
        noise = 0.2 * rng.normal(size=4)
        fresh, past = level[ids] + noise, last[ids] + noise
        a, b = torch.as_tensor(fresh).requires_grad_(), torch.as_tensor(fresh).requires_grad_()
        index = torch.as_tensor(ids)
        nu = logs(a, index, torch.as_tensor(past))
        u = plain(b.exp(), index, torch.as_tensor(np.exp(past)))
        np.testing.assert_allclose(nu.detach().exp(), u.detach(), rtol=1e-10)
        nu.square().sum().backward()
        u.log().square().sum().backward()
        np.testing.assert_allclose(gradient(a), gradient(b), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(logs.value.exp(), plain.value, rtol=1e-10)


@pytest.mark.parametrize("gamma", [0.1, 0.9, 1.0, 0.0])
@pytest.mark.parametrize("sequence", [(500, -500, 500), (-500, -499, 498)])
def test_log_space_survives_values_whose_exponential_overflows(gamma, sequence):
    """float32 holds exp(88); the hand computation in float64 holds exp(709)."""
    correction = 1.0 if gamma == 0 else 0.0 if gamma == 1 else 0.5
    tracker = fcco.InnerTracker(1, gamma=gamma, correction=correction, log_space=True)
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
