"""The config, data in cells (group, label), the scoring network, and the figures of an evaluation.

Figures work on the last axis: of one run, or of many runs with one row each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..base import PART_KEYS, Schedule, Scheduled, perceptron

SMALLEST = 1e-6
"""Least deviation of scores that is divided by: all of them may be equal at the start."""


@dataclass(frozen=True, kw_only=True)
class Fairness(Scheduled):
    r"""AUC maximisation under gaps of rates between two groups.

    .. math::
        \max_w \mathrm{AUC}(w) \quad\text{s.t.}\quad
        \bigl|r_{0,y,\tau}(w) - r_{1,y,\tau}(w)\bigr| \le \kappa, \qquad
        r_{a,y,\tau}(w) = \mathrm E\bigl[\sigma((s_w - \tau)/T) \mid a, y\bigr]

    The score is `"unbounded"` as printed, or `"normalised"` to mean 0 and deviation 1 over the
    population, so that the thresholds stay where the scores are. A method is feasible when the
    `"gap"` of the ROC curves beyond chance, or the smoothed `"violation"`, is within the limit.
    """

    schedule: Schedule = "milestones"
    decay: float = 0.1
    score: Literal["normalised", "unbounded"] = "normalised"
    temperature: float = 0.2  # T of the rates
    thresholds: tuple[float, ...] = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)  # tau
    tolerance: float = 0.005  # kappa
    batch: int = 128  # samples, a quarter from each cell (group, label)
    hidden: tuple[int, ...] = (64, 64)  # widths of the hidden layers
    validation: float = 0.2  # share of the training data that the seed of a run splits off
    feasible_by: Literal["gap", "violation"] = "gap"
    feasible_limit: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        finite = [math.isfinite(tau) for tau in self.thresholds]
        for name, valid, wanted in (
            ("temperature", 0 < self.temperature < math.inf, "be above 0"),
            ("hidden", all(width >= 1 for width in self.hidden), "hold widths from 1 on"),
            ("batch", self.batch >= 4 and self.batch % 4 == 0, "be a multiple of 4 (cells)"),
            ("tolerance", 0 <= self.tolerance < math.inf, "be at least 0"),
            ("thresholds", finite and all(finite), "hold at least one number"),
            ("validation", 0 <= self.validation < 1, "be in [0, 1)"),
        ):
            if not valid:
                raise ValueError(f"`{name}` must {wanted} but is: {getattr(self, name)}.")

    @property
    def judged(self) -> str:
        """The figure that makes a method feasible, without its part of the data."""
        return "excess_gap" if self.feasible_by == "gap" else "violation"


@dataclass(frozen=True)
class Cells:
    """Samples sorted by cell: features (n, d), and the number of rows of each cell (4,)."""

    inputs: Tensor
    counts: Tensor

    @classmethod
    def of(cls, name: str, features: Any, label: Any, group: Any) -> Cells:
        """Sort samples with labels and groups of 0 and 1; errors call the data by `name`."""
        cell = 2 * np.asarray(group, dtype=np.int64) + np.asarray(label, dtype=np.int64)
        counts = torch.from_numpy(np.bincount(cell, minlength=4))
        if len(counts) != 4 or bool((counts == 0).any()):
            raise ValueError(
                f"`{name}` needs samples of both labels in both groups, but the cells "
                f"(group, label) in order hold {counts.tolist()}."
            )
        order = cell.argsort(kind="stable")
        ordered = np.ascontiguousarray(np.asarray(features, np.float32)[order])
        return cls(torch.from_numpy(ordered), counts)

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def prior(self) -> Tensor:
        """The share of each cell in the data (4,)."""
        return self.counts / self.counts.sum()

    def split(self, scores: Tensor) -> list[Tensor]:
        """One number per row (..., n), as the four cells."""
        return list(scores.split(self.counts.tolist(), -1))


class CellBatches:
    """Rows of batches with a quarter from each cell; they depend on the seed and the epoch alone.

    An epoch has as many steps as draw the number of training samples, in `copies` independent
    batches of a step.
    """

    def __init__(self, config: Fairness, seed: int, train: Cells, copies: int) -> None:
        self.per_cell, self.seed, self.train, self.copies = config.batch // 4, seed, train, copies
        self.steps_per_epoch = max(1, math.ceil(len(train) / (config.batch * copies)))
        self._drawn = 0
        self._epoch: Tensor | None = None

    def epoch(self, epoch: int) -> Tensor:
        """All rows of an epoch, (steps, copies, batch), uniform in each cell."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        shape = self.steps_per_epoch, self.copies, 4, self.per_cell
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        counts = self.train.counts[:, None]
        return (counts.cumsum(0) - counts + (uniform * counts).long()).flatten(2)

    def draw(self) -> Tensor:
        """Rows of the next step, (copies, batch)."""
        epoch, step = divmod(self._drawn, self.steps_per_epoch)
        if self._epoch is None or step == 0:
            self._epoch = self.epoch(epoch)
        self._drawn += 1
        return self._epoch[step]

    def state_dict(self) -> dict[str, Any]:
        """How far the draws have come."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after those draws."""
        self._drawn, self._epoch = int(state["drawn"]), None


