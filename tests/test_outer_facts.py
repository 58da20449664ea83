"""What an outer function declares: monotone, Lipschitz, convex, and the constraint it penalises."""

from __future__ import annotations

import math

import pytest
import torch
from outer_cases import ALL, VECTOR_CONVEX, Case, plus

import fcco.outer as fo

every_case = pytest.mark.parametrize("case", ALL, ids=repr)
SCALAR = [case for case in ALL if case.size == 1]


def dense(case: Case, spacing: float = 1e-3) -> torch.Tensor:
    """A grid over [low, high] for a scalar function."""
    return torch.arange(case.low, case.high, spacing, dtype=torch.float64)


def curvature(case: Case, h: float = 1e-3) -> torch.Tensor:
    """Second differences of f divided by h^2."""
    f, u = case.outer, dense(case)[1:]
    return (f(u + h) + f(u - h) - 2 * f(u)) / h**2


@every_case
def test_monotone_means_non_decreasing(case: Case):
    u, f = case.points(200), case.outer
    bumps = [torch.tensor(0.05)] if case.size == 1 else list(0.05 * torch.eye(case.size))
    change = torch.stack([f(u + bump) - f(u) for bump in bumps])
    assert (change.min() >= -1e-12) == f.monotone


@every_case
def test_lipschitz_constant_is_tight(case: Case):
    f = case.outer
    u = dense(case)[:, None] if case.size == 1 else case.points(3000)
    norm = torch.linalg.vector_norm(f.gradient(u), dim=-1).max()
    if math.isfinite(f.lipschitz):
        assert 0.97 * f.lipschitz <= norm <= f.lipschitz * (1 + 1e-9)
        return
    far = torch.tensor([1e4, 1e-4], dtype=torch.float64)  # large, or at the edge of the domain
    assert f.gradient(far).abs().max() > 1e3


def test_lipschitz_constants_that_need_the_dimension():
    assert fo.CVaR(0.3).lipschitz == 1.0
    assert fo.CVaR(0.3, dim=3).lipschitz == 1.0  # 0.3 * 3 < 1: the maximum
    assert fo.CVaR(0.25, dim=16).lipschitz == pytest.approx(0.5)
    assert fo.SeparableHinge(2.0).lipschitz == math.inf
    assert fo.Power(1.0).lipschitz == 1.0


@pytest.mark.parametrize("case", SCALAR, ids=repr)
def test_weak_convexity_is_tight(case: Case):
    rho, least = case.outer.weak_convexity, curvature(case).min()
    assert case.outer.convex == (rho == 0)
    if math.isinf(rho):
        near_edge = torch.tensor(1e-3, dtype=torch.float64)
        assert torch.func.grad(case.outer.gradient)(near_edge) < -1e3
        return
    assert least >= -rho * (1 + 1e-3) - 1e-6
    if rho > 0:
        assert least <= -0.9 * rho  # 0.9 rho would not be enough


@pytest.mark.parametrize("case", VECTOR_CONVEX, ids=repr)
def test_vector_functions_are_midpoint_convex(case: Case):
    assert case.outer.convex and case.outer.weak_convexity == 0
    u, v, f = case.points(500), case.points(500, seed=1), case.outer
    assert (f((u + v) / 2) <= (f(u) + f(v)) / 2 + 1e-12).all()


def test_average_precision_is_not_weakly_convex():
    f, along = fo.AveragePrecision(), torch.tensor([[1.0, 0.009], [1.0, 0.01], [1.0, 0.011]])
    below, middle, above = f(along.double())
    assert f.weak_convexity == math.inf and (below + above - 2 * middle) / 1e-6 < -1e5


def test_constraints_behind_the_penalties():
    u = torch.tensor([[0.75, 0.25], [-1.0, 0.5]])
    slopes = {
        fo.Hinge(2.0): (u, 2.0 * (u > 0)),
        fo.CVaRHinge(0.5, 0.25): (u - 0.25, 2.0 * (u > 0.25)),
        fo.Absolute(2.0): (u.abs(), 2.0 * u.sign()),
        fo.DeadZone(0.5): (u.abs() - 0.5, u.sign() * (u.abs() > 0.5)),
        fo.MCP(2.0, 1.0): (u.abs(), u.sign() * torch.from_numpy(plus(2 - u.abs().numpy()))),
        fo.PositiveMaximum(): (torch.tensor([0.75, 0.5]), torch.ones(2)),
        fo.EuclideanNorm(2.0): (u.norm(dim=-1), torch.full((2,), 2.0)),
        fo.SeparableHinge(2.0): (u, 2.0 * (u > 0)),
        fo.TwoSidedHinge(1.0, 2.0): (torch.tensor([-0.5, 0.5]), torch.tensor([0.0, -2.0])),
    }
    for outer, (violation, multiplier) in slopes.items():
        torch.testing.assert_close(outer.violation(u), violation)
        torch.testing.assert_close(outer.multiplier(u), multiplier)
