"""The proximal point as an optimizer, against hand computations."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fcco
from fcco.rules.proximal import proximal_step

A, B = np.array([[2.0, 0.3], [0.3, 1.0]]), np.array([0.5, -1.0])  # gradient A w - b


def gradient(tensor: torch.Tensor) -> Any:
    return tensor.grad


def parameter(values=(1.0, -2.0)) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def set_gradient(w: nn.Parameter) -> None:
    w.grad = torch.as_tensor(A @ w.detach().numpy() - B)


def round_by_hand(w: np.ndarray, steps: int, nu: float, eta: float) -> np.ndarray:
    z = w.copy()
    for _ in range(steps):
        z = (nu * z + eta * w - eta * nu * (A @ z - B)) / (eta + nu)
    return z


def test_proximal_step_minimises_its_quadratic():
    rng = np.random.default_rng(0)
    z, anchor, gradient = torch.as_tensor(rng.normal(size=(3, 4)))
    eta, nu = 0.3, 0.7
    x = proximal_step(z, anchor, gradient, eta, nu).requires_grad_()
    value = (
        (gradient * x).sum()
        + (x - anchor).square().sum() / (2 * nu)
        + (x - z).square().sum() / (2 * eta)
    )
    (slope,) = torch.autograd.grad(value, x)
    np.testing.assert_allclose(slope, 0, atol=1e-14)
    many = torch.func.vmap(lambda e: proximal_step(z, anchor, gradient, e, nu))(
        torch.tensor([0.3, 1.0], dtype=torch.float64)
    )
    np.testing.assert_allclose(many[0], x.detach(), atol=1e-14)


@pytest.mark.parametrize("inner_steps", [1, 4, lambda t: t + 2])
def test_rounds_equal_the_double_loop_by_hand(inner_steps: Any):
    """G_t = (w - z) / nu goes to the outer optimizer, here SGD with momentum."""
    nu, eta, lr = 0.4, 0.1, 0.2
    w = parameter()
    outer = torch.optim.SGD([w], lr=lr, momentum=0.5)
    optimizer = fcco.optim.ProximalPoint(outer, nu=nu, eta=eta, inner_steps=inner_steps)
    by_hand, velocity = w.detach().numpy().copy(), np.zeros(2)
    for number in range(5):
        length: Any = inner_steps(number) if callable(inner_steps) else inner_steps
        assert optimizer.round_length == length and optimizer.round_begins
        z = round_by_hand(by_hand, length, nu, eta)
        for k in range(length):
            assert (optimizer.inner_step, optimizer.round) == (k, number)
            set_gradient(w)
            optimizer.step()
            if 0 < k < length - 1:
                np.testing.assert_allclose(
                    w.detach(), round_by_hand(by_hand, k + 1, nu, eta), atol=1e-14
                )
        np.testing.assert_allclose(gradient(w), (by_hand - z) / nu, atol=1e-13)
        velocity = 0.5 * velocity + (by_hand - z) / nu
        by_hand = by_hand - lr * velocity
        np.testing.assert_allclose(w.detach(), by_hand, atol=1e-13)


def test_a_parameter_without_gradient_is_touched_by_neither_loop():
    """Weight decay of the outer optimizer included; one that had a gradient is pulled back."""
    used, unused, late = parameter(), parameter((5.0, 6.0)), parameter((1.0, 1.0))
    kept = unused.detach().clone()
    outer = torch.optim.AdamW([used, unused, late], lr=0.1, weight_decay=0.5)
    optimizer = fcco.optim.ProximalPoint(outer, nu=0.4, eta=0.1, inner_steps=2)
    late.grad = torch.ones(2, dtype=torch.float64)
    set_gradient(used)
    optimizer.step()
    z = late.detach().numpy().copy()
    np.testing.assert_allclose(z, 1 - 0.1 * 0.4 / 0.5)
    optimizer.zero_grad()
    set_gradient(used)
    optimizer.step()
    assert torch.equal(unused, kept) and unused.grad is None
    np.testing.assert_allclose(gradient(late), (1 - (0.4 * z + 0.1) / 0.5) / 0.4, atol=1e-14)


def test_a_group_added_in_the_middle_of_a_round_is_moved_by_both_loops():
    w, late = parameter(), parameter((1.0, 1.0))
    outer = torch.optim.SGD([w], lr=0.4)
    optimizer = fcco.optim.ProximalPoint(outer, nu=0.4, eta=0.1, inner_steps=2)
    set_gradient(w)
    optimizer.step()
    optimizer.add_param_group({"params": [late]})
    assert sum(len(group["params"]) for group in outer.param_groups) == 2
    late.grad = torch.ones(2, dtype=torch.float64)
    set_gradient(w)
    optimizer.step()
    np.testing.assert_allclose(late.detach(), 1 - 0.1 * 0.4 / 0.5, atol=1e-14)


def test_eta_follows_a_scheduler_and_groups_may_have_their_own_nu():
    one, two = parameter((1.0,)), parameter((1.0,))
    outer = torch.optim.SGD([{"params": [one]}, {"params": [two]}], lr=0.3)
    optimizer = fcco.optim.ProximalPoint(outer, nu=0.4, eta=0.1, inner_steps=5)
    optimizer.param_groups[1]["nu"] = 0.8
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    z = np.array([1.0, 1.0])
    for eta in (0.1, 0.05):
        one.grad = two.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
        schedule.step()
        nu = np.array([0.4, 0.8])
        z = (nu * z + eta - eta * nu) / (eta + nu)
        np.testing.assert_allclose([one.item(), two.item()], z, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nu": 0.0}, r"`ProximalPoint\(nu=...\)` must be positive and finite but is: 0.0"),
        ({"eta": -1.0}, r"`ProximalPoint\(eta=...\)` must be positive and finite but is: -1.0"),
        ({"inner_steps": 0}, r"`ProximalPoint\(inner_steps=...\)` must be at least 1 but is: 0"),
        ({"inner_steps": 2.5}, r"inner_steps=...\)` must be an integer but is: 2.5"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    outer = torch.optim.SGD([parameter()], lr=0.1)
    with pytest.raises(ValueError, match=message):
        fcco.optim.ProximalPoint(outer, **({"nu": 1.0, "eta": 1.0, "inner_steps": 1} | settings))


def test_a_bad_outer_optimizer_or_schedule_of_rounds_is_refused():
    with pytest.raises(TypeError, match=r"a torch.optim.Optimizer: list"):
        fcco.optim.ProximalPoint([parameter()], nu=1.0, eta=1.0, inner_steps=1)  # type: ignore[arg-type]
    w = parameter()
    outer = torch.optim.SGD([w], lr=0.1)
    optimizer = fcco.optim.ProximalPoint(outer, nu=1.0, eta=1.0, inner_steps=lambda t: 1 - t)
    set_gradient(w)
    optimizer.step()
    kept = w.detach().clone()
    with pytest.raises(ValueError, match=r"inner_steps=...\)` must be at least 1 but is: 0"):
        optimizer.step()
    assert torch.equal(w, kept)


def test_a_loaded_state_is_not_changed_by_the_run_that_goes_on_from_it():
    """Outer momentum included, which torch itself would share with the checkpoint."""

    saved: Any = None
    for _ in range(2):
        w = parameter()
        outer = torch.optim.SGD([w], lr=0.3, momentum=0.9)
        optimizer = fcco.optim.ProximalPoint(outer, nu=0.4, eta=0.1, inner_steps=2)
        if saved is not None:
            optimizer.load_state_dict(saved)
        reference = copy.deepcopy(saved)
        for _ in range(5):
            set_gradient(w)
            optimizer.step()
        assert str(saved) == str(reference) != str(optimizer.state_dict())
        saved = copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("steps", [0, 2, 3, 5])
def test_anchored_shows_the_point_between_rounds_and_leaves_no_trace(steps: int):
    def run(look: bool) -> tuple[list[float], list[float]]:
        w = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        frozen = torch.nn.Parameter(torch.tensor([7.0], dtype=torch.float64))
        outer = torch.optim.SGD([w, frozen], lr=0.3)
        optimizer = fcco.optim.ProximalPoint(outer, nu=0.5, eta=0.2, inner_steps=3)
        between, seen = w.tolist(), w.tolist()
        for _ in range(steps):
            optimizer.zero_grad()
            (w.square().sum() / 2).backward()
            optimizer.step()
            between = w.tolist() if optimizer.round_begins else between
            if look:
                with pytest.raises(KeyError), optimizer.anchored():
                    seen = w.tolist()
                    raise KeyError  # the parameters come back even then
                assert seen == between and frozen.item() == 7.0
        return seen, w.tolist()

    assert run(look=True)[1] == run(look=False)[1]
