"""The network: a tower, or its features, and a head on top."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Classifier", "head", "standardise"]


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
        tower: from raw batches to vectors; None when the batches are vectors.
        top: the head.
    """

    def __init__(self, tower: nn.Module | None, top: nn.Module) -> None:
        super().__init__()
        self.tower = nn.Identity() if tower is None else tower
        self.top = top

    @property
    def stages(self) -> list[nn.Module]:
        """Parts that are sharded one by one: those of the tower, when it says so."""
        return list(getattr(self.tower, "stages", ()))

    def forward(self, batch: Tensor) -> Tensor:
        """Scores (N, C) of a raw batch."""
        return self.top(self.tower(batch))


def standardise(values: Tensor, rows: Tensor) -> Tensor:
    """Vectors scaled to mean 0 and deviation 1 over the given rows, column by column.

    Columns that hardly vary there are only centred.
    """
    own = values[rows].double()
    mean, deviation = own.mean(0), own.std(0)
    scale = torch.where(deviation > 1e-6, deviation, torch.ones_like(deviation))
    return ((values.double() - mean) / scale).to(torch.float32)
