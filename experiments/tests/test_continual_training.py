"""Runs of continual learning: steps written again, figures, batches, state."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from continual_cases import (
    CONFIG,
    METHODS,
    moved,
    own_cache,  # noqa: F401 (used by being here)
    problem,
    recorded,
    training,
)
from fcco_experiments.task import Method
from fcco_experiments.tasks.continual.training import Classes, by_class, changes
from hypothesis import given
from hypothesis import strategies as st
from reference_continual import NAMES, Plain
from task_cases import one_thread, steps, weights  # noqa: F401 (one_thread is used by being here)


def vector(run: Any) -> torch.Tensor:
    found = dict(run.model.named_parameters())
    assert set(found) == set(NAMES)
    return torch.cat([found[name].detach().reshape(-1) for name in NAMES])


HELD_OUT = {"old_share": 0.5, "protect": "held-out"}


def transcribed(
    name: str, number: int, independent: bool = False, **changes: Any
) -> tuple[Any, Plain]:
    """A run away from its old model, and the plain one with the weights of both."""
    own = problem(**changes)
    old = own.old_model(0).state_dict()
    method = dataclasses.replace(METHODS[name], independent=independent)
    run = steps(moved(own.start(method, 0)), number)
    return run, Plain(run, old)


# Steps.


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in METHODS),
        ("sox", {"old_share": 0.5}),
        *((name, HELD_OUT) for name in ("sonex", "weighted", "replay")),
        *((name, HELD_OUT | {"independent": True}) for name in ("sonex", "sox")),
    ],
)
def test_steps_are_those_of_the_transcription(name, changes):
    run, reference = transcribed(name, 0, **changes)
    batches, start = recorded(run), vector(run)
    for _ in range(8):  # past the end of an epoch
        steps(run, 1)
        reference.step(batches[-1])
        torch.testing.assert_close(vector(run).double(), reference.vector(), atol=2e-6, rtol=0)
    assert (vector(run) - start).abs().max() > 5e-3


def test_a_resumed_run_keeps_the_old_model_that_it_began_with():
    """Where the cache is gone, the old model is trained anew, and on a GPU it is another one."""
    run = steps(training("sonex"), 4)
    again = training("sonex", old_epochs=3)  # another old model
    assert not torch.equal(run.old_losses.value, again.old_losses.value)
    again.load_state_dict(copy.deepcopy(run.state_dict()))
    assert torch.equal(weights(steps(run, 3)), weights(steps(again, 3)))
    assert run.evaluate() == again.evaluate()
    key = "old_train_accuracies"
    assert run.finish()[key] == again.finish()[key]


def test_plain_fine_tuning_forgets_and_constraints_keep():
    """The target lies between two protected classes; 200 steps."""
    own = problem(
        sample_limit=0, old_epochs=10, width=16, batch=32, negatives=32, per_class=10,
        temperature=0.1,
    )  # fmt: skip
    settings = METHODS["sonex-adam"].settings | {"smoothing": 0.01}
    adam = dataclasses.replace(METHODS["sonex-adam"], lr=2e-3, weight_decay=0, settings=settings)
    plain = dataclasses.replace(METHODS["finetune"], update="adam", lr=2e-3)
    automatic = Method("automatic", lr=2e-3)
    trained = [steps(own.start(m, 0), 200).evaluate() for m in (plain, adam, automatic)]
    forgetting, *others = trained
    assert forgetting["train_target_gain"] > 0.7 and "multipliers" not in forgetting
    assert forgetting["train_forgetting"] > 0.5 and not forgetting["train_kept"]
    for keeping in others:
        assert keeping["train_target_gain"] > 0.3 and max(keeping["multipliers"]) > 0
        assert keeping["train_forgetting"] < 0.03 and keeping["train_violation"] < 0.05


def test_a_batch_has_its_three_parts():
    run = training(sample_limit=0, negatives=50)
    train, values = run.parts["train"], run.samples.values  # pyright: ignore[reportAttributeAccessIssue]
    rows = {tuple(values[r].tolist()): int(y) for r, y in zip(train.rows, train.label, strict=True)}
    batches, drawn = recorded(run), []
    for _ in range(60):
        run.batches.draw()
        batch = batches[-1]
        label = [rows[tuple(v)] for v in batch.images.tolist()]
        assert label[:8] == [4] * 8 and label[8:58] == run.label[batch.negatives].tolist()
        assert label[58:] == run.label[batch.kept].tolist() == [k for k in range(4) for _ in "abc"]
        drawn += label[8:58]
    shares = torch.bincount(run.label).double() / len(run.label)
    found = torch.bincount(torch.tensor(drawn), minlength=4).double() / len(drawn)
    torch.testing.assert_close(found, shares, atol=0.02, rtol=0)
    assert run.samples_per_step == 70 and run.steps_per_epoch == 7


# Figures.


def test_accuracies_and_losses_of_classes():
    random = np.random.default_rng(0)
    label = np.concatenate([np.arange(4), random.integers(0, 4, 40)])
    scores = 20 * random.standard_normal((44, 4)).astype(np.float32)
    right, loss, count = np.zeros(4), np.zeros(4), np.zeros(4)
    for row, y in zip(scores.astype(np.float64), label, strict=True):
        count[y] += 1
        right[y] += int(np.argmax(row) == y)
        loss[y] += math.log(sum(math.exp(s - row.max()) for s in row)) + row.max() - row[y]
    found = by_class(torch.from_numpy(scores), torch.from_numpy(label))
    assert found.accuracy.tolist() == pytest.approx(right / count, abs=1e-12)
    assert found.loss.tolist() == pytest.approx(loss / count, rel=1e-10)
    assert found.count.tolist() == count.tolist()
    # In float32 the loss of a sure answer would be 0 and its change rounding alone.
    sure = by_class(torch.tensor([[20.0, 0.0], [0.0, 30.0]]), torch.tensor([0, 1]))
    assert sure.loss.tolist() == pytest.approx([math.exp(-20), math.exp(-30)], rel=1e-4)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=2, max_size=5),
    st.sampled_from([0.0, 0.01, 0.05]),
)
def test_changes_by_hand(pairs: list[tuple[int, int]], limit: float):
    """Rightly classified images of 60, before and after; the last class is the target."""
    number = len(pairs)
    old, now = (
        Classes(
            torch.tensor([pair[k] / 60 for pair in pairs], dtype=torch.float64),
            torch.arange(number) * (k + 0.5),
            torch.full((number,), 60),
        )
        for k in (0, 1)
    )
    row = changes("val", now, old, limit)
    lost = [before - after for before, after in pairs[:-1]]
    gains = [after for _, after in pairs]
    beyond = max(max(lost) / 60 - max(limit, 1 / 60), 0)  # one image is always allowed
    wanted = {
        "target_accuracy": gains[-1] / 60, "target_gain": (pairs[-1][1] - pairs[-1][0]) / 60,
        "accuracy": np.mean(gains) / 60, "forgetting": max(lost) / 60,
        "violation": number - 2, "retained": float(max(lost) <= 0), "excess": beyond,
        "kept": float(beyond < 1e-6),
    }  # fmt: skip
    for key, value in wanted.items():
        assert row.pop(f"val_{key}") == pytest.approx(value, abs=1e-6), key
    assert row.pop("val_constraints") == list(range(number - 1))
    assert row.pop("val_zero_one") == pytest.approx([n / 60 for n in lost], abs=1e-6)
    assert row.pop("val_accuracies") == pytest.approx([n / 60 for n in gains], abs=1e-6)
    assert not row


def test_figures_are_those_of_loops():
    run, reference = transcribed("sonex", 6)
    row = run.evaluate()
    for name, key in (("train", "train"), ("validation", "val"), ("test", "test")):
        part, scores, old = run.parts[name], [], []
        reference.label |= dict(zip(part.rows.tolist(), part.label.tolist(), strict=True))
        for found, at in ((scores, reference.weights), (old, reference.old)):
            for r in part.rows.tolist():
                image = reference.seen(r, at)
                found.append(torch.stack([
                    image @ reference.read(CONFIG.prompt.format(c), k, at)
                    for k, c in enumerate(CONFIG.classes)
                ]).detach() / CONFIG.temperature)  # fmt: skip
        now, before = (by_class(torch.stack(found), part.label) for found in (scores, old))
        wanted = changes(key, now, before, CONFIG.forget_limit)
        for figure, value in wanted.items():
            assert row[figure] == pytest.approx(value, abs=2e-5), figure
    tracked = run.built.objective.terms["constraints"].tracker.value.squeeze(1)
    error = np.sqrt(np.mean((tracked.numpy() - np.array(row["constraints"])) ** 2))
    assert row["tracking_error"] == pytest.approx(error, abs=1e-5) and error > 1e-3
    assert row["objective"] == pytest.approx(objective(run, reference).item(), abs=1e-5)
    slope = [min(max(u / 0.05, 0), 5) / 4 for u in tracked.tolist()]
    assert row["multipliers"] == pytest.approx(slope, abs=1e-6) and max(slope) > 0


def test_at_the_start_nothing_has_changed():
    own = problem()
    run = own.start(METHODS["sonex"], 0)
    row = run.evaluate()
    for key in ("target_gain", "forgetting", "violation", "excess"):
        assert row[f"train_{key}"] == row[f"test_{key}"] == 0, key
    assert row["multipliers"] == [0.0] * 4 and "tracking_error" not in row
    reference = Plain(run, own.old_model(0).state_dict())
    wanted = [reference.loss(r, reference.old).item() for r in reference.others]
    assert run.old_losses.value.tolist() == pytest.approx(wanted, abs=1e-5)


def objective(run: Any, reference: Plain) -> torch.Tensor:
    """The contrastive loss over all training pairs of the data, by loops."""
    rows = run.parts["train"].rows.tolist()
    means = dict(zip(rows, reference.means(rows, reference.weights), strict=True))
    logs = [torch.log(means[r] + 1 / len(reference.others)) for r in reference.targets]
    return CONFIG.temperature * torch.stack(logs).sum() / len(reference.targets)
