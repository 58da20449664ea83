"""One run: all candidates of a method on a split of a table, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from threadpoolctl import threadpool_limits

from studies.runner import Job

from . import methods
from .methods import Array, Candidate
from .tables import PARTS, Part, read, split

LIMIT = 0.02  # the largest gap that is allowed
CONSTRAINTS = ("demographic_parity", "equalized_odds")
_LABELS = {"demographic_parity": (None,), "equalized_odds": (0, 1)}


def gap(predicted: Array, part: Part, constraint: str) -> tuple[float, float]:
    """The largest difference of rates between the two groups, and its standard error."""
    found = []
    for label in _LABELS[constraint]:
        counted = np.full(len(part.y), True) if label is None else part.y == label
        rates = [predicted[counted & (part.group == group)] for group in (0, 1)]
        error = math.sqrt(sum(rate.var() / len(rate) for rate in rates))
        found.append((abs(float(rates[0].mean() - rates[1].mean())), error))
    return max(found)


def choose(val: Sequence[Mapping[str, float]]) -> int:
    """The most accurate of those within the limit on validation rows, else the least gap."""
    within = [k for k, each in enumerate(val) if each["gap"] <= LIMIT]
    if within:
        return max(within, key=lambda k: val[k]["accuracy"])
    return min(range(len(val)), key=lambda k: val[k]["gap"])


def measure(candidate: Candidate, part: Part, constraint: str) -> dict[str, float]:
    """Expected accuracy and gap over the random draws of the predictions."""
    predicted = candidate.predict(part)
    value, error = gap(predicted, part, constraint)
    accuracy = float(np.where(part.y == 1, predicted, 1 - predicted).mean())
    found = {"accuracy": accuracy, "gap": value, "gap_error": error}
    if candidate.score is not None:
        found["auc"] = float(roc_auc_score(part.y, candidate.score(part)))
    return {name: round(value, 5) for name, value in found.items()}


@dataclass(frozen=True)
class Figures:
    """What the candidates of one run showed; the chosen one alone, where they are more than ten.

    Attributes:
        settings: of each candidate, in words.
        val: accuracy, gap, its standard error and AUC of each on validation rows.
        test: the same on test rows.
        seconds: CPU seconds of each fit, which may give several candidates.
    """

    settings: list[str]
    val: list[dict[str, float]]
    test: list[dict[str, float]]
    seconds: list[float]

    def chosen(self, part: str) -> dict[str, float]:
        """The figures, on a part, of the candidate that validation rows choose."""
        return getattr(self, part)[choose(self.val)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; a grid takes much room."""
        k = choose(self.val)
        kept = slice(k, k + 1) if len(self.settings) > 10 else slice(None)
        parts = ("settings", "val", "test")
        return {name: getattr(self, name)[kept] for name in parts} | {"seconds": self.seconds}


def run(job: Job) -> Figures:
    """Fit as the job says; its problem is `TABLE / CONSTRAINT`, its setting may limit `rows`."""
    torch.set_num_threads(1)
    threadpool_limits(1)
    table, _, constraint = job.problem.partition(" / ")
    parts = split(read(table), job.seed, job.setting.get("rows"))
    train, val, test = (parts[name] for name in PARTS)
    figures = Figures([], [], [], [])
    for candidate in methods.METHODS[job.method](train, val, constraint, job.seed):
        figures.settings.append(candidate.setting)
        figures.val.append(measure(candidate, val, constraint))
        figures.test.append(measure(candidate, test, constraint))
        if candidate.seconds is not None:
            figures.seconds.append(round(candidate.seconds, 4))
    return figures
