"""Stationarity measures against closed forms, brute force and cvxpy."""

import math
import sys

import cvxpy as cp
import numpy as np
import pytest
import torch
from diagnostics_cases import DOUBLE, Curved, group_losses, separable

from fcco.diagnostics import (
    approximate_stationarity,
    hinge_stationarity,
    kkt,
    nearly_stationary_bounds,
    prox_linear,
    smallest_eigenvalue,
)
from fcco.outer import (
    Absolute,
    CVaRHinge,
    DeadZone,
    Hinge,
    LogTruncatedHinge,
    MoreauEnvelope,
    Pinball,
    TwoSidedHinge,
)

# Approximate stationarity: upper bound over a grid.


def test_approximate_stationarity_has_the_closed_form_of_the_separable_problem():
    w, inner, offset = separable(number=6, slope=2.0)
    grid = [1e-3, 0.03, 0.1, 10.0]
    result = approximate_stationarity(inner, Absolute(), 6, [w], grid, chunk=4)
    for (step, distance, gradient), expected in zip(result.table.tolist(), grid, strict=True):
        value = 2 * offset
        slope = (value / expected).clamp(-1, 1)
        assert step == expected
        assert distance == pytest.approx(float((expected * slope).abs().max()), rel=1e-12)
        assert gradient == pytest.approx(2 / 6 * float(slope.norm()), rel=1e-12)
    assert result.value == max(result.distance, result.gradient)
    assert result.value == result.table[:, 1:].max(1).values.min().item()
    assert "epsilon <=" in str(result)


@pytest.mark.parametrize("width", [None, 2])
def test_gradient_column_is_the_gradient_of_the_smoothed_objective(width):
    problem = Curved(1, 7, 4, width)
    outer = TwoSidedHinge(0.1, 2.0) if width else Hinge(2.0)
    for step in (0.01, 0.3):
        smooth = MoreauEnvelope(outer, step)
        objective = smooth(problem.inner(torch.arange(7))).mean() + problem.loss()
        expected = torch.autograd.grad(objective, problem.w)[0].norm().item()
        result = approximate_stationarity(
            problem.inner, outer, 7, [problem.w], step, loss=problem.loss, chunk=3
        )
        assert result.gradient == pytest.approx(expected, rel=1e-12)
        assert result.distance <= step * outer.lipschitz * (1 + 1e-12)


def test_default_grid_stops_below_the_weak_convexity():
    problem = Curved(2, 4, 3)
    result = approximate_stationarity(problem.inner, LogTruncatedHinge(0.5), 4, [problem.w])
    assert result.table[:, 0].max() < 0.5 < result.table[:, 0].max() * 10**0.5
    full = approximate_stationarity(problem.inner, Hinge(), 4, [problem.w])
    assert full.table[:, 0].tolist() == pytest.approx([10 ** (k / 2) for k in range(-12, 5)])
    with pytest.raises(ValueError, match=r"approximate_stationarity\(smoothing.*1/weak_convexity"):
        approximate_stationarity(problem.inner, LogTruncatedHinge(0.5), 4, [problem.w], [0.5])


# Exact approximate stationarity for two slopes.

OUTERS = [Hinge(3.0), Absolute(1.5), CVaRHinge(0.4, threshold=0.2), Pinball(0.3, scale=2.0)]
SLOPES = {
    Hinge: (0, 3, 0),
    Absolute: (-1.5, 1.5, 0),
    CVaRHinge: (0, 2.5, 0.2),
    Pinball: (-1.4, 0.6, 0),
}


def brute_residual(outer, values, jacobian, extra, radius):
    """q(radius) by cvxpy, straight from the definition in R^d."""
    low, high, kink = SLOPES[type(outer)]
    y = cp.Variable(len(values))
    constraints = [
        y >= np.where(values - kink > radius, high, low),
        y <= np.where(values - kink < -radius, low, high),
    ]
    target = cp.norm(jacobian.T @ y / len(values) + extra)
    cp.Problem(cp.Minimize(target), constraints).solve(solver=cp.CLARABEL)
    return float(np.asarray(target.value))


