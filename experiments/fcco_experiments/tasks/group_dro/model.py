"""The network: a backbone, or its features, and a head on top."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Classifier", "head", "standardise"]

_COLUMNS = 128


def head(width: int, hidden: Sequence[int], classes: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, classes))


class Classifier(nn.Module):
    """Scores of the classes.

    Args:
        backbone: from raw batches to vectors; None when the batches are vectors.
        top: the head.
    """

    def __init__(self, backbone: nn.Module | None, top: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.Identity() if backbone is None else backbone
        self.top = top

    def forward(self, batch: Tensor) -> Tensor:
        """Scores (N, C) of a raw batch."""
        return self.top(self.backbone(batch))


def standardise(values: Tensor, rows: Tensor) -> Tensor:
    """Vectors scaled to mean 0 and deviation 1 over the given rows, column by column, in float32.

    Columns that hardly vary there are only centred.
    """
    found = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    # Some columns at a time: float64 for all of them would be four times the memory of the data.
    for own, result in zip(values.split(_COLUMNS, 1), found.split(_COLUMNS, 1), strict=True):
        wide = own.double()
        mean, deviation = wide[rows].mean(0), wide[rows].std(0)
        scale = torch.where(deviation > 1e-6, deviation, torch.ones_like(deviation))
        result.copy_((wide - mean) / scale)
    return found
