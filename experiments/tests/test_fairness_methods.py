"""Every method on the task: what it minimises, its multipliers, its optimizer, its errors."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cvxpy
import numpy as np
import pytest
import torch
from fairness_cases import METHODS, start, weights, with_settings
from fcco_experiments.task import Method
from fcco_experiments.tasks.fairness.model import pairs
from fcco_experiments.tasks.fairness.training import Built, FairnessTraining, build
from torch import Tensor

from fcco.methods.constrained import RECIPES

KAPPA = 0.02


def test_every_word_of_the_door_is_tried_here() -> None:
    assert {RECIPES.get(word) for word in METHODS} == {*RECIPES.values(), None}  # None is erm


# What a penalty method minimises, at gamma = 1: the tracked value is that of the batch.


def gradient_and_batch(run: FairnessTraining) -> tuple[list[Tensor], Tensor]:
    """The gradient of a step (from plain SGD with lr = 1) at the weights before it."""
    before = [p.detach().clone() for p in run.model.parameters()]
    epoch, within = divmod(run.steps, run.steps_per_epoch)
    run.step()
    batch = run.train.inputs[run.batches.epoch(epoch)[within, 0]]
    moved = [old - p.detach() for old, p in zip(before, run.model.parameters(), strict=True)]
    with torch.no_grad():
        for old, p in zip(before, run.model.parameters(), strict=True):
            p.copy_(old)
    return moved, batch


def literal_loss_and_gaps(run: FairnessTraining, batch: Tensor) -> tuple[Tensor, list[Tensor]]:
    cells = run.model(batch).view(4, -1)
    found = []
    for label in (1, 0):
        for tau in run.model.thresholds:
            share = torch.sigmoid((cells - tau) / run.config.temperature).mean(1)
            found.append(share[label] - share[2 + label])
    return run.measure.loss(cells), found


def squared(gap: Tensor, penalty: float, _: float) -> tuple[Tensor, str]:
    excess = gap.abs() - KAPPA
    return penalty / 2 * excess.clamp(min=0) ** 2, "in" if excess <= 0 else "out"


def smoothed(gap: Tensor, penalty: float, smoothing: float) -> tuple[Tensor, str]:
    """min over (v_1, v_2) of penalty [|v_1 - v_2| - kappa]_+ + |v - u|^2 / (2 lambda)."""
    excess = gap.abs() - KAPPA
    if excess <= 0:
        return 0 * gap, "in"
    if excess <= 2 * smoothing * penalty:
        return excess**2 / (4 * smoothing), "between"
    return penalty * (excess - smoothing * penalty), "out"


def test_the_literal_smoothed_hinge_is_the_envelope_on_the_plane() -> None:
    penalty, smoothing = 10.0, 2.5e-3
    for rates in ([0.5, 0.49], [0.4, 0.44], [0.9, 0.7]):
        v = cvxpy.Variable(2)
        hinge = penalty * cvxpy.pos(cvxpy.abs(v[0] - v[1]) - KAPPA)
        away = cvxpy.sum_squares(v - np.array(rates)) / (2 * smoothing)
        known = cvxpy.Problem(cvxpy.Minimize(hinge + away)).solve(solver=cvxpy.CLARABEL)
        found, _ = smoothed(torch.tensor(rates[0] - rates[1]), penalty, smoothing)
        assert found.item() == pytest.approx(known, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "penalty_of", "zones"),
    [
        ("sox", {"penalty": 30.0}, squared, {"in", "out"}),
        ("li2024", {"penalty": 30.0, "ramp_steps": 0}, squared, {"in", "out"}),
        (
            "sonex",
            {"penalty": 10.0, "smoothing": 2.5e-3, "read": "new", "correction": 0.0},
            smoothed,
            {"in", "between", "out"},
        ),
    ],
)
def test_penalties_are_the_literal_two_sided_ones(
    name: str, settings: dict[str, Any], penalty_of: Any, zones: set[str]
) -> None:
    method = replace(with_settings(name, gamma=1.0, **settings), update="sgd", lr=1.0)
    seen = set()
    for seed in range(4):
        run = start(method, seed, tolerance=KAPPA)
        for _ in range(3):
            moved, batch = gradient_and_batch(run)
            loss, gaps = literal_loss_and_gaps(run, batch)
            terms = [penalty_of(g, settings["penalty"], settings.get("smoothing", 0)) for g in gaps]
            seen |= {zone for _, zone in terms}
            total = loss + torch.stack([value for value, _ in terms]).mean()
            expected = torch.autograd.grad(total, list(run.model.parameters()))
            for one, other in zip(moved, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert seen == zones


# Multipliers.


def tracked_gaps(run: FairnessTraining) -> np.ndarray:
    table = run.built.objective.term.tracker.value.numpy()
    return table[:, 0] - table[:, 1] if table.shape[1] == 2 else table[: run.count, 0]


@pytest.mark.parametrize("name", ["sox", "sonex", "sonx"])
def test_multipliers_are_the_slopes_at_the_tracked_gaps(name: str) -> None:
    sides = set()
    for seed in range(5):
        run = start(name, seed, tolerance=KAPPA)
        for _ in range(4):
            run.step()
        gap, penalty = tracked_gaps(run), run.method.settings["penalty"]
        assert isinstance(penalty, int)
        excess = np.maximum(np.abs(gap) - KAPPA, 0)
        slope = {
            "sox": penalty * excess,
            "sonex": np.minimum(excess / (2 * 2e-3), penalty),
            "sonx": penalty * (excess > 0),
        }[name] / run.count
        sides |= set(np.sign(gap) * (excess > 0))
        np.testing.assert_allclose(run.built.multipliers(run.count), slope, rtol=1e-4, atol=1e-5)
        above, below = run.built.signed_multipliers(run.count).view(2, -1).numpy()
        np.testing.assert_allclose(above, slope * (gap > 0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(below, slope * (gap < 0), rtol=1e-4, atol=1e-5)
    assert sides == {-1.0, 0.0, 1.0}


def test_two_sides_that_are_both_priced_pull_against_each_other() -> None:
    prices = torch.tensor([3.0, 1.0, 0.0, 1.0, float("nan"), 4.0])
    objective = SimpleNamespace(multipliers=lambda: prices)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    built = Built(objective, optimizer, optimizer, pairs)
    assert built.multipliers(3).tolist() == [2.0, 1.0, 4.0]
    assert built.signed_multipliers(3).tolist() == [3.0, 1.0, 0.0, 1.0, 0.0, 4.0]
    assert Built(None, optimizer, optimizer, pairs).multipliers(3).tolist() == [0.0] * 3


@pytest.mark.parametrize("name", ["sonex", "alexr2", "sonx", "yang2025"])
def test_from_zero_begins_without_a_penalty(name: str) -> None:
    settings = {} if name == "alexr2" else {"read": "old"}
    chosen = [with_settings(name, from_zero=zero, **settings) for zero in (True, False)]
    zero, usual = (start(replace(each, update="sgd")) for each in chosen)
    free = start(replace(METHODS["erm"], update="sgd", lr=1e-2))
    tracker = zero.built.objective.term.tracker
    assert bool(tracker.seen.all()) and not tracker.value.any()
    assert not usual.built.objective.term.tracker.seen.any()
    assert zero.built.objective.multipliers().tolist() == [0.0] * zero.count
    if name == "alexr2":  # reads the value of the batch: gamma of it
        assert zero.built.multipliers(zero.count).tolist() == [0.0] * zero.count
        return
    for run in (zero, usual, free):
        run.step()
    torch.testing.assert_close(weights(zero), weights(free), rtol=0, atol=1e-6)
    assert (weights(usual) - weights(free)).abs().max() > 1e-4


# Optimizers.


def test_updates() -> None:
    adam = start(Method("erm", 0.02, beta=0.3, weight_decay=0.1)).built.scheduled
    assert isinstance(adam, torch.optim.Adam)
    group = adam.param_groups[0]
    assert group["betas"] == (0.7, 0.999) and group["lr"] == 0.02 and group["weight_decay"] == 0.1
    momentum = start(Method("erm", 0.02, "momentum", beta=0.3)).built.scheduled
    plain = start(Method("erm", 0.02, "sgd")).built.scheduled
    kept = [(g["momentum"], g["dampening"]) for o in (momentum, plain) for g in o.param_groups]
    assert kept == [(0.7, 0.7), (0, 0)]
    both = start("alexr2").built
    assert both.optimizer is not both.scheduled and both.scheduled.param_groups[0]["lr"] == 1e-2


# Errors.

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("sonex", {"smoothing": 1e-3}, "`settings.penalty` is needed for sonex"),
    ("sonex", {"penalty": 10}, "needs a number as `smoothing`"),
    ("sox", {}, "needs `penalty`"),
    ("icppac", {"inner_steps": 3}, "needs `proximal`"),
    ("sonex", {"penalty": -1, "smoothing": 1e-3}, "must be positive and finite but is: -1"),
    ("sonex", {"penalty": "x", "smoothing": 1e-3}, "`settings.penalty` of sonex must be a number"),
    ("sox", {"penalty": "1O"}, "`settings.penalty` of sox must be a number but is: '1O'"),
    ("sox", {"penalty": True}, "`settings.penalty` of sox must not be true or false"),
    ("sox", {"penalty": 1, "smoothing": 0.1}, "no such setting: `smoothing`"),
    ("sox", {"penalty": 1, "tolerance": 0.1}, "`settings.tolerance` of sox is made by the task"),
    ("icppac", {"proximal": 1, "inner_steps": 3, "schedule": 1}, "`settings.schedule` of icppac"),
    ("icppac", {"proximal": 1, "inner_steps": 3, "tau": -1}, "tau"),
    ("icppac", {"proximal": 1, "inner_steps": 3, "from_zero": True}, "`settings.from_zero` is for"),
    ("sonex", {"penalty": 1, "smoothing": 1e-3, "margin": 0.1}, "`settings.margin` of sonex must"),
    ("sonex", {"penalty": 1, "smoothing": 1e-3, "gama": 1}, "no such setting: `gama`"),
    ("erm", {"penalty": 1}, "`erm` has no settings but got: penalty"),
    ("sonexx", {}, "must be one of 'sonex'"),
]


@pytest.mark.parametrize(("word", "settings", "text"), BAD)
def test_bad_settings_are_named(word: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        build(torch.nn.Linear(1, 1), Method(word, 1e-3, "sgd", settings=settings), 4, 0.02)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"beta": 0.0}, "beta"),
        ({"beta": 1.5}, "beta"),
        ({"update": "adamw"}, "update"),
        ({"lr": -1.0}, "learning rate"),
    ],
)
def test_bad_updates_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build(torch.nn.Linear(1, 1), replace(METHODS["erm"], **changes), 4, 0.02)
