"""Runs of continual learning: steps written again, figures, batches, state."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from continual_cases import (
    CONFIG,
    METHODS,
    moved,
    one_thread,  # noqa: F401 (used by being here)
    own_cache,  # noqa: F401
    problem,
    recorded,
    steps,
    training,
    weights,
)
from reference_continual import NAMES, Plain
from scipy.optimize import nnls


def vector(run: Any) -> torch.Tensor:
    found = dict(run.model.named_parameters())
    assert set(found) == set(NAMES)
    return torch.cat([found[name].detach().reshape(-1) for name in NAMES])


# Steps.


@pytest.mark.parametrize("name", METHODS)
def test_steps_are_those_of_the_transcription(name):
    own = problem()
    run = moved(own.start(METHODS[name], 0))
    reference, batches, start = Plain(run, own.old_state(0)), recorded(run), vector(run)
    for _ in range(8):  # past the end of an epoch
        steps(run, 1)
        reference.step(batches[-1])
        torch.testing.assert_close(vector(run).double(), reference.vector(), atol=2e-6, rtol=0)
    assert (vector(run) - start).abs().max() > 5e-3


def test_some_classes_of_a_batch_and_strips_of_the_matrix():
    own = problem(classes_per_batch=2, chunk=3)
    run = moved(own.start(METHODS["sonex"], 1))
    reference, batches = Plain(run, own.old_state(1)), recorded(run)
    for _ in range(6):
        steps(run, 1)
        reference.step(batches[-1])
        torch.testing.assert_close(vector(run).double(), reference.vector(), atol=2e-6, rtol=0)
    assert all(len(run.streams.label[b.kept].unique()) == 2 for b in batches)


@pytest.mark.parametrize("name", METHODS)
def test_resume_is_bitwise(name):
    own = problem()
    whole = steps(own.start(METHODS[name], 0), 12)
    first = steps(own.start(METHODS[name], 0), 5)
    second = own.start(METHODS[name], 0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(second, 7)
    assert torch.equal(weights(whole), weights(second)) and second.steps == 12
    assert whole.evaluate() == second.evaluate()


def test_a_resumed_run_keeps_the_old_model_that_it_began_with():
    """Where the cache is gone, the old model is trained anew, and on a GPU it is another one."""
    run = steps(training("sonex"), 4)
    state = copy.deepcopy(run.state_dict())
    again = training("sonex", old_epochs=3)  # another old model
    assert not torch.equal(run.old_losses.value, again.old_losses.value)
    again.load_state_dict(state)
    assert torch.equal(run.old_losses.value, again.old_losses.value)
    assert torch.equal(weights(steps(run, 3)), weights(steps(again, 3)))
    rows = run.evaluate(), again.evaluate()
    assert rows[0] == rows[1] and rows[0]["constraints"] != [0.0] * 4
    names = "old_train_accuracies", "old_test_accuracies"
    assert [run.finish()[name] for name in names] == [again.finish()[name] for name in names]


# What it is for.


def test_plain_fine_tuning_forgets_and_constraints_keep():
    """The target lies between two protected classes; 200 steps."""
    changes: dict[str, Any] = {"sample_limit": 0, "old_epochs": 10, "width": 16, "batch": 32}
    changes |= {"negatives": 32, "per_class": 10, "temperature": 0.1}
    own = problem(**changes)
    settings = METHODS["sonex-adam"].settings | {"smoothing": 0.01}
    adam = dataclasses.replace(METHODS["sonex-adam"], lr=2e-3, weight_decay=0, settings=settings)
    plain = dataclasses.replace(METHODS["finetune"], update="adam", lr=2e-3)
    keeping, forgetting = (steps(own.start(m, 0), 200).evaluate() for m in (adam, plain))
    assert forgetting["train_target_gain"] > 0.7 and keeping["train_target_gain"] > 0.3
    assert forgetting["train_forgetting"] > 0.5 and not forgetting["train_kept"]
    assert keeping["train_forgetting"] < 0.03 and keeping["test_forgetting"] < 0.1
    assert keeping["train_violation"] < 0.05 < 1 < forgetting["train_violation"]
    assert max(keeping["multipliers"]) > 0 and "multipliers" not in forgetting


# Figures.


@pytest.mark.parametrize("name", ["sonex", "finetune"])
def test_at_the_start_nothing_has_changed(name):
    run = training(name)
    row = run.evaluate()
    for part in ("train", "val", "test"):
        for key in ("target_gain", "forgetting", "violation", "forgotten_images", "excess"):
            assert row[f"{part}_{key}"] == 0, key
        assert row[f"{part}_retained"] == row[f"{part}_kept"] == 1
    assert row["constraints"] == row["zero_one"] == [0.0] * 4
    assert "tracking_error" not in row and not any(row.get("multipliers", ()))
    heads: Any = run.model.text_projection  # pyright: ignore[reportAttributeAccessIssue]
    assert not heads.up.any() and heads.down.any() and heads.up.shape == (4, 2, 6)


def test_the_old_losses_are_those_of_the_old_model():
    own = problem()
    run = own.start(METHODS["sonex"], 0)
    reference = Plain(run, own.old_state(0))
    wanted = [reference.loss(row, reference.old).item() for row in reference.others]
    torch.testing.assert_close(
        run.old_losses.value.double(), torch.tensor(wanted).double(), atol=1e-5, rtol=0
    )


def test_figures_against_loops():
    own = problem()
    run = steps(moved(own.start(METHODS["sonex"], 0)), 6)
    row, reference = run.evaluate(), Plain(run, own.old_state(0))
    for name, short in (("train", "train"), ("validation", "val"), ("test", "test")):
        part = run.parts[name]
        reference.label |= dict(zip(part.rows.tolist(), part.label.tolist(), strict=True))
        now, old = ([[] for _ in range(5)] for _ in range(2))
        right, right_old = ([[] for _ in range(5)] for _ in range(2))
        for r, y in zip(part.rows.tolist(), part.label.tolist(), strict=True):
            for values, hits, w in (
                (now, right, reference.weights), (old, right_old, reference.old),
            ):  # fmt: skip
                values[y].append(reference.loss(r, w).item())
                image = reference.seen(r, w)
                scores = [
                    (image @ reference.read(CONFIG.prompt.format(c), k, w)).item()
                    for k, c in enumerate(CONFIG.classes)
                ]
                hits[y].append(max(range(5), key=scores.__getitem__) == y)
        mean = lambda each: sum(each) / len(each)  # noqa: E731
        prefix = "" if name == "train" else f"{short}_"
        accuracies = [mean(each) for each in right]
        excess = [mean(a) - mean(b) for a, b in zip(now[:4], old[:4], strict=True)]
        lost = [mean(a) - mean(b) for a, b in zip(right_old[:4], right[:4], strict=True)]
        assert row[f"{prefix}accuracies"] == pytest.approx(accuracies)
        assert row[f"{prefix}constraints"] == pytest.approx(excess, abs=2e-5)
        assert row[f"{prefix}zero_one"] == pytest.approx(lost)
        gain = mean(right[4]) - mean(right_old[4])
        assert row[f"{short}_target_gain"] == pytest.approx(gain)
        if name == "train":
            gaps = [u - e for u, e in zip(tracked(run).tolist(), excess, strict=True)]
            error = mean([gap**2 for gap in gaps]) ** 0.5
            assert row["tracking_error"] == pytest.approx(error, abs=1e-5) and error > 1e-3
    assert row["objective"] == pytest.approx(objective(run, reference).item(), abs=1e-5)
    slope = [min(max(u / 0.05, 0), 5) / 4 for u in tracked(run).tolist()]
    assert row["multipliers"] == pytest.approx(slope, abs=1e-6) and max(slope) > 0


def objective(run: Any, reference: Plain) -> torch.Tensor:
    """The contrastive loss over all training pairs of the data, by loops."""
    rows = run.parts["train"].rows.tolist()
    means = dict(zip(rows, reference.means(rows, reference.weights), strict=True))
    logs = [torch.log(means[r] + 1 / len(reference.others)) for r in reference.targets]
    return CONFIG.temperature * torch.stack(logs).sum() / len(reference.targets)


def tracked(run: Any) -> torch.Tensor:
    return run.built.objective.terms["constraints"].tracker.value.squeeze(1)


def test_an_evaluation_changes_nothing():
    own = problem()
    run = steps(own.start(METHODS["alexr2"], 0), 4)  # in the middle of a round
    before, state = weights(run), copy.deepcopy(run.state_dict())
    random = torch.get_rng_state()
    run.evaluate()
    assert torch.equal(before, weights(run)) and run.model.training
    assert torch.equal(torch.get_rng_state(), random)
    other = own.start(METHODS["alexr2"], 0)
    other.load_state_dict(state)
    assert torch.equal(weights(steps(run, 3)), weights(steps(other, 3)))


@pytest.mark.parametrize("name", ["sonex", "replay"])
def test_the_certificate_is_a_direct_computation(name):
    own = problem(certificate=True)
    run = steps(moved(own.start(METHODS[name], 0)), 6)
    found, reference = run.finish(), Plain(run, own.old_state(0))
    values = torch.stack([reference.loss(r, reference.weights) for r in reference.others])
    old = torch.stack([reference.loss(r, reference.old) for r in reference.others])
    label = torch.tensor([reference.label[r] for r in reference.others])
    h = torch.stack([(values - old)[label == k].mean() for k in range(4)])

    def flat(value: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad(value, reference.weights, retain_graph=True)
        return torch.cat([each.reshape(-1) for each in parts])

    g, slopes = flat(objective(run, reference)), torch.stack([flat(each) for each in h])
    values = h.detach()
    assert found["constraints_names"] == list(CONFIG.protected) and found["samples_per_second"] > 0
    assert found["test_counts"] == torch.bincount(run.parts["test"].label).tolist()
    assert found.get("penalty") == (5.0 if name == "sonex" else None)
    assert found["kkt_feasibility"] == pytest.approx(values.clamp(min=0).max().item(), abs=1e-4)
    near = values >= -1e-3
    assert 0 < int(near.sum()) < 4, "some constraints count and some do not"
    best = torch.zeros(4, dtype=torch.float64)
    solution, length = nnls(slopes[near].T.numpy(), -g.numpy())
    best[near] = torch.from_numpy(solution)
    assert found["best_multipliers"] == pytest.approx(best.tolist(), abs=1e-4)
    assert found["kkt_best_stationarity"] == pytest.approx(length, rel=1e-4)
    products = (best * values).abs().max().item()
    assert found["kkt_best_complementarity"] == pytest.approx(products, abs=1e-4)
    if name == "replay":
        assert "kkt_stationarity" not in found
        return
    own_multipliers = torch.tensor(run.evaluate()["multipliers"]).double()
    length = (g + slopes.T @ own_multipliers).norm().item()
    assert found["kkt_stationarity"] == pytest.approx(length, rel=1e-4)
    products = (own_multipliers * values).abs().max().item()
    assert found["kkt_complementarity"] == pytest.approx(products, abs=1e-4) and products > 0


# Batches.


def test_a_batch_has_its_three_parts():
    run = training(sample_limit=0, negatives=50)
    train, values = run.parts["train"], run.samples.values  # pyright: ignore[reportAttributeAccessIssue]
    rows = {tuple(values[r].tolist()): int(y) for r, y in zip(train.rows, train.label, strict=True)}
    assert len(run.streams.anchors) == int((train.label == 4).sum())
    batches, drawn = recorded(run), []
    for _ in range(60):
        run.batches.draw()
        batch, streams = batches[-1], run.streams
        label = [rows[tuple(v)] for v in batch.images.tolist()]
        assert label[:8] == [4] * 8
        assert label[8:58] == streams.label[batch.negatives].tolist() and max(label[8:58]) < 4
        assert label[58:] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
        assert label[58:] == streams.label[batch.kept].tolist()
        drawn += label[8:58]
    shares = torch.bincount(run.streams.label).double() / len(run.streams.label)
    found = torch.bincount(torch.tensor(drawn), minlength=4).double() / len(drawn)
    torch.testing.assert_close(found, shares, atol=0.02, rtol=0)
    assert run.samples_per_step == 70 and run.steps_per_epoch == 7


@pytest.mark.parametrize("loaders", [0, 1])
def test_samples_from_files_train_the_same_model_and_resume(loaders):
    held, read = training("sonex"), training("sonex", one_by_one=True, loaders=loaders)
    random = torch.get_rng_state()
    steps(held, 10)
    steps(read, 4)
    again = training("sonex", one_by_one=True, loaders=loaders)
    again.load_state_dict(copy.deepcopy(read.state_dict()))
    assert torch.equal(weights(steps(again, 6)), weights(held))
    if not loaders:
        assert held.evaluate() == again.evaluate()
        assert torch.equal(torch.get_rng_state(), random), "no loader draws from the global one"