class Scorer(nn.Module):
    r"""A score per sample, normalised over the population where the config asks for it.

    .. math::
        s = \frac{o - m}{d}, \qquad m = \sum_c p_c\,\bar o_c, \qquad
        d^2 = \sum_c p_c\,\overline{(o - m)^2}_c

    A batch holds as many samples from each cell c = (group, label), which is not how the
    population looks: the mean and the deviation weigh the cells by their shares p_c. In training
    they are those of the batch, with gradient, so that a value is a function of the weights and
    the batch alone, at w_t and at w_{t-1} alike. In evaluation they are those of all training data.

    The first weights depend on the seed alone, not on the method.
    """

    prior: Tensor
    thresholds: Tensor

    def __init__(self, config: Fairness, seed: int, train: Cells) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = config
        layers = perceptron(train.inputs.shape[1], config.hidden, 1)
        self.body = nn.Sequential(*layers, nn.Flatten(0))
        self.register_buffer("prior", train.prior)
        self.register_buffer("thresholds", torch.tensor(config.thresholds))

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores (4, b) of a batch with as many samples from each cell, in order."""
        output = self.body(inputs)
        cells = output.view(4, -1)
        if self.config.score == "unbounded":
            return cells
        mean = self.prior @ cells.mean(1)
        deviation = (self.prior @ (cells - mean).square().mean(1)).sqrt()
        return ((output - mean) / deviation.clamp(min=SMALLEST)).view(4, -1)

    def loss(self, cells: Tensor) -> Tensor:
        r"""Minus the pairwise sigmoid AUC of the scores of a batch (4, b).

        .. math::
            -\sum_{i\in +}\sum_{j\in -} p_i p_j\, \sigma(s_i - s_j)

        with the weights p that make a batch with equal cells an unbiased sample of the pairs.
        """
        width = cells.shape[1]
        weight = self.prior.view(2, 2)
        weight = (weight / weight.sum(0)).repeat_interleave(width, 0) / width
        positive, negative = cells[1::2].reshape(-1), cells[0::2].reshape(-1)
        won = torch.sigmoid(positive[:, None] - negative)
        return -(weight[:, 1] @ won @ weight[:, 0])

    def rates(self, cells: Tensor) -> Tensor:
        """The smoothed share of each cell (..., 4, b) above each threshold, (..., 4, m)."""
        above = (cells.unsqueeze(-1) - self.thresholds) / self.config.temperature
        return torch.sigmoid(above).mean(-2)

    def full_rates(self, cells: list[Tensor]) -> Tensor:
        """The same for cells of different size."""
        return torch.cat([self.rates(cell[..., None, :]) for cell in cells], -2)

    def scores(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scores of all parts of the data from the outputs (..., n) of the body on each."""
        if self.config.score == "unbounded":
            return dict(outputs)
        mean = outputs["train"].mean(-1, keepdim=True)
        deviation = outputs["train"].std(-1, correction=0, keepdim=True).clamp(min=SMALLEST)
        return {name: (output - mean) / deviation for name, output in outputs.items()}

    def figures(
        self, outputs: Mapping[str, Tensor], parts: Mapping[str, Cells]
    ) -> dict[str, Tensor | float]:
        """All figures of an evaluation by key: numbers (...), and the constraints (..., m).

        Args:
            outputs: of the body on each part of the data, (..., n).
            parts: the data by name.
        """
        figures: dict[str, Tensor | float] = {}
        scores = self.scores(outputs)
        low, high = self.thresholds.min(), self.thresholds.max()
        for part, key in PART_KEYS.items():
            if part not in parts:
                continue
            cells = parts[part].split(scores[part])
            tpr_gap, fpr_gap = (largest_gap(cells[y], cells[2 + y]) for y in (1, 0))
            floor = max(gap_floor(cells[y].shape[-1], cells[2 + y].shape[-1]) for y in (1, 0))
            gap = torch.maximum(tpr_gap, fpr_gap)
            violations = gaps(self.full_rates(cells)).abs() - self.config.tolerance
            inside = (scores[part] >= low) & (scores[part] <= high)
            figures |= {
                f"{key}_auc": auc(*by_label(cells)),
                f"{key}_violation": violations.amax(-1),
                f"{key}_inside": inside.double().mean(-1),
                f"{key}_gap": gap,
                f"{key}_excess_gap": excess_gap(gap, floor),
                f"{key}_tpr_gap": tpr_gap,
                f"{key}_fpr_gap": fpr_gap,
                f"{key}_gap_floor": floor,
                "constraints" if key == "train" else f"{key}_constraints": violations,
            }
        return figures


