"""The prox-linear step against cvxpy and closed forms."""

import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from diagnostics_cases import Curved, separable

from fcco.diagnostics import prox_linear
from fcco.outer import (
    Absolute,
    CVaRHinge,
    DeadZone,
    Hinge,
    MoreauEnvelope,
    SquaredHinge,
    TwoSidedHinge,
)


def cvxpy_outer(outer, u):
    """The outer functions in the words of cvxpy; u has one row per block."""
    match outer:
        case Hinge():
            return outer.scale * cp.pos(u)
        case Absolute():
            return outer.scale * cp.abs(u)
        case CVaRHinge():
            return cp.pos(u - outer.threshold) / outer.ratio
        case DeadZone():
            return outer.scale * cp.pos(cp.abs(u) - outer.width)
        case SquaredHinge():
            return outer.scale / 2 * cp.square(cp.pos(u))
        case TwoSidedHinge():
            return outer.scale * cp.pos(cp.abs(u[:, 0] - u[:, 1]) - outer.tolerance)
        case MoreauEnvelope():  # of w |.|: Huber
            zone = outer.smoothing
            return cp.huber(u, zone) / (2 * zone)  # pyright: ignore[reportArgumentType]
    raise NotImplementedError(outer)


PROX_OUTERS = [
    Hinge(3.0),
    Absolute(1.5),
    CVaRHinge(0.4, threshold=0.2),
    DeadZone(0.2, 2.0),
    SquaredHinge(5.0),
    TwoSidedHinge(0.1, 2.0),
    MoreauEnvelope(Absolute(), 0.3),
]


@pytest.mark.parametrize(
    ("outer", "dim", "step"),
    [(outer, *((3, 0.7), (9, 0.05), (9, 20.0))[k % 3]) for k, outer in enumerate(PROX_OUTERS)],
)
def test_prox_linear_solves_its_subproblem(outer, dim, step):
    problem = Curved(dim + 10, 6, dim, 2 if outer.dim == 2 else None)
    values, jacobian, extra = problem.dense()
    move = cp.Variable(dim)
    if outer.dim == 2:
        columns = [values[:, k] + jacobian[:, k] @ move for k in range(2)]
        linearised = cp.vstack(columns).T
    else:
        linearised = values + jacobian @ move
    model = cp.sum(cvxpy_outer(outer, linearised)) / 6 + extra @ move
    model += cp.sum_squares(move) / (2 * step)
    cp.Problem(cp.Minimize(model)).solve(
        solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10
    )
    assert move.value is not None
    result = prox_linear(problem.inner, outer, 6, [problem.w], step, loss=problem.loss, tile=4)
    scale = 1 + float(np.linalg.norm(move.value))
    np.testing.assert_allclose(result.displacement[0].numpy(), move.value, atol=2e-5 * scale)
    assert result.distance == pytest.approx(np.linalg.norm(result.displacement[0].numpy()))
    assert result.stationarity == pytest.approx(result.distance / step)
    assert 0 <= result.gap < 1e-9 * scale
    # y must be a subgradient of f at the linearised value: f is above its tangent there.
    reached = torch.from_numpy(values + jacobian @ result.displacement[0].numpy())
    for shift in (-0.5, 0.3):
        ahead = outer(reached + shift)
        tangent = (result.multipliers * shift).reshape(6, -1).sum(1)
        assert bool((ahead >= outer(reached) + tangent - 1e-4).all())


def test_prox_linear_is_the_proximal_point_where_the_inner_functions_are_affine():
    # prox of (1/n) sum slope |w_i - c_i| is soft thresholding of w - c by t slope / n.
    number, slope, step = 6, 2.0, 0.4
    w, inner, offset = separable(number, slope, 0.2)
    result = prox_linear(inner, Absolute(), number, [w], step)
    reached = offset + result.displacement[0]
    expected = torch.nn.functional.softshrink(offset, step * slope / number)
    assert (expected == 0).any() and (expected != 0).any(), "both pieces must occur"
    torch.testing.assert_close(reached, expected, atol=1e-9, rtol=0)
    assert result.stationarity == pytest.approx(float((offset - expected).norm()) / step)


def test_prox_linear_gap_bounds_the_error_when_stopped_early():
    problem = Curved(3, 6, 4)
    exact = prox_linear(problem.inner, DeadZone(0.2, 2.0), 6, [problem.w], 5.0)
    early = prox_linear(problem.inner, DeadZone(0.2, 2.0), 6, [problem.w], 5.0, max_iterations=3)
    error = (early.displacement[0] - exact.displacement[0]).norm().item()
    assert 1e-4 < error <= math.sqrt(2 * 5.0 * early.gap) + 1e-6


def nearly_parallel(number, dim, seed=0):
    """Gradients that differ little, so that the Gram matrix is ill conditioned."""
    problem = Curved(seed, number, dim)
    problem.slopes[1:] = problem.slopes[:1] + 0.1 * problem.slopes[1:]
    return problem


def test_iterative_and_exact_solvers_agree_on_an_ill_conditioned_problem():
    # A dead zone of width 0 is the absolute value, but has no `dual_zone`.
    problem = nearly_parallel(12, 20)
    exact = prox_linear(problem.inner, Absolute(2.0), 12, [problem.w], 5.0)
    iterative = prox_linear(
        problem.inner, DeadZone(0.0, 2.0), 12, [problem.w], 5.0, max_iterations=4000
    )
    assert exact.gap < 1e-11 and iterative.gap < 1e-11
    torch.testing.assert_close(iterative.displacement, exact.displacement, atol=1e-8, rtol=0)


@pytest.mark.parametrize(("dim", "step"), [(2, 1.0), (30, 1e4), (150, 1e-4)])
def test_box_program_reaches_rounding_level_at_every_scale(dim, step):
    problem = nearly_parallel(80, dim, seed=dim)
    problem.offsets *= 30  # large against the curvature: most multipliers sit at a bound
    for outer in (Hinge(5.0), CVaRHinge(0.1, threshold=0.3)):
        result = prox_linear(problem.inner, outer, 80, [problem.w], step, loss=problem.loss)
        assert math.sqrt(2 * step * result.gap) <= 1e-3 * result.distance
