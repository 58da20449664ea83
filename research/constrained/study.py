"""Constrained training: our methods beside Cooper and humancompatible-train.

    python -m research.constrained --json --workers 16 --output build/constrained
    python -m research.constrained --quick --json       # a smoke run, under a minute

Four problems (`adult` and `compas` need their files): 14 gaps of rates under
a cross-entropy, a convex problem whose optimum is known, and 1,000 constraints of which 64 are
sampled at a step. Every method gets the same model, initial weights, batches, Adam, schedule,
number of gradient evaluations, and K settings; the choice is made on a tuning seed, feasibility
first, and shown on fresh seeds. The peers are optional: what is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from fcco_experiments.data import MissingData

from . import bias, cost, grids, peers, plots, report
from .problems import NAMES, make
from .training import Job, Runner, builders

TUNING_SEED = 0
FRESH_SEEDS = range(101, 200)  # short trials for the grids saw seeds below 10


def compare(
    names: list[str], methods: list[str], runner: Runner, seeds: int, quick: bool
) -> dict[str, list[report.Result]]:
    """Tune every method on every problem, then train its chosen setting on fresh seeds."""
    evaluations = 60 if quick else None
    tried = {
        (problem, method): grids.settings(problem, method)[: 1 if quick else None]
        for problem in names
        for method in methods
        if method in grids.GRIDS[grids.family(problem)]
    }
    tuning = [
        Job(problem, method, dict(setting), TUNING_SEED, 0.0, evaluations)
        for (problem, method), settings in tried.items()
        for setting in settings
    ]
    runner(tuning, "tuning")
    chosen: dict[tuple[str, str], tuple[dict[str, Any], list[Any]]] = {}
    final: list[Job] = []
    runs: dict[tuple[str, str], dict[float, list[Job]]] = {}
    for (problem, method), settings in tried.items():
        traces = [
            runner.known[Job(problem, method, dict(s), TUNING_SEED, 0.0, evaluations).key]
            for s in settings
        ]
        best = dict(settings[report.choose(traces)])
        chosen[problem, method] = best, traces
        shifts = (0.0,) if quick else grids.MARGINS[grids.family(problem)]
        runs[problem, method] = {
            shift: [
                Job(problem, method, best, seed, shift, evaluations) for seed in FRESH_SEEDS[:seeds]
            ]
            for shift in shifts
        }
        final += [job for jobs in runs[problem, method].values() for job in jobs]
    runner(final, "fresh seeds")
    results: dict[str, list[report.Result]] = {}
    for (problem, method), (setting, traces) in chosen.items():
        by_shift = {
            shift: [runner.known[job.key] for job in jobs]
            for shift, jobs in runs[problem, method].items()
        }
        results.setdefault(problem, []).append(report.Result(method, setting, traces, by_shift))
    return results


def summarise(results: dict[str, list[report.Result]]) -> dict[str, Any]:
    """Figures by problem and method, and how ours stand."""
    found: dict[str, Any] = {}
    for problem, entries in results.items():
        target = report.target_of(entries)
        methods = {entry.method: entry.summary(target) for entry in entries}
        ours = [entry.method for entry in entries if entry.ours]
        found[problem] = {
            "optimum": make(problem).optimum,
            "target": target,
            "methods": methods,
            "verdict": report.verdict(methods, ours),
        }
    return found


def write(
    folder: Path,
    results: dict[str, list[report.Result]],
    tables: dict[str, str],
    biased: dict[str, list[float]] | None,
) -> None:
    """Markdown tables and pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in tables.items())
    (folder / "tables.md").write_text(text + "\n")
    if results:
        plots.frontiers(dict(results), folder / "constrained-frontiers.png")
        plots.progress(dict(results), folder / "constrained-progress.png")
    if biased is not None:
        plots.bias(biased, 0.005, folder / "constrained-bias.png")


def available(names: list[str]) -> tuple[list[str], list[str]]:
    """Problems whose data are there, and a note for each of the others."""
    found, notes = [], []
    for name in names:
        try:
            make(name)
            found.append(name)
        except MissingData as reason:
            notes.append(f"{name} is left out: {short(reason)}")
    return found, notes


def short(missing: Exception) -> str:
    """One line of what is said about missing data, and where they are looked for."""
    return f"{str(missing).splitlines()[0]} The variable FCCO_DATA names the folder of the data."


def finite(value: Any) -> Any:
    """JSON has no infinity: None instead."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--quick", action="store_true", help="few steps, one setting, one seed")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, default=3, help="fresh seeds")
    parser.add_argument("--output", type=Path, help="folder for tables, plots and finished jobs")
    parser.add_argument("--problems", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--methods", nargs="+", help="names; all by default")
    parser.add_argument("--skip", nargs="+", choices=("methods", "cost", "bias"), default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    names, notes = available(options.problems)
    notes += peers.notes()
    methods = [m for m in builders() if options.methods is None or m in options.methods]
    cache = None if options.output is None else options.output / "jobs.jsonl"
    runner = Runner(options.workers, cache)
    for note in notes:
        print(note, file=sys.stderr)
    tables: dict[str, str] = {}
    found: dict[str, Any] = {"notes": notes, "settings_tried": 1 if options.quick else grids.K}
    results: dict[str, list[report.Result]] = {}
    if "methods" not in options.skip:
        results = compare(
            names, methods, runner, 1 if options.quick else options.seeds, options.quick
        )
        found["problems"] = summarise(results)
        tables |= {
            name: report.table(entry["methods"]) for name, entry in found["problems"].items()
        }
    if "cost" not in options.skip:
        cases = cost.CASES[:1] if options.quick else cost.CASES
        found["cost"] = {
            f"{width}x{width}, m = {m}": cost.measure(width, m, 3 if options.quick else 25, True)
            for width, m in cases
        }
        tables["step cost"] = cost.table(found["cost"])
    biased = None
    if "bias" not in options.skip and "compas" in names:
        sizes, steps = (bias.SIZES[:2], 40) if options.quick else (bias.SIZES, 600)
        biased = found["bias"] = bias.measure(make("compas"), sizes, steps)  # type: ignore[arg-type]
    print("\n\n".join(f"{title}\n\n{body}" for title, body in tables.items()))
    for name, entry in found.get("problems", {}).items():
        print(f"{name}: {entry['verdict']}")
    if options.output is not None:
        write(options.output, results, tables, biased)
    if options.json:
        print(json.dumps(finite(found)))
