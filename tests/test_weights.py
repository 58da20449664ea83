"""OOA: projections onto the capped simplex, weights as state, and runs to known optima."""

from __future__ import annotations

import itertools
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
import reference as ref
import reference_dual as dual
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Point, TorchQuadratics, entries, take_step

import fcco
from fcco import methods
from fcco.group_dro import GroupObjective
from fcco.methods import ooa
from fcco.rules.group_weights import mirror_ascent, project_kl_capped
from fcco.terms import GroupWeights

DOUBLE = torch.float64
GEOMETRIES = ["kl", "euclidean"]


def tensor(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=DOUBLE)


def assert_in_simplex(p: torch.Tensor, cap: float, tolerance: float = 1e-12) -> None:
    assert torch.isfinite(p).all()
    assert p.min() >= 0 and p.max() <= cap * (1 + tolerance)
    assert (p.sum(-1) - 1).abs().max() <= tolerance


@st.composite
def logits_and_caps(draw: st.DrawFn) -> tuple[np.ndarray, float]:
    size = draw(st.integers(1, 9))
    spread = draw(st.sampled_from([0.0, 1e-3, 1.0, 6.0]))
    steps = draw(st.lists(st.integers(-8, 8), min_size=size, max_size=size))  # ties are common
    share = st.one_of(st.integers(1, size).map(lambda k: k / size), st.floats(1 / size, 1.0))
    return spread * np.array(steps, dtype=float) / 8, 1 / (draw(share) * size)


# The projection in relative entropy.


@settings(max_examples=60, deadline=None)
@given(logits_and_caps())
def test_kl_projection_equals_the_sorted_rule_and_meets_its_optimality_condition(case):
    logits, cap = case
    p = project_kl_capped(tensor(logits), cap)
    assert_in_simplex(p, min(cap, 1.0))
    np.testing.assert_allclose(p, dual.kl_capped(np.exp(logits), cap), rtol=0, atol=1e-13)
    free = p.numpy() < cap * (1 - 1e-12)
    factors = p.numpy() / np.exp(logits)  # c where p < cap, at most c elsewhere
    if free.any():
        assert np.ptp(np.log(factors[free])) < 1e-10
        assert factors[~free].max(initial=0) <= factors[free].min() * (1 + 1e-10)


@pytest.mark.parametrize("cap", [1.0, 0.3])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_mirror_ascent_maximises_what_it_says(geometry, cap):
    """max <p, l> - D(p, p_old) / eta over Omega, by cvxpy."""
    rng = np.random.default_rng(0)
    old, losses, step = np.array([0.21, 0.2, 0.2, 0.19, 0.2]), 2 * rng.normal(size=5), 0.7
    p = cp.Variable(5)
    distance = cp.sum(cp.kl_div(p, old)) if geometry == "kl" else cp.sum_squares(p - old) / 2
    constraints = [cp.sum(p) == 1, p >= 0, p <= cap]
    problem = cp.Problem(cp.Maximize(losses @ p - distance / step), constraints)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    ours = mirror_ascent(tensor(old), tensor(losses), step, cap, geometry)
    assert p.value is not None
    np.testing.assert_allclose(ours, p.value, atol=2e-6)
    assert_in_simplex(ours, cap)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("cap", [1.0, 0.5, 1 / 3, 0.25])
def test_extreme_logits_neither_overflow_nor_leave_the_simplex(cap, dtype):
    top = torch.finfo(dtype).max
    rows = [
        [1e4, -1e4, 0.0, 0.0], [1e30, 1e30, 0.0, -1e30], [top, -top, top, 1.0],
        [-top, -top, -top, -top], [np.inf, 0.0, 1.0, 2.0], [-np.inf, 0.0, 0.0, 0.0],
        [-np.inf] * 4, [-1e5, -1e5 - 1, -1e5 - 2, -2e5], [700.0, 800.0, 900.0, 1000.0],
    ]  # fmt: skip
    for row in rows:
        p = project_kl_capped(torch.tensor(row, dtype=dtype), cap)
        assert_in_simplex(p, cap, 1e-6 if dtype == torch.float32 else 1e-12)
    p = project_kl_capped(torch.tensor(rows[0], dtype=dtype), cap)
    expected = {1.0: [1, 0, 0, 0], 0.5: [0.5, 0, 0.25, 0.25]}.get(cap)
    if expected is not None:
        np.testing.assert_allclose(p, expected, atol=1e-6)


def test_a_weight_that_underflowed_returns():
    """Without the floor 0 * exp(.) stays 0 for ever."""
    p = mirror_ascent(tensor([0.5, 0.5]), tensor([2000.0, 0.0]), 1.0, 1.0)
    assert p.tolist() == [1.0, 0.0]
    steps = 0
    while p[1] < 0.5 and steps < 100:
        p, steps = mirror_ascent(p, tensor([0.0, 1.0]), 1.0, 1.0), steps + 1
    assert steps == 28  # log(1e12) = 27.6
    for other in (1e-300, 1e-12, 0.0):
        floored = mirror_ascent(tensor([1.0, other]), tensor([0.0, 1.0]), 1.0, 1.0)
        assert floored[1].item() == pytest.approx(np.e * 1e-12, rel=1e-9)


