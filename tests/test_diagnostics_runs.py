"""Diagnostics of a run: tracking error and smoothed zone."""

from typing import Any

import pytest
import torch
from diagnostics_cases import DOUBLE, Curved

import fcco
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


def term_of(outer, values, smoothing, **options):
    tracker = fcco.ema_tracker(len(values), gamma=0.1, dim=outer.dim, dtype=DOUBLE)
    term = fcco.CoupledTerm(outer, tracker, smoothing=smoothing, **options)
    tracker.set_values(None, values)
    return term


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
    expected = (u > zone[0]) & (u < zone[1])
    result = smoothed_zone(term_of(outer, u, 0.1))
    assert 0 < result.share < 1 and result.num_seen == 400
    assert result.share == pytest.approx(expected.double().mean().item())
    assert torch.equal(result.inside, expected)
    assert result.width == pytest.approx(zone[1] - zone[0])
    # In the zone and nowhere else the envelope has curvature.
    slope = outer.envelope_gradient(u, 0.1)
    curved = (slope[2:] - slope[:-2]).abs() > 1e-12
    assert abs(curved.double().mean().item() - result.share) < 6 / 400
    assert smoothed_zone(term_of(outer, u + 10, 0.1)).share == 0
    assert smoothed_zone(term_of(outer, u + 1e3, 1e6)).share == 1
    assert smoothed_zone(term_of(outer, u, 0.0)).share == 0


def test_smoothed_zone_without_a_dual_zone_uses_the_slopes():
    u = torch.tensor([0.0, 0.35, 0.6, -0.35, -2.0])
    assert smoothed_zone(term_of(DeadZone(0.3, 2.0), u, 0.1)).share == pytest.approx(0.4)
    pairs = torch.stack([u, torch.zeros(5)], 1)
    result = smoothed_zone(term_of(TwoSidedHinge(0.3, 2.0), pairs, 0.05))
    assert result.inside.tolist() == [False, True, False, True, False]
    for outer in (SquaredHinge(), MoreauEnvelope(Hinge(), 0.1)):
        with pytest.raises(ValueError, match=r"smoothed_zone\(objective.*non-smooth, Lipschitz"):
            smoothed_zone(term_of(outer, u, 0.1))


def objective_of(make, *arguments, **options) -> Any:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make(model, optimizer, *arguments, **options)


def test_smoothed_zone_knows_the_threshold_of_cvar():
    losses = 1.0 + torch.linspace(0, 0.4, 99)
    dro = objective_of(fcco.CVaRGroupDRO, 99, 0.15, smoothing=0.1)
    tracker, term = dro.term.tracker, dro.term
    tracker.set_values(None, losses)
    term.start_threshold()
    # From zero, where a function without its threshold has its kink, every loss is beyond the zone.
    assert (losses > 0.1 / 0.15).all()
    result = smoothed_zone(dro)
    weights = dro.group_weights()
    carrying = (weights > 0) & (weights < (1 - 1e-6) / (0.15 * 99))
    assert 0.5 < result.share < 1 and torch.equal(result.inside, carrying)
    assert result.width == pytest.approx(0.1 / 0.15)
    assert str(result) == str(smoothed_zone(term)) and "a zone 0.667 wide" in str(result)


def test_smoothed_zone_knows_tolerances_and_margin():
    values = torch.tensor([0.02, 0.05, 0.45, 0.7])
    limits = {"tolerance": [0.5, 0.5, 0.5, 0.2], "penalty": 5.0, "smoothing": 0.02}
    # Half of the values lie between 0 and 0.1, but none is so little above its limit.
    none = objective_of(fcco.constrained, 4, **limits)
    assert smoothed_zone(none, values).share == 0
    strict = objective_of(fcco.constrained, 4, margin=0.1, **limits)
    assert smoothed_zone(strict, values).inside.tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match=r"no seen block yet; give `values`"):
        smoothed_zone(strict)
    strict(lambda: (strict.model.weight.sum(), values[:3]), [0, 1, 2])
    result = smoothed_zone(strict)
    assert result.num_seen == 3 and result.share == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match=r"values=\.\.\.\)` must have the shape \(4,\)"):
        smoothed_zone(strict, values[:3])
    switching = objective_of(fcco.constrained, 4, "ssg", threshold=0.1)
    with pytest.raises(ValueError, match=r"outer function.*SwitchingTerm"):
        smoothed_zone(switching)


def test_smoothed_zone_of_dual_variables_is_where_they_are_free():
    objective = objective_of(fcco.constrained, 3, "alexr", penalty=4.0, dual_step=2.0)
    values = torch.tensor([-0.1, 0.1, 9.0])
    objective(lambda: (objective.model.weight.sum(), values))
    dual = objective.term.dual()
    assert torch.equal(smoothed_zone(objective).inside, (dual > 0) & (dual < 4))
