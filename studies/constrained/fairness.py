"""Cross-entropy under 14 gaps of rates between two groups: Adult and COMPAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from fcco_experiments.data import Part, load
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from .problems import Batch, Form, Problem, Schedule, Score

THRESHOLDS = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)


class RocFairness(Problem):
    r"""Two ROC curves that nearly agree.

    .. math::
        \min_w\; \mathrm{BCE}(w) \quad\text{s.t.}\quad
        \Bigl|\mathrm E[\sigma(s_w - \tau)\mid a=0, y] - \mathrm E[\sigma(s_w-\tau)\mid a=1, y]
        \Bigr| \le \kappa, \qquad \tau\in\{-3,\dots,3\},\ y\in\{1, 0\}

    A batch has as many samples from each of the four cells (group a, label y); the loss weighs
    the cells by their share in the data, so it estimates the mean over all rows.

    Args:
        name: of the problem.
        table: features, labels, groups.
        schedule: of the training.
        kappa: the allowed gap.
        per_cell: samples of each cell in a batch.
    """

    forms = ("signed", "absolute", "pairs")

    def __init__(
        self,
        name: str,
        table: Part,
        schedule: Schedule | None = None,
        kappa: float = 0.005,
        per_cell: int = 32,
    ) -> None:
        self.name, self.kappa, self.per_cell = name, kappa, per_cell
        self.schedule = schedule or Schedule(evaluations=2000, every=25, lr=5e-3)
        self.thresholds = torch.tensor(THRESHOLDS)
        self.num_constraints = 4 * len(THRESHOLDS)
        cell = 2 * table.group + table.label
        order = cell.argsort(kind="stable")
        self.inputs = torch.tensor(table.features[order], dtype=torch.float32)
        self.targets = torch.tensor(table.label[order], dtype=torch.float32)
        self.counts = torch.tensor([(cell == k).sum() for k in range(4)])
        if (self.counts == 0).any():
            raise ValueError(
                f"`RocFairness({name!r})` needs samples of both labels in both groups but "
                f"the cells (group, label), in order, hold {self.counts.tolist()}."
            )
        self.starts = self.counts.cumsum(0) - self.counts
        self.prior = self.counts / self.counts.sum()

    @classmethod
    def load(cls, name: str) -> Self:
        """The problem on all training rows, from files that are there: nothing is fetched."""
        return cls(name, load(name, download=False, validation=0.0).train)

    @property
    def limit(self) -> float:
        """The gap that training allows."""
        return self.kappa + self.shift

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.inputs.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
            nn.Linear(64, 1), nn.Flatten(0),
        )  # fmt: skip

    def batches(self, seed: int) -> Callable[[], Batch]:
        """Uniform draws from each cell."""
        generator = torch.Generator().manual_seed(seed)
        width = self.per_cell

        def draw() -> Batch:
            uniform = torch.rand(4, width, generator=generator, dtype=torch.float64)
            rows = self.starts[:, None] + (uniform * self.counts[:, None]).long()
            rows = rows.flatten()
            return Batch(self.inputs[rows], self.targets[rows])

        return draw

    def measure(
        self, model: nn.Module, batch: Batch, form: Form = "signed"
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss, and the gaps: signed (28), absolute (14) or as pairs of rates."""
        scores = model(batch.inputs)
        losses = binary_cross_entropy_with_logits(scores, batch.targets, reduction="none")
        cells = losses.view(4, -1).mean(1)
        rates = torch.sigmoid(scores.view(4, -1, 1) - self.thresholds).mean(1)
        return self.prior @ cells, self.stated(rates, form)

    def rates(self, model: nn.Module) -> Tensor:
        """Those of all rows, (4 cells, 7 thresholds)."""
        parts = model(self.inputs).split(self.counts.tolist())
        return torch.stack([(part[:, None] - self.thresholds).sigmoid().mean(0) for part in parts])

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        objective = binary_cross_entropy_with_logits(model(self.inputs), self.targets).item()
        rates = self.rates(model)
        return Score(objective, (rates[:2] - rates[2:]).abs().max().item() - self.kappa)

    def stated(self, rates: Tensor, form: Form) -> Tensor:
        """Rates (4 cells, 7 thresholds) as constraint values: labels 0 and 1 by thresholds."""
        if form == "pairs":
            return torch.stack([rates[:2].flatten(), rates[2:].flatten()], dim=1)
        gaps = (rates[:2] - rates[2:]).flatten()
        if form == "absolute":
            return gaps.abs() - self.limit
        return torch.cat([gaps, -gaps]) - self.limit
