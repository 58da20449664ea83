"""MSVR and STORM on SONEX: NumPy transcriptions, reductions, checkpoints, requirements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference as ref
import reference_msvr as msvr_ref
import torch
from problems import Point, TorchQuadratics, entries, take_step
from test_checkpoint import GROUPS, ID, OPTIMIZERS, X, Y, check
from test_checkpoint import Run as Checkpointed
from torch import Tensor, nn
from torch.nn.functional import softplus

import fcco
from fcco.methods import msvr
from fcco.storm import RecursiveGradient

START = np.linspace(0.5, 1.5, 4)
GAMMA, LAM, RHO = 0.1, 0.4, 1.5
THEORY = msvr_ref.theory(GAMMA, 6, 3)

SMOOTH = {
    1: fcco.outer.Custom(softplus, smooth=True),
    2: fcco.outer.Custom(
        lambda u: softplus(u[..., 0]) + u[..., 1].square() / 2, smooth=True, dim=2
    ),
}
"""Outer functions whose slope is `softplus_and_square_slope`."""


class Run:
    """The torch side: the same batches as the transcription, in the same order."""

    def __init__(self, dim: int = 1, with_g0: bool = False, **problem: Any) -> None:
        self.problem = ref.Quadratics(dim=dim, **problem)
        self.data, self.model, self.with_g0 = TorchQuadratics(self.problem), Point(START), with_g0
        self.rng = np.random.default_rng(1)

    def closure(self, sampled: list[tuple]) -> tuple[Callable[[], Any], Tensor]:
        blocks, samples = entries(sampled, 1)
        data, w = self.data, self.model.w

        def inner() -> Any:
            values = data.values(w, blocks, samples)
            if not self.with_g0:
                return values
            return (w - data.m - data.c[blocks, samples, 0]).square().sum(1) / 2, values

        return inner, blocks

    def batches(self) -> list[tuple[Callable[[], Any], Tensor]]:
        """All data, cut unevenly: some blocks lie in two batches."""
        every = [
            (i, np.array([s]), None)
            for i in range(self.problem.num_inner)
            for s in range(self.problem.samples)
        ]
        return [self.closure(part) for part in (every[:7], every[7:33], every[33:])]

    def steps(self, objective: Any, number: int, blocks: int = 3, per_block: int = 2) -> np.ndarray:
        path = []
        for _ in range(number):
            if getattr(objective, "snapshot_due", False):
                objective.snapshot(self.batches())
            inner, index = self.closure(self.problem.draw(self.rng, blocks, per_block))
            take_step(objective, inner, index)
            path.append(self.model.w.detach().numpy().copy())
        return np.array(path)

    def follow(self, objective: Any, path: np.ndarray, u: np.ndarray) -> None:
        """As many steps as a transcription took, to the same iterates and estimates."""
        assert np.ptp(path, axis=0).max() > 0.05, "the problem must move"
        close(self.steps(objective, len(path)), path)
        close(objective.term.tracker.value.numpy(), u)

    def sgd(self, lr: float) -> torch.optim.SGD:
        return torch.optim.SGD(self.model.parameters(), lr=lr)


def close(one: Any, two: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(one, two, rtol=0, atol=tolerance)


@pytest.mark.parametrize("single_point, dim", [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_v1(single_point, dim):
    run = Run(dim)
    optimizer = fcco.momentum_type(run.model.parameters(), lr=0.01, beta=0.2)
    objective = msvr(run.model, optimizer, SMOOTH[dim], 6, gamma=GAMMA, single_point=single_point)
    path, u = ref.sonex(
        run.problem, START, 100, msvr_ref.softplus_and_square_slope, ref.Momentum(0.01, 0.2),
        gamma=GAMMA, correction=THEORY, single_point=single_point,
    )  # fmt: skip
    run.follow(objective, path, u)


@pytest.mark.parametrize(
    "normalized, with_g0, dim",
    [(False, False, 1), (False, True, 2), (True, False, 2), (True, True, 1)],
)
def test_v2(normalized, with_g0, dim):
    run = Run(dim, with_g0)
    lr = 0.005 if normalized else 0.01
    objective: Any = msvr(
        run.model, run.sgd(lr), SMOOTH[dim], 6, version="v2", gamma=GAMMA, beta=0.1,
        normalized=normalized,
    )  # fmt: skip
    path, z, u = msvr_ref.v2(
        run.problem, START, 100, msvr_ref.softplus_and_square_slope, lr=lr, beta=0.1,
        gamma=GAMMA, correction=THEORY, with_g0=with_g0, normalized=normalized,
    )  # fmt: skip
    run.follow(objective, path, u)
    (kept,) = objective.estimate.tensors.values()
    close(kept, z[-1])


@pytest.mark.parametrize("with_g0, dim", [(False, 1), (True, 2)])
def test_v3(with_g0, dim):
    run = Run(dim, with_g0)
    objective = msvr(
        run.model, run.sgd(0.01), SMOOTH[dim], 6, version="v3", gamma=GAMMA, beta=0.1, period=17
    )
    path, _, u = msvr_ref.v3(
        run.problem, START, 80, msvr_ref.softplus_and_square_slope, lr=0.01, beta=0.1,
        gamma=GAMMA, correction=THEORY, with_g0=with_g0, period=17,
    )  # fmt: skip
    run.follow(objective, path, u)


@pytest.mark.parametrize(
    "correction, read, with_g0, annealed",
    [(0.0, "old", True, False), (0.0, "new", False, False), (0.4, "new", True, True)],
)
def test_storm_on_sonex(correction, read, with_g0, annealed):
    """Without a correction the wrapper keeps w_{t-1} itself."""
    run = Run(1, with_g0)
    schedule = (lambda t: 0.8 * 0.97**t) if annealed else (lambda t: LAM)
    objective = fcco.sonex(
        run.model, run.sgd(0.02), fcco.Hinge(RHO), 6, smoothing=schedule if annealed else LAM,
        gamma=0.3, correction=correction, read=read,
    )  # fmt: skip
    path, _, u = msvr_ref.v2(
        run.problem, START, 100, lambda t: ref.hinge_slope(RHO, schedule(t)), annealed=True,
        lr=0.02, beta=0.1, gamma=0.3, correction=correction, read=read, with_g0=with_g0,
    )  # fmt: skip
    run.follow(RecursiveGradient(objective, 0.1), path, u)


# Laws.


IDENTITY = fcco.outer.Custom(lambda u: u, smooth=True, convex=True, monotone=True)


def test_storm_follows_a_moving_point_without_lag():
    """g(w; xi) = |w|^2 / 2 + <xi, w>, w moves by delta per step, f is the identity.

    STORM: z - w is an average of noise alone, E|z - w|^2 = d sigma^2 beta / (2 - beta). The moving
    average has the same noise and lags by (1 - beta) / beta |delta|: here 0.086 against 1.44.
    """
    beta, sigma, delta = 0.04, 0.3, torch.full((4,), 0.03, dtype=torch.float64)
    model, rng = Point(np.zeros(4)), np.random.default_rng(0)
    momentum = fcco.momentum_type(model.parameters(), lr=0.0, beta=beta)
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    storm: Any = msvr(model, plain, IDENTITY, 1, version="v2", gamma=0.1, beta=beta)
    errors: dict[str, list[float]] = {"storm": [], "average": []}
    for step in range(450):
        xi = torch.as_tensor(sigma * rng.normal(size=4))
        storm(lambda xi=xi: (model.w.square().sum() / 2 + xi @ model.w).view(1)).backward()
        plain.step()
        model.w.grad = model.w.detach() + xi
        momentum.step()
        plain.zero_grad()
        if step > 150:
            buffer = momentum.state[model.w]["momentum_buffer"]
            for name, z in (("storm", storm.estimate.tensors[model.w]), ("average", buffer)):
                errors[name].append(float((z - model.w.detach()).square().sum()))
        model.w.data.add_(delta)
    found = {name: np.sqrt(np.mean(each)) for name, each in errors.items()}
    noise, lag = np.sqrt(4 * sigma**2 * beta / (2 - beta)), (1 - beta) / beta * 0.06
    assert found["storm"] == pytest.approx(noise, rel=0.2)
    assert found["average"] == pytest.approx(lag, rel=0.05)
    assert found["storm"] < found["average"] / 10


@pytest.mark.slow
def test_v3_has_no_noise_floor():
    """Constant steps on a finite sum: v3 reaches the last digits, v2 a floor."""
    ends, slope = {}, msvr_ref.softplus_and_square_slope
    for version in ("v2", "v3"):
        run = Run(with_g0=True)
        optimizer: Any = run.sgd(0.1)
        options: dict[str, Any] = {"beta": 0.1, "period": 20 if version == "v3" else None}
        objective = msvr(
            run.model, optimizer, SMOOTH[1], 6, version=version, gamma=GAMMA, **options
        )
        path = run.steps(objective, 500 if version == "v3" else 250)[-100::10]
        norms = [np.linalg.norm(msvr_ref.full_gradient(run.problem, w, slope, True)) for w in path]
        ends[version] = np.mean(norms)
    assert ends["v3"] < 1e-6 and ends["v2"] > 0.01


# Checkpoints.


class WithSnapshots(Checkpointed):
    """Takes the snapshots of v3; the model is in evaluation mode for exact values."""

    def advance(self, steps: int) -> WithSnapshots:
        for _ in range(steps):
            if getattr(self.objective, "snapshot_due", False):
                rows = torch.arange(len(ID)).split(14)
                self.objective.snapshot(
                    (lambda r=r: (self.model(X[r]) - Y[r]).square(), ID[r]) for r in rows
                )
            super().advance(1)
        return self


@pytest.mark.parametrize("kind", ["v3", "annealed"])
def test_resume_is_bitwise(kind):
    def build(model: nn.Module) -> Any:
        if kind == "v3":
            optimizer, outer = OPTIMIZERS["SGD"](model.parameters()), fcco.SquaredHinge()
            settings: Any = {"version": "v3", "beta": 0.2, "period": 4, "correction": 0.5}
            return msvr(model, optimizer, outer, GROUPS, gamma=0.3, **settings)
        schedule, optimizer = fcco.Annealed(2.0, 0.1, steps=20), OPTIMIZERS["Adam"]
        return RecursiveGradient(
            fcco.sonex(
                model, optimizer(model.parameters()), fcco.Absolute(), GROUPS, smoothing=schedule,
                correction=0.0,
            ),
            0.3,
        )  # fmt: skip

    check(lambda: WithSnapshots(build), (0, 1, 4, 6))


# Refusals.


def small(outer: Any = SMOOTH[1], **options: Any) -> Any:
    model = Point(START)
    return msvr(model, torch.optim.SGD(model.parameters(), lr=0.1), outer, 3, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"version": "v4"}, "must be one of 'v1', 'v2', 'v3'"),
        ({"outer": fcco.Hinge()}, "not compatible with msvr: it must be smooth"),
        ({"read": "new"}, r"`msvr\(read=...\)` must be 'old'"),
        ({"beta": 0.1}, "belongs to v2 and v3 but version is: 'v1'"),
        ({"version": "v2"}, r"`msvr\(beta=...\)` is needed for version='v2'"),
        ({"version": "v2", "beta": 0.1, "period": 3}, "belongs to v3"),
        ({"version": "v3", "beta": 0.1}, r"`msvr\(period=...\)` is needed"),
        ({"version": "v3", "beta": 0.1, "period": 0}, "must be at least 1"),
        ({"version": "v2", "beta": 0.1, "single_point": True}, "is a form of v1"),
        ({"normalized": True}, "is a form of v2 and v3"),
        ({"version": "v2", "beta": 1.2}, r"must lie in \[0.0, 1.0\]"),
        ({"version": "v2", "beta": 0.1, "on_nonfinite": "skip"}, "gradients of different samples"),
    ],
)
def test_the_recipe_refuses(options, text):
    with pytest.raises(ValueError, match=text):
        small(**options)
