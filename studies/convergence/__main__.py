"""Methods side by side: samples to each accuracy, at equal tuning budgets.

    python -m studies.convergence --json --workers 16         # four minutes
    python -m studies.convergence --quick --json              # the same, small, under a minute

Each method tries the same number of settings on each problem. The best for an accuracy is chosen
on some seeds and measured on others. See docs/research/details/convergence.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from studies import publish
from studies.runner import Job, Runner, command, parse

from . import results
from .entries import ENTRIES, legal
from .problems import PROBLEMS
from .results import BATCHES, OUTPUTS, compare, fit, run
from .tuning import Budget, accuracies

FULL, QUICK = Budget(128, 40_000, 5, 9), Budget(16, 400, 3, 5)
SCALED, SCALED_QUICK = Budget(64, 20_000, 5, 9), Budget(8, 200, 3, 5)
SCALED_METHODS, SCALED_PROBLEMS = ("SONEX", "SONX", "ALEXR2"), ("S1", "S2")
PAIRS = sorted({pair for pairs in BATCHES.values() for pair in pairs})
COMPARED = {"sonx_over_sonex": "SONX", "storm_over_sonex": "SONEX+STORM"}


def race(options: argparse.Namespace) -> list[Job]:
    """All pairs of a method and a problem where it is legal; those that take longest first."""
    budget = QUICK if options.quick else FULL
    budget = replace(budget, settings=options.settings or budget.settings)
    found = []
    for name in sorted(options.problems, key=lambda name: PROBLEMS[name].kind != "cvar"):
        problem, own = PROBLEMS[name], budget
        if problem.kind == "cvar" and not options.quick:
            # A step costs thrice as much: the threshold is exact.
            own = replace(budget, steps=budget.steps // 2)
        methods = [m for m in options.methods if legal(ENTRIES[m], problem)]
        found += [Job(name, method, asdict(own), options.seed) for method in methods]
    return found


def cells(options: argparse.Namespace) -> list[Job]:
    """The cells of the scaling."""
    budget = asdict(SCALED_QUICK if options.quick else SCALED)
    names = [name for name in SCALED_PROBLEMS[: 1 if options.quick else None]
             if name in options.problems and not options.no_scaling]  # fmt: skip
    methods = [method for method in SCALED_METHODS if method in options.methods]
    return [
        Job(name, method, {**budget, "batch": list(pair)}, 0)
        for name in names
        for method in methods
        for pair in PAIRS
    ]


def collect(raced: Sequence[tuple[Job, Any]], scaled: Sequence[tuple[Job, Any]]) -> dict[str, Any]:
    """The results by problem and method, and the comparisons."""
    problems: dict[str, Any] = {}
    for name, problem in PROBLEMS.items():
        own = {job.method: row for job, row in raced if job.problem == name}
        if own:
            methods = {method: own[method] for method in ENTRIES if method in own}
            levels = accuracies(problem).tolist()
            problems[name] = {"accuracies": levels, "methods": methods}
    found: dict[str, Any] = {"problems": problems}
    for title, over in COMPARED.items():
        found[title] = {
            name: {
                output: compare(*(each["methods"][m][output] for m in (over, "SONEX")))
                for output in OUTPUTS
            }
            for name, each in problems.items()
            if {over, "SONEX"} <= set(each["methods"])
        }
    scaling: dict[str, Any] = {}
    for name, method in dict.fromkeys((job.problem, job.method) for job, _ in scaled):
        steps = {
            tuple(job.setting["batch"]): row["steps"]
            for job, row in scaled
            if (job.problem, job.method) == (name, method)
        }
        scaling.setdefault(name, {})[method] = {
            batch: fit(
                accuracies(PROBLEMS[name]).tolist(),
                [pair[place] for pair in pairs],
                [steps[pair] for pair in pairs],
            )
            for place, (batch, pairs) in enumerate(BATCHES.items())
        }
    for problem in problems.values():  # the draws of the bootstrap would be most of it
        for row in problem["methods"].values():
            for output in OUTPUTS:
                row[output] = {k: v for k, v in row[output].items() if k != "bootstrap"}
    return found | {"scaling": scaling}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("convergence", __doc__)
    add = parser.add_argument
    add("--problems", nargs="*", choices=list(PROBLEMS), default=list(PROBLEMS))
    add("--methods", nargs="*", choices=list(ENTRIES), default=list(ENTRIES))
    add("--seed", type=int, default=0, help="of the settings and of the noise")
    add("--settings", type=int, help="per method instead of 128 (16)")
    add("--no-scaling", action="store_true", help="leave the batch sizes out")
    options = parse(parser, arguments, (1, 1))
    runner = Runner(run, dict, options.workers, options.out)
    raced, scaled = race(options), cells(options)
    runner([*raced, *scaled], "race")
    found = collect(*(list(zip(own, runner.of(own), strict=True)) for own in (raced, scaled)))
    tables = [results.relative(found, output) for output in OUTPUTS]
    tables += [results.exponents(found), *(results.against(found, title) for title in COMPARED)]
    tables += [results.scaling(found)] if scaled else []
    print("\n\n".join(map(publish.plain, tables)))
    if options.publish:
        publish.write(publish.RESULTS / "convergence", found, commit=options.commit)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