# The recipe against the transcription.


def run_ours(
    problem: ref.Quadratics, start: np.ndarray, steps: int, optimizer: Any = None,
    with_g0: bool = False, blocks: int = 3, build: Any = ooa, **options: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, GroupObjective]:  # fmt: skip
    data, model = TorchQuadratics(problem), Point(start)
    make = optimizer or (lambda p: torch.optim.SGD(p, lr=0.03))
    objective = build(model, make(model.parameters()), problem.num_inner, **options)
    rng = np.random.default_rng(1)
    path, weights, losses = [], [], []
    for _ in range(steps):
        ids, samples = entries(problem.draw(rng, blocks, 2), 1)

        def inner(ids=ids, samples=samples):
            values = data.values(model.w, ids, samples)
            return (data.loss(model.w), values) if with_g0 else values

        loss = take_step(objective, inner, ids)
        path.append(model.w.detach().numpy().copy())
        weights.append(objective.group_weights().numpy())
        losses.append(loss)
    return np.array(path), np.array(weights), np.array(losses), objective


START = np.linspace(0.5, 1.5, 4)


@pytest.mark.parametrize(
    "geometry, scaling, ratio, kind",
    [
        ("kl", "unbiased", None, "sgd"),
        ("kl", "batch", 0.4, "momentum"),
        ("kl", "unbiased", 0.75, "adam"),
        ("euclidean", "batch", None, "adam"),
        ("euclidean", "unbiased", 0.4, "sgd"),
        ("euclidean", "batch", 0.75, "momentum"),
    ],
)
def test_equals_the_transcription(geometry, scaling, ratio, kind):
    problem = ref.Quadratics()
    optimizers: dict[str, Any] = {
        "sgd": (None, lambda w, G: w - 0.03 * G),
        "momentum": (lambda p: fcco.optim.momentum_type(p, 0.03, 0.2), ref.Momentum(0.03, 0.2)),
        "adam": (lambda p: fcco.optim.adam_type(p, 0.03, 0.2), ref.Adam(0.03, 0.2)),
    }
    make, update = optimizers[kind]
    cap = 1.0 if ratio is None else 1 / (ratio * 6)
    common: dict[str, Any] = {"step": 0.4 if geometry == "kl" else 0.1, "geometry": geometry}
    common |= {"scaling": scaling, "with_g0": kind == "adam"}
    path, weights, losses = dual.ooa(problem, START, 200, update, cap=cap, **common)
    ours = run_ours(problem, START, 200, make, ratio=ratio, **common)
    assert np.ptp(path, axis=0).max() > 0.05 and np.ptp(weights, axis=0).max() > 0.02
    capped = (weights > cap * (1 - 1e-12)).any(1)
    assert ratio is None or 10 < capped.sum() < 200, "the cap binds in some steps"
    np.testing.assert_allclose(ours[0], path, rtol=0, atol=1e-12)
    np.testing.assert_allclose(ours[1], weights, rtol=0, atol=1e-12)
    if not common["with_g0"]:
        np.testing.assert_allclose(ours[2], losses, rtol=0, atol=1e-12)
    assert_in_simplex(tensor(ours[1]), cap)


