"""Runs of the group DRO task: batches, figures, options of training, state."""

from __future__ import annotations

import copy
import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fcco_experiments.data.grouped import Vectors
from fcco_experiments.tasks.base import chunks
from fcco_experiments.tasks.group_dro.batches import Batch, Batches
from fcco_experiments.tasks.group_dro.figures import group_means, shown, summary
from fcco_experiments.tasks.group_dro.model import standardise
from fcco_experiments.tasks.group_dro.spectrum import jacobian, spectrum
from fcco_experiments.tasks.group_dro.training import GroupDROTraining
from group_dro_cases import (
    CONFIG,
    METHODS,
    OneByOne,
    data,
    one_thread,  # noqa: F401 (used by being here)
    steps,
    training,
    weights,
)
from torch.nn.functional import cross_entropy

import fcco
from fcco.diagnostics import smallest_eigenvalue
from fcco.groups import GroupBatchSampler

CPU = torch.device("cpu")


def drawn(seed=3, number=12, samples=Vectors, **options):
    values, parts = data()
    batches = Batches(CONFIG, samples(values), parts["train"], seed, CPU, **options)
    return batches, [batches.draw() for _ in range(number)]


def test_a_batch_has_its_groups_with_equally_many_samples():
    values, parts = data()
    own = parts["train"]
    pairs = zip(values[own.rows].tolist(), own.label.tolist(), strict=True)
    label = {tuple(value): y for value, y in pairs}
    batches, found = drawn()
    for batch in found:
        groups, counts = batch.group.unique(return_counts=True)
        assert len(groups) == 4 and counts.tolist() == [6] * 4
        assert [label[tuple(v)] for v in batch.inputs.tolist()] == batch.label.tolist()
    assert batches.steps == math.ceil(len(parts["train"]) / 24)


def test_uniform_batches_follow_the_sizes_of_the_groups():
    _, parts = data()
    _, found = drawn(number=300, groups=False)
    counts = torch.bincount(torch.cat([batch.group for batch in found]), minlength=6).double()
    shares = torch.bincount(parts["train"].group).double() / len(parts["train"])
    torch.testing.assert_close(counts / counts.sum(), shares, atol=0.01, rtol=0)
    assert all(len(batch.label) == 24 for batch in found)


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_loader_gives_the_batches_of_memory_and_resumes(loaders):
    _, wanted = drawn(number=20)
    values, parts = data()
    config = dataclasses.replace(CONFIG, loaders=loaders)
    first = Batches(config, OneByOne(values), parts["train"], 3, CPU)
    found = [first.draw() for _ in range(9)]
    second = Batches(config, OneByOne(values), parts["train"], 8, CPU)
    second.load_state_dict(first.state_dict())
    found += [second.draw() for _ in range(11)]
    for own, other in zip(found, wanted, strict=True):
        for a, b in zip(own, other, strict=True):
            assert torch.equal(a, b)


def halved(run: GroupDROTraining) -> list[tuple[Batch, Batch]]:
    """The two independent batches of a draw, for each of its micro-batches."""
    pieces = run._pieces(run.batches.draw())
    return [(own, other) for own, other in pieces if other is not None]


def test_the_halves_of_independent_batches_do_not_depend_on_the_ranks():
    """Batches of 4 groups x 10 samples, cut in three: at the places 13, odd, and 26."""
    run = training("alexr2", batch=20)
    ((own, other),) = halved(run)
    assert own.group.tolist() == other.group.tolist()
    assert torch.bincount(own.group, minlength=6).unique().tolist() == [0, 5]
    assert not {tuple(v) for v in own.inputs.tolist()} & {tuple(v) for v in other.inputs.tolist()}
    halves = []
    for rank in range(3):
        part = training("alexr2", batch=20)
        part.batches.sampler = GroupBatchSampler(
            part.train.group, 4, 10, batches_per_epoch=part.batches.steps, seed=0, rank=rank,
            world_size=3,
        )  # fmt: skip
        halves += halved(part)
        part.step()  # the two halves have other groups and numbers of samples here
    for place, whole in enumerate((own, other)):
        for column in range(3):
            found = torch.cat([half[place][column] for half in halves])
            assert torch.equal(found, whole[column])


