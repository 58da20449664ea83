"""Every method that a fleet knows does in it what it does alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from fleet_cases import (
    CASES,
    every,
    network,
    sgd,
)
from torch import nn

import fcco
from fcco import xrisk
from fcco.fleet import Fleet, Member, Unsupported, group_members
from fcco.methods.settings import Problem
from fcco.rules.cvar import threshold

TRACED = ("adam", "sonex-adam", "ssg")
ALL_TRACED = ("alexr2-momentum", "icppac", "ooa-euclidean", "cvar-alexr2", "cvar-automatic")
"""One of each kind is traced too; tracing takes the time."""


@pytest.mark.parametrize("name, mode", [
    *((name, "eager") for name in CASES), *((name, "traced") for name in TRACED),
    *(pytest.param(name, "traced", marks=pytest.mark.slow) for name in ALL_TRACED),
])  # fmt: skip
def test_a_member_equals_the_run_alone(name, mode):
    case = CASES[name]
    fleet, singles = case.fleet(mode), case.alone()
    for step in range(case.steps):
        case.step_fleet(fleet, step)
    rows = [case.held(member) for member in singles]
    assert fleet.mode == mode and (fleet.died == -1).all()
    for key in rows[0]:
        mine = fleet.state.get(key)
        if key == "between":
            mine = torch.cat([each.flatten(1) for each in fleet.weights().values()], 1)
        alone = torch.stack([row[key] for row in rows])
        torch.testing.assert_close(mine, alone, rtol=1e-10, atol=1e-10)
    first, *others = (row["weights"] for row in rows)
    assert all((first - other).abs().max() > 0.01 for other in others)
    if name.startswith("ssg"):  # both branches are taken
        taken = [member.objective.term for member in singles]
        assert any(term.objective_steps and term.constraint_steps.any() for term in taken)


# What a fleet refuses.


def refused(match: str, optimizer: Any, objective: Any = None, model: Any = None) -> None:
    with pytest.raises(Unsupported, match=match):
        group_members([Member(model or network(0), optimizer, objective)])


def test_optimizers_without_a_rule_are_refused():
    model = network(0)
    weights = list(model.parameters())
    refused("no rule for the optimizer RMSprop", torch.optim.RMSprop(weights))
    objective = fcco.constrained(model, sgd(model, 0.1), 4, "ssg", constraint_optimizer="polyak")
    refused("SSG with an optimizer of its own", objective.optimizer, objective)
    for options in ({"maximize": True}, {"momentum": 0.9, "nesterov": True}):
        refused(next(reversed(options)), torch.optim.SGD(weights, 0.1, **options))
    refused("amsgrad", torch.optim.Adam(weights, amsgrad=True))
    refused("one group", torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:]}], 0.1))
    nested = fcco.optim.ProximalPoint(sgd(model, 0.1), 1.0, 0.1, 2)
    refused("ProximalPoint here", fcco.optim.ProximalPoint(nested, 1.0, 0.1, 2))


def test_what_acts_at_each_step_unseen_is_refused():
    model = network(0)
    optimizer = sgd(model, 0.1)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    refused("lambda", optimizer)
    handle.remove()
    assert group_members([Member(model, optimizer)])
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    refused("scheduler", optimizer)
    objective = fcco.constrained(model, sgd(model, 0.1), 4, "ssg", threshold=0.1)
    objective.optimizer.register_step_post_hook(lambda *_: None)  # type: ignore[union-attr]
    refused("lambda", objective.optimizer, objective)


@pytest.mark.parametrize("name", ["sgd", "alexr2-momentum", "ssg"])
def test_an_output_iterate_would_be_left_out_and_is_refused(name):
    """On the optimizer that is stepped, or on one inside it."""
    for inside in (False, True):
        member = CASES[name].member(0)
        optimizer: Any = member.optimizer
        wrapped = getattr(optimizer, "wrapped", (optimizer,))[-1]
        output = fcco.optim.OutputIterate(wrapped if inside else optimizer, "average")
        refused("leave out what OutputIterate does", optimizer, member.objective, member.model)
        assert output.count == 0


def test_hooks_of_another_objective_are_refused():
    model = network(0)
    optimizer = sgd(model, 0.1)
    first = fcco.methods.sonx(model, optimizer, fcco.outer.Hinge(), 4)
    refused("what (Compositional|PreviousParameters) does", optimizer)  # a loss without it
    second = fcco.methods.sonx(model, optimizer, fcco.outer.Hinge(), 4)
    refused("what (Compositional|PreviousParameters) does", optimizer, second)
    first.detach_hooks()
    assert group_members([Member(model, optimizer, second)])


@pytest.mark.parametrize("name", ["adam", "sonex-momentum", "icppac", "alexr2-adam"])
def test_runs_that_have_begun_are_refused(name):
    member = CASES[name].member(0)
    CASES[name].step_alone(member, 0, 0)
    refused("first step", member.optimizer, member.objective, member.model)


def test_a_round_that_was_begun_by_hand_is_refused():
    member = CASES["icppac"].member(0)
    member.optimizer.step()
    refused("within", member.optimizer, member.objective, member.model)


def test_a_method_in_two_parts_must_be_whole():
    for name in ("icppac", "ssg"):
        member = CASES[name].member(0)
        optimizer: Any = member.optimizer
        refused("without its objective", optimizer, None, member.model)
        refused("objective.optimizer", optimizer.wrapped[0], member.objective, member.model)
    member = CASES["alexr2-momentum"].member(0)
    other = sgd(member.model, 0.1)  # the proximal point would be left out
    refused("objective.optimizer", other, member.objective, member.model)


def test_terms_without_a_rule_are_refused():
    model = network(0)
    optimizer = sgd(model, 0.1)
    refused("one term, but Linear", optimizer, nn.Linear(1, 1))
    dual = fcco.methods.Alexr(dual_step=1.0, penalty=1.0).term(Problem(model, 4))
    refused("DualTerm", optimizer, fcco.Compositional(model, optimizer, dual))
    hinge: dict[str, Any] = {"outer": fcco.outer.Hinge(), "num_inner": 4}
    skip = fcco.methods.sonx(model, optimizer, **hinge, on_nonfinite="skip")
    refused("skip", optimizer, skip)
    settings: Any = {"penalty": 1.0, "smoothing": 0.1, "refresh_every": 5}
    refreshed = fcco.constrained(model, optimizer, 4, "recursive-hinge", **settings)
    refused("refresh_every", optimizer, refreshed)
    one = fcco.terms.CoupledTerm(fcco.outer.Hinge(), fcco.tracker.ema_tracker(4))
    both = fcco.Compositional(model, optimizer, {"a": one, "b": one})
    refused("one term, but Compositional", optimizer, both)
    optimizer = sgd(model, 0.1)
    term = fcco.terms.CoupledTerm(
        fcco.outer.LogMeanExp(1.0), fcco.tracker.ema_tracker(4, log_space=True)
    )
    refused("log_space", optimizer, fcco.Compositional(model, optimizer, term))
    queues = fcco.constrained(model, sgd(model, 0.1), 4, "oss", proximal=0.3, inner_steps=2)
    refused("after a step", queues.optimizer, queues)


def test_risks_are_refused():
    model = network(0)
    optimizer = sgd(model, 0.1)
    refused("the term RiskTerm", optimizer, xrisk.AUC(model, optimizer, torch.arange(12) % 2))


def test_numbers_that_a_fleet_cannot_see_are_refused():
    model = network(0)
    optimizer = sgd(model, 0.1)

    class Own(fcco.outer.SquaredHinge):
        """No dataclass of its own would be seen; this one hides a tensor."""

    @dataclasses.dataclass(frozen=True)
    class Held(fcco.outer.SquaredHinge):
        table: Any = dataclasses.field(default_factory=lambda: torch.ones(2))

    refused("compare `table` of .*Held", optimizer, fcco.methods.sox(model, optimizer, Held(), 4))
    optimizer = sgd(model, 0.1)
    plain = fcco.methods.sox(model, optimizer, Own(), 4)
    assert list(group_members([Member(model, optimizer, plain)]).values()) == [[0]]


def test_runs_of_several_kinds_are_sorted_and_not_mixed():
    members = [
        CASES[name].member(run) for run in (0, 1) for name in ("ssg", "icppac", "ssg-measured")
    ]
    assert list(group_members(members).values()) == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(Unsupported, match="one method"):
        Fleet(members, CASES["ssg"].inner)
    automatic: list[dict[str, Any]] = [
        {"gamma": gamma, "smoothing": smoothing}
        for gamma in ("auto", 0.3)
        for smoothing in ("auto", 0.1)
    ]
    members = []
    for settings in (*automatic, *automatic):
        model = network(0)
        optimizer = sgd(model, 0.1)
        objective = fcco.CVaRGroupDRO(model, optimizer, 4, 0.5, **settings)
        members.append(Member(model, optimizer, objective))
    assert list(group_members(members).values()) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_values_that_a_lagrangian_cannot_use_are_refused():
    def measured(model, batch):
        loss, values = every(model, batch)
        return loss, fcco.Measured((values > 0).double(), values)

    case = dataclasses.replace(CASES["icppac-adam"], inner=measured)
    with pytest.raises(Unsupported, match="Measured"):
        case.step_fleet(case.fleet("eager"), 0)


def test_values_of_another_shape_are_refused():
    """One value would be taken for all four blocks otherwise."""
    case = dataclasses.replace(CASES["sonex-momentum"], inner=lambda m, b: every(m, b)[1][:1])
    with pytest.raises(ValueError, match=r"shape \(4,\).*: \(1,\)"):
        case.step_fleet(case.fleet("eager"), 0)


@pytest.mark.parametrize("name", ["sgd", "ssg"])
def test_a_loss_that_is_missing_is_noticed(name):
    case = dataclasses.replace(CASES[name], inner=lambda model, batch: every(model, batch)[1])
    with pytest.raises(ValueError, match=r"must return \(loss, values\)"):
        case.step_fleet(case.fleet("eager"), 0)


@pytest.mark.parametrize("name", ["ssg-rows", "icppac-cold", "all-blocks"])
def test_a_batch_without_one_of_the_constraints_freezes_the_run(name):
    """Alone, the run would be stopped by an error: these methods look at all constraints."""
    case = dataclasses.replace(CASES[name], independent=False)
    rows = [batches.at(0) for batches, _ in case.batches]
    first = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    first["block"][1] = first["block"][1].clamp(max=2)
    fleet = case.fleet("eager")
    fleet.step(first, index=first["block"])
    assert fleet.died.tolist() == [-1, 0, -1]
    member = case.member(1)
    with pytest.raises(ValueError, match="looks at all 4"):
        block = first["block"][1]
        member.objective(lambda: case.inner(member.model, rows[1]), block)


# Smoothing.


@dataclasses.dataclass(frozen=True)
class Kink(fcco.outer.Hinge):
    def envelope_and_gradient(self, u: Any, step: Any) -> Any:
        raise NotImplementedError


def test_without_smoothing_f_needs_no_envelope():
    model = network(0)
    optimizer = sgd(model, 0.1)
    objective = fcco.methods.sonx(model, optimizer, Kink(), 4)
    fleet = Fleet([Member(model, optimizer, objective)], every, mode="eager")
    row = CASES["sgd"].batches[0][0].at(0)
    fleet.step({key: value[None] for key, value in row.items()})


# The threshold of CVaR.


@pytest.mark.parametrize("ratio, smoothing", [(0.07, 0.1), (0.3, 1e-3), (0.5, 5.0), (1.0, 0.1)])
def test_masked_thresholds_of_many_runs_are_those_of_the_losses_that_count(ratio, smoothing):
    draw = np.random.default_rng(3)
    losses = draw.normal(size=(12, 17)) + 5
    losses[:4] = losses[:4].round(1)  # ties
    seen = draw.random((12, 17)) < 0.6
    seen[:, 3] = True
    table, mask = torch.tensor(losses), torch.tensor(seen)
    ratios = torch.full((12,), ratio, dtype=torch.float64)
    smooth = torch.func.vmap(threshold)(table, ratios, smoothing * ratios / ratio, mask)[0]
    hard = torch.func.vmap(lambda u, r, m: threshold(u, r, 0.0, m)[0])(table, ratios, mask)
    for run in range(12):
        own = losses[run][seen[run]]
        rank = max(1, int(np.ceil(ratio * len(own) - 1e-9)))
        assert hard[run] == np.sort(own)[::-1][rank - 1]
        # Where all of an interval are minimisers, they give the same weights.
        both = smooth[run].item(), threshold(torch.tensor(own), ratio, smoothing)[0].item()
        weights, alone = (np.clip((own - s) / smoothing, 0, 1 / ratio) for s in both)
        np.testing.assert_allclose(weights, alone, rtol=1e-9, atol=1e-9)
