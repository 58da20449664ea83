"""Runs of the group DRO task: batches, figures, options of training, state."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import namedtuple

import numpy as np
import pytest
import torch
from fcco_experiments.data.grouped import GroupedPart
from fcco_experiments.tasks.group_dro.training import (
    GroupDROTraining,
    figures,
    shown,
    shown_names,
)
from fcco_experiments.tasks.network import standardise
from group_dro_cases import METHODS, data, training
from task_cases import one_thread, steps, weights  # noqa: F401 (one_thread is used by being here)
from torch.nn.functional import cross_entropy

import fcco
from fcco.diagnostics import eigenvalues

# Batches.


Batch = namedtuple("Batch", "inputs label group")


def draws(run: GroupDROTraining, number: int) -> list[Batch]:
    """Batches with the label and the group of each sample, looked up by its row."""
    found = []
    for _ in range(number):
        inputs, (places,) = run.batches.draw()
        found.append(Batch(inputs, run.train.label[places], run.train.group[places]))
    return found


def test_a_batch_has_its_groups_with_equally_many_samples():
    values, parts = data()
    own, run = parts["train"], training("sonex")
    pairs = zip(values[own.rows].tolist(), own.label.tolist(), strict=True)
    label = {tuple(value): y for value, y in pairs}
    for batch in draws(run, 12):
        groups, counts = batch.group.unique(return_counts=True)
        assert len(groups) == 4 and counts.tolist() == [6] * 4
        assert [label[tuple(v)] for v in batch.inputs.tolist()] == batch.label.tolist()
    assert run.steps_per_epoch == math.ceil(len(own) / 24)


def test_uniform_batches_follow_the_sizes_of_the_groups():
    run = training("erm")
    found = draws(run, 300)
    counts = torch.bincount(torch.cat([batch.group for batch in found]), minlength=6).double()
    shares = torch.bincount(run.train.group).double() / len(run.train)
    torch.testing.assert_close(counts / counts.sum(), shares, atol=0.01, rtol=0)
    assert all(len(batch.label) == 24 for batch in found)


def test_samples_from_files_give_the_batches_of_memory_and_no_loader_draws_globally():
    """A resumed run makes its loader anew, and layers such as dropout must draw the same."""
    held, read, resumed = (training("sonex", one_by_one=each) for each in (False, True, True))
    state = torch.get_rng_state()
    steps(read, 9)
    read.evaluate()
    resumed.load_state_dict(copy.deepcopy(read.state_dict()))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights(steps(resumed, 11)), weights(steps(held, 20)))


# Figures.


def test_figures_against_loops():
    run = steps(training("sonex"), 5)
    row = run.evaluate()
    values, parts = data()
    for name, short in (("train", "train"), ("validation", "val"), ("test", "test")):
        own = parts[name]
        scores = run.model(values[own.rows]).detach().double()
        losses = [
            float(torch.logsumexp(s, 0) - s[y]) for s, y in zip(scores, own.label, strict=True)
        ]
        right = [int(s.argmax() == y) for s, y in zip(scores, own.label, strict=True)]
        by_group = [
            np.mean([v for v, g in zip(losses, own.group, strict=True) if g == index])
            for index in range(6)
        ]
        ordered = sorted(by_group, reverse=True)
        cvar = (ordered[0] + 0.8 * ordered[1]) / 1.8  # r n = 0.3 * 6
        by_shown = [
            np.mean([v for v, g in zip(right, own.reported, strict=True) if g == index])
            for index in range(2)
        ]
        wanted = {
            "cvar": cvar, "loss": np.mean(losses), "group_loss": np.mean(by_group),
            "worst_loss": ordered[0], "accuracy": np.mean(right),
            "worst_accuracy": min(by_shown), "group_accuracy": np.mean(by_shown),
        }  # fmt: skip
        for key, value in wanted.items():
            assert row[f"{short}_{key}"] == pytest.approx(value, abs=1e-6), key
        if name == "train":
            assert row["losses"] == pytest.approx(by_group, abs=1e-6)
            tracked = run.built.objective.group_losses().numpy()
            error = math.sqrt(np.mean((tracked - by_group) ** 2))
            assert row["tracking_error"] == pytest.approx(error, abs=1e-6)
    assert row["test_reported"] == pytest.approx(by_shown) and row["test_smallest"] == min(
        (parts["test"].reported == index).sum() for index in range(2)
    )
    assert len(row["weights"]) == 6 and sum(row["weights"]) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("number", [11, 64, 101])
def test_many_groups_are_summed_up_by_quantiles(number):
    ids, names = torch.arange(number), [f"user {k}" for k in range(number)]
    part = GroupedPart(ids, ids, ids, tuple(names), ids, tuple(names))
    right = torch.arange(number, dtype=torch.float64) / (number - 1)
    row, losses = figures("test", part, right.flip(0), right, 0.15, "tenth")
    assert row["test_tenth_accuracy"] == pytest.approx(0.1)
    assert torch.equal(losses, right.flip(0))
    few = number <= 64
    assert row["test_reported"] == pytest.approx(
        right.tolist() if few else [k / 10 for k in range(11)]
    )
    assert shown_names(names) == (names if few else [f"{10 * k} %" for k in range(11)])
    assert len(shown(losses)) == len(shown_names(names))


def test_the_spectrum_is_that_of_the_diagnostics():
    run = steps(training("sonex", dtype=torch.float64, spectrum=True), 6)
    values, parts = data()
    own = parts["train"]

    s = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def inner(index):
        scores = run.model(values.double()[own.rows])
        losses = cross_entropy(scores, own.label, reduction="none")
        return torch.stack([losses[own.group == i].mean() for i in index.tolist()]) - s

    row = run.finish()
    for key, with_s in (("gram_smallest", False), ("gram_smallest_with_s", True)):
        smallest, *_, largest = eigenvalues(
            inner, 6, [*run.model.parameters(), *([s] * with_s)]
        ).tolist()
        assert row[key] == pytest.approx(smallest, rel=1e-8) and row[key] > 0
        if not with_s:
            assert row["gram_largest"] == pytest.approx(largest, rel=1e-8)


def test_the_spectrum_needs_no_larger_graphs_than_training():
    run = steps(training("sonex", spectrum=True, batch=8, evaluate_batch=500), 1)
    sizes = []
    run.model.register_forward_hook(lambda model, given, found: sizes.append(len(given[0])))
    run.finish()
    assert sum(sizes) == len(run.train) and max(sizes) == 8


def test_standardised_columns_by_hand():
    values = torch.randn(40, 300, generator=torch.Generator().manual_seed(1)) * 3 + 1
    values[:, 7] = 2.5
    rows = torch.arange(0, 40, 2)
    found, wanted = standardise(values, rows), values.double().numpy()
    own = wanted[::2]
    scale = np.where(own.std(0, ddof=1) > 1e-6, own.std(0, ddof=1), 1.0)
    np.testing.assert_allclose(found.numpy(), (wanted - own.mean(0)) / scale, rtol=1e-6, atol=1e-6)
    assert found.dtype == torch.float32 and not found[:, 7].any()


# Steps.


@pytest.mark.parametrize("name", METHODS)
def test_each_method_lowers_its_own_loss(name):
    key = {"erm": "train_loss", "uniform": "train_group_loss"}.get(name, "train_cvar")
    run = training(name)
    before = run.evaluate()[key]
    assert steps(run, 150).evaluate()[key] < 0.9 * before


@pytest.mark.parametrize("name", ["sonex", "uniform", "erm"])
def test_the_wiring_is_the_library_itself(name):
    """The same steps with the library alone, and with averages written out."""
    run = training(name, dtype=torch.float64)
    source = training(name, dtype=torch.float64)
    model = source.model
    if name == "sonex":
        optimizer = fcco.optim.momentum_type(model.parameters(), 0.05, 0.1)
        dro = fcco.CVaRGroupDRO(
            model, optimizer, 6, 0.3, smoothing=0.1, gamma=0.5, correction="auto", read="old"
        )
    else:
        optimizer, dro = torch.optim.SGD(model.parameters(), 0.05), None
    for batch in draws(source, 10):
        losses = lambda b=batch: cross_entropy(model(b.inputs), b.label, reduction="none")  # noqa: E731
        if dro is not None:
            loss = dro(losses, batch.group)
        elif name == "erm":
            loss = losses().mean()
        else:
            values = losses()
            loss = torch.stack([values[batch.group == i].mean() for i in batch.group.unique()])
            loss = loss.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(steps(run, 10)), weights(source), atol=1e-12, rtol=0)


def test_mixed_precision_goes_nearly_the_same_way():
    plain = steps(training("sonex"), 40)
    mixed = steps(training("sonex", precision="bfloat16"), 40)
    assert not torch.equal(weights(plain), weights(mixed))
    a, b = plain.evaluate()["train_cvar"], mixed.evaluate()["train_cvar"]
    assert a == pytest.approx(b, rel=0.05)
    assert all(each.dtype == torch.float32 for each in mixed.model.parameters())


@pytest.mark.parametrize("name", ["sonex", "alexr2"])
def test_the_smoothing_may_fall_over_the_whole_training(name):
    settings = METHODS[name].settings | {"smoothing": 1.0, "smoothing_end": 0.01}
    run = training(dataclasses.replace(METHODS[name], settings=settings), epochs=4)
    term, found = run.built.objective.term, []
    for _ in range(4):
        found.append(term.smoothing)
        steps(run, run.steps_per_epoch)
    found.append(term.smoothing)
    assert found == pytest.approx([10 ** (-k / 2) for k in range(5)])
