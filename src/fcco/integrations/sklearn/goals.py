"""What the classifiers train for, and what they report of it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor

from ... import _checks, xrisk
from ..._watch import warn
from ...group_dro import CVaRGroupDRO
from ...groups import GroupBatchSampler, PositiveBatchSampler
from ...inputs import Measured
from ...methods import constrained
from ...methods.registry import Table
from ...outer import CVaR
from ...report import Report
from .table import Groups, Part, distinct
from .training import (
    STEEP,
    Fit,
    Goal,
    Plan,
    Problem,
    Scored,
    Shuffled,
    adamw,
    losses_of,
    plain,
    predicted,
    scores_of,
)

LABELS: dict[str, dict[str, int | None]] = {
    "equalized_odds": {"tpr ": 1, "fpr ": 0},
    "demographic_parity": {"": None},
    "tpr": {"tpr ": 1},
    "fpr": {"fpr ": 0},
    "group_loss": {"": None},
}
"""The labels whose samples are counted, by the names of their rates; None for all samples."""

MOST_GROUPS = 300
"""Rates are compared in pairs, and there are as many as the square of this."""


class Gap(Goal):
    """Cross-entropy, while means of cells of the data differ by at most a tolerance.

    A cell is a group, or its positives or negatives.
    """

    name = "gap"
    plan = Plan(passes=4, per_epoch=16, steps=64, learning_rate=0.02)

    def __init__(self, constraint: str, tolerance: float, groups: Groups) -> None:
        call, names = "ConstrainedClassifier", groups.names
        _checks.one_of(call, "constraint", constraint, tuple(LABELS))
        _checks.in_interval(call, "tolerance", tolerance, 0.0, math.inf, open_high=True)
        self.tolerance, self.labels = tolerance, LABELS[constraint]
        self.of_losses = constraint == "group_loss"
        if self.of_losses:
            self.asked = f"loss of every group at most {tolerance:g} above that of all samples"
            pairs = [(k, len(names)) for k in range(len(names))]
            names = (*names, "all")
        elif len(names) > MOST_GROUPS:
            raise ValueError(
                f"`fit(sensitive_features=...)` has {len(names)} groups, more than {MOST_GROUPS}: "
                "their rates are compared in pairs. Put its values into classes."
            )
        else:
            self.asked = f"{constraint} gap of at most {tolerance:g}"
            pairs = list(itertools.permutations(range(len(names)), 2))
        self.means = [f"{label}{name}" for label in self.labels for name in names]
        self.names = distinct(
            f"{label}{names[i]} - {names[j]}" for label in self.labels for i, j in pairs
        )
        starts = range(0, len(self.means), len(names))
        cells = [(start + i, start + j) for start in starts for i, j in pairs]
        self.pairs = torch.tensor(cells, dtype=torch.int64).view(-1, 2)
        self.limit = torch.full((len(cells),), tolerance)  # what training aims at

    def members(self, part: Part) -> Tensor:
        members = part.members
        if self.of_losses:
            members = torch.cat([members, torch.ones_like(members[:, :1])], dim=1)
        kept = [
            members if label is None else members & (part.y == label)[:, None]
            for label in self.labels.values()
        ]
        return torch.cat(kept, dim=1)

    def problem(self, fit: Fit, optimizer: torch.optim.Optimizer) -> Problem:
        """A limit for each pair of cells that has samples.

        It is the tolerance minus what two rates of new data differ by chance: one standard error,
        here that of the labels. Less than a quarter of the tolerance costs more than it gains.
        """
        module, part, held, settings = fit
        sizes = self.members(part).sum(0).double().cpu()
        filled = (sizes > 0)[self.pairs].all(1)
        self.pairs, self.limit = self.pairs[filled], self.limit[filled]
        if len(self.pairs) == 0 or part.members.shape[1] < 2:
            return plain(fit)
        empty = list(itertools.compress(self.means, (sizes == 0).tolist()))
        if empty:
            more = f" and {len(empty) - 10} more" if len(empty) > 10 else ""
            warn(
                "`ConstrainedClassifier.fit(sensitive_features=...)`: not constrained, as the "
                f"training part has no samples for it: {', '.join(empty[:10])}{more}."
            )
        if not self.of_losses:
            share = float(part.y.double().mean())
            error = (share * (1 - share) * (1 / sizes)[self.pairs].sum(1)).sqrt()
            self.limit = (self.limit - error).clip(self.tolerance / 4)
        names = itertools.compress(self.names, filled.tolist())
        limits = dict(zip(names, self.limit.tolist(), strict=True))
        objective = constrained(module, optimizer, limits)

        endless = None
        if held is not None:  # not all at once: their multipliers would rise without end
            apart = part.of(held.apart)
            others = Shuffled(apart, min(settings.batch_size, len(apart.y) / 4))
            endless = itertools.chain.from_iterable(itertools.repeat(others))

        def loss(batch: Part) -> Tensor:
            both = [batch] if endless is None else [next(endless), batch]
            cells = [self.members(each).to(each.x) for each in both]
            there = torch.stack([each.sum(0) > 0 for each in cells])[:, self.pairs].all(0).all(1)
            # A small group is not in every batch.
            index = None if bool(there.all()) else there.nonzero().view(-1)
            pairs = self.pairs.to(there.device)
            pairs = pairs if index is None else pairs[index]

            def losses_and_gaps(batch: Part, cells: Tensor) -> Any:
                scores = scores_of(module, batch.x)
                losses = losses_of(scores, batch.y)

                def difference(values: Tensor) -> Tensor:
                    means = values @ cells / cells.sum(0).clip(1)  # 0 / 0 has no gradient
                    first, second = means[pairs].unbind(1)
                    return first - second

                if self.of_losses:
                    return losses, difference(losses)
                counted = difference(predicted(scores.detach()).to(cells))
                return losses, Measured(counted, difference(STEEP * scores.sigmoid()))

            values, *gradient = (
                functools.partial(losses_and_gaps, *each) for each in zip(both, cells, strict=True)
            )
            return objective(values, index, gradient=gradient[0] if gradient else None)

        return Problem(objective, Shuffled(fit.rest, settings.batch_size), loss)

    def gap(self, *parts: Scored, limit: Tensor | float = 0.0) -> float:
        """The largest difference above a limit, over parts of the data together."""
        sums, counts = torch.zeros(()), torch.zeros(())
        for scores, part in parts:
            cells = self.members(part).double()
            values = losses_of(scores, part.y) if self.of_losses else predicted(scores)
            sums, counts = sums + (values.double() @ cells).cpu(), counts + cells.sum(0).cpu()
        first, second = (sums / counts)[self.pairs].unbind(1)
        differences = (first - second).nan_to_num(0.0) - limit  # without samples: 0
        return float(differences.max()) if len(differences) else 0.0

    def value(self, scores: Tensor, part: Part) -> float:
        return self.gap((scores, part))

    def merit(self, training: Scored, held: Scored) -> float:
        """Accuracy on validation rows, minus twice what the gap over both is too large by.

        Rates of a small group are too rough on the validation rows alone.
        """
        accuracy = float((predicted(held[0]) == held[1].y).float().mean())
        return accuracy - 2 * max(self.gap(training, held, limit=self.limit), 0.0)


class WorstGroup(Goal):
    """CVaR of the losses of groups."""

    name = "worst-group loss"

    def __init__(self, worst: float, names: Sequence[str]) -> None:
        _checks.in_interval("WorstGroupClassifier", "worst", worst, 0.0, 1.0, open_low=True)
        self.worst, self.names = worst, names
        self.means = names
        self.asked = f"smallest mean loss of the worst {worst:g} of the groups"

    def problem(self, fit: Fit, optimizer: torch.optim.Optimizer) -> Problem:
        module, part, held, settings = fit
        present = part.members.any(0)
        # A sample counts in each of its groups; memberships are drawn, each group equally often.
        members = part.members[:, present]
        if held is not None:
            members = members.clone()
            members[held.apart] = False
        pairs = members.nonzero()
        names = list(itertools.compress(self.names, present.tolist()))
        if len(names) < 2:
            return plain(fit)
        ratio = max(self.worst, 1 / len(names))  # a share of less than one group is the worst
        objective = CVaRGroupDRO(module, optimizer, names=names, ratio=ratio)
        group = pairs[:, 1].cpu()
        batches = GroupBatchSampler(group, batch_size=settings.batch_size, seed=settings.seed)
        columns = present.nonzero().squeeze(1).cpu()

        def losses(rows: Tensor) -> Tensor:
            x, y = part.take(rows)
            return losses_of(scores_of(module, x), y)

        def loss(batch: list[int]) -> Tensor:
            rows, groups = pairs[batch].unbind(1)
            if held is None:
                return objective(lambda: losses(rows), groups)
            same = held.draw(columns[groups.cpu()]).to(rows.device)
            return objective(lambda: losses(same), groups, gradient=lambda: losses(rows))

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

    def problem(self, fit: Fit, optimizer: torch.optim.Optimizer) -> Problem:
        module, part, _, settings = fit
        faster, all_rows = adamw(module, settings), Shuffled(part, settings.batch_size)
        xrisk.warm_start(module, faster, all_rows, settings.max_epochs)
        objective = xrisk.AveragePrecision(module, optimizer, labels=part.y)
        size = max(settings.batch_size, 2)
        quarter = max(1, min(size // 4, int(part.y.sum())))  # or all that there are
        batches = PositiveBatchSampler(part.y, size, positives=quarter, seed=settings.seed)

        def loss(batch: list[int]) -> Tensor:
            rows = torch.as_tensor(batch, device=part.y.device)
            x, y = part.take(rows)
            return objective(lambda: scores_of(module, x), y, rows)

        return Problem(objective, batches, loss)

    def figures(self, scores: Tensor, part: Part) -> dict[str, float]:
        """Without accuracy, as the scores have no threshold yet."""
        return {self.name: self.value(scores, part)}

    def value(self, scores: Tensor, part: Part) -> float:
        """Average precision; NaN without positives."""
        y = part.y.cpu().numpy()
        if not y.any():
            return math.nan
        return float(average_precision_score(y, scores.cpu().numpy()))

    def merit(self, training: Scored, held: Scored) -> float:
        return float(np.nan_to_num(self.value(*held)))

    def threshold(self, scores: Tensor, part: Part) -> float:
        """The best for the accuracy: half-way between two scores, or beyond all of them."""
        values, y = scores.cpu().double().numpy(), part.y.cpu().numpy()
        order = np.argsort(-values)
        ends = np.concatenate([[values.max() + 1], values[order], [values.min() - 1]])
        gained = np.append(0, np.cumsum(2 * y[order] - 1))  # right answers, by so many positives
        best = np.where(ends[:-1] > ends[1:], gained, -np.inf).argmax()  # not between equal scores
        return float((ends[best] + ends[best + 1]) / 2)


@dataclass(frozen=True)
class Figures:
    """Figures of a group, or of a part of the data, "training" or "validation", and its groups.

    Rates are shares that are predicted positive, the second of two classes: of all samples, of the
    positives and of the negatives. They are NaN for more than two classes.

    Attributes:
        loss: the mean cross-entropy.
        value: the figure that was asked for, see `ClassifierReport.name`; NaN for a group.
    """

    name: str
    samples: int
    accuracy: float
    loss: float
    selection_rate: float
    tpr: float
    fpr: float
    value: float = math.nan
    groups: tuple[Figures, ...] = ()


SHOWN = 20
"""Groups that a printed report has at most."""


@dataclass(frozen=True)
class ClassifierReport:
    """The limits and what was measured; `print` shows a table of the groups.

    Attributes:
        name: of the figure that was asked for, such as "gap".
        objective: the report of the training objective, None where there is none.
        validation: figures of the rows that chose the epoch; None without such rows.
        holdout: figures of the rows that values were measured on, or None.
    """

    asked: str
    name: str
    objective: Report | None
    training: Figures
    validation: Figures | None = None
    holdout: Figures | None = None

    def __str__(self) -> str:
        last, lines = self.validation or self.training, [f"asked: {self.asked}"]
        for part in (self.training, self.holdout, self.validation):
            if part is not None:
                figures = f"{self.name} {part.value:.4f}, accuracy {part.accuracy:.4f}"
                lines.append(f"{part.name} ({part.samples} samples): {figures}")
        if len(last.groups) > 1:
            rows = [["group", "samples", "accuracy", "loss", "selected", "tpr", "fpr"]]
            for each in last.groups[:SHOWN]:
                rates = each.accuracy, each.loss, each.selection_rate, each.tpr, each.fpr
                rows.append([each.name, str(each.samples), *(f"{rate:.3f}" for rate in rates)])
            lines += ["", f"groups of the {last.name} part", str(Table(rows))]
            if len(last.groups) > SHOWN:
                lines.append(f"... and {len(last.groups) - SHOWN} more")
        if self.objective is not None:
            # The model that is kept has averaged weights, on which these estimates were not made.
            title = "running estimates of the last steps (above: of the model that is kept)"
            lines += ["", title, str(self.objective)]
        return "\n".join(lines)


def figures_of(name: str, goal: Goal, groups: Groups, scores: Tensor, part: Part) -> Figures:
    """The figures of a part and of its groups."""
    scores, part = scores.cpu(), Part(*(each.cpu() for each in part))
    classes, losses = predicted(scores), losses_of(scores, part.y)

    def of(rows: Tensor) -> tuple[Any, ...]:
        chosen, y = classes[rows], part.y[rows]
        selected = chosen.float() if scores.dim() == 1 else torch.full((len(y),), torch.nan)
        means = (chosen == y).float(), losses[rows], selected, selected[y == 1], selected[y == 0]
        return len(y), *(float(each.mean()) for each in means)

    each = zip(groups.names, part.members.T, strict=True)
    found = tuple(Figures(group, *of(rows)) for group, rows in each)
    everyone = torch.ones_like(part.y, dtype=torch.bool)
    return Figures(name, *of(everyone), value=goal.value(scores, part), groups=found)
