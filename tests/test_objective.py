"""Objectives: the value g0 + mean f_lambda(u), the gradient J^T y, calls and what they refuse."""

from __future__ import annotations

from typing import Any

import cvxpy as cp
import numpy as np
import pytest
import reference as ref
import torch
from problems import Point, TorchQuadratics, entries, take_step
from scipy.integrate import quad
from scipy.stats import norm

import fcco
from fcco.outer import TwoSidedHinge

DOUBLE = torch.float64
LAM = 0.4


def sgd(model: torch.nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


# The gradient is J^T y, the value g0 + mean f_lambda(u).

OUTERS = {
    "hinge": (fcco.outer.Hinge(1.5), 1, lambda v: 1.5 * cp.pos(v[0])),
    "two-sided": (TwoSidedHinge(0.1, 2), 2, lambda v: 2 * cp.pos(cp.abs(v[0] - v[1]) - 0.1)),
    "maximum": (fcco.outer.CVaR(1 / 3), 3, cp.max),
    "cvar": (fcco.outer.CVaR(0.5), 3, lambda v: cp.cvar(v, 0.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTERS)
@pytest.mark.parametrize("smoothing", [LAM, 0.0])
def test_gradient_is_transposed_jacobian_times_slope(name, smoothing):
    outer, dim, expression = OUTERS[name]
    problem = ref.Quadratics(dim=dim)
    data, model = TorchQuadratics(problem), Point(np.linspace(0.5, 1.5, 4))
    objective = fcco.methods.sonex(model, sgd(model), outer, 6, smoothing=smoothing, dim=dim)
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
    objective = fcco.methods.sonex(
        model, sgd(model), fcco.outer.Absolute(), number,
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


def term(outer, tracker, **options) -> fcco.terms.CoupledTerm:
    return fcco.terms.CoupledTerm(outer, tracker.double(), **options)


def two_terms(model: Counting, correction: float = 0.3) -> fcco.Compositional:
    terms = {
        "constraint": term(fcco.outer.Hinge(2.0), fcco.tracker.ema_tracker(2, 0.5), smoothing=0.2),
        "fair": term(
            fcco.outer.TwoSidedHinge(0.1),
            fcco.tracker.InnerTracker(2, 2, gamma=0.2, correction=correction),
            smoothing=0.1,
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


# Calls: what they accept, what they refuse and what they leave alone.


def state(objective: fcco.Compositional) -> list:
    """All that a call may change."""
    return [
        part
        for term in objective.terms.values()
        for part in (term.tracker.value.clone(), term.tracker.seen.clone(), term.step)
    ]


def same(left: list, right: list) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )


def hinge_objective(model: torch.nn.Module, number: int = 3, **options) -> fcco.Compositional:
    settings: dict[str, Any] = {"smoothing": 0.2, "gamma": 0.5, "correction": 0.0} | options
    return fcco.methods.sonex(model, sgd(model), fcco.outer.Hinge(), number, **settings)


def test_warm_up_averages_a_pass_and_value_reports_the_objective():
    problem = ref.Quadratics()
    data, model = TorchQuadratics(problem), Point(np.linspace(0.5, 1.5, 4))
    objective = fcco.methods.sonex(
        model, sgd(model), fcco.outer.Hinge(1.5), 6, smoothing=0.4, gamma=0.5
    )
    every = torch.cartesian_prod(torch.arange(6), torch.arange(10))
    shuffled = every[torch.randperm(60, generator=torch.Generator().manual_seed(0))]

    def batch(rows):  # unequal numbers of samples of a block per batch
        return lambda: data.values(model.w, rows[:, 0], rows[:, 1]), rows[:, 0]

    objective.warm_up(batch(rows) for rows in shuffled.split(7))
    w = model.w.detach().numpy()
    exact = np.array([problem.value(w, i, np.arange(10)) for i in range(6)])
    np.testing.assert_allclose(objective.term.tracker.value.numpy(), exact, rtol=0, atol=1e-13)
    assert objective.term.step == 0
    value = 1.5 * np.maximum(exact, 0).mean()
    assert objective.value().item() == pytest.approx(value)
    inner, index = batch(every[:2])  # no first visit any more: u moves by gamma only
    objective(inner, index)
    objective.close()
    fresh = problem.value(w, 0, np.arange(2))
    expected = (exact[0] + fresh) / 2
    np.testing.assert_allclose(objective.term.tracker.value[0].numpy(), expected, atol=1e-13)


def test_the_loss_in_eval_mode_is_that_of_the_batch():
    model = Point([1.0, 2.0, 3.0])
    objective = hinge_objective(model)
    take_step(objective, lambda: model.w)
    loss = objective.eval()(lambda: 10 * model.w)
    assert loss.item() == pytest.approx((10 * model.w - 0.1).mean().item())


WRONG = {
    "nothing": (lambda m: None, "given: NoneType"),
    "three": (lambda m: (m.w, m.w, m.w), "tuple of 3"),
    "loss is no tensor": (lambda m: (1.0, {"a": m.w, "b": m.w}), "must be a tensor but is: float"),
    "loss has two axes": (
        lambda m: (m.w.view(2, 1), {"a": m.w, "b": m.w}),
        r"one for each sample, shape \(N,\)",
    ),
    "no terms": (lambda m: m.w, "needs inner values by term but was given: Param"),
    "unknown term": (lambda m: {"a": m.w, "c": m.w}, r"given: \['a', 'c'\]"),
    "second of bad shape": (lambda m: {"a": m.w, "b": m.w[:1]}, r"must have shape \(2,\)"),
    "second not finite": (lambda m: {"a": m.w, "b": m.w / 0}, "NaN or infinite"),
    "measured number": (lambda m: {"a": m.w, "b": fcco.Measured(m.w, 1.0)}, "of two tensors"),  # type: ignore[arg-type]
    "empty": (lambda m: {}, "neither a loss nor any inner value"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_closure_is_refused_before_anything_changes(case):
    returns, message = WRONG[case]
    model = Point([1.0, -2.0])
    terms = {name: term(fcco.outer.Hinge(), fcco.tracker.ema_tracker(2, 0.5)) for name in "ab"}
    objective = fcco.Compositional(model, sgd(model), terms)
    take_step(objective, lambda: {"a": model.w, "b": model.w})
    before = state(objective)
    with pytest.raises((TypeError, ValueError), match=message):
        objective(lambda: returns(model))
    assert same(before, state(objective))


def test_wrong_arguments_are_refused():
    model = Point([1.0, -2.0])
    single = hinge_objective(model, 2)
    terms = {
        name: term(fcco.outer.Hinge(), fcco.tracker.ema_tracker(2, 0.5)) for name in ("inner", "b")
    }
    double = fcco.Compositional(model, sgd(model), terms)
    both = lambda: {"inner": model.w, "b": model.w}  # noqa: E731
    with pytest.raises(ValueError, match="of inner, but its keys are: group"):
        single(lambda: model.w, {"group": torch.tensor([1, 0])})
    with pytest.raises(
        ValueError, match="`index` must be a dict by term, of inner, b, but its keys are: c"
    ):
        double(both, {"c": torch.tensor([1, 0])})
    with pytest.raises(ValueError, match=r"same terms .* inner, b, but returned: b"):
        double(both, gradient=lambda: {"b": model.w})
    with pytest.raises(IndexError, match=r"\[0, 1\].*contains: 2"):
        single(lambda: model.w, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="same blocks"):
        single(lambda: model.w[:1], torch.tensor([0]), gradient=lambda: model.w[1:],
               gradient_index=torch.tensor([1]))  # fmt: skip
    with pytest.raises(ValueError, match="has the terms inner, b"):
        _ = double.term
    with pytest.raises(ValueError, match="at least one term"):
        fcco.Compositional(model, sgd(model), {})
    assert not any(t.tracker.seen.any() for t in (single.term, *double.terms.values()))


def test_a_dimension_that_does_not_fit_is_refused():
    model = Point([1.0])
    with pytest.raises(ValueError, match="dimension two or more"):
        fcco.methods.sonex(model, sgd(model), fcco.outer.CVaR(0.5), 1, dim=1, smoothing=0.1)
    with pytest.raises(ValueError, match="dimension 2 but the tracker"):
        term(fcco.outer.TwoSidedHinge(0.1), fcco.tracker.ema_tracker(3))


def test_annealed_smoothing_drives_the_envelope_and_is_restored():
    model, annealed = Point([0.6]), fcco.Annealed(1.0, 0.01, steps=4)
    objective = hinge_objective(model, 1, smoothing=annealed, gamma=1.0, read="new")
    for step in range(6):
        lam = 0.01 ** min(step / 4, 1)
        assert objective.term.smoothing == pytest.approx(lam)
        u = model.w.item()
        assert u > 0
        expected = u**2 / (2 * lam) if u < lam else u - lam / 2
        assert take_step(objective, lambda: model.w) == pytest.approx(expected)
        if step == 2:
            saved = objective.state_dict()
    other = hinge_objective(Point([0.3]), 1, smoothing=annealed)
    other.load_state_dict(saved)
    assert other.term.step == 3 and other.term.smoothing == pytest.approx(0.01**0.75)
    hard = hinge_objective(Point([0.3]), 1, smoothing=0.0).term
    assert hard.smoothed is hard.outer
