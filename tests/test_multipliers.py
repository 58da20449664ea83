"""Constraints without settings: the rule against a transcription, units, and where it ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from problems import Point, take_step
from test_tracker_error import ByHand
from torch import Tensor

import fcco
from fcco.terms import MultiplierTerm

M, DIM = 5, 3
RNG = np.random.default_rng(3)
A, TARGET = RNG.normal(size=(M, DIM)), np.array([1.0, -0.5, 0.8])
LIMIT = np.array([0.1, -0.2, 0.0, 0.3, -0.1])
NONE = np.inf
KINDS: dict[str, tuple[Any, Any]] = {  # low and high of each constraint
    "upper": (np.full(M, -NONE), LIMIT),
    "lower": (LIMIT - 0.3, np.full(M, NONE)),
    "equality": (LIMIT, LIMIT),
    "interval": (LIMIT - 0.2, LIMIT),
    "mixed": (np.array([-NONE, -0.4, 0.0, 0.3, -0.1]), np.array([0.1, -0.2, 0.0, NONE, 0.3])),
}


def limits_of(low: Any, high: Any, scale: float = 1.0) -> list[Any]:
    """The same limits in the words of a user."""
    words = []
    for a, b in zip(scale * np.asarray(low), scale * np.asarray(high), strict=True):
        one_sided = float(b) if np.isinf(a) else fcco.AtLeast(float(a))
        two_sided = fcco.Equal(float(a)) if a == b else (float(a), float(b))
        words.append(two_sided if np.isfinite([a, b]).all() else one_sided)
    return words


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


def outside(nu: Any, k: Any, g: Any, low: float, high: float) -> Any:
    """nu + k (g - clip(g + nu/k, low, high)), exactly 0 inside."""
    shifted = g + nu / k if k else 0.0
    return k * (shifted - min(max(shifted, low), high)) if k else nu


def transcription(problem: Noisy, steps: int, lr: float, low: Any, high: Any) -> Any:
    """The rule in plain loops over constraints, from its description alone."""
    w, nu = np.zeros(DIM), np.zeros(M)
    tracked = ByHand(M, 1, None, least=0.2)
    sigma2, margin = np.zeros(M), np.zeros(M)
    losses, pressure, typical = [], 0.0, 0.0
    omega, a2, active, d0, last, nf = 0.0, 0.0, 0, 0.0, 0.0, 1.0
    reach = 0.2 * math.sqrt(2 * math.log(M))
    sign = np.where(np.isinf(high), -1.0, 1.0)
    joint = separate = 0.0
    path = []
    for t in range(steps):
        index = problem.index[t]
        residual = w - TARGET - problem.loss_noise[t]
        loss, gradient = residual @ residual / 2, residual.copy()
        fresh = A @ w + problem.noise[t]
        old, pooled = tracked.u[:, 0].copy(), tracked.means[0] / 2
        seen = {i for i in index if tracked.visits[i] > 0}
        tracked.step(index.tolist(), fresh[index, None])
        u, slow, visits = tracked.u[:, 0], tracked.slow[:, 0], tracked.visits
        share = M / len(index)
        for i in index:  # read the new value with the units of the last step
            own = sigma2[i] if sigma2[i] > 0 else pooled
            unit = max(d0, 0.03 * np.var(losses or [0.0])) or 1.0
            kappa = math.sqrt(unit / a2) / (own * max(omega, 1)) if a2 > 0 else 0.0
            near, far = low[i] + margin[i], high[i] - margin[i]
            gradient += share * outside(nu[i], kappa / 4 * math.sqrt(nf), u[i], near, far) * A[i]
        w = w - lr * gradient
        path.append(w.copy())
        # The step ends: noise of the loss,
        if t > 0:
            most = math.sqrt(18 * d0) if t > 10 else math.inf
            loss = last + min(max(loss - last, -most), most)
            change = (loss - last) ** 2 / 2
            d0 += max(0.03, 1 / t) * (change - d0)
        last, nf = loss, share
        losses.append(loss)
        # noise and error of the constraints.
        for i in index:
            sigma2[i] = tracked.spread[i, 0] / 2
            if visits[i] <= 20:
                sigma2[i] = (sigma2[i] * (visits[i] - 1) + 4 * tracked.means[0]) / (visits[i] + 7)
        error = tracked.error()[:, 0]
        noisy = {i: error[i] if visits[i] > 1 else 0.0 for i in index}
        room = min(joint / separate, 1) if separate > 0 else 0.0
        new = [sign[i] * (fresh[i] - old[i]) / sigma2[i] ** 0.5 for i in seen]
        joint += max(0.02, 1 / (t + 1)) * (sum(new) ** 2 - joint)
        separate += max(0.02, 1 / (t + 1)) * (sum(e**2 for e in new) - separate)
        slack = min(max(pressure / 5 - 1, 0) * max(omega - 0.5, 0), omega)
        tight = {i: min(reach * room * noisy[i], (high[i] - low[i]) / 2) for i in index}
        for i in index:
            sd = sigma2[i] ** 0.5
            margin[i] = tight[i] - slack * min(max(typical, sd / 4), 4 * sd)
        if tracked.steps >= 9:
            near, far = low + margin, high - margin
            beyond = {i: max(u[i] - high[i], low[i] - u[i]) + tight[i] for i in index}
            size = {i: max(beyond[i], 0) / sigma2[i] ** 0.5 for i in index}
            omega = max(omega * 0.99, max([size[i] for i in seen], default=0.0))
            if a2 == 0 and max(size.values()) > 0:
                a2 = max((share * sum(size.values()) / max(size.values())) ** 2, 0.1)
            unit = max(d0, 0.03 * np.var(losses or [0.0])) or 1.0
            kappa = {
                i: math.sqrt(unit / a2) / sigma2[i] / max(omega, 1) if a2 else 0 for i in index
            }
            part = math.sqrt(share) / 4
            c = {i: outside(nu[i], kappa[i] * part, u[i], near[i], far[i]) for i in index}
            for i in index:
                side = near if nu[i] < 0 or u[i] < near[i] or far[i] == np.inf else far
                over = [u[i] - side[i], slow[i] - side[i]]
                late = min(map(abs, over)) - noisy[i] / 2 if over[0] * over[1] > 0 else 0.0
                late = min(max(late, 0) / sigma2[i] ** 0.5 / max(omega, 1), 1) / max(omega, 1)
                rate = min(0.01 * share * (1 + 4 * late), 0.03) * kappa[i]
                nu[i] = outside(nu[i], rate, fresh[i], near[i], far[i])
            acts = {i: abs(c[i]) * sigma2[i] ** 0.5 for i in index}
            largest = max(acts.values())
            pressure *= 0.99
            if largest > 0:
                active += 1
                weight = max(0.02, 1 / (10 + active))
                total = sum(c[i] * (fresh[i] - old[i]) for i in seen) / largest
                a2 = max(a2 + weight * (share * total**2 - a2), 0.1)
                pressure = max(pressure, largest * math.sqrt(a2 / unit))
                mean = sum(acts[i] * sigma2[i] ** 0.5 for i in index) / sum(acts.values())
                typical += weight * (mean - typical)
        for i in index:  # one value alone tells no noise
            if visits[i] == 1:
                sigma2[i] = 0.0
    return np.array(path), nu, np.array([omega, a2, active])


@pytest.mark.parametrize("blocks", [M, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_equals_its_transcription(blocks, kind):
    problem, steps, lr = Noisy(200, blocks), 200, 0.05
    if kind != "upper" and blocks < M:
        lr = 0.01  # five equalities in three dimensions cannot hold
    path, nu, scales = transcription(problem, steps, lr, *KINDS[kind])
    objective = objective_of(limits_of(*KINDS[kind]), lr=lr, gamma="auto")
    ours = []
    for t in range(steps):
        train(objective, problem, range(t, t + 1))
        ours.append(objective.model.w.detach().numpy().copy())
    np.testing.assert_allclose(ours, path, rtol=0, atol=1e-10)
    np.testing.assert_allclose(objective.term.multiplier, nu, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(objective.term.scales[:3], scales, rtol=1e-8)
    assert np.abs(nu).max() > 0.1 and scales[2] > 50, "the constraints act"


# Units.


def end(
    lr: float = 0.05, blocks: int = M, copies: int = 1, scale=(1.0, 1.0), kind: str = "upper"
) -> Any:
    limits = copies * limits_of(*KINDS[kind], scale[1])
    objective = objective_of(limits, M * copies, lr)
    train(objective, Noisy(200, blocks), range(200), copies, scale)
    return objective


@pytest.mark.parametrize("kind", ["upper", "mixed"])
def test_units_of_loss_and_values_change_nothing(kind):
    plain = end(blocks=2, kind=kind, lr=0.02)
    expected = plain.model.w.detach()
    assert plain.term.multiplier.abs().max() > 0.1
    for scale in ((1.0, 100.0), (0.01, 0.1)):
        ours = end(lr=0.02 / scale[0], blocks=2, scale=scale, kind=kind).model.w.detach()
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-9)


def test_constraints_listed_ten_times_change_nothing_but_the_margin():
    """The largest of more estimates is further off: the margin grows like sqrt(2 ln m)."""
    settings: dict[str, Any] = {"blocks": 2, "kind": "equality", "lr": 0.01}
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


SAMPLES, ALL = [0, 1, 2, 3, 4, 5], list(range(M))
WHOLE = [(SAMPLES, ALL)]


def in_parts(parts: list[tuple[list[int], list[int]]]) -> tuple[list[Tensor], list[Any]]:
    """Gradients and states of 60 steps, each with parts of six samples and of the constraints."""
    objective = objective_of()
    w, gradients, states = objective.model.w, [], []
    for batch in torch.randn(60, 6, M, generator=torch.Generator().manual_seed(0)).double():
        for rows, constraints in parts:

            def function(rows=rows, constraints=constraints, batch=batch, w=w):
                noise = batch[rows]
                losses = (w - torch.as_tensor(TARGET) - noise[:, :DIM]).square().sum(1) / 2
                values = torch.as_tensor(A) @ w + 0.3 * noise
                return losses.mean(), values[:, constraints].flatten()

            share = len(rows) * len(constraints) / (len(SAMPLES) * M)
            loss = objective(function, torch.tensor(constraints).repeat(len(rows)))
            (share * loss).backward()
        objective.close()
        gradients.append(w.grad.clone())
        w.grad = None
        with torch.no_grad():
            w -= 0.01
        states.append(state_of(objective))
    return gradients, states


def test_accumulated_batches_are_one_step():
    whole, several = (in_parts(p)[1] for p in (WHOLE, [([k, k + 1], ALL) for k in (0, 2, 4)]))
    for one, other in zip(whole, several, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-9)
    assert whole[-1]["terms.inner.multiplier"].max() > 0


def test_parts_of_the_constraints_give_the_gradient_of_all():
    whole, several = (in_parts(p)[0] for p in (WHOLE, [(SAMPLES, ALL[:2]), (SAMPLES, ALL[2:])]))
    assert (whole[-1] - whole[5]).abs().max() > 0.1, "the constraints act"
    torch.testing.assert_close(several, whole, rtol=0, atol=1e-9)


# Where it ends.


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


def test_a_hard_rate_that_never_moved_is_enforced():
    """All 200 are called positive, and stay so while the multiplier rises."""
    x = torch.linspace(-1, 1, 200).double()
    model = Point([4.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    objective = fcco.constrained(model, optimizer, {"rate": 0.3})
    draw = torch.Generator().manual_seed(0)

    def function():
        score = model.w + x
        rate = (score > 0).double().mean().view(1), score.sigmoid().mean().view(1)
        noise = torch.randn(1, generator=draw).double()
        return (model.w - 4 - noise).square().sum() / 2, {"rate": fcco.Measured(*rate)}

    assert function()[1]["rate"].value.item() == 1.0
    for _ in range(1500):
        take_step(objective, function)
    assert function()[1]["rate"].value.item() < 0.35


def test_limits_are_enforced_beside_a_loss_without_noise():
    """Min |w - target|^2 / 2 with w <= 0.3 seen with noise: the loss soon stops moving."""
    target, draw = torch.tensor([2.0, 1.5, 1.0, 0.5]).double(), torch.Generator().manual_seed(0)
    model = Point(np.zeros(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    objective: Any = fcco.constrained(model, optimizer, 4, tolerance=0.3)

    def function():
        values = model.w + 0.3 * torch.randn(4, generator=draw).double()
        return (model.w - target).square().sum() / 2, values

    for _ in range(1500):
        take_step(objective, function)
    assert (model.w - 0.3).abs().max() < 0.08
    # A constant loss has no unit at all.
    model = Point(np.ones(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    objective = fcco.constrained(model, optimizer, 4, tolerance=0.3)
    for _ in range(500):
        take_step(objective, lambda: (0 * function()[0], model.w * 1.0))
    assert model.w.max() < 0.31


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_limits_that_cannot_all_hold_end_balanced(scale):
    """(w - 1)^2 and (w + 1)^2 are at most 0.5: 1 is the least possible of the larger."""
    model = Point([0.0, 0.0])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    limits = {"left": 0.5, "right": (None, 0.5), "other": 2.0 * scale}
    objective: Any = fcco.constrained(model, optimizer, limits)
    draw, tail = torch.Generator().manual_seed(0), []

    def function():
        noise = 0.2 * torch.randn(4, generator=draw).double()
        w, u = model.w
        values = (w - 1).square() + noise[0] / 2, (w + 1).square() + noise[2]
        values = {"left": values[0], "right": values[1], "other": scale * (u + noise[3])}
        return (w - 0.6 - noise[1]).square() / 2 + (u - 1).square() / 2, values

    for t in range(1500):
        take_step(objective, function)
        if t >= 1000:
            tail.append(model.w.tolist())
    w = np.mean(tail, axis=0)[0]
    assert max((w - 1) ** 2, (w + 1) ** 2) < 1.3
    nu = objective.multipliers()
    assert (objective.term.margin < 0).all()  # all are relaxed
    assert nu["other"] == 0 and 1 < nu["left"] < 100 and 1 < nu["right"] < 100
    assert (end().term.margin >= 0).all()


LINES = np.array(
    [[1.0, 0, 0, 0], [0, 1, 0, 0.3], [0, 0.2, 1, 0], [0.1, 0, 0, 1], [0, 0, 0.5, -0.5]]
)
AIM = np.array([1.0, -0.5, 0.8, 0.2])
IN_WORDS: dict[str, dict[str, Any]] = {
    "at most": {"a": 0.4},
    "at least": {"b": fcco.AtLeast(0.1)},
    "interval, from above": {"c": (0.2, 0.45)},
    "interval, from below": {"b": (0.1, 0.3)},
    "interval, inside": {"e": (-0.6, 0.6)},
    "equality": {"d": fcco.Equal(-0.1)},
    "open sides": {"a": (None, 0.4), "b": (0.1, None)},
    "mixture": {
        "a": 0.4, "b": fcco.AtLeast(0.1), "c": (0.2, 0.45), "d": fcco.Equal(-0.1), "e": (-0.6, 0.6)
    },
}  # fmt: skip


def optimum(limits: dict[str, Any], penalty: Callable[[Any], Any] | None = None) -> Any:
    """w and multipliers of min |w - aim|^2 / 2 under limits, or with a penalty of the distance."""
    cp = pytest.importorskip("cvxpy")
    w, total, held, distances = cp.Variable(4), 0, {}, []
    for name, limit in limits.items():
        g = LINES[ord(name) - ord("a")] @ w
        low, high = limit if isinstance(limit, tuple) else (None, limit)
        if isinstance(limit, fcco.AtLeast | fcco.Equal):
            low, high = limit.limit, limit.limit if isinstance(limit, fcco.Equal) else None
        above = [] if high is None else [g <= high]
        below = [] if low is None else [g >= low]
        held[name] = (above, below)
        distances.append(sum(cp.pos(c.args[0] - c.args[1]) for c in (*above, *below)))
    total = cp.sum_squares(w - AIM) / 2
    sides = [side for pair in held.values() for each in pair for side in each]
    if penalty is not None:
        total, sides = total + sum(map(penalty, distances)) / len(limits), []
    cp.Problem(cp.Minimize(total), sides).solve()
    if penalty is not None:
        return w.value, None
    duals = [sum(s.dual_value for s in a) - sum(s.dual_value for s in b) for a, b in held.values()]
    return w.value, np.array(duals, dtype=float)


def solve(limits: dict[str, Any], noise: float, steps: int, **settings: Any) -> Any:
    model, rng = Point(np.zeros(4)), np.random.default_rng(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    objective: Any = fcco.constrained(model, optimizer, limits, **settings)
    rows, tail, found = [ord(name) - ord("a") for name in limits], [], []
    for t in range(steps):
        off = torch.as_tensor(rng.normal(size=4 + len(rows)) * noise)

        def function(off=off):
            values = torch.as_tensor(LINES[rows]) @ model.w + off[4:]
            loss = (model.w - torch.as_tensor(AIM) - off[:4]).square().sum() / 2
            return loss, dict(zip(limits, values, strict=True))

        take_step(objective, function)
        if t > steps // 2:
            tail.append(model.w.detach().numpy().copy())
            found.append(list(objective.multipliers().values()))
    return np.mean(tail, axis=0), np.mean(found, axis=0), objective


@pytest.mark.parametrize("words", IN_WORDS)
def test_limits_of_every_kind_end_at_the_optimum(words):
    limits = IN_WORDS[words]
    w, nu = optimum(limits)
    exact, found, _ = solve(limits, noise=0.0, steps=1500)
    np.testing.assert_allclose(exact, w, atol=3e-3)
    np.testing.assert_allclose(found, nu, atol=3e-2)  # without noise they fall slowly
    assert words == "interval, inside" or np.abs(nu).min() > 0.1 or words == "mixture"
    noisy, *_ = solve(limits, noise=0.2, steps=1500)
    reach = 0.2 * math.sqrt(2 * math.log(max(len(limits), 2))) * 0.2  # the margin
    np.testing.assert_allclose(noisy, w, atol=1.5 * reach + 0.015)


@pytest.mark.parametrize("method, settings, penalty", [
    ("sonex", {"penalty": 6.0, "smoothing": 0.1}, lambda cp, d: cp.huber(d, 0.6) / 0.2),
    ("alexr2", {"penalty": 6.0, "smoothing": 0.1, "nu": 0.1, "eta": 0.02, "theta": 0.0},
     lambda cp, d: cp.huber(d, 0.6) / 0.2),
    ("squared-hinge", {"penalty": 40.0}, lambda cp, d: 20 * cp.square(d)),
])  # fmt: skip
def test_penalties_take_every_kind(method, settings, penalty):
    """The minimiser of the penalised problem, from a convex solver."""
    cp, limits = pytest.importorskip("cvxpy"), IN_WORDS["mixture"]
    w, _ = optimum(limits, lambda distance: penalty(cp, distance))
    ours, _, objective = solve(limits, 0.0, 1500, method=method, gamma=1.0, **settings)
    np.testing.assert_allclose(ours, w, atol=2e-3)
    assert objective.multipliers()["b"] < -0.3 and objective.multipliers()["a"] > 0.3
    assert objective.report().rows[1].excess == pytest.approx(0.1 - LINES[1] @ w, abs=2e-3)


BASELINES: dict[str, Any] = {
    "ssg": {"threshold": 0.01}, "oss": {"proximal": 0.5, "inner_steps": 20},
    "icppac": {"proximal": 0.5, "inner_steps": 20},
}  # fmt: skip


@pytest.mark.parametrize("method", BASELINES)
def test_a_lower_limit_is_an_upper_one_of_minus_the_value(method):
    runs = []
    for sign, limit in ((1.0, fcco.AtLeast(0.1)), (-1.0, -0.1)):
        model = Point(np.zeros(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        objective: Any = fcco.constrained(
            model, optimizer, {"a": 0.4, "b": limit}, method, **BASELINES[method]
        )
        for _ in range(100):

            def function(sign=sign, model=model):
                a, b = torch.as_tensor(LINES[:2]) @ model.w
                loss = (model.w - torch.as_tensor(AIM)).square().sum() / 2
                return loss, {"a": a, "b": sign * b}

            take_step(objective, function)
        runs.append((model.w.detach().clone(), objective))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=1e-12)
    assert runs[0][1].violation() == pytest.approx(runs[1][1].violation(), abs=1e-12)
    lower, upper = (each.multipliers()["b"] for _, each in runs)
    assert lower == pytest.approx(-upper) and lower < -0.1


def outer(function: Any) -> dict[str, Any]:
    return {"outer": function, "smoothing": 0.1}


@pytest.mark.parametrize("method, limit, settings, words", [
    *((method, (0.2, 0.26), settings, "one side") for method, settings in BASELINES.items()),
    ("ssg", fcco.Equal(0.0), BASELINES["ssg"], "one side"),
    ("alexr", fcco.AtLeast(0.1), {"penalty": 1.0, "dual_step": 0.1}, "-value <= -b"),
    ("sonex", (0.1, 0.2), outer(fcco.outer.Absolute(2.0)), "non-decreasing"),
    ("sonex", (0.1, 0.2), outer(fcco.outer.TwoSidedHinge(0.1)), "of one number"),
])  # fmt: skip
def test_limits_that_a_method_does_not_have_are_refused(method, limit, settings, words):
    model = Point(np.zeros(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=words):
        fcco.constrained(model, optimizer, {"a": limit}, method, **settings)


def test_switching_waits_for_more_than_noise():
    model = Point(np.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    objective = fcco.constrained(model, optimizer, 2, "ssg", tolerance=[1.0, 0.0])
    rng, decisions = np.random.default_rng(0), []
    for _ in range(400):
        noise = torch.as_tensor(rng.normal(size=2) * [1.0, 0.2])
        take_step(objective, lambda noise=noise: (model.w.sum(), model.w + noise))
        decisions.append(objective.term.feasible)
    term = objective.term
    threshold = term.threshold(term.limits.excess(term.tracker.rows))
    assert min(abs(threshold - 1.0), abs(threshold - 0.2)) < 0.15
    assert 0.6 < np.mean(decisions) < 0.9


# What it says, and refuses.


def test_what_it_refuses():
    automatic = {"gamma": "auto", "correction": 0.0}
    with pytest.raises(ValueError, match="one number per constraint"):
        MultiplierTerm(fcco.tracker.InnerTracker(3, 2, **automatic))
    with pytest.raises(ValueError, match="measures its noise"):
        MultiplierTerm(fcco.tracker.ema_tracker(3))
    with pytest.raises(ValueError, match="no meaning for equalities"):
        MultiplierTerm(
            fcco.tracker.InnerTracker(3, **automatic), tolerance=fcco.Equal(0.0), margin=0.1
        )
    objective = objective_of()
    with pytest.raises(ValueError, match="needs the objective too"):
        objective(lambda: torch.as_tensor(A) @ objective.model.w)
    assert not objective.term.tracker.seen.any()
