"""Figures against brute force and scipy; loss and rates of a batch against all of the data."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from fairness_cases import DOUBLE, config, sigmoid
from fcco_experiments.tasks.fairness.figures import auc, gap_floor, largest_gap, share_inside
from fcco_experiments.tasks.fairness.rates import Measure, gaps, pairs, signed
from torch import Tensor


def with_ties(seed: int, *sizes: int) -> list[Tensor]:
    """Scores of which many are equal, within a sample and between samples."""
    random = np.random.default_rng(seed)
    draws = [random.integers(-4, 5, size) / 2.0 + k / 2 for k, size in enumerate(sizes)]
    return [torch.from_numpy(draw) for draw in draws]


# Figures.


@pytest.mark.parametrize("seed", range(4))
def test_auc_counts_pairs_and_half_of_the_ties(seed: int) -> None:
    negative, positive = with_ties(seed, 31, 17)
    won = tied = 0
    for p, n in itertools.product(positive.tolist(), negative.tolist()):
        won += p > n
        tied += p == n
    assert tied > 20
    assert auc(positive, negative).item() == pytest.approx((won + tied / 2) / (31 * 17), abs=1e-12)
    assert auc(negative, positive).item() == pytest.approx(
        1 - auc(positive, negative).item(), abs=1e-12
    )


@pytest.mark.parametrize("seed", range(4))
def test_largest_gap_is_the_two_sample_kolmogorov_statistic(seed: int) -> None:
    first, second = with_ties(seed, 23, 41)
    brute = 0.0
    for tau in np.arange(-10, 10, 0.25):  # at the scores, between them and beyond
        above = [np.mean(part.numpy() > tau) for part in (first, second)]
        brute = max(brute, abs(above[0] - above[1]))
    known, _ = scipy.stats.ks_2samp(first.numpy(), second.numpy(), method="asymp")
    assert largest_gap(first, second).item() == pytest.approx(brute, abs=1e-12)
    assert largest_gap(second, first).item() == pytest.approx(known, abs=1e-12)


def test_largest_gap_of_equal_and_of_separate_samples() -> None:
    sample = torch.tensor([0.0, 1.0, 1.0, 3.0])
    assert largest_gap(sample, sample.flip(0)).item() == 0.0
    assert largest_gap(sample, sample + 4).item() == 1.0
    assert largest_gap(sample + 4, sample).item() == 1.0


def test_gap_floor_is_the_mean_of_kolmogorovs_distribution() -> None:
    for first, second in ((590, 3256), (50, 50)):
        effective = first * second / (first + second)
        expected = float(scipy.stats.kstwobign.mean()) / math.sqrt(effective)  # type: ignore
        assert gap_floor(first, second) == pytest.approx(expected, rel=1e-6)


def test_gap_floor_is_what_equal_groups_show() -> None:
    first, second, draws = 400, 900, 2000
    random = np.random.default_rng(0)
    order = random.random((draws, first + second)).argsort(axis=1)
    step = np.where(order < first, 1 / first, -1 / second)  # walk along the sorted scores
    measured = np.abs(step.cumsum(axis=1)).max(axis=1).mean()
    assert measured == pytest.approx(gap_floor(first, second), rel=0.03)


def test_share_inside_counts_from_the_lowest_to_the_highest_threshold() -> None:
    scores = torch.tensor([-3.1, -3.0, -1.0, 0.0, 2.0, 2.5, 9.0])
    for thresholds in ([2.0, -3.0, 0.0], torch.tensor([0.0, 2.0, -3.0])):
        assert share_inside(scores, thresholds).item() == pytest.approx(4 / 7, abs=1e-12)
    assert share_inside(scores, [5.0, 8.0]).item() == 0.0


# Loss and rates: a batch is an unbiased sample of the population.

COUNTS = (2, 3, 1, 4)
LABELS = (0, 1, 0, 1)


def population() -> list[Tensor]:
    random = np.random.default_rng(3)
    return [torch.from_numpy(random.normal(size=size) + k / 3) for k, size in enumerate(COUNTS)]


def measure(objective: str, temperature: float = 0.3, pair_temperature: float = 0.7) -> Measure:
    prior = torch.tensor(COUNTS, dtype=DOUBLE) / sum(COUNTS)
    return Measure(prior, temperature, pair_temperature, objective)


def population_loss(objective: str, pair_temperature: float = 0.7) -> float:
    """Over all pairs, or all rows, whichever group they are of."""
    rows = [(s, LABELS[c]) for c, cell in enumerate(population()) for s in cell.tolist()]
    positive = [s for s, label in rows if label == 1]
    negative = [s for s, label in rows if label == 0]
    if objective == "auc":
        total = sum(sigmoid((p - n) / pair_temperature) for p in positive for n in negative)
        return -total / (len(positive) * len(negative))
    return float(np.mean([-math.log(sigmoid(s if y else -s)) for s, y in rows]))


def mean_loss(judge: Measure, cells: list[Tensor], per_cell: int) -> float:
    """Over all batches that can be drawn, with replacement."""
    draws = [list(itertools.product(cell.tolist(), repeat=per_cell)) for cell in cells]
    batches = [torch.tensor(batch, dtype=DOUBLE) for batch in itertools.product(*draws)]
    assert len(batches) == math.prod(len(cell) for cell in cells) ** per_cell
    return torch.stack([judge.loss(batch) for batch in batches]).mean().item()


@pytest.mark.parametrize("objective", ["auc", "bce"])
def test_loss_over_all_possible_batches_is_that_of_the_population(objective: str) -> None:
    found = mean_loss(measure(objective), population(), 1)
    assert found == pytest.approx(population_loss(objective), abs=1e-12)


@pytest.mark.parametrize("objective", ["auc", "bce"])
def test_loss_of_batches_with_two_samples_from_a_cell(objective: str) -> None:
    cells = [cell[:3] for cell in population()]  # the prior stays that of the whole cells
    found = mean_loss(measure(objective), cells, 2)
    assert found == pytest.approx(_weighted(objective, cells), abs=1e-12)


def _weighted(objective: str, cells: list[Tensor]) -> float:
    """The loss where cell c has the share COUNTS[c], with loops."""
    share = np.array(COUNTS) / sum(COUNTS)
    if objective == "bce":
        total = 0.0
        for p, label, cell in zip(share, LABELS, cells, strict=True):
            losses = [-math.log(sigmoid(s if label else -s)) for s in cell.tolist()]
            total += p * float(np.mean(losses))
        return total
    total = 0.0
    for a, b in itertools.product((1, 3), (0, 2)):
        of_pairs = [sigmoid((p - n) / 0.7) for p in cells[a].tolist() for n in cells[b].tolist()]
        total += share[a] * share[b] * float(np.mean(of_pairs))
    return -total / ((share[1] + share[3]) * (share[0] + share[2]))


def test_a_batch_with_equal_cells_needs_the_weights() -> None:
    """Without the prior the population's value would be missed, so the tests above would see it."""
    for objective in ("auc", "bce"):
        even = Measure(torch.full((4,), 0.25, dtype=DOUBLE), 0.3, 0.7, objective)
        found = mean_loss(even, population(), 1)
        assert found != pytest.approx(population_loss(objective), abs=1e-3)


