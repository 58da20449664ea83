"""Figures of a model: accuracies and losses of classes, against those of the old model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...task import Row

__all__ = ["Classes", "by_class", "changes"]


class Classes(NamedTuple):
    """Means over the samples of each class, in float64.

    Attributes:
        accuracy: share that is classified rightly, (C,).
        loss: logistic loss, (C,).
        count: samples, (C,).
    """

    accuracy: Tensor
    loss: Tensor
    count: Tensor


def by_class(scores: Tensor, label: Tensor) -> Classes:
    """The figures of every class.

    Args:
        scores: of the classes, (N, C).
        label: of each sample; every class occurs.

    Example:
        >>> found = by_class(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]))
        >>> found.accuracy.tolist(), found.count.tolist()
        ([1.0, 0.0], [1, 1])
    """
    scores, number = scores.double(), scores.shape[1]
    count = torch.bincount(label, minlength=number)
    right = (scores.argmax(1) == label).double()
    loss = cross_entropy(scores, label, reduction="none")
    total = torch.zeros(2, number, dtype=torch.float64, device=scores.device)
    total.index_add_(1, label, torch.stack([right, loss]))
    accuracy, mean = total / count
    return Classes(accuracy.cpu(), mean.cpu(), count.cpu())


def changes(name: str, now: Classes, old: Classes, limit: float) -> Row:
    """What became better and worse on a part of the data; the target is the last class.

    Args:
        name: `train`, `val` or `test`, for the keys.
        now: the model.
        old: the old model.
        limit: accuracy that a class may lose; one image is always allowed.
    """
    lost = (old.accuracy - now.accuracy)[:-1]
    excess = now.loss[:-1] - old.loss[:-1]
    allowed = torch.clamp(1 / now.count[:-1].double(), min=limit)
    accuracy = now.accuracy
    found: Mapping[str, float] = {
        "target_accuracy": accuracy[-1].item(),
        "target_gain": (accuracy[-1] - old.accuracy[-1]).item(),
        "target_loss": now.loss[-1].item(),
        "protected_accuracy": accuracy[:-1].mean().item(),
        "protected_change": -lost.mean().item(),
        "accuracy": accuracy.mean().item(),
        "forgetting": lost.max().item(),
        "forgotten_images": (lost * now.count[:-1]).clamp(min=0).sum().item(),
        "violation": excess.max().item(),
        "retained": float(bool((lost <= 1e-9).all())),
        "kept": float(bool((lost <= allowed + 1e-9).all())),
        "excess": (lost - allowed - 1e-9).clamp(min=0).max().item(),
    }
    row: Row = {f"{name}_{key}": value for key, value in found.items()}
    prefix = "" if name == "train" else f"{name}_"
    row[f"{prefix}constraints"] = excess.tolist()
    row[f"{prefix}zero_one"] = lost.tolist()
    row[f"{prefix}accuracies"] = accuracy.tolist()
    return row
