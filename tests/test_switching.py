"""SSG against a literal transcription, its invariants, and problems with known KKT points."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference_constrained as reference
import torch
from problems import Point, take_step
from reference_constrained import NoisyProgram
from torch import Tensor, nn

from fcco.methods import constrained
from fcco.optim import OutputIterate


def ssg(model: nn.Module, optimizer: Any, limits: Any, **settings: Any) -> Any:
    return constrained(model, optimizer, limits, "ssg", **settings)


START = np.full(4, 0.1)
PROGRAM = NoisyProgram()
DATA = {name: torch.as_tensor(part) for name, part in PROGRAM.data.items()}
ONE = [(t, t) for t in range(150)]
TWO = [(t, t + 200) for t in range(150)]


def noisy(w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(g_0, constraints) of sample k of `PROGRAM`."""
    g0 = (w - DATA["a"]).square().sum() / 2 + DATA["z"][k] @ w
    slope = DATA["b"] + DATA["E"][k]
    return g0, DATA["q"] * w.square().sum() / 2 + slope @ w - DATA["r"] + DATA["e"][k]


def sgd(model: nn.Module, lr: float = 0.05, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def inverse_root(t: int) -> float:
    return 1 / np.sqrt(t + 1)


def follow(
    objective: Any, model: Point, samples: list[tuple[int, int]], decreasing: bool = False
) -> np.ndarray:
    """Run over numbered samples; the path."""
    path, schedule = [], None
    if decreasing:
        schedule = torch.optim.lr_scheduler.LambdaLR(objective.optimizer, inverse_root)
    for value, gradient in samples:
        more = {} if value == gradient else {"gradient": lambda k=gradient: noisy(model.w, k)}
        take_step(objective, lambda k=value: noisy(model.w, k), **more)
        if schedule is not None:
            schedule.step()
        path.append(model.w.detach().numpy().copy())
    return np.array(path)


# The transcription.


@pytest.mark.parametrize(
    "kind, samples",
    [("constant", TWO), ("decreasing", ONE), ("polyak", ONE), ("polyak", TWO), ("two", TWO)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_equals_the_transcription(kind, samples):
    eps: Any = lambda t: 0.05  # noqa: E731
    eta = eta_g = lambda t: 0.05
    options: dict[str, Any] = {"threshold": 0.05}
    model = Point(START)
    if kind == "decreasing":
        eps, eta = (lambda t: 0.1 / np.sqrt(t + 1)), (lambda t: 0.05 / np.sqrt(t + 1))
        eta_g = eta
        options = {"threshold": lambda t: 0.1 * inverse_root(t)}
    elif kind == "polyak":
        eta_g, options = None, options | {"constraint_optimizer": "polyak"}
    elif kind == "two":
        eta_g, options = (lambda t: 0.02), options | {"constraint_optimizer": sgd(model, 0.02)}
    path, branch, sizes = reference.ssg(PROGRAM, START, samples, eps, eta, eta_g)
    assert 20 < sum(b is None for b in branch) < 130
    objective = ssg(model, sgd(model), 3, **options)
    mine = follow(objective, model, samples, kind == "decreasing")
    np.testing.assert_allclose(mine, path, atol=1e-13)
    total = sum(s for s, b in zip(sizes, branch, strict=True) if b is None)
    for i, multiplier in enumerate(objective.multipliers().tolist()):
        mine = sum(s for s, b in zip(sizes, branch, strict=True) if b == i)
        assert multiplier == pytest.approx(mine / total, rel=1e-12)
    last = [PROGRAM.constraint(i, path[-2], samples[-1][0]) for i in range(3)]
    np.testing.assert_allclose(objective.violation(), last, atol=1e-13)


def test_the_output_is_the_average_of_feasible_iterates():
    path, branch, sizes = reference.ssg(
        PROGRAM, START, ONE, lambda t: 0.05, lambda t: 0.05 / np.sqrt(t + 1), None
    )
    model = Point(START)
    objective = ssg(model, sgd(model), 3, threshold=0.05, constraint_optimizer="polyak")
    eta = lambda: objective.optimizer.param_groups[0]["lr"]  # noqa: E731
    feasible = lambda: objective.term.feasible * eta()  # noqa: E731
    output = OutputIterate(objective.optimizer, "average", weight=feasible)
    follow(objective, model, ONE, decreasing=True)
    before = np.concatenate([START[None], path[:-1]])  # w_t, of which t in I is decided
    kept = [t for t in range(150) if branch[t] is None]
    expected = np.average(before[kept], axis=0, weights=[sizes[t] for t in kept])
    with output.applied():
        np.testing.assert_allclose(model.w.detach(), expected, atol=1e-13)
    total = sum(sizes[t] for t in kept)
    mine = [sum(sizes[t] for t in range(150) if branch[t] == i) for i in range(3)]
    np.testing.assert_allclose(objective.multipliers(), np.array(mine) / total, rtol=1e-12)


def test_a_polyak_step_without_gradient_stays():
    model = Point(START)
    objective = ssg(model, sgd(model), 1, threshold=0.0, constraint_optimizer="polyak")
    take_step(objective, lambda: (model.w.sum(), 0 * model.w[:1] + 1.0))
    assert model.w.tolist() == list(START) and objective.term.constraint_steps.tolist() == [0.0]


# Invariants.


class Counted(torch.autograd.Function):
    """Counts how often it is differentiated."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Counted.calls += 1
        return gradients[0]


@pytest.mark.parametrize("independent", [False, True])
def test_the_objective_is_never_differentiated_when_infeasible(independent):
    Counted.calls = 0
    model = Point([1.0, 0.0])
    objective = ssg(model, sgd(model, 0.1), 2, threshold=0.0)

    def inner():
        return Counted.apply(model.w.sum()), model.w

    feasible = 0
    for _ in range(30):
        take_step(objective, inner, **({"gradient": inner} if independent else {}))
        feasible += objective.term.feasible
        assert Counted.calls == feasible
    assert 0 < feasible < 30


def test_tolerance_margin_and_names():
    model = Point([0.5, 0.1])
    options: dict[str, Any] = {"tolerance": [0.45, 0.0], "margin": 0.02, "threshold": 0.06}
    objective = ssg(model, sgd(model, 0.1), ["a", "b"], **options)
    loss = lambda: (0 * model.w.sum(), {"b": model.w[1], "a": model.w[0]})  # noqa: E731
    assert take_step(objective, loss) == pytest.approx(0.12)  # b, with its margin
    assert objective.violation() == pytest.approx({"a": 0.05, "b": 0.1})
    np.testing.assert_allclose(model.w.detach(), [0.5, 0.0], atol=1e-15)
    assert take_step(objective, loss) == pytest.approx(0.07)  # a
    np.testing.assert_allclose(model.w.detach(), [0.4, 0.0], atol=1e-15)
    assert take_step(objective, loss) == 0.0 and objective.term.feasible
    assert objective.multipliers() == pytest.approx({"a": 1.0, "b": 1.0})
    assert objective.term.value().item() == pytest.approx(0.02)  # b of the last batch


def test_batches_of_one_step_follow_the_first():
    model = Point([0.0])
    objective = ssg(model, sgd(model, 1.0), 1, threshold=0.0)
    for shift in (-1.0, 5.0):  # feasible, then not
        objective(lambda shift=shift: (3 * model.w.sum(), model.w + shift)).backward()
    assert model.w.grad is not None and model.w.grad.item() == 6.0
    objective.optimizer.step()  # type: ignore[union-attr]
    assert objective.term.tracker.steps == 1
    objective(lambda: (3 * model.w.sum(), model.w + 7.0))
    assert not objective.term.feasible, "the next step decides anew"


def test_a_step_without_a_call_is_refused():
    model = Point([1.0])
    objective = ssg(model, sgd(model), 1, threshold=0.0)
    inner = lambda: (3 * model.w.sum(), model.w - 2)  # noqa: E731
    take_step(objective, inner)
    objective.eval()(inner)
    with pytest.raises(RuntimeError, match="does not know which branch"):
        objective.optimizer.step()  # type: ignore[union-attr]


def test_a_closure_decides_inside_the_step():
    paths = []
    for with_closure in (False, True):
        model = Point(START)
        objective: Any = ssg(model, sgd(model), 3, threshold=0.05)
        for k in range(60):

            def closure(model=model, objective=objective, k=k):
                objective.optimizer.zero_grad()
                loss = objective(lambda: noisy(model.w, k))
                loss.backward()
                return loss

            if with_closure:
                objective.optimizer.step(closure)
            else:
                closure()
                objective.optimizer.step()
        paths.append(model.w.detach().clone())
    assert torch.equal(*paths)


# Refusals.


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.Adam(p),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
])  # fmt: skip
def test_one_optimizer_that_keeps_state_is_refused(make):
    model = Point(START)
    optimizer = make(list(model.parameters()))
    with pytest.raises(ValueError, match=f"is needed: what {type(optimizer).__name__} keeps"):
        ssg(model, optimizer, 3, threshold=0.0)
    model.w.grad = torch.ones_like(model.w)
    optimizer.step()  # and is not held by what was refused


def test_a_threshold_schedule_that_falls_below_zero_is_refused():
    model = Point(START)
    objective = ssg(model, sgd(model), 3, threshold=lambda t: 0.5 - t)
    take_step(objective, lambda: noisy(model.w, 0))
    with pytest.raises(ValueError, match="must be at least 0"):
        objective(lambda: noisy(model.w, 1))
