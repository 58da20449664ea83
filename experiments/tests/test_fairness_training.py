"""One run: what each method minimises, its multipliers and state, figures, KKT residuals."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from fairness_cases import (
    DOUBLE,
    METHODS,
    config,
    in_double,
    outputs,
    sigmoid,
    start,
    with_settings,
)
from fcco_experiments.task import Method
from fcco_experiments.tasks.fairness.training import BuiltMethod, FairnessTraining, pair_loss
from task_cases import steps, weights
from torch import Tensor

import fcco
from fcco.methods import ALIASES, ROWS

KAPPA = 0.02


def test_every_word_of_the_door_is_tried_here() -> None:
    words = {ALIASES.get(word, word) for word in METHODS} - {"erm", "automatic"}
    assert words | {"multipliers"} == {row.name for row in ROWS if "limits" in row.use}


# What a penalty method minimises, at gamma = 1: the tracked value is that of the batch.


def literal_loss_and_gaps(run: FairnessTraining, rows: Tensor) -> tuple[Tensor, Tensor]:
    cells = run.model(run.train.inputs[rows])
    gaps = []
    for label in (1, 0):
        for tau in run.config.thresholds:
            share = torch.sigmoid((cells - tau) / run.config.temperature).mean(1)
            gaps.append(share[label] - share[2 + label])
    return run.model.loss(cells), torch.stack(gaps)


def slopes_of(name: str, gap: Tensor, settings: Any) -> Tensor:
    """The derivative of each penalty, smoothed ones by the envelope on the plane of two rates."""
    excess, penalty = (gap.abs() - KAPPA).clamp(min=0), float(settings["penalty"])
    size = {
        "sox": lambda: penalty * excess,
        "li2024": lambda: penalty * excess,
        "sonx": lambda: penalty * (excess > 0),
        "sonex": lambda: (excess / (2 * settings["smoothing"])).clamp(max=penalty),
    }[name]()
    return gap.sign() * size / len(gap)


CASES = [
    ("sox", {"penalty": 30.0}, False),
    ("li2024", {"penalty": 30.0}, False),
    ("sonx", {"read": "new", "correction": 0.0}, False),
    ("sonex", {"smoothing": 2.5e-3, "read": "new", "correction": 0.0}, False),
    ("sonex", {"smoothing": 2.5e-3, "read": "new", "correction": 0.0}, True),
]


@pytest.mark.parametrize(("name", "settings", "independent"), CASES)
def test_steps_are_those_of_the_literal_penalties(
    name: str, settings: dict[str, Any], independent: bool
) -> None:
    """With a second batch, that carries the gradient and the first one the slopes."""
    method = with_settings(name, gamma=1.0, **settings)
    method = replace(method, update="sgd", lr=1.0, independent=independent)
    zones = set()
    for seed in range(4):
        run = start(method, seed, tolerance=KAPPA)
        for step in range(3):
            before = weights(run)
            batches = [literal_loss_and_gaps(run, rows) for rows in run.batches.epoch(0)[step]]
            slopes = slopes_of(name, batches[0][1].detach(), method.settings)
            zones |= {round(value, 4) for value in slopes.abs().tolist()}
            loss, gaps = batches[-1]
            expected = torch.autograd.grad(loss + slopes @ gaps, list(run.model.parameters()))
            run.step()
            flat = torch.cat([g.flatten() for g in expected])
            torch.testing.assert_close(before - weights(run), flat, rtol=1e-3, atol=1e-5)
    assert min(zones) == 0 and len(zones) > (1 if name == "sonx" else 3)


def test_automatic_is_the_objective_without_settings() -> None:
    """The same steps by hand, with the limits of both sides of each gap by name."""
    run, other = (start(replace(METHODS["automatic"], update="sgd", lr=0.1)) for _ in range(2))
    model, batches, begin = other.model, other.batches, weights(other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limits = dict.fromkeys(map(str, range(2 * run.built.count)), KAPPA)
    objective = fcco.constrained(model, optimizer, limits)
    for _ in range(15):  # the first ten steps only measure
        run.step()
        (rows,) = batches.draw()

        def values(rows: Tensor = rows) -> tuple[Tensor, dict[str, Tensor]]:
            loss, gaps = literal_loss_and_gaps(other, rows)
            return loss, dict(zip(limits, torch.cat([gaps, -gaps]), strict=True))

        objective(values).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(run), weights(other), rtol=1e-4, atol=1e-6)
    assert run.built.multipliers().max() > 0 and (weights(run) - begin).abs().max() > 1e-3


# Multipliers.


@pytest.mark.parametrize("name", ["sox", "sonex", "sonx"])
def test_multipliers_are_the_slopes_at_the_tracked_gaps(name: str) -> None:
    sides = set()
    for seed in range(5):
        run = steps(start(name, seed, tolerance=KAPPA), 4)
        table = run.built.objective.term.tracker.value
        gap = table[:, 0] - table[:, 1] if table.shape[1] == 2 else table[: run.built.count, 0]
        slope = slopes_of(name, gap, run.method.settings)
        sides |= set(slope.sign().tolist())
        torch.testing.assert_close(run.built.multipliers(), slope.abs(), rtol=1e-4, atol=1e-5)
        above, below = run.built.signed_multipliers().view(2, -1)
        torch.testing.assert_close(above - below, slope, rtol=1e-4, atol=1e-5)
        assert not (above * below).any()
    assert sides == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("name", ["sonex", "sonx", "sox"])
def test_from_zero_begins_without_a_penalty(name: str) -> None:
    settings = {} if name == "sox" else {"read": "old"}
    methods = [with_settings(name, from_zero=zero, **settings) for zero in (True, False)]
    zero, usual = (start(replace(method, update="sgd")) for method in methods)
    assert zero.built.multipliers().tolist() == [0.0] * zero.built.count
    if name == "sox":  # reads the value of the batch: gamma of it
        return
    free = start(replace(METHODS["erm"], update="sgd", lr=1e-2))
    zero, usual, free = (weights(steps(run, 1)) for run in (zero, usual, free))
    torch.testing.assert_close(zero, free, rtol=0, atol=1e-6)
    assert (usual - free).abs().max() > 1e-4


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("sonex", {"smoothing": 1e-3}, "`settings.penalty` is needed for sonex"),
    ("sonex", {"penalty": "x", "smoothing": 1e-3}, "must be a number but is: 'x'"),
    ("sox", {"penalty": True}, "must be a number but is: True"),
    ("sox", {"penalty": 1, "smoothing": 0.1}, "no such setting: `smoothing`"),
    ("sox", {"penalty": 1, "tolerance": 0.1}, "`settings.tolerance` of sox is made by the task"),
    ("icppac", {"proximal": 1, "inner_steps": 3, "from_zero": True}, "`settings.from_zero` is for"),
    ("sonex", {"penalty": 1, "smoothing": 1e-3, "margin": 0.1}, "Lower its own tolerance"),
    ("erm", {"penalty": 1}, "`erm` has no settings but got: penalty"),
    ("automatic", {"gamma": 1}, "`automatic` has no settings but got: gamma"),
    ("sonexx", {}, "must be one of 'multipliers'"),
]


@pytest.mark.parametrize(("word", "settings", "text"), BAD)
def test_bad_settings_are_named(word: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        BuiltMethod(torch.nn.Linear(1, 1), Method(word, 1e-3, "sgd", settings=settings), config())


# Nothing changes what it must not change.


# Figures.


@pytest.mark.parametrize("score", ["normalised", "unbounded"])
def test_figures_are_those_of_numpy(score: str) -> None:
    taus = np.array([-0.8, 0.3])
    run = steps(start("sonex", score=score, thresholds=tuple(taus)), 11)
    row, train = run.evaluate(), outputs(run, "train")
    mean, deviation = (train.mean(), train.std()) if score == "normalised" else (0.0, 1.0)
    for part, key in {"train": "train", "validation": "val", "test": "test"}.items():
        scores = (outputs(run, part) - mean) / deviation
        cells = np.split(scores, run.parts[part].counts.cumsum(0)[:-1])
        smooth = [sigmoid((cell[:, None] - taus) / 0.2).mean(0) for cell in cells]
        gaps = np.abs(np.concatenate([smooth[1] - smooth[3], smooth[0] - smooth[2]])) - 0.02
        name = "constraints" if key == "train" else f"{key}_constraints"
        np.testing.assert_allclose(row[name], gaps, atol=1e-5)
        assert row[f"{key}_violation"] == pytest.approx(gaps.max(), abs=1e-5)
        won = np.concatenate(cells[1::2])[:, None] > np.concatenate(cells[0::2])
        assert row[f"{key}_auc"] == pytest.approx(won.mean(), abs=1e-3)
        inside = np.mean((scores >= taus.min()) & (scores <= taus.max()))
        assert row[f"{key}_inside"] == pytest.approx(inside, abs=0.02)
        true, floors = {}, []
        for y, rate in ((1, "tpr"), (0, "fpr")):
            above = [(cells[c][:, None] > scores).mean(0) for c in (y, 2 + y)]
            true[rate] = np.abs(above[0] - above[1]).max()
            floors.append(0.8687 * math.sqrt(1 / len(cells[y]) + 1 / len(cells[2 + y])))
            assert row[f"{key}_{rate}_gap"] == pytest.approx(true[rate], abs=1e-6)
        gap, floor = max(true.values()), max(floors)
        assert row[f"{key}_gap"] == pytest.approx(gap, abs=1e-6)
        assert row[f"{key}_gap_floor"] == pytest.approx(floor, abs=1e-4)
        beyond = math.sqrt(max(gap**2 - floor**2, 0))
        assert row[f"{key}_excess_gap"] == pytest.approx(beyond, abs=1e-3)


def test_evaluation_looks_at_the_jacobian_at_the_start_and_after_each_quarter() -> None:
    run = start("sonex", epochs=2)
    found = ["singular_value" in steps(run, min(k, 1)).evaluate() for k in range(17)]
    assert [step for step, value in enumerate(found) if value] == [0, 4, 8, 12, 16]
    assert "singular_value" not in start("erm").evaluate()
    feasible = start("sonex", tolerance=1.0)
    assert feasible.condition() == {} and feasible.finish()["kkt_feasibility"] == 0.0


# KKT residuals on all training data.


@pytest.mark.parametrize("rows", [1, 7, 256])
def test_the_pair_loss_in_strips_is_that_of_autograd(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    positive = torch.randn(23, generator=generator, dtype=DOUBLE, requires_grad=True)
    negative = torch.randn(40, generator=generator, dtype=DOUBLE, requires_grad=True)
    loss = -torch.sigmoid(positive[:, None] - negative[None]).mean()
    again = pair_loss(positive, negative, rows=rows)
    torch.testing.assert_close(again, loss, rtol=0, atol=1e-13)
    for one, other in zip(
        *(torch.autograd.grad(value, (positive, negative)) for value in (again, loss)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def dense(run: FairnessTraining) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gaps (m,), their gradients (m, d) and that of the loss (d,), with own formulas."""
    asked, parameters = run.config, list(run.model.parameters())

    def flat(value: Tensor) -> np.ndarray:
        grads = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in grads]).numpy()

    scores = run.model.body(run.train.inputs)
    if asked.score == "normalised":
        scores = (scores - scores.mean()) / scores.var(correction=0).sqrt()
    cells = torch.split(scores, run.train.counts.tolist())
    rates = torch.stack([
        torch.sigmoid((cell - tau) / asked.temperature).mean()
        for cell in cells for tau in asked.thresholds
    ]).view(4, -1)  # fmt: skip
    gaps = torch.cat([rates[1] - rates[3], rates[0] - rates[2]])
    positive, negative = torch.cat(cells[1::2]), torch.cat(cells[0::2])
    loss = -torch.sigmoid(positive[:, None] - negative).mean()
    return gaps.detach().numpy(), np.stack([flat(gap) for gap in gaps]), flat(loss)


