# ruff: noqa: D102  a method that is overridden is explained in the base class
"""The logistic CVaR problem: group DRO on data."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fcco.outer import CVaR

from .problem import Batch, Problem

__all__ = ["Logistic"]


@dataclass(frozen=True)
class Logistic(Problem):
    """0.05/2 |w|^2 + CVaR of the logistic losses of 10 groups of 100 samples, 2 of them hard.

    Samples are drawn from the groups' data with replacement; the noise is theirs.
    """

    kind = "cvar"
    ratio = 0.2
    decay = 0.05

    @property
    def total(self) -> int:
        return 10

    @property
    def start(self) -> Tensor:
        return torch.zeros(6, dtype=torch.float64)

    @functools.cached_property
    def optimum(self) -> float:
        return 0.38841819  # by `research.convergence.optima.logistic`; a test computes it again

    @functools.cached_property
    def data(self) -> Tensor:
        """Label times features, shape (groups, samples, d): sines, the same on every machine."""
        count = torch.arange(10 * 100 * 6, dtype=torch.float64).view(10, 100, 6)
        # Two uniform numbers from the fractional parts of multiples of irrational ones.
        noise = (count * 0.7548776662466927).frac() + (count * 0.5698402909980532).frac() - 1
        group = torch.arange(10, dtype=torch.float64).view(10, 1, 1)
        mean = torch.full((10, 1, 6), 0.4, dtype=torch.float64) + 0.3 * (group + count[0, :1]).sin()
        mean[8:, :, -1] = -0.8  # the last feature misleads in two groups
        mean[:8, :, -1] = 0.9
        return mean + (1.5 + group / 10) * noise

    def draw(self, generator: torch.Generator, blocks: Tensor) -> Batch:
        shape = (*blocks.shape, self.samples)
        sample = torch.randint(self.data.shape[1], shape, generator=generator)
        rows = self.data[blocks.unsqueeze(-1), sample]
        return Batch(blocks, rows.flatten(-3, -2), torch.zeros(blocks.shape))

    def values(self, w: Tensor, batch: Batch) -> Tensor:
        margin = torch.bmm(w, batch.direction.mT)
        return softplus(-margin).unflatten(-1, (-1, self.samples)).mean(-1)

    def pull(self, w: Tensor, batch: Batch, weights: Tensor) -> Tensor:
        margin = torch.bmm(w, batch.direction.mT).unflatten(-1, (-1, self.samples))
        slope = torch.sigmoid(-margin) * (-weights / self.samples).unsqueeze(-1)
        return torch.bmm(slope.flatten(-2), batch.direction)

    def exact(self, w: Tensor) -> Tensor:
        return softplus(-torch.einsum("...d,gkd->...gk", w, self.data)).mean(-1)

    def base(self, w: Tensor) -> Tensor:
        return self.decay * w

    def loss(self, w: Tensor) -> Tensor:
        return self.decay / 2 * w.square().sum(-1)

    def coupled(self, values: Tensor) -> Tensor:
        return CVaR(self.ratio)(values)
