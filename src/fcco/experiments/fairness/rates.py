"""The objective and the rates of the two groups, on a batch or on full data."""

from __future__ import annotations

from dataclasses import dataclass

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
        """The smoothed share of each cell above each threshold: (4, thresholds)."""
        return torch.sigmoid((cells.unsqueeze(-1) - thresholds) / self.temperature).mean(1)

    def full_rates(self, cells: list[Tensor], thresholds: Tensor) -> Tensor:
        """The same for cells of different size."""
        return torch.cat([self.rates(cell[None], thresholds) for cell in cells])


def pairs(rates: Tensor) -> Tensor:
    """What is tracked: both groups' rates for each constraint, (2 thresholds, 2), TPR first."""
    by_group = rates.view(2, 2, -1).flip(1)  # group, positive before negative, threshold
    return by_group.reshape(2, -1).T


def gaps(rates: Tensor) -> Tensor:
    """The signed gap of each constraint, TPR first."""
    both = pairs(rates)
    return both[:, 0] - both[:, 1]


def signed(rates: Tensor, tolerance: float) -> Tensor:
    """Two constraints per gap: gap - kappa and -gap - kappa."""
    gap = gaps(rates)
    return torch.cat([gap, -gap]) - tolerance
