"""One run: counts, schedule, figures, and that evaluation and checkpoints change nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fairness_cases import (
    METHODS,
    literal_gaps,
    outputs,
    parts,
    rows_of,
    start,
    stored,
    weights,
    with_settings,
)
from fcco_experiments.tasks.fairness import TASK, Fairness
from fcco_experiments.tasks.fairness.task import FairnessProblem
from fcco_experiments.tasks.fairness.training import FairnessTraining

QUANTILES: dict[str, Any] = {"thresholds": (0.3, 0.7), "threshold_kind": "quantile"}
CASES = [(name, {}) for name in METHODS] + [("sonex", QUANTILES), ("icppac", QUANTILES)]


def steps(run: FairnessTraining, number: int) -> FairnessTraining:
    for _ in range(number):
        run.step()
    return run


# Counts and schedule.


def test_an_epoch_draws_the_number_of_training_samples() -> None:
    n = len(parts()["train"])
    single, double = start("sonex", batch=8), start("alexr2", batch=8)
    assert (single.samples_per_step, double.samples_per_step) == (8, 16)
    for run in (single, double, start("sonex", batch=4 * n)):
        drawn = run.steps_per_epoch * run.samples_per_step
        assert n <= drawn < n + run.samples_per_step
        assert run.total_steps == 4 * run.steps_per_epoch
    assert double.steps_per_epoch == math.ceil(single.steps_per_epoch / 2)


def test_batches_hold_as_many_rows_of_each_cell_and_differ_by_epoch() -> None:
    run = start("alexr2")
    epochs = []
    for _ in range(2):
        steps(run, run.steps_per_epoch)
        assert run._rows is not None and run._rows.shape == (run.steps_per_epoch, 2, 16)
        epochs.append(run._rows)
        where = np.array([2 * group + label for group, label in rows_of(run.train)])
        expected = np.repeat([0, 1, 2, 3], 4)
        assert all((where[batch] == expected).all() for batch in run._rows.flatten(0, 1))
    assert not epochs[0].equal(epochs[1]) and not epochs[0][:, 0].equal(epochs[0][:, 1])


@pytest.mark.parametrize("name", ["sonex", "alexr2", "icppac", "ssg"])
def test_learning_rate_falls_at_half_and_at_three_quarters(name: str) -> None:
    run = start(name, epochs=8)
    lr, seen = run.method.lr, []
    for _ in range(8):
        run.step()
        seen.append(run.built.scheduled.param_groups[0]["lr"] / lr)
        steps(run, run.steps_per_epoch - 1)
        assert run.built.scheduled.param_groups[0]["lr"] / lr == seen[-1]
    assert seen == pytest.approx([1] * 4 + [0.1] * 2 + [0.01] * 2)


def test_the_schedule_reaches_the_weights() -> None:
    """A step of plain SGD is as long as its learning rate says."""
    long, short = start("sonx", decay_at=(), epochs=2), start("sonx", decay_at=(0.0,), epochs=2)
    before = weights(long)
    moves = [weights(steps(run, 1)) - before for run in (long, short)]
    torch.testing.assert_close(moves[0], 10 * moves[1], rtol=1e-2, atol=1e-5)


def test_the_second_batch_gives_the_gradient_and_the_first_the_slopes() -> None:
    settings = {"gamma": 1.0, "read": "new", "correction": 0.0}
    usual = with_settings("sonex", **settings)
    run = start(replace(usual, update="sgd", lr=1.0, independent=True))
    before = weights(run)
    parameters = list(run.model.parameters())
    run._begin(0)
    assert run._rows is not None
    losses, gaps = [], []
    for rows in run._rows[0]:
        cells = run.model(run.train.inputs[rows]).view(4, -1)
        losses.append(run.measure.loss(cells))
        shares = torch.sigmoid((cells[..., None] - run.model.thresholds) / 0.2).mean(1)
        gaps.append(torch.cat([shares[1] - shares[3], shares[0] - shares[2]]))
    excess = (gaps[0].detach().abs() - 0.02).clamp(min=0)
    slope = gaps[0].detach().sign() * (excess / (2 * 2e-3)).clamp(max=10) / run.count
    expected = torch.autograd.grad(losses[1] + slope @ gaps[1], parameters)
    assert slope.any()
    run.step()
    found, flat = before - weights(run), torch.cat([g.flatten() for g in expected])
    torch.testing.assert_close(found, flat, rtol=1e-4, atol=1e-5)


# Nothing changes what it must not change.


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_evaluation_changes_nothing(name: str, changes: dict[str, Any]) -> None:
    plain, watched = start(name, **changes), start(name, **changes)
    number = 2 * plain.steps_per_epoch + 3
    first = watched.evaluate()
    for _ in range(number):
        plain.step()
        watched.step()
        random = torch.get_rng_state()
        row = watched.evaluate()
        assert torch.get_rng_state().equal(random) and watched.model.training
        assert row == watched.evaluate()
    watched.finish()
    assert weights(plain).equal(weights(watched))
    assert row != first
    held = plain.state_dict(), watched.state_dict()
    assert same(*(each["objective"] for each in held))
    assert same(*(each["model"] for each in held))


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_bitwise(
    name: str, changes: dict[str, Any]
) -> None:
    run = start(name, **changes)
    steps(run, run.steps_per_epoch + 1)
    assert run.steps % run.steps_per_epoch
    if name in ("alexr2", "icppac", "oss"):  # in the middle of a round, too
        optimizer: Any = run.built.optimizer
        assert optimizer.inner_step > 0
    state = stored(run.state_dict())
    resumed = start(name, **changes)
    resumed.load_state_dict(state)
    assert resumed.evaluate() == run.evaluate() and resumed.steps == run.steps
    for _ in range(2 * run.steps_per_epoch):
        run.step()
        resumed.step()
        assert weights(run).equal(weights(resumed))
    assert run.evaluate() == resumed.evaluate()
    assert run.finish() == resumed.finish()
    held = run.state_dict(), resumed.state_dict()
    assert all(same(held[0][key], held[1][key]) for key in held[0])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and bool(
            torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_the_seed_makes_the_run() -> None:
    one, again, other = (steps(start("sonex", seed), 5) for seed in (3, 3, 4))
    assert weights(one).equal(weights(again)) and one.evaluate() == again.evaluate()
    assert not weights(one).equal(weights(other))
    assert one._rows is not None and other._rows is not None
    assert not one._rows.equal(other._rows)
    assert weights(start("sonex")).equal(weights(start("icppac")))  # methods start alike


# Figures.


@pytest.mark.parametrize("score", ["normalised", "unbounded"])
@pytest.mark.parametrize("kind", ["fixed", "quantile"])
def test_figures_are_those_of_loops_over_the_data(score: str, kind: str) -> None:
    taus = (0.2, 0.6) if kind == "quantile" else (-0.8, 0.3)
    run = steps(start("sonex", score=score, threshold_kind=kind, thresholds=taus), 11)
    row = run.evaluate()
    train = outputs(run, "train")
    mean, deviation = (train.mean(), train.std()) if score == "normalised" else (0.0, 1.0)
    if kind == "quantile":
        taus = tuple(np.quantile((train - mean) / deviation, taus))
    for name, short in {"train": "train", "validation": "val", "test": "test"}.items():
        scores = (outputs(run, name) - mean) / deviation
        where = rows_of(run.parts[name])
        gaps = np.abs(literal_gaps(scores, run.parts[name], taus, 0.2)) - 0.02
        key = "constraints" if short == "train" else f"{short}_constraints"
        np.testing.assert_allclose(row[key], gaps, atol=1e-5)
        assert row[f"{short}_violation"] == pytest.approx(gaps.max(), abs=1e-5)
        label = np.array([y for _, y in where])
        won = np.mean(scores[label == 1][:, None] > scores[label == 0])
        assert row[f"{short}_auc"] == pytest.approx(won, abs=1e-3)
        inside = np.mean((scores >= min(taus)) & (scores <= max(taus)))
        assert row[f"{short}_inside"] == pytest.approx(inside, abs=0.02)
        found, floors = {}, []
        for y, rate in ((1, "tpr"), (0, "fpr")):
            groups = [scores[[at == (g, y) for at in where]] for g in (0, 1)]
            grid = scores[:, None]
            above = [(group > grid).mean(1) for group in groups]
            found[rate] = np.abs(above[0] - above[1]).max()
            floors.append(0.8687 * math.sqrt(sum(1 / len(group) for group in groups)))
            assert row[f"{short}_{rate}_gap"] == pytest.approx(found[rate], abs=1e-6)
        assert row[f"{short}_gap"] == pytest.approx(max(found.values()), abs=1e-6)
        assert row[f"{short}_gap_floor"] == pytest.approx(max(floors), abs=1e-4)
    assert row["multipliers"] == run.built.multipliers(run.count).tolist()
    if score == "normalised":
        assert row["score_mean"] == pytest.approx(0, abs=1e-5)
        assert row["score_deviation"] == pytest.approx(1, abs=1e-2)


def test_training_raises_the_auc_and_constraints_lower_the_gaps() -> None:
    free = steps(start("erm", epochs=60), 400).evaluate()
    fair = steps(start(with_settings("sonex", gamma=0.1), epochs=60), 400).evaluate()
    assert free["train_auc"] > 0.85 and fair["train_auc"] > 0.7
    assert fair["train_violation"] < 0.5 * free["train_violation"]


# The problem.


def test_problem_by_its_name() -> None:
    config = Fairness(data="synthetic", epochs=1, hidden=(4,))
    problem = TASK.load(config)
    assert isinstance(problem, FairnessProblem)
    assert {name: len(part) for name, part in problem.parts(1).items()} == {
        "train": 3200,
        "validation": 800,
        "test": 2000,
    }
    run = problem.start(METHODS["erm"], 1)
    assert run.steps_per_epoch == 25 and run.train is problem.parts(1)["train"]
    assert problem.fingerprint() == TASK.load(config).fingerprint()
    alone = TASK.load(Fairness(data="synthetic", validation=0.0))
    assert set(alone.parts(0)) == {"train", "test"}
    row = alone.start(METHODS["erm"], 0).evaluate()
    assert "val_auc" not in row and "test_auc" in row


def test_names_of_config_files() -> None:
    names = [TASK.config_name("adult", setting) for setting in (None, "meaningful", "paper")]
    assert names == ["adult", "adult", "adult-paper"]


@pytest.mark.parametrize("word", ["alexr2", "icppac"])
def test_a_double_loop_is_evaluated_between_its_rounds(word: str) -> None:
    run = start(word)
    optimizer: Any = run.built.optimizer
    between, inside = run.evaluate(), 0
    for _ in range(12):
        run.step()
        if optimizer.round_begins:
            between = run.evaluate()
        else:
            inside += 1
            seen = run.evaluate()
            assert seen["train_auc"] == between["train_auc"]
            assert seen["test_constraints"] == between["test_constraints"]
    assert inside > 3
