"""Penalised constraints against closed forms, cvxpy's multipliers and the laws of the penalty."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from problems import NoisyConstraints, Point, box, decay, program, smoothed_hinge, take_step
from scipy.integrate import quad
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm

import fcco
from fcco.diagnostics import kkt, kkt_report
from fcco.outer import DeadZone, PositiveMaximum, SeparableHinge

DOUBLE = torch.float64
A, B, M = 1.0, 0.3, 3  # the box problem: every multiplier is 0.7
ALEXR2: dict[str, Any] = {"gamma": 0.2, "correction": 0.2 * 0.125, "read": "new"}


def run(problem, method="sonex", steps=800, lr=0.01, blocks=None, word="sonex", **options):
    """Train with step sizes that fall to 0; the last w and its objective."""
    number = len(problem.limits)
    model = Point(np.zeros(len(problem.a)))
    optimizer: Any = fcco.momentum_type(model.parameters(), lr=lr, beta=0.2)
    if method == "alexr2":
        outer = fcco.momentum_type(model.parameters(), lr=0.5, beta=0.2)
        optimizer = fcco.ProximalPoint(outer, nu=0.5, eta=0.02, inner_steps=5)
        options = options | ALEXR2
    settings: dict[str, Any] = {"gamma": 0.1} | options
    objective = fcco.constrained(model, optimizer, number, word, **settings)
    for step in range(steps):
        decay(optimizer, (1 - step / steps) ** 1.5)
        index = torch.randperm(number, generator=problem.generator)[:blocks].sort().values
        take_step(objective, problem.sample(model.w, index), index)
    return model, objective


# The box problem: closed forms for every kind of penalty.


@pytest.mark.parametrize("method", ["sonex", "alexr2"])
def test_smoothing_law_and_its_halving(method):
    bias = []
    for lam in (0.04, 0.02):
        model, _ = run(box(A, B, M, 0.03), method, penalty=6.0, smoothing=lam)
        predicted = (A - B) * lam * M / (1 + lam * M)
        np.testing.assert_allclose(model.w.detach() - B, predicted, atol=0.006)
        bias.append((model.w.detach() - B).mean().item())
    assert bias[1] / bias[0] == pytest.approx(0.04 * 1.12 / (0.08 * 1.06), abs=0.06)


def test_below_the_exact_penalty_threshold_a_constraint_is_not_enforced():
    model, objective = run(box(A, B, M, 0.03), lr=0.05, penalty=1.5, smoothing=0.02)
    np.testing.assert_allclose(model.w.detach(), A - 1.5 / M, atol=1e-3)
    np.testing.assert_allclose(objective.multipliers(), 1.5 / M)


def test_kkt_residuals_at_the_end_are_those_predicted():
    problem, lam = box(A, B, M, 0.03), 0.04
    model, _ = run(problem, penalty=6.0, smoothing=lam)
    report = kkt_report(
        lambda: problem.loss(model.w),
        lambda index: problem.exact(model.w)[index],
        M,
        [model.w],
        fcco.MoreauEnvelope(fcco.Hinge(6.0), lam),
    )
    smoothed = (A - B) / (1 + lam * M)  # the multiplier of the smoothed solution
    np.testing.assert_allclose(report.penalty.multipliers, smoothed, atol=0.06)
    np.testing.assert_allclose(report.least_squares.multipliers, smoothed, atol=0.006)
    assert report.penalty.stationarity < 0.1 and report.least_squares.stationarity < 1e-12
    assert report.least_squares.feasibility == pytest.approx(lam * M * smoothed, abs=0.006)
    expected = lam * M * smoothed**2
    assert report.least_squares.complementarity == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("options, residual", [
    ({"word": "hinge", "penalty": 6.0, "gamma": 0.03}, 0.0),
    # about m nu* / rho
    ({"word": "squared-hinge", "read": "old", "penalty": 60.0}, (A - B) / (1 + 60 / M)),
    ({"equality": True, "penalty": 6.0, "smoothing": 0.02}, (A - B) * 0.06 / 1.06),
    ({"equality": True, "penalty": 6.0, "word": "hinge"}, 0.0),
    ({"smoothing": 0.02, "outer": DeadZone(0.1, 6.0)}, 0.1 + (A - B - 0.1) * 0.06 / 1.06),
    ({"smoothing": 0.02, "penalty": 6.0, "margin": (A - B) * 0.06}, 0.0),
    ({"smoothing": 0.02, "penalty": 6.0, "margin": 0.1}, -0.1 + (A - B + 0.1) * 0.06 / 1.06),
    ({"smoothing": fcco.Annealed(0.1, 0.01, steps=400), "penalty": 6.0}, (A - B) * 0.03 / 1.03),
])  # fmt: skip
def test_residual_violation_of_each_kind(options, residual):
    model, _ = run(box(A, B, M, 0.03), **options)
    np.testing.assert_allclose(model.w.detach() - B, residual, atol=0.012)


def test_equality_holds_from_below_too():
    model, objective = run(box(-0.4, B, M, 0.03), penalty=6.0, smoothing=0.02, equality=True)
    np.testing.assert_allclose(B - model.w.detach(), 0.7 * 0.06 / 1.06, atol=0.006)
    assert (objective.violation() > 0).all() and (objective.multipliers() < 0).all()


def test_a_vector_of_tolerances_moves_each_limit():
    problem = box(A, 0.0, M, 0.03)
    tolerance = torch.tensor([-0.2, 0.1, 0.4])
    model, objective = run(problem, penalty=6.0, smoothing=0.02, tolerance=tolerance)
    expected = tolerance + (A - tolerance) * 0.06 / 1.06
    np.testing.assert_allclose(model.w.detach(), expected, atol=0.008)
    tracked = objective.term.tracker.value[:, 0]
    torch.testing.assert_close(objective.violation(), tracked - tolerance.double())


# Problems solved by cvxpy, or by one equation.


@pytest.mark.parametrize("method", ["sonex", "alexr2"])
def test_quadratic_program_with_sampled_constraints(method):
    problem, lam, rho, m = program(), 0.01, 16.0, 8
    _, multipliers = problem.solve()
    np.testing.assert_allclose(multipliers, [0.6, 0.5, 0.4, 0.3, 0, 0, 0, 0], atol=1e-6)
    smoothed, _ = problem.solve(smoothed_hinge(rho, lam, m))
    model, _ = run(problem, method, 2000, lr=0.03, blocks=4, penalty=rho, smoothing=lam)
    assert np.linalg.norm(model.w.detach().numpy() - smoothed) < 0.015
    excess = problem.exact(model.w).detach().numpy()
    np.testing.assert_allclose(excess[:4], lam * m * multipliers[:4], atol=0.012)
    assert (excess[4:] < 0).all()
    best = kkt(lambda: problem.loss(model.w), lambda i: problem.exact(model.w)[i], m, [model.w])
    np.testing.assert_allclose(best.multipliers, multipliers, atol=0.06)


@pytest.mark.parametrize("method", ["sonex", "alexr2"])
def test_a_non_convex_constraint(method):
    """min |w - a|^2 / 2 outside the unit ball, |a| = 1/2: w* = a / |a|, nu* = 1/4."""
    a, lam, rho = torch.tensor([0.3, -0.4], dtype=DOUBLE), 0.05, 2.0
    problem = NoisyConstraints(a, a[None], torch.zeros(1), 0.03, torch.Generator().manual_seed(0))
    problem.exact = lambda w: 1 - w.square().sum().view(1)  # type: ignore[method-assign]
    model, _ = run(problem, method, lr=0.02, penalty=rho, smoothing=lam)
    slope = lambda t: np.clip((1 - t**2) / lam, 0, rho)  # noqa: E731
    radius = brentq(lambda t: t - 0.5 - 2 * t * slope(t), 0.8, 1.1)
    np.testing.assert_allclose(model.w.detach(), radius * a / 0.5, atol=0.008)  # type: ignore[operator]
    inner = lambda _: problem.exact(model.w)  # noqa: E731
    result = kkt(lambda: problem.loss(model.w), inner, 1, [model.w], active=0.05)
    assert result.multipliers.item() == pytest.approx(0.25, abs=0.02)
    assert result.stationarity < 0.02 and result.feasibility < 2 * lam * 0.25


def test_tracked_values_are_not_penalised_for_their_noise():
    """|gap| <= 0.5 holds at w* = 0.4, but each batch sees the gap with noise of 0.5."""
    width, weight, sigma, steps = 0.5, 4.0, 0.5, 1500
    target = torch.tensor(0.4, dtype=DOUBLE)
    noise = sigma * torch.randn(steps, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    noise /= 2**0.5

    def train(step_of) -> float:
        model = Point([0.0])
        optimizer = fcco.momentum_type(model.parameters(), lr=0.05)
        penalty = step_of(model, optimizer)
        for step in range(steps):
            decay(optimizer, (1 - step / steps) ** 1.5)
            penalty(noise[step]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.w.item()

    def loss_and_rates(model, e):
        return (model.w - target).square().sum() / 2, torch.cat([model.w, 0 * model.w]) + e

    def by_hand(model, optimizer):
        def penalised(e):
            loss, (first, second) = loss_and_rates(model, e)
            return loss + weight * ((first - second).abs() - width).clamp(min=0)

        return penalised

    def tracked(model, optimizer):
        objective = fcco.constrained(
            model, optimizer, 1, smoothing=0.02, gamma=0.02,
            outer=fcco.TwoSidedHinge(width, weight),
        )  # fmt: skip
        return lambda e: objective(lambda: (lambda g0, g: (g0, g[None]))(*loss_and_rates(model, e)))

    def expected_penalty(w):
        return quad(lambda x: max(abs(w + x) - width, 0) * norm.pdf(x, scale=sigma), -4, 4)[0]

    result: Any = minimize_scalar(lambda w: (w - 0.4) ** 2 / 2 + weight * expected_penalty(w))
    biased = result.x
    assert biased < 0.2
    assert train(by_hand) == pytest.approx(biased, abs=0.02)
    assert train(tracked) == pytest.approx(0.4, abs=0.02)


# Reports and errors.


def penalized(constraints: Any = 2, model: Any = None, **options: Any) -> fcco.ConstrainedObjective:
    model = model or Point([0.5, -1.0])
    settings: dict[str, Any] = {"gamma": 0.5, "correction": 0.0}
    if "outer" not in options:
        settings |= {"penalty": 4.0, "smoothing": 0.1}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fcco.constrained(model, optimizer, constraints, **(settings | options))


def test_named_constraints_may_be_absent():
    model = Point([0.5, -1.0])
    objective = penalized(["gap", "rate"], model, tolerance=[0.1, 0.0])
    for report in (objective.violation(), objective.multipliers()):
        assert list(report) == ["gap", "rate"] and np.isnan(list(report.values())).all()
    take_step(objective, lambda: (model.w.sum(), {"gap": model.w[0]}))
    assert objective.violation()["gap"] == pytest.approx(0.4)
    assert np.isnan(objective.violation()["rate"])
    assert objective.multipliers()["gap"] == 4.0 / 2  # rho / m, far beyond the quadratic zone
    g0 = (model.w.sum()).item()
    assert take_step(objective, lambda: (model.w.sum(), {})) == g0, "all absent"
    loss = take_step(objective, lambda: (0 * model.w.sum(), {"rate": model.w[1]}))
    assert loss == 0 and not np.isnan(objective.violation()["rate"])
    for wrong, message in (
        ({"gab": model.w[0]}, "given for .'gab'.*named: gap, rate"),
        ({"gap": 0.5}, "must be a tensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            objective(lambda wrong=wrong: (model.w.sum(), wrong))
    with pytest.raises(ValueError, match="leave `index` and `counts` out"):
        objective(lambda: (model.w.sum(), {"gap": model.w[0]}), torch.tensor([0]))


def test_two_sided_hinge_reports_the_gap():
    model = Point([0.9, 0.5, 0.1, 0.2, 0.7, 0.0])
    objective = penalized(3, model, outer=fcco.TwoSidedHinge(0.1, 6.0), smoothing=0.05)
    objective(lambda: (0 * model.w.sum(), model.w.view(3, 2)[:2]), torch.tensor([0, 1]))
    gaps = np.array([0.4, 0.1, np.nan]) - 0.1
    np.testing.assert_allclose(objective.violation(), gaps, atol=1e-15)
    expected = np.minimum(np.maximum(gaps, 0) / (2 * 0.05), 6.0) / 3
    np.testing.assert_allclose(objective.multipliers(), expected, atol=1e-15)


def test_a_vector_of_constraints_in_each_block_reports_one_number_for_each():
    model = Point([0.5, -1.0, 0.2, 0.3])
    objective = penalized(2, model, outer=SeparableHinge(4.0, dim=2), smoothing=0.1)
    objective(lambda: (0 * model.w.sum(), model.w[:2].view(1, 2)), torch.tensor([1]))
    nan = np.nan
    np.testing.assert_allclose(objective.violation(), [[nan, nan], [0.5, -1.0]])
    np.testing.assert_allclose(objective.multipliers(), [[nan, nan], [2.0, 0.0]])
    worst = penalized(2, model, outer=PositiveMaximum(), dim=2, smoothing=0.1)
    worst(lambda: (0 * model.w.sum(), model.w.view(2, 2)))
    np.testing.assert_allclose(worst.violation(), [0.5, 0.3])


@pytest.mark.parametrize("options, message", [
    ({"method": "hinge"}, "`smoothing` is how far the hinge is smoothed"),
    ({"method": "cubic"}, "must be one of 'sonex'"),
    ({"penalty": None}, "penalty=...)` is needed unless"),
    ({"penalty": -1.0}, "must be positive"),
    ({"outer": fcco.Hinge(), "penalty": 4.0, "smoothing": 0.1}, "has its own weight"),
    ({"outer": PositiveMaximum(), "smoothing": 0.1}, "dimension two or more"),
    ({"method": "squared-hinge", "equality": True}, "`equality` is a setting (for sonex, alexr2, "),
    ({"equality": True, "margin": 0.1}, "would be moved, not made stricter"),
    ({"outer": fcco.TwoSidedHinge(0.1), "smoothing": 0.1, "tolerance": 0.1}, "does not loosen"),
    ({"tolerance": [0.1, 0.2, 0.3]}, "one number or 2"),
    ({"constraints": "gap"}, "is one string: 'gap'"),
    ({"constraints": ["a", "a"]}, "must be 2 different names"),
    ({"constraints": 0}, "must be at least 1"),
])  # fmt: skip
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        penalized(**options)


def test_a_smoothing_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match=r"smoothing=...\)` must be a number"):
        penalized(smoothing=None)
