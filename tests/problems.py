"""Torch sides of the test problems."""

from __future__ import annotations

import numpy as np
import torch
from reference import Quadratics
from torch import Tensor, nn


class Point(nn.Module):
    """A model that is one vector of parameters."""

    def __init__(self, start: np.ndarray | Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.as_tensor(np.array(start), dtype=torch.float64))


class TorchQuadratics:
    """The samples of `Quadratics` as tensors."""

    def __init__(self, problem: Quadratics) -> None:
        self.a, self.c, self.d, self.m = (
            torch.as_tensor(x) for x in (problem.a, problem.c, problem.d, problem.m)
        )

    def values(self, w: Tensor, blocks: Tensor, samples: Tensor) -> Tensor:
        """One row per sample: (E, d1)."""
        a, c, d = self.a[blocks, samples], self.c[blocks, samples], self.d[blocks, samples]
        return 0.5 * (a @ w) ** 2 + c @ w + d

    def loss(self, w: Tensor) -> Tensor:
        return 0.5 * (w - self.m).square().sum()


def entries(sampled: list[tuple], which: int) -> tuple[Tensor, Tensor]:
    """Block ids and sample ids of a drawn batch (which = 1: B_i, 2: the independent one)."""
    blocks = np.concatenate([np.full(len(s[which]), s[0]) for s in sampled])
    return torch.as_tensor(blocks), torch.as_tensor(np.concatenate([s[which] for s in sampled]))
