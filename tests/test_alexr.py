"""ALEXR equals its transcription, keeps y in its domain, finds saddle points."""

from __future__ import annotations

import itertools
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
import reference as ref
import reference_dual as dual
import torch
from outer_cases import CONVEX
from outer_cases import Case as OuterCase
from problems import Custom, Point, TorchQuadratics, entries, take_step

import fcco
from fcco import outer as fo
from fcco.methods import alexr
from fcco.terms import DualTerm

DOUBLE, RHO, KAPPA = torch.float64, 1.5, 0.05
START = np.linspace(0.5, 1.5, 4)

# outer function, its dimension, prox of its conjugate
OUTER: dict[str, tuple[fo.AbstractOuter, int, dual.ConjugateProx]] = {
    "hinge": (fcco.outer.Hinge(RHO), 1, dual.hinge_dual(RHO)),
    "absolute": (fcco.outer.Absolute(RHO), 1, dual.absolute_dual(RHO)),
    "squared hinge": (fcco.outer.SquaredHinge(RHO), 1, dual.squared_hinge_dual(RHO)),
    "two-sided hinge": (fcco.outer.TwoSidedHinge(KAPPA, RHO), 2, dual.two_sided_dual(RHO, KAPPA)),
    "maximum": (fcco.outer.CVaR(1 / 3), 3, dual.maximum_dual),
}


def tensor(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=DOUBLE)


def build(
    model: torch.nn.Module, outer: fo.AbstractOuter, number: int = 6, optimizer: Any = None,
    **settings: Any,
) -> fcco.Compositional:  # fmt: skip
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.02)
    return alexr(model, optimizer, outer, number, **{"dual_step": 1.0} | settings)


def run_ours(
    objective: fcco.Compositional, model: Point, problem: ref.Quadratics, steps: int,
    independent: bool = True, with_g0: bool = False,
) -> np.ndarray:  # fmt: skip
    data, rng, path = TorchQuadratics(problem), np.random.default_rng(1), []

    def closure(sampled: Any, which: int) -> Any:
        ids, samples = entries(sampled, which)

        def inner() -> Any:
            values = data.values(model.w, ids, samples)
            return (data.loss(model.w), values) if with_g0 else values

        return inner, ids

    for _ in range(steps):
        sampled = problem.draw(rng, 3, 2)
        inner, ids = closure(sampled, 1)
        take_step(objective, inner, ids, gradient=closure(sampled, 2)[0] if independent else None)
        path.append(model.w.detach().numpy().copy())
    return np.array(path)


@pytest.mark.parametrize(("name", "theta", "independent", "with_g0"), [
    ("hinge", 0.6, True, True),
    ("absolute", 0.0, True, False),
    ("squared hinge", 1.0, False, False),
    ("two-sided hinge", 0.6, True, False),
    ("maximum", 1.0, True, True),
])  # fmt: skip
def test_equals_the_transcription(name, theta, independent, with_g0):
    outer, dim, prox = OUTER[name]
    problem, model = ref.Quadratics(dim=dim), Point(START)
    objective = build(model, outer, dim=dim, dual_step=0.3, theta=theta)
    common = {"independent": independent, "with_g0": with_g0}
    path, y = dual.alexr(
        problem, START, 80, eta=0.02, alpha=0.3, theta=theta, conjugate_prox=prox, **common
    )

    ours = run_ours(objective, model, problem, 80, **common)
    assert np.ptp(path, axis=0).max() > 0.05, "the problem must move"
    np.testing.assert_allclose(ours, path, rtol=0, atol=1e-12)
    np.testing.assert_allclose(objective.term.dual(), y.squeeze(), atol=1e-12)
    # Each multiplier is the slope along the constraint; the two-sided hinge has y = (c, -c).
    if name != "maximum":
        np.testing.assert_allclose(objective.term.multipliers(), y[:, 0] / 6, atol=1e-12)


def test_a_strongly_convex_term_is_the_inner_step_of_a_proximal_point():
    """r(w) = |w - w_0|^2 / (2 nu): one round, left at z."""
    problem, model = ref.Quadratics(), Point(START)
    proximal = fcco.optim.ProximalPoint(
        torch.optim.SGD(model.parameters(), lr=1.0), nu=0.4, eta=0.05, inner_steps=100
    )
    objective = build(model, fcco.outer.Hinge(RHO), optimizer=proximal, dual_step=0.3, theta=0.6)
    steps: Any = {"eta": 0.05, "alpha": 0.3, "theta": 0.6, "nu": 0.4}
    path, _ = dual.alexr(problem, START, 40, conjugate_prox=dual.hinge_dual(RHO), **steps)
    ours = run_ours(objective, model, problem, 40)
    np.testing.assert_allclose(ours, path, rtol=0, atol=1e-12)
    assert proximal.inner_step == 40


