"""Cross-entropy before a risk: the start that most of them need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from .. import _checks

__all__ = ["warm_start"]


def warm_start(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    epochs: int = 1,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> list[float]:
    """Train with cross-entropy for some epochs; returns the mean loss of each.

    Use it with ordinary shuffled batches and the learning rate of ordinary training; then build the
    risk, often with an optimizer of its own and a smaller learning rate.

    Args:
        model: returns scores (logits), (B,), (B, 1) or (B, T).
        optimizer: its optimizer.
        loader: yields batches that begin with inputs and labels, `(x, y, ...)`.
        epochs: passes over the loader.
        loss: another loss of scores and labels; unless given, binary cross-entropy over the labels
            that are not NaN.

    Example:
        >>> import torch, fcco
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        >>> batches = [(torch.eye(2), torch.tensor([0, 1]))] * 10
        >>> first, last = fcco.xrisk.warm_start(model, optimizer, batches, epochs=2)
        >>> first > last
        True
    """
    _checks.integer("warm_start", "epochs", epochs, 1)
    parameter = next(model.parameters())
    was_training, means = model.training, []
    model.train()
    for epoch in range(epochs):
        total, batches = 0.0, 0
        for x, y, *_ in loader:
            scores, y = model(x.to(parameter.device)), y.to(parameter.device)
            scores = scores.reshape(y.shape)
            value = (loss or _cross_entropy)(scores, y)
            if not value.requires_grad:  # no label of the batch is known
                continue
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            total, batches = total + float(value.detach()), batches + 1
        if batches == 0:
            raise ValueError(
                f"`warm_start(loader=...)` gave no batch in epoch {epoch + 1}: an iterator that is "
                "used up? Give a DataLoader or a list."
            )
        means.append(total / batches)
    optimizer.zero_grad()
    model.train(was_training)
    return means


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    if labels.is_floating_point() and bool(labels.isnan().all()):
        return scores.new_zeros(())
    known = ~labels.isnan() if labels.is_floating_point() else torch.ones_like(labels).bool()
    return binary_cross_entropy_with_logits(scores[known], labels[known].to(scores))
