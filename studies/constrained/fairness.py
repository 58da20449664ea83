"""Cross-entropy under 14 gaps of rates between two groups: Adult and COMPAS."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal, Self

import torch
from fcco_experiments.data import Part, load
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from .problems import Batch, Problem, Schedule, Score

Form = Literal["signed", "pairs"]
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
        table: features, labels, groups.
        schedule: of the training.
        kappa: the allowed gap.
        per_cell: samples of each cell in a batch.
    """

    form: Form = "signed"

    def __init__(
        self,
        table: Part,
        schedule: Schedule | None = None,
        kappa: float = 0.005,
        per_cell: int = 32,
    ) -> None:
        self.kappa, self.per_cell = kappa, per_cell
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
                "`RocFairness` needs samples of both labels in both groups but "
                f"the cells (group, label), in order, hold {self.counts.tolist()}."
            )
        self.starts = self.counts.cumsum(0) - self.counts
        self.prior = self.counts / self.counts.sum()

    @classmethod
    def load(cls, name: str) -> Self:
        """The problem on all training rows, from files that are there: nothing is fetched."""
        return cls(load(name, download=False, validation=0.0).train)

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

    def stated(self, form: Form) -> Self:
        """The constraints in another form.

        `"signed"` are two for each gap, `"pairs"` the two rates whose gap counts, without the
        shift.
        """
        other = copy.copy(self)
        other.form = form
        other.num_constraints = (4 if form == "signed" else 2) * len(THRESHOLDS)
        return other

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The weighted loss, and the gaps in their form."""
        scores = model(batch.inputs)
        losses = binary_cross_entropy_with_logits(scores, batch.targets, reduction="none")
        cells = losses.view(4, -1).mean(1)
        rates = torch.sigmoid(scores.view(4, -1, 1) - self.thresholds).mean(1)
        return self.prior @ cells, self.gaps(rates)

    def rates(self, model: nn.Module) -> Tensor:
        """Those of all rows, (4 cells, 7 thresholds)."""
        parts = model(self.inputs).split(self.counts.tolist())
        return torch.stack([(part[:, None] - self.thresholds).sigmoid().mean(0) for part in parts])

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        objective = binary_cross_entropy_with_logits(model(self.inputs), self.targets).item()
        rates = self.rates(model)
        return Score(objective, (rates[:2] - rates[2:]).abs().max().item() - self.kappa)

    def gaps(self, rates: Tensor) -> Tensor:
        """Rates (4 cells, 7 thresholds) as constraint values: labels 0 and 1 by thresholds."""
        if self.form == "pairs":
            return torch.stack([rates[:2].flatten(), rates[2:].flatten()], dim=1)
        gaps = (rates[:2] - rates[2:]).flatten()
        return torch.cat([gaps, -gaps]) - (self.kappa + self.shift)
