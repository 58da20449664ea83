"""Diagnostics of a run: tracking error and smoothed zone."""

import pytest
import torch
from diagnostics_cases import DOUBLE, Curved

from fcco.diagnostics import smoothed_zone, tracking_error
from fcco.outer import (
    Absolute,
    CVaRHinge,
    DeadZone,
    Hinge,
    MoreauEnvelope,
    SquaredHinge,
    TwoSidedHinge,
)


@pytest.mark.parametrize("width", [None, 3])
def test_tracking_error_is_the_mean_square_over_seen_blocks(width):
    problem = Curved(0, 9, 4, width)
    exact = problem.inner(torch.arange(9)).detach()
    noise = torch.randn_like(exact)
    seen = torch.tensor([True] * 6 + [False] * 3)
    result = tracking_error((exact + noise).float(), problem.inner, seen=seen, chunk=4)
    squares = noise.reshape(9, -1).square().sum(1)
    assert result.mean_square == pytest.approx(float(squares[:6].mean()), rel=1e-5)
    assert result.largest == pytest.approx(float(squares[:6].max().sqrt()), rel=1e-5)
    assert result.num_seen == 6
    everything = tracking_error(exact + noise, problem.inner)
    assert everything.mean_square == pytest.approx(float(squares.mean()))
    with pytest.raises(ValueError, match=r"tracking_error\(tracked"):
        tracking_error(torch.zeros(9, 5), problem.inner)
    with pytest.raises(ValueError, match="no seen block"):
        tracking_error(exact, problem.inner, seen=torch.zeros(9, dtype=torch.bool))


@pytest.mark.parametrize(
    ("outer", "zone"),
    [
        (Hinge(2.0), (0.0, 0.2)),
        (CVaRHinge(0.25, threshold=1.0), (1.0, 1.4)),
        (Absolute(3.0), (-0.3, 0.3)),
    ],
    ids=["hinge", "cvar", "absolute"],
)
def test_smoothed_zone_counts_the_quadratic_part(outer, zone):
    u = torch.linspace(-2, 2, 400, dtype=DOUBLE)
    expected = ((u > zone[0]) & (u < zone[1])).double().mean().item()
    result = smoothed_zone(u, outer, 0.1)
    assert 0 < result.share < 1
    assert result.share == pytest.approx(expected)
    # In the zone and nowhere else the envelope has curvature.
    slope = outer.envelope_gradient(u, 0.1)
    curved = (slope[2:] - slope[:-2]).abs() > 1e-12
    assert abs(curved.double().mean().item() - expected) < 6 / 400
    assert smoothed_zone(u + 10, outer, 0.1).share == 0
    assert smoothed_zone(u + 1e3, outer, 1e6).share == 1


def test_smoothed_zone_without_a_dual_zone_uses_the_slopes():
    u = torch.tensor([0.0, 0.35, 0.6, -0.35, -2.0])
    assert smoothed_zone(u, DeadZone(0.3, 2.0), 0.1).share == pytest.approx(0.4)
    pairs = torch.stack([u, torch.zeros(5)], 1)
    assert smoothed_zone(pairs, TwoSidedHinge(0.3, 2.0), 0.05).share == pytest.approx(0.4)
    for outer in (SquaredHinge(), MoreauEnvelope(Hinge(), 0.1)):
        with pytest.raises(ValueError, match=r"smoothed_zone\(outer.*non-smooth, Lipschitz"):
            smoothed_zone(u, outer, 0.1)
