"""Scores that are normalised over the population, and draws from cells."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from fairness_cases import DOUBLE, in_double, outputs, parts, start
from fcco_experiments.tasks.fairness.cells import Cells
from fcco_experiments.tasks.fairness.rates import Measure
from fcco_experiments.tasks.fairness.score import Scorer, network
from torch import Tensor, nn

COUNTS = (2, 3, 4, 6)
LENGTH = math.lcm(*COUNTS)


def population() -> tuple[Tensor, Tensor]:
    """All rows in order of their cells, and the same with each cell repeated to one length."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(COUNTS), 3, generator=generator, dtype=DOUBLE)
    cells = [cell + k for k, cell in enumerate(rows.split(COUNTS))]
    repeated = [cell.repeat(LENGTH // len(cell), 1) for cell in cells]
    return torch.cat(cells), torch.cat(repeated)


def scorer(prior: tuple[float, ...] = COUNTS, normalised: bool = True, **options) -> Scorer:
    torch.manual_seed(0)
    share = torch.tensor(prior, dtype=DOUBLE) / sum(prior)
    thresholds = options.pop("thresholds", (-1.0, 0.0, 1.0))
    return Scorer(network(3, (6,)), share, normalised, thresholds, **options).double()


# Scores.


def test_statistics_of_an_even_batch_are_those_of_the_population() -> None:
    rows, batch = population()
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


def test_the_plain_statistics_of_the_batch_would_be_others() -> None:
    _, batch = population()
    even = scorer((1, 1, 1, 1))
    output = even.body(batch).detach()
    plain = (output - output.mean()) / output.std(correction=0)
    torch.testing.assert_close(even(batch), plain, atol=1e-12, rtol=0)
    assert (scorer()(batch) - plain).abs().max() > 0.1


def test_gradient_flows_through_the_statistics() -> None:
    """Against central differences along random directions."""
    rows, batch = population()
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


def test_unbounded_scores_are_the_output() -> None:
    rows, batch = population()
    model = scorer(normalised=False)
    model.calibrate(rows)
    for mode in (True, False):
        model.train(mode)
        torch.testing.assert_close(model(batch), model.body(batch), atol=0, rtol=0)


def test_equal_scores_at_the_start_give_numbers() -> None:
    _, batch = population()
    model = scorer()
    last = model.body[-2]  # type: ignore[index]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    scores = model(batch)
    assert bool(scores.isfinite().all())
    scores.square().sum().backward()
    assert bool(model.calibrate(batch).isfinite().all())


def test_quantile_thresholds_are_the_quantiles_of_the_scores() -> None:
    rows, _ = population()
    shares = (0.1, 0.5, 0.85)
    for normalised in (True, False):
        model = scorer(normalised=normalised, thresholds=shares, quantiles=True)
        scores = model.calibrate(rows).numpy()
        # The shares are kept in float32.
        np.testing.assert_allclose(model.thresholds, np.quantile(scores, shares), atol=1e-6)


@pytest.mark.parametrize("quantiles", [True, False])
@pytest.mark.parametrize("normalised", [True, False])
def test_normalised_rates_do_not_see_the_scale(quantiles: bool, normalised: bool) -> None:
    rows, batch = population()
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


def test_network_in_numpy() -> None:
    run = in_double(start("erm", hidden=(7, 4)))
    sizes = [tuple(p.shape) for p in run.model.parameters()]
    assert sizes == [(7, 4), (7,), (4, 7), (4,), (1, 4), (1,)]
    output = run.model.body(run.train.inputs).detach()
    np.testing.assert_allclose(output, outputs(run, "train"), atol=1e-12)


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
    rows = cells.draw(3000, 5, torch.Generator().manual_seed(4))
    assert rows.shape == (3000, 20)
    for cell, (begin, count) in enumerate(zip(cells.starts, cells.counts, strict=True)):
        own = rows.view(3000, 4, 5)[:, cell].flatten() - begin
        assert own.min() == 0 and own.max() == count - 1
        seen = torch.bincount(own, minlength=int(count)).numpy()
        assert scipy.stats.chisquare(seen).pvalue > 1e-3
    again = cells.draw(3000, 5, torch.Generator().manual_seed(4))
    assert rows.equal(again)
    assert not rows.equal(cells.draw(3000, 5, torch.Generator().manual_seed(5)))
    repeated = (rows.view(3000, 4, 5).diff(dim=2) == 0).any()
    assert bool(repeated)  # with replacement: samples of a batch are independent


@pytest.mark.parametrize(("label", "group"), [([0, 1, 0], [0, 0, 1]), ([1, 1, 0], [0, 1, 1])])
def test_an_empty_cell_is_refused(label: list[int], group: list[int]) -> None:
    with pytest.raises(ValueError, match=r"`adult: train` needs .*both groups.*\[\d, \d, \d, \d\]"):
        Cells.of("adult: train", np.zeros((3, 2)), label, group)
