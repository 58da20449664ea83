"""Figures of one method on one problem, methods side by side, steps against batch sizes, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from studies.runner import Job

from .entries import ENTRIES, Entry
from .problems import PROBLEMS, Problem
from .tuning import Budget, Pool, accuracies, cheapest, reached, tune, window_means

OUTPUTS = ("last", "average")
DRAWS = 100  # of the bootstrap over seeds
FIRST_FIT = 100  # steps; what is reached sooner is not limited by noise
Row = dict[str, Any]
Table = list[list[str]]


def measure(entry: Entry, problem: Problem, budget: Budget, seed: int) -> Row:
    """Tune a method on a problem and measure it on fresh seeds."""
    pool = tune(entry, problem, budget, seed)
    row: Row = {output: _figures(pool, problem, output) for output in OUTPUTS}
    row["hyperparameters"] = [
        None if k is None else {name: float(f"{float(h[k]):.4g}") for name, h in pool.h.items()}
        for k in row["last"]["setting"]
    ]
    return row | {"seconds": round(pool.trace.seconds, 2)}


def _figures(pool: Pool, problem: Problem, output: str) -> Row:
    """Per accuracy: the chosen setting, its samples on fresh seeds, and the same by bootstrap."""
    fresh = np.arange(pool.budget.tuning, pool.budget.seeds)
    generator = np.random.default_rng(0)
    picks = [generator.choice(fresh, len(fresh)) for _ in range(DRAWS)]
    row: Row = {"setting": [], "samples": [], "steps": [], "bootstrap": []}
    for level in (levels := accuracies(problem)):
        best = cheapest(pool, output, level)
        row["setting"].append(best)
        counts: list[float | None] = [None]
        if best is not None:
            errors = getattr(pool.trace, output)[:, :, best]
            counts = [_steps_to(pool, errors[:, pick], level) for pick in (fresh, *picks)]
        samples = [_samples(pool, best, count) for count in counts]
        row["steps"].append(None if counts[0] is None else int(counts[0]))
        row["samples"].append(samples[0])
        row["bootstrap"].append(samples[1:])
    row["exponent"], row["exponent_se"] = exponent(levels, row)
    return row


def _steps_to(pool: Pool, errors: np.ndarray, level: float) -> float | None:
    means = window_means(pool.trace.steps, np.median(errors, axis=1))
    count = float(reached(pool.trace.steps, means[:, None], level)[0])
    return count if np.isfinite(count) else None


def _samples(pool: Pool, setting: int | None, steps: float | None) -> float | None:
    if setting is None or steps is None:
        return None
    return round(pool.first + steps * float(pool.cost[setting]), 1)


def exponent(levels: np.ndarray, row: Row) -> tuple[float | None, float | None]:
    """The slope of log samples against log 1/accuracy, and its bootstrap standard error."""
    used = [k for k, s in enumerate(row["steps"]) if s is not None and s >= FIRST_FIT]
    if len(used) < 4:
        return None, None
    value = slope_of([1 / levels[k] for k in used], [row["samples"][k] for k in used])
    drawn = []
    for again in zip(*(row["bootstrap"][k] for k in used), strict=True):
        pairs = [(1 / levels[k], s) for k, s in zip(used, again, strict=True) if s is not None]
        if len(pairs) >= 4:
            drawn.append(slope_of(*zip(*pairs, strict=True)))
    error = float(np.std(drawn)) if len(drawn) > 1 else None
    return round(value, 2), None if error is None else round(error, 2)


def slope_of(x: Any, y: Any) -> float:
    """The slope of a straight line through the logarithms."""
    return float(np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)[0])


def geometric_mean(over: Sequence[float | None], under: Sequence[float | None]) -> Any:
    """Of the ratios at the accuracies that both reach, and how many these are."""
    pairs = zip(over, under, strict=True)
    logs = [np.log(a / b) for a, b in pairs if a is not None and b is not None]
    return (float(np.exp(np.mean(logs))), len(logs)) if logs else (None, 0)


def compare(over: Row, under: Row) -> Row:
    """The ratio of samples of two methods at each accuracy that both reach, for one output.

    Also at how many accuracies the second method needs more samples: at all, and by more than two
    bootstrap standard errors and one checkpoint (6 percent, at least one step).
    """
    ratios, worse = [], 0
    for k, (a, b) in enumerate(zip(over["samples"], under["samples"], strict=True)):
        if a is None or b is None:
            continue
        pairs = zip(over["bootstrap"][k], under["bootstrap"][k], strict=False)
        logs = [np.log(x / y) for x, y in pairs if x is not None and y is not None]
        error = float(np.std(logs)) if len(logs) > 1 else 0.0
        checkpoint = 0.06 + 1 / min(over["steps"][k], under["steps"][k])
        ratios.append(round(a / b, 3))
        worse += bool(np.log(a / b) < -max(2 * error, checkpoint))
    mean, _ = geometric_mean(over["samples"], under["samples"])
    return {"ratios": ratios, "geometric_mean": mean, "worse_by_two_se": worse}


BATCHES: dict[str, list[tuple[int, int]]] = {
    "B1": [(1, 1), (2, 1), (4, 1), (8, 1)],
    "B2": [(2, 1), (2, 4), (2, 16), (2, 64)],
}
NOISE = (1.0, 0.3)  # more than elsewhere, so that noise is the limit at every batch size
FEWEST = 30  # steps; what is reached sooner is not limited by noise


def cell(entry: Entry, problem: Problem, blocks: int, samples: int, budget: Budget) -> Row:
    """Steps to each accuracy with other batch sizes, tuned anew."""
    changed = replace(problem, blocks=blocks, samples=samples, noise=NOISE)
    pool = tune(entry, changed, budget)
    means = pool.errors("last", slice(budget.tuning, budget.seeds))
    steps: list[Any] = []
    for level in accuracies(changed):
        best, count = cheapest(pool, "last", level), np.inf
        if best is not None:
            count = float(reached(pool.trace.steps, means[:, best : best + 1], level)[0])
        steps.append(int(count) if np.isfinite(count) else None)
    return {"steps": steps}


def fit(levels: Sequence[float], sizes: list[int], steps: list[list[Any]]) -> Row:
    """The exponent of the batch size, at each accuracy that all sizes reach, but not at once."""
    counts = zip(levels, *steps, strict=True)
    used = {n: own for n, *own in counts if all(c is not None and c >= FEWEST for c in own)}
    slopes = [round(slope_of(sizes, own), 2) for own in used.values()]
    mean, std = (round(float(f(slopes)), 2) if slopes else None for f in (np.mean, np.std))
    return {"accuracies": list(used), "exponent": mean, "spread": std}


def run(job: Job) -> dict[str, Any]:
    """Tune and measure; the setting of a job is its budget."""
    torch.set_num_threads(1)
    setting = dict(job.setting)
    batch = setting.pop("batch", None)
    entry, problem, budget = ENTRIES[job.method], PROBLEMS[job.problem], Budget(**setting)
    if batch is None:
        return measure(entry, problem, budget, job.seed)
    blocks, samples = batch
    return cell(entry, problem, blocks, samples, budget)


# Tables, from what `collect` gives.


def _cell(value: Any, form: str = "{}") -> str:
    return "-" if value is None else form.format(value)


def _by_method(results: Row, cell: Any, head: Sequence[str] | None = None) -> Table:
    """Methods by problems; empty where a method is not for a problem."""
    problems: dict[str, Row] = results["problems"]
    methods = dict.fromkeys(m for each in problems.values() for m in each["methods"])
    rows = [["method", *(head or problems)]]
    for method in methods:
        own = [
            cell(p["methods"], method) if method in p["methods"] else "" for p in problems.values()
        ]
        rows.append([method, *own])
    return rows


def relative(results: Row, output: str = "last", *only: str) -> Table:
    """Samples relative to SONEX, geometric mean over the accuracies that both reach; how many."""

    def base(methods: Mapping[str, Row]) -> str:
        return "SONEX" if "SONEX" in methods else "SONX"  # S4 is not for SONEX

    def shown(methods: Mapping[str, Row], method: str) -> str:
        pair = (methods[each][output]["samples"] for each in (method, base(methods)))
        ratio, number = geometric_mean(*pair)
        return _cell(ratio, "{:.2f}" + f" ({number})")

    bases = {name: base(each["methods"]) for name, each in results["problems"].items()}
    head = [name if own == "SONEX" else f"{name} (to SONX)" for name, own in bases.items()]
    rows = _by_method(results, shown, head)
    return [row for k, row in enumerate(rows) if not (k and only) or row[0] in only]


def exponents(results: Row) -> Table:
    """Samples grow as accuracy to minus this power."""

    def shown(methods: Mapping[str, Row], method: str) -> str:
        own = methods[method]["last"]
        return _cell(own["exponent"], "{} ± " + str(own["exponent_se"]))

    return _by_method(results, shown)


def against(results: Row, title: str) -> Table:
    """All accuracies of one comparison."""
    rows = [["problem", "output", "accuracies", "mean ratio", "range", "below 1", "by 2 s.e."]]
    for name, outputs in results[title].items():
        for output, found in outputs.items():
            ratios, mean = found["ratios"], _cell(found["geometric_mean"], "{:.2f}")
            ends = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"
            below = str(sum(ratio < 1 for ratio in ratios))
            two = str(found["worse_by_two_se"])
            rows.append([name, output, str(len(ratios)), mean, ends, below, two])
    return rows


def scaling(results: Row) -> Table:
    """How steps fall with both batch sizes."""
    rows = [["problem", "method", "exponent of B1", "exponent of B2"]]
    for name, methods in results["scaling"].items():
        for method, fits in methods.items():
            cells = []
            for batch in BATCHES:
                found, levels = fits[batch], fits[batch]["accuracies"]
                where = (
                    f"{len(levels)} accuracies, {min(levels):.2g} to {max(levels):.2g}"
                    if levels
                    else ""
                )
                cells.append(_cell(found["exponent"], f"{{}} ± {found['spread']} ({where})"))
            rows.append([name, method, *cells])
    return rows
