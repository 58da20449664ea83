"""Cells, scores, rates and figures against brute force, NumPy and scipy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from fairness_cases import DOUBLE, config, parts, sigmoid
from fcco_experiments.tasks.fairness.model import (
    CellBatches,
    Cells,
    Scorer,
    auc,
    both_sides,
    excess_gap,
    gap_floor,
    gaps,
    largest_gap,
    pairs,
)
from torch import Tensor


def with_ties(seed: int, *sizes: int) -> list[Tensor]:
    """Scores of which many are equal, within a sample and between samples."""
    random = np.random.default_rng(seed)
    draws = [random.integers(-4, 5, size) / 2.0 + k / 2 for k, size in enumerate(sizes)]
    return [torch.from_numpy(draw) for draw in draws]


@pytest.mark.parametrize("seed", range(2))
def test_auc_counts_pairs_and_half_of_the_ties(seed: int) -> None:
    negative, positive = with_ties(seed, 31, 17)
    every = list(itertools.product(positive.tolist(), negative.tolist()))
    won, tied = sum(p > n for p, n in every), sum(p == n for p, n in every)
    assert tied > 20
    assert auc(positive, negative).item() == pytest.approx((won + tied / 2) / (31 * 17), abs=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_largest_gap_is_the_two_sample_kolmogorov_statistic(seed: int) -> None:
    first, second = with_ties(seed, 23, 41)
    known, _ = scipy.stats.ks_2samp(first.numpy(), second.numpy(), method="asymp")
    assert largest_gap(first, second).item() == pytest.approx(known, abs=1e-12)


def test_the_gap_by_chance_is_the_mean_of_kolmogorovs_distribution() -> None:
    for first, second in ((590, 3256), (50, 50)):
        effective = first * second / (first + second)
        expected = float(scipy.stats.kstwobign.mean()) / math.sqrt(effective)  # type: ignore
        assert gap_floor(first, second) == pytest.approx(expected, rel=1e-6)
    found = excess_gap(torch.tensor([0.05, 0.04, 0.01], dtype=DOUBLE), 0.04)
    np.testing.assert_allclose(found, [0.03, 0, 0], atol=1e-9)


# A batch is an unbiased sample of the population.

COUNTS = (2, 3, 1, 4)


def population() -> list[Tensor]:
    random = np.random.default_rng(3)
    return [torch.from_numpy(random.normal(size=size) + k / 3) for k, size in enumerate(COUNTS)]


def scorer(counts: tuple[int, ...] = COUNTS, **changes: Any) -> Scorer:
    """A network of three inputs, trained on cells of these sizes."""
    asked = config(temperature=0.3, hidden=(6,), **changes)
    cells = Cells(torch.zeros(sum(counts), 3), torch.tensor(counts))
    model = Scorer(asked, 0, cells).double()
    model.prior = torch.tensor(counts, dtype=DOUBLE) / sum(counts)
    return model


@pytest.mark.parametrize("per_cell", [1, 2])
def test_loss_over_all_possible_batches_is_that_of_the_population(per_cell: int) -> None:
    cells, model = [cell.tolist() for cell in population()], scorer()
    draws = [itertools.product(cell, repeat=per_cell) for cell in cells]
    batches = torch.tensor(list(itertools.product(*draws)), dtype=DOUBLE)
    found = torch.stack([model.loss(batch) for batch in batches]).mean().item()
    positive, negative = np.array(cells[1] + cells[3]), np.array(cells[0] + cells[2])
    known = -sigmoid(positive[:, None] - negative).mean()
    assert found == pytest.approx(known, abs=1e-12)


def test_rates_over_all_possible_batches_are_those_of_the_cells() -> None:
    cells, model = population(), scorer()
    batches = torch.tensor(list(itertools.product(*map(Tensor.tolist, cells))), dtype=DOUBLE)
    taus = np.array(model.config.thresholds)
    known = np.stack([sigmoid((cell.numpy()[:, None] - taus) / 0.3).mean(0) for cell in cells])
    mean = torch.stack([model.rates(batch[:, None]) for batch in batches]).mean(0)
    np.testing.assert_allclose(mean, known, atol=1e-12)
    np.testing.assert_allclose(model.full_rates(cells), known, atol=1e-12)


def test_constraints_are_those_of_the_positives_then_those_of_the_negatives() -> None:
    rates = torch.rand(4, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    expected = np.array([
        [rates[2 * group + label, tau] for group in (0, 1)] for label in (1, 0) for tau in range(3)
    ])  # fmt: skip
    np.testing.assert_array_equal(pairs(rates), expected)
    np.testing.assert_array_equal(gaps(rates), expected @ [1, -1])
    np.testing.assert_array_equal(
        both_sides(rates), np.concatenate([expected @ [1, -1], expected @ [-1, 1]])
    )


# Scores.

SIZES = (2, 3, 4, 6)


def data_set() -> tuple[Tensor, Tensor]:
    """All rows in order of their cells, and the same with each cell repeated to one length."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(SIZES), 3, generator=generator, dtype=DOUBLE)
    cells = [cell + k for k, cell in enumerate(rows.split(SIZES))]
    repeated = [cell.repeat(math.lcm(*SIZES) // len(cell), 1) for cell in cells]
    return torch.cat(cells), torch.cat(repeated)


def test_statistics_of_an_even_batch_are_those_of_the_data_set() -> None:
    rows, batch = data_set()
    model = scorer(SIZES)
    output, other = model.body(rows).detach(), model.body(batch).detach()
    expected = (other.numpy() - output.numpy().mean()) / output.numpy().std()
    np.testing.assert_allclose(model(batch).detach().flatten(), expected, atol=1e-12)
    scores = model.scores({"train": output, "test": other})["test"]
    np.testing.assert_allclose(scores, expected, atol=1e-12)
    plain = scorer(SIZES, score="unbounded")
    assert plain(batch).flatten().equal(plain.body(batch))


def test_gradient_flows_through_the_statistics() -> None:
    """Against central differences along random directions."""
    _, batch = data_set()
    model = scorer(SIZES)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(len(batch), generator=generator, dtype=DOUBLE) + 3 * batch[:, 0]
    names = [name for name, _ in model.named_parameters()]
    point = {name: p.detach() for name, p in model.named_parameters()}

    def value(move: dict[str, Tensor], size: float) -> float:
        moved = {name: point[name] + size * move[name] for name in names}
        return (weight @ torch.func.functional_call(model, moved, (batch,)).flatten()).item()

    gradient = torch.autograd.grad(weight @ model(batch).flatten(), list(model.parameters()))
    for _ in range(3):
        move = {n: torch.randn(point[n].shape, generator=generator, dtype=DOUBLE) for n in names}
        slope = (value(move, 1e-6) - value(move, -1e-6)) / 2e-6
        along = sum((g * move[n]).sum().item() for n, g in zip(names, gradient, strict=True))
        assert along == pytest.approx(slope, rel=1e-5, abs=1e-5)


def test_equal_scores_at_the_start_give_numbers() -> None:
    _, batch = data_set()
    model = scorer(SIZES)
    last: Any = model.body[-2]
    torch.nn.init.zeros_(last.weight)
    assert bool(model(batch).isfinite().all())
    assert bool(model.scores({"train": model.body(batch)})["train"].isfinite().all())


# Cells.


def test_rows_are_sorted_by_cell_and_keep_their_order() -> None:
    label, group = [1, 0, 1, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1, 1]
    cells = Cells.of("test", np.arange(7)[:, None], label, group)
    assert cells.inputs[:, 0].tolist() == [3, 0, 4, 1, 6, 2, 5]
    assert cells.prior.tolist() == pytest.approx([1 / 7, 2 / 7, 2 / 7, 2 / 7])
    assert [part.tolist() for part in cells.split(torch.arange(7))] == [[0], [1, 2], [3, 4], [5, 6]]
    for label, group in (([0, 1, 0], [0, 0, 1]), ([1, 1, 0], [0, 1, 1])):
        with pytest.raises(ValueError, match=r"`adult` needs .*both groups.*\[\d, \d, \d, \d\]"):
            Cells.of("adult", np.zeros((3, 2)), label, group)


def test_draws_are_uniform_in_their_cells() -> None:
    cells, asked = parts()["train"], config(batch=20)
    batches = CellBatches(asked, 4, cells, copies=2)
    rows = torch.cat([batches.epoch(k).flatten(0, 1) for k in range(400)]).view(-1, 4, 5)
    start = 0
    for cell, count in enumerate(cells.counts.tolist()):
        own = rows[:, cell].flatten() - start
        assert own.min() == 0 and own.max() == count - 1
        assert scipy.stats.chisquare(torch.bincount(own, minlength=count).numpy()).pvalue > 1e-3
        start += count
    again, other = (CellBatches(asked, seed, cells, copies=2) for seed in (4, 5))
    assert batches.epoch(3).equal(again.epoch(3)) and not batches.epoch(3).equal(other.epoch(3))
    assert not batches.epoch(3).equal(batches.epoch(4))
    assert batches.steps_per_epoch == math.ceil(len(cells) / 40)
    assert bool((rows.diff(dim=2) == 0).any())  # with replacement: samples are independent
