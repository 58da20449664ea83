"""The loss of an objective: its value is g0 + mean f_lambda(u), its gradient J^T y."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
import reference as ref
import torch
from problems import Point, TorchQuadratics, entries, take_step
from scipy.integrate import quad
from scipy.stats import norm

import fcco

DOUBLE = torch.float64
LAM = 0.4


def sgd(model: torch.nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


# The gradient is J^T y, the value g0 + mean f_lambda(u).

OUTERS = {
    "hinge": (fcco.Hinge(1.5), 1, lambda v: 1.5 * cp.pos(v[0])),
    "two-sided": (fcco.TwoSidedHinge(0.1, 2), 2, lambda v: 2 * cp.pos(cp.abs(v[0] - v[1]) - 0.1)),
    "maximum": (fcco.Maximum(), 3, cp.max),
    "cvar": (fcco.CVaR(0.5), 3, lambda v: cp.cvar(v, 0.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTERS)
@pytest.mark.parametrize("smoothing", [LAM, 0.0])
def test_gradient_is_transposed_jacobian_times_slope(name, smoothing):
    outer, dim, expression = OUTERS[name]
    problem = ref.Quadratics(dim=dim)
    data, model = TorchQuadratics(problem), Point(np.linspace(0.5, 1.5, 4))
    objective = fcco.sonex(model, sgd(model), outer, 6, smoothing=smoothing, dim=dim)
    u = np.random.default_rng(3).normal(size=(6, dim))
    objective.term.tracker.set_values(None, torch.as_tensor(u))
    drawn = problem.draw(np.random.default_rng(5), 3, 2)
    blocks, samples = entries(drawn, 1)

    def means(w):
        return torch.stack(
            [data.values(w, blocks, samples)[2 * k : 2 * k + 2].mean(0) for k in range(3)]
        )

    jacobian = torch.func.jacrev(means)(model.w.detach())  # (3, d1, d)
    expected, value = torch.zeros(4, dtype=DOUBLE), 0.0
    for k, (i, _, _) in enumerate(drawn):
        v = cp.Variable(dim)
        cost, fit = expression(v), 0.0
        if smoothing:
            fit = cp.sum_squares(u[i] - v) / (2 * smoothing)
            value += cp.Problem(cp.Minimize(cost + fit)).solve(solver=cp.CLARABEL) / 3  # type: ignore[operator]
            slope = (u[i] - v.value) / smoothing  # type: ignore[operator]
        else:  # all functions are piecewise linear: a difference inside a piece is exact
            points = u[i] + 1e-6 * np.concatenate([np.zeros((1, dim)), np.eye(dim)])
            at = [(setattr(v, "value", x), cost.value)[1] for x in points]
            value += at[0] / 3
            slope = [(y - at[0]) / 1e-6 for y in at[1:]]
        expected += jacobian[k].T @ torch.as_tensor(np.array(slope, dtype=float).ravel()) / 3
    loss = objective(lambda: (data.loss(model.w), data.values(model.w, blocks, samples)), blocks)
    loss.backward()
    assert model.w.grad is not None
    torch.testing.assert_close(
        model.w.grad, expected + model.w.detach() - data.m, atol=2e-6, rtol=0
    )
    assert loss.item() == pytest.approx(data.loss(model.w).item() + value, abs=1e-6)
    assert expected.norm() > 0.1


@pytest.mark.parametrize("read, independent", [("old", False), ("new", False), ("new", True)])
def test_bias_of_the_estimator(read, independent):
    """g(w; xi) = xi w has E J = 0: the target is 0, and the new u with one batch misses it."""
    number, gamma, lam, u0 = 40_000, 0.4, 1.0, 0.5
    generator = torch.Generator().manual_seed(0)
    xi, other = torch.randn(2, number, generator=generator, dtype=DOUBLE)
    model = Point(torch.ones(1))
    objective = fcco.sonex(
        model, sgd(model), fcco.Absolute(), number,
        smoothing=lam, gamma=gamma, correction=0.0, read=read,
    )  # fmt: skip
    objective.term.tracker.set_values(None, torch.full((number,), u0))
    second = (lambda: other * model.w) if independent else None
    objective(lambda: xi * model.w, gradient=second).backward()
    assert model.w.grad is not None
    bias = 0.0
    if read == "new" and not independent:
        slope = lambda x: np.clip(((1 - gamma) * u0 + gamma * x) / lam, -1, 1)  # noqa: E731
        bias = quad(lambda x: x * slope(x) * norm.pdf(x), -8, 8)[0]
        assert bias > 0.3
    assert model.w.grad.item() == pytest.approx(bias, abs=4 / number**0.5)


# Several terms, one closure, one forward pass.


class Counting(torch.nn.Module):
    """Two coupled quantities of one parameter vector, and a count of forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.calls = torch.nn.Parameter(torch.tensor([0.5, -1.0], dtype=DOUBLE)), 0

    def forward(self) -> dict[str, torch.Tensor]:
        self.calls += 1
        rates = torch.stack([self.w, 2 * self.w.square()], dim=1)
        return {"constraint": self.w * 3 - 0.2, "fair": rates}


