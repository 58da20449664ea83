"""One run: schedule, figures, state, and how near to a KKT point it ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from fairness_cases import (
    DOUBLE,
    METHODS,
    in_double,
    literal_gaps,
    outputs,
    rows_of,
    start,
    stored,
    weights,
    with_settings,
)
from fcco_experiments.tasks.fairness import TASK, Fairness
from fcco_experiments.tasks.fairness.task import FairnessProblem
from fcco_experiments.tasks.fairness.training import FairnessTraining, PairSlopes
from torch import Tensor

QUANTILES: dict[str, Any] = {"thresholds": (0.3, 0.7), "threshold_kind": "quantile"}
CASES = [(name, {}) for name in METHODS] + [("sonex", QUANTILES), ("icppac", QUANTILES)]


def steps(run: FairnessTraining, number: int) -> FairnessTraining:
    for _ in range(number):
        run.step()
    return run


# Counts and schedule.


def test_learning_rate_falls_at_half_and_at_three_quarters() -> None:
    run = start("alexr2", epochs=8)
    lr, seen = run.method.lr, []
    for _ in range(8):
        run.step()
        seen.append(run.built.scheduled.param_groups[0]["lr"] / lr)
        steps(run, run.steps_per_epoch - 1)
        assert run.built.scheduled.param_groups[0]["lr"] / lr == seen[-1]
    assert seen == pytest.approx([1] * 4 + [0.1] * 2 + [0.01] * 2)


def test_the_second_batch_gives_the_gradient_and_the_first_the_slopes() -> None:
    settings = {"gamma": 1.0, "read": "new", "correction": 0.0}
    usual = with_settings("sonex", **settings)
    run = start(replace(usual, update="sgd", lr=1.0, independent=True))
    before = weights(run)
    parameters = list(run.model.parameters())
    losses, gaps = [], []
    for rows in run.batches.epoch(0)[0]:
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
def test_neither_evaluation_nor_a_checkpoint_in_the_middle_changes_a_run(
    name: str, changes: dict[str, Any]
) -> None:
    plain, watched = start(name, **changes), start(name, **changes)
    first = watched.evaluate()
    for _ in range(plain.steps_per_epoch + 1):
        plain.step()
        watched.step()
        random = torch.get_rng_state()
        assert watched.evaluate() == watched.evaluate() != first
        assert torch.get_rng_state().equal(random) and watched.model.training
    if name in ("alexr2", "icppac", "oss"):  # in the middle of a round, too
        optimizer: Any = watched.built.optimizer
        assert optimizer.inner_step > 0
    resumed = start(name, **changes)
    resumed.load_state_dict(stored(watched.state_dict()))
    assert resumed.evaluate() == watched.evaluate() and resumed.steps == plain.steps
    for _ in range(plain.steps_per_epoch):
        plain.step()
        resumed.step()
        assert weights(plain).equal(weights(resumed))
    assert plain.finish() == resumed.finish()
    held = plain.state_dict(), resumed.state_dict()
    assert all(same(held[0][key], held[1][key]) for key in held[0] if key != "seconds")


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
        beyond = math.sqrt(max(row[f"{short}_gap"] ** 2 - row[f"{short}_gap_floor"] ** 2, 0))
        assert row[f"{short}_excess_gap"] == pytest.approx(beyond, abs=1e-9)
    assert row["multipliers"] == run.built.multipliers(run.count).tolist()
    if score == "normalised":
        assert row["score_mean"] == pytest.approx(0, abs=1e-5)
        assert row["score_deviation"] == pytest.approx(1, abs=1e-2)


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


def test_thresholds_follow_the_scores_at_the_start_of_each_epoch_only() -> None:
    run = start("sonex", thresholds=(0.3, 0.7), threshold_kind="quantile", temperature=0.5)
    assert run.steps_per_epoch > 3
    for step in range(2 * run.steps_per_epoch + 2):
        scores = outputs(run, "train")
        scores = (scores - scores.mean()) / scores.std()
        before = run.model.thresholds.clone()
        run.evaluate()
        run.step()
        if step % run.steps_per_epoch == 0:
            expected = np.quantile(scores, (0.3, 0.7))
            np.testing.assert_allclose(run.model.thresholds, expected, atol=1e-5)
        else:
            assert run.model.thresholds.equal(before)
            assert not np.allclose(before, np.quantile(scores, (0.3, 0.7)), atol=1e-5)


# The pairwise loss in strips.


@pytest.mark.parametrize("rows", [1, 7, 256])
def test_pair_slopes_are_those_of_autograd(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    positive = torch.randn(23, generator=generator, dtype=DOUBLE, requires_grad=True)
    negative = torch.randn(40, generator=generator, dtype=DOUBLE, requires_grad=True)
    loss = -torch.sigmoid((positive[:, None] - negative[None]) / 0.4).mean()
    expected = torch.autograd.grad(loss, (positive, negative))
    slopes = PairSlopes.of(positive, negative, 0.4, rows=rows)
    again = slopes.loss(positive, negative)
    assert again.item() == pytest.approx(loss.item(), abs=1e-13)
    found = torch.autograd.grad(again, (positive, negative))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


# A dense computation of everything.


def dense(run: FairnessTraining) -> dict[str, Any]:
    """Gaps (m,), their gradients (m, d) and that of the loss (d,), with own formulas."""
    config, cells = run.config, run.train
    parameters = list(run.model.parameters())

    def flat(value: Tensor) -> np.ndarray:
        grads = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in grads]).numpy()

    scores = run.model.body(cells.inputs)
    if config.score == "normalised":
        scores = (scores - scores.mean()) / scores.var(correction=0).sqrt()
    by_cell = torch.split(scores, cells.counts.tolist())
    gaps = []
    for label in (1, 0):
        for tau in run.model.thresholds:
            rates = [
                torch.sigmoid((by_cell[2 * g + label] - tau) / config.temperature).mean()
                for g in (0, 1)
            ]
            gaps.append(rates[0] - rates[1])
    positive, negative = torch.cat(by_cell[1::2]), torch.cat(by_cell[0::2])
    if config.objective == "auc":
        pairs = (positive[:, None] - negative) / config.pair_temperature
        loss = -torch.sigmoid(pairs).mean()
    else:
        softplus = torch.nn.functional.softplus
        loss = torch.cat([softplus(-positive), softplus(negative)]).mean()
    return {
        "gap": np.array([gap.item() for gap in gaps]),
        "jacobian": np.stack([flat(gap) for gap in gaps]),
        "gradient": flat(loss),
    }


def trained(name: str = "sonex", number: int = 9, **changes: Any) -> FairnessTraining:
    run = start(with_settings(name) if name != "erm" else name, **changes)
    for _ in range(number):
        run.step()
    return in_double(run)


RUNS = [
    ("sonex", {}),
    ("sox", {}),
    ("icppac", {}),  # prices both sides of a gap
    ("alexr", {"objective": "bce"}),
    ("erm", {"objective": "bce", "score": "unbounded", "tolerance": 1e-3}),
    ("sonex", {"score": "unbounded", "pair_temperature": 0.5, "tolerance": 1e-3}),
    ("sonex", {"thresholds": (0.3, 0.7), "threshold_kind": "quantile"}),
]


@pytest.mark.parametrize(("name", "changes"), RUNS)
def test_residuals_and_singular_values_are_those_of_dense_jacobians(
    name: str, changes: dict[str, Any]
) -> None:
    run = trained(name, **changes)
    row, known = run.certificate(), dense(run)
    above, below = run.built.signed_multipliers(run.count).double().view(2, -1).numpy()
    gap, kappa = known["gap"], run.config.tolerance
    pull = known["gradient"] + (above - below) @ known["jacobian"]
    assert row["kkt_stationarity"] == pytest.approx(np.linalg.norm(pull), rel=1e-7)
    assert row["kkt_feasibility"] == pytest.approx(max((np.abs(gap) - kappa).max(), 0), abs=1e-9)
    sides = np.abs(np.concatenate([above * (gap - kappa), below * (-gap - kappa)]))
    assert row["kkt_complementarity"] == pytest.approx(sides.max(), abs=1e-9)
    if name not in ("erm", "alexr"):
        assert (above + below).max() > 0.01  # the multipliers matter
    if name == "icppac":
        assert ((above > 0) & (below > 0)).any()
    # The best multipliers are those of non-negative least squares.
    excess = np.abs(gap) - kappa
    rows = np.sign(gap)[:, None] * known["jacobian"]
    active, nu = excess >= -1e-3, np.zeros(run.count)
    assert active.any()  # scipy crashes without columns
    nu[active], length = scipy.optimize.nnls(rows[active].T, -known["gradient"])
    assert row["kkt_best_stationarity"] == pytest.approx(length, rel=1e-6)
    assert row["kkt_best_complementarity"] == pytest.approx(np.abs(nu * excess).max(), abs=1e-6)
    np.testing.assert_allclose(row["best_multipliers"], nu, rtol=1e-3, atol=1e-5)
    values = np.linalg.svd(known["jacobian"], compute_uv=False)
    own = np.linalg.svd(known["jacobian"][excess > 0], compute_uv=False)
    assert row["singular_value"] == pytest.approx(values[-1], rel=1e-5, abs=1e-8)
    assert row["singular_value_violated"] == pytest.approx(own[-1], rel=1e-5, abs=1e-8)


def test_a_feasible_point_has_no_singular_value() -> None:
    run = start("sonex", tolerance=1.0)
    assert run.condition() == {}
    assert "singular_value" not in run.evaluate()
    end = run.certificate()
    assert "singular_value" not in end and end["kkt_feasibility"] == 0.0


def test_evaluation_looks_at_the_jacobian_at_the_start_and_after_each_quarter() -> None:
    run = start("sonex", epochs=2, batch=16)
    assert run.config.epochs * run.steps_per_epoch == 16
    with_value = []
    for step in range(17):
        if step:
            run.step()
        if "singular_value" in run.evaluate():
            with_value.append(step)
    assert with_value == [0, 4, 8, 12, 16]
    assert "singular_value" not in start("erm").evaluate()