@pytest.mark.parametrize("case", CONVEX, ids=repr)
def test_the_rule_is_the_prox_of_the_conjugate(case: OuterCase, alpha=0.8):
    """y+ = prox_{alpha f*}(y + alpha g~) iff y+ is a subgradient of f at (y + alpha g~ - y+)/alpha.

    Checked for every convex outer function, with f written in plain NumPy.
    """
    generator = np.random.default_rng(0)
    v, ahead = (case.points(12, seed=k) for k in range(2))
    tracker = fcco.tracker.InnerTracker(
        12, case.size, gamma=1.0, correction=0.0, read="new", dtype=DOUBLE
    )
    term = DualTerm(case.outer, tracker, alpha)
    term.dual_point.copy_(v)
    tracker.seen.fill_(True)
    at = term.point_at(after := term.ascend(ahead, torch.arange(12)))
    after = term.dual_at(after)
    torch.testing.assert_close(at, (term.dual() + alpha * ahead - after) / alpha)
    others = at.numpy()[None] + 3 * generator.normal(size=(400, *at.shape))
    slope, gap = after.numpy()[None], others - at.numpy()[None]
    product = (slope * gap).sum(-1) if case.size > 1 else slope * gap
    assert (case.plain(others) - case.plain(at.numpy()) - product).min() > -1e-6


def test_a_block_starts_at_zero_also_when_f_has_a_slope_at_zero():
    """f = 2 [u + 1]_+: f*(y) = -y on [0, 2], so y = clip(alpha g + alpha, 0, 2) from y = 0."""
    model = Point([0.4])
    outer = Custom(lambda u: 2 * (u + 1).clamp(min=0), 2.0, convex=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    objective = build(model, outer, number=2, optimizer=optimizer, dual_step=0.5)
    for expected in (0.7, 1.4, 2.0):
        take_step(objective, lambda: model.w, torch.tensor([1]))
        np.testing.assert_allclose(objective.term.dual(), [np.nan, expected])


# Saddle points.

RNG = np.random.default_rng(3)
A, B, W0, NU = RNG.normal(size=(7, 4)), RNG.normal(size=7) * 0.5, RNG.normal(size=4), 2.0


def saddle() -> tuple[np.ndarray, np.ndarray]:
    """cvxpy: w*, y* of (1/n) sum_i 2 [a_i.w - b_i]_+ + |w - w_0|^2 / (2 nu)."""
    w, g = cp.Variable(4), cp.Variable(7)
    equal: Any = A @ w - B == g
    loss = 2 * cp.sum(cp.pos(g)) / 7 + cp.sum_squares(w - W0) / (2 * NU)
    exact = {"tol_gap_abs": 1e-13, "tol_gap_rel": 1e-13, "tol_feas": 1e-13}
    cp.Problem(cp.Minimize(loss), [equal]).solve(solver=cp.CLARABEL, **exact)
    assert w.value is not None and equal.dual_value is not None
    return w.value, 7 * np.asarray(equal.dual_value)


def test_a_deterministic_run_converges_linearly_to_the_saddle_point():
    """All blocks, no noise."""
    (w, y), model, outer = saddle(), Point(W0), fcco.outer.Hinge(2.0)
    proximal = fcco.optim.ProximalPoint(
        torch.optim.SGD(model.parameters(), lr=1.0), nu=NU, eta=0.3, inner_steps=10_000
    )
    objective = build(model, outer, number=7, optimizer=proximal, dual_step=0.3, theta=1.0)
    errors = []
    for step in range(600):
        take_step(objective, lambda: tensor(A) @ model.w - tensor(B))
        if step % 50 == 49:
            errors.append(np.abs(model.w.detach().numpy() - w).max())
    assert errors[0] > 1e-3 and errors[-1] < 1e-10
    assert all(later < 0.5 * earlier for earlier, later in itertools.pairwise(errors[1:6]))
    term = objective.term
    np.testing.assert_allclose(term.dual(), y, atol=1e-6)
    np.testing.assert_allclose(term.multipliers(), y / 7, atol=1e-6)
    np.testing.assert_allclose(term.table(), A @ w - B, atol=1e-6)
    np.testing.assert_allclose(term.value(), np.mean(outer(tensor(A @ w - B)).numpy()))
    np.testing.assert_allclose(term.violation(), outer.violation(tensor(A @ w - B)), atol=1e-6)


# Steps and evaluations.


def test_micro_batches_of_one_step_make_one_dual_step():
    ends = []
    for parts in (1, 3):
        model = Point([0.5, -0.3])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        objective = build(model, fcco.outer.Hinge(2.0), 4, optimizer, theta=0.5)
        rng = np.random.default_rng(0)
        for _ in range(6):
            ids, rows = np.repeat(rng.permutation(4)[:2], 6), tensor(rng.normal(size=(12, 2)))
            for k in range(parts):  # every part holds both blocks
                few, index = rows[k::parts], torch.as_tensor(ids[k::parts])
                objective(lambda few=few, w=model.w: (few @ w).square(), index).backward()
            model.w.grad = tensor(rng.normal(size=2))  # the same motion of w in both runs
            optimizer.step()
        ends.append(objective.term.dual())
    np.testing.assert_allclose(ends[1], ends[0], rtol=0, atol=1e-13)
    assert ends[0].nansum() > 0.1


def test_a_missed_block_reports_nan_and_evaluation_changes_nothing():
    model = Point([1.0, -2.0, 0.5])
    objective = build(model, fcco.outer.Hinge(2.0), number=3, dual_step=0.5)
    term = objective.term
    assert isinstance(term, DualTerm) and isinstance(term, fcco.terms.CoupledTerm)
    loss = take_step(objective, lambda: model.w[:2], torch.tensor([0, 1]))
    # y = (0.5, 0); c = (g~ + 0/alpha) - y/alpha = (0, -2), so f(c) = 0
    assert loss == 0.0
    np.testing.assert_allclose(term.dual(), [0.5, 0.0, np.nan])
    np.testing.assert_allclose(term.multipliers(), [0.5 / 3, 0.0, np.nan])
    np.testing.assert_allclose(term.violation(), [1.0, -2.0, np.nan], atol=1e-15)
    for _ in range(8):  # y rests at its bound, c at g
        loss = take_step(objective, lambda: model.w[:2] * 0 + tensor([1.5, -2.0]),
                         torch.tensor([0, 1]))  # fmt: skip
    assert loss == pytest.approx(2 * 1.5 / 2) and term.value().item() == pytest.approx(loss)
    before = {k: v.clone() for k, v in objective.named_buffers()}
    objective.eval()
    batch = objective(lambda: model.w)
    assert batch.item() == pytest.approx(2 * model.w.detach().clamp(min=0).mean().item())
    objective.train()
    with torch.no_grad():
        objective(lambda: model.w)
    for name, buffer in objective.named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0, equal_nan=True, msg=name)


