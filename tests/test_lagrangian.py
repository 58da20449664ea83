"""OSS and ICPPAC against literal transcriptions, cvxpy and laws of their rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
import reference_constrained as reference
import torch
from problems import Point, box, program, take_step
from reference_constrained import ConExSchedule
from test_switching import ONE, PROGRAM, START, TWO, follow, noisy, sgd
from torch import Tensor, nn

import fcco
from fcco.methods import Icppac
from fcco.methods.lagrangian import Linearised, ProximalRound

DOUBLE = torch.float64
STEPS = 25


def oss(model: nn.Module, optimizer: Any, limits: Any, **settings: Any) -> Any:
    return fcco.constrained(model, optimizer, limits, "oss", **settings)


def icppac(model: nn.Module, optimizer: Any, limits: Any, **settings: Any) -> Any:
    return fcco.constrained(model, optimizer, limits, "icppac", **settings)


def run(objective: Any, model: Point, samples: list) -> tuple[np.ndarray, np.ndarray]:
    """The path and the multipliers after each step."""
    path, duals = [], []
    for pair in samples:
        path.append(follow(objective, model, [pair])[0])
        duals.append(objective.multipliers().numpy().copy())
    return np.array(path), np.array(duals)


# The transcriptions.


@pytest.mark.parametrize("scale", [1.0, 0.6])
def test_oss_equals_the_transcription(scale):
    model = Point(START)
    objective = oss(model, sgd(model, scale), 3, proximal=1.5, inner_steps=STEPS)
    path, duals = reference.oss(PROGRAM, START, 6, STEPS, 1.5, scale)
    mine, multipliers = run(objective, model, ONE)
    np.testing.assert_allclose(mine, path, atol=1e-13)
    np.testing.assert_allclose(multipliers, duals, atol=1e-13)
    assert (multipliers >= 0).all() and (multipliers == 0).any() and (multipliers > 0.3).any()


@pytest.mark.parametrize(("tau", "theta", "samples"), [(5.0, 0.1, TWO), (2.0, 0.7, ONE)])
def test_icppac_equals_the_transcription(tau, theta, samples):
    schedule, model = ConExSchedule(theta, tau, step=0.1), Point(START)
    numbers: Any = {"proximal": 0.6, "inner_steps": STEPS, "tau": tau, "theta": theta}
    objective = icppac(model, sgd(model, 0.1), 3, **numbers)
    path, duals = reference.conex(PROGRAM, START, samples, STEPS, 0.6, schedule)
    mine, multipliers = run(objective, model, samples)
    np.testing.assert_allclose(mine, path, atol=1e-12)
    np.testing.assert_allclose(multipliers, duals, atol=1e-12)
    assert (multipliers >= 0).all() and (multipliers > 0.3).any()
    wrong, _ = reference.conex(PROGRAM, START, samples, STEPS, 0.6, schedule, sign=1.0)
    assert abs(mine - wrong).max() > 1e-2, "the sign of the extrapolation"


# Invariants.


def test_a_long_round_solves_the_regularised_problem():
    """Minimiser and multipliers against cvxpy; from a feasible anchor it ends feasible."""
    problem, mu = program(noise=0.0), 0.4
    anchor = problem.solve()[0] - 0.3 * problem.rows.numpy()[0]
    model = Point(anchor)
    rule, T = {"tau": 2.0, "theta": 1.0}, 1500
    objective = icppac(model, sgd(model, 0.2), 8, proximal=mu, inner_steps=T, **rule)
    for _ in range(T):
        take_step(objective, problem.sample(model.w, torch.arange(8)))
    x = cp.Variable(6)
    near = mu * cp.sum_squares(x - anchor)
    values = problem.rows.numpy() @ x - problem.limits.numpy()
    limits = [values[i] + near <= 0 for i in range(8)]
    loss = cp.sum_squares(x - problem.a.numpy()) / 2 + near
    cp.Problem(cp.Minimize(loss), limits).solve(solver=cp.CLARABEL)
    np.testing.assert_allclose(model.w.detach(), x.value, atol=2e-3)  # type: ignore[arg-type]
    dual = [np.asarray(limit.dual_value).item() for limit in limits]
    assert max(dual) > 0.2
    np.testing.assert_allclose(objective.multipliers(), dual, atol=0.02)
    assert problem.exact(model.w).max() < 1e-3


def test_the_residual_violation_of_oss_is_the_multiplier_over_sqrt_T():
    for T in (64, 144):
        problem, model = box(1.0, 0.3, 1, 0.0), Point([0.2])
        objective = oss(model, sgd(model, 2.0), 1, proximal=0.5, inner_steps=T)
        for _ in range(4 * T):
            take_step(objective, problem.sample(model.w, torch.arange(1)))
        assert (model.w.item() - 0.3) * T**0.5 == pytest.approx(0.72, abs=0.06)


# Derivatives along a step.


class Net(nn.Module):
    """Several parameters, of which one is frozen and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        self.unused = nn.Parameter(torch.ones(2, dtype=DOUBLE))
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


