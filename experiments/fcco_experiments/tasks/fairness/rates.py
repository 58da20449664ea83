"""The objective and the rates of the two groups, on a batch or on full data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

__all__ = ["Measure", "gaps", "pairs", "signed"]


@dataclass(frozen=True)
class Measure:
    """From scores to the loss and the rates.

    Args:
        prior: share of each cell (group, label) in the population.
        temperature: T of the rates.
        pair_temperature: of the pairwise objective.
        objective: `"auc"` or `"bce"`.
    """

    prior: Tensor
    temperature: float
    pair_temperature: float
    objective: str

    def loss(self, cells: Tensor) -> Tensor:
        r"""Of a batch (4, b): minus the pairwise sigmoid AUC, or the cross-entropy.

        .. math::
            -\sum_{i\in +}\sum_{j\in -} p_i p_j\, \sigma((s_i - s_j)/T_p)

        with the weights p that make a batch with equal cells an unbiased sample of the pairs.
        """
        width = cells.shape[1]
        if self.objective == "bce":
            target = cells.new_tensor([0.0, 1.0, 0.0, 1.0])[:, None].expand_as(cells)
            losses = binary_cross_entropy_with_logits(cells, target, reduction="none")
            return self.prior @ losses.mean(1)
        weight = self.prior.view(2, 2)
        weight = (weight / weight.sum(0)).repeat_interleave(width, 0) / width
        positive, negative = cells[1::2].reshape(-1), cells[0::2].reshape(-1)
        won = torch.sigmoid((positive[:, None] - negative) / self.pair_temperature)
        return -(weight[:, 1] @ won @ weight[:, 0])

    def rates(self, cells: Tensor, thresholds: Tensor) -> Tensor:
        """The smoothed share of each cell above each threshold: (..., 4, thresholds)."""
        at = thresholds[..., None, None, :]
        return torch.sigmoid((cells.unsqueeze(-1) - at) / self.temperature).mean(-2)

    def full_rates(self, cells: list[Tensor], thresholds: Tensor) -> Tensor:
        """The same for cells of different size."""
        return torch.cat([self.rates(cell[..., None, :], thresholds) for cell in cells], -2)

    def look(
        self, model: Any, inputs: Tensor, state: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Loss and inner values of a batch, in the population of the model.

        Args:
            model: a `Scorer` in training.
            inputs: as many samples from each cell, in order.
            state: from rates to values, as the method needs them.
        """
        cells = model(inputs).view(4, -1)
        return self.loss_of(model, cells), state(self.rates(cells, model.thresholds))

    def loss_of(self, model: Any, cells: Tensor) -> Tensor:
        """The loss of a batch with the prior of a model."""
        return replace(self, prior=model.prior).loss(cells)


def pairs(rates: Tensor) -> Tensor:
    """What is tracked: both groups' rates for each constraint, (2 thresholds, 2), TPR first."""
    by_group = rates.unflatten(-2, (2, 2)).flip(-2)  # group, positive before negative, threshold
    return by_group.flatten(-2).mT


def gaps(rates: Tensor) -> Tensor:
    """The signed gap of each constraint, TPR first."""
    both = pairs(rates)
    return both[..., 0] - both[..., 1]


def signed(rates: Tensor, tolerance: float) -> Tensor:
    """Two constraints per gap: gap - kappa and -gap - kappa."""
    gap = gaps(rates)
    return torch.cat([gap, -gap], -1) - tolerance
