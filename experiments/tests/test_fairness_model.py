"""Cells, scores, rates and figures against brute force, NumPy and scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from fairness_cases import DOUBLE, config, parts, sigmoid
from fcco_experiments.tasks.fairness.model import (
    CellBatches,
    Cells,
    Measure,
    Scorer,
    auc,
    excess_gap,
    gap_floor,
    gaps,
    largest_gap,
    network,
    pairs,
    share_inside,
    signed,
)
from torch import Tensor, nn


def with_ties(seed: int, *sizes: int) -> list[Tensor]:
    """Scores of which many are equal, within a sample and between samples."""
    random = np.random.default_rng(seed)
    draws = [random.integers(-4, 5, size) / 2.0 + k / 2 for k, size in enumerate(sizes)]
    return [torch.from_numpy(draw) for draw in draws]


# Figures.


@pytest.mark.parametrize("seed", range(2))
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


@pytest.mark.parametrize("seed", range(2))
def test_largest_gap_is_the_two_sample_kolmogorov_statistic(seed: int) -> None:
    first, second = with_ties(seed, 23, 41)
    brute = 0.0
    for tau in np.arange(-10, 10, 0.25):  # at the scores, between them and beyond
        above = [np.mean(part.numpy() > tau) for part in (first, second)]
        brute = max(brute, abs(above[0] - above[1]))
    known, _ = scipy.stats.ks_2samp(first.numpy(), second.numpy(), method="asymp")
    assert largest_gap(first, second).item() == pytest.approx(brute, abs=1e-12)
    assert largest_gap(second, first).item() == pytest.approx(known, abs=1e-12)


def test_gap_floor_is_the_mean_of_kolmogorovs_distribution() -> None:
    for first, second in ((590, 3256), (50, 50)):
        effective = first * second / (first + second)
        expected = float(scipy.stats.kstwobign.mean()) / math.sqrt(effective)  # type: ignore
        assert gap_floor(first, second) == pytest.approx(expected, rel=1e-6)


def test_the_gap_beyond_chance_is_what_no_sampling_noise_explains() -> None:
    gaps_ = torch.tensor([0.05, 0.04, 0.01, 0.5], dtype=DOUBLE)
    expected = [math.sqrt(max(g**2 - 0.04**2, 0)) for g in (0.05, 0.04, 0.01, 0.5)]
    np.testing.assert_allclose(excess_gap(gaps_, 0.04), expected, atol=1e-12)


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


@pytest.mark.parametrize("per_cell", [1, 2])
@pytest.mark.parametrize("objective", ["auc", "bce"])
def test_loss_over_all_possible_batches_is_that_of_the_population(
    objective: str, per_cell: int
) -> None:
    found = mean_loss(measure(objective), population(), per_cell)
    assert found == pytest.approx(population_loss(objective), abs=1e-12)


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


SIZES = (2, 3, 4, 6)


def data_set() -> tuple[Tensor, Tensor]:
    """All rows in order of their cells, and the same with each cell repeated to one length."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(SIZES), 3, generator=generator, dtype=DOUBLE)
    cells = [cell + k for k, cell in enumerate(rows.split(SIZES))]
    repeated = [cell.repeat(math.lcm(*SIZES) // len(cell), 1) for cell in cells]
    return torch.cat(cells), torch.cat(repeated)


def scorer(normalised: bool = True, **options) -> Scorer:
    torch.manual_seed(0)
    share = torch.tensor(SIZES, dtype=DOUBLE) / sum(SIZES)
    thresholds = options.pop("thresholds", (-1.0, 0.0, 1.0))
    return Scorer(network(3, (6,)), share, normalised, thresholds, **options).double()


# Scores.


def test_statistics_of_an_even_batch_are_those_of_the_data_set() -> None:
    rows, batch = data_set()
    model = scorer()
    output = model.body(rows).detach().numpy()
    expected = (model.body(batch).detach().numpy() - output.mean()) / output.std()
    np.testing.assert_allclose(model(batch).detach(), expected, atol=1e-12)
    scores = model.calibrate(rows)
    assert scores.mean().item() == pytest.approx(0, abs=1e-12)
    assert scores.square().mean().item() == pytest.approx(1, abs=1e-12)
    model.eval()
    np.testing.assert_allclose(model(batch).detach(), expected, atol=1e-12)
    assert model.mean.item() == pytest.approx(output.mean(), abs=1e-12)
    assert model.deviation.item() == pytest.approx(output.std(), abs=1e-12)


def test_gradient_flows_through_the_statistics() -> None:
    """Against central differences along random directions."""
    rows, batch = data_set()
    model = scorer()
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(len(batch), generator=generator, dtype=DOUBLE)
    weight = weight + 3 * batch[:, 0]  # a function that the mean and the deviation matter for
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(weight @ model(batch), parameters)
    frozen = (model.body(batch) - model.body(rows).mean().detach()) / (
        model.body(rows).std(correction=0).detach()
    )
    without = torch.autograd.grad(weight @ frozen, parameters)
    for _ in range(3):
        move = [torch.randn(p.shape, generator=generator, dtype=DOUBLE) for p in parameters]
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, v in zip(parameters, move, strict=True):
                    p.add_(v, alpha=sign * 1e-6)
                values.append(weight @ model(batch))
                for p, v in zip(parameters, move, strict=True):
                    p.sub_(v, alpha=sign * 1e-6)
        slope = ((values[0] - values[1]) / 2e-6).item()
        along = [
            sum((g * v).sum().item() for g, v in zip(each, move, strict=True))
            for each in (gradient, without)
        ]
        assert along[0] == pytest.approx(slope, rel=1e-5, abs=1e-5)
        assert along[1] != pytest.approx(slope, rel=1e-2, abs=1e-2)


def test_equal_scores_at_the_start_give_numbers() -> None:
    _, batch = data_set()
    model = scorer()
    last = model.body[-2]  # type: ignore[index]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    scores = model(batch)
    assert bool(scores.isfinite().all())
    scores.square().sum().backward()
    assert bool(model.calibrate(batch).isfinite().all())


def test_quantile_thresholds_are_the_quantiles_of_the_scores() -> None:
    rows, _ = data_set()
    shares = (0.1, 0.5, 0.85)
    for normalised in (True, False):
        model = scorer(normalised=normalised, thresholds=shares, quantiles=True)
        scores = model.calibrate(rows).numpy()
        # The shares are kept in float32.
        np.testing.assert_allclose(model.thresholds, np.quantile(scores, shares), atol=1e-6)


@pytest.mark.parametrize("quantiles", [True, False])
@pytest.mark.parametrize("normalised", [True, False])
def test_normalised_rates_do_not_see_the_scale(quantiles: bool, normalised: bool) -> None:
    rows, batch = data_set()
    taus = (0.2, 0.5, 0.8) if quantiles else (-1.0, 0.0, 1.0)
    model = scorer(normalised=normalised, thresholds=taus, quantiles=quantiles)
    measure = Measure(model.prior, 0.2, 1.0, "auc")
    rates = []
    for _ in range(2):
        model.calibrate(rows)
        rates.append(measure.rates(model(batch).view(4, -1), model.thresholds))
        with torch.no_grad():
            model.body[-2].weight *= 10  # type: ignore[index, operator]
            model.body[-2].bias *= 10  # type: ignore[index, operator]
    change = (rates[0] - rates[1]).abs().max().item()
    assert change < 1e-10 if normalised else change > 0.01


# Cells.


def test_rows_are_sorted_by_cell_and_keep_their_order() -> None:
    label, group = [1, 0, 1, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1, 1]
    cells = Cells.of("test", np.arange(7)[:, None], label, group)
    assert cells.inputs[:, 0].tolist() == [3, 0, 4, 1, 6, 2, 5]
    assert cells.counts.tolist() == [1, 2, 2, 2] and cells.starts.tolist() == [0, 1, 3, 5]
    assert cells.prior.tolist() == pytest.approx([1 / 7, 2 / 7, 2 / 7, 2 / 7])
    assert cells.label.tolist() == [0, 1, 1, 0, 0, 1, 1] and len(cells) == 7
    assert [part.tolist() for part in cells.split(torch.arange(7))] == [[0], [1, 2], [3, 4], [5, 6]]


def test_draws_are_uniform_in_their_cells() -> None:
    cells = parts()["train"]
    asked = config(batch=20)
    batches = CellBatches(asked, 4, cells, copies=2)
    rows = torch.cat([batches.epoch(k).flatten(0, 1) for k in range(400)])
    number = len(rows)
    for cell, (begin, count) in enumerate(zip(cells.starts, cells.counts, strict=True)):
        own = rows.view(number, 4, 5)[:, cell].flatten() - begin
        assert own.min() == 0 and own.max() == count - 1
        seen = torch.bincount(own, minlength=int(count)).numpy()
        assert scipy.stats.chisquare(seen).pvalue > 1e-3
    again, other = (CellBatches(asked, seed, cells, copies=2) for seed in (4, 5))
    assert batches.epoch(3).equal(again.epoch(3)) and not batches.epoch(3).equal(other.epoch(3))
    assert not batches.epoch(3).equal(batches.epoch(4))
    assert batches.steps_per_epoch == math.ceil(len(cells) / 40)
    repeated = (rows.view(number, 4, 5).diff(dim=2) == 0).any()
    assert bool(repeated)  # with replacement: samples of a batch are independent


@pytest.mark.parametrize(("label", "group"), [([0, 1, 0], [0, 0, 1]), ([1, 1, 0], [0, 1, 1])])
def test_an_empty_cell_is_refused(label: list[int], group: list[int]) -> None:
    with pytest.raises(ValueError, match=r"`adult: train` needs .*both groups.*\[\d, \d, \d, \d\]"):
        Cells.of("adult: train", np.zeros((3, 2)), label, group)