def by_label(cells: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Scores of positive samples, and of negative ones."""
    return torch.cat(cells[1::2], -1), torch.cat(cells[0::2], -1)


def pairs(rates: Tensor) -> Tensor:
    """What is tracked: both groups' rates for each constraint, (2 thresholds, 2), TPR first."""
    by_group = rates.unflatten(-2, (2, 2)).flip(-2)  # group, positive before negative, threshold
    return by_group.flatten(-2).mT


def gaps(rates: Tensor) -> Tensor:
    """The signed gap of each constraint, TPR first."""
    both = pairs(rates)
    return both[..., 0] - both[..., 1]


def both_sides(rates: Tensor) -> Tensor:
    """Two values per gap, to be at most the tolerance: gap and -gap."""
    gap = gaps(rates)
    return torch.cat([gap, -gap], -1)


def auc(positive: Tensor, negative: Tensor) -> Tensor:
    """The probability that a positive score (..., n) is above a negative one (..., m).

    Ties count half.
    """
    ordered = negative.sort(-1).values
    below = torch.searchsorted(ordered, positive.contiguous(), right=False)
    not_above = torch.searchsorted(ordered, positive.contiguous(), right=True)
    number = positive.shape[-1] * negative.shape[-1]
    return (below + not_above).sum(-1).double() / (2 * number)


def largest_gap(first: Tensor, second: Tensor) -> Tensor:
    r"""The largest difference of P(s > tau) between two samples of scores over all thresholds tau.

    With the positive samples of two groups it is the largest TPR gap, with the negative ones the
    largest FPR gap: no threshold is chosen and nothing is smoothed.
    """
    one, two = first.sort(-1).values, second.sort(-1).values
    at = torch.cat([one, two], -1)
    below_one = torch.searchsorted(one, at, right=True).double() / one.shape[-1]
    below_two = torch.searchsorted(two, at, right=True).double() / two.shape[-1]
    return (below_one - below_two).abs().amax(-1)


def gap_floor(first: int, second: int) -> float:
    r"""What `largest_gap` shows on average when both samples have the same distribution.

    .. math::
        \sqrt{\pi/2}\,\ln 2\, \sqrt{1/n_1 + 1/n_2}

    the mean of Kolmogorov's limit distribution: a small test set cannot show a smaller gap.
    """
    return math.sqrt(math.pi / 2) * math.log(2) * math.sqrt(1 / first + 1 / second)


def excess_gap(gap: Tensor, floor: float) -> Tensor:
    """The gap beyond chance: the root of gap^2 - floor^2, 0 where that is negative."""
    return (gap.square() - floor**2).clamp(min=0.0).sqrt()
