"""What a fitted classifier says of itself: figures of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...report import Report
from .table import Part
from .training import Goal, Scored, losses_of, predicted

__all__ = ["ClassifierReport", "Figures", "GroupFigures", "classifier_report"]


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
