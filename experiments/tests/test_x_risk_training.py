"""Figures against brute force, and the steps of a run."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from fcco_experiments.tasks.x_risk.training import (
    binary_figures,
    focal,
    list_figures,
    two_way_partial_auc,
)
from task_cases import one_thread, steps, weights  # noqa: F401 (one_thread is used by being here)
from x_risk_cases import BINARY, LISTS, training

from fcco import xrisk


def pairs(label: np.ndarray, scores: np.ndarray, min_tpr: float, max_fpr: float) -> float:
    """The lowest positives against the highest negatives."""
    low = sorted(s for s, y in zip(scores, label, strict=True) if y == 1)
    high = sorted((s for s, y in zip(scores, label, strict=True) if y == 0), reverse=True)
    low = low[: round((1 - min_tpr) * len(low))]
    high = high[: round(max_fpr * len(high))]
    return sum(p > n for p, n in itertools.product(low, high)) / (len(low) * len(high))


@pytest.mark.parametrize("min_tpr", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("max_fpr", [0.1, 0.5, 1.0])
def test_two_way_partial_auc_counts_pairs(min_tpr, max_fpr):
    random = np.random.default_rng(3)
    for shift in (-1.0, 0.0, 0.5, 2.0, 9.0):
        label = random.permutation(np.repeat([1, 0], [20, 30]))
        scores = random.standard_normal(50) + shift * label
        found = two_way_partial_auc(label, scores, min_tpr, max_fpr)
        assert found == pytest.approx(pairs(label, scores, min_tpr, max_fpr), abs=1e-12)


def test_two_way_partial_auc_of_tied_scores_is_that_of_a_straight_curve():
    label, scores = np.array([1, 1, 0, 0]), np.zeros(4)
    # The corner above 0.25 and left of 0.5 holds the triangle from (0.25, 0.25) to (0.5, 0.5).
    wanted = 0.25**2 / 2 / (0.75 * 0.5)
    assert two_way_partial_auc(label, scores, 0.25, 0.5) == pytest.approx(wanted)


def test_ndcg_by_hand():
    relevance = np.array([2.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 3.0])
    query = np.array([0, 0, 0, 1, 1, 2, 2, 3])  # the last two queries do not count
    scores = np.array([0.1, 0.9, 0.5, 0.2, 0.7, 0.0, 1.0, 0.0])
    first = (1 / math.log2(3) + 3 / math.log2(4)) / (3 + 1 / math.log2(3))
    second = 1 / math.log2(3)
    found = list_figures("val", relevance, scores, query, 0)
    assert found["val_ndcg"] == found["val_ndcg_all"] == pytest.approx((first + second) / 2)
    nothing = list_figures("val", np.zeros(8), scores, query, 0)
    assert math.isnan(nothing["val_ndcg"])
    top = list_figures("val", relevance, scores, query, 1)
    assert top["val_ndcg"] == 0 and top["val_ndcg_all"] == found["val_ndcg"]


def test_scores_that_are_not_finite_have_no_figures():
    label, scores = np.array([1.0, 0.0, 1.0]), np.array([0.0, math.inf, 1.0])
    assert all(map(math.isnan, binary_figures("val", label, scores, 0.5, 0.3).values()))
    query = np.zeros(3, dtype=int)
    assert all(map(math.isnan, list_figures("val", label, scores, query, 2).values()))


def test_focal_loss_by_its_definition():
    scores, label = torch.tensor([0.3, -1.2, 2.0]), torch.tensor([1.0, 1.0, 0.0])
    right = torch.where(label == 1, scores.sigmoid(), 1 - scores.sigmoid())
    torch.testing.assert_close(focal(scores, label, 3.0), -((1 - right) ** 3) * right.log())


@pytest.mark.parametrize("word", [*BINARY, *LISTS])
def test_each_method_raises_its_figure(word):
    key = {"bce": "train_auc", "focal": "train_auc"}.get(word, f"train_{word}")
    key = "train_ndcg" if word in LISTS else key
    whole = training(word)
    before, total = whole.evaluate()[key], whole.steps_per_epoch * 4
    assert word in ("bce", "focal", "pointwise") or 2 < whole.warm_steps < total - 5
    assert steps(whole, 4 * total).evaluate()[key] > before


def test_the_first_steps_are_those_of_cross_entropy():
    risk, plain = training("ap"), training("bce")
    assert torch.equal(
        weights(steps(risk, risk.warm_steps)), weights(steps(plain, risk.warm_steps))
    )
    assert not torch.equal(weights(steps(risk, 1)), weights(steps(plain, 1)))


def test_batches_have_half_positives_and_the_library_gets_them(monkeypatch):
    run, seen = training("ap", warm=0.0), []
    real = xrisk.AveragePrecision.forward

    def forward(self, scores, label, index):
        seen.append((label.clone(), index.clone()))
        return real(self, scores, label, index)

    monkeypatch.setattr(xrisk.AveragePrecision, "forward", forward)
    steps(run, 3)
    train = run.parts["train"].label
    for label, index in seen:
        assert label.sum() == 16  # there are 16 positives in all
        assert torch.equal(train[index].float(), label)
    assert len(seen) == 3


def test_batches_of_lists_hold_whole_short_lists():
    run = training("ndcg", warm=0.0)
    _, (places,) = run.batches.own.draw()
    query = run.parts["train"].group[places]
    assert torch.bincount(query).unique().tolist() == [0, 8]
    assert len(set(places.tolist())) == len(places) == 40