def test_rates_over_all_possible_batches_are_those_of_the_cells() -> None:
    taus, cells, judge = [-0.5, 0.4], population(), measure("auc")
    batches = [torch.tensor(b, dtype=DOUBLE) for b in itertools.product(*map(Tensor.tolist, cells))]
    thresholds = torch.tensor(taus, dtype=DOUBLE)
    mean = torch.stack([judge.rates(b[:, None], thresholds) for b in batches]).mean(0)
    expected = [
        [sum(sigmoid((s - tau) / 0.3) for s in cell.tolist()) / len(cell) for tau in taus]
        for cell in cells
    ]
    np.testing.assert_allclose(mean, expected, atol=1e-12)
    np.testing.assert_allclose(judge.full_rates(cells, thresholds), expected, atol=1e-12)
    wide = torch.stack([cell[:1].expand(5) for cell in cells])
    np.testing.assert_allclose(
        judge.rates(wide, thresholds), judge.rates(wide[:, :1], thresholds), atol=1e-12
    )


def test_order_of_the_constraints_is_that_of_their_names() -> None:
    taus = (-1.0, 0.25, 2.0)
    names = config(thresholds=taus).constraint_names
    rates = torch.rand(4, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    rows = []
    for name in names:
        kind, _, _, tau = name.split(" ")
        label = {"TPR": 1, "FPR": 0}[kind]
        rows.append([rates[2 * group + label, taus.index(float(tau))] for group in (0, 1)])
    assert len(rows) == len(set(names)) == 6
    expected = np.array(rows)
    np.testing.assert_array_equal(pairs(rates), expected)
    np.testing.assert_array_equal(gaps(rates), expected[:, 0] - expected[:, 1])
    both = np.concatenate([expected @ [1, -1], expected @ [-1, 1]]) - 0.01
    np.testing.assert_allclose(signed(rates, 0.01), both, atol=1e-15)


def test_names_of_quantiles_say_so() -> None:
    names = config(thresholds=(0.25, 0.5), threshold_kind="quantile").constraint_names
    assert names[:2] == ("TPR gap at q0.25", "TPR gap at q0.5") and names[3] == "FPR gap at q0.5"