RUNS = [
    ("sonex", {}),
    ("sox", {}),
    ("icppac", {}),  # prices both sides of a gap
    ("alexr", {}),
    ("erm", {"score": "unbounded", "tolerance": 1e-3}),
    ("sonex", {"score": "unbounded", "tolerance": 1e-3}),
]


@pytest.mark.parametrize(("name", "changes"), RUNS)
def test_residuals_and_singular_values_are_those_of_dense_jacobians(
    name: str, changes: dict[str, Any]
) -> None:
    run = in_double(steps(start(name, **changes), 8))  # between the rounds of a double loop
    row, (gap, jacobian, gradient) = run.finish(), dense(run)
    above, below = run.built.signed_multipliers().double().view(2, -1).numpy()
    kappa = run.config.tolerance
    pull = gradient + (above - below) @ jacobian
    assert row["kkt_stationarity"] == pytest.approx(np.linalg.norm(pull), rel=1e-7)
    assert row["kkt_feasibility"] == pytest.approx(max((np.abs(gap) - kappa).max(), 0), abs=1e-9)
    sides = np.abs(np.concatenate([above * (gap - kappa), below * (-gap - kappa)]))
    assert row["kkt_complementarity"] == pytest.approx(sides.max(), abs=1e-9)
    if name not in ("erm", "alexr"):
        assert (above + below).max() > 0.01  # the multipliers matter
    if name == "icppac":
        assert ((above > 0) & (below > 0)).any()
    # The best multipliers are those of non-negative least squares.
    excess, rows = np.abs(gap) - kappa, np.sign(gap)[:, None] * jacobian
    active, nu = excess >= -1e-3, np.zeros(run.built.count)
    nu[active], length = scipy.optimize.nnls(rows[active].T, -gradient)
    assert row["kkt_best_stationarity"] == pytest.approx(length, rel=1e-6)
    assert row["kkt_best_complementarity"] == pytest.approx(np.abs(nu * excess).max(), abs=1e-6)
    np.testing.assert_allclose(row["best_multipliers"], nu, rtol=1e-3, atol=1e-5)
    every, violated = (
        np.linalg.svd(part, compute_uv=False)[-1] for part in (jacobian, jacobian[excess > 0])
    )
    assert row["singular_value"] == pytest.approx(every, rel=1e-5, abs=1e-8)
    assert row["singular_value_violated"] == pytest.approx(violated, rel=1e-5, abs=1e-8)
