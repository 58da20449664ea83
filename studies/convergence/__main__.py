"""Methods side by side: samples to each accuracy, at equal tuning budgets.

    python -m studies.convergence --json --workers 16
    python -m studies.convergence --quick --json              # the same, small, under a minute

Each method tries the same number of settings on each problem. The best for an accuracy is chosen
on some seeds and measured on others. See docs/research/details/convergence.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from studies import publish
from studies.runner import Job, Runner, command, parse

from .methods import ENTRIES
from .problems import PROBLEMS
from .tuning import OUTPUTS, Budget, accuracies, run

FULL, QUICK = Budget(32, 40_000, 5, 9), Budget(16, 400, 3, 5)


def plan(options: argparse.Namespace) -> list[Job]:
    """All pairs of a method and a problem where it is legal; those that take longest first."""
    budget, found = QUICK if options.quick else FULL, []
    for name in sorted(options.problems, key=lambda name: PROBLEMS[name].kind != "cvar"):
        problem, own = PROBLEMS[name], budget
        if problem.kind == "cvar" and not options.quick:
            # A step costs thrice as much: the threshold is exact.
            own = replace(budget, steps=budget.steps // 2)
        methods = [m for m in options.methods if ENTRIES[m].legal(problem)]
        found += [Job(name, method, asdict(own), 0) for method in methods]
    return found


def collect(raced: Sequence[tuple[Job, Any]]) -> dict[str, Any]:
    """The results by problem and method."""
    problems: dict[str, Any] = {}
    for name, problem in PROBLEMS.items():
        own = {job.method: row for job, row in raced if job.problem == name}
        if own:
            methods = {method: own[method] for method in ENTRIES if method in own}
            problems[name] = {"accuracies": accuracies(problem), "methods": methods}
    return {"problems": problems}


def ratio(over: Sequence[float | None], under: Sequence[float | None]) -> str:
    """Geometric mean of the ratios at the accuracies that both reach, and how many these are."""
    pairs = zip(over, under, strict=True)
    logs = [math.log(a / b) for a, b in pairs if a is not None and b is not None]
    return f"{math.exp(statistics.fmean(logs)):.2f} ({len(logs)})" if logs else "-"


def relative(results: dict[str, Any], output: str = "last") -> list[list[str]]:
    """Samples relative to SONEX; empty where a method is not for a problem."""
    problems: dict[str, dict[str, Any]] = {n: p["methods"] for n, p in results["problems"].items()}
    rows = [["method", *problems]]
    for name in dict.fromkeys(m for methods in problems.values() for m in methods):
        cells = [
            ratio(*(methods[each][output]["samples"] for each in (name, "SONEX")))
            if {name, "SONEX"} <= methods.keys()
            else ""
            for methods in problems.values()
        ]
        rows.append([name, *cells])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("convergence", __doc__)
    add = parser.add_argument
    add("--problems", nargs="*", choices=list(PROBLEMS), default=list(PROBLEMS))
    add("--methods", nargs="*", choices=list(ENTRIES), default=list(ENTRIES))
    options = parse(parser, arguments, (1, 1))
    runner, jobs = Runner(run, dict, options.workers, options.out), plan(options)
    found = collect(list(zip(jobs, runner(jobs, "race"), strict=True)))
    print("\n\n".join(publish.plain(relative(found, output)) for output in OUTPUTS))
    publish.conclude(options, "convergence", found)


if __name__ == "__main__":
    main()
