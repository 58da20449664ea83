"""Li et al. 2024, Yang et al. 2025, Liu and Xu 2025: transcriptions, laws, known KKT points."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference as ref
import reference_penalties as rival
import torch
from problems import Point, TorchQuadratics, box, entries, take_step
from torch import Tensor

import fcco
from fcco.constraints import ConstrainedObjective

DOUBLE = torch.float64
STEPS, NUMBER = 200, 6
NAMES = [f"c{k}" for k in range(NUMBER)]
TOLERANCE = np.linspace(-0.3, 0.4, NUMBER)
START = np.linspace(0.5, 1.5, 4)
PROBLEM = ref.Quadratics()
DATA = TorchQuadratics(PROBLEM)

# Transcriptions.


def closure(model: Point, sampled: list[tuple], which: int, by_name: bool):
    """(loss, values) of a drawn batch, one entry per sample or a mean by name."""
    blocks, samples = entries(sampled, which)

    def inner() -> Any:
        values = DATA.values(model.w, blocks, samples).squeeze(1)
        if by_name:
            present = [s[0] for s in sampled]
            return DATA.loss(model.w), {NAMES[k]: values[blocks == k].mean() for k in present}
        return DATA.loss(model.w), values

    return inner, None if by_name else blocks


def follow(
    objective: ConstrainedObjective,
    model: Point,
    draw: Callable[[np.random.Generator, int], list[tuple]],
    by_name: bool = False,
    independent: bool = False,
) -> np.ndarray:
    """The iterates of a run on the batches that the transcription draws."""
    rng, path = np.random.default_rng(1), []
    for step in range(STEPS):
        sampled = draw(rng, step)
        inner, index = closure(model, sampled, 1, by_name)
        other = closure(model, sampled, 2, by_name)[0] if independent else None
        take_step(objective, inner, index, gradient=other)
        path.append(model.w.detach().numpy().copy())
    return np.array(path)


def compare(path: np.ndarray, expected: np.ndarray) -> None:
    assert np.ptp(expected, axis=0).max() > 0.05, "the problem must move"
    np.testing.assert_allclose(path, expected, rtol=0, atol=1e-12)


def three_blocks(rng: np.random.Generator, step: int) -> list[tuple]:
    return PROBLEM.draw(rng, 3, 2)


@pytest.mark.parametrize(
    "read, kind, by_name",
    [("old", "momentum", True), ("old", "adam", False), ("new", "adam", True)],
)
def test_squared_hinge(read, kind, by_name):
    model = Point(START)
    if kind == "momentum":
        optimizer, update = (
            fcco.optim.momentum_type([model.w], lr=0.02, beta=0.2),
            ref.Momentum(0.02, 0.2),
        )
    else:
        optimizer, update = fcco.optim.adam_type([model.w], lr=0.02, beta=0.2), ref.Adam(0.02, 0.2)
    default: dict[str, Any] = {} if read == "new" else {"read": read}
    objective = fcco.constrained(
        model, optimizer, NAMES if by_name else NUMBER, "squared-hinge", penalty=4.0, gamma=0.3,
        tolerance=TOLERANCE.tolist(), margin=0.05, **default,
    )  # fmt: skip
    expected, u = rival.li2024(
        PROBLEM, START, STEPS, update, rho=4.0, gamma=0.3, read=read,
        tolerance=TOLERANCE, margin=0.05,
    )  # fmt: skip
    compare(follow(objective, model, three_blocks, by_name), expected)
    np.testing.assert_allclose(objective.term.tracker.value[:, 0], u, rtol=0, atol=1e-12)
    excess = np.maximum(u - TOLERANCE + 0.05, 0)
    np.testing.assert_allclose(numbers(objective.multipliers()), 4.0 / NUMBER * excess, atol=1e-12)


@pytest.mark.parametrize(
    "correction, by_name", [("auto", True), ("auto", False), (0.0, True), (0.4, False)]
)
def test_hinge(correction, by_name):
    model = Point(START)
    optimizer = torch.optim.SGD([model.w], lr=0.02)
    objective = fcco.constrained(
        model, optimizer, NAMES if by_name else NUMBER, "hinge", penalty=2.0, gamma=0.3,
        correction=correction, tolerance=TOLERANCE.tolist(), margin=0.05,
    )  # fmt: skip
    expected, u = rival.yang2025(
        PROBLEM, START, STEPS, 0.02, rho=2.0, gamma=0.3, tolerance=TOLERANCE, margin=0.05,
        correction=0.7 * 3 / NUMBER if correction == "auto" else correction,
    )  # fmt: skip
    compare(follow(objective, model, three_blocks, by_name), expected)
    np.testing.assert_allclose(objective.term.tracker.value[:, 0], u, rtol=0, atol=1e-12)
    single = numbers(objective.multipliers())
    assert set(np.round(single, 12)) <= {0.0, round(2.0 / NUMBER, 12)}, "0 or rho/m"


@pytest.mark.parametrize(
    "width, independent, by_name", [(0.4, False, True), (0.4, True, False), (0.0, True, True)]
)
def test_recursive_hinge(width, independent, by_name):
    model, beta, q = Point(START), 2.0, 7
    objective = fcco.constrained(
        model, torch.optim.SGD([model.w], lr=0.02), NAMES if by_name else NUMBER,
        "recursive-hinge", penalty=beta, smoothing=width / beta, refresh_every=q,
        tolerance=TOLERANCE.tolist(), margin=0.05,
    )  # fmt: skip
    expected, history = rival.liu2025(
        PROBLEM, START, STEPS, 0.02, beta=beta, width=width, refresh_every=q, large=8, small=2,
        independent=independent, tolerance=TOLERANCE, margin=0.05,
    )  # fmt: skip

    def draw(rng: np.random.Generator, step: int) -> list[tuple]:
        assert objective.refresh_due == (step % q == 0)
        return PROBLEM.draw(rng, NUMBER, 8 if objective.refresh_due else 2)

    compare(follow(objective, model, draw, by_name, independent), expected)
    u = history[-1]
    tracked = objective.term.tracker.value.flatten()
    np.testing.assert_allclose(tracked, u, rtol=0, atol=1e-11)
    np.testing.assert_allclose(numbers(objective.violation()), u - TOLERANCE, atol=1e-11)


def numbers(report: Any) -> np.ndarray:
    return np.array(list(report.values()) if isinstance(report, dict) else report.tolist())


# Laws on the box w <= 0.3.

A, B, M = 1.0, 0.3, 3  # w* = 0.3, every multiplier 0.7


def test_averaged_multipliers_of_the_hinge_find_the_dual_solution():
    """A single multiplier is 0 or rho/m = 2; the time average is nu* = 0.7."""
    model, problem = Point(np.full(M, B)), box(A, B, M, 0.1)
    objective = fcco.constrained(
        model, torch.optim.SGD(model.parameters(), lr=0.02), M, "hinge", penalty=6.0, gamma=0.1
    )
    found = []
    for _ in range(1500):
        take_step(objective, problem.sample(model.w, torch.arange(M)), torch.arange(M))
        found.append(objective.multipliers())
    assert set(found[-1].tolist()) <= {0.0, 2.0}
    np.testing.assert_allclose(torch.stack(found[-1000:]).mean(0), A - B, atol=0.03)


def exact_run(objective: ConstrainedObjective, model: Point, steps: int) -> np.ndarray:
    """The iterates without noise."""
    problem, path = box(A, B, M, 0.0), []
    for _ in range(steps):
        take_step(objective, lambda: (problem.loss(model.w), problem.exact(model.w)))
        path.append(model.w.detach().numpy().copy())
    return np.array(path)


@pytest.mark.parametrize("rho", [30.0, 480.0])
def test_residual_infeasibility_of_the_squared_hinge(rho):
    """rho/m [w - b] = a - w at the end: w - b = nu*/(1 + rho/m), about m nu*/rho."""
    model = Point(np.zeros(M))
    objective = fcco.constrained(
        model, torch.optim.SGD([model.w], lr=0.5 / (1 + rho / M)), M, "squared-hinge", penalty=rho,
        gamma=1.0,
    )  # fmt: skip
    path = exact_run(objective, model, 200)
    np.testing.assert_allclose(path[-1] - B, 0.7 / (1 + rho / M), atol=1e-9)
    np.testing.assert_allclose(objective.multipliers(), 0.7 / (1 + M / rho), atol=1e-7)


def spread(path: np.ndarray) -> float:
    return float(np.ptp(path[-500:], axis=0).max())


def test_loop_gain_of_twelve_cycles_and_the_correction_removes_it():
    """Gain lr (rho/m)(1/gamma + 1/beta) = 12; the exact solution is b + 0.7/41."""
    gamma, beta, rho, lr = 0.05, 0.1, 40.0 * M, 0.01
    model = Point(np.zeros(M))
    objective = fcco.constrained(
        model, fcco.optim.momentum_type([model.w], lr=lr, beta=beta), M, "squared-hinge",
        penalty=rho,
        gamma=gamma, read="old",
    )  # fmt: skip
    path = exact_run(objective, model, 1000)
    assert spread(path) > 0.05
    model = Point(np.zeros(M))
    corrected = fcco.constrained(
        model, fcco.optim.momentum_type([model.w], lr=lr, beta=beta), M, "hinge",
        outer=fcco.outer.SquaredHinge(rho), gamma=gamma, correction=1 - gamma,
    )  # fmt: skip
    path = exact_run(corrected, model, 1000)
    assert spread(path) < 1e-6
    np.testing.assert_allclose(path[-1] - B, 0.7 / 41, atol=1e-6)


# Laws of the recursive estimates.


def spider(model: Point, lr: float = 0.02, **changes: Any) -> Any:
    settings: dict[str, Any] = {"penalty": 2.0, "smoothing": 0.05, "refresh_every": 10} | changes
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return fcco.constrained(model, optimizer, NUMBER, "recursive-hinge", **settings)


def full_values(w: Tensor) -> Tensor:
    """The constraints on all ten samples."""
    blocks = torch.arange(NUMBER).repeat_interleave(10)
    values = DATA.values(w, blocks, torch.arange(10).repeat(NUMBER))
    return values.view(NUMBER, 10).mean(1)


def sample_values(w: Tensor, rng: np.random.Generator, size: int) -> Callable[[], Any]:
    samples = torch.as_tensor(rng.integers(10, size=(NUMBER, size)))
    blocks = torch.arange(NUMBER).repeat_interleave(size)
    return lambda: (
        DATA.loss(w),
        DATA.values(w, blocks, samples.view(-1)).view(NUMBER, size).mean(1),
    )


def test_without_a_refresh_the_error_is_a_random_walk():
    """E(u - g)^2 = k/S_2 times the variance of one difference, when every step moves alike."""
    w, move = torch.as_tensor(START), torch.full((4,), 0.01, dtype=DOUBLE)
    errors = []
    for seed in range(24):
        model, rng = Point(w), np.random.default_rng(seed)
        objective = spider(model, lr=0.0, refresh_every=1000)
        take_step(objective, lambda: (DATA.loss(model.w), full_values(model.w)))  # noqa: B023
        run = []
        for _ in range(20):
            take_step(objective, sample_values(model.w, rng, 2))
            exact = full_values(model.w.detach())
            run.append((objective.term.tracker.value.flatten() - exact).square().mean().item())
            model.w.data += move
        errors.append(run)
    mean = np.mean(errors, axis=0)
    assert mean[0] < 1e-20, "lr = 0 before the first move"
    assert mean[-1] / mean[4] == pytest.approx(19 / 4, rel=0.5)


def test_a_refresh_needs_no_second_evaluation():
    model, rng, calls = Point(START), np.random.default_rng(0), []
    objective = spider(model, refresh_every=3)
    for _ in range(7):
        values = sample_values(model.w, rng, 2)
        calls.append(0)

        def inner(values=values) -> Any:
            calls[-1] += 1
            return values()

        take_step(objective, inner)
    assert calls == [1, 2, 2, 1, 2, 2, 1]


# Refusals.


OPTIONS: dict[str, dict[str, Any]] = {
    "squared-hinge": {"penalty": 1.0},
    "hinge": {"penalty": 1.0},
    "recursive-hinge": {"penalty": 1.0, "smoothing": 0.1, "refresh_every": 2},
}


@pytest.mark.parametrize("name, options, message", [
    ("squared-hinge", {"penalty": -1.0}, "penalty=...)` must be positive"),
    ("squared-hinge", {"gamma": 0.0}, "never moves"),
    ("hinge", {"penalty": None}, "method='hinge')` needs `penalty`"),
    ("recursive-hinge", {"smoothing": -0.1}, "smoothing=...)` must be at least 0"),
    ("recursive-hinge", {"refresh_every": 0}, "refresh_every=...)` must be at least 1"),
    ("recursive-hinge", {"on_nonfinite": "skip"}, "would leave a block out"),
    ("recursive-hinge", {"limits": 0}, "limits=...)` must be at least 1"),
    ("recursive-hinge", {"limits": "gap"}, "limits=...)` must be a dict of limits"),
    ("recursive-hinge", {"tolerance": [0.1, 0.2]}, "one number or 3"),
])  # fmt: skip
def test_wrong_settings_are_refused(name, options, message):
    model = Point(START)
    settings = {"limits": 3} | OPTIONS[name] | options
    with pytest.raises(ValueError, match=re.escape(message)):
        fcco.constrained(
            model, torch.optim.SGD(model.parameters(), lr=0.1), method=name, **settings
        )
