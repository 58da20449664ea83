"""Constraints without settings: the rule against a transcription, units, and where it ends."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from problems import Point, take_step
from torch import Tensor

import fcco
from fcco.fleet import Member, Unsupported, signature_of
from fcco.terms import MultiplierTerm

M, DIM = 5, 3
RNG = np.random.default_rng(3)
A, TARGET = RNG.normal(size=(M, DIM)), np.array([1.0, -0.5, 0.8])
LIMIT = np.array([0.1, -0.2, 0.0, 0.3, -0.1])


class Noisy:
    """min |w - target|^2 / 2 subject to a_i w <= limit_i, all seen with noise; batch t of a run."""

    def __init__(self, steps: int, blocks: int = M, seed: int = 0, noise: float = 0.3) -> None:
        rng = np.random.default_rng(seed)
        self.index = [np.sort(rng.permutation(M)[:blocks]) for _ in range(steps)]
        self.noise = noise * rng.normal(size=(steps, M))
        self.loss_noise = noise * rng.normal(size=(steps, DIM))

    def measure(self, w: Tensor, t: int, scale: tuple[float, float] = (1.0, 1.0)) -> Any:
        index = torch.as_tensor(self.index[t])
        moved = w - torch.as_tensor(TARGET) - torch.as_tensor(self.loss_noise[t])
        values = torch.as_tensor(A) @ w + torch.as_tensor(self.noise[t])
        return scale[0] * moved.square().sum() / 2, scale[1] * values[index], index


def objective_of(limit: Any = LIMIT, number: Any = M, lr: float = 0.05, **settings: Any) -> Any:
    model = Point(np.zeros(DIM))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    given = {} if isinstance(number, dict) else {"tolerance": limit}
    return fcco.constrained(model, optimizer, number, **given, **settings)


def train(objective: Any, problem: Noisy, steps: range, copies: int = 1, scale=(1.0, 1.0)) -> None:
    w = objective.model.w
    for t in steps:

        def function(t=t):
            loss, values, _ = problem.measure(w, t, scale)
            return loss, values.repeat(copies)

        index = torch.as_tensor(problem.index[t])
        every = torch.cat([index + M * k for k in range(copies)])
        take_step(objective, function, None if len(every) == M * copies else every)


# The rule, once more.


def transcription(problem: Noisy, steps: int, lr: float, equality: bool) -> tuple[Any, Any, Any]:
    """The rule in plain loops over constraints, from its description alone."""
    positive = (lambda v: v) if equality else (lambda v: max(v, 0.0))
    w = np.zeros(DIM)
    u, latest, d, visits, nu = (np.zeros(M) for _ in range(5))
    sigma2, margin = np.zeros(M), np.zeros(M)
    pooled_d = pooled_v = pooled_n = 0.0
    gain, omega, a2, active, d0, last, nf = 0.5, 0.0, 0.0, 0, 0.0, 0.0, 1.0
    reach = 0.0 if equality else 0.06 * math.sqrt(2 * math.log(M))
    joint = separate = 0.0
    path = []
    for t in range(steps):
        index = problem.index[t]
        residual = w - TARGET - problem.loss_noise[t]
        loss, gradient = residual @ residual / 2, residual.copy()
        fresh = A @ w + problem.noise[t]
        old = u.copy()
        share = M / len(index)
        for i in index:  # track, and read the new value with the units of the last step
            weight = max(1 / (visits[i] + 1), gain)
            u[i] = fresh[i] if visits[i] == 0 else u[i] + weight * (fresh[i] - u[i])
            own = sigma2[i] if sigma2[i] > 0 else pooled_d
            kappa = math.sqrt(d0 / a2) / (own * max(omega, 1)) if a2 > 0 else 0.0
            x = u[i] - LIMIT[i] + margin[i]
            gradient += share * positive(nu[i] + kappa / 4 * math.sqrt(nf) * x) * A[i]
        w = w - lr * gradient
        path.append(w.copy())
        # The step ends: noise and error of the constraints,
        moved = [(fresh[i] - latest[i]) ** 2 / 2 for i in index if visits[i] > 0]
        missed = [(fresh[i] - old[i]) ** 2 for i in index if visits[i] > 0]
        seen = {i for i in index if visits[i] > 0}
        for i in index:
            if visits[i] > 0:
                weight = 1 / min(visits[i], 100)
                d[i] += weight * ((fresh[i] - latest[i]) ** 2 / 2 - d[i])
            visits[i] += 1
            latest[i] = fresh[i]
        if moved:
            pooled_n += 1
            weight = 1 / min(pooled_n, 50)
            pooled_d += weight * (np.mean(moved) - pooled_d)
            pooled_v += weight * (np.mean(missed) - pooled_v)
            drift = (pooled_v * (2 - gain) - 2 * pooled_d) * gain / (1 - gain)
            drift = min(max(drift, 0), 2 * pooled_d)
            ratio = drift / (pooled_d - drift / 2) if drift < 2 * pooled_d else math.inf
            best = (math.sqrt(ratio**2 + 4 * ratio) - ratio) / 2 if ratio < math.inf else 1.0
            gain += (min(max(best, 0.05), 0.95) - gain) / 50
        # of the loss,
        if t > 0:
            change = (loss - last) ** 2 / 2
            change = min(change, 9 * d0) if t > 10 else change
            d0 += max(0.03, 1 / t) * (change - d0)
        last, nf = loss, share
        for i in index:
            sigma2[i] = d[i]
            if visits[i] <= 10:
                sigma2[i] = (d[i] * (visits[i] - 1) + 5 * pooled_d) / (visits[i] + 4)
        new = [(fresh[i] - old[i]) / sigma2[i] ** 0.5 for i in seen]
        joint += max(0.02, 1 / (t + 1)) * (sum(new) ** 2 - joint)
        separate += max(0.02, 1 / (t + 1)) * (sum(e**2 for e in new) - separate)
        room = min(joint / separate, 1) if separate > 0 else 0.0
        for i in index:
            margin[i] = reach * room * sigma2[i] ** 0.5
        if t + 1 >= 10 and pooled_n > 0:
            size = {i: u[i] - LIMIT[i] + margin[i] for i in index}
            size = {i: (abs(x) if equality else max(x, 0)) / sigma2[i] ** 0.5
                    for i, x in size.items()}  # fmt: skip
            omega = max(omega * 0.99, max([size[i] for i in seen], default=0.0))
            if a2 == 0 and max(size.values()) > 0:
                a2 = max((share * sum(size.values()) / max(size.values())) ** 2, 0.1)
            kappa = {i: math.sqrt(d0 / a2) / sigma2[i] / max(omega, 1) if a2 else 0 for i in index}
            x = {i: u[i] - LIMIT[i] + margin[i] for i in index}
            c = {i: positive(nu[i] + kappa[i] / 4 * math.sqrt(share) * x[i]) for i in index}
            largest = max(abs(c[i]) * sigma2[i] ** 0.5 for i in index)
            if largest > 0:
                active += 1
                total = sum(c[i] * (fresh[i] - old[i]) for i in seen) / largest
                a2 += max(0.02, 1 / (10 + active)) * (share * total**2 - a2)
                a2 = max(a2, 0.1)
            for i in index:
                rate = min(0.01 * share, 0.03) * kappa[i]
                nu[i] = positive(nu[i] + rate * (fresh[i] - LIMIT[i] + margin[i]))
        for i in index:  # one value alone tells no noise
            if visits[i] == 1:
                sigma2[i] = 0.0
    return np.array(path), nu, np.array([omega, a2, active])


@pytest.mark.parametrize("blocks", [M, 2])
@pytest.mark.parametrize("equality", [False, True])
def test_the_rule_equals_its_transcription(blocks, equality):
    problem, steps, lr = Noisy(200, blocks), 200, 0.05
    if equality and blocks < M:
        lr = 0.01  # five equalities in three dimensions cannot hold
    path, nu, scales = transcription(problem, steps, lr, equality)
    objective = objective_of(lr=lr, equality=equality, gamma="auto")
    ours = []
    for t in range(steps):
        train(objective, problem, range(t, t + 1))
        ours.append(objective.model.w.detach().numpy().copy())
    np.testing.assert_allclose(ours, path, rtol=0, atol=1e-10)
    np.testing.assert_allclose(objective.term.multiplier, nu, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(objective.term.scales[:3], scales, rtol=1e-8)
    assert np.abs(nu).max() > 0.1 and scales[2] > 100, "the constraints act"


# Units.


def end(lr: float = 0.05, blocks: int = M, copies: int = 1, scale=(1.0, 1.0), **settings) -> Any:
    limit = scale[1] * np.tile(LIMIT, copies)
    objective = objective_of(limit, M * copies, lr, **settings)
    train(objective, Noisy(200, blocks), range(200), copies, scale)
    return objective


def test_units_of_loss_and_values_change_nothing():
    expected = end(blocks=2).model.w.detach()
    assert expected.norm() > 0.1
    for scale in ((1.0, 100.0), (0.01, 0.1)):
        ours = end(lr=0.05 / scale[0], blocks=2, scale=scale).model.w.detach()
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-9)


def test_constraints_listed_ten_times_change_nothing_but_the_margin():
    """The largest of more estimates is further off: the margin grows like sqrt(2 ln m)."""
    settings: dict[str, Any] = {"blocks": 2, "equality": True, "lr": 0.01}
    one, ten = end(**settings), end(copies=10, **settings)
    np.testing.assert_allclose(ten.model.w.detach(), one.model.w.detach(), rtol=0, atol=1e-9)
    shared = ten.term.multiplier.view(10, M)
    np.testing.assert_allclose(10 * shared[3], one.term.multiplier, rtol=1e-8, atol=1e-12)
    one, ten = end(), end(copies=10)
    more = 0.06 * (math.sqrt(2 * math.log(10 * M)) - math.sqrt(2 * math.log(M)))
    moved = (ten.model.w - one.model.w).abs().max().item()
    assert 0 < moved < 5 * more * one.term.variance.max().sqrt().item()


# Steps, copies, checkpoints.


def state_of(objective: Any) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in objective.named_buffers()}


def test_accumulated_batches_are_one_step():
    """Samples of all constraints, in one batch or in three; and constraints in parts."""
    samples = torch.randn(60, 6, M, generator=torch.Generator().manual_seed(0)).double()
    results = []
    for parts in ([[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]]):
        objective = objective_of()
        w, states = objective.model.w, []
        for batch in samples:
            for rows in parts:

                def function(rows=rows, batch=batch, w=w):
                    noise = batch[rows]
                    losses = (w - torch.as_tensor(TARGET) - noise[:, :DIM]).square().sum(1) / 2
                    return losses.mean(), (torch.as_tensor(A) @ w + 0.3 * noise).flatten()

                index = torch.arange(M).repeat(len(rows))
                objective(function, index)
            objective.close()
            with torch.no_grad():
                w -= 0.01
            states.append(state_of(objective))
        results.append(states)
    for one, several in zip(*results, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(several[name], value, rtol=1e-9, atol=1e-9)
    assert results[0][-1]["terms.inner.multiplier"].max() > 0


def test_parts_of_the_constraints_give_the_gradient_of_all():
    problem = Noisy(60)
    gradients = []
    for split in ([range(M)], [range(2), range(2, M)]):
        objective, rows = objective_of(), []
        w = objective.model.w
        for t in range(60):
            for part in split:
                index = torch.tensor(list(part))

                def function(t=t, index=index, w=w):
                    loss, values, _ = problem.measure(w, t)
                    return loss, values[index]

                (objective(function, index) * len(index) / M).backward()
            assert w.grad is not None
            rows.append(w.grad.clone())
            w.grad = None
            objective.close()
        gradients.append(torch.stack(rows))
    assert (gradients[0][-1] - gradients[0][5]).abs().max() > 0.1, "the constraints act"
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-9)


def test_a_step_that_is_rolled_back_leaves_no_trace():
    problem, objective = Noisy(60), objective_of()
    train(objective, problem, range(40))
    other = copy.deepcopy(objective)
    objective(lambda: (objective.model.w.sum() * 1e3, 1e3 * torch.as_tensor(A) @ objective.model.w))
    objective.term.rollback()
    for each in (objective, other):
        train(each, problem, range(40, 60))
    for name, value in state_of(objective).items():
        assert torch.equal(value, state_of(other)[name]), name


def test_a_resumed_run_is_the_same_bit_by_bit():
    problem, whole = Noisy(80, blocks=2), objective_of()
    train(whole, problem, range(80))
    first, second = objective_of(), objective_of()
    train(first, problem, range(37))
    second.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, problem, range(37, 80))
    assert torch.equal(second.model.w, whole.model.w)
    for name, value in state_of(whole).items():
        assert torch.equal(state_of(second)[name], value), name


# Where it ends.


def test_a_convex_problem_ends_feasible_at_its_multipliers():
    """Two constraints are active; w* and nu* from the optimality conditions."""
    a, limit = np.array([[1.0, 0.0, 0.0], [0.0, -1.0, 0.5]]), np.array([0.4, 0.3])
    nu = np.linalg.solve(a @ a.T, a @ TARGET - limit)
    w = TARGET - a.T @ nu
    assert nu.min() > 0.1
    rng = np.random.default_rng(1)
    objective = objective_of(number={"one": 0.4, "two": 0.3}, lr=0.02)
    objective.keep_average(500)
    tail = []
    for t in range(1500):
        noise = torch.as_tensor(rng.normal(size=5) * 0.2)

        def function(noise=noise):
            w = objective.model.w
            values = torch.as_tensor(a) @ w + noise[3:]
            return (w - torch.as_tensor(TARGET) - noise[:3]).square().sum() / 2, {
                "one": values[0], "two": values[1]}  # fmt: skip

        take_step(objective, function)
        if t >= 700:
            tail.append(objective.model.w.detach().numpy().copy())
    mean = np.mean(tail, axis=0)
    assert (a @ mean - limit).max() < 0.005
    np.testing.assert_allclose(mean, w, atol=0.02)
    np.testing.assert_allclose(list(objective.average_multipliers().values()), nu, atol=0.05)


@pytest.mark.parametrize("noise, optimizer", [(0.0, "sgd"), (0.3, "adam")])
def test_a_constraint_without_noise(noise, optimizer):
    """The norm of w, known exactly; with an exact loss too nothing in the problem is noisy."""
    model = Point(np.zeros(DIM))
    make: Callable[..., Any] = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    optimizer = make(model.parameters(), lr=0.02)
    objective = fcco.constrained(model, optimizer, {"norm": 0.5})
    draw = torch.Generator().manual_seed(0)

    def function():
        error = model.w - torch.as_tensor(TARGET)
        error = error - noise * torch.randn(DIM, generator=draw).double()
        return error.square().sum() / 2, {"norm": model.w.square().sum().view(1)}

    norms = []
    for _ in range(1000):
        take_step(objective, function)
        norms.append(model.w.square().sum().item())
    tail = norms[600:]
    assert np.mean(tail) < 0.5 + 0.01 and np.mean(tail) > 0.4
    assert np.std(tail) < 0.2


@pytest.mark.parametrize("constant, blocks", [(1.0, M), (0.0, 2)])
def test_a_constraint_that_cannot_move_does_not_silence_the_others(constant, blocks):
    problem, expected = Noisy(400, blocks), end(blocks=blocks)
    objective = objective_of(np.append(LIMIT, 0.5), M + 1)
    for t in range(400):

        def function(t=t):
            loss, values, _ = problem.measure(objective.model.w, t)
            return loss, torch.cat([values, 0 * values[:1] + constant])

        index = torch.as_tensor(np.append(problem.index[t], M))
        take_step(objective, function, index)
    assert objective.violation()[M] == pytest.approx(constant - 0.5)
    assert objective.multipliers()[:M].max() > 0.1
    ours, theirs = (o.term.scales[1].item() for o in (objective, expected))
    assert 1 / 3 < ours / theirs < 3


def test_equalities_are_met_from_both_sides():
    goal = np.array([0.7, -0.6])
    objective = objective_of(goal, 2, lr=0.02, equality=True)
    draw = torch.Generator().manual_seed(0)
    tail = []
    for t in range(1200):

        def function():
            w, noise = objective.model.w, 0.2 * torch.randn(5, generator=draw).double()
            return (w - noise[:3]).square().sum() / 2, w[:2] + noise[3:]

        take_step(objective, function)
        if t >= 500:
            tail.append(objective.model.w.detach().numpy().copy())
    np.testing.assert_allclose(np.mean(tail, axis=0), [*goal, 0.0], atol=0.02)
    assert objective.multipliers()[0] < 0 < objective.multipliers()[1]
    assert (objective.violation() >= 0).all()


def test_switching_waits_for_more_than_noise():
    model = Point(np.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    objective = fcco.constrained(model, optimizer, 2, "ssg", tolerance=[1.0, 0.0])
    rng, decisions = np.random.default_rng(0), []
    for _ in range(400):
        noise = torch.as_tensor(rng.normal(size=2) * [1.0, 0.2])
        take_step(objective, lambda noise=noise: (model.w.sum(), model.w + noise))
        decisions.append(objective.term.last.constraint is None)
    threshold = objective.term.threshold
    assert min(abs(threshold - 1.0), abs(threshold - 0.2)) < 0.15
    assert 0.6 < np.mean(decisions) < 0.9


# What it says, and refuses.


def test_what_it_refuses():
    automatic = {"gamma": "auto", "correction": 0.0}
    with pytest.raises(ValueError, match="one number per constraint"):
        MultiplierTerm(fcco.InnerTracker(3, 2, **automatic))
    with pytest.raises(ValueError, match="measures its noise"):
        MultiplierTerm(fcco.ema_tracker(3))
    with pytest.raises(ValueError, match="no meaning for equalities"):
        MultiplierTerm(fcco.InnerTracker(3, **automatic), equality=True, margin=0.1)
    objective = objective_of()
    with pytest.raises(ValueError, match="needs the objective too"):
        objective(lambda: torch.as_tensor(A) @ objective.model.w)
    assert not objective.term.tracker.seen.any()
    with pytest.raises(Unsupported, match="MultiplierTerm: give the method numbers"):
        signature_of(Member(objective.model, objective.optimizer, objective))
    switching = objective_of(method="ssg")
    with pytest.raises(Unsupported, match="`threshold` a number"):
        signature_of(Member(switching.model, switching.optimizer, switching))


# On a GPU.


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("blocks", [M, 2])
def test_the_gpu_agrees_and_the_host_never_waits(blocks):
    problem, found = Noisy(100, blocks), []
    for device in ("cpu", "cuda"):
        tracker = fcco.InnerTracker(M, gamma="auto", read="new", dtype=torch.float64, device=device)
        term = MultiplierTerm(tracker, tolerance=LIMIT.tolist())
        losses = torch.as_tensor(problem.loss_noise[:, 0]).to(device)
        values = torch.as_tensor(problem.noise).to(device)
        slopes = []
        for t in range(100):
            index = torch.as_tensor(problem.index[t]).to(device)
            carrier = values[t][index].requires_grad_()
            blocks_of = tracker.blocks(None if blocks == M else index)
            update, tracked = tracker.propose(tracker.entries(blocks_of, carrier))
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                tracker.write(update)
                term.observe(losses[t])
                loss = term.loss(tracked)
                term.close()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            slopes.append(torch.autograd.grad(loss, carrier)[0].cpu())
        found.append([*slopes, *(buffer.cpu() for buffer in term.buffers())])
    assert found[0][-1].max() > 0
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
