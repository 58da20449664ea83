"""Data in cells, the scoring network, the constraints, and the figures of an evaluation.

Figures work on the last axis: of one run, or of many runs with one row each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ..base import PART_KEYS, perceptron
from .config import Fairness

__all__ = [
    "CellBatches",
    "Cells",
    "Level",
    "Measure",
    "Scorer",
    "auc",
    "excess_gap",
    "figures",
    "gap_floor",
    "gaps",
    "largest_gap",
    "network",
    "pairs",
    "scorer",
    "share_inside",
    "signed",
]

SMALLEST = 1e-6
"""Least deviation of scores that is divided by: all of them may be equal at the start."""


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


class CellBatches:
    """Rows of batches with a quarter from each cell; they depend on the seed and the epoch alone.

    Args:
        config: its `batch` is used.
        seed: of the draws.
        train: the training data.
        copies: independent batches of a step.
    """

    def __init__(self, config: Fairness, seed: int, train: Cells, copies: int) -> None:
        self.per_cell, self.seed, self.train, self.copies = config.batch // 4, seed, train, copies
        # As many steps as draw the number of training samples.
        self.steps_per_epoch = max(1, math.ceil(len(train) / (config.batch * copies)))
        self._drawn = 0
        self._epoch: Tensor | None = None

    def epoch(self, epoch: int) -> Tensor:
        """All rows of an epoch, (steps, copies, batch), uniform in each cell."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        number, counts = self.steps_per_epoch * self.copies, self.train.counts[:, None]
        uniform = torch.rand(number, 4, self.per_cell, generator=generator, dtype=torch.float64)
        rows = self.train.starts[:, None] + (uniform * counts).long()
        return rows.view(self.steps_per_epoch, self.copies, -1)

    def draw(self) -> Tensor:
        """Rows of the next step, (copies, batch)."""
        epoch, within = divmod(self._drawn, self.steps_per_epoch)
        if self._epoch is None or within == 0:
            self._epoch = self.epoch(epoch)
        self._drawn += 1
        return self._epoch[within]

    def state_dict(self) -> dict[str, Any]:
        """How far the draws have come."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after those draws."""
        self._drawn, self._epoch = int(state["drawn"]), None


def network(features: int, hidden: Sequence[int]) -> nn.Sequential:
    """A perceptron with one output."""
    return nn.Sequential(*perceptron(features, hidden, 1), nn.Flatten(0))


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
        level = Level(mean, deviation, at)
        if self.shares is None:
            return level
        quantiles = torch.quantile(level.scores(output), self.shares.to(output), dim=-1)
        return level._replace(thresholds=quantiles.movedim(0, -1))

    @torch.no_grad()
    def calibrate(self, inputs: Tensor) -> Tensor:
        """Set the statistics and the quantile thresholds from all training data; its scores."""
        output = self.body(inputs)
        level = self.level(output)
        for buffer, value in zip((self.mean, self.deviation, self.thresholds), level, strict=True):
            buffer.copy_(value)
        return level.scores(output)


def scorer(config: Fairness, seed: int, train: Cells) -> Scorer:
    """The model of a seed before its first step: it depends on no method."""
    torch.manual_seed(seed)
    body = network(train.inputs.shape[1], config.hidden)
    quantiles = config.threshold_kind == "quantile"
    normalised = config.score == "normalised"
    model = Scorer(body, train.prior, normalised, config.thresholds, quantiles)
    if quantiles:  # so that the first evaluation has thresholds, not shares
        model.calibrate(train.inputs)
    return model


@dataclass(frozen=True)
class Measure:
    """From scores to the loss and the rates.

    Args:
        prior: share of each cell (group, label) in the population.
        temperature: T of the rates.
        pair_temperature: of the pairwise objective.
        objective: `"auc"` or `"bce"`.
    """

    prior: Tensor
    temperature: float
    pair_temperature: float
    objective: str

    @classmethod
    def of(cls, config: Fairness, train: Cells) -> Measure:
        """The measure of an experiment."""
        return cls(train.prior, config.temperature, config.pair_temperature, config.objective)

    def loss(self, cells: Tensor) -> Tensor:
        r"""Of a batch (4, b): minus the pairwise sigmoid AUC, or the cross-entropy.

        .. math::
            -\sum_{i\in +}\sum_{j\in -} p_i p_j\, \sigma((s_i - s_j)/T_p)

        with the weights p that make a batch with equal cells an unbiased sample of the pairs.
        """
        width = cells.shape[1]
        if self.objective == "bce":
            target = cells.new_tensor([0.0, 1.0, 0.0, 1.0])[:, None].expand_as(cells)
            losses = binary_cross_entropy_with_logits(cells, target, reduction="none")
            return self.prior @ losses.mean(1)
        weight = self.prior.view(2, 2)
        weight = (weight / weight.sum(0)).repeat_interleave(width, 0) / width
        positive, negative = cells[1::2].reshape(-1), cells[0::2].reshape(-1)
        won = torch.sigmoid((positive[:, None] - negative) / self.pair_temperature)
        return -(weight[:, 1] @ won @ weight[:, 0])

    def rates(self, cells: Tensor, thresholds: Tensor) -> Tensor:
        """The smoothed share of each cell above each threshold: (..., 4, thresholds)."""
        at = thresholds[..., None, None, :]
        return torch.sigmoid((cells.unsqueeze(-1) - at) / self.temperature).mean(-2)

    def full_rates(self, cells: list[Tensor], thresholds: Tensor) -> Tensor:
        """The same for cells of different size."""
        return torch.cat([self.rates(cell[..., None, :], thresholds) for cell in cells], -2)

    def batch(self, model: Any, inputs: Tensor, state: Callable[[Tensor], Tensor] | None) -> Any:
        """Loss of a batch and, where a method has constraints, its inner values.

        The prior is the model's: in a fleet every run has its own.

        Args:
            model: a `Scorer` in training.
            inputs: as many samples from each cell, in order.
            state: from rates to values, as the method needs them; None for the loss alone.
        """
        cells = model(inputs).view(4, -1)
        loss = replace(self, prior=model.prior).loss(cells)
        return loss if state is None else (loss, state(self.rates(cells, model.thresholds)))


