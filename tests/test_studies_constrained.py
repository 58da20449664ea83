"""The comparison with Cooper and humancompatible-train: its problems, counts and choices."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from fcco_experiments.data import Part

from studies.constrained import __main__ as command
from studies.constrained import convex, grids, report, training
from studies.constrained.fairness import THRESHOLDS, RocFairness
from studies.constrained.problems import Schedule
from studies.constrained.training import Trace


@pytest.fixture
def fair() -> RocFairness:
    """A small problem whose label and group are related."""
    random = np.random.RandomState(0)
    group = random.randint(2, size=400)
    features = random.randn(400, 3) + group[:, None] * 0.5
    label = (features[:, 0] + random.randn(400) > 0.3).astype(np.int64)
    return RocFairness(Part(features, label, group), Schedule(60, 10, 1e-2), per_cell=8)


def trace(objective, violation, every=10) -> Trace:
    done = [every * (k + 1) for k in range(len(objective))]
    return Trace(done, list(objective), list(violation), 1.0, 0.0)


def loops(scores, rows_of_cell, targets):
    """Losses, gaps and rates with loops; cells: (group 0, label 0), (0, 1), (1, 0), (1, 1)."""
    rates = np.zeros((4, len(THRESHOLDS)))
    losses = np.zeros(4)
    for cell, rows in enumerate(rows_of_cell):
        for row in rows:
            s, y = scores[row], targets[row]
            losses[cell] += (np.logaddexp(0, s) - y * s) / len(rows)
            for k, threshold in enumerate(THRESHOLDS):
                rates[cell, k] += 1 / (1 + np.exp(threshold - s)) / len(rows)
    gaps = [rates[y, k] - rates[2 + y, k] for y in (0, 1) for k in range(len(THRESHOLDS))]
    return losses, np.array(gaps), rates


def test_fairness_values_equal_loops(fair):
    model, problem = fair.model(), fair.shifted(0.002)
    batch = problem.batches(3)()
    assert batch.targets.tolist() == 8 * [0.0] + 8 * [1.0] + 8 * [0.0] + 8 * [1.0]
    scores = model(batch.inputs).detach().double().numpy()
    cells = [range(8 * k, 8 * k + 8) for k in range(4)]
    losses, gaps, rates = loops(scores, cells, batch.targets.numpy())
    loss, signed = problem.measure(model, batch)
    assert loss.item() == pytest.approx(float(problem.prior.double().numpy() @ losses), rel=1e-5)
    np.testing.assert_allclose(signed.detach(), np.r_[gaps, -gaps] - 0.007, atol=1e-6)
    absolute = problem.stated("absolute").measure(model, batch)[1]
    np.testing.assert_allclose(absolute.detach(), abs(gaps) - 0.007, atol=1e-6)
    pairs = problem.stated("pairs").measure(model, batch)[1].detach().numpy()
    np.testing.assert_allclose(pairs[:, 0] - pairs[:, 1], gaps, atol=1e-6)
    np.testing.assert_allclose(pairs[:7, 0], rates[0], atol=1e-6)


def solve(problem) -> float:
    """The optimum with the limits as stated, by cvxpy."""
    import cvxpy

    weights = cvxpy.Variable(problem.features)
    inputs = problem.inputs.double().numpy().reshape(-1, problem.features)
    limits = problem.limits.double().numpy()
    if isinstance(problem, convex.Segments):
        means, targets = problem.means.double().numpy(), problem.targets.numpy().reshape(-1)
        objective = cvxpy.sum_squares(inputs @ weights - targets) / (2 * len(targets))
        kept = [means @ weights <= limits]
    else:
        margins = cvxpy.multiply(np.where(problem.targets.numpy() > 0, 1, -1), inputs @ weights)
        losses, first = cvxpy.logistic(-margins), problem.population
        starts = range(first, len(inputs), problem.samples)
        groups = [cvxpy.sum(losses[k : k + problem.samples]) / problem.samples for k in starts]
        objective = cvxpy.sum(losses[:first]) / first
        kept = [group <= limit for group, limit in zip(groups, limits, strict=True)]
    task = cvxpy.Problem(cvxpy.Minimize(objective), kept)
    task.solve(solver=cvxpy.CLARABEL)
    return float(task.value)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", [convex.GroupLosses, convex.Segments])
def test_convex_batches_estimate_the_full_values_and_optima_are_stored(kind):
    problem = kind().shifted(-0.01)
    torch.manual_seed(0)
    model = problem.model()
    draw, size = problem.batches(0), problem.num_constraints
    total, seen, losses = torch.zeros(size), torch.zeros(size), []
    with torch.no_grad():
        for _ in range(400):
            batch = draw()
            loss, values = problem.measure(model, batch)
            index = torch.arange(size) if batch.index is None else batch.index
            assert len(index.unique()) == len(index)
            total.index_add_(0, index, values + problem.shift)
            seen.index_add_(0, index, torch.ones(len(index)))
            losses.append(loss.item())
    score, worst = problem.score(model), int((total / seen).argmax())
    assert np.mean(losses) == pytest.approx(score.objective, rel=0.03)
    assert (total / seen)[worst].item() == pytest.approx(score.violation, abs=0.06)
    pytest.importorskip("cvxpy")
    assert problem.optimum == pytest.approx(solve(problem), abs=1e-5)


def test_result_goes_along_shifted_limits():
    runs = {
        0.0: [trace([2.0], [0.012]), trace([2.0], [0.008])],
        -0.004: [trace([3.0], [0.008]), trace([2.5], [0.004])],
        0.004: [trace([1.0], [0.016]), trace([1.0], [0.012])],
    }
    result = report.Result("SONEX", {}, runs)
    assert result.at(0.01) == pytest.approx([2.0, 2.0])  # the mean violation is 0.01 as it is
    assert result.at(0.012) == pytest.approx([1.5, 1.5])  # half way to the looser limit
    assert result.at(0.008) == pytest.approx([2.5, 2.25])
    summary = result.summary(target=2.5)
    assert summary["violation"] == pytest.approx([0.01, 0.002])
    assert summary["at_0.005"] is None
    (_, row) = report.table({"SONEX": summary})
    assert row[:5] == ["SONEX", "2.0000 ± 0.0000", "+0.0100 ± 0.0020", "2.0000 ± 0.0000", "-"]


def short(name: str):
    problem = {"convex": convex.GroupLosses, "sampled": convex.Segments}[name]()
    problem.schedule = replace(problem.schedule, evaluations=40, every=20)
    return problem


@pytest.mark.parametrize("name", ["fair", "convex", "sampled"])
def test_each_side_runs_and_counts_its_gradients(name, fair):
    problem = fair.shifted(0.0) if name == "fair" else short(name)
    problem.schedule = replace(problem.schedule, evaluations=40, every=20)
    family = "fairness" if name == "fair" else name
    for method in set(grids.GRIDS[family]) & set(training.builders()):
        setting = grids.GRIDS[family][method][0]
        counted = []

        class Watched(type(problem)):  # type: ignore[misc]
            def measure(self, model, batch, counted=counted):
                counted.append(torch.is_grad_enabled())
                return super().measure(model, batch)

        watched = problem.shifted(0.0)
        watched.__class__ = Watched
        run = training.train(watched, method, setting, seed=0)
        assert run.evaluations[-1] == problem.schedule.evaluations, method
        gradients, warm_up = counted.count(True), setting.get("warm_up", 0)
        assert gradients + warm_up == problem.schedule.evaluations, method
        assert counted.count(False) <= run.extra_forwards * gradients + warm_up, method


def test_ours_less_each_peer_by_seeds_in_pairs():
    at = {"SONEX": [0.3, 0.4], "SONX": [0.5, 0.5], "Cooper x": [0.4, 0.6], "HCT y": []}
    found = report.against({
        name: {"seeds": values, "at_0.01": report.mean_and_error(values)}
        for name, values in at.items()
    })  # fmt: skip
    assert list(found) == ["Cooper x"]  # HCT never gets there
    mean, low, high = found["Cooper x"]
    assert mean == pytest.approx(-0.15) and high - low == pytest.approx(2 * 12.7062 * 0.05, 1e-4)


def test_quick_command_prints_json(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))  # that of this machine may have it
    monkeypatch.setitem(sys.modules, "cooper", None)  # as if it were not installed
    words = f"--quick --json --workers 1 --skip bias --problems adult convex --out {tmp_path}/runs"
    threads = torch.get_num_threads()
    command.main([*words.split(), "--methods", "SONEX", "SONX", "Cooper augmented"])
    torch.set_num_threads(threads)
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    assert set(found["problems"]) == {"convex"}
    assert "adult is left out" in found["left_out"][0] and "FCCO_DATA" in printed.err
    assert found["left_out"][1].startswith("Cooper is left out")
    assert found["left_out"][1] in printed.err
    assert set(found["problems"]["convex"]["methods"]) == {"SONEX", "SONX"}
    assert (tmp_path / "runs").read_text().count("\n") == 2 * 2
