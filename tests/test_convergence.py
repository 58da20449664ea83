"""Runs to known answers: separable problems, proximal points, log space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from problems import Custom, Point, decay, program, smoothed_hinge, take_step

import fcco
from fcco.outer import LogMeanExp

DOUBLE = torch.float64


# S1: F(w) = (1/n) sum_i |a (w_i - c_i)|, three of six blocks per step, noisy values.


@pytest.mark.parametrize("optimizer_type", [fcco.optim.momentum_type, fcco.optim.adam_type])
def test_separable_problem_reaches_its_smoothed_solution(optimizer_type):
    """The loss pull/2 |w|^2 moves the minimiser off c by exactly what the smoothing lets it."""
    number, a, lam, steps, pull = 6, 1.5, 0.2, 800, 0.1
    c = torch.tensor([1.0, -2.0, 0.5, 0.0, -0.3, 1.5], dtype=DOUBLE)
    generator = torch.Generator().manual_seed(1)
    model = Point(torch.zeros(number))
    lr = 0.2 if optimizer_type is fcco.optim.momentum_type else 0.03
    optimizer: Any = optimizer_type(model.parameters(), lr=lr)
    objective = fcco.methods.sonex(model, optimizer, fcco.outer.Absolute(), number, smoothing=lam)
    for step in range(steps):
        decay(objective.optimizer, (1 - step / steps) ** 2)
        index = torch.randperm(number, generator=generator)[:3]
        noise = 0.1 * torch.randn(3, generator=generator, dtype=DOUBLE)
        values = lambda i=index, e=noise: a * (model.w - c)[i] + e  # noqa: E731
        inner = lambda v=values: (pull / 2 * model.w.square().sum(), v())  # noqa: E731
        take_step(objective, inner, index)
    stiffness = a**2 / (number * lam)  # curvature of one smoothed term
    expected = c * stiffness / (pull + stiffness)
    assert (c - expected).abs().max() > 0.09
    np.testing.assert_allclose(model.w.detach(), expected, atol=0.03)


# The proximal point on a problem whose prox cvxpy solves: noise-free, all blocks.

RHO, LAM, NU = 16.0, 0.5, 0.5


def alexr2_run(start, rounds: int, inner_steps: int, outer_lr: float, beta: float = 1.0):
    problem, model = program(noise=0.0), Point(start)
    objective = fcco.methods.alexr2(
        model, fcco.optim.momentum_type(model.parameters(), lr=outer_lr, beta=beta),
        fcco.outer.Hinge(RHO), 8,
        smoothing=LAM, nu=NU, eta=0.3, inner_steps=inner_steps, gamma=0.7, theta=0.3,
    )  # fmt: skip
    every = torch.arange(8)
    for _ in range(rounds * inner_steps):
        take_step(objective, problem.sample(model.w, every), every)
    return problem, model, objective


def test_inner_loop_gives_the_gradient_of_the_moreau_envelope():
    start = np.linspace(-1.0, 1.0, 6)
    problem, model, _ = alexr2_run(start, rounds=1, inner_steps=200, outer_lr=1.0)
    estimate = start - model.w.detach().numpy()  # one step of length 1 along (w - z) / nu
    nearest, _ = problem.solve(smoothed_hinge(RHO, LAM, 8), near=(start, NU))
    np.testing.assert_allclose(estimate, (start - nearest) / NU, atol=1e-6)
    assert np.linalg.norm(estimate) > 0.5


def test_noise_free_rounds_reach_the_smoothed_minimiser():
    problem, model, _ = alexr2_run(np.full(6, 2.0), 40, 20, NU, beta=0.5)
    best, _ = problem.solve(smoothed_hinge(RHO, LAM, 8))
    np.testing.assert_allclose(model.w.detach(), best, atol=1e-4)
    hard, _ = problem.solve()
    assert np.linalg.norm(best - hard) > 0.1, "the smoothing matters here"


def test_a_long_round_ends_at_the_proximal_point_itself():
    problem, model, objective = alexr2_run(np.full(6, 2.0), rounds=2, inner_steps=5, outer_lr=0.2)
    anchor = model.w.detach().numpy().copy()
    optimizer: Any = objective.optimizer
    optimizer.inner_steps = 301  # within a round the parameters are z
    every = torch.arange(8)
    for _ in range(300):
        take_step(objective, problem.sample(model.w, every), every)
    nearest, _ = problem.solve(smoothed_hinge(RHO, LAM, 8), near=(anchor, NU))
    np.testing.assert_allclose(model.w.detach(), nearest, atol=1e-6)
    assert optimizer.round == 2 and optimizer.inner_step == 300


# Log space: tau log mean exp.


def contrastive(model: Point, tau: float, scale: float = 1.0) -> torch.Tensor:
    """Similarities of 4 anchors with 5 others, as logits, (20,), anchor by anchor."""
    x = torch.linspace(-1, 1, 20, dtype=DOUBLE).view(4, 5)
    return (scale * torch.sin(3 * x * model.w[:, None] + model.w.sum()) / tau).reshape(-1)


ANCHOR = torch.arange(4).repeat_interleave(5)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_log_space_is_exact_and_does_not_overflow(scale):
    tau, model = 0.5, Point([0.2, -0.4, 0.6, 1.0])
    tracker = fcco.tracker.InnerTracker(4, gamma=1.0, read="new", log_space=True, dtype=DOUBLE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    objective = fcco.Compositional(
        model, optimizer, fcco.terms.CoupledTerm(LogMeanExp(tau), tracker)
    )
    for _ in range(3):
        logits = contrastive(model, tau, scale).view(4, 5)
        exact = tau * (torch.logsumexp(logits, 1) - np.log(5)).mean()
        gradient = torch.autograd.grad(exact, model.w)[0]
        loss = objective(lambda: contrastive(model, tau, scale), ANCHOR)
        loss.backward()
        assert loss.item() == pytest.approx(exact.item()) and np.isfinite(loss.item())
        torch.testing.assert_close(model.w.grad, gradient)
        objective.optimizer.step()  # type: ignore[union-attr]
        objective.optimizer.zero_grad()  # type: ignore[union-attr]


@pytest.mark.parametrize("read, correction", [("old", 0.3), ("new", 0.0)])
def test_log_space_is_the_plain_tracker_of_exponentials(read, correction):
    tau, models = 0.5, [Point([0.2, -0.4, 0.6, 1.0]) for _ in range(2)]
    outers = [LogMeanExp(tau), Custom(lambda u: tau * u.log(), smooth=True)]
    options: dict[str, Any] = {"gamma": 0.4, "correction": correction, "read": read}
    trackers = [
        fcco.tracker.InnerTracker(4, log_space=k == 0, dtype=DOUBLE, **options) for k in range(2)
    ]
    objectives = [
        fcco.Compositional(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            fcco.terms.CoupledTerm(outer, tracker),
        )
        for model, outer, tracker in zip(models, outers, trackers, strict=True)
    ]
    for step in range(20):
        rows = torch.arange(20).view(4, 5)[:, step % 3 : step % 3 + 2].reshape(-1)
        for k, (model, objective) in enumerate(zip(models, objectives, strict=True)):
            inner = lambda m=model, k=k, r=rows: (  # noqa: E731
                contrastive(m, tau)[r] if k == 0 else contrastive(m, tau)[r].exp()
            )
            take_step(objective, inner, ANCHOR[rows])
        torch.testing.assert_close(models[0].w, models[1].w, rtol=0, atol=1e-12)
    assert (models[0].w - torch.tensor([0.2, -0.4, 0.6, 1.0])).norm() > 0.1
