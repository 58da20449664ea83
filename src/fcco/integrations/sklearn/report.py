"""What a fitted classifier says of itself: figures of groups, rates and their bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from ... import _checks
from ...report import Report
from .table import Array, Part
from .training import Goal, Scored, losses_of, predicted

__all__ = [
    "SIDES", "TARGETS", "ClassifierReport", "Cuts", "Figures", "GroupFigures",
    "OperatingPointReport", "Proportion", "best_threshold", "binomial_bound", "classifier_report",
    "keeps", "proportion",
]  # fmt: skip


@dataclass(frozen=True)
class GroupFigures:
    """Figures of one group; `loss` is the mean cross-entropy.

    Rates are shares that are predicted positive, the second of two classes: of all samples, of the
    positives and of the negatives. They are NaN for more than two classes.
    """

    name: str
    samples: int
    accuracy: float
    loss: float
    selection_rate: float
    tpr: float
    fpr: float


@dataclass(frozen=True)
class Figures:
    """Figures of a part of the data, "training" or "validation", and of each group in it.

    `value` is the figure that was asked for, see `ClassifierReport.name`.
    """

    part: str
    samples: int
    accuracy: float
    loss: float
    value: float
    groups: tuple[GroupFigures, ...]


@dataclass(frozen=True)
class ClassifierReport:
    """What was asked for and what was measured; printed, a table of the groups.

    Attributes:
        asked: what was asked for.
        name: of the figure that was asked for, such as "gap".
        training: figures of the rows that were trained on.
        validation: those of the rows that chose the epoch; None without such rows.
        objective: the report of the training objective, None where there is none.
    """

    asked: str
    name: str
    training: Figures
    validation: Figures | None
    objective: Report | None

    def __str__(self) -> str:
        parts = [part for part in (self.training, self.validation) if part is not None]
        lines = [f"asked: {self.asked}"]
        for part in parts:
            figures = f"{self.name} {part.value:.4f}, accuracy {part.accuracy:.4f}"
            lines.append(f"{part.part} ({part.samples} samples): {figures}")
        if len(parts[-1].groups) > 1:
            lines += ["", f"groups of the {parts[-1].part} part", *_table(parts[-1].groups)]
        if self.objective is not None:
            lines += ["", "constraints in training" if self.name == "gap" else "training"]
            lines += [str(self.objective)]
        return "\n".join(lines)


_SHOWN = 20
"""Groups that a printed report has at most."""


def _table(groups: Sequence[GroupFigures]) -> list[str]:
    columns = ["samples", "accuracy", "loss"]
    if not math.isnan(groups[0].selection_rate):
        columns += ["selected", "tpr", "fpr"]
    width = max(5, *(len(group.name) for group in groups[:_SHOWN]))
    lines = [" ".join([" " * width, *(name.rjust(8) for name in columns)])]
    for group in groups[:_SHOWN]:
        values = (group.accuracy, group.loss, group.selection_rate, group.tpr, group.fpr)
        cells = [f"{group.samples:8d}", *(f"{value:8.3f}" for value in values)]
        lines.append(" ".join([group.name.ljust(width), *cells[: len(columns)]]))
    if len(groups) > _SHOWN:
        lines.append(f"... and {len(groups) - _SHOWN} more")
    return lines


def classifier_report(
    goal: Goal, names: Sequence[str], parts: Mapping[str, Scored], objective: Any
) -> ClassifierReport:
    """The report of the scores of the parts, by their names."""
    found = {name: _figures(name, goal, names, *part) for name, part in parts.items()}
    return ClassifierReport(
        goal.asked, goal.name, found["training"], found.get("validation"), objective
    )


def _figures(name: str, goal: Goal, names: Sequence[str], scores: Tensor, part: Part) -> Figures:
    scores, part = scores.cpu(), Part(*(each.cpu() for each in part))
    classes, losses = predicted(scores), losses_of(scores, part.y)
    binary = scores.dim() == 1 or scores.shape[1] == 1

    def group(name: str, rows: Tensor) -> GroupFigures:
        chosen, y = classes[rows], part.y[rows]
        selected = (chosen == 1).float() if binary else torch.full((len(y),), torch.nan)
        means = (chosen == y).float(), losses[rows], selected, selected[y == 1], selected[y == 0]
        return GroupFigures(name, len(y), *(float(each.mean()) for each in means))

    all_rows = group("all", torch.ones_like(part.y, dtype=torch.bool))
    groups = tuple(group(each, rows) for each, rows in zip(names, part.members.T, strict=True))
    value = goal.value(scores, part)
    return Figures(name, all_rows.samples, all_rows.accuracy, all_rows.loss, value, groups)


# Operating points.

TARGETS = {"precision": "recall", "recall": "precision", "fpr": "recall"}
"""What is made as large as possible under each constraint."""

SIDES = {"precision": "lower", "recall": "lower", "fpr": "upper"}
"""From which side each rate is bounded: from where it could be worse."""


def binomial_bound(successes: Any, trials: Any, confidence: float, side: str = "lower") -> Any:
    r"""The exact one-sided bound of Clopper and Pearson for a probability p.

    .. math::
        P(\text{Bin}(n, \text{lower}) \ge k) = 1 - \text{confidence}

    With k successes in n trials p is at least this with the given confidence, whatever p is.
    `side="upper"` is the bound from above. k and n may be arrays.

    Example:
        >>> from fcco.integrations.sklearn import binomial_bound
        >>> round(float(binomial_bound(95, 100, 0.95)), 3)
        0.898
    """
    _checks.one_of("binomial_bound", "side", side, ("lower", "upper"))
    k, n = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    if side == "upper":
        return 1.0 - binomial_bound(n - k, n, confidence)
    with np.errstate(invalid="ignore"):
        bound = beta.ppf(1 - confidence, k, n - k + 1)
    return np.where(k > 0, bound, 0.0)


@dataclass(frozen=True)
class Proportion:
    """A rate that was counted, successes / trials, and what it says of the true one.

    That is at least `bound`, or for "fpr" at most, with the confidence asked for.
    """

    name: str
    successes: int
    trials: int
    measured: float
    bound: float

    def __str__(self) -> str:
        return f"{self.name} {self.measured:.4f} ({self.successes} of {self.trials})"


def proportion(name: str, chosen: Tensor, y: Tensor, confidence: float) -> Proportion:
    """The precision, recall or fpr of predictions `chosen` of the classes `y`, 0 or 1 each."""
    chosen, y = chosen.bool(), y.to(chosen.device).bool()
    among = {"precision": chosen, "recall": y, "fpr": ~y}[name]
    hits = among & (y if name == "precision" else chosen)
    k, n = int(hits.sum()), int(among.sum())
    bound = float(binomial_bound(k, n, confidence, SIDES[name]))
    return Proportion(name, k, n, k / n if n else math.nan, bound)


class Cuts:
    """All thresholds of some scores, from high to low; what lies above is predicted positive.

    `above` says how many samples lie above each threshold, `hits` how many of them are positive.
    """

    def __init__(self, scores: Tensor, y: Tensor) -> None:
        found, positive = scores.reshape(-1).cpu().numpy(), y.bool().cpu().numpy()
        order = np.argsort(-found, kind="stable")
        values = found[order].astype(np.float64)
        apart = np.concatenate([[True], values[1:] < values[:-1], [True]])  # none between equals
        ends = np.concatenate([values[:1] + 1, values, values[-1:] - 1])
        self.thresholds = (ends[:-1] / 2 + ends[1:] / 2)[apart]  # half-way between two
        self.above = np.arange(len(values) + 1)[apart]
        self.hits = np.append(0, np.cumsum(positive[order]))[apart]
        self.positives, self.negatives = int(positive.sum()), int((~positive).sum())

    def counts(self, rate: str) -> tuple[Array, Array]:
        """Successes and trials of a rate at each threshold."""
        if rate == "precision":
            return self.hits, self.above
        if rate == "recall":
            return self.hits, np.full_like(self.hits, self.positives)
        return self.above - self.hits, np.full_like(self.hits, self.negatives)

    def rates(self, rate: str) -> Array:
        """The rate at each threshold; 0 without trials."""
        k, n = self.counts(rate)
        return k / np.maximum(n, 1)


def keeps(constraint: str, values: Any, limit: float) -> Any:
    """Whether rates, or their bounds, keep a limit."""
    return values >= limit if SIDES[constraint] == "lower" else values <= limit


def best_threshold(cuts: Cuts, constraint: str, limit: float, confidence: float) -> float:
    """The threshold with the best target among those that keep the limit.

    With the confidence if any does, else as measured, else the one that comes closest.
    """
    target, measured = cuts.rates(TARGETS[constraint]), cuts.rates(constraint)
    bounds = binomial_bound(*cuts.counts(constraint), confidence, SIDES[constraint])
    for values in (bounds, measured):
        kept = keeps(constraint, values, limit)
        if kept.any():
            return float(cuts.thresholds[np.where(kept, target, -1.0).argmax()])
    closest = measured if SIDES[constraint] == "lower" else -measured
    return float(cuts.thresholds[closest.argmax()])


@dataclass(frozen=True)
class OperatingPointReport:
    """What was asked, what was measured, and what holds.

    Attributes:
        constraint: "precision", "recall" or "fpr".
        limit: what it was asked to be, at least or, for "fpr", at most.
        confidence: of the bounds.
        threshold: where the network's scores are cut.
        chosen: constraint and target on the rows that the threshold was set on.
        tested: the same on rows that were used for nothing else.
        training: the report of the training, at the threshold.
    """

    constraint: str
    limit: float
    confidence: float
    threshold: float
    chosen: tuple[Proportion, Proportion]
    tested: tuple[Proportion, Proportion]
    training: ClassifierReport

    @property
    def holds(self) -> bool:
        """Whether the bound of the tested constraint keeps the limit."""
        return bool(keeps(self.constraint, self.tested[0].bound, self.limit))

    @property
    def needed(self) -> int | None:
        """Trials with which the measured rate would show the limit; None where it would not."""
        share, limit = self.tested[0].measured, self.limit
        if self.constraint == "fpr":
            share, limit = 1 - share, 1 - limit
        trials = 2.0 ** np.arange(1, 41, 0.1)
        shown = binomial_bound(share * trials, trials, self.confidence) >= limit
        return int(np.ceil(trials[shown.argmax()])) if shown.any() else None

    def __str__(self) -> str:
        words = "at most" if self.constraint == "fpr" else "at least"
        first, second = self.tested
        percent = f"with {100 * self.confidence:g} % confidence"
        trials = {"precision": "predicted positives", "recall": "positives", "fpr": "negatives"}
        what, verdict = trials[self.constraint], "what was asked is not shown: "
        if self.holds:
            verdict = f"what was asked holds {percent}"
        elif first.trials == 0:
            verdict += f"there are no {what} to measure"
        elif self.needed is None:
            verdict += f"the measured {first.name} is not better than the limit"
        else:
            verdict += f"{first.trials} {what} are too few, about {self.needed} would be needed "
            verdict += f"at the measured {first.name}"
        return "\n".join([
            f"asked: {self.constraint} {words} {self.limit:g}, {second.name} as large as possible",
            f"threshold set where {self.chosen[0]}, {self.chosen[1]}",
            f"measured on other samples: {first}, {second}",
            f"{percent} each: {first.name} {words} {first.bound:.4f}, "
            f"{second.name} at least {second.bound:.4f}",
            verdict,
        ])  # fmt: skip
