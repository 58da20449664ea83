"""ALEXR: both its forms equal their transcriptions, keep y in its domain, find saddle points."""

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

DOUBLE, LAM, RHO, KAPPA = torch.float64, 0.4, 1.5, 0.05
START = np.linspace(0.5, 1.5, 4)

# outer function, its dimension, gradient of f (or of f_lambda), lambda
FIRST: dict[str, tuple[fo.AbstractOuter, int, Any, float]] = {
    "squared hinge": (fcco.outer.SquaredHinge(RHO), 1, lambda u: RHO * np.maximum(u, 0), 0.0),
    "smoothed hinge": (fcco.outer.Hinge(RHO), 1, ref.hinge_slope(RHO, LAM), LAM),
    "smoothed two-sided": (
        fcco.outer.TwoSidedHinge(KAPPA, RHO), 2, ref.two_sided_slope(RHO, KAPPA, LAM), LAM,
    ),
}  # fmt: skip
SECOND: dict[str, tuple[fo.AbstractOuter, int, dual.ConjugateProx]] = {
    "hinge": (fcco.outer.Hinge(RHO), 1, dual.hinge_dual(RHO)),
    "absolute": (fcco.outer.Absolute(RHO), 1, dual.absolute_dual(RHO)),
    "squared hinge": (fcco.outer.SquaredHinge(RHO), 1, dual.squared_hinge_dual(RHO)),
    "two-sided hinge": (fcco.outer.TwoSidedHinge(KAPPA, RHO), 2, dual.two_sided_dual(RHO, KAPPA)),
    "maximum": (fcco.outer.CVaR(1 / 3), 3, dual.maximum_dual),
}


def tensor(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=DOUBLE)


