"""One run: all candidates of a method on a split of a table, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from studies.runner import Job

from .methods import METHODS, ON_VALIDATION, Array
from .tables import Part, read, split

Figures = dict[str, list[Any]]
"""Of the candidates of a run their `settings` in words, figures on `val` and `test` rows, and the
CPU `seconds` of each fit, which may give several candidates."""
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


def measure(predicted: Array, part: Part, constraint: str) -> dict[str, float]:
    """Expected accuracy and gap over the random draws of the predictions."""
    value, error = gap(predicted, part, constraint)
    accuracy = float(np.where(part.y == 1, predicted, 1 - predicted).mean())
    found = {"accuracy": accuracy, "gap": value, "gap_error": error}
    return {name: round(value, 5) for name, value in found.items()}


def run(job: Job) -> Figures:
    """Fit as the job says; its problem is `TABLE / CONSTRAINT`, its setting may limit `rows`."""
    torch.set_num_threads(1)
    threadpool_limits(1)
    table, _, constraint = job.problem.partition(" / ")
    parts = split(read(table), job.seed, job.setting.get("rows"))
    figures: Figures = {name: [] for name in ("settings", "val", "test", "seconds")}
    more = {"val": parts["val"]} if job.method in ON_VALIDATION else {}
    for candidate in METHODS[job.method](parts["train"], constraint, job.seed, **more):
        figures["settings"].append(candidate.setting)
        for name in ("val", "test"):
            predicted = candidate.predict(parts[name])
            figures[name].append(measure(predicted, parts[name], constraint))
        if candidate.seconds is not None:
            figures["seconds"].append(round(candidate.seconds, 4))
    return kept(figures)


def kept(figures: Figures) -> Figures:
    """Of more than ten candidates the chosen one alone: a grid takes much room."""
    k = choose(figures["val"])
    own = slice(k, k + 1) if len(figures["settings"]) > 10 else slice(None)
    return {name: of if name == "seconds" else of[own] for name, of in figures.items()}