def pairs(rates: Tensor) -> Tensor:
    """What is tracked: both groups' rates for each constraint, (2 thresholds, 2), TPR first."""
    by_group = rates.unflatten(-2, (2, 2)).flip(-2)  # group, positive before negative, threshold
    return by_group.flatten(-2).mT


def gaps(rates: Tensor) -> Tensor:
    """The signed gap of each constraint, TPR first."""
    both = pairs(rates)
    return both[..., 0] - both[..., 1]


def signed(rates: Tensor, tolerance: float) -> Tensor:
    """Two constraints per gap: gap - kappa and -gap - kappa."""
    gap = gaps(rates)
    return torch.cat([gap, -gap], -1) - tolerance


def auc(positive: Tensor, negative: Tensor) -> Tensor:
    r"""The probability that a positive sample has the higher score; ties count half.

    Args:
        positive: scores (..., n).
        negative: scores (..., m).

    Example:
        >>> auc(torch.tensor([0.2, 0.8]), torch.tensor([0.1, 0.2])).item()
        0.875
    """
    ordered = negative.sort(-1).values
    below = torch.searchsorted(ordered, positive.contiguous(), right=False)
    not_above = torch.searchsorted(ordered, positive.contiguous(), right=True)
    number = positive.shape[-1] * negative.shape[-1]
    return (below + not_above).sum(-1).double() / (2 * number)


def largest_gap(first: Tensor, second: Tensor) -> Tensor:
    r"""The largest difference of P(s > tau) between two samples over all thresholds tau.

    .. math::
        \max_\tau \bigl|\hat P_1(s > \tau) - \hat P_2(s > \tau)\bigr|

    With the positive samples of two groups it is the largest TPR gap, with the negative ones the
    largest FPR gap: no threshold is chosen and nothing is smoothed.

    Args:
        first: scores (..., n).
        second: scores (..., m).

    Example:
        >>> largest_gap(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0])).item()
        0.5
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

    the mean of Kolmogorov's limit distribution. A measured gap near it says nothing against
    equal rates, so a small test set cannot show a smaller one.

    Example:
        >>> round(gap_floor(590, 3256), 3)
        0.039
    """
    return math.sqrt(math.pi / 2) * math.log(2) * math.sqrt(1 / first + 1 / second)


def excess_gap(gap: Tensor, floor: float) -> Tensor:
    r"""The gap of the ROC curves beyond what a sample of this size shows when there is none.

    .. math::
        \sqrt{\max(\text{gap}^2 - \text{floor}^2,\, 0)}

    Example:
        >>> [round(v, 3) for v in excess_gap(torch.tensor([0.053, 0.03]), 0.039).tolist()]
        [0.036, 0.0]
    """
    return (gap.square() - floor**2).clamp(min=0.0).sqrt()


def share_inside(scores: Tensor, thresholds: Sequence[float] | Tensor) -> Tensor:
    """The share of scores (..., n) between the lowest and the highest of thresholds (..., m)."""
    at = torch.as_tensor(thresholds, dtype=scores.dtype, device=scores.device)
    low, high = at.amin(-1, keepdim=True), at.amax(-1, keepdim=True)
    return ((scores >= low) & (scores <= high)).double().mean(-1)


def figures(
    outputs: Mapping[str, Tensor],
    parts: Mapping[str, Cells],
    level: Level,
    measure: Measure,
    tolerance: float,
) -> dict[str, Tensor | float]:
    """All figures of an evaluation by key: numbers (...), and the constraints (..., m).

    Args:
        outputs: of the network on each part of the data, (..., n).
        parts: the data by name.
        level: of the outputs on training data.
        measure: for the smoothed rates.
        tolerance: kappa.
    """
    found: dict[str, Tensor | float] = {}
    for part, key in PART_KEYS.items():
        if part not in parts:
            continue
        scores = level.scores(outputs[part])
        cells = parts[part].split(scores)
        tpr_gap, fpr_gap = (largest_gap(cells[y], cells[2 + y]) for y in (1, 0))
        floor = max(gap_floor(cells[y].shape[-1], cells[2 + y].shape[-1]) for y in (1, 0))
        gap = torch.maximum(tpr_gap, fpr_gap)
        violations = gaps(measure.full_rates(cells, level.thresholds)).abs() - tolerance
        found |= {
            f"{key}_auc": auc(torch.cat(cells[1::2], -1), torch.cat(cells[0::2], -1)),
            f"{key}_violation": violations.amax(-1),
            f"{key}_inside": share_inside(scores, level.thresholds),
            f"{key}_gap": gap,
            f"{key}_excess_gap": excess_gap(gap, floor),
            f"{key}_tpr_gap": tpr_gap,
            f"{key}_fpr_gap": fpr_gap,
            f"{key}_gap_floor": floor,
            "constraints" if key == "train" else f"{key}_constraints": violations,
        }
    scores = level.scores(outputs["train"])
    return found | {"score_mean": scores.mean(-1), "score_deviation": scores.std(-1)}
