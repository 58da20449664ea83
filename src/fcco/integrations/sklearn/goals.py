"""What the classifiers train for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from ... import xrisk
from ..._watch import warn
from ...group_dro import CVaRGroupDRO
from ...groups import GroupBatchSampler, PositiveBatchSampler
from ...inputs import Measured
from ...methods import constrained
from ...outer import CVaR
from .table import Groups, Part, distinct
from .training import (
    STEEP,
    Goal,
    Plan,
    Problem,
    Scored,
    Settings,
    Shuffled,
    adamw,
    losses_of,
    plain,
    predicted,
)

__all__ = ["CONSTRAINTS", "AveragePrecision", "Gap", "WorstGroup"]

LABELS: dict[str, tuple[int | None, ...]] = {
    "equalized_odds": (1, 0),
    "demographic_parity": (None,),
    "tpr": (1,),
    "fpr": (0,),
}
"""The labels whose samples are counted, each in rates of their own; None for all samples."""

CONSTRAINTS = (*LABELS, "group_loss")

MOST_GROUPS = 300
"""Rates are compared in pairs, and there are as many as the square of this."""

LEAST = 0.25
"""The share of the tolerance that training aims at, at least."""

EXCHANGE = 2.0
"""Accuracy that an epoch may have less if its gap is smaller by 1."""


class Gap(Goal):
    """Cross-entropy, while means of cells of the data differ by at most a tolerance.

    A cell is a group, or its positives or negatives.
    """

    name = "gap"
    plan = Plan(passes=4, per_epoch=16, steps=64, learning_rate=0.02)

    def __init__(self, constraint: str, tolerance: float, groups: Groups) -> None:
        self.constraint, self.tolerance, number = constraint, tolerance, len(groups.names)
        self.of_losses = constraint == "group_loss"
        if self.of_losses:
            self.asked = f"loss of every group at most {tolerance:g} above that of all samples"
            labels, pairs = [""], [(k, number) for k in range(number)]  # the last cell is all
        elif number > MOST_GROUPS:
            raise ValueError(
                f"`fit(sensitive_features=...)` has {number} groups, more than {MOST_GROUPS}: "
                "their rates are compared in pairs. Put its values into classes."
            )
        else:
            self.asked = f"{constraint} gap of at most {tolerance:g}"
            labels = [{1: "tpr ", 0: "fpr ", None: ""}[label] for label in LABELS[constraint]]
            pairs = list(itertools.permutations(range(number), 2))
        names = (*groups.names, "all")
        self.means = [f"{label}{name}" for label in labels for name in groups.names]
        self.names = distinct(
            f"{label}{names[i]} - {names[j]}" for label in labels for i, j in pairs
        )
        starts = range(0, len(labels) * number, number)
        cells = [(start + i, start + j) for start in starts for i, j in pairs]
        self.pairs = torch.tensor(cells, dtype=torch.int64).view(-1, 2)
        self.limit = torch.full((len(cells),), tolerance)  # what training aims at

    def cells(self, part: Part) -> Tensor:
        """Which samples count in which mean, (n, cells), 0 or 1."""
        members = part.members
        if self.of_losses:
            kept = [members, torch.ones_like(members[:, :1])]
        else:
            kept = [
                members if label is None else members & (part.y == label)[:, None]
                for label in LABELS[self.constraint]
            ]
        return torch.cat(kept, dim=1).to(part.x)

    def problem(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, part: Part, settings: Settings
    ) -> Problem:
        """A limit for each pair of cells that has samples.

        It is the tolerance minus what two rates of new data differ by chance: one standard error,
        here that of the labels. Less than a quarter of the tolerance costs more than it gains.
        """
        all_cells = self.cells(part)
        sizes = all_cells.sum(0).double().cpu()
        filled = (sizes > 0)[self.pairs].all(1)
        self.pairs, self.limit = self.pairs[filled], self.limit[filled]
        if len(self.pairs) == 0 or part.members.shape[1] < 2:
            return plain(module, part, settings)
        empty = list(itertools.compress(self.means, (sizes == 0).tolist()))
        if empty:
            more = [f"and {len(empty) - 10} more"] if len(empty) > 10 else []
            warn(
                "`ConstrainedClassifier.fit(sensitive_features=...)`: not constrained, as the "
                f"training part has no samples for it: {', '.join(empty[:10] + more)}."
            )
        if not self.of_losses:
            share = float(part.y.double().mean())
            error = (share * (1 - share) * (1 / sizes)[self.pairs].sum(1)).sqrt()
            self.limit = (self.limit - error).clip(LEAST * self.tolerance)
        names = itertools.compress(self.names, filled.tolist())
        limits = dict(zip(names, self.limit.tolist(), strict=True))
        objective = constrained(module, optimizer, limits)

        def loss(batch: Tensor) -> Tensor:
            x, y = part.take(batch)
            cells, pairs = all_cells.index_select(0, batch), self.pairs.to(y.device)
            counts = cells.sum(0)
            there = (counts > 0)[pairs].all(1)
            index = None
            if not bool(there.all()):  # a small group is not in every batch
                index = there.nonzero().view(-1)
                pairs = pairs[index]

            def difference(values: Tensor) -> Tensor:
                means = values @ cells / counts.clip(1)  # 0 / 0 has no gradient, not even 0
                first, second = means[pairs].unbind(1)
                return first - second

            def losses_and_gaps() -> Any:
                scores = module(x)
                losses = losses_of(scores, y)
                if self.of_losses:
                    return losses, difference(losses)
                counted = difference(predicted(scores.detach()).to(cells))
                return losses, Measured(counted, difference(STEEP * scores.view(-1).sigmoid()))

            return objective(losses_and_gaps, index)

        return Problem(objective, Shuffled(len(part.y), settings.batch_size), loss)

    def gap(self, *parts: Scored, limit: Tensor | float = 0.0) -> float:
        """The largest difference above a limit, over parts of the data together."""
        sums, counts = torch.zeros(()), torch.zeros(())
        for scores, part in parts:
            cells = self.cells(part).double()
            values = losses_of(scores, part.y) if self.of_losses else predicted(scores)
            sums, counts = sums + (values.double() @ cells).cpu(), counts + cells.sum(0).cpu()
        first, second = (sums / counts)[self.pairs].unbind(1)
        differences = (first - second).nan_to_num(0.0) - limit  # without samples: 0
        return float(differences.max()) if len(differences) else 0.0

    def value(self, scores: Tensor, part: Part) -> float:
        return self.gap((scores, part))

    def merit(self, training: Scored, held: Scored) -> float:
        """Accuracy on held-out rows, minus what the gap over all rows is too large by.

        Rates of a small group are too rough on the held-out rows alone.
        """
        accuracy = float((predicted(held[0]) == held[1].y).float().mean())
        return accuracy - EXCHANGE * max(self.gap(training, held, limit=self.limit), 0.0)


class WorstGroup(Goal):
    """CVaR of the losses of groups."""

    name = "worst-group loss"

    def __init__(self, worst: float, names: Sequence[str]) -> None:
        self.worst, self.names = worst, names
        self.asked = f"smallest mean loss of the worst {worst:g} of the groups"

    def problem(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, part: Part, settings: Settings
    ) -> Problem:
        present = part.members.any(0)
        # A sample counts in each of its groups; memberships are drawn, each group equally often.
        pairs = part.members[:, present].nonzero()
        names = list(itertools.compress(self.names, present.tolist()))
        if len(names) < 2:
            return plain(module, part, settings)
        ratio = max(self.worst, 1 / len(names))  # a share of less than one group is the worst
        objective = CVaRGroupDRO(module, optimizer, names=names, ratio=ratio)
        group = pairs[:, 1].cpu()
        batches = GroupBatchSampler(group, batch_size=settings.batch_size, seed=settings.seed)

        def loss(batch: list[int]) -> Tensor:
            rows, groups = pairs[batch].unbind(1)
            x, y = part.take(rows)
            return objective(lambda: losses_of(module(x), y), groups)

        return Problem(objective, batches, loss)

    def value(self, scores: Tensor, part: Part) -> float:
        """CVaR of the groups that the part has samples of; NaN without any."""
        members = part.members[:, part.members.any(0)].double()
        if members.shape[1] == 0:
            return math.nan
        losses = losses_of(scores, part.y).double() @ members / members.sum(0)
        return float(CVaR(self.worst)(losses))

    def merit(self, training: Scored, held: Scored) -> float:
        """Minus the value on held-out rows, or on the training part if they are in no group."""
        value = self.value(*held)
        return -(self.value(*training) if math.isnan(value) else value)


class AveragePrecision(Goal):
    """Average precision, after cross-entropy for as many epochs."""

    name = "average precision"
    asked = "largest average precision"
    epochs_share, rate_share = 0.5, 0.3

    def problem(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, part: Part, settings: Settings
    ) -> Problem:
        size, epochs = settings.batch_size, settings.max_epochs

        class Loader:
            def __iter__(self) -> Iterator[Any]:
                return map(part.take, Shuffled(len(part.y), size))

        faster = replace(settings, learning_rate=settings.learning_rate / self.rate_share)
        xrisk.warm_start(module, adamw(module, faster, part.x.device), Loader(), epochs)
        objective = xrisk.AveragePrecision(module, optimizer, labels=part.y)
        size = max(size, 2)
        quarter = max(1, min(size // 4, int(part.y.sum())))  # or all that there are
        batches = PositiveBatchSampler(part.y, size, positives=quarter, seed=settings.seed)

        def loss(batch: list[int]) -> Tensor:
            rows = torch.as_tensor(batch, device=part.y.device)
            x, y = part.take(rows)
            return objective(lambda: module(x).reshape(-1), y, rows)

        return Problem(objective, batches, loss)

    def figures(self, scores: Tensor, part: Part) -> dict[str, float]:
        """Without accuracy, as the scores have no threshold yet."""
        return {self.name: self.value(scores, part)}

    def value(self, scores: Tensor, part: Part) -> float:
        """Average precision; NaN without positives."""
        y = part.y.cpu().numpy()
        if not y.any():
            return math.nan
        return float(average_precision_score(y, scores.reshape(-1).cpu().numpy()))

    def merit(self, training: Scored, held: Scored) -> float:
        value = self.value(*held)
        return 0.0 if math.isnan(value) else value

    def threshold(self, scores: Tensor, part: Part) -> float:
        """The best for the accuracy: half-way between two scores, or beyond all of them."""
        values, y = scores.reshape(-1).cpu().double().numpy(), part.y.cpu().numpy()
        order = np.argsort(-values)
        ends = np.concatenate([[values.max() + 1], values[order], [values.min() - 1]])
        gained = np.append(0, np.cumsum(2 * y[order] - 1))  # right answers, by so many positives
        best = np.where(ends[:-1] > ends[1:], gained, -np.inf).argmax()  # not between equal scores
        return float((ends[best] + ends[best + 1]) / 2)