@pytest.mark.parametrize(
    ("outer", "dim"),  # fewer and more parameters than blocks
    [*zip(OUTERS, (3, 9, 9, 3), strict=True)],
    ids=lambda outer: type(outer).__name__,
)
def test_hinge_stationarity_is_the_brute_force_minimum(outer, dim):
    problem = Curved(dim, 6, dim)
    values, jacobian, extra = problem.dense()
    kink = SLOPES[type(outer)][2]

    def measure(radius=None):
        return hinge_stationarity(
            problem.inner, outer, 6, [problem.w], loss=problem.loss, radius=radius, tile=4
        )

    radii = np.sort(
        np.append(np.linspace(0, 1.2 * np.abs(values - kink).max(), 3), np.abs(values - kink)[:3])
    )
    residuals = [measure(float(radius)).gradient for radius in radii]
    assert np.all(np.diff(residuals) <= 1e-7), "q is non-increasing"
    expected = [brute_residual(outer, values, jacobian, extra, radius) for radius in radii]
    np.testing.assert_allclose(residuals, expected, atol=1e-6)

    exact = measure()
    # The smallest radius with q(radius) <= radius, by cvxpy alone.
    for radius, fits in ((exact.value - 1e-5, False), (exact.value + 1e-5, True)):
        assert (brute_residual(outer, values, jacobian, extra, radius) <= radius) == fits
    assert exact.value == max(exact.radius, exact.gradient)


@pytest.mark.parametrize("seed", range(2))
def test_grid_value_is_never_below_the_exact_one(seed):
    problem = Curved(seed, 8, 5)
    for outer in OUTERS:
        exact = hinge_stationarity(problem.inner, outer, 8, [problem.w], loss=problem.loss)
        grid = approximate_stationarity(problem.inner, outer, 8, [problem.w], loss=problem.loss)
        assert exact.value <= grid.value + 1e-8


def test_group_dro_solution_is_stationary():
    w, s, inner = group_losses(5)
    exact = hinge_stationarity(inner, CVaRHinge(0.4), 5, [w, s], loss=lambda: s)
    assert exact.value < 1e-7
    assert exact.num_free == 5
    torch.testing.assert_close(exact.multipliers, torch.ones(5, dtype=DOUBLE), atol=1e-6, rtol=0)
    moved = prox_linear(inner, CVaRHinge(0.4), 5, [w, s], 0.5, loss=lambda: s)
    assert moved.distance < 1e-7


def test_threshold_of_the_outer_function_may_be_a_parameter():
    problem = Curved(7, 6, 4)
    level = torch.tensor(0.2, dtype=DOUBLE, requires_grad=True)
    arguments = (6, [problem.w])
    for measure in (hinge_stationarity, approximate_stationarity):
        tensor = measure(problem.inner, CVaRHinge(0.4, level), *arguments)  # pyright: ignore
        assert (
            tensor.value == measure(problem.inner, CVaRHinge(0.4, threshold=0.2), *arguments).value
        )


# From approximate to nearly stationary, and the counterexample.


def test_separable_problem_obeys_the_bound():
    number, slope = 6, 2.0
    w, inner, offset = separable(number, slope, 0.01)
    epsilon = hinge_stationarity(inner, Absolute(), number, [w]).value
    delta = smallest_eigenvalue(inner, number, [w]).smallest
    assert delta == pytest.approx(slope**2)
    bounds = nearly_stationary_bounds(
        epsilon, number, delta, inner_lipschitz=slope, inner_smoothness=0.0, outer_lipschitz=1.0
    )
    # The minimiser is the stationary point; y = 0 shows that epsilon is max |g_i|.
    assert epsilon == pytest.approx(slope * float(offset.abs().max()))
    assert float(offset.norm()) <= bounds.distance
    assert bounds.distance == pytest.approx(4 * number / slope * epsilon)
    assert bounds.gradient == pytest.approx(epsilon)
    assert bounds.limit == math.inf


