"""Rows in four cells (group, label), and draws from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Cells"]


@dataclass(frozen=True)
class Cells:
    """Samples sorted by cell 2 group + label.

    Attributes:
        inputs: features (n, d).
        counts: rows of each cell (4,).
        starts: where each cell begins (4,).
        prior: share of each cell in the data (4,).
    """

    inputs: Tensor
    counts: Tensor
    starts: Tensor
    prior: Tensor

    @classmethod
    def of(cls, call: str, features: Any, label: Any, group: Any) -> Cells:
        """Sort samples into cells; each must have some.

        Args:
            call: named in errors.
            features: (n, d).
            label: 0 or 1 (n,).
            group: 0 or 1 (n,).
        """
        cell = 2 * np.asarray(group, dtype=np.int64) + np.asarray(label, dtype=np.int64)
        counts = torch.from_numpy(np.bincount(cell, minlength=4))
        if len(counts) != 4 or bool((counts == 0).any()):
            raise ValueError(
                f"`{call}` needs samples of both labels in both groups, but the cells "
                f"(group, label) in order hold {counts.tolist()}."
            )
        order = cell.argsort(kind="stable")
        inputs = torch.from_numpy(np.ascontiguousarray(np.asarray(features, np.float32)[order]))
        return cls(inputs, counts, counts.cumsum(0) - counts, counts / counts.sum())

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def label(self) -> Tensor:
        """The label of each row."""
        return torch.tensor([0.0, 1.0, 0.0, 1.0]).repeat_interleave(self.counts)

    def split(self, scores: Tensor) -> list[Tensor]:
        """One number per row (..., n), as the four cells."""
        return list(scores.split(self.counts.tolist(), -1))

    def draw(self, batches: int, per_cell: int, generator: torch.Generator) -> Tensor:
        """Rows of many batches, uniform in each cell: shape (batches, 4 per_cell)."""
        uniform = torch.rand(batches, 4, per_cell, generator=generator, dtype=torch.float64)
        rows = self.starts[:, None] + (uniform * self.counts[:, None]).long()
        return rows.flatten(1)
