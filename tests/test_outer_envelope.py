"""The Moreau envelope: gradient, smoothness, prox, and the width of a rounded kink."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from outer_cases import (
    SCALAR_PROX,
    VECTOR_CONVEX,
    WEAKLY_CONVEX,
    WITH_PROX,
    Case,
)
from problems import Custom

import fcco
import fcco.outer as fo
from fcco.outer import MoreauEnvelope


def by_every_route(outer: fo.AbstractOuter, u: torch.Tensor, step: float) -> dict:
    """The gradient of the envelope, as each of the four calls returns it."""
    envelope, leaf = MoreauEnvelope(outer, step), u.clone().requires_grad_()
    return {
        "envelope_gradient": outer.envelope_gradient(u, step),
        "gradient": envelope.gradient(u),
        "value_and_gradient": envelope.value_and_gradient(u)[1],
        "autograd": torch.autograd.grad(envelope(leaf).sum(), leaf)[0],
    }


@pytest.mark.parametrize("step", [1e-3, 1e-6])
@pytest.mark.parametrize(
    "case",
    [
        *WITH_PROX,
        Case(Custom(torch.nn.functional.softplus, lipschitz=1.0, convex=True), np.exp),
        Case(Custom(lambda u: (u - 100).abs(), lipschitz=1.0, convex=True), np.exp),
    ],
    ids=lambda case: repr(case).split(" at 0x")[0],  # the address of a function differs
)
def test_gradient_keeps_its_digits_in_float32(case: Case, step: float):
    """Far from 0 the prox shares all digits of u with it; near a kink it sits on the kink."""
    points = case.points(60).float()
    kinks = [points * step + kink for kink in (0.0, 0.25, 0.5, 1.0, 100.0)]
    u = torch.cat([points, 100 * points, *kinks])
    exact = (u.double() - case.outer.prox(u.double(), step)) / step
    for name, gradient in by_every_route(case.outer, u, step).items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(
            gradient.double(), exact, rtol=2e-6, atol=1e-6, msg=lambda text, name=name: name + text
        )
    envelope = MoreauEnvelope(case.outer, step)
    torch.testing.assert_close(envelope(u).double(), envelope(u.double()), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("share", [0.3, 0.8])
@pytest.mark.parametrize("case", SCALAR_PROX, ids=repr)
def test_smoothness_constant_is_tight(case: Case, share: float):
    smoothing = share if case.outer.convex else share / case.outer.weak_convexity
    envelope = MoreauEnvelope(case.outer, smoothing)
    u = torch.linspace(case.low, case.high, 60001, dtype=torch.float64)
    slope = envelope.gradient(u).diff() / u.diff()
    smoothness = max(1 / smoothing, envelope.weak_convexity)
    assert slope.abs().max() <= smoothness * (1 + 1e-6)
    assert slope.min() >= -envelope.weak_convexity * (1 + 1e-6) - 1e-6
    f = case.outer
    assert (envelope.smooth, envelope.convex, envelope.monotone) == (True, f.convex, f.monotone)
    assert envelope.lipschitz == f.lipschitz
    if not f.smooth:
        assert slope.abs().max() >= 0.97 * smoothness


@pytest.mark.parametrize("case", VECTOR_CONVEX, ids=repr)
def test_vector_gradient_is_lipschitz(case: Case):
    u, v = case.points(300), case.points(300, seed=1)
    envelope = MoreauEnvelope(case.outer, 0.7)
    one, two = envelope.gradient(u), envelope.gradient(v)
    assert ((one - two).norm(dim=-1) <= (u - v).norm(dim=-1) / 0.7 + 1e-9).all()
    assert (one.norm(dim=-1) <= envelope.lipschitz + 1e-9).all()


@pytest.mark.parametrize(
    ("outer", "kinks"),
    [
        (fo.Hinge(3.0), 1),
        (fo.Absolute(0.75), 1),
        (fo.DeadZone(0.5, 4.0), 2),
        (fo.OneSidedMCP(2.0, 0.1), 1),
    ],
    ids=repr,
)
def test_a_width_is_that_of_the_rounded_kink(outer: Any, kinks: int):
    term = fcco.terms.CoupledTerm(
        outer, fcco.tracker.ema_tracker(2, gamma=0.1), smoothing=fcco.Width(0.4)
    )
    u = torch.linspace(-2, 2, 40_001, dtype=torch.float64)
    # In the rounded kink, and nowhere else, the curvature is 1 / lambda.
    curvature = term.smoothed.gradient(u).diff() / u.diff()
    rounded = ((curvature * term.smoothing - 1).abs() < 1e-3).double().sum() * 1e-4
    assert rounded.item() == pytest.approx(0.4 * kinks, abs=1e-3)


def test_the_width_of_functions_of_vectors():
    u = torch.linspace(-2, 2, 40_001, dtype=torch.float64)
    pairs = torch.stack([u / 2, -u / 2], 1)  # a difference of u
    tracker = fcco.tracker.ema_tracker(2, gamma=0.1, dim=2)
    term = fcco.terms.CoupledTerm(fo.TwoSidedHinge(0.5, 3.0), tracker, smoothing=fcco.Width(0.4))
    slope = term.smoothed.gradient(pairs)[:, 0]
    rounded = (slope.diff().abs() > 1e-9).double().sum() * 1e-4
    assert rounded.item() == pytest.approx(0.4 * 2, abs=1e-3)
    for outer in (fo.SquaredHinge(), fo.MoreauEnvelope(fo.Hinge(), 0.1)):
        with pytest.raises(ValueError, match=r"smoothing=Width.*`jump`.*lambda itself"):
            fcco.terms.CoupledTerm(
                outer, fcco.tracker.ema_tracker(2, gamma=0.1), smoothing=fcco.Width(0.4)
            )


def test_a_width_wherever_a_smoothing_is_taken():
    model, width = torch.nn.Linear(2, 1), fcco.Width(0.1)
    sgd = lambda: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    cvar = fcco.CVaRGroupDRO(model, sgd(), 4, 0.25, smoothing=width).term
    assert cvar.smoothing == pytest.approx(0.025)
    proximal: Any = {"smoothing": width, "nu": 0.1, "eta": 0.1}
    double_loop = fcco.methods.alexr2(model, sgd(), fcco.outer.Hinge(5.0), 3, **proximal).term
    settings: Any = {"penalty": 5.0, "smoothing": width, "refresh_every": 5}
    recursive = fcco.constrained(model, sgd(), 3, "recursive-hinge", **settings).term
    for term in (double_loop, recursive):
        assert term.smoothing == pytest.approx(0.02)
    nothing = fcco.Width(0.0)
    term = fcco.methods.sonex(model, sgd(), fcco.outer.Hinge(5.0), 3, smoothing=nothing).term
    assert term.smoothed is term.outer


@pytest.mark.parametrize("case", WEAKLY_CONVEX, ids=repr)
def test_too_much_smoothing_is_refused(case: Case):
    limit = 1 / case.outer.weak_convexity
    message = r"`MoreauEnvelope\(smoothing=...\)` must be below 1/weak_convexity = .* not smooth"
    for smoothing in (limit, 2 * limit):
        with pytest.raises(ValueError, match=message):
            MoreauEnvelope(case.outer, smoothing)
        with pytest.raises(ValueError, match=r"prox\(step=...\)` must be below 1/weak_convexity"):
            case.outer.prox(torch.zeros(2), smoothing)
    assert math.isfinite(MoreauEnvelope(case.outer, 0.99 * limit).weak_convexity)
