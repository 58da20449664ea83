"""The front door for constrained problems: one loop for every method, and what it refuses."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from problems import Point, TorchQuadratics, box, decay, entries, take_step

import fcco
from fcco.constraints import ConstrainedObjective, ConstraintReport, MultiplierAverage
from fcco.methods.constrained import _RECIPES, _settings, constrained
from fcco.outer import SeparableHinge

A, B, M = 1.0, 0.3, 3  # min |w - a|^2 / 2 with w <= b: every multiplier is 0.7
PENALTY: dict[str, Any] = {"penalty": 6.0, "smoothing": 0.004}

# What each method needs on the box problem: settings, step size, steps, whether steps fall to 0.
CASES: dict[str, tuple[dict[str, Any], float, int, bool]] = {
    "sonex": (PENALTY, 0.01, 800, True),
    "alexr2": (PENALTY | {"nu": 0.5, "eta": 0.02, "gamma": 0.2}, 0.5, 800, True),
    "alexr": ({"penalty": 6.0, "dual_step": 0.1}, 0.01, 800, True),
    "sonx": ({"penalty": 6.0, "gamma": 0.05}, 0.01, 800, True),
    "yang2025": ({"penalty": 6.0, "gamma": 0.05}, 0.01, 800, True),
    "sox": ({"penalty": 60.0}, 0.01, 800, True),
    "li2024": ({"penalty": 60.0}, 0.01, 800, True),
    "liu2025": (PENALTY | {"refresh_every": 10}, 0.01, 800, True),
    "ssg": ({"threshold": 0.02, "burn_in": 200}, 0.01, 800, True),
    "oss": ({"proximal": 1.0, "inner_steps": 200}, 1.0, 2000, False),
    "icppac": ({"proximal": 0.5, "inner_steps": 100}, 0.1, 1000, False),
}
SAMPLED = {"sonex", "alexr2", "alexr", "sonx", "yang2025", "sox", "li2024"}


def objective_of(method: str, model: Any = None, constraints: Any = M, **more: Any) -> Any:
    settings, lr, _, _ = CASES[method]
    model = model or Point(np.zeros(M))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return constrained(model, optimizer, constraints, method, **settings | more)


# Every method in the same loop.


def test_every_method_has_a_case():
    assert set(CASES) == set(_RECIPES)
    constrained_ones = {m.name for m in fcco.methods.table() if m.constraints}
    assert constrained_ones <= set(_RECIPES), "the registry's constrained methods"
    assert {m.name for m in fcco.methods.table().only(constraints="all")} == set(CASES) - SAMPLED


@pytest.mark.parametrize("method", CASES)
def test_the_word_is_all_that_changes(method):
    problem, model = box(A, B, M, 0.03), Point(np.zeros(M))
    objective = objective_of(method, model)
    objective.keep_average(400)
    _, _, steps, falling = CASES[method]
    for step in range(steps):
        if falling:
            decay(objective.optimizer, (1 - step / steps) ** 1.5)
        take_step(objective, problem.sample(model.w, torch.arange(M)))
    tolerance = 0.12 if method == "oss" else 0.08  # those of the specification's own checks
    assert np.linalg.norm(model.w.detach().numpy() - B) < tolerance
    multipliers = objective.average_multipliers()
    np.testing.assert_allclose(multipliers, A - B, atol=0.25 if method == "oss" else 0.15)


@pytest.mark.parametrize("method", CASES)
def test_every_method_offers_the_same(method):
    model = Point([0.5, -1.0, 2.0])
    objective = objective_of(method, model, ["low", "mid", "high"], tolerance=[0.3, 0.1, 0.2])
    assert isinstance(objective, ConstrainedObjective)
    assert objective.method == method
    assert objective.samples_constraints == (method in SAMPLED)
    assert set(objective.violation()) == {"low", "mid", "high"}

    def named() -> Any:
        values = dict(zip(["low", "mid", "high"], model.w, strict=True))
        return (model.w - A).square().sum() / 2, values

    start = model.w.detach().clone()
    take_step(objective, named)
    expected = {"low": 0.2, "mid": -1.1, "high": 1.8}
    assert objective.violation() == pytest.approx(expected)
    assert set(objective.multipliers()) == {"low", "mid", "high"}
    assert np.isfinite(objective.value().item())
    assert not torch.equal(model.w, start)
    report = objective.report()
    assert report[:4] == (pytest.approx(1.8), "high", 2, 3)
    full = dict(zip(["high", "low", "mid"], torch.tensor([0.1, 0.2, 0.6]), strict=True))
    assert objective.report(full)[:4] == (pytest.approx(0.5), "mid", 1, 3)
    assert {"terms.inner.limits.tolerance"} <= set(objective.state_dict())


@pytest.mark.parametrize("method", CASES)
def test_sampled_constraints_are_taken_or_refused(method):
    model = Point([0.5, -1.0, 2.0])
    objective = objective_of(method, model)
    part = lambda: ((model.w - A).square().sum() / 2, model.w[:2])  # noqa: E731
    if method in SAMPLED:
        take_step(objective, part, torch.tensor([0, 1]))
        assert torch.isnan(objective.violation()).tolist() == [False, False, True]
        assert objective.report().seen == 2
    else:
        with pytest.raises(ValueError, match="all 3 constraints"):
            objective(part, torch.tensor([0, 1]))


@pytest.mark.parametrize("method", CASES)
def test_resumes_bitwise(method):
    def advance(model: Point, objective: Any, first: int, last: int) -> None:
        for step in range(first, last):
            problem = box(A, B, M, 0.1, seed=step)
            take_step(objective, problem.sample(model.w, torch.arange(M)))

    model, file = Point([0.5, -1.0, 2.0]), io.BytesIO()
    objective = objective_of(method, model)
    advance(model, objective, 0, 7)
    parts = [model, objective, objective.optimizer]
    torch.save([part.state_dict() for part in parts], file)
    advance(model, objective, 7, 13)
    again = Point(np.zeros(M))
    second = objective_of(method, again)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for part, state in zip((again, second, second.optimizer), saved, strict=True):
        part.load_state_dict(state)
    advance(again, second, 7, 13)
    assert torch.equal(model.w, again.w)
    torch.testing.assert_close(
        objective.multipliers(), second.multipliers(), rtol=0, atol=0, equal_nan=True
    )


# The two methods that the door makes itself equal their transcriptions.

PROBLEM = ref.Quadratics()
DATA = TorchQuadratics(PROBLEM)
START = np.linspace(0.5, 1.5, 4)


def batch(model: Point, sampled: list[tuple], which: int) -> tuple[Callable[[], Any], torch.Tensor]:
    blocks, samples = entries(sampled, which)
    return lambda: (DATA.loss(model.w), DATA.values(model.w, blocks, samples)), blocks


@pytest.mark.parametrize("read", ["old", "new"])
def test_sonex(read):
    model = Point(START)
    optimizer = fcco.momentum_type(model.parameters(), lr=0.02, beta=0.2)
    objective = constrained(
        model, optimizer, 6, penalty=1.5, smoothing=0.4, gamma=0.3, correction=0.4, read=read
    )
    path, u = ref.sonex(
        PROBLEM, START, 200, ref.hinge_slope(1.5, 0.4), ref.Momentum(0.02, 0.2), gamma=0.3,
        correction=0.4, read=read, with_g0=True,
    )  # fmt: skip
    rng, ours = np.random.default_rng(1), []
    for _ in range(200):
        take_step(objective, *batch(model, PROBLEM.draw(rng, 3, 2), 1))
        ours.append(model.w.detach().numpy().copy())
    np.testing.assert_allclose(np.array(ours), path, rtol=0, atol=1e-12)
    np.testing.assert_allclose(objective.term.tracker.value, u, rtol=0, atol=1e-12)


def test_alexr2():
    model, dual_step, theta = Point(START), 0.5, 0.6
    outer = fcco.momentum_type(model.parameters(), lr=0.05, beta=0.2)
    objective = constrained(
        model, outer, 6, "alexr2", penalty=1.5, smoothing=0.4, gamma=dual_step / (1 + dual_step),
        theta=theta, nu=0.3, eta=0.1, inner_steps=5,
    )  # fmt: skip
    assert isinstance(objective.optimizer, fcco.ProximalPoint)
    path, u = ref.alexr2(
        PROBLEM, START, 40, 5, ref.hinge_slope(1.5, 0.4), ref.Momentum(0.05, 0.2),
        dual_step=dual_step, theta=theta, nu=0.3, eta=0.1, with_g0=True,
    )  # fmt: skip
    rng, ours = np.random.default_rng(1), []
    for _ in range(40):
        for _ in range(5):
            sampled = PROBLEM.draw(rng, 3, 2)
            inner, blocks = batch(model, sampled, 1)
            take_step(objective, inner, blocks, gradient=batch(model, sampled, 2)[0])
        ours.append(model.w.detach().numpy().copy())
    np.testing.assert_allclose(np.array(ours), path, rtol=0, atol=1e-12)
    np.testing.assert_allclose(objective.term.tracker.value, u, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["sonex", "alexr2", "yang2025"])
def test_an_outer_function_of_ones_own(method):
    """Two tracked rates with |difference| <= 0.1."""
    model = Point([0.9, 0.5, 0.1, 0.2])
    settings = {k: v for k, v in CASES[method][0].items() if k != "penalty"}
    objective = constrained(
        model, torch.optim.SGD(model.parameters(), lr=0.1), 2, method,
        outer=fcco.TwoSidedHinge(0.1, 4.0), **settings,
    )  # fmt: skip
    take_step(objective, lambda: (0 * model.w.sum(), model.w.view(2, 2)))
    np.testing.assert_allclose(objective.violation(), [0.3, 0.0], atol=1e-12)
    np.testing.assert_allclose(objective.multipliers(), [2.0, 0.0], atol=1e-9)


# What it refuses.


@pytest.mark.parametrize("method, settings, message", [
    ("ooa", {}, "method=...)` must be one of 'sonex', 'alexr2', 'alexr', 'sonx', 'yang2025', "
                "'sox', 'li2024', 'liu2025', 'ssg', 'oss', 'icppac' but is: 'ooa'"),
    ("msvr-v2", {}, "but is: 'msvr-v2'"),
    ("sonex", {}, "`constrained(method='sonex')` needs `smoothing`, how far the hinge is smoothed"),
    ("sonex", {"smoothing": 0.1}, "penalty=...)` is needed"),
    ("alexr2", PENALTY, "needs `nu`, the parameter of ALEXR2's proximal point (for alexr2); `eta`"),
    ("liu2025", PENALTY, "needs `refresh_every`, how often"),
    ("ssg", {"threshold": 0.1, "penalty": 1.0}, "method='ssg')` has no such setting: `penalty` is "
     "the weight of a penalty; dual and switching methods have none (for sonex, alexr2, alexr, "
     "sonx, yang2025, sox, li2024, liu2025). Settings of ssg: threshold"),
    ("oss", {"proximal": 1.0, "inner_steps": 5, "gamma": 0.1}, "`gamma` is the weight of the new "),
    ("icppac", {"inner_steps": 5}, "needs `proximal`"),
    ("li2024", {"penalty": 1.0, "smoothing": 0.1}, "`smoothing` is how far the hinge is smoothed "
     "(for sonex, alexr2, liu2025). Settings of li2024: penalty, gamma, read, ramp_steps"),
    ("li2024", {"penalty": 1.0, "correction": 0.1}, "`correction` is the weight of MSVR's"),
    ("liu2025", PENALTY | {"refresh_every": 2, "gamma": 0.1}, "`gamma` is the weight of the new"),
    ("sonex", PENALTY | {"speed": 9}, "`speed` is unknown (no method has it)"),
    ("alexr2", PENALTY | {"nu": 0.1, "eta": 0.1, "theta": 1.5}, "`alexr2(theta=...)` must lie in"),
    ("alexr2", {"outer": fcco.outer.MCP(1.0, 2.0), "smoothing": 0.1, "nu": 0.1, "eta": 0.1},
     "must be convex"),
])  # fmt: skip
def test_wrong_words_and_settings(method, settings, message):
    model = Point(np.zeros(M))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=re.escape(message)):
        constrained(model, optimizer, M, method, **settings)


@pytest.mark.parametrize("method", CASES)
def test_every_accepted_setting_reaches_the_method(method):
    """No name that the door accepts makes the recipe fail for being unknown or given twice."""
    accepted, needed = _settings(_RECIPES[method])
    assert {"tolerance", "margin", "process_group"} <= set(accepted)
    assert set(needed) <= set(CASES[method][0])
    values: dict[str, Any] = {
        "dtype": torch.float64, "device": "cpu", "on_nonfinite": "raise", "bounds": (-9.0, 9.0),
        "rule": fcco.tracker.track, "tolerance": 0.1, "margin": 0.01, "process_group": None,
        "read": "old", "correction": 0.1, "theta": 0.1, "gamma": 0.3, "equality": False,
        "outer": None, "dim": None, "average": 10, "ramp_steps": 3, "aggregate": "each",
        "inner_steps": 4, "project": None, "schedule": None, "burn_in": 1,
        "constraint_optimizer": None, "objective": None, "offload": True,
    }  # fmt: skip
    for name in accepted:
        if name not in needed and name != "penalty":
            take_part = objective_of(method, **{name: values[name]})
            assert isinstance(take_part, ConstrainedObjective)


# Reports and averages.


def test_report_of_tracked_and_of_given_values():
    model = Point([0.5, -1.0, 2.0])
    objective = constrained(
        model, torch.optim.SGD(model.parameters(), lr=0.1), 3, penalty=6.0, smoothing=0.1,
        tolerance=0.2, margin=0.05, gamma=1.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="no constraint has been seen"):
        objective.report()
    take_step(objective, lambda: (0 * model.w.sum(), model.w))
    report = objective.report()
    assert isinstance(report, ConstraintReport)
    assert report == (pytest.approx(1.8), 2, 2, 3, pytest.approx(2.0))
    given = objective.report(torch.tensor([0.19, 0.1, 0.25]))
    assert given == (pytest.approx(0.05), 2, 1, 3, pytest.approx(0.1 / 0.1 / 3))
    tracked = objective.term.tracker.value.squeeze(1)
    assert objective.report(tracked) == pytest.approx(report)
    for wrong in (torch.zeros(2), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="must hold all 3 constraints"):
            objective.report(wrong)


def test_report_of_vector_constraints():
    model = Point([0.5, -1.0, 0.2, 0.3])
    objective = fcco.constrained(
        model, torch.optim.SGD(model.parameters(), lr=0.1), ["one", "two"],
        outer=SeparableHinge(4.0, dim=2), smoothing=0.1,
    )  # fmt: skip
    values = model.w.detach().view(2, 2)
    report = objective.report(values)
    assert report == (0.5, "one", 2, 2, pytest.approx(2.0))
    assert objective.report({"two": values[1], "one": values[0]}) == report
    with pytest.raises(ValueError, match="given for"):
        objective.report({"one": values[0], "three": values[1]})


def test_average_is_a_mean_and_then_an_exponential_average():
    generator = torch.Generator().manual_seed(0)
    history = torch.rand(50, 2, generator=generator, dtype=torch.float64)
    average = MultiplierAverage(history[0], horizon=10)
    assert average.mean().isnan().all()
    expected = 0.0
    for t, row in enumerate(history):
        average.add(row)
        if t < 10:
            np.testing.assert_allclose(average.mean(), history[: t + 1].mean(0), atol=1e-14)
            expected = history[: t + 1].mean(0)
        else:
            expected = 0.9 * expected + 0.1 * row
    np.testing.assert_allclose(average.mean(), expected, atol=1e-14)


def test_any_penalty_can_keep_an_average():
    model, problem = Point(np.full(M, B)), box(A, B, M, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    objective = constrained(model, optimizer, M, penalty=6.0, smoothing=0.02, gamma=0.2)
    with pytest.raises(ValueError, match="needs `keep_average"):
        objective.average_multipliers()
    objective.keep_average(1000)
    singles = []
    for _ in range(1500):
        take_step(objective, problem.sample(model.w, torch.arange(M)))
        singles.append(objective.multipliers().numpy())
    smoothed = (A - B) / (1 + 0.02 * M)
    ours = objective.average_multipliers().numpy()
    np.testing.assert_allclose(ours, smoothed, atol=0.04)
    assert np.std(singles[500:], axis=0).min() > 5 * np.abs(ours - smoothed).max()


def test_a_step_on_another_loss_is_not_averaged():
    model = Point(np.ones(M))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    objective = constrained(model, optimizer, M, "yang2025", penalty=3.0, average=100)
    take_step(objective, lambda: (0 * model.w.sum(), model.w))
    assert objective.average_multipliers().tolist() == [1.0, 1.0, 1.0]
    objective.term.tracker.set_values(None, torch.full((M,), -1.0))
    model.w.sum().backward()
    optimizer.step()
    assert objective.average_multipliers().tolist() == [1.0, 1.0, 1.0]
    take_step(objective, lambda: (0 * model.w.sum(), model.w - 2))
    assert objective.average_multipliers().tolist() == [0.5, 0.5, 0.5]
