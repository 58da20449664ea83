"""Figures of continual learning against loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fcco_experiments.tasks.continual.figures import Classes, by_class, changes
from hypothesis import given
from hypothesis import strategies as st


def loops(scores: np.ndarray, label: np.ndarray) -> tuple[list[float], list[float], list[int]]:
    number = scores.shape[1]
    right, loss, count = [0] * number, [0.0] * number, [0] * number
    for row, y in zip(scores.tolist(), label.tolist(), strict=True):
        count[y] += 1
        right[y] += int(max(range(number), key=row.__getitem__) == y)
        top = max(row)
        loss[y] += top + math.log(sum(math.exp(s - top) for s in row)) - row[y]
    return (
        [r / n for r, n in zip(right, count, strict=True)],
        [s / n for s, n in zip(loss, count, strict=True)],
        count,
    )


@pytest.mark.parametrize("seed", range(3))
def test_accuracies_and_losses_of_classes(seed: int) -> None:
    random = np.random.default_rng(seed)
    label = np.concatenate([np.arange(4), random.integers(0, 4, 40)])
    scores = 20 * random.standard_normal((44, 4)).astype(np.float32)
    found = by_class(torch.from_numpy(scores), torch.from_numpy(label))
    accuracy, loss, count = loops(scores.astype(np.float64), label)
    assert found.accuracy.tolist() == pytest.approx(accuracy, abs=1e-12)
    assert found.loss.tolist() == pytest.approx(loss, rel=1e-10)
    assert found.count.tolist() == count
    assert found.loss.dtype == torch.float64


def test_small_losses_keep_their_digits() -> None:
    """In float32 the loss of a sure answer would be 0 and its change rounding alone."""
    found = by_class(torch.tensor([[20.0, 0.0], [0.0, 30.0]]), torch.tensor([0, 1]))
    assert found.loss.tolist() == pytest.approx([math.exp(-20), math.exp(-30)], rel=1e-4)


def classes(right: list[int], count: list[int], loss: list[float]) -> Classes:
    return Classes(
        torch.tensor([r / n for r, n in zip(right, count, strict=True)], dtype=torch.float64),
        torch.tensor(loss, dtype=torch.float64),
        torch.tensor(count),
    )


COUNT = [400, 20, 30]  # the last one is the target


def test_changes_by_hand() -> None:
    old = classes([380, 18, 3], COUNT, [0.5, 0.7, 2.0])
    now = classes([372, 19, 24], COUNT, [0.6, 0.2, 0.3])
    row = changes("val", now, old, limit=0.01)
    wanted = {
        "target_accuracy": 24 / 30, "target_gain": 21 / 30, "target_loss": 0.3,
        "protected_accuracy": (372 / 400 + 19 / 20) / 2,
        "protected_change": (-8 / 400 + 1 / 20) / 2,
        "accuracy": (372 / 400 + 19 / 20 + 24 / 30) / 3,
        "forgetting": 8 / 400, "forgotten_images": 8, "violation": 0.1, "retained": 0, "kept": 0,
        "excess": 8 / 400 - 0.01,
    }  # fmt: skip
    lists = {
        "val_constraints": [0.1, -0.5], "val_zero_one": [8 / 400, -1 / 20],
        "val_accuracies": [372 / 400, 19 / 20, 24 / 30],
    }  # fmt: skip
    assert set(row) == {f"val_{key}" for key in wanted} | set(lists)
    for key, value in wanted.items():
        assert row[f"val_{key}"] == pytest.approx(value, abs=1e-8), key
    for key, values in lists.items():
        assert row[key] == pytest.approx(values, abs=1e-12), key


def test_lists_of_the_training_data_have_plain_names() -> None:
    same = classes([380, 18, 3], COUNT, [0.5, 0.7, 2.0])
    row = changes("train", same, same, 0.01)
    assert {"constraints", "zero_one", "accuracies", "train_kept"} <= set(row)
    assert row["train_retained"] == row["train_kept"] == 1 and row["train_excess"] == 0
    assert row["constraints"] == row["zero_one"] == [0, 0] and row["train_target_gain"] == 0


@pytest.mark.parametrize(
    ("lost", "limit", "kept", "beyond"),
    [
        ([4, 1], 0.01, 1, 0.0),  # one point of 400, one of 20 images: both allowed
        ([5, 0], 0.01, 0, 1 / 400),
        ([4, 2], 0.01, 0, 1 / 20),
        ([1, 1], 0.0, 1, 0.0),
        ([2, 0], 0.0, 0, 1 / 400),
        ([-9, 1], 0.01, 1, 0.0),
    ],
)
def test_one_image_is_always_allowed(
    lost: list[int], limit: float, kept: int, beyond: float
) -> None:
    old = classes([380, 18, 3], COUNT, [0.0] * 3)
    now = classes([380 - lost[0], 18 - lost[1], 0], COUNT, [0.0] * 3)
    row = changes("train", now, old, limit)
    assert row["train_kept"] == kept
    assert row["train_excess"] == pytest.approx(beyond, abs=1e-8)
    assert (row["train_excess"] == 0) == bool(kept)  # exactly: it is the first figure of a choice
    assert row["train_retained"] == (max(lost) <= 0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=2, max_size=5))
def test_laws(pairs: list[tuple[int, int]]) -> None:
    count = [60] * len(pairs)
    old, now = (classes(list(each), count, [0.0] * len(count)) for each in zip(*pairs, strict=True))
    row = changes("test", now, old, 0.01)
    lost = [a - b for a, b in pairs[:-1]]
    assert row["test_forgotten_images"] == pytest.approx(sum(max(each, 0) for each in lost))
    assert row["test_forgetting"] == pytest.approx(max(lost) / 60)
    assert row["test_retained"] == all(each <= 0 for each in lost)
    assert row["test_kept"] == all(each <= 1 for each in lost)
    assert row["test_kept"] >= row["test_retained"]
