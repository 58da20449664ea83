"""The front door for constrained problems: one loop for every method, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from problems import Point, take_step

import fcco
from fcco.constraints import ConstrainedObjective, ConstraintReport
from fcco.methods import ROWS, Sonex, constrained
from fcco.methods.registry import ALIASES as WORDS

A, B, M = 1.0, 0.3, 3  # min |w - a|^2 / 2 with w <= b: every multiplier is 0.7
PENALTY: dict[str, Any] = {"penalty": 6.0, "smoothing": 0.004}

CASES: dict[str, dict[str, Any]] = {  # what each method needs
    "multipliers": {},
    "sonex": PENALTY,
    "alexr2": PENALTY | {"nu": 0.5, "eta": 0.02, "gamma": 0.2},
    "alexr": {"penalty": 6.0, "dual_step": 0.1},
    "hinge": {"penalty": 6.0, "gamma": 0.05},
    "squared-hinge": {"penalty": 60.0},
    "recursive-hinge": PENALTY | {"refresh_every": 10},
    "ssg": {"threshold": 0.02},
    "oss": {"proximal": 1.0, "inner_steps": 5},
    "icppac": {"proximal": 0.5, "inner_steps": 5},
}
SAMPLED = {"multipliers", "sonex", "alexr2", "alexr", "hinge", "squared-hinge"}
ALIASES = {
    "smoothed-hinge": "sonex",
    "proximal-hinge": "alexr2",
    "dual": "alexr",
    "sonx": "hinge",
    "yang2025": "hinge",
    "sox": "squared-hinge",
    "li2024": "squared-hinge",
    "liu2025": "recursive-hinge",
    "switching": "ssg",
    "queues": "oss",
    "conex": "icppac",
}


def objective_of(method: str, model: Any = None, constraints: Any = M, **more: Any) -> Any:
    model = model or Point(np.zeros(M))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return constrained(model, optimizer, constraints, method, **CASES[method] | more)


# Every method in the same loop.


def test_every_method_has_a_case():
    rows = [row for row in ROWS if "limits" in row.use]
    assert {row.name for row in rows} == set(CASES) and WORDS == ALIASES
    assert {row.name for row in rows if row.settings.sampled} == SAMPLED
    assert {row.name for row in rows if not row.needs} == {"multipliers", "ssg"}


@pytest.mark.parametrize("alias, name", ALIASES.items())
def test_an_alias_builds_the_same_method(alias, name):
    model = Point(np.zeros(M))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    objective = constrained(model, optimizer, M, alias, tolerance=0.1, **CASES[name])
    expected = objective_of(name, tolerance=0.1)
    assert objective.method == expected.method == name and str(objective) == str(expected)
    with pytest.raises(ValueError, match=re.escape(f"`constrained(method={alias!r})`")):
        constrained(model, optimizer, M, alias, speed=9, **CASES[name])


@pytest.mark.parametrize("method", CASES)
def test_every_method_offers_the_same(method):
    model = Point([0.5, -1.0, 2.0])
    objective = objective_of(method, model, ["low", "mid", "high"], tolerance=[0.3, 0.1, 0.2])
    assert isinstance(objective, ConstrainedObjective)
    assert objective.method == method
    assert objective.term.tracker.sampled == (method in SAMPLED)
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
    assert summary(report)[:4] == (pytest.approx(1.8), "high", 2, 3)
    full = dict(zip(["high", "low", "mid"], torch.tensor([0.1, 0.2, 0.6]), strict=True))
    assert summary(objective.report(full))[:4] == (pytest.approx(0.5), "mid", 1, 3)


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
        before = str(objective.state_dict())
        with pytest.raises(ValueError, match="all 3 blocks"):
            objective(part, torch.tensor([0, 1]))
        assert str(objective.state_dict()) == before


# What it refuses.


@pytest.mark.parametrize("method, settings, message", [
    ("sonexx", {}, "(did you mean `sonex`?)"),
    ("sonex", {}, "needs `smoothing` and `penalty`"),
    ("sonex", {"outer": fcco.outer.Hinge(2.0)}, "needs `smoothing`"),
    ("multipliers", {"penalty": 2.0}, "`penalty` (a setting of sonex, alexr2, sonx"),
    (Sonex(smoothing=0.1), {}, "unless `outer` is given"),
    (Sonex(smoothing=0.1, penalty=1.0), {"gamma": 0.1}, "leave `gamma`"),
    (fcco.methods.Ooa(), {}, "no method for limits"),
    ("ssg", {"threshold": "wide"}, "'auto'"),
    ("sonex", PENALTY | {"speed": 9}, "`speed` (unknown)"),
    ("sonex", PENALTY | {"limits": 0}, "at least 1"),
    ("sonex", PENALTY | {"smoothing": None}, "must be a number"),
    ("alexr", CASES["alexr"] | {"limits": "gap"}, "a dict of limits"),
    ("sonex", PENALTY | {"limits": 0.5}, "a dict of limits"),
    ("sonex", PENALTY | {"limits": [0.5, 0.5, 0.5]}, "a dict of limits"),
    ("sonex", PENALTY | {"outer": fcco.outer.Hinge()}, "has its own weight"),
    ("sonex", {"outer": fcco.outer.CVaR(0.5), "smoothing": 0.1}, "dim=...)` is needed"),
    ("sonex", PENALTY | {"tolerance": fcco.Equal(0.0), "margin": 0.1}, "margin"),
    ("sonex", {"outer": fcco.outer.Absolute(), "smoothing": 0.1, "margin": 0.1}, "made stricter"),
    ("sonex", {"outer": fcco.outer.TwoSidedHinge(0.1), "smoothing": 0.1, "tolerance": 0.1},
     "does not loosen"),
    ("sonex", PENALTY | {"tolerance": [0.1, 0.2]}, "one number or 3"),
    ("sonex", PENALTY | {"limits": ["a", "a"]}, "different names"),
    ("squared-hinge", {"penalty": 1.0, "gamma": 0.0}, "never moves"),
    ("recursive-hinge", CASES["recursive-hinge"] | {"smoothing": -0.1}, "smoothing"),
    ("recursive-hinge", CASES["recursive-hinge"] | {"refresh_every": 0}, "refresh_every"),
    ("recursive-hinge", CASES["recursive-hinge"] | {"on_nonfinite": "skip"}, "leave a block out"),
    ("alexr", {"penalty": 1.0, "dual_step": 0.0}, "alexr(dual_step"),
    ("alexr", CASES["alexr"] | {"theta": -0.5}, "alexr(theta"),
    ("ssg", {"threshold": -0.1}, "ssg(threshold"),
    ("ssg", {"constraint_optimizer": "adam"}, "'polyak'"),
    ("oss", CASES["oss"] | {"proximal": 0.0}, "oss(proximal"),
    ("oss", CASES["oss"] | {"inner_steps": 0}, "inner_steps"),
    ("icppac", CASES["icppac"] | {"tau": 0.0}, "icppac(tau"),
])  # fmt: skip
def test_wrong_words_and_settings(method, settings, message):
    model = Point(np.zeros(M))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        constrained(model, optimizer, method=method, **{"limits": M} | settings)
    optimizer.step()  # and is not held by what was refused


def test_a_number_of_constraints_may_come_from_numpy():
    number = np.arange(M).size + np.int64(0)
    assert objective_of("sonex", constraints=number).term.tracker.num_inner == M


# The doors of SONEX take the same settings.

DOORS: dict[str, Callable[..., fcco.Compositional]] = {
    "sonex": lambda m, o, **more: fcco.methods.sonex(m, o, fcco.outer.Hinge(6.0), M, **more),
    "CVaRGroupDRO": lambda m, o, **more: fcco.CVaRGroupDRO(m, o, M, ratio=0.5, **more),
    "constrained": lambda m, o, **more: constrained(m, o, M, "sonex", penalty=6.0, **more),
}
SHARED: dict[str, tuple[Any, Callable[[Any], Any]]] = {  # a value, and where it must be found
    "gamma": (0.37, lambda o: o.term.tracker.gamma),
    "correction": (0.21, lambda o: o.term.tracker.rule.correction),
    "read": ("new", lambda o: o.term.tracker.read),
    "smoothing": (0.23, lambda o: o.term.smoothing),
    "on_nonfinite": ("skip", lambda o: o.term.tracker.on_nonfinite),
    "dtype": (torch.float64, lambda o: o.term.tracker.value.dtype),
    "offload": (True, lambda o: o.previous.offload),
    "process_group": (None, lambda o: o.group),
}


def opened(door: str, **settings: Any) -> fcco.Compositional:
    model = torch.nn.Linear(M, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paper = {"smoothing": 0.1, "gamma": 0.1, "correction": "auto", "read": "old"}
    return DOORS[door](model, optimizer, **paper | settings)


@pytest.mark.parametrize("door", DOORS)
def test_the_doors_of_sonex_take_the_same_settings(door):
    for name, (value, place) in SHARED.items():
        changed = place(opened(door, **{name: value}))
        assert changed == value, name
        assert name == "process_group" or place(opened(door)) != value, "not the default"
        assert place(opened(door)) == place(opened("sonex")), "the doors mean the same"


# Reports.


def summary(report: ConstraintReport) -> tuple[Any, ...]:
    return report.violation, report.worst, report.violated, report.seen, report.multiplier


def test_report_of_tracked_and_of_given_values():
    model = Point([0.5, -1.0, 2.0])
    objective = constrained(
        model, torch.optim.SGD(model.parameters(), lr=0.1), 3, "sonex", penalty=6.0, smoothing=0.1,
        tolerance=0.2, margin=0.05, gamma=1.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="needs values"):
        objective.report()
    take_step(objective, lambda: (0 * model.w.sum(), model.w))
    report = objective.report()
    assert isinstance(report, ConstraintReport)
    assert summary(report) == (pytest.approx(1.8), 2, 2, 3, pytest.approx(2.0))
    given = objective.report(torch.tensor([0.19, 0.1, 0.25]))
    assert summary(given) == (pytest.approx(0.05), 2, 1, 3, pytest.approx(0.1 / 0.1 / 3))
    tracked = objective.term.tracker.value.squeeze(1)
    assert summary(objective.report(tracked)) == pytest.approx(summary(report))
    for wrong in (torch.zeros(2), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="must hold all 3 constraints"):
            objective.report(wrong)