X = torch.as_tensor(np.random.default_rng(3).normal(size=(6, 3)))


def test_linearised_values_survive_the_step_that_moves_the_parameters():
    net = Net()
    moving = [p for p in net.parameters() if p.requires_grad]
    names = [name for name, p in net.named_parameters() if p.requires_grad]

    def function(*parameters: Tensor) -> Tensor:
        call = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(net, call, (X,)).square().mean(0)

    jacobian: Any = torch.autograd.functional.jacobian(function, tuple(moving))
    before = [p.detach().clone() for p in moving]
    values = net(X).square().mean(0)
    expected = values.detach().clone()
    line = Linearised(values, moving)
    values.sum().backward()
    torch.optim.SGD(moving, lr=0.1, momentum=0.5).step()
    move = [p.detach() - old for p, old in zip(moving, before, strict=True)]
    for part, v in zip(jacobian, move, strict=True):
        expected = expected + part.flatten(1) @ v.flatten()
    torch.testing.assert_close(line.values + line.change(move), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(line.values + line.change(move), expected, rtol=1e-12, atol=1e-12)
    assert Linearised(torch.ones(2), moving).change(move).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("make", [oss, icppac])
def test_frozen_and_unused_parameters_stay(make):
    ends = []
    for unused in (True, False):
        net = Net()
        if not unused:
            del net.unused
        objective = make(
            net, torch.optim.SGD(net.parameters(), lr=0.2, weight_decay=0.1), 2, proximal=0.5,
            inner_steps=3, tolerance=0.05,
        )  # fmt: skip
        for _ in range(8):
            take_step(objective, lambda net=net: (net(X).mean(), net(X).square().mean(0)))
        assert not unused or net.unused.tolist() == [1.0, 1.0]
        ends.append([p.detach() for p in net.layers.parameters()])
    frozen: Any = Net().layers[0].bias
    assert all(map(torch.equal, *ends)) and torch.equal(ends[0][1], frozen)


# The wrapped optimizer.


def test_the_average_of_a_bfloat16_model_is_wide_also_after_loading():
    def make() -> tuple[nn.Parameter, ProximalRound]:
        w = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        term: Any = SimpleNamespace(multiplier=torch.zeros(1))
        rule = Icppac(proximal=1e-9, inner_steps=100)  # nearly no pull
        rounds = ProximalRound(torch.optim.SGD([w], lr=1.0), rule, term)
        return w, rounds

    (w, rounds), (other, again), path = make(), make(), []
    for step in range(100):
        if step == 50:
            again.load_state_dict(rounds.state_dict())
            other.data.copy_(w)
        for p, optimizer in ((w, rounds), (other, again)) if step >= 50 else ((w, rounds),):
            p.grad = torch.full_like(p, 0.1 if step == 30 else 0.0)
            optimizer.step()
        path.append(w[0].item())
    assert path[-2] < 0.92 and w[0].item() == pytest.approx(np.mean(path[:-1]), abs=0.005)
    assert torch.equal(w, other) and rounds.round == again.round == 1
    assert rounds.round_begins


def test_schedulers_groups_and_the_inner_optimizer():
    model, late = Point(START), nn.Parameter(torch.ones(2, dtype=DOUBLE))
    primal = sgd(model, 0.1)
    objective = icppac(model, primal, 3, proximal=0.6, inner_steps=4)
    rounds: Any = objective.optimizer
    with pytest.raises(RuntimeError, match=r"Step `objective.optimizer` \(ProximalRound\), not"):
        primal.step()
    schedule = torch.optim.lr_scheduler.StepLR(rounds, 1, gamma=0.5)
    run(objective, model, ONE[:1])
    schedule.step()
    assert primal.param_groups[0]["lr"] == 0.05
    rounds.add_param_group({"params": [late], "lr": 1.0})
    late.grad = torch.ones(2, dtype=DOUBLE)
    objective(lambda: noisy(model.w, 1)).backward()
    rounds.step()
    assert late.tolist() == [0.0, 0.0]
    assert rounds.step(lambda: 5.0) == 5.0
    objective.detach_hooks()
    primal.step()


def test_the_parameters_stay_in_the_set():
    model, T = Point(START), 5
    primal = sgd(model, 1.0)

    def project(*_: Any) -> None:
        model.w.data.clamp_(-0.25, 0.25)

    primal.register_step_post_hook(project)
    objective = oss(model, primal, 3, proximal=1.5, inner_steps=T)
    clip = lambda x: np.clip(x, -0.25, 0.25)  # noqa: E731
    path, duals = reference.oss(PROGRAM, START, 6, T, 1.5, project=clip)
    mine, multipliers = run(objective, model, ONE[:30])
    np.testing.assert_allclose(mine, path, atol=1e-13)
    np.testing.assert_allclose(multipliers, duals, atol=1e-13)
    assert abs(mine).max() <= 0.25 and (abs(mine) == 0.25).any()


# Calls.


def test_several_entries_of_a_constraint():
    model = Point([0.5, 0.1])
    pooled = icppac(model, sgd(model), 2, proximal=1.0, inner_steps=4, tau=1.0)
    index = torch.tensor([1, 0, 0])
    noise = torch.tensor([0.0, 0.3, -0.1], dtype=DOUBLE)
    loss = pooled(lambda: (0 * model.w.sum(), model.w[index] + noise), index)
    pooled.close()
    y = torch.stack([model.w[0] + 0.1, model.w[1]]).detach()
    torch.testing.assert_close(pooled.multipliers(), y)
    assert loss.item() == pytest.approx((y @ y).item())
    assert pooled.term.value().item() == pytest.approx((y @ y).item())


def test_no_objective_means_a_search_for_a_feasible_point():
    model = Point([1.0])
    objective = icppac(model, sgd(model, 0.1), 1, proximal=0.1, inner_steps=50)
    for _ in range(300):
        take_step(objective, lambda: model.w - 0.3)
    assert model.w.item() < 0.35


def test_a_measured_statistic_moves_the_queue_with_the_surrogate_gradient():
    model = Point([1.0])
    objective = oss(model, sgd(model, 1.0), 1, proximal=1e-9, inner_steps=1)
    measured = fcco.Measured(torch.ones(1, dtype=DOUBLE), 2 * model.w)
    take_step(objective, lambda: (model.w.sum(), measured))  # x moves by -1/2
    assert objective.multipliers().item() == pytest.approx(max(1 - 2 * 0.5, 0), abs=1e-8)


def test_batches_of_one_step():
    """ConEx moves y once, with the first; the queue takes the mean over all."""
    for kind in ("oss", "icppac"):
        model = Point([0.0])
        make: Any = oss if kind == "oss" else icppac
        more = {} if kind == "oss" else {"tau": 1.0}
        lr = 0.1
        objective = make(model, sgd(model, lr), 1, proximal=1.0, inner_steps=1, **more)
        for value in (1.0, 3.0):
            inner = lambda v=value, m=model: (m.w.sum(), v * (m.w + 1))  # noqa: E731
            objective(inner).backward()
        objective.optimizer.step()
        # The second gradient of ConEx uses the y of the first batch.
        x = -lr / 2 * 2 if kind == "oss" else -lr * (2 + 1 * 1 + 1 * 3)
        assert model.w.item() == pytest.approx(x)
        expected = 2.0 * (1 + x) if kind == "oss" else 1.0
        assert objective.multipliers().item() == pytest.approx(expected)


# Refusals.


@pytest.mark.parametrize("make", [oss, icppac])
def test_what_is_refused_changes_nothing(make):
    model = Point(START)
    build = lambda model: make(model, sgd(model), 3, proximal=1.5, inner_steps=STEPS)  # noqa: E731
    objective = build(model)
    run(objective, model, ONE[:3])
    saved = str(objective.state_dict())
    few = lambda: (model.w.sum(), model.w[:2])  # noqa: E731
    full = lambda: noisy(model.w, 3)  # noqa: E731
    for inner, more in ((few, {}), (full, {"gradient": few, "gradient_index": torch.arange(2)})):
        index = torch.arange(2) if inner is few else None
        with pytest.raises(ValueError, match=r"looks at all 3 blocks|the same blocks"):
            objective(inner, index, **more)
    bad = lambda: (model.w.sum(), model.w[:3] * torch.nan)  # noqa: E731
    for more in ({}, {"gradient": full}):
        with pytest.raises(ValueError, match="NaN or infinite"):
            objective(bad, **more)
    with pytest.raises(ValueError, match="NaN or infinite"):
        objective(full, gradient=bad)
    assert str(objective.state_dict()) == saved
    rest, _ = run(objective, model, ONE[3:30])
    plain = Point(START)
    assert np.array_equal(run(build(plain), plain, ONE[:30])[0][3:], rest)


def test_a_sharded_model_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = Point(START)
    optimizer = sgd(model)
    monkeypatch.setattr("fcco.methods.lagrangian.any_sharded", lambda _: True)
    with pytest.raises(TypeError, match=r"cannot train a sharded model"):
        oss(model, optimizer, 3, proximal=1.0, inner_steps=5)
    optimizer.step()


def test_anchored_shows_the_point_between_rounds():
    model = torch.nn.Linear(2, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objective = icppac(model, optimizer, 1, proximal=0.5, inner_steps=4)
    rounds: Any = objective.optimizer
    between, inside = model.weight.tolist(), []
    for _ in range(10):
        objective(
            lambda: ((model.weight - 1).square().sum(), model.weight.sum().view(1))
        ).backward()
        rounds.step()
        rounds.zero_grad()
        inside = model.weight.tolist()
        between = inside if rounds.round_begins else between
        with rounds.anchored():
            assert model.weight.tolist() == between
        assert model.weight.tolist() == inside
    assert inside != between  # the last look was in the middle of a round


def test_two_calls_before_the_backward_pass_are_one_step():
    """A call at the start of a round must not change what the loss of another needs."""
    found = []
    for later in (False, True):
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        objective = oss(model, optimizer, 1, proximal=2.0, inner_steps=2, tolerance=0.3)
        both = lambda m=model: ((m.weight - 2).square().sum(), m.weight.view(1))  # noqa: E731
        for _ in range(5):
            first = objective(both)
            if not later:
                first.backward()
            second = objective(both)
            (first + second if later else second).backward()
            objective.optimizer.step()
            objective.optimizer.zero_grad()
        found.append(torch.cat([model.weight.detach().view(1), objective.term.multiplier]))
    assert found[0][1] > 0
    torch.testing.assert_close(found[1], found[0])
