"""Constraints: the problems, what a run counts, and published figures beside optima."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fcco_experiments.data import Part

from studies import publish
from studies.constrained import bias, convex, peers, training
from studies.constrained.fairness import THRESHOLDS, RocFairness
from studies.constrained.problems import Schedule
from studies.untuned import constraints, tuned


@pytest.fixture
def fair() -> RocFairness:
    """A small problem whose label and group are related."""
    random = np.random.RandomState(0)
    group = random.randint(2, size=400)
    features = random.randn(400, 3) + group[:, None] * 0.5
    label = (features[:, 0] + random.randn(400) > 0.3).astype(np.int64)
    return RocFairness(Part(features, label, group), Schedule(60, 10, 1e-2), per_cell=8)


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
    pairs = problem.stated("pairs").measure(model, batch)[1].detach().numpy()
    np.testing.assert_allclose(pairs[:, 0] - pairs[:, 1], gaps, atol=1e-6)
    np.testing.assert_allclose(pairs[:7, 0], rates[0], atol=1e-6)


def test_the_gap_of_a_batch_is_too_large_and_the_tracked_one_is_not(fair):
    found = bias.measure(fair, (4, 64), steps=60)
    small, large = found["gap batch"]
    assert small > large > 0 and small > 2 * abs(found["gap tracked"][0])


def solve(problem, shift: float) -> float:
    """The optimum with limits looser by the shift, by cvxpy."""
    import cvxpy

    weights = cvxpy.Variable(problem.features)
    inputs = problem.inputs.double().numpy().reshape(-1, problem.features)
    limits = problem.limits.double().numpy() + shift
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


@pytest.mark.parametrize("name, kind", [
    ("convex", convex.GroupLosses), ("sampled", convex.Segments)
])  # fmt: skip
def test_published_objectives_are_above_the_optimum_at_their_violation(name, kind):
    pytest.importorskip("cvxpy")
    for method in ("fcco", "tuned"):
        row = publish.table("untuned")["constraints"][name][method]
        optimum = solve(kind(), row["violation"])
        assert optimum <= row["objective"] <= 1.06 * optimum


@pytest.mark.parametrize("kind", [convex.GroupLosses, convex.Segments])
def test_convex_batches_estimate_the_full_values(kind):
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


@pytest.mark.parametrize("name", ["fair", "convex", "sampled"])
def test_each_method_counts_its_gradients(name, fair):
    kinds = {"convex": convex.GroupLosses, "sampled": convex.Segments}
    problem = fair if name == "fair" else kinds[name]()
    chosen = tuned.CONSTRAINTS["compas" if name == "fair" else name]
    for method, setting in ({"fcco": {}} | constraints.installed() | dict([chosen])).items():
        if not constraints.can_run(method):
            continue
        watched, counted = problem.shifted(0.0), []

        def model(counted=counted):
            own = problem.model()
            own.register_forward_hook(lambda *_: counted.append(torch.is_grad_enabled()))
            return own

        watched.model = model
        watched.schedule = replace(problem.schedule, evaluations=40, every=20)
        builder = {**constraints.OWN, **peers.methods()}[method]
        training.train(watched, builder, setting, seed=0)
        assert counted.count(True) == 40, method
