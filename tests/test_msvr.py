"""MSVR v1, a setting of the tracker: the theory's correction, a smooth f, momentum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from problems import Custom, Point, TorchQuadratics, entries, take_step
from torch.nn.functional import softplus

import fcco

START, GAMMA = np.linspace(0.5, 1.5, 4), 0.1

SMOOTH = {
    1: Custom(softplus, smooth=True),
    2: Custom(lambda u: softplus(u[..., 0]) + u[..., 1].square() / 2, smooth=True, dim=2),
}


def slope(u: np.ndarray) -> np.ndarray:
    """Gradient of log(1 + e^{u_1}) + u_2^2 / 2, or of its first part for d1 = 1."""
    first = 1 / (1 + np.exp(-u[0]))
    return np.array([first]) if len(u) == 1 else np.array([first, u[1]])


@pytest.mark.parametrize("dim", [1, 2])
def test_v1(dim):
    problem, model, rng = ref.Quadratics(dim=dim), Point(START), np.random.default_rng(1)
    data, n = TorchQuadratics(problem), problem.num_inner
    tracker = fcco.tracker.InnerTracker(
        n, dim, gamma=GAMMA, correction="theory", dtype=torch.float64
    )
    optimizer = fcco.optim.momentum_type(model.parameters(), lr=0.01, beta=0.2)
    objective: Any = fcco.Compositional(
        model, optimizer, fcco.terms.CoupledTerm(SMOOTH[dim], tracker)
    )
    path, u = ref.sonex(
        problem, START, 100, slope, ref.Momentum(0.01, 0.2),
        gamma=GAMMA, correction=(n - 3) / (3 * (1 - GAMMA)) + (1 - GAMMA),
    )  # fmt: skip
    assert np.ptp(path, axis=0).max() > 0.05, "the problem must move"
    for expected in path:
        blocks, samples = entries(problem.draw(rng, 3, 2), 1)
        take_step(objective, lambda b=blocks, s=samples: data.values(model.w, b, s), blocks)
        np.testing.assert_allclose(model.w.detach(), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(tracker.value, u, rtol=0, atol=1e-12)