@pytest.mark.parametrize("method, gamma, offset, ratio", [
    ("ooa", 0.3, None, None), ("ctc_dro", 1.0, 0.5, None), ("ctc_dro", 0.2, 0.1, 0.4)
])  # fmt: skip
def test_averaged_losses_and_smoothed_weights_equal_the_transcription(method, gamma, offset, ratio):
    problem, cap = ref.Quadratics(), 1.0 if ratio is None else 1 / (ratio * 6)
    path, weights, losses = dual.ooa(
        problem, START, 200, lambda w, G: w - 0.03 * G, cap=cap, step=0.2, gamma=gamma,
        offset=offset,
    )  # fmt: skip
    options: dict[str, Any] = {} if offset is None else {"offset": offset}
    ours = run_ours(
        problem, START, 200, ratio=ratio, step=0.2, gamma=gamma, build=getattr(methods, method),
        **options,
    )  # fmt: skip
    assert np.ptp(weights, axis=0).max() > 0.05
    for found, expected in zip(ours[:3], (path, weights, losses), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("offset", [0.05, 0.5, 20.0])
def test_smoothed_weights_end_affine_in_the_losses(offset):
    """The maximiser of sum_i L_i log(p_i + a), by cvxpy; group DRO's is one group."""
    losses = np.array([0.4, 0.2, 1.0, 0.6, 0.8])
    model = Point(losses)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    objective = methods.ctc_dro(model, optimizer, 5, offset=offset, step=0.05 * (1 + offset))
    for _ in range(1500):
        take_step(objective, lambda: model.w)
    p = cp.Variable(5, nonneg=True)
    whole: Any = [cp.sum(p) == 1]
    cp.Problem(cp.Maximize(losses @ cp.log(p + offset)), whole).solve(solver=cp.CLARABEL)
    assert p.value is not None
    np.testing.assert_allclose(objective.group_weights(), p.value, atol=5e-5)


# Reductions and invariants.


def test_estimates_are_unbiased_over_all_choices_of_groups_and_samples():
    """Enumerated: E lhat = g (seen through a small Euclidean move) and E G = sum p_i grad g_i."""
    n, blocks, samples = 5, 2, 3
    rng = np.random.default_rng(0)
    slopes, shifts = rng.normal(size=(n, samples)), rng.normal(size=(n, samples))
    w, step = 0.7, 1e-3
    start = tensor([0.3, 0.1, 0.25, 0.15, 0.2])

    def one(chosen: tuple[int, ...], picked: tuple[int, ...], eta: float):
        model = Point([w])
        objective = ooa(model, torch.optim.SGD(model.parameters(), lr=0.0), n, ratio=0.4,
                        step=eta, geometry="euclidean")  # fmt: skip
        objective.term.weights.copy_(start)
        a, b = tensor(slopes[chosen, picked]), tensor(shifts[chosen, picked])
        objective(lambda: a * model.w + b, torch.tensor(chosen)).backward()
        assert model.w.grad is not None
        objective.close()
        return objective.group_weights().numpy(), model.w.grad.item()

    draws = list(itertools.product(
        itertools.combinations(range(n), blocks), itertools.product(range(samples), repeat=blocks)
    ))  # fmt: skip
    moved = np.mean([one(*draw, step)[0] for draw in draws], axis=0)
    g = (slopes * w + shifts).mean(1)
    np.testing.assert_allclose((moved - start.numpy()) / step, g - g.mean(), atol=1e-11)
    gradient = np.mean([one(*draw, 1e-14)[1] for draw in draws])
    assert gradient == pytest.approx(start.numpy() @ slopes.mean(1), abs=1e-12)


# Weights as state.


def accumulating(parts: int, geometry: Any) -> GroupObjective:
    """Each step: a batch in `parts` micro-batches."""
    rng, model = np.random.default_rng(0), Point([0.5, -0.3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    objective = ooa(model, optimizer, 6, ratio=0.5, step=0.3, geometry=geometry)
    for _ in range(5):
        ids = np.repeat(rng.choice(6, 4, replace=False), 2)
        rows = tensor(2 * rng.normal(size=(8, 2)))
        for part in np.array_split(np.arange(8), parts):
            inner = lambda few=rows[part]: (few @ model.w).square()  # noqa: E731
            objective(inner, torch.as_tensor(ids[part])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return objective


@pytest.mark.parametrize(("parts", "geometry"), [(3, "kl"), (2, "euclidean")])
def test_the_weights_move_once_per_optimizer_step(parts, geometry):
    whole, objective = accumulating(1, geometry), accumulating(parts, geometry)
    np.testing.assert_allclose(objective.group_weights(), whole.group_weights(), atol=1e-14)
    assert objective.term.step == whole.term.step == 5
    assert (whole.group_weights() - 1 / 6).abs().max() > 0.05


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_loss_that_is_skipped_moves_no_weight(bad):
    model = Point([1.0, 2.0, 3.0])
    skipping = ooa(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, on_nonfinite="skip")
    take_step(skipping, lambda: model.w + bad)
    assert skipping.group_weights().tolist() == [1 / 3] * 3, "no group, no move"
    assert skipping.group_losses().isnan().all() and skipping.cvar().isnan()
    take_step(skipping, lambda: torch.stack([model.w[0], model.w[1] + bad]), torch.tensor([0, 1]))
    assert skipping.group_losses().isnan().tolist() == [False, True, True]


def test_weights_keep_their_precision():
    model = torch.nn.Linear(2, 1).to(torch.bfloat16)
    objective = ooa(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, step=1e-3)
    objective.to(torch.bfloat16)
    assert objective.group_weights().dtype == torch.float32
    x = torch.arange(6, dtype=torch.bfloat16).view(3, 2)
    take_step(objective, lambda: model(x).squeeze(1).square())
    assert objective.group_weights().dtype == torch.float32
    assert (objective.group_weights() - 1 / 3).abs().max() > 1e-6, "a small move is not lost"
    assert objective.double().group_weights().dtype == DOUBLE


# Refusals.


@pytest.mark.parametrize("options", [
    {"step": 0.0}, {"ratio": 0.0}, {"ratio": 1.5}, {"geometry": "l1"}, {"scaling": "mean"}
])  # fmt: skip
def test_refuses_what_cannot_work(options):
    model = Point(np.zeros(3))
    with pytest.raises(ValueError, match=next(iter(options))):
        ooa(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, **options)


@pytest.mark.parametrize("options", [{"dim": 2}, {"read": "old"}, {"log_space": True}])
def test_a_term_refuses_a_tracker_that_does_not_hold_the_current_losses(options):
    tracker = fcco.tracker.ema_tracker(3, **{"gamma": 1.0, "read": "new", **options})
    with pytest.raises(ValueError, match=r"`GroupWeights\(tracker=...\)` must have dim=1"):
        GroupWeights(tracker, 0.1, 0.5)
