"""What a fitted classifier says of itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...report import Report
from .training import Part, Task, losses_of, predicted

__all__ = ["ClassifierReport", "Figures", "GroupFigures", "classifier_report"]


@dataclass(frozen=True)
class GroupFigures:
    """Figures of one group.

    Attributes:
        name: its name.
        samples: how many there are.
        accuracy: share of right predictions.
        loss: mean cross-entropy.
        selection_rate: share that is predicted positive, the second of two classes; NaN for more
            classes.
        tpr: the same among positives.
        fpr: the same among negatives.
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
    """Figures of a part of the data.

    Attributes:
        part: "training" or "validation".
        samples: its rows.
        accuracy: share of right predictions.
        loss: mean cross-entropy.
        value: the figure that was asked for, see `ClassifierReport.name`.
        groups: the figures of each group.
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
        lines += [
            f"{part.part} ({part.samples} samples): {self.name} {part.value:.4f}, "
            f"accuracy {part.accuracy:.4f}"
            for part in parts
        ]
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
    columns += ["selected", "tpr", "fpr"] if not math.isnan(groups[0].selection_rate) else []
    width = max(5, *(len(group.name) for group in groups[:_SHOWN]))
    lines = [" ".join([" " * width, *(name.rjust(8) for name in columns)])]
    for group in groups[:_SHOWN]:
        values = (group.accuracy, group.loss, group.selection_rate, group.tpr, group.fpr)
        cells = [f"{group.samples:8d}", *(f"{value:8.3f}" for value in values)]
        lines.append(" ".join([group.name.ljust(width), *cells[: len(columns)]]))
    left = len(groups) - _SHOWN
    return lines + [f"... and {left} more"] * (left > 0)


def classifier_report(
    task: Task,
    names: Sequence[str],
    parts: dict[str, tuple[Tensor, Part]],
    objective: Any,
) -> ClassifierReport:
    """The report of scores.

    Args:
        task: what was trained for.
        names: of the groups.
        parts: scores and rows of the training and of the validation part.
        objective: the report of the objective, or None.
    """
    figures = {name: _figures(name, task, names, *part) for name, part in parts.items()}
    return ClassifierReport(
        task.asked, task.name, figures["training"], figures.get("validation"), objective
    )


def _figures(name: str, task: Task, names: Sequence[str], scores: Tensor, part: Part) -> Figures:
    scores, part = scores.cpu(), Part(*(each.cpu() for each in part))
    classes, losses = predicted(scores), losses_of(scores, part.y)
    binary = scores.dim() == 1 or scores.shape[1] == 1

    def group(name: str, rows: Tensor) -> GroupFigures:
        chosen, y = classes[rows], part.y[rows]
        selected = (chosen == 1).float() if binary else torch.full((len(y),), torch.nan)
        return GroupFigures(
            name,
            len(y),
            *(
                float(each.mean())
                for each in (
                    (chosen == y).float(), losses[rows], selected, selected[y == 1],
                    selected[y == 0],
                )
            ),
        )  # fmt: skip

    everyone = group("all", torch.ones_like(part.y, dtype=torch.bool))
    return Figures(
        name,
        everyone.samples,
        everyone.accuracy,
        everyone.loss,
        task.value(scores, part),
        tuple(group(each, rows) for each, rows in zip(names, part.members.T, strict=True)),
    )
