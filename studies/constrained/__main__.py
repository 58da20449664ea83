"""Constrained training: our methods beside Cooper and humancompatible-train.

    python -m studies.constrained --json --workers 16 --out build/constrained.jsonl
    python -m studies.constrained --quick --json       # a smoke run, under a minute

Four problems (`adult` and `compas` need their files): 14 gaps of rates under
a cross-entropy, a convex problem whose optimum is known, and 1,000 constraints of which 64 are
sampled at a step. Every method gets the same model, initial weights, batches, Adam, schedule,
number of gradient evaluations, and K settings; the choice is made on a tuning seed, feasibility
first, and shown on fresh seeds. The peers are optional: what is not installed is left out. The bias
of a penalty on mini-batch values is measured on COMPAS.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from studies import publish
from studies.runner import Job, Runner, available, command, note, parse, tuned

from . import bias, grids, peers, report, training
from .problems import NAMES, make

TUNING_SEED = 0
FRESH_SEEDS = range(101, 200)  # short trials for the grids saw seeds below 10


def compare(
    names: Sequence[str], methods: Sequence[str], runner: Runner, seeds: int, quick: bool
) -> dict[str, list[report.Result]]:
    """Tune every method on every problem, then train its chosen setting on fresh seeds."""

    def job(cell: tuple[str, str], setting: Any, seed: int, shift: float = 0.0) -> Job:
        return Job(*cell, dict(setting), seed, shift, 60 if quick else None)

    tried = {
        (problem, method): grids.settings(problem, method)[: 1 if quick else None]
        for problem in names
        for method in methods
        if method in grids.GRIDS[grids.family(problem)]
    }
    fresh = FRESH_SEEDS[:seeds]
    chosen = tuned(runner, tried, job, [TUNING_SEED], fresh, lambda found: {
        cell: report.choose([trace for (trace,) in own]) for cell, own in found.items()
    })  # fmt: skip
    shifted = {
        (cell, shift): [job(cell, setting, seed, shift) for seed in fresh]
        for cell, (setting, _) in chosen.items()
        for shift in ((0.0,) if quick else grids.MARGINS[grids.family(cell[0])])
    }
    found = runner.each(shifted, "limits")
    results: dict[str, list[report.Result]] = {}
    for cell, (setting, _) in chosen.items():
        runs = {shift: runs for (own, shift), runs in found.items() if own == cell}
        results.setdefault(cell[0], []).append(report.Result(cell[1], setting, runs))
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("constrained", __doc__)
    parser.add_argument("--problems", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--methods", nargs="+", help="names; all by default")
    parser.add_argument("--skip", nargs="+", choices=("methods", "bias"), default=[])
    options = parse(parser, arguments, (1, 3))
    names = available(options.problems, make, options.left_out)
    for text in peers.notes():
        note(options.left_out, text)
    methods = [m for m in training.builders() if options.methods is None or m in options.methods]
    runner = Runner(training.run, training.Trace, options.workers, options.out)
    found: dict[str, Any] = {"left_out": options.left_out}
    if "methods" not in options.skip:
        results = compare(names, methods, runner, options.seeds, options.quick)
        found["problems"] = {
            name: {"optimum": make(name).optimum, "methods": (rows := report.figures(own)),
                   "against": report.against(rows)}
            for name, own in results.items()
        }  # fmt: skip
        for name, entry in found["problems"].items():
            print(f"{name}\n{publish.plain(report.table(entry['methods']))}\n")
    if "bias" not in options.skip and "compas" in names:
        sizes, steps = (bias.SIZES[:2], 40) if options.quick else (bias.SIZES, 600)
        found["bias"] = bias.measure(make("compas"), sizes, steps)  # type: ignore[arg-type]
    for name, folder in {"problems": "constrained", "bias": "constrained-bias"}.items():
        if options.publish and name in found:
            part = {name: found[name], "left_out": options.left_out}
            publish.write(publish.RESULTS / folder, part, commit=options.commit)
    if options.json:
        print(json.dumps(publish.clean(found)))


if __name__ == "__main__":
    main()
