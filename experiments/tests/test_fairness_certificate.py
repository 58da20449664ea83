"""KKT residuals and singular values at the end of a run, against dense Jacobians."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from fairness_cases import DOUBLE, in_double, start, with_settings
from fcco_experiments.tasks.fairness.certificate import PairSlopes, certificate, condition
from fcco_experiments.tasks.fairness.training import FairnessTraining
from torch import Tensor

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


def test_pair_slopes_in_single_precision() -> None:
    positive, negative = torch.linspace(-1, 2, 700), torch.linspace(-2, 1, 900)
    slopes = PairSlopes.of(positive, negative, 1.0)
    exact = PairSlopes.of(positive.double(), negative.double(), 1.0)
    assert slopes.value.dtype == torch.float32
    torch.testing.assert_close(slopes.value.double(), exact.value, rtol=1e-6, atol=0)
    torch.testing.assert_close(slopes.negative.double(), exact.negative, rtol=1e-5, atol=0)


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


CASES = [
    ("sonex", {}),
    ("sox", {}),
    ("icppac", {}),  # prices both sides of a gap
    ("alexr", {"objective": "bce"}),
    ("erm", {"objective": "bce", "score": "unbounded", "tolerance": 1e-3}),
    ("sonex", {"score": "unbounded", "pair_temperature": 0.5, "tolerance": 1e-3}),
    ("sonex", {"thresholds": (0.3, 0.7), "threshold_kind": "quantile"}),
]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_kkt_residuals_with_the_methods_own_multipliers(name: str, changes: dict[str, Any]) -> None:
    run = trained(name, **changes)
    row, known = certificate(run), dense(run)
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


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_kkt_residuals_with_the_best_multipliers(name: str, changes: dict[str, Any]) -> None:
    run = trained(name, **changes)
    row, known = certificate(run), dense(run)
    excess = np.abs(known["gap"]) - run.config.tolerance
    rows = np.sign(known["gap"])[:, None] * known["jacobian"]
    active = excess >= -1e-3
    assert active.any()  # scipy crashes without columns
    nu = np.zeros(run.count)
    nu[active], length = scipy.optimize.nnls(rows[active].T, -known["gradient"])
    assert row["kkt_best_stationarity"] == pytest.approx(length, rel=1e-6)
    assert row["kkt_best_complementarity"] == pytest.approx(np.abs(nu * excess).max(), abs=1e-6)
    np.testing.assert_allclose(row["best_multipliers"], nu, rtol=1e-3, atol=1e-5)
    assert row["kkt_best_stationarity"] <= np.linalg.norm(known["gradient"]) + 1e-12


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_singular_values_are_those_of_the_dense_jacobian(
    name: str, changes: dict[str, Any]
) -> None:
    run = trained(name, **changes)
    row, known = condition(run), dense(run)
    violated = np.abs(known["gap"]) > run.config.tolerance
    assert violated.sum() > 0
    values = np.linalg.svd(known["jacobian"], compute_uv=False)
    own = np.linalg.svd(known["jacobian"][violated], compute_uv=False)
    assert row["singular_value"] == pytest.approx(values[-1], rel=1e-5, abs=1e-8)
    assert row["singular_value_violated"] == pytest.approx(own[-1], rel=1e-5, abs=1e-8)
    assert certificate(run)["singular_value"] == row["singular_value"]


def test_only_some_violated() -> None:
    run = trained("sonex", tolerance=0.05)
    violated = np.abs(dense(run)["gap"]) > 0.05
    assert 0 < violated.sum() < run.count
    row = condition(run)
    assert row["singular_value_violated"] > row["singular_value"] > 0


def test_a_feasible_point_has_no_singular_value() -> None:
    run = start("sonex", tolerance=1.0)
    assert condition(run) == {}
    assert "singular_value" not in run.evaluate()
    end = certificate(run)
    assert "singular_value" not in end and end["kkt_feasibility"] == 0.0


def test_evaluation_looks_at_the_jacobian_at_the_start_and_after_each_quarter() -> None:
    run = start("sonex", epochs=2, batch=16)
    assert run.total_steps == 16
    with_value = []
    for step in range(17):
        if step:
            run.step()
        if "singular_value" in run.evaluate():
            with_value.append(step)
    assert with_value == [0, 4, 8, 12, 16]
    assert "singular_value" not in start("erm").evaluate()


def test_the_first_evaluation_has_the_thresholds_of_the_quantiles() -> None:
    """Not the shares themselves."""
    run = start("sonex", thresholds=(0.02, 0.7), threshold_kind="quantile")
    row = run.evaluate()
    scores = run.model.body(run.train.inputs).detach()
    scores = (scores - scores.mean()) / scores.std(correction=0)
    expected = np.quantile(scores.numpy(), (0.02, 0.7))
    np.testing.assert_allclose(run.model.thresholds, expected, atol=1e-5)
    values = np.linalg.svd(dense(in_double(run))["jacobian"], compute_uv=False)
    assert row["singular_value"] == pytest.approx(values[-1], rel=1e-2)
