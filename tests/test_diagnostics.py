"""Spectra and KKT residuals against independent computations."""

import sys
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
import torch
from diagnostics_cases import DOUBLE, Curved, gram, group_losses

from fcco import diagnostics
from fcco.diagnostics import constraint_condition, eigenvalues, kkt
from fcco.outer import Hinge, MoreauEnvelope

# The Gram matrix.


def network(number, width, dtype=DOUBLE):
    """Group means of a small network's outputs: several layers, one of them unused by group 0."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh()
    ).to(dtype)
    heads = torch.nn.Linear(8, width).to(dtype)
    data = torch.randn(number, 5, 3).to(dtype)

    def inner(index):
        features = model(data[index]).square().mean(1)
        used = torch.where(index.unsqueeze(1) == 0, features[:, :width], heads(features))
        return used.squeeze(1)

    return inner, [*model.parameters(), *heads.parameters()]


@pytest.mark.parametrize("width", [1, 2])
def test_gram_matrix_is_the_product_of_dense_jacobians(width, monkeypatch):
    monkeypatch.setattr(diagnostics, "_CHUNK", 3)
    inner, parameters = network(7, width)
    options: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
    rows = [
        torch.autograd.grad(value, parameters, **options)
        for value in inner(torch.arange(7)).reshape(-1)
    ]
    dense = torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])
    matrix = gram(inner, 7, parameters)
    torch.testing.assert_close(matrix, dense @ dense.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [None, 2])
def test_gram_matrix_agrees_with_forward_free_jacobian(width):
    problem = Curved(5, 6, 9, width)
    jacobian = torch.from_numpy(problem.dense()[1]).reshape(-1, 9)
    expected = torch.linalg.svdvals(jacobian).square()
    smallest, *_, largest = eigenvalues(problem.inner, 6, [problem.w]).tolist()
    assert largest == pytest.approx(float(expected[0]), rel=1e-10)
    if width is None:
        assert smallest == pytest.approx(float(expected[-1]), rel=1e-8)
    else:  # 12 rows in R^9
        assert 0 <= smallest < 1e-10 * largest


def test_threshold_completes_the_group_dro_spectrum():
    number = 6
    w, s, inner = group_losses(number)
    expected = torch.tensor([1.0] * (number - 1) + [number], dtype=DOUBLE)
    torch.testing.assert_close(torch.linalg.eigvalsh(gram(inner, number, [w, s])), expected)
    assert eigenvalues(inner, number, [w])[0] < 1e-12, "the gradients w - e_i sum to zero"


# The condition on constraints.


def test_constraint_condition_takes_all_constraints_at_infeasible_points_only():
    matrix = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.5, 0.0], [1.0, 1.0, 1.0]], dtype=DOUBLE)
    w = torch.tensor([1.0, -1.0, -3.0], dtype=DOUBLE, requires_grad=True)
    result = constraint_condition(lambda index: matrix[index] @ w - 0.1, 3, [w])
    assert result == pytest.approx((float(torch.linalg.svdvals(matrix)[-1]), 2.0))
    assert constraint_condition(lambda index: matrix[index] @ w - 10, 3, [w]) is None


# KKT residuals.


def box_problem(point, number=4, goal=1.0, bound=0.3):
    """S3: min |w - goal|^2 / 2 subject to w_i <= bound; w* = bound, nu* = goal - bound."""
    w = torch.full((number,), point, dtype=DOUBLE, requires_grad=True)
    return w, (lambda: (w - goal).square().sum() / 2), (lambda index: w[index] - bound)


def implied_multipliers(outer, inner, number):
    """Those of the penalty (1/m) sum_i f(g_i): f'(g_i) / m."""
    return outer.gradient(inner(torch.arange(number)).detach()) / number


def test_smoothed_penalty_solution_has_the_predicted_residuals():
    number, penalty, smoothing, best = 4, 8.0, 0.05, 0.7
    shrink = 1 / (1 + smoothing * number)
    w, loss, inner = box_problem(0.3 + best * smoothing * number * shrink)
    implied = implied_multipliers(MoreauEnvelope(Hinge(penalty), smoothing), inner, number)
    expected = torch.full((number,), best * shrink, dtype=DOUBLE)
    for multipliers in (implied, None):
        result = kkt(loss, inner, number, [w], multipliers=multipliers)
        torch.testing.assert_close(result.multipliers, expected, rtol=1e-9, atol=0)
        assert result.stationarity < 1e-9
        assert result.feasibility == pytest.approx(smoothing * number * best * shrink)
        assert result.complementarity == pytest.approx(result.feasibility * best * shrink)


