"""Figures of one method on one problem, methods side by side, and steps against batch sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .entries import Entry
from .problems import Problem
from .public import seconds_per_step
from .tuning import Budget, Pool, accuracies, cheapest, reached, tune, window_means

OUTPUTS = ("last", "average")
DRAWS = 100  # of the bootstrap over seeds
FIRST_FIT = 100  # steps; what is reached sooner is not limited by noise
Row = dict[str, Any]


def measure(entry: Entry, problem: Problem, budget: Budget, seed: int, timed_steps: int) -> Row:
    """Tune a method on a problem and measure it on fresh seeds; one worker's job."""
    pool = tune(entry, problem, budget, seed)
    row: Row = {"label": entry.label(problem), "batched_seconds": round(pool.trace.seconds, 2)}
    for output in OUTPUTS:
        row[output] = _figures(pool, problem, output, budget.settings)
    prefixes = [n for n in (16, 32, 64, 128, 256) if n < budget.settings] + [budget.settings]
    row["by_settings"] = {
        str(n): _figures(pool, problem, "last", n, draws=0)["samples"] for n in prefixes
    }
    chosen = next((k for k in reversed(row["last"]["setting"]) if k is not None), 0)
    runs = entry.build(problem, {name: h[chosen : chosen + 1] for name, h in pool.h.items()}, 1)
    setting = {name: float(h) for name, h in runs.h.items()}
    row["seconds_per_step"] = seconds_per_step(entry, problem, setting, timed_steps)
    row["evaluations_per_block"] = {
        "values": entry.evaluations[0],
        "gradients": entry.evaluations[1],
    }
    row["hyperparameters"] = [
        None if k is None else {name: float(f"{float(h[k]):.4g}") for name, h in pool.h.items()}
        for k in row["last"]["setting"]
    ]
    return row


def _figures(pool: Pool, problem: Problem, output: str, first: int, draws: int = DRAWS) -> Row:
    """Per accuracy: the chosen setting, its samples on fresh seeds, and the same by bootstrap."""
    levels = accuracies(problem)
    fresh = np.arange(pool.budget.tuning, pool.budget.seeds)
    generator = np.random.default_rng(0)
    picks = [generator.choice(fresh, len(fresh)) for _ in range(draws)]
    settings: list[int | None] = []
    samples: list[float | None] = []
    steps: list[int | None] = []
    again: list[list[float | None]] = []
    for level in levels:
        best = cheapest(pool, output, level, first)
        settings.append(best)
        if best is None:
            samples.append(None)
            steps.append(None)
            again.append([])
            continue
        errors = getattr(pool.trace, output)[:, :, best]
        count = _steps_to(pool, errors[:, fresh], level)
        steps.append(None if count is None else int(count))
        samples.append(_samples(pool, best, count))
        counts = [_steps_to(pool, errors[:, pick], level) for pick in picks]
        again.append([_samples(pool, best, each) for each in counts])
    row: Row = {"setting": settings, "samples": samples, "steps": steps, "bootstrap": again}
    row["exponent"], row["exponent_se"] = exponent(levels, samples, steps, again)
    return row


def _steps_to(pool: Pool, errors: np.ndarray, level: float) -> float | None:
    means = window_means(pool.trace.steps, np.median(errors, axis=1))
    count = float(reached(pool.trace.steps, means[:, None], level)[0])
    return count if np.isfinite(count) else None


def _samples(pool: Pool, setting: int, steps: float | None) -> float | None:
    return None if steps is None else round(pool.first + steps * float(pool.cost[setting]), 1)


def exponent(
    levels: np.ndarray, samples: list[Any], steps: list[Any], again: list[list[Any]]
) -> tuple[float | None, float | None]:
    """The slope of log samples against log 1/accuracy, and its bootstrap standard error."""
    used = [k for k, s in enumerate(steps) if s is not None and s >= FIRST_FIT]
    if len(used) < 4:
        return None, None
    value = slope_of([1 / levels[k] for k in used], [samples[k] for k in used])
    drawn = []
    for draw in range(len(again[used[0]])):
        pairs = [(1 / levels[k], again[k][draw]) for k in used if again[k][draw] is not None]
        if len(pairs) >= 4:
            drawn.append(slope_of(*zip(*pairs, strict=True)))
    error = float(np.std(drawn)) if len(drawn) > 1 else None
    return round(value, 2), None if error is None else round(error, 2)


def slope_of(x: Any, y: Any) -> float:
    """The slope of a straight line through the logarithms."""
    return float(np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)[0])


def compare(levels: list[float], over: Row, under: Row) -> Row:
    """The ratio of samples of two methods at each accuracy that both reach, for one output.

    Returns the ratios, their bootstrap standard errors on the log scale, the geometric mean, and
    at how many accuracies the second method needs more samples: at all, and by more than two
    standard errors and one checkpoint (6 percent, at least one step).
    """
    rows = []
    for k, level in enumerate(levels):
        a, b = over["samples"][k], under["samples"][k]
        if a is None or b is None:
            continue
        logs = [
            np.log(x / y)
            for x, y in zip(over["bootstrap"][k], under["bootstrap"][k], strict=False)
            if x is not None and y is not None
        ]
        error = float(np.std(logs)) if len(logs) > 1 else 0.0
        checkpoint = 0.06 + 1 / min(over["steps"][k], under["steps"][k])
        beyond = bool(np.log(a / b) < -max(2 * error, checkpoint))
        rows.append(
            {"accuracy": level, "ratio": round(a / b, 3), "log_se": round(error, 3), "loss": beyond}
        )
    logs = [np.log(row["ratio"]) for row in rows]
    return {
        "rows": rows,
        "geometric_mean": round(float(np.exp(np.mean(logs))), 3) if rows else None,
        "worse": int(sum(log < 0 for log in logs)),
        "worse_by_two_se": sum(row["loss"] for row in rows),
        "compared": len(rows),
    }


BATCHES: dict[str, list[tuple[int, int]]] = {
    "B1": [(1, 1), (2, 1), (4, 1), (8, 1)],
    "B2": [(2, 1), (2, 4), (2, 16), (2, 64)],
}
NOISE = (1.0, 0.3)  # more than elsewhere, so that noise is the limit at every batch size
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
