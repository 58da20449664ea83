"""Eight constrained problems beside those of `studies.constrained`: other kinds of limits and
values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

import fcco
from studies.constrained.problems import Batch, Schedule, Stated


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Rates(Stated):
    """Mean predictions of two groups, at most 0.05 apart.

    Batches have as many rows of each group, so that a small one has both.
    """

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # the data of the page
            group = torch.arange(2000) % 2
            x = torch.randn(2000, 3, dtype=torch.float64)
            x += group[:, None] * torch.tensor([0.8, 0.3, 0.0])
            y = x[:, 0] + x[:, 1] + torch.randn(2000) > 0.6
        order = group.argsort(stable=True)
        inputs, targets = x[order].float().view(2, 1000, 3), y[order].float().view(2, 1000)
        limits = (0.05, 0.05)
        super().__init__(Schedule(600, 10, 2e-2), limits, inputs, targets, rows=32, bias=True)

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The mean loss, and the signed gaps."""
        score = model(batch.inputs)
        gap = score.sigmoid().view(2, -1).mean(1).diff()
        return binary_cross_entropy_with_logits(score, batch.targets), torch.cat([gap, -gap])


class NeymanPearson(Stated):
    """Few misses at a false alarm rate of at most 0.1, a hard rate with a stand-in."""

    def __init__(self) -> None:
        inputs = torch.randn(2, 1000, 4, generator=seeded())
        inputs[1] += torch.tensor([1.0, 0.6, -0.4, 0.0])
        super().__init__(Schedule(1000, 20, 2e-2), (0.1,), inputs, torch.zeros(2, 1000), hidden=8)

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The logistic loss of one class, the rate of false alarms in the other."""
        wrong, right = model(batch.inputs).view(2, -1)
        hard, soft = (wrong > 0).float().mean(), softplus(wrong).mean()
        return softplus(-right).mean(), fcco.Measured(hard.view(1), soft.view(1))


class Boundary(Stated):
    """The Poisson equation on a square by a network; the values at 32 boundary points are exact."""

    def __init__(self) -> None:
        t = (torch.arange(8) + 0.5) / 8
        ones, zeros = torch.ones(8), torch.zeros(8)
        x = torch.cat([t, t, zeros, ones])
        self.edge = torch.stack([x, torch.cat([zeros, ones, t, t])], 1)
        side = (torch.arange(20) + 0.5) / 20
        inner = torch.cartesian_prod(side, side)
        limits = [fcco.Equal(0.0)] * 32
        targets = torch.zeros(1, len(inner))
        super().__init__(Schedule(2000, 40, 1e-2), limits, inner[None], targets, hidden=24)

    def draw(self, generator: torch.Generator, number: int) -> Batch:
        """Points inside."""
        return Batch(torch.rand(number, 2, generator=generator), torch.empty(0))

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The mean squared residual of u'' = f, and u less x^2 - y^2 + x on the boundary."""
        first, _, last, _ = model  # type: ignore[misc]
        hidden = first(batch.inputs).tanh()  # the Laplacian of one layer is known
        bend = -2 * hidden * (1 - hidden.square()) * first.weight.square().sum(1)
        x, y = batch.inputs.unbind(1)
        f = -4 * ((torch.pi * x).sin() * (torch.pi * y).sin())
        x, y = self.edge.unbind(1)
        off = model(self.edge) - (x.square() - y.square() + x)
        return ((bend * last.weight[0]).sum(1) - f).square().mean(), off


class Ball(Stated):
    """Least squares in an L1 ball: the norm is known without noise."""

    def __init__(self) -> None:
        random = seeded()
        inputs = torch.randn(1000, 50, generator=random)
        rule = torch.randn(50, generator=random) * (torch.arange(50) < 10)
        targets = inputs @ rule + torch.randn(1000, generator=random)
        schedule = Schedule(1500, 30, 1e-2)
        super().__init__(schedule, (2.0,), inputs[None], targets[None], rows=60, units=2.0)

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """Half the mean squared error, the norm."""
        norm = torch.cat([each.flatten() for each in model.parameters()]).abs().sum()
        return (model(batch.inputs) - batch.targets).square().mean() / 2, norm.view(1)