def build(
    model: torch.nn.Module, outer: fo.AbstractOuter, dim: int = 1, number: int = 6,
    optimizer: Any = None, dual_step: float = 1.0, theta: float = 0.0, version: str = "v1",
    smoothing: float = 0.0,
) -> fcco.Compositional:  # fmt: skip
    """The dual form (v2), or the tracker that it is with the distance of f* (v1)."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.02)
    if version == "v2":
        return alexr(model, optimizer, outer, number, dim=dim, dual_step=dual_step, theta=theta)
    options: Any = {"dim": dim, "dtype": next(model.parameters()).dtype}
    gamma = dual_step / (1 + dual_step)
    tracker = fcco.tracker.InnerTracker(
        number, gamma=gamma, correction=theta * gamma, read="new", **options
    )
    term = fcco.terms.CoupledTerm(outer, tracker, smoothing=smoothing)
    return fcco.Compositional(model, optimizer, term)


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


# Both versions against the transcription.


@pytest.mark.parametrize(("name", "theta", "independent", "with_g0"), [
    ("squared hinge", 0.0, True, False),
    ("smoothed hinge", 0.6, True, True),
    ("smoothed two-sided", 1.0, False, False),
])  # fmt: skip
def test_first_version_equals_the_transcription(name, theta, independent, with_g0):
    outer, dim, slope, lam = FIRST[name]
    problem, model = ref.Quadratics(dim=dim), Point(START)
    objective = build(model, outer, dim, dual_step=0.7, theta=theta, smoothing=lam)
    assert (objective.previous is None) == (theta == 0), "theta = 0 needs nothing at w_{t-1}"
    common = {"independent": independent, "with_g0": with_g0}
    path, y = dual.alexr(
        problem, START, 80, eta=0.02, alpha=0.7, theta=theta, slope=slope, **common
    )
    ours = run_ours(objective, model, problem, 80, **common)
    assert np.ptp(path, axis=0).max() > 0.05, "the problem must move"
    np.testing.assert_allclose(ours, path, rtol=0, atol=1e-12)
    u = objective.term.tracker.value.squeeze(-1)
    np.testing.assert_allclose(objective.term.smoothed.gradient(u), y.squeeze(), atol=1e-12)


@pytest.mark.parametrize(("name", "theta", "independent", "with_g0"), [
    ("hinge", 0.6, True, True),
    ("absolute", 0.0, True, False),
    ("squared hinge", 1.0, False, False),
    ("two-sided hinge", 0.6, True, False),
    ("maximum", 1.0, True, True),
])  # fmt: skip
def test_second_version_equals_the_transcription(name, theta, independent, with_g0):
    outer, dim, prox = SECOND[name]
    problem, model = ref.Quadratics(dim=dim), Point(START)
    objective = build(model, outer, dim, version="v2", dual_step=0.3, theta=theta)
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


def test_options_change_the_result():
    """Each option of the comparisons must matter on this problem, in both versions."""
    problem = ref.Quadratics()
    for kind in ({"slope": FIRST["smoothed hinge"][2]}, {"conjugate_prox": SECOND["hinge"][2]}):
        base: dict[str, Any] = {"eta": 0.02, "alpha": 0.3, "theta": 0.6, **kind}
        first = dual.alexr(problem, START, 40, **base)[0]
        changes: Any = (
            {"theta": 0.0}, {"alpha": 0.2}, {"independent": False}, {"with_g0": True}, {"nu": 1.0}
        )  # fmt: skip
        for change in changes:
            other = dual.alexr(problem, START, 40, **base | change)[0]
            assert np.abs(other - first).max() > 1e-4, change


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_strongly_convex_term_is_the_inner_step_of_a_proximal_point(version):
    """r(w) = |w - w_0|^2 / (2 nu): one round, left at z."""
    problem, model = ref.Quadratics(), Point(START)
    proximal = fcco.optim.ProximalPoint(
        torch.optim.SGD(model.parameters(), lr=1.0), nu=0.4, eta=0.05, inner_steps=100
    )
    smoothing = LAM if version == "v1" else 0.0
    objective = build(
        model, fcco.outer.Hinge(RHO), optimizer=proximal, version=version, dual_step=0.3, theta=0.6,
        smoothing=smoothing,
    )  # fmt: skip
    kind: Any = (
        {"slope": FIRST["smoothed hinge"][2]}
        if version == "v1"
        else {"conjugate_prox": SECOND["hinge"][2]}
    )
    path, _ = dual.alexr(problem, START, 40, eta=0.05, alpha=0.3, theta=0.6, nu=0.4, **kind)
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
    objective = build(model, outer, number=2, optimizer=optimizer, version="v2", dual_step=0.5)
    for expected in (0.7, 1.4, 2.0):
        take_step(objective, lambda: model.w, torch.tensor([1]))
        np.testing.assert_allclose(objective.term.dual(), [np.nan, expected])


# Saddle points.

RNG = np.random.default_rng(3)
A, B, W0, NU = RNG.normal(size=(7, 4)), RNG.normal(size=7) * 0.5, RNG.normal(size=4), 2.0


def saddle(kind: str, lam: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """cvxpy: w*, y* of (1/n) sum_i f(a_i.w - b_i) + |w - w_0|^2 / (2 nu), f = 2[.]_+ or |.|."""
    w, s, g = cp.Variable(4), cp.Variable(7), cp.Variable(7)
    outer = cp.sum(2 * cp.pos(s) if kind == "hinge" else cp.abs(s)) / 7
    if lam:
        outer += cp.sum_squares(g - s) / (2 * lam * 7)
    equal: list[Any] = [A @ w - B == g] if lam else [A @ w - B == g, g == s]
    problem = cp.Problem(cp.Minimize(outer + cp.sum_squares(w - W0) / (2 * NU)), equal)
    exact = {"tol_gap_abs": 1e-13, "tol_gap_rel": 1e-13, "tol_feas": 1e-13}
    problem.solve(solver=cp.CLARABEL, **exact)
    assert w.value is not None and equal[0].dual_value is not None
    return w.value, 7 * np.asarray(equal[0].dual_value)


@pytest.mark.parametrize(
    ("version", "kind", "lam"), [("v1", "absolute", 0.3), ("v2", "hinge", 0.0)]
)
def test_a_deterministic_run_converges_linearly_to_the_saddle_point(version, kind, lam):
    """All blocks, no noise; v1 with the steps of the theory, v2 with theta = 1."""
    w, y = saddle(kind, lam)
    model = Point(W0)
    theta, eta, alpha = 1.0, 0.3, 0.3
    if version == "v1":
        theta = 0.95
        eta, alpha = NU * (1 - theta) / theta, (1 - theta) / theta  # all blocks sampled
    proximal = fcco.optim.ProximalPoint(
        torch.optim.SGD(model.parameters(), lr=1.0), nu=NU, eta=eta, inner_steps=10_000
    )
    outer = fcco.outer.Hinge(2.0) if kind == "hinge" else fcco.outer.Absolute()
    objective = build(
        model, outer, number=7, optimizer=proximal, version=version, dual_step=alpha, theta=theta,
        smoothing=lam,
    )  # fmt: skip
    errors = []
    for step in range(600):
        take_step(objective, lambda: tensor(A) @ model.w - tensor(B))
        if step % 50 == 49:
            errors.append(np.abs(model.w.detach().numpy() - w).max())
    assert errors[0] > 1e-3 and errors[-1] < 1e-10
    assert all(later < 0.5 * earlier for earlier, later in itertools.pairwise(errors[1:6]))
    if version == "v1":  # the theory's rate is theta per step
        assert errors[5] < 3 * theta**200 * errors[1]
    term = objective.term
    ours = term.dual() if version == "v2" else term.smoothed.gradient(term.tracker.value[:, 0])
    np.testing.assert_allclose(ours, y, atol=1e-6)
    if kind == "hinge":
        np.testing.assert_allclose(term.multipliers(), y / 7, atol=1e-6)
    if version == "v2":
        np.testing.assert_allclose(term.table(), A @ w - B, atol=1e-6)
        np.testing.assert_allclose(term.value(), np.mean(outer(tensor(A @ w - B)).numpy()))
        np.testing.assert_allclose(term.violation(), outer.violation(tensor(A @ w - B)), atol=1e-6)


# Steps and evaluations.


def test_micro_batches_of_one_step_make_one_dual_step():
    ends = []
    for parts in (1, 3):
        model = Point([0.5, -0.3])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        objective = build(model, fcco.outer.Hinge(2.0), number=4, version="v2", theta=0.5,
                          optimizer=optimizer)  # fmt: skip
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
    objective = build(model, fcco.outer.Hinge(2.0), number=3, version="v2", dual_step=0.5)
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


# Refusals.


@pytest.mark.parametrize(
    ("outer", "options", "text"),
    [
        (fo.OneSidedMCP(1.0, 2.0), {}, "is not compatible with alexr: it must be convex"),
        (fcco.outer.Hinge(), {"log_space": True}, "log_space"),
        (fcco.outer.Hinge(), {"read": "new"}, "no such setting: `read`"),
        (fcco.outer.Hinge(), {"dual_step": 0.0}, r"`alexr\(dual_step=...\)` must"),
        (fcco.outer.Hinge(), {"theta": -0.5}, r"`alexr\(theta=...\)` must be at least"),
        (fcco.outer.CVaR(0.5), {}, r"`alexr\(dim=...\)` is needed"),
        (fcco.outer.CVaR(0.5), {"dim": 1}, "but the tracker has `dim=1`"),
    ],
)
def test_refuses_what_cannot_work(outer, options, text):
    model = Point(np.zeros(3))
    with pytest.raises((ValueError, TypeError), match=text):
        alexr(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            outer,
            3,
            **{"dual_step": 1.0} | options,
        )


# Constraints: limits, margin and names of the dual term.


@pytest.mark.parametrize(("theta", "margin"), [(1.0, 0.05), (3.0, 0.0)])
def test_constrained_form_equals_the_transcription(theta, margin):
    """y+ = clip(y + alpha (g + theta (g - g_prev) - tolerance + margin), 0, rho)."""
    problem, start = ref.Quadratics(), np.linspace(0.5, 1.5, 4)
    data, model = TorchQuadratics(problem), Point(start)
    limit = np.array([0.1, -0.2, 0.3, 0.0, 0.5, 0.2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    objective = fcco.constrained(
        model, optimizer, 6, "alexr", penalty=2.0, dual_step=0.4, theta=theta,
        tolerance=limit.tolist(), margin=margin,
    )  # fmt: skip
    w, w_prev, y = start.copy(), start.copy(), np.zeros(6)
    rng, same = np.random.default_rng(1), np.random.default_rng(1)
    for _ in range(80):
        G = w - problem.m
        for i, batch, _ in (sampled := problem.draw(rng, 3, 2)):
            g, past = problem.value(w, i, batch)[0], problem.value(w_prev, i, batch)[0]
            ahead = g + theta * (g - past)
            y[i] = np.clip(y[i] + 0.4 * (ahead - limit[i] + margin), 0, 2.0)
            G = G + y[i] * problem.jacobian(w, i, batch)[0] / len(sampled)
        w_prev, w = w, w - 0.02 * G
        blocks, samples = entries(problem.draw(same, 3, 2), 1)
        values = lambda b=blocks, s=samples: data.values(model.w, b, s)  # noqa: E731
        objective(lambda v=values: (data.loss(model.w), v()), blocks).backward()
        optimizer.step()
        optimizer.zero_grad()
        np.testing.assert_allclose(model.w.detach(), w, rtol=0, atol=1e-12)
    assert np.abs(w - start).max() > 0.1 and 0 < (y > 0).sum() < 6
    np.testing.assert_allclose(objective.multipliers(), y / 6, rtol=0, atol=1e-12)


def test_violation_is_measured_from_the_tolerance_without_the_margin():
    model = Point([0.0])
    objective = fcco.constrained(
        model, torch.optim.SGD(model.parameters(), lr=0.0), ["a", "b"], "alexr",
        penalty=5.0, dual_step=0.5, tolerance=[0.1, 0.2], margin=0.05,
    )  # fmt: skip
    for _ in range(80):  # y of `a` rises to its cap and rests, that of `b` stays 0
        objective(lambda: (model.w.sum(), {"a": 0.4 + 0 * model.w[0], "b": 0.1 + 0 * model.w[0]}))
        objective.close()
    assert objective.violation() == pytest.approx({"a": 0.3, "b": -0.1})
    assert objective.multipliers() == pytest.approx({"a": 2.5, "b": 0.0})


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
