"""Diagnostics of a run: tracking error, smoothed zone, gradient error, step sizes."""

import math

import pytest
import torch
from diagnostics_cases import DOUBLE, Curved

from fcco.diagnostics import (
    StepSizeBounds,
    gradient_error,
    smoothed_zone,
    step_size_bounds,
    tracking_error,
)
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


def test_gradient_error_is_the_distance_to_the_full_gradient():
    problem = Curved(4, 8, 5)
    smooth = MoreauEnvelope(Hinge(2.0), 0.2)
    objective = smooth(problem.inner(torch.arange(8))).mean() + problem.loss()
    exact = torch.autograd.grad(objective, problem.w)[0]
    noise = torch.randn(5, dtype=DOUBLE)
    arguments = (problem.inner, smooth, 8, [problem.w])
    result = gradient_error([exact + noise], *arguments, loss=problem.loss, chunk=3)
    assert result.error == pytest.approx(float(noise.norm()))
    assert result.norm == pytest.approx(float(exact.norm()))
    assert result.relative == pytest.approx(float(noise.norm() / exact.norm()))
    with pytest.raises(ValueError, match=r"gradient_error\(estimate"):
        gradient_error([noise[:2]], *arguments)


# Step sizes of adaptive optimizers.


def two_tensors():
    return [
        torch.ones(3, dtype=DOUBLE, requires_grad=True),
        torch.ones(2, 2, dtype=DOUBLE).requires_grad_(),
    ]


def feed(optimizer, parameters, seed, steps):
    """Step with random gradients; return those gradients, flattened, one row per step."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for step in range(steps):
        for parameter in parameters:
            scale = 10.0 if step == 1 else 1.0  # so that the running maximum matters
            parameter.grad = scale * torch.randn(parameter.shape, generator=random, dtype=DOUBLE)
        rows.append(torch.cat([parameter.grad.reshape(-1) for parameter in parameters]))
        optimizer.step()
    return torch.stack(rows)


def averages(rows, decay):
    running, history = torch.zeros_like(rows[0]), []
    for row in rows:
        running = decay * running + (1 - decay) * row
        history.append(running)
    return torch.stack(history)


@pytest.mark.parametrize("kind", ["adam", "amsgrad", "adamw", "rmsprop", "centered"])
def test_step_size_bounds_are_those_of_a_hand_computation(kind):
    parameters, eps, steps = two_tensors(), 1e-3, 5
    if kind == "rmsprop" or kind == "centered":
        optimizer = torch.optim.RMSprop(parameters, alpha=0.7, eps=eps, centered=kind == "centered")
        rows = feed(optimizer, parameters, 0, steps)
        square = averages(rows.square(), 0.7)[-1]
        if kind == "centered":
            square = square - averages(rows, 0.7)[-1].square()
    else:
        family = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
        optimizer = family(parameters, betas=(0.8, 0.7), eps=eps, amsgrad=kind == "amsgrad")
        rows = feed(optimizer, parameters, 0, steps)
        history = averages(rows.square(), 0.7)
        square = history.amax(0) if kind == "amsgrad" else history[-1]
        square = square / (1 - 0.7**steps)
    factor = 1 / (square.sqrt() + eps)
    bounds = step_size_bounds(optimizer)
    assert bounds.lower == pytest.approx(float(factor.min()), rel=1e-10)
    assert bounds.upper == pytest.approx(float(factor.max()), rel=1e-10)
    assert bounds.ratio == pytest.approx(float(factor.max() / factor.min()), rel=1e-10)


@pytest.mark.parametrize(
    "make",
    [
        lambda w: torch.optim.Adam(w, lr=0.1, betas=(0.0, 0.9), eps=0.5),
        lambda w: torch.optim.Adam(w, lr=0.1, betas=(0.0, 0.9), eps=0.5, amsgrad=True),
        lambda w: torch.optim.AdamW(w, lr=0.1, betas=(0.0, 0.9), eps=0.5, weight_decay=0.0),
        lambda w: torch.optim.RMSprop(w, lr=0.1, alpha=0.9, eps=0.5),
        lambda w: torch.optim.RMSprop(w, lr=0.1, alpha=0.9, eps=0.5, centered=True),
    ],
    ids=["adam", "amsgrad", "adamw", "rmsprop", "centered"],
)
def test_bounds_are_those_of_the_steps_really_taken(make):
    # Without momentum a step is lr * factor * gradient.
    w = torch.zeros(3, dtype=DOUBLE, requires_grad=True)
    optimizer = make([w])
    for scale in (3.0, 0.2, 1.0):
        before = w.detach().clone()
        w.grad = scale * torch.tensor([4.0, 0.25, -1.0], dtype=DOUBLE)
        optimizer.step()
        factors = ((before - w.detach()) / (0.1 * w.grad)).tolist()
        bounds = step_size_bounds(optimizer)
        assert (bounds.lower, bounds.upper) == pytest.approx((min(factors), max(factors)))


def test_bounds_merge_over_training_and_reject_what_they_cannot_read():
    wide = StepSizeBounds(0.5, 2.0).merge(StepSizeBounds(0.1, 1.0)).merge(StepSizeBounds())
    assert (wide.lower, wide.upper, wide.ratio) == (0.1, 2.0, 20.0)
    w = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match="no state yet"):
        step_size_bounds(torch.optim.Adam([w]))
    with pytest.raises(TypeError, match="SGD"):
        step_size_bounds(torch.optim.SGD([w], lr=0.1))
    idle = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([w, idle], eps=0.0)
    w.grad = torch.tensor([0.0, 1.0])
    optimizer.step()
    assert step_size_bounds(optimizer).upper == math.inf, "eps = 0 and no gradient: no upper bound"
