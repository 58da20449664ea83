"""The network, and scores with mean 0 and deviation 1 over the population."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Scorer", "network"]

SMALLEST = 1e-6  # of a deviation: all scores may be equal at the start


def network(features: int, hidden: Sequence[int]) -> nn.Sequential:
    """A perceptron with one output."""
    layers: list[nn.Module] = []
    width = features
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, 1), nn.Flatten(0))


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
    def calibrate(self, inputs: Tensor) -> Tensor:
        """Set the statistics and the quantile thresholds from all training data; its scores."""
        output = self.body(inputs)
        if self.normalised:
            self.mean.copy_(output.mean())
            self.deviation.copy_(output.std(correction=0).clamp(min=SMALLEST))
            output = (output - self.mean) / self.deviation
        if self.shares is not None:
            self.thresholds.copy_(torch.quantile(output, self.shares.to(output)))
        return output