class Slopes(Stated):
    """A curve that must not fall at 2,000 points, of which a batch has 64."""

    sampled = True

    def __init__(self) -> None:
        x = torch.linspace(-1, 1, 2000)
        targets = x + 0.4 * (5 * x).sin() + 0.2 * torch.randn(2000, generator=seeded())
        limits = [fcco.AtLeast(0.0)] * 2000
        super().__init__(Schedule(2000, 40, 1e-2), limits, x[:, None], targets, hidden=16)

    def draw(self, generator: torch.Generator, number: int) -> Batch:
        """Rows for the loss, others for the slopes."""
        first, index = torch.randperm(2000, generator=generator)[: 2 * number].view(2, -1)
        index = index.sort().values
        return Batch(self.inputs[torch.cat([first, index])], self.targets[first], index)

    def every(self) -> Batch:
        """All rows, for both."""
        return Batch(self.inputs.repeat(2, 1), self.targets)

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """Half the mean squared error, the slopes."""
        first, _, last, _ = model  # type: ignore[misc]
        number = len(batch.targets)
        hidden = first(batch.inputs).tanh()  # the slope of one layer is known
        error = last(hidden[:number]).flatten() - batch.targets
        slope = (1 - hidden[number:].square()) @ (last.weight[0] * first.weight[:, 0])
        return error.square().mean() / 2, slope


class Calibration(Stated):
    """Logistic regression that is right on average in each of eight groups."""

    def __init__(self) -> None:
        random = seeded()
        centres = torch.randn(8, 1, 16, generator=random) * 0.7
        inputs = centres + torch.randn(8, 250, 16, generator=random)
        score = inputs @ torch.randn(16, generator=random) / 2
        score = score + 0.5 * torch.randn(8, 1, generator=random)
        targets = (torch.rand(8, 250, generator=random) < score.sigmoid()).float()
        limits = [fcco.Equal(0.0)] * 8
        super().__init__(Schedule(1500, 30, 2e-2), limits, inputs, targets, rows=20)

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The mean loss, and how far mean predictions are above mean targets."""
        score = model(batch.inputs)
        loss = binary_cross_entropy_with_logits(score, batch.targets)
        return loss, (score.sigmoid() - batch.targets).view(8, -1).mean(1)


class Mixed(Stated):
    """An upper limit, an interval, an equality and a lower limit, in units from 1 to 1,000."""

    def __init__(self) -> None:
        random = seeded()
        inputs = torch.randn(3000, 6, generator=random)
        score = inputs @ torch.tensor([1.5, -1.0, 0.5, 0.5, 0.0, 0.0]) - 0.2
        targets = (torch.rand(3000, generator=random) < score.sigmoid()).float()
        limits = (0.45, (200.0, 260.0), fcco.Equal(0.0), fcco.AtLeast(70.0))
        units = torch.tensor([1.0, 1000, 1, 100])
        own: dict[str, Any] = {"rows": 120, "units": units, "bias": True}
        super().__init__(Schedule(1500, 30, 2e-2), limits, inputs[None], targets[None], **own)

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The mean loss; means of predictions and of their products with features."""
        score = model(batch.inputs)
        p, x = score.sigmoid(), batch.inputs
        loss = binary_cross_entropy_with_logits(score, batch.targets)
        values = [p.square().mean(), 1000 * (p * (1 - p)).mean(), (p * x[:, 2]).mean()]
        return loss, torch.stack([*values, 100 * (p * (x[:, 0] + 2)).mean()])


class Impossible(Stated):
    """Two groups whose losses cannot both be kept, and a limit that can."""

    least = 0.2588  # by cvxpy

    def __init__(self) -> None:
        random = seeded()
        inputs = torch.randn(2, 1000, 6, generator=random)
        rules = torch.tensor([[2.0, 1, 0.5, 0, 0, 0], [0.5, -1, 1, 1, 0, 0]])
        score = (inputs @ rules[:, :, None]).squeeze(2) * torch.tensor([[1.5], [1.0]])
        targets = (torch.rand(2, 1000, generator=random) < score.sigmoid()).float()
        super().__init__(Schedule(2000, 40, 2e-2), (0.3, 0.3, 0.2), inputs, targets, rows=60)

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The mean loss of all, that of each group, and the mean of a feature times the score."""
        score = model(batch.inputs)
        losses = binary_cross_entropy_with_logits(score, batch.targets, reduction="none")
        losses = losses.view(2, -1).mean(1)
        return losses.mean(), torch.cat([losses, (score * batch.inputs[:, 3]).mean().view(1)])


KINDS: dict[str, Callable[[], Stated]] = {
    "docs": Rates,
    "rate": NeymanPearson,
    "boundary": Boundary,
    "ball": Ball,
    "slopes": Slopes,
    "calibration": Calibration,
    "mixed": Mixed,
    "impossible": Impossible,
}
