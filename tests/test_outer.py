"""Every outer function: value, gradient, prox, and the facts it declares."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from outer_cases import (
    ALL,
    SCALAR_PROX,
    SMOOTH_ONLY,
    VECTOR_CONVEX,
    WEAKLY_CONVEX,
    Case,
    grid_prox,
    solver_prox,
)
from problems import Custom

import fcco.outer as fo
from fcco.outer import AbstractOuter, numeric_prox

every_case = pytest.mark.parametrize("case", ALL, ids=repr)


# --- value and gradient ---------------------------------------------------------------------------


@every_case
def test_value_is_the_function(case: Case):
    u = case.points()
    torch.testing.assert_close(case.outer(u), torch.from_numpy(case.plain(u.numpy())))


@every_case
def test_gradient_is_autograd_and_finite_difference(case: Case):
    u = case.points().requires_grad_()
    (automatic,) = torch.autograd.grad(case.outer(u).sum(), u)
    gradient = case.outer.gradient(u.detach())
    torch.testing.assert_close(gradient, automatic)
    torch.testing.assert_close(gradient, AbstractOuter.gradient(case.outer, u.detach()))
    together = case.outer.value_and_gradient(u.detach())
    torch.testing.assert_close(together, (case.outer(u).detach(), gradient))

    direction = torch.randn(u.shape, dtype=u.dtype, generator=torch.Generator().manual_seed(1))
    h = 1e-6 * direction
    slope = (case.outer(u + h) - case.outer(u - h)) / 2e-6
    along = gradient * direction
    torch.testing.assert_close(
        along if case.size == 1 else along.sum(-1), slope.detach(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("outer", "kinks"),
    [
        (fo.Hinge(1.5), [0.0]),
        (fo.Absolute(), [0.0]),
        (fo.DeadZone(0.5), [-0.5, 0.5]),
        (fo.SquaredHinge(), [0.0]),
        (fo.OneSidedMCP(0.9, 0.8), [0.0]),
        (fo.TwoSidedHinge(0.5), [[0.75, 0.25], [0.25, 0.75]]),
    ],
    ids=repr,
)
def test_gradient_at_a_kink_is_zero_in_autograd_too(outer: AbstractOuter, kinks: list):
    u = torch.tensor(kinks, requires_grad=True)
    (automatic,) = torch.autograd.grad(outer(u).sum(), u)
    assert (automatic == 0).all()
    assert (outer.gradient(u.detach()) == 0).all()


@pytest.mark.parametrize("size", [1e20, 1e-30])
@pytest.mark.parametrize("case", [*VECTOR_CONVEX, *WEAKLY_CONVEX, SMOOTH_ONLY[0]], ids=repr)
def test_nothing_overflows_in_float32_that_float32_can_hold(case: Case, size: float):
    f, u = case.outer, (size * case.points()).float()
    asked = [f, f.gradient]
    if case not in SMOOTH_ONLY:
        asked += [lambda u: f.prox(u, 1e-3), lambda u: f.envelope_and_gradient(u, 1e-3)[0]]
        asked += [lambda u: f.envelope_gradient(u, 1e-3)]
    if isinstance(f, fo.TwoSidedHinge):
        asked += [f.violation, f.multiplier]
    for function in asked:
        exact = function(u.double())
        exact = torch.where(exact.abs() < 3e38, exact, torch.inf * exact.sign())
        torch.testing.assert_close(
            function(u).double(), exact, rtol=1e-4, atol=1e-6 * min(size, 1.0)
        )


def test_ties_share_the_weight():
    u = torch.tensor([2.0, 2.0, 5.0, 2.0])
    torch.testing.assert_close(fo.CVaR(0.5).gradient(u), torch.tensor([1, 1, 3, 1]) / 6)
    torch.testing.assert_close(fo.CVaR(0.25).gradient(u - 3 * (u > 4)), torch.full((4,), 0.25))


# --- prox -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 1.0, 1.5])
@pytest.mark.parametrize("case", SCALAR_PROX, ids=repr)
def test_scalar_prox_is_the_global_minimum(case: Case, share: float):
    step = share * case.step
    u = torch.cat([case.points(), case.points() / 3, torch.tensor([-1.0, 0.0, 0.5, 1.0])])
    nearest, least = grid_prox(case.plain, u.numpy(), step)
    np.testing.assert_allclose(case.outer.prox(u, step).numpy(), nearest, atol=1e-6)
    envelope = case.outer.envelope_and_gradient(u, step)[0]
    np.testing.assert_allclose(envelope.numpy(), least, atol=1e-10)


@pytest.mark.parametrize("spread", [0.3, 1.0])
@pytest.mark.parametrize("case", VECTOR_CONVEX, ids=repr)
def test_vector_prox_is_the_solver_s(case: Case, spread: float):
    points, step = case.points(8) * spread, 0.7
    nearest = case.outer.prox(points, step).numpy()
    least = case.outer.envelope_and_gradient(points, step)[0].numpy()
    for u, prox, value in zip(points.numpy(), nearest, least, strict=True):
        solution, optimum = solver_prox(case, u, step)
        np.testing.assert_allclose(prox, solution, atol=2e-5)
        assert value == pytest.approx(optimum, abs=1e-6)


def test_log_mean_exp_with_an_offset_at_the_ends():
    """No overflow; in the other variable it is tau log(u + e)."""
    f, nu = fo.LogMeanExp(0.5, offset=0.2), torch.tensor([-1e4, 1e4])
    torch.testing.assert_close(f(nu), torch.tensor([0.5 * math.log(0.2), 5e3]))
    assert f.gradient(nu).tolist() == [0.0, 0.5]
    u = torch.tensor([0.01, 1.0, 30.0])
    torch.testing.assert_close(f(u.log()), 0.5 * torch.log(u + 0.2))


# Declared facts: monotone, Lipschitz, convex, and the constraint that is penalised.

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
        assert norm <= f.lipschitz * (1 + 1e-9)
        # One constant for every length of a vector, which not every length attains.
        assert f.dim is None or norm >= 0.97 * f.lipschitz
        return
    # Large, or at the edge of the domain.
    far = torch.tensor([1e4, 1e-4], dtype=torch.float64).repeat(max(case.size // 2, 1))
    assert f.gradient(far).abs().max() > 1e3


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


def test_a_ratio_is_not_weakly_convex():
    f, along = fo.Ratio(), torch.tensor([[1.0, 0.009], [1.0, 0.01], [1.0, 0.011]])
    below, middle, above = f(along.double())
    assert f.weak_convexity == math.inf and (below + above - 2 * middle) / 1e-6 < -1e5


def test_constraints_behind_the_penalties():
    u = torch.tensor([[0.75, 0.25], [-1.0, 0.5]])
    slopes = {
        fo.Hinge(2.0): (u, 2.0 * (u > 0)),
        fo.Absolute(2.0): (u.abs(), 2.0 * u.sign()),
        fo.DeadZone(0.5): (u.abs() - 0.5, u.sign() * (u.abs() > 0.5)),
        fo.OneSidedMCP(2.0, 1.0): (u, (u > 0) * (2 - u)),
        fo.TwoSidedHinge(1.0, 2.0): (torch.tensor([-0.5, 0.5]), torch.tensor([0.0, -2.0])),
    }
    for outer, (violation, multiplier) in slopes.items():
        torch.testing.assert_close(outer.violation(u), violation)
        torch.testing.assert_close(outer.multiplier(u), multiplier)


# --- a user's own, and the prox by numeric search -------------------------------------------------


@dataclass(frozen=True)
class Softplus(AbstractOuter):
    convex = monotone = smooth = True
    lipschitz = 1.0

    def __call__(self, u):
        return torch.nn.functional.softplus(u)


def test_user_defined_function_gets_gradient_and_prox():
    u = torch.linspace(-3, 3, 13, dtype=torch.float64)
    prox = Softplus().prox(u, 0.5)
    torch.testing.assert_close(prox + 0.5 * torch.sigmoid(prox), u, atol=1e-7, rtol=0)
    torch.testing.assert_close(Softplus().gradient(u), torch.sigmoid(u))
    torch.testing.assert_close(
        fo.MoreauEnvelope(Softplus(), 0.5).gradient(u), torch.sigmoid(prox), atol=1e-6, rtol=0
    )


@dataclass(frozen=True)
class Threshold(AbstractOuter):
    """[u]_+ with its own prox and its own choice of subgradient, 1 at the kink."""

    convex = monotone = True
    lipschitz = 1.0

    def __call__(self, u):
        return u.clamp(min=0)

    def gradient(self, u):
        return (u >= 0).to(u.dtype)

    def prox(self, u, step):
        return torch.where(u > 0, (u - step).clamp(min=0), u)


def test_a_user_s_gradient_and_prox_are_used():
    u = torch.tensor([-1.0, 0.0, 5e-7, 100.0])
    assert Threshold().value_and_gradient(u)[1].tolist() == [0.0, 1.0, 1.0, 1.0]
    slope = torch.tensor([0.0, 0.0, 0.5, 1.0])  # in float32, 100 - 1e-6 is 100
    torch.testing.assert_close(Threshold().envelope_gradient(u, 1e-6), slope)
    torch.testing.assert_close(fo.Hinge().envelope_gradient(u, 1e-6), slope)


@pytest.mark.parametrize("known", [True, False], ids=["lipschitz", "bracket by doubling"])
@pytest.mark.parametrize("case", SCALAR_PROX, ids=repr)
def test_numeric_prox_is_the_closed_form(case: Case, known: bool):
    f, u = case.outer, case.points()
    custom = Custom(
        f,
        lipschitz=f.lipschitz if known else math.inf,
        convex=f.convex,
        weak_convexity=f.weak_convexity,
    )
    torch.testing.assert_close(custom.prox(u, case.step), f.prox(u, case.step), atol=2e-7, rtol=0)
    torch.testing.assert_close(custom.gradient(u), f.gradient(u))
    assert numeric_prox(f, u.float(), case.step).dtype == torch.float32


def test_numeric_prox_far_from_the_start():
    steep = Custom(torch.exp, convex=True, monotone=True)
    u = torch.tensor([30.0], dtype=torch.float64)
    prox = steep.prox(u, 1.0)  # v + exp(v) = u
    torch.testing.assert_close(prox + prox.exp(), u)


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["right half", "left half"])
def test_numeric_prox_at_the_edge_of_a_domain(sign: float):
    barrier = Custom(lambda v: -torch.log(sign * v), convex=True)  # nan outside
    u = sign * torch.tensor([1e-3, 0.1, 2.0, 50.0], dtype=torch.float64)
    for step in (0.01, 1.0, 30.0):
        exact = (u + sign * (u.square() + 4 * step).sqrt()) / 2
        torch.testing.assert_close(barrier.prox(u, step), exact, rtol=1e-6, atol=1e-7)


@dataclass(frozen=True)
class Sum(AbstractOuter):
    dim = None
    convex = True

    def __call__(self, u):
        return u.sum(-1)


def test_numeric_prox_refuses_what_it_cannot_do():
    u = torch.zeros(3)
    with pytest.raises(ValueError, match=r"Sum\(\).*define its own `prox`"):
        Sum().prox(u, 1.0)
    with pytest.raises(ValueError, match=r"declare `convex = True`, or `weak_convexity = rho`"):
        Custom(torch.cos, lipschitz=1.0).prox(u, 0.1)
    cosine = Custom(torch.cos, lipschitz=1.0, weak_convexity=1.0)
    with pytest.raises(ValueError, match=r"`Custom.prox\(step=...\)` must be below 1/weak_convex"):
        cosine.prox(u, 1.0)
