"""Every method that a fleet knows does in it what it does alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fleet_cases import CASES, STEPS, Case, every, network, sgd
from torch import nn

import fcco
from fcco.optim import PolyakStep
from fcco.fleet import Fleet, Member, Unsupported, groups
from fcco.methods import recursive_penalty
from fcco.methods import ssg
from fcco.optim import project_after_step
from fcco.terms.group_weights import GroupWeights

LONG = [name for name, case in CASES.items() if case.steps == STEPS]
"""Variants of a method are trained for fewer steps, and not traced: that takes the time."""


def agree(case: Case, fleet, steps: int) -> None:
    rows = case.alone[steps]
    assert (fleet.died == -1).all()
    for name in rows[0]:
        mine = fleet.state.get(name)
        if name == "between":
            mine = torch.cat([each.flatten(1) for each in fleet.weights().values()], 1)
        alone = torch.stack([row[name] for row in rows])
        torch.testing.assert_close(mine, alone, rtol=1e-10, atol=1e-10)
    first, *others = (row["weights"] for row in rows)
    assert all((first - other).abs().max() > 0.01 for other in others)


def walk(case: Case, mode: str, steps: int):
    fleet = case.fleet(mode)
    for step in range(steps):
        case.step_fleet(fleet, step)
    assert fleet.mode == mode
    return fleet


@pytest.mark.parametrize("name", LONG)
def test_a_member_equals_the_run_alone(name):
    case = CASES[name]
    agree(case, walk(case, "traced", STEPS), STEPS)


@pytest.mark.parametrize("name", CASES)
def test_without_a_trace_too(name):
    case = CASES[name]
    steps = min(case.alone)
    agree(case, walk(case, "eager", steps), steps)


def test_both_branches_are_taken():
    """Else the tests of SSG would say nothing of one of them."""
    for name in ("ssg", "ssg-two", "ssg-polyak", "ssg-scheduled", "ssg-momentum"):
        fleet, taken = CASES[name].fleet("eager"), []
        for step in range(25):
            CASES[name].step_fleet(fleet, step)
            taken.append(fleet.state["feasible"].clone())
        share = torch.stack(taken).double().mean(0)
        assert ((share > 0.1) & (share < 0.9)).any(), share


# What a fleet refuses.


def refused(match: str, optimizer: Any, objective: Any = None, model: Any = None) -> None:
    with pytest.raises(Unsupported, match=match):
        groups([Member(model or network(0), optimizer, objective)])


def test_optimizers_without_a_rule_are_refused():
    model = network(0)
    weights = list(model.parameters())
    refused("no rule for the optimizer RMSprop", torch.optim.RMSprop(weights))
    refused("no rule for the optimizer PolyakStep", PolyakStep(weights))
    for options in ({"maximize": True}, {"momentum": 0.9, "nesterov": True}):
        refused(next(reversed(options)), torch.optim.SGD(weights, 0.1, **options))
    refused("amsgrad", torch.optim.Adam(weights, amsgrad=True))
    refused("one group", torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:]}], 0.1))
    nested = fcco.ProximalPoint(sgd(model, 0.1), 1.0, 0.1, 2)
    refused("ProximalPoint here", fcco.ProximalPoint(nested, 1.0, 0.1, 2))


def test_what_acts_at_each_step_unseen_is_refused():
    model = network(0)
    optimizer = sgd(model, 0.1)
    handle = project_after_step(optimizer, lambda: None)
    refused("fcco.projected", optimizer)
    handle.remove()
    optimizer.register_step_pre_hook(lambda *_: None)
    refused("cannot follow", optimizer)
    optimizer = sgd(model, 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    refused("scheduler", optimizer)
    objective = ssg(
        model, sgd(model, 0.1), 4, threshold=0.1, constraint_optimizer="polyak",
        project=lambda: None,
    )  # fmt: skip
    refused("fcco.projected", objective.optimizer, objective)


@pytest.mark.parametrize("name", ["adam", "sonex-momentum", "icppac", "alexr2-dual"])
def test_runs_that_have_begun_are_refused(name):
    member = CASES[name].member(0)
    CASES[name].step_alone(member, 0, 0)
    refused("first step|within", member.optimizer, member.objective, member.model)
    if name == "icppac":  # the state of the round is the optimizer's
        refused("within", member.optimizer, None, member.model)


def test_a_method_in_two_parts_must_be_whole():
    for name in ("icppac", "ssg"):
        member = CASES[name].member(0)
        optimizer: Any = member.optimizer
        refused("objective.optimizer", optimizer, None, member.model)
        refused("make one method", optimizer.inner[0], member.objective, member.model)


def test_terms_without_a_rule_are_refused():
    model = network(0)
    optimizer = sgd(model, 0.1)
    refused("cannot read", optimizer, nn.Linear(1, 1))
    refused("CVaRTerm", optimizer, fcco.CVaRGroupDRO(model, optimizer, 4, 0.5))
    hinge: dict[str, Any] = {"outer": fcco.Hinge(), "num_inner": 4}
    skip = fcco.sonx(model, optimizer, **hinge, on_nonfinite="skip")
    refused("skip", optimizer, skip)
    refreshed = recursive_penalty(model, optimizer, 4, penalty=1.0, smoothing=0.1, refresh_every=5)
    refused("refresh_every", optimizer, refreshed)
    one = fcco.CoupledTerm(fcco.Hinge(), fcco.ema_tracker(4))
    both = fcco.Compositional(model, optimizer, {"a": one, "b": one})
    refused("one coupled term", optimizer, both)
    for options in ({"gamma": 0.5}, {"gamma": 1.0, "on_nonfinite": "skip"}):
        weights = GroupWeights(fcco.ema_tracker(4, read="new", **options), 0.1, 0.5)
        refused("A fleet has", optimizer, fcco.Compositional(model, optimizer, weights))


def test_numbers_that_a_fleet_cannot_see_are_refused():
    model = network(0)
    optimizer = sgd(model, 0.1)

    class Own(fcco.outer.SquaredHinge):
        """No dataclass of its own would be seen; this one hides a tensor."""

    @dataclasses.dataclass(frozen=True)
    class Held(fcco.outer.SquaredHinge):
        table: Any = dataclasses.field(default_factory=lambda: torch.ones(2))

    refused("Held.table", optimizer, fcco.sox(model, optimizer, Held(), 4))
    plain = fcco.sox(model, optimizer, Own(), 4)
    assert list(groups([Member(model, optimizer, plain)]).values()) == [[0]]


def test_runs_of_several_kinds_are_sorted_and_not_mixed():
    members = [CASES[name].member(run) for run in (0, 1) for name in ("ssg", "oss", "ssg-polyak")]
    assert list(groups(members).values()) == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(Unsupported, match="one kind"):
        Fleet(members, CASES["ssg"].inner)


def test_values_that_a_lagrangian_cannot_use_are_refused():
    def measured(model, batch):
        loss, values = every(model, batch)
        return loss, fcco.Measured((values > 0).double(), values)

    case = dataclasses.replace(CASES["icppac-adam"], inner=measured)
    with pytest.raises(Unsupported, match="Measured"):
        case.step_fleet(case.fleet("eager"), 0)
    case = dataclasses.replace(CASES["icppac-growing"], independent=True)
    with pytest.raises(Unsupported, match="exact values"):
        case.step_fleet(case.fleet("eager"), 0)
