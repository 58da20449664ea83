"""Methods side by side: samples and seconds to each accuracy, at equal tuning budgets.

    python -m studies.convergence --json                     # all of it
    python -m studies.convergence --quick --json             # the same, small, under a minute
    python -m studies.convergence --output results           # also Markdown tables and plots

Each method tries the same number of settings on each problem. The best for an accuracy is chosen
on some seeds and measured on others. See docs/research/details/convergence.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import plots, tables
from .entries import ENTRIES, legal
from .problems import PROBLEMS
from .results import BATCHES, OUTPUTS, cell, compare, fit, measure
from .tuning import Budget, accuracies

FULL, QUICK = Budget(128, 40_000, 5, 9), Budget(16, 400, 3, 5)
SCALED, SCALED_QUICK = Budget(64, 20_000, 5, 9), Budget(8, 200, 3, 5)
SCALED_METHODS, SCALED_PROBLEMS = ("SONEX", "SONX", "ALEXR2"), ("S1", "S2")

Job = tuple[Any, ...]


def budget_of(options: argparse.Namespace) -> Budget:
    """What each method may try on a problem."""
    budget = QUICK if options.quick else FULL
    return budget if options.settings is None else replace(budget, settings=options.settings)


def jobs(options: argparse.Namespace) -> list[Job]:
    """All pairs of a method and a problem where it is legal, and the cells of the scaling."""
    full = not options.quick
    found: list[Job] = []
    for name, problem in PROBLEMS.items():
        if options.problems and name not in options.problems:
            continue
        budget = budget_of(options)
        if problem.kind == "cvar" and full:  # a step costs thrice as much: the threshold is exact
            budget = replace(budget, steps=budget.steps // 2)
        for method, entry in ENTRIES.items():
            if legal(entry, problem) and (not options.methods or method in options.methods):
                found.append(("compare", name, method, budget, options.seed, 300 if full else 15))
    if options.no_scaling:
        return found
    cells = sorted({pair for pairs in BATCHES.values() for pair in pairs})
    for name in SCALED_PROBLEMS if full else SCALED_PROBLEMS[:1]:
        if options.problems and name not in options.problems:
            continue
        for method in SCALED_METHODS:
            if options.methods and method not in options.methods:
                continue
            found += [
                ("scaling", name, method, pair, SCALED if full else SCALED_QUICK) for pair in cells
            ]
    return found


def work(job: Job) -> Any:
    """One job, in a process of its own."""
    torch.set_num_threads(1)
    kind, name, method, *rest = job
    if kind == "compare":
        return measure(ENTRIES[method], PROBLEMS[name], *rest)
    (blocks, samples), budget = rest
    return cell(ENTRIES[method], PROBLEMS[name], blocks, samples, budget)


def run(found: list[Job], workers: int) -> dict[Job, Any]:
    """All jobs, with a line on stderr for each that is done."""
    done: dict[Job, Any] = {}
    begin = time.perf_counter()

    def note(job: Job) -> None:
        elapsed = time.perf_counter() - begin
        what = " ".join(str(part) for part in job[:3])
        print(f"{len(done)}/{len(found)} {what} after {elapsed:.0f} s", file=sys.stderr, flush=True)

    if workers == 1:
        for job in found:
            done[job] = work(job)
            note(job)
        return done
    # The expensive ones first, so that none is left alone at the end.
    order = sorted(found, key=lambda job: PROBLEMS[job[1]].kind != "cvar")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        pending = {pool.submit(work, job): job for job in order}
        for future in as_completed(pending):
            done[pending[future]] = future.result()
            note(pending[future])
    return done


def collect(done: dict[Job, Any]) -> dict[str, Any]:
    """The results by problem and method, and the comparisons."""
    problems: dict[str, Any] = {}
    cells: dict[str, Any] = {}
    for name, problem in PROBLEMS.items():
        rows = {m: done[job] for m in ENTRIES for job in done if job[:3] == ("compare", name, m)}
        if rows:
            problems[name] = {
                "start": float(problem.error(problem.start)),
                "blocks": problem.blocks,
                "samples": problem.samples,
                "accuracies": accuracies(problem).tolist(),
                "methods": rows,
            }
        for method in SCALED_METHODS:
            steps = {j[3]: done[j] for j in done if j[:3] == ("scaling", name, method)}
            if steps:
                cells.setdefault(name, {})[method] = _fits(name, steps)
    results: dict[str, Any] = {"problems": problems, "scaling": cells}
    for title, over in (("sonx_over_sonex", "SONX"), ("storm_over_sonex", "SONEX+STORM")):
        results[title] = {
            name: {
                output: compare(
                    each["accuracies"],
                    each["methods"][over][output],
                    each["methods"]["SONEX"][output],
                )
                for output in OUTPUTS
            }
            for name, each in problems.items()
            if {over, "SONEX"} <= set(each["methods"])
        }
    results["sonx_over_sonex_by_settings"] = {
        name: _by_settings(problems[name]["methods"]) for name in results["sonx_over_sonex"]
    }
    return results


def _fits(name: str, steps: dict[tuple[int, int], list[Any]]) -> dict[str, Any]:
    levels = accuracies(PROBLEMS[name]).tolist()
    return {
        batch: fit(
            levels,
            [pair[0 if batch == "B1" else 1] for pair in pairs],
            [steps[pair] for pair in pairs],
        )
        for batch, pairs in BATCHES.items()
    }


def _by_settings(methods: dict[str, Any]) -> dict[str, float | None]:
    ratios: dict[str, float | None] = {}
    for count, samples in methods["SONX"]["by_settings"].items():
        pairs = zip(samples, methods["SONEX"]["by_settings"][count], strict=True)
        logs = [np.log(a / b) for a, b in pairs if a is not None and b is not None]
        ratios[count] = round(float(np.exp(np.mean(logs))), 3) if logs else None
    return ratios


def without_bootstrap(results: dict[str, Any]) -> dict[str, Any]:
    """The results to print: the draws of the bootstrap would be most of it."""
    for problem in results["problems"].values():
        for row in problem["methods"].values():
            for output in OUTPUTS:
                row[output].pop("bootstrap", None)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--quick", action="store_true", help="a small comparison, under a minute")
    parser.add_argument("--output", type=Path, help="folder for tables and plots")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--problems", nargs="*", choices=list(PROBLEMS))
    parser.add_argument("--methods", nargs="*", choices=list(ENTRIES))
    parser.add_argument("--seed", type=int, default=0, help="of the settings and of the noise")
    parser.add_argument("--input", type=Path, help="show the results in this file: run nothing")
    parser.add_argument("--settings", type=int, help="settings per method instead of 128 (16)")
    parser.add_argument("--no-scaling", action="store_true", help="leave the batch sizes out")
    options = parser.parse_args()
    if options.input is not None:
        results = json.loads(options.input.read_text().splitlines()[-1])
    else:
        begin = time.perf_counter()
        results = without_bootstrap(collect(run(jobs(options), options.workers)))
        results["seconds"] = round(time.perf_counter() - begin, 1)
        results["budget"] = {**vars(budget_of(options)), "seed": options.seed}
    text = tables.markdown(results)
    print(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "convergence.md").write_text(text)
        (options.output / "convergence.json").write_text(json.dumps(results))
        plots.draw(results, options.output)
    if options.json:
        print(json.dumps(results))