@pytest.mark.parametrize("number", [1, 2])
def test_independent_micro_batches_hold_whole_groups(number):
    run = training("alexr2", accumulate=number)
    pieces = halved(run)
    assert len(pieces) == number
    for own, other in pieces:
        assert torch.equal(own.group, other.group)
        assert own.group.unique(return_counts=True)[1].tolist() == [6] * (4 // number)


def test_no_loader_draws_from_the_global_generator():
    """A resumed run makes its loader anew, and layers such as dropout must draw the same."""
    run = training("sonex", one_by_one=True)
    before = torch.get_rng_state()
    run.step()
    run.evaluate()
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_evaluate_every_place_in_equally_many_chunks():
    values, parts = data()
    own = parts["train"]
    for samples in (Vectors(values), OneByOne(values)):
        ranks: list[Any] = [SimpleNamespace(rank=rank, size=4) for rank in range(4)]
        found = [list(chunks(CONFIG, samples, own.rows, CPU, rank)) for rank in ranks]
        assert len({len(each) for each in found}) == 1
        places = torch.cat([p for each in found for p, _ in each])
        assert sorted(set(places.tolist())) == list(range(len(own)))
        for p, inputs in found[1]:
            assert torch.equal(inputs, values[own.rows[p]])


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


def test_an_evaluation_changes_nothing():
    run = steps(training("alexr2"), 4)  # in the middle of a round
    before, state = weights(run), copy.deepcopy(run.state_dict())
    run.evaluate()
    assert torch.equal(before, weights(run)) and run.model.training
    other = training("alexr2", seed=5)
    other.load_state_dict(state)
    assert torch.equal(weights(steps(run, 3)), weights(steps(other, 3)))


def test_a_double_loop_is_evaluated_between_its_rounds():
    run = steps(training("alexr2"), 3)
    settled = run.evaluate()["train_cvar"]
    inner = steps(run, 1)
    assert inner.evaluate()["train_cvar"] == settled
    assert steps(run, 2).evaluate()["train_cvar"] != settled


def test_small_helpers():
    ids = torch.tensor([0, 2, 2, 1])
    assert group_means(torch.tensor([1.0, 2.0, 4.0, 7.0]), ids, 3).tolist() == [1.0, 7.0, 3.0]
    accuracies = torch.arange(11, dtype=torch.float64) / 10
    assert summary(accuracies, "worst") == 0.0 and summary(accuracies, "tenth") == 0.1
    assert shown(torch.arange(64.0)) == list(range(64))
    assert shown(torch.arange(101.0)) == pytest.approx([10.0 * k for k in range(11)])


@pytest.mark.parametrize("name", METHODS)
def test_resume_is_bitwise(name):
    whole = steps(training(name), 9)
    first = steps(training(name), 4)
    second = training(name, seed=0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(second, 5)
    assert torch.equal(weights(whole), weights(second))
    assert whole.evaluate() == second.evaluate()


def test_methods_differ_and_each_lowers_its_own_loss():
    key = {"erm": "train_loss", "uniform": "train_group_loss"}
    ends = {}
    for name in METHODS:
        run = training(name)
        before = run.evaluate()[key.get(name, "train_cvar")]
        row = steps(run, 150).evaluate()
        ends[name] = weights(run)
        assert row[key.get(name, "train_cvar")] < 0.9 * before, name
    for first in ends:
        for second in ends:
            assert first == second or not torch.equal(ends[first], ends[second]), (first, second)


def test_micro_batches_make_the_same_step():
    whole = steps(training("sonex", dtype=torch.float64), 12)  # every group has been seen
    state = copy.deepcopy(whole.state_dict())
    pieces = training("sonex", dtype=torch.float64, accumulate=2)
    pieces.load_state_dict(state)
    for _ in range(5):
        torch.testing.assert_close(
            weights(steps(whole, 1)), weights(steps(pieces, 1)), atol=1e-12, rtol=0
        )
    u = [run.built.objective.group_losses() for run in (whole, pieces)]
    torch.testing.assert_close(*u, atol=1e-12, rtol=0)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_goes_nearly_the_same_way(precision):
    plain = steps(training("sonex"), 40)
    mixed = steps(training("sonex", precision=precision), 40)
    assert not torch.equal(weights(plain), weights(mixed))
    a, b = plain.evaluate()["train_cvar"], mixed.evaluate()["train_cvar"]
    assert a == pytest.approx(b, rel=0.05)
    assert all(each.dtype == torch.float32 for each in mixed.model.parameters())


@pytest.mark.parametrize("name", ["sonex", "ooa-cvar", "erm"])
def test_gradients_that_overflow_are_tried_again_and_resume_is_bitwise(name):
    """The scale begins far too large and grows every few steps, so that many steps are tried twice.

    The first steps would be lost otherwise, and a run that resumes after one would go another way.
    """

    def scaled():
        run = training(name, precision="float16")
        run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
        return run

    whole, before = scaled(), weights(scaled())
    for number in range(9):
        steps(whole, 1)
        assert not torch.equal(weights(whole), before), "every step moves"
        before = weights(whole)
        if number == 0:
            assert whole.scaler.get_scale() < 2.0**20
    for cut in range(1, 9):
        first, second = steps(scaled(), cut), scaled()
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert torch.equal(weights(steps(second, 9 - cut)), weights(whole)), cut


def test_gradients_that_are_never_finite_end_a_run():
    run = training("erm", precision="float16")
    next(run.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(FloatingPointError, match="not finite, however"):
        run.step()


def test_the_spectrum_is_that_of_the_diagnostics():
    run = steps(training("sonex", dtype=torch.float64), 6)
    values, parts = data()
    own = parts["train"]

    def inner(index):
        losses = cross_entropy(
            run.model(values.double()[own.rows]), own.label, reduction="none"
        )  # fmt: skip
        return torch.stack([losses[own.group == i].mean() for i in index.tolist()])

    row = spectrum(run)
    for key, with_s in (("gram_smallest", False), ("gram_smallest_with_s", True)):
        wanted = smallest_eigenvalue(inner, 6, run.model.parameters(), with_threshold=with_s)
        assert row[key] == pytest.approx(wanted.smallest, rel=1e-8) and row[key] > 0
        if not with_s:
            assert row["gram_largest"] == pytest.approx(wanted.largest, rel=1e-8)
    assert jacobian(run).shape == (6, sum(w.numel() for w in run.model.parameters()))


def test_the_spectrum_is_refused_before_training_and_needs_no_large_graphs(monkeypatch):
    run = steps(training("sonex", spectrum=True, batch=8, evaluate_batch=500), 1)
    sizes = []
    run.model.register_forward_hook(lambda model, given, found: sizes.append(len(given[0])))
    run.finish()
    assert sum(sizes) == len(run.train) and max(sizes) == 8
    monkeypatch.setattr("fcco_experiments.tasks.group_dro.spectrum._MOST", 1000)
    with pytest.raises(ValueError, match="gradients of all 6 groups"):
        training("sonex", spectrum=True)
    monkeypatch.setattr("fcco_experiments.strategy.is_sharded", lambda model: True)
    with pytest.raises(ValueError, match="use ddp"):
        training("sonex", spectrum=True)


def test_standardised_columns_by_hand():
    values = torch.randn(40, 300, generator=torch.Generator().manual_seed(1)) * 3 + 1
    values[:, 7] = 2.5
    rows = torch.arange(0, 40, 2)
    found, wanted = standardise(values, rows), values.double().numpy()
    own = wanted[::2]
    scale = np.where(own.std(0, ddof=1) > 1e-6, own.std(0, ddof=1), 1.0)
    np.testing.assert_allclose(found.numpy(), (wanted - own.mean(0)) / scale, rtol=1e-6, atol=1e-6)
    assert found.dtype == torch.float32 and not found[:, 7].any()


def test_the_schedule_drives_the_learning_rate():
    run = training("sonex", schedule="step", decay=0.1, decay_epochs=1)
    for epoch in range(3):
        for _ in range(run.steps_per_epoch):
            run.step()
            assert run.built.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**epoch)


def test_end_figures():
    run = steps(training("sonex", spectrum=True), 2)
    end = run.finish()
    assert end["samples_per_second"] > 0 and end["gram_smallest_with_s"] >= end["gram_smallest"]
    assert end["losses_names"] == [f"group {index}" for index in range(6)]
    assert end["test_reported_names"] == ["large", "small"]
    assert "samples_per_second" not in training("sonex").finish()


def test_float16_and_the_proximal_point_are_refused():
    with pytest.raises(ValueError, match="use bfloat16"):
        training("alexr2", precision="float16")


def test_uniform_and_plain_averages():
    values, parts = data()
    own = parts["train"]
    for name in ("uniform", "erm"):
        run = training(name)
        before = weights(run)
        reference = copy.deepcopy(run.model)
        batch = Batches(run.config, Vectors(values), own, 0, CPU, groups=name == "uniform").draw()
        losses = cross_entropy(reference(batch.inputs), batch.label, reduction="none")
        if name == "uniform":
            losses = torch.stack([losses[batch.group == i].mean() for i in batch.group.unique()])
        losses.mean().backward()
        gradient = torch.cat([w.grad.reshape(-1) for w in reference.parameters()])  # pyright: ignore[reportOptionalMemberAccess]
        torch.testing.assert_close(weights(steps(run, 1)), before - 0.05 * gradient)


def test_the_wiring_of_sonex_is_the_library_itself():
    run = training("sonex")
    values, parts = data()
    model = copy.deepcopy(run.model)
    optimizer = fcco.momentum_type(model.parameters(), 0.05, 0.1)
    dro = fcco.CVaRGroupDRO(
        model, optimizer, 6, 0.3, smoothing=0.1, gamma=0.5, correction="auto", read="old"
    )
    batches = Batches(CONFIG, Vectors(values), parts["train"], 0, CPU)
    for _ in range(10):
        batch = batches.draw()
        losses = lambda b=batch: cross_entropy(model(b.inputs), b.label, reduction="none")  # noqa: E731
        dro(losses, batch.group).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = torch.cat([w.detach().reshape(-1) for w in model.parameters()])
    torch.testing.assert_close(weights(steps(run, 10)), wanted, atol=1e-7, rtol=1e-6)


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
