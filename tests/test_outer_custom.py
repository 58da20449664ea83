"""A user's own outer function, and the prox by numeric search."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from outer_cases import SCALAR_PROX, Case
from problems import Custom

import fcco.outer as fo
from fcco.outer import AbstractOuter, numeric_prox


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