def test_non_convex_constraint_has_its_known_multiplier():
    # S3b: min |w - a|^2 / 2 subject to 1 - |w|^2 <= 0 with |a| = 0.5; nu* = (1 - |a|) / 2.
    goal = torch.tensor([0.3, 0.4], dtype=DOUBLE)
    w = (2 * goal).requires_grad_()
    inner = lambda index: (1 - w.square().sum()).expand(len(index))  # noqa: E731
    result = kkt(lambda: (w - goal).square().sum() / 2, inner, 1, [w])
    assert result.multipliers.item() == pytest.approx(0.25)
    assert max(result.stationarity, result.feasibility, result.complementarity) < 1e-8
    wrong = kkt(
        lambda: (w - goal).square().sum() / 2, inner, 1, [w], multipliers=torch.tensor([0.5])
    )
    assert wrong.stationarity == pytest.approx(0.5)  # |(w - a) - w| = |a|
    w = (3 * goal).requires_grad_()  # the constraint holds with 1.25 to spare
    spare = kkt(lambda: w.sum(), inner, 1, [w], multipliers=torch.tensor([0.5]))
    assert spare.complementarity == pytest.approx(0.625) and spare.feasibility == 0


@pytest.mark.parametrize("seed", range(2))
def test_best_multipliers_are_those_of_cvxpy(seed):
    problem = Curved(seed + 20, 7, 4)
    values, jacobian, extra = problem.dense()
    values, inner = values + 0.2, lambda index: problem.inner(index) + 0.2
    inactive = values < -1e-3
    assert inactive.any() and (values > 0).any()
    result = kkt(problem.loss, inner, 7, [problem.w])
    nu = cp.Variable(7, nonneg=True)
    distance = cp.norm(jacobian.T @ nu + extra)
    cp.Problem(cp.Minimize(distance), [nu[inactive] == 0]).solve(solver=cp.CLARABEL)
    assert result.stationarity == pytest.approx(float(np.asarray(distance.value)), abs=1e-6)
    assert bool((result.multipliers >= 0).all())
    assert bool((result.multipliers[torch.from_numpy(inactive)] == 0).all())
    assert result.feasibility == pytest.approx(max(values.max(), 0))
    assert result.complementarity == pytest.approx(
        np.abs(values * result.multipliers.numpy()).max()
    )


# Errors.


W = torch.ones(3, dtype=DOUBLE, requires_grad=True)


def plain(index):
    return W[index]


def infinite(index):
    return W[index] / torch.where(index == 2, 0.0, 1.0)


def steep(index):
    return (W[index] - 1).abs().sqrt()


def residuals(inner=plain, loss=lambda: W.sum(), number=3, parameters=(W,), **options):
    return kkt(loss, inner, number, parameters, **options)


@pytest.mark.parametrize("call, message", [
    (lambda: residuals(infinite), r"\(inner.*finite.*block 2"),
    (lambda: residuals(lambda index: W[:2]), r"\(inner.*\(2,\)"),
    (lambda: residuals(lambda index: W.detach()[index]), "without an autograd graph"),
    (lambda: residuals(parameters=[W.detach()]), "no tensor that requires a gradient"),
    (lambda: residuals(number=0), r"kkt\(num_inner=.*at least 1"),
    (lambda: residuals(steep), "inner or loss is not finite"),
    (lambda: residuals(loss=lambda: W), r"\(loss.*scalar"),
    (lambda: residuals(multipliers=torch.ones(2)), r"of shape \(3,\)"),
    (lambda: residuals(multipliers=-torch.ones(3)), "non-negative"),
    (lambda: residuals(lambda index: W[index, None].expand(-1, 2)), "d1 = 2"),
])  # fmt: skip
def test_errors_name_the_call_and_the_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_missing_scipy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"`kkt` needs scipy: pip install scipy"):
        residuals()
