"""Penalised constraints against closed forms, cvxpy's multipliers and the laws of the penalty."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from problems import Point, SumOfHinges, box, decay, program, smoothed_hinge, take_step

import fcco
from fcco.diagnostics import kkt
from fcco.outer import DeadZone

DOUBLE, A, B, M = torch.float64, 1.0, 0.3, 3  # the box problem: every multiplier is 0.7
ALEXR2: dict[str, Any] = {"gamma": 0.2, "correction": 0.2 * 0.125, "read": "new"}


def run(problem, method="sonex", steps=400, lr=0.01, blocks=None, word="sonex", **options):
    """Train with step sizes that fall to 0; the last w and its objective."""
    number = len(problem.limits)
    model = Point(np.zeros(len(problem.a)))
    optimizer: Any = fcco.optim.momentum_type(model.parameters(), lr=lr, beta=0.2)
    if method == "alexr2":
        outer = fcco.optim.momentum_type(model.parameters(), lr=0.5, beta=0.2)
        optimizer = fcco.optim.ProximalPoint(outer, nu=0.5, eta=0.02, inner_steps=5)
        options = options | ALEXR2
    settings: dict[str, Any] = {"gamma": 0.1} | options
    objective = fcco.constrained(model, optimizer, number, word, **settings)
    for step in range(steps):
        decay(optimizer, (1 - step / steps) ** 1.5)
        index = torch.randperm(number, generator=problem.generator)[:blocks].sort().values
        take_step(objective, problem.sample(model.w, index), index)
    return model, objective


# The box problem: closed forms for every kind of penalty.


LIMITS = torch.tensor([-0.2, 0.1, 0.4], dtype=DOUBLE)


@pytest.mark.parametrize("options, residual", [
    ({"penalty": 6.0, "smoothing": 0.04}, (A - B) * 0.12 / 1.12),
    ({"penalty": 6.0, "smoothing": 0.04, "method": "alexr2"}, (A - B) * 0.12 / 1.12),
    # Below the threshold m nu* of an exact penalty the limit is not enforced.
    ({"penalty": 1.5, "smoothing": 0.02, "lr": 0.05}, A - B - 1.5 / M),
    ({"word": "hinge", "penalty": 6.0, "gamma": 0.03}, 0.0),
    # about m nu* / rho
    ({"word": "squared-hinge", "read": "old", "penalty": 60.0}, (A - B) / (1 + 60 / M)),
    ({"tolerance": fcco.Equal(0.0), "penalty": 6.0, "smoothing": 0.02}, (A - B) * 0.06 / 1.06),
    ({"smoothing": 0.02, "outer": DeadZone(0.1, 6.0)}, 0.1 + (A - B - 0.1) * 0.06 / 1.06),
    ({"smoothing": 0.02, "penalty": 6.0, "margin": 0.1}, -0.1 + (A - B + 0.1) * 0.06 / 1.06),
    ({"smoothing": fcco.Annealed(0.1, 0.01, steps=200), "penalty": 6.0}, (A - B) * 0.03 / 1.03),
    ({"smoothing": 0.02, "penalty": 6.0, "tolerance": LIMITS},
     LIMITS + (A - B - LIMITS) * 0.06 / 1.06),
])  # fmt: skip
def test_residual_violation_of_each_kind(options, residual):
    model, objective = run(box(A, B, M, 0.03), **options)
    np.testing.assert_allclose(model.w.detach() - B, residual, atol=0.012)
    tracked = objective.term.tracker.value[:, 0]
    if options.get("tolerance") is LIMITS:
        torch.testing.assert_close(objective.violation(), tracked - LIMITS)
    if options.get("penalty") == 1.5:
        np.testing.assert_allclose(objective.multipliers(), 1.5 / M)


def test_equality_holds_from_below_too():
    model, objective = run(
        box(-0.4, B, M, 0.03), penalty=6.0, smoothing=0.02, tolerance=fcco.Equal(0.0)
    )
    np.testing.assert_allclose(B - model.w.detach(), 0.7 * 0.06 / 1.06, atol=0.006)
    assert (objective.violation() > 0).all() and (objective.multipliers() < 0).all()


# Problems solved by cvxpy, or by one equation.


@pytest.mark.parametrize("method", ["sonex", pytest.param("alexr2", marks=pytest.mark.slow)])
def test_quadratic_program_with_sampled_constraints(method):
    problem, lam, rho, m = program(), 0.01, 16.0, 8
    _, multipliers = problem.solve()
    np.testing.assert_allclose(multipliers, [0.6, 0.5, 0.4, 0.3, 0, 0, 0, 0], atol=1e-6)
    smoothed, _ = problem.solve(smoothed_hinge(rho, lam, m))
    model, _ = run(problem, method, 1200, lr=0.03, blocks=4, penalty=rho, smoothing=lam)
    assert np.linalg.norm(model.w.detach().numpy() - smoothed) < 0.015
    excess = problem.exact(model.w).detach().numpy()
    np.testing.assert_allclose(excess[:4], lam * m * multipliers[:4], atol=0.012)
    assert (excess[4:] < 0).all()
    best = kkt(lambda: problem.loss(model.w), lambda i: problem.exact(model.w)[i], m, [model.w])
    np.testing.assert_allclose(best.multipliers, multipliers, atol=0.06)


# Reports and errors.


def penalized(
    constraints: Any = 2, model: Any = None, **options: Any
) -> fcco.constraints.ConstrainedObjective:
    model = model or Point([0.5, -1.0])
    settings: dict[str, Any] = {"gamma": 0.5, "correction": 0.0}
    if "outer" not in options:
        settings |= {"penalty": 4.0, "smoothing": 0.1}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fcco.constrained(model, optimizer, constraints, "sonex", **(settings | options))


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
        ({"gab": model.w[0]}, "given for .'gab'.*names are: gap, rate"),
        ({"gap": 0.5}, "must be a tensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            objective(lambda wrong=wrong: (model.w.sum(), wrong))
    with pytest.raises(ValueError, match="leave `index` out"):
        objective(lambda: (model.w.sum(), {"gap": model.w[0]}), torch.tensor([0]))


def test_two_sided_hinge_reports_the_gap():
    model = Point([0.9, 0.5, 0.1, 0.2, 0.7, 0.0])
    objective = penalized(3, model, outer=fcco.outer.TwoSidedHinge(0.1, 6.0), smoothing=0.05)
    objective(lambda: (0 * model.w.sum(), model.w.view(3, 2)[:2]), torch.tensor([0, 1]))
    objective.close()
    gaps = np.array([0.4, 0.1, np.nan]) - 0.1
    np.testing.assert_allclose(objective.violation(), gaps, atol=1e-15)
    expected = np.minimum(np.maximum(gaps, 0) / (2 * 0.05), 6.0) / 3
    np.testing.assert_allclose(objective.multipliers(), expected, atol=1e-15)


def test_a_vector_of_constraints_in_each_block_reports_one_number_for_each():
    model = Point([0.5, -1.0, 0.2, 0.3])
    objective = penalized(2, model, outer=SumOfHinges(4.0, dim=2), smoothing=0.1)
    objective(lambda: (0 * model.w.sum(), model.w[:2].view(1, 2)), torch.tensor([1]))
    objective.close()
    nan = np.nan
    np.testing.assert_allclose(objective.violation(), [[nan, nan], [0.5, -1.0]])
    np.testing.assert_allclose(objective.multipliers(), [[nan, nan], [2.0, 0.0]])
    assert objective.report(model.w.detach().view(2, 2)).violation == 0.5