def test_bounds_have_the_constants_of_the_proof():
    bounds = nearly_stationary_bounds(
        0.01, 5, 2.0, inner_lipschitz=3.0, inner_smoothness=0.5, outer_lipschitz=4.0
    )
    assert bounds.distance == pytest.approx(4 * 3 * 5 * 0.01 / 2)
    assert bounds.gradient == pytest.approx((1 + 4 * 3 * 4 * 0.5 * 5 / 2) * 0.01)
    assert bounds.limit == pytest.approx(4 / (16 * 25 * 9 * 0.5))
    singular = nearly_stationary_bounds(
        0.01, 5, 0.0, inner_lipschitz=3.0, inner_smoothness=0.5, outer_lipschitz=4.0
    )
    assert (singular.distance, singular.gradient, singular.limit) == (math.inf, math.inf, 0.0)


def test_approximate_does_not_imply_nearly_without_a_singular_value(epsilon=1e-4):
    # F(w) = f(|w|^2 / 2), f(u) = max(u, -2u): w = 0 is the only stationary point.
    outer = Pinball(1 / 3, scale=3.0)
    w = torch.tensor([0.6, 0.8], dtype=DOUBLE).mul(math.sqrt(2 * epsilon)).requires_grad_()

    def inner(index):
        return (w.square().sum() / 2).expand(len(index))

    grid = approximate_stationarity(inner, outer, 1, [w], 1e6)
    assert grid.distance == pytest.approx(epsilon) and grid.gradient < 1e-3 * epsilon
    exact = hinge_stationarity(inner, outer, 1, [w])
    assert exact.value == pytest.approx(epsilon) and exact.gradient < 1e-12
    # At radius 0 the multiplier is f'(g) = 1: the distance of 0 to the subdifferential itself.
    subgradient = hinge_stationarity(inner, outer, 1, [w], radius=0.0).gradient
    assert subgradient == pytest.approx(math.sqrt(2 * epsilon))
    assert w.norm().item() == pytest.approx(math.sqrt(2 * epsilon))
    delta = smallest_eigenvalue(inner, 1, [w]).smallest
    size = w.norm().item()
    bounds = nearly_stationary_bounds(
        epsilon, 1, delta, inner_lipschitz=size, inner_smoothness=1.0, outer_lipschitz=2.0
    )
    assert bounds.limit < epsilon, "the theorem must not claim to apply here"


# Errors.


W = torch.ones(3, dtype=DOUBLE, requires_grad=True)


def plain(index):
    return W[index]


def infinite(index):
    return W[index] / torch.where(index == 2, 0.0, 1.0)


def steep(index):
    return (W[index] - 1).abs().sqrt()


grid = approximate_stationarity


@pytest.mark.parametrize("call, message", [
    (lambda: prox_linear(infinite, Hinge(), 3, [W], 1.0), r"\(inner.*block 2.*: inf"),
    (lambda: hinge_stationarity(lambda index: W[:2], Hinge(), 3, [W]), r"\(inner.*\(2,\)"),
    (lambda: grid(lambda i: W.detach()[i], Hinge(), 3, [W]), "without an autograd graph"),
    (lambda: grid(plain, Hinge(), 3, [W.detach()]), "no tensor that requires a gradient"),
    (lambda: kkt(lambda: W.sum(), plain, 0, [W]), r"kkt\(num_constraints=.*at least 1"),
    (lambda: hinge_stationarity(plain, Hinge(), 3, [W], tile=0), r"\(tile=.*at least 1"),
    (lambda: hinge_stationarity(plain, Hinge(), 3, [W], radius=-1), r"\(radius=.*at least 0"),
    (lambda: grid(plain, TwoSidedHinge(0.1), 3, [W]), "does not accept inner values of shape"),
    (lambda: hinge_stationarity(plain, DeadZone(0.1), 3, [W]), r"two slopes.*DeadZone"),
    (lambda: prox_linear(plain, LogTruncatedHinge(1.0), 3, [W], 1.0), "with prox_linear.*convex"),
    (lambda: hinge_stationarity(steep, Hinge(), 3, [W]), "inner or loss is not finite"),
    (lambda: prox_linear(plain, Hinge(), 3, [W], 1.0, loss=lambda: W), r"\(loss.*scalar"),
])  # fmt: skip
def test_errors_name_the_call_and_the_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_missing_scipy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(ImportError, match=r"`hinge_stationarity` needs scipy.*fcco\[solvers\]"):
        hinge_stationarity(lambda index: w[index] - 1, Hinge(), 2, [w])