# Constraints: limits, margin and names of the dual term.


@pytest.mark.parametrize(("theta", "margin"), [(1.0, 0.05), (3.0, 0.0)])
def test_constrained_form_equals_the_transcription(theta, margin):
    """f = rho [.]_+ of g - tolerance + margin."""
    problem, model = ref.Quadratics(), Point(START)
    limit = np.array([0.1, -0.2, 0.3, 0.0, 0.5, 0.2])
    objective = fcco.constrained(
        model, torch.optim.SGD(model.parameters(), lr=0.02), 6, "alexr", penalty=2.0, dual_step=0.4,
        theta=theta, tolerance=limit.tolist(), margin=margin,
    )  # fmt: skip
    common = {"independent": False, "with_g0": True}
    path, y = dual.alexr(
        problem, START, 80, eta=0.02, alpha=0.4, theta=theta, limit=limit - margin,
        conjugate_prox=dual.hinge_dual(2.0), **common,
    )  # fmt: skip
    ours = run_ours(objective, model, problem, 80, **common)
    np.testing.assert_allclose(ours, path, rtol=0, atol=1e-12)
    assert np.abs(path[-1] - START).max() > 0.1 and 0 < (y > 0).sum() < 6
    np.testing.assert_allclose(objective.multipliers(), y[:, 0] / 6, rtol=0, atol=1e-12)


@pytest.mark.parametrize("index", [None, [1, 0, 1]])
def test_a_warm_up_takes_the_limits_off_once(index):
    model = Point([0.0])
    objective = fcco.constrained(
        model, torch.optim.SGD(model.parameters(), lr=0.0), 2, "alexr",
        penalty=5.0, dual_step=0.5, tolerance=[0.1, 0.2], margin=0.05,
    )  # fmt: skip
    values = torch.tensor([1.0, 2.0] if index is None else [3.0, 1.0, 1.0], dtype=torch.float64)
    blocks = None if index is None else torch.tensor(index)
    objective.warm_up([(lambda: values, blocks)])
    np.testing.assert_allclose(objective.violation(), [0.9, 1.8])
    np.testing.assert_allclose(objective.multipliers(), [0.475 / 2, 0.925 / 2])
