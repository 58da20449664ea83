"""How many steps a fixed accuracy takes as B1 and B2 grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .entries import Entry
from .problem import Problem
from .results import slope_of
from .tuning import Budget, accuracies, cheapest, reached, tune

__all__ = ["BATCHES", "cell", "fit"]

BATCHES: dict[str, list[tuple[int, int]]] = {
    "B1": [(1, 1), (2, 1), (4, 1), (8, 1)],
    "B2": [(2, 1), (2, 4), (2, 16), (2, 64)],
}
NOISE = (1.0, 0.3)  # more than in the race, so that noise is the limit at every batch size
FEWEST = 30  # steps; what is reached sooner is not limited by noise


def cell(entry: Entry, problem: Problem, blocks: int, samples: int, budget: Budget) -> list[Any]:
    """Steps to each accuracy with other batch sizes, tuned anew; one worker's job."""
    changed = replace(problem, blocks=blocks, samples=samples, noise=NOISE)
    pool = tune(entry, changed, budget)
    means = pool.errors("last", slice(budget.tuning, budget.seeds))
    steps: list[Any] = []
    for level in accuracies(changed):
        best, count = cheapest(pool, "last", level), np.inf
        if best is not None:
            count = float(reached(pool.trace.steps, means[:, best : best + 1], level)[0])
        steps.append(int(count) if np.isfinite(count) else None)
    return steps


def fit(levels: list[float], sizes: list[int], steps: list[list[Any]]) -> dict[str, Any]:
    """The exponent of the batch size, at each accuracy that all sizes reach, but not at once."""
    rows = []
    for k, level in enumerate(levels):
        counts = [each[k] for each in steps]
        if all(count is not None and count >= FEWEST for count in counts):
            rows.append(
                {"accuracy": level, "steps": counts, "exponent": round(slope_of(sizes, counts), 2)}
            )
    values = [row["exponent"] for row in rows]
    return {
        "sizes": sizes,
        "rows": rows,
        "exponent": round(float(np.mean(values)), 2) if rows else None,
        "spread": round(float(np.std(values)), 2) if rows else None,
    }
