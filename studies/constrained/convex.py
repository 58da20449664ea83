"""Two convex problems on generated data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from .problems import Batch, Schedule, Score, Stated


class GroupLosses(Stated):
    r"""Logistic regression on one population without giving up on ten others.

    .. math::
        \min_w\; L_0(w) \quad\text{s.t.}\quad L_i(w) \le c_i, \qquad i = 1, \dots, m

    with mean logistic losses L_i. The limits c_i leave a little more than the loss that the best
    common model has on group i, so the problem is feasible. A batch has 64 samples of the
    population and 8 of each group: the noise of a value is about 0.2.
    """

    num_constraints = 10
    samples, features = 200, 20
    batch_size, per_group = 64, 8

    def __init__(self) -> None:
        random = np.random.RandomState(0)
        number, size = self.num_constraints, self.samples
        common = random.randn(self.features) / np.sqrt(self.features) * 3
        rules = common + random.randn(number + 1, self.features) / np.sqrt(self.features) * 1.5
        rows = [10 * size] + number * [size]
        parts = [random.randn(n, self.features) for n in rows]
        draws = [random.rand(n) for n in rows]
        labels = [
            draw < 1 / (1 + np.exp(-x @ rule))
            for x, rule, draw in zip(parts, rules, draws, strict=True)
        ]
        compromise = _logistic(np.concatenate(parts[1:]), np.concatenate(labels[1:]))
        self.limits = torch.tensor(
            [
                np.logaddexp(0, -np.where(y, 1, -1) * (x @ compromise)).mean() + 0.02
                for x, y in zip(parts[1:], labels[1:], strict=True)
            ]
        ).float()
        inputs = torch.tensor(np.concatenate(parts)).float()
        targets = torch.tensor(np.concatenate(labels)).float()
        self.population = rows[0]
        super().__init__(Schedule(2000, 25, 2e-2), [0.0] * number, inputs, targets)

    def batches(self, seed: int) -> Callable[[], Batch]:
        """Uniform draws from the population and from each group."""
        generator = torch.Generator().manual_seed(seed)
        starts = self.population + self.samples * torch.arange(self.num_constraints)[:, None]

        def draw() -> Batch:
            first = torch.randint(self.population, (self.batch_size,), generator=generator)
            shape = (self.num_constraints, self.per_group)
            rest = torch.randint(self.samples, shape, generator=generator) + starts
            rows = torch.cat([first, rest.flatten()])
            return Batch(self.inputs[rows], self.targets[rows])

        return draw

    def every(self) -> Batch:
        """All samples."""
        return Batch(self.inputs, self.targets)

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss of the population, those of the groups less their limits."""
        first = self.batch_size if len(batch.targets) < len(self.targets) else self.population
        losses = binary_cross_entropy_with_logits(
            model(batch.inputs), batch.targets, reduction="none"
        )
        groups = losses[first:].view(self.num_constraints, -1).mean(1)
        return losses[:first].mean(), groups - self.limits


class Segments(Stated):
    r"""Least squares with a limit on the mean prediction in each of 1,000 segments.

    .. math::
        \min_w\; \tfrac12\,\mathrm E\,(x^\top w - y)^2 \quad\text{s.t.}\quad
        \mathrm E[x^\top w \mid \text{segment } i] \le b_i, \qquad i = 1, \dots, 1000

    A batch has 64 rows for the loss, and 4 rows of each of 64 segments.
    """

    sampled = True
    num_constraints = 1000
    samples, features = 20, 20  # rows of a segment
    batch_size, segments, per_segment = 64, 64, 4

    def __init__(self) -> None:
        random = np.random.RandomState(1)
        number = self.num_constraints
        rule = random.randn(self.features) / np.sqrt(self.features)
        other = 0.7 * rule + 0.5 * random.randn(self.features) / np.sqrt(self.features)
        centres = random.randn(number, 1, self.features)
        inputs = centres + 0.2 * random.randn(number, self.samples, self.features)
        targets = inputs @ rule + 0.5 * random.randn(number, self.samples)
        slack = 0.2 + random.rand(number)
        self.limits = torch.tensor(inputs.mean(1) @ other + slack).float()
        own = torch.tensor(inputs).float(), torch.tensor(targets).float()
        super().__init__(Schedule(4000, 50, 1e-2), [0.0] * number, *own)
        self.means = self.inputs.mean(1)

    def batches(self, seed: int) -> Callable[[], Batch]:
        """Uniform draws of rows, of segments without repetition, and of rows in each of them."""
        generator = torch.Generator().manual_seed(seed)
        inputs, targets = self.inputs.view(-1, self.features), self.targets.view(-1)

        def draw() -> Batch:
            first = torch.randint(len(targets), (self.batch_size,), generator=generator)
            index = torch.randperm(self.num_constraints, generator=generator)[: self.segments]
            index = index.sort().values
            shape = (self.segments, self.per_segment)
            within = torch.randint(self.samples, shape, generator=generator)
            rows = torch.cat([first, (index[:, None] * self.samples + within).flatten()])
            return Batch(inputs[rows], targets[first], index)

        return draw

    def values(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Half the mean squared error, and the mean predictions less their limits."""
        assert batch.index is not None
        predicted = model(batch.inputs)
        errors = predicted[: self.batch_size] - batch.targets
        means = predicted[self.batch_size :].view(-1, self.per_segment).mean(1)
        return errors.square().mean() / 2, means - self.limits[batch.index]

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        """The same on all rows."""
        errors = model(self.inputs.view(-1, self.features)) - self.targets.view(-1)
        excess = model(self.means) - self.limits
        return Score(errors.square().mean().item() / 2, excess.max().item())


def _logistic(inputs: np.ndarray, labels: np.ndarray, steps: int = 30) -> np.ndarray:
    """Logistic regression by Newton's method."""
    weights = np.zeros(inputs.shape[1])
    for _ in range(steps):
        rate = 1 / (1 + np.exp(-inputs @ weights))
        curvature = (inputs * (rate * (1 - rate))[:, None]).T @ inputs
        weights -= np.linalg.solve(curvature, inputs.T @ (rate - labels))
    return weights
