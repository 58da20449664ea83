"""SONEX and ALEXR2 equal the literal NumPy transcriptions to 1e-12 over 100 steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from problems import Point, TorchQuadratics, entries, take_step

import fcco

GAMMA, LAM, RHO, KAPPA = 0.3, 0.4, 1.5, 0.05


def outer_and_slope(dim: int):
    if dim == 1:
        return fcco.outer.Hinge(RHO), ref.hinge_slope(RHO, LAM)
    return fcco.outer.TwoSidedHinge(KAPPA, RHO), ref.two_sided_slope(RHO, KAPPA, LAM)


def optimizers(kind: str, params, lr: float):
    if kind == "momentum":
        return fcco.optim.momentum_type(params, lr=lr, beta=0.2), ref.Momentum(lr, 0.2)
    return fcco.optim.adam_type(params, lr=lr, beta=0.2), ref.Adam(lr, 0.2)


def closure(data: TorchQuadratics, model: Point, sampled, which: int, with_g0: bool, names: Any):
    """One entry per sample or, by name, the mean of each block."""
    blocks, samples = entries(sampled, which)

    def inner():
        values: Any = data.values(model.w, blocks, samples)
        if names is not None:
            values = {names[s[0]]: values[blocks == s[0]].mean() for s in sampled}
        return (data.loss(model.w), values) if with_g0 else values

    return inner, None if names is not None else blocks


def follow(
    objective, model: Point, problem, path, with_g0: bool, independent: bool = False,
    steps: int = 1, names: Any = None, draw: Any = None,
) -> None:  # fmt: skip
    """Step an objective along the batches of a transcription and compare every iterate."""
    data, rng = TorchQuadratics(problem), np.random.default_rng(1)
    draw = draw or (lambda rng: problem.draw(rng, 3, 2))
    assert np.ptp(path, axis=0).max() > 0.05, "the problem must move"
    for expected in path:
        for _ in range(steps):
            sampled = draw(rng)
            inner, blocks = closure(data, model, sampled, 1, with_g0, names)
            other = closure(data, model, sampled, 2, with_g0, names)[0] if independent else None
            take_step(objective, inner, blocks, gradient=other)
        np.testing.assert_allclose(model.w.detach().numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("correction", "read", "independent", "kind", "with_g0", "dim"),
    [  # every pair of values occurs
        ("auto", "old", False, "momentum", False, 1),
        ("auto", "new", True, "adam", True, 2),
        ("theory", "old", True, "adam", False, 2),
        ("theory", "new", False, "momentum", True, 1),
        (0.0, "old", False, "adam", True, 2),
        (0.0, "new", True, "momentum", False, 1),
        (0.4, "old", True, "momentum", True, 1),
        (0.4, "new", False, "adam", False, 2),
    ],
)
def test_sonex(correction, read, independent, kind, with_g0, dim):
    problem = ref.Quadratics(dim=dim)
    start = np.linspace(0.5, 1.5, problem.size)
    outer, slope = outer_and_slope(dim)
    model = Point(start)
    lr = 0.003 if correction == "theory" else 0.02
    optimizer, update = optimizers(kind, model.parameters(), lr)
    objective = fcco.methods.sonex(
        model, optimizer, outer, 6, smoothing=LAM, gamma=GAMMA, correction=correction, read=read
    )
    weight: dict[Any, float] = {
        "auto": (1 - GAMMA) * 3 / 6,
        "theory": 3 / (3 * (1 - GAMMA)) + 1 - GAMMA,
    }
    path, u = ref.sonex(
        problem, start, 100, slope, update, gamma=GAMMA, read=read, independent=independent,
        correction=weight.get(correction, correction), with_g0=with_g0,  # type: ignore[arg-type]
    )  # fmt: skip
    follow(objective, model, problem, path, with_g0, independent)
    np.testing.assert_allclose(objective.term.tracker.value.numpy(), u, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dim", "independent", "kind", "with_g0"),
    [
        (1, False, "momentum", True),
        (1, True, "adam", True),
        (2, True, "momentum", False),
        (2, False, "adam", True),
    ],
)
def test_alexr2(dim, independent, kind, with_g0):
    problem = ref.Quadratics(dim=dim)
    start = np.linspace(0.5, 1.5, problem.size)
    outer, slope = outer_and_slope(dim)
    model = Point(start)
    outer_optimizer, update = optimizers(kind, model.parameters(), 0.05)
    dual_step, theta, nu, eta, rounds, inner_steps = 0.5, 0.6, 0.3, 0.1, 40, 5
    objective = fcco.methods.alexr2(
        model, outer_optimizer, outer, 6, smoothing=LAM, nu=nu, eta=eta, inner_steps=inner_steps,
        gamma=dual_step / (1 + dual_step), theta=theta,
    )  # fmt: skip
    path, u = ref.alexr2(
        problem, start, rounds, inner_steps, slope, update, dual_step=dual_step, theta=theta,
        nu=nu, eta=eta, independent=independent, with_g0=with_g0,
    )  # fmt: skip
    follow(objective, model, problem, path, with_g0, independent, inner_steps)
    np.testing.assert_allclose(objective.term.tracker.value.numpy(), u, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "read, correction, with_g0", [("old", 0.4, False), ("new", 0.4, True), ("old", 0.0, True)]
)
def test_sonx(read, correction, with_g0):
    """A subgradient of f itself, no smoothing, no momentum: a move along J^T 1[u > 0]."""
    problem, start = ref.Quadratics(), np.linspace(0.5, 1.5, 4)
    model = Point(start)
    objective = fcco.methods.sonx(
        model, torch.optim.SGD(model.parameters(), lr=0.02), fcco.outer.Hinge(RHO), 6,
        gamma=GAMMA, correction=correction, read=read,
    )  # fmt: skip
    path, _ = ref.sonex(
        problem, start, 100, lambda u: RHO * (u > 0), lambda w, G: w - 0.02 * G,
        gamma=GAMMA, correction=correction, read=read, with_g0=with_g0,
    )  # fmt: skip
    follow(objective, model, problem, path, with_g0)


@pytest.mark.parametrize("read, kind, with_g0", [("old", "momentum", True), ("new", "adam", False)])
def test_sox(read, kind, with_g0):
    """A smooth f, a moving average without correction, momentum."""
    problem, start = ref.Quadratics(), np.linspace(0.5, 1.5, 4)
    model = Point(start)
    optimizer, update = optimizers(kind, model.parameters(), 0.02)
    objective = fcco.methods.sox(
        model, optimizer, fcco.outer.SquaredHinge(RHO), 6, gamma=GAMMA, read=read
    )
    path, _ = ref.sonex(
        problem, start, 100, lambda u: RHO * np.maximum(u, 0), update,
        gamma=GAMMA, correction=0.0, read=read, with_g0=with_g0,
    )  # fmt: skip
    follow(objective, model, problem, path, with_g0)


@pytest.mark.parametrize("alpha", [None, 0.3])
def test_scent(alpha):
    """In plain space: the weight of a new mean of exponentials grows with the old one."""
    problem, start, gamma, temperature = ref.Quadratics(), np.linspace(0.5, 1.5, 4), 0.2, 0.5
    model = Point(start)
    optimizer, update = optimizers("momentum", model.parameters(), 0.02)
    settings: dict[str, Any] = {"gamma": gamma} if alpha is None else {"alpha": alpha}
    objective = fcco.methods.scent(model, optimizer, 6, temperature=temperature, **settings)
    rng, ours = np.random.default_rng(1), np.random.default_rng(1)
    data, w, u, weights = TorchQuadratics(problem), start.copy(), {}, []
    for _ in range(60):
        sampled = problem.draw(rng, 3, 4)
        value = {i: np.exp(np.array([problem.value(w, i, np.array([b]))[0] for b in batch]))
                 for i, batch, _ in sampled}  # fmt: skip
        before = {i: u.get(i, value[i].mean()) for i in value}
        scale = gamma / (1 - gamma) / np.exp(np.median(np.log([*before.values()])))
        scale = scale if alpha is None else alpha
        G = np.zeros(4)
        for i, batch, _ in sampled:
            weight = scale * before[i] / (1 + scale * before[i])
            weights.append(weight)
            u[i] = (1 - weight) * before[i] + weight * value[i].mean()
            for b, e in zip(batch, value[i], strict=True):
                G += (
                    temperature
                    * e
                    / u[i]
                    * problem.jacobian(w, i, np.array([b]))[0]
                    / (3 * len(batch))
                )
        w = update(w, G)
        ids, samples = entries(problem.draw(ours, 3, 4), 1)
        take_step(objective, lambda i=ids, s=samples: data.values(model.w, i, s), ids)
        np.testing.assert_allclose(model.w.detach().numpy(), w, rtol=0, atol=1e-12)
    assert max(weights) > 1.5 * min(weights)


def test_scent_does_not_see_a_constant_in_the_exponents():
    paths = []
    for shift in (0.0, 300.0):
        model, problem = Point(np.linspace(0.5, 1.5, 4)), ref.Quadratics()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        objective, data = fcco.methods.scent(model, optimizer, 6), TorchQuadratics(problem)
        rng = np.random.default_rng(1)
        for _ in range(30):
            ids, samples = entries(problem.draw(rng, 3, 4), 1)
            take_step(objective, lambda i=ids, s=samples: data.values(model.w, i, s) + shift, ids)  # noqa: B023
        paths.append(model.w.detach().numpy().copy())
    np.testing.assert_allclose(*paths, atol=1e-10)