def term(outer, tracker, **options) -> fcco.CoupledTerm:
    return fcco.CoupledTerm(outer, tracker.double(), **options)


def two_terms(model: Counting, correction: float = 0.3) -> fcco.Compositional:
    terms = {
        "constraint": term(fcco.Hinge(2.0), fcco.ema_tracker(2, 0.5), smoothing=0.2, weight=3.0),
        "fair": term(
            fcco.TwoSidedHinge(0.1), fcco.msvr_tracker(2, 0.2, correction, dim=2), smoothing=0.1
        ),
    }
    return fcco.Compositional(model, sgd(model), terms)


@pytest.mark.parametrize("correction, gradient, forward_passes", [
    (0.0, False, [1, 1]), (0.3, False, [1, 2]), (0.0, True, [2, 2]), (0.3, True, [2, 3]),
])  # fmt: skip
def test_one_closure_serves_all_terms(correction, gradient, forward_passes):
    model = Counting()
    objective = two_terms(model, correction)
    for expected in forward_passes:
        before = model.calls
        take_step(objective, model, gradient=model if gradient else None)
        assert model.calls - before == expected
    before = model.calls
    objective.eval()(model)
    with torch.no_grad():
        objective.train()(model)
    assert model.calls - before == 2, "evaluation needs no correction"


def test_terms_add_up_and_keep_their_own_trackers():
    model, copies = Counting(), {"constraint": Counting(), "fair": Counting()}
    together = two_terms(model)
    alone = {
        name: fcco.Compositional(copy, sgd(copy), two_terms(copy).terms[name])
        for name, copy in copies.items()
    }
    for _ in range(4):
        parts = [alone[name](lambda name=name: copies[name]()[name]) for name in alone]
        sum(parts).backward()  # type: ignore[union-attr]
        expected = sum(copy.w.grad for copy in copies.values()) + 2 * model.w.detach()  # type: ignore[arg-type]
        loss = together(lambda: (model.w.square().sum(), model()))
        loss.backward()
        torch.testing.assert_close(model.w.grad, expected, rtol=0, atol=1e-14)
        value = sum(part.item() for part in parts) + model.w.square().sum().item()
        assert loss.item() == pytest.approx(value, abs=1e-14)
        for each in (model, *copies.values()):
            each.w.grad = expected.clone()
        for objective in (together, *alone.values()):
            objective.optimizer.step()  # type: ignore[union-attr]
            objective.optimizer.zero_grad()  # type: ignore[union-attr]
    for name, single in alone.items():
        assert torch.equal(together.terms[name].tracker.value, single.term.tracker.value)


def test_an_absent_term_is_left_alone():
    model = Counting()
    objective = two_terms(model)
    take_step(objective, model)
    fair, kept = objective.terms["fair"].tracker, objective.terms["fair"].tracker.value.clone()
    take_step(objective, lambda: {"constraint": model()["constraint"]})
    assert torch.equal(fair.value, kept) and fair.steps == 1
    assert objective.terms["constraint"].tracker.steps == 2
    loss = objective(lambda: (model.w.sum(), {}))
    assert loss.item() == model.w.sum().item()


def test_loss_may_be_a_scalar_or_one_per_sample():
    model = Counting()
    losses = lambda: model.w.square() * torch.tensor([1.0, 3.0])  # noqa: E731
    vector = two_terms(model)(lambda: (losses(), model()))
    scalar = two_terms(model)(lambda: (losses().mean(), model()))
    assert vector.item() == scalar.item()
    assert torch.equal(*(torch.autograd.grad(loss, model.w)[0] for loss in (vector, scalar)))
