"""Li et al. 2024, Yang et al. 2025, Liu and Xu 2025: transcriptions, laws, known KKT points."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference as ref
import reference_penalties as rival
import torch
from problems import Point, box, take_step
from test_transcription import follow, optimizers

import fcco
from fcco.constraints import ConstrainedObjective

STEPS, NUMBER = 200, 6
NAMES = [f"c{k}" for k in range(NUMBER)]
TOLERANCE = np.linspace(-0.3, 0.4, NUMBER)
START = np.linspace(0.5, 1.5, 4)
PROBLEM = ref.Quadratics()

# Transcriptions.


@pytest.mark.parametrize(
    "read, kind, by_name",
    [("old", "momentum", True), ("old", "adam", False), ("new", "adam", True)],
)
def test_squared_hinge(read, kind, by_name):
    model = Point(START)
    optimizer, update = optimizers(kind, [model.w], 0.02)
    default: dict[str, Any] = {} if read == "new" else {"read": read}
    objective = fcco.constrained(
        model, optimizer, NAMES if by_name else NUMBER, "squared-hinge", penalty=4.0, gamma=0.3,
        tolerance=TOLERANCE.tolist(), margin=0.05, **default,
    )  # fmt: skip
    expected, u = rival.li2024(
        PROBLEM, START, STEPS, update, rho=4.0, gamma=0.3, read=read,
        tolerance=TOLERANCE, margin=0.05,
    )  # fmt: skip
    follow(objective, model, PROBLEM, expected, True, names=NAMES if by_name else None)
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
    follow(objective, model, PROBLEM, expected, True, names=NAMES if by_name else None)
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

    def draw(rng: np.random.Generator) -> list[tuple]:
        assert objective.refresh_due == (objective.term.step % q == 0)
        return PROBLEM.draw(rng, NUMBER, 8 if objective.refresh_due else 2)

    names = NAMES if by_name else None
    follow(objective, model, PROBLEM, expected, True, independent, names=names, draw=draw)
    u = history[-1]
    tracked = objective.term.tracker.value.flatten()
    np.testing.assert_allclose(tracked, u, rtol=0, atol=1e-11)
    np.testing.assert_allclose(numbers(objective.violation()), u - TOLERANCE, atol=1e-11)


def numbers(report: Any) -> np.ndarray:
    return np.array(list(report.values()) if isinstance(report, dict) else report.tolist())


# Laws on the box w <= 0.3.

A, B, M = 1.0, 0.3, 3  # w* = 0.3, every multiplier 0.7


def exact_run(objective: ConstrainedObjective, model: Point, steps: int) -> np.ndarray:
    """The iterates without noise."""
    problem, path = box(A, B, M, 0.0), []
    for _ in range(steps):
        take_step(objective, lambda: (problem.loss(model.w), problem.exact(model.w)))
        path.append(model.w.detach().numpy().copy())
    return np.array(path)


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
