"""A coupled objective beside constraints: two tables of u in one step, one report."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from problems import Point, TorchQuadratics, entries, take_step

import fcco

OBJECTIVE = ref.Quadratics(num_inner=8, dim=2, seed=5)
CONSTRAINTS = ref.Quadratics(num_inner=5, seed=2)
DATA, LIMITED = TorchQuadratics(OBJECTIVE), TorchQuadratics(CONSTRAINTS)
START = np.linspace(0.5, 1.5, 4)
LIMIT = np.array([0.1, -0.2, 0.0, 0.3, 0.2])
NAMES = ["a", "b", "c", "d", "e"]
M = len(LIMIT)
NOT_FOR = {  # what the methods need that refuse a coupled objective
    "alexr": {"penalty": 1.0, "dual_step": 0.1},
    "recursive-hinge": {"penalty": 1.0, "smoothing": 0.1, "refresh_every": 3},
    "ssg": {"threshold": 0.1},
    "oss": {"proximal": 1.0, "inner_steps": 5},
    "icppac": {"proximal": 1.0, "inner_steps": 5},
}


def term(**changed: Any) -> fcco.terms.CoupledTerm:
    """The objective's own: another outer function, gamma_1, gamma_1' and precision."""
    options: dict[str, Any] = {"dim": 2, "gamma": 0.6, "correction": 0.2, "dtype": torch.float64}
    tracker = fcco.tracker.InnerTracker(8, **options | changed)
    return fcco.terms.CoupledTerm(fcco.outer.TwoSidedHinge(0.1, 0.8), tracker, smoothing=0.3)


# The literal loops: nothing is shared between the two tables but w and the step.


@dataclass
class Table:
    problem: ref.Quadratics
    slope: ref.Slope
    gamma: float
    correction: float
    read: str = "old"
    limit: np.ndarray = field(default_factory=lambda: np.zeros(100))

    def __post_init__(self) -> None:
        self.u = np.zeros((self.problem.num_inner, self.problem.dim))
        self.seen = np.zeros(self.problem.num_inner, dtype=bool)

    def gradient(self, w: np.ndarray, before: np.ndarray, sampled: list[tuple]) -> np.ndarray:
        total, after = np.zeros_like(w), self.u.copy()
        for i, batch, _ in sampled:
            g, g_before = (self.problem.value(x, i, batch) for x in (w, before))
            after[i] = (1 - self.gamma) * self.u[i] + self.gamma * g
            after[i] += self.correction * (g - g_before)
            if not self.seen[i]:
                self.u[i] = after[i] = g
                self.seen[i] = True
            u = self.u[i] if self.read == "old" else after[i]
            total += self.problem.jacobian(w, i, batch).T @ self.slope(u - self.limit[i])
        self.u = after
        return total / len(sampled)


def own_table() -> Table:
    return Table(OBJECTIVE, ref.two_sided_slope(0.8, 0.1, 0.3), 0.6, 0.2)


def drawn(rng: np.random.Generator) -> tuple[list[tuple], list[tuple]]:
    return OBJECTIVE.draw(rng, 4, 2), CONSTRAINTS.draw(rng, 3, 2)


def single_loop(limits: Table, update: Any, steps: int, g0: bool) -> tuple[np.ndarray, Table]:
    rng, own = np.random.default_rng(7), own_table()
    w, before, path = START, START, []
    for _ in range(steps):
        first, second = drawn(rng)
        G = own.gradient(w, before, first) + limits.gradient(w, before, second)
        G = G + (w - OBJECTIVE.m) if g0 else G
        before, w = w, update(w, G)
        path.append(w)
    return np.array(path), own


def batch(model: Point, sampled: tuple[list[tuple], list[tuple]], g0: bool = False) -> Any:
    """The closure and the index of one step: a dict of each."""
    (first, at), (second, where) = (entries(part, 1) for part in sampled)

    def inner() -> Any:
        values = {
            "objective": DATA.values(model.w, first, at),
            "constraints": LIMITED.values(model.w, second, where),
        }
        return (DATA.loss(model.w), values) if g0 else values

    return inner, {"objective": first, "constraints": second}


def follow(objective: Any, model: Point, steps: int, g0: bool = False) -> np.ndarray:
    rng, path = np.random.default_rng(7), []
    for _ in range(steps):
        take_step(objective, *batch(model, drawn(rng), g0))
        path.append(model.w.detach().numpy().copy())
    return np.array(path)


def assert_same(objective: Any, ours: np.ndarray, path: np.ndarray, own: Table, limits: Table):
    np.testing.assert_allclose(ours, path, rtol=0, atol=1e-12)
    tables = {name: each.tracker.value for name, each in objective.terms.items()}
    np.testing.assert_allclose(tables["objective"], own.u, rtol=0, atol=1e-12)
    np.testing.assert_allclose(tables["constraints"], limits.u, rtol=0, atol=1e-12)
    np.testing.assert_allclose(objective.violation(), limits.u[:, 0] - LIMIT, atol=1e-12)
    slopes = [limits.slope(u - limit).item() for u, limit in zip(limits.u, LIMIT, strict=True)]
    assert max(slopes) > 0, "some constraint must act"
    np.testing.assert_allclose(objective.multipliers(), np.array(slopes) / M, atol=1e-12)


SINGLE: dict[str, tuple[dict[str, Any], Callable[[], Table], Any]] = {
    "sonex": (
        {"penalty": 1.5, "smoothing": 0.4, "gamma": 0.3, "correction": 0.4},
        lambda: Table(CONSTRAINTS, ref.hinge_slope(1.5, 0.4), 0.3, 0.4, limit=LIMIT),
        lambda: ref.Momentum(0.02, 0.2),
    ),
    "sonex-adam": (
        {"penalty": 1.5, "smoothing": 0.4, "gamma": 0.3, "correction": 0.4, "read": "new"},
        lambda: Table(CONSTRAINTS, ref.hinge_slope(1.5, 0.4), 0.3, 0.4, "new", limit=LIMIT),
        lambda: ref.Adam(0.005, 0.2, 0.01),
    ),
}


def made(case: str, model: Point, own: fcco.terms.CoupledTerm | None = None, **more: Any) -> Any:
    method, adam = case.removesuffix("-adam"), case.endswith("-adam")
    if method == "alexr2":
        more |= {"penalty": 1.5, "smoothing": 0.4, "nu": 0.3, "eta": 0.1, "theta": 0.6}
        optimizer: Any = fcco.optim.momentum_type(model.parameters(), lr=0.05, beta=0.2)
    else:
        settings, _, update = SINGLE[case]
        more |= settings
        rule = update()
        make: Any = fcco.optim.adam_type if adam else fcco.optim.momentum_type
        second = {"beta2": rule.beta2} if adam else {}
        optimizer = make(model.parameters(), lr=rule.lr, beta=rule.beta, **second)
    names = more.pop("names", M)
    return fcco.constrained(
        model, optimizer, names, method, objective=own or term(), tolerance=LIMIT.tolist(), **more
    )


@pytest.mark.parametrize("case, g0", [("sonex", True), ("sonex-adam", False)])
def test_equals_the_transcription_with_two_tables(case, g0):
    model = Point(START)
    objective = made(case, model)
    _, limits, update = SINGLE[case]
    table = limits()
    path, own = single_loop(table, update(), 80, g0)
    assert_same(objective, follow(objective, model, 80, g0), path, own, table)


def test_alexr2_keeps_the_tracker_of_the_objective():
    """Both tables inside one proximal point: extrapolated constraints, the objective as given."""
    model, dual_step, theta, nu, eta = Point(START), 0.5, 0.6, 0.3, 0.1
    gamma = dual_step / (1 + dual_step)
    objective = made("alexr2", model, gamma=gamma, inner_steps=5)
    slope = ref.hinge_slope(1.5, 0.4)
    limits, own = Table(CONSTRAINTS, slope, gamma, theta * gamma, "new", limit=LIMIT), own_table()
    rng, update, w, path = np.random.default_rng(7), ref.Momentum(0.05, 0.2), START, []
    for _ in range(16):
        z = before = w
        for _ in range(5):
            first, second = drawn(rng)
            G = own.gradient(z, before, first) + limits.gradient(z, before, second)
            before, z = z, (nu * z + eta * w - eta * nu * G) / (eta + nu)
        w = update(w, (w - z) / nu)
        path.append(w)
    ours = follow(objective, model, 80)[4::5]
    assert_same(objective, ours, np.array(path), own, limits)


def test_all_constraints_by_name_and_a_part_of_the_objective():
    model = Point(START)
    objective = made("sonex", model, names=NAMES)
    take = lambda i: LIMITED.values(model.w, torch.tensor([i]), torch.tensor([0])).view(())  # noqa: E731
    blocks = torch.tensor([6, 1])

    def inner() -> Any:
        named = {name: take(i) for i, name in enumerate(NAMES)}
        return {"objective": DATA.values(model.w, blocks, 0 * blocks), "constraints": named}

    w = START
    take_step(objective, inner, {"objective": blocks})
    g = [CONSTRAINTS.value(w, i, np.array([0])).item() for i in range(M)]
    expected = {name: g[i] - LIMIT[i] for i, name in enumerate(NAMES)}
    assert objective.violation() == pytest.approx(expected)
    worst = max(expected, key=lambda name: expected[name])
    report = objective.report()
    assert report.violation == pytest.approx(expected[worst])
    violated = sum(v > 0 for v in expected.values())
    assert (report.worst, report.violated, report.seen) == (worst, violated, M)
    assert report.multiplier == pytest.approx(max(objective.multipliers().values()))
    exact = dict(zip(NAMES, torch.tensor(LIMIT + 0.5 * np.eye(M)[2]), strict=True))
    measured = objective.report(exact)
    assert (measured.worst, measured.violated, measured.seen) == ("c", 1, M)
    assert measured.violation == pytest.approx(0.5)
    seen = objective.terms["objective"].tracker.seen
    assert seen.nonzero().flatten().tolist() == [1, 6]
    assert objective.term is objective.terms["constraints"]
    parts = [each.value() for each in objective.terms.values()]
    torch.testing.assert_close(objective.value(), parts[0] + parts[1])


@pytest.mark.parametrize("method", NOT_FOR)
def test_other_methods_refuse_it_with_the_reason(method):
    model = Point(START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = f"method='{method}')` takes no `objective`, a coupled term"
    with pytest.raises(ValueError, match=re.escape(message)):
        fcco.constrained(model, optimizer, M, method, objective=term(), **NOT_FOR[method])
    fcco.constrained(model, optimizer, M, method, **NOT_FOR[method])


def test_what_is_not_a_term_and_an_index_without_a_name_are_refused():
    model = Point(START)
    with pytest.raises(TypeError, match=r"`objective=` is a coupled term .* but is: Hinge"):
        made("sonex", model, own=fcco.outer.Hinge())  # type: ignore[arg-type]
    objective = made("sonex", model)
    inner, index = batch(model, drawn(np.random.default_rng(1)))
    with pytest.raises(ValueError, match="`index` must be a dict"):
        objective(inner, index["constraints"])
    with pytest.raises(ValueError, match="terms objective, constraints needs inner values by term"):
        objective(lambda: inner()["constraints"], {"constraints": index["constraints"]})
    assert not any(each.tracker.seen.any() for each in objective.terms.values())


def test_a_term_may_drop_bad_entries_beside_one_that_refuses_them():
    """Its stand-ins too; a bad g0 is refused all the same."""
    model = Point(START)
    objective = made("sonex", model, own=term(on_nonfinite="skip"))
    follow(objective, model, 3, g0=True)
    inner, index = batch(model, drawn(np.random.default_rng(1)), g0=True)
    factor = torch.ones(len(index["objective"]), 1, dtype=torch.float64)
    factor[0] = torch.nan

    def spoiled(g0: float = 1.0) -> Any:
        loss, values = inner()
        bad = values["objective"] * factor
        return loss * g0, values | {"objective": fcco.Measured(bad.detach(), bad)}

    before = {name: buffer.clone() for name, buffer in objective.named_buffers()}
    with pytest.raises(fcco.NonFiniteValue, match=r"g0 .* NaN or infinite; nothing was updated"):
        objective(lambda: spoiled(torch.nan), index)
    for name, buffer in objective.named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0, msg=name)
    assert torch.isfinite(objective(spoiled, index))
    objective.close()
    assert objective.terms["objective"].tracker.skipped == 1
