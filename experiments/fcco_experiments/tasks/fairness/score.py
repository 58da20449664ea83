"""The network, and scores with mean 0 and deviation 1 over the population."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Level", "Scorer", "network"]

SMALLEST = 1e-6  # of a deviation: all scores may be equal at the start


def network(features: int, hidden: Sequence[int]) -> nn.Sequential:
    """A perceptron with one output."""
    layers: list[nn.Module] = []
    width = features
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, 1), nn.Flatten(0))


class Level(NamedTuple):
    """Where scores lie: statistics of the training outputs, of one run or of many (...).

    Attributes:
        mean: of the outputs (...).
        deviation: of the outputs (...).
        thresholds: tau (..., m).
    """

    mean: Tensor
    deviation: Tensor
    thresholds: Tensor

    def scores(self, output: Tensor) -> Tensor:
        """Outputs (..., n) as scores."""
        return (output - self.mean[..., None]) / self.deviation[..., None]


class Scorer(nn.Module):
    r"""A score per sample, normalised over the population where asked.

    .. math::
        s = \frac{o - m}{d}, \qquad m = \sum_c p_c\,\bar o_c, \qquad
        d^2 = \sum_c p_c\,\overline{(o - m)^2}_c

    A batch holds as many samples from each cell c = (group, label), which is not how the
    population looks: the mean and the deviation weigh the cells by their shares p_c. In training
    they are those of the batch, with gradient, so that a value is a function of the weights and
    the batch alone, at w_t and at w_{t-1} alike. In evaluation they are the buffers, which
    `calibrate` sets from all training data; a deployed model takes them along.

    Args:
        body: maps features to one number.
        prior: p_c.
        normalised: False leaves the output as it is.
        thresholds: tau, or the shares of the quantiles.
        quantiles: whether they are.
    """

    mean: Tensor
    deviation: Tensor
    prior: Tensor
    thresholds: Tensor

    def __init__(
        self,
        body: nn.Module,
        prior: Tensor,
        normalised: bool,
        thresholds: Sequence[float],
        quantiles: bool = False,
    ) -> None:
        super().__init__()
        self.body, self.normalised = body, normalised
        self.shares = torch.tensor(thresholds) if quantiles else None
        self.register_buffer("prior", prior.clone())
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("deviation", torch.ones(()))
        self.register_buffer("thresholds", torch.tensor(thresholds))

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores; in training of a batch with as many samples from each cell, in order."""
        output = self.body(inputs)
        if not self.normalised:
            return output
        if not self.training:
            return (output - self.mean) / self.deviation
        cells = output.view(4, -1)
        mean = self.prior @ cells.mean(1)
        deviation = (self.prior @ (cells - mean).square().mean(1)).sqrt()
        return (output - mean) / deviation.clamp(min=SMALLEST)

    @torch.no_grad()
    def level(self, output: Tensor, thresholds: Tensor | None = None) -> Level:
        """Statistics and thresholds from the outputs (..., n) on all training data.

        Args:
            output: of the network, of one run or of many.
            thresholds: those that are not quantiles (..., m); the model's own unless given.
        """
        at = self.thresholds if thresholds is None else thresholds
        mean, deviation = torch.zeros_like(output[..., 0]), torch.ones_like(output[..., 0])
        if self.normalised:
            mean = output.mean(-1)
            deviation = output.std(-1, correction=0).clamp(min=SMALLEST)
        found = Level(mean, deviation, at)
        if self.shares is None:
            return found
        shares = self.shares.to(output)
        return found._replace(thresholds=_quantiles(found.scores(output), shares))

    @torch.no_grad()
    def calibrate(self, inputs: Tensor) -> Tensor:
        """Set the statistics and the quantile thresholds from all training data; its scores."""
        output = self.body(inputs)
        found = self.level(output)
        for name, value in found._asdict().items():
            getattr(self, name).copy_(value)
        return found.scores(output)


def _quantiles(scores: Tensor, shares: Tensor) -> Tensor:
    """Quantiles (..., m) of the last axis."""
    return torch.quantile(scores, shares, dim=-1).movedim(0, -1)
