"""Many runs as one program, beside the same runs one after another.

    python -m benchmarks.fleet --json                    # the GPU when there is one, and the CPU
    python -m benchmarks.fleet --quick --json            # two sizes of one method, a minute
    python -m benchmarks.fleet --device cpu --sizes 20   # one size

The fairness experiment on Adult, network 107-64-64-1, batch 128, with SONEX (Adam-type, MSVR) and
ALEXR2 (Adam, independent batches, K = 5); settings times five seeds. Steps are measured; a run is
60 epochs of them, so runs per second are EXTRAPOLATED from steps, without evaluations. In every
round each candidate is measured once, and ratios are taken within a round: `sequential` is a step
of one ordinary run on the CPU with one thread (more do not help operations this small); then the
fleet in its modes, with all threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fcco_experiments import data, environment
from fcco_experiments.data.synthetic import two_groups_synthetic
from fcco_experiments.task import Method
from fcco_experiments.tasks.fairness import Fairness, FairnessProblem

from studies import publish

from .timing import Timings, interleave

SIZES = (1, 10, 20, 64, 100, 1_000)
MODES = {"cpu": ("eager", "traced"), "cuda": ("eager", "traced", "graph", "compiled")}
SECONDS, ROUNDS = 0.4, 5  # of one measurement
SEEDS, EPOCHS = 5, 60
ADULT = {"rows": 32_561, "test_rows": 16_281, "features": 107}
PAPER: dict[str, Any] = {"penalty": 10, "smoothing": 2e-3, "gamma": 0.8}
DOUBLE: dict[str, Any] = {"theta": 0.125, "nu": 0.1, "eta": 0.01, "inner_steps": 5}
METHODS = {
    "sonex": Method("sonex", 1e-3, settings={**PAPER, "correction": 0.1}),
    "alexr2": Method("alexr2", 1e-3, independent=True, settings={**PAPER, **DOUBLE}),
}
"""Adam-type both; the settings that the paper fixes, and values out of its grids."""
Step = Callable[[], Any]


def make(shape: dict[str, int] | None, **options: Any) -> FairnessProblem:
    """The paper's setting on Adult, or on generated data of that shape."""
    config = Fairness(
        data="synthetic" if shape else "adult", score="unbounded", temperature=1.0, epochs=EPOCHS,
        **{"hidden": (64, 64), "batch": 128, **options},
    )  # fmt: skip
    return FairnessProblem(config, loaded=two_groups_synthetic(**shape) if shape else None)


def runs_of(method: str, number: int) -> list[tuple[Method, int]]:
    """Settings times five seeds: each setting has a learning rate of its own."""
    base = METHODS[method]
    return [
        (dataclasses.replace(base, lr=base.lr * 1.0005 ** (place // SEEDS)), place % SEEDS)
        for place in range(number)
    ]


def found_adult() -> bool:
    """Whether Adult's files are on this machine."""
    files = data.look("adult")
    return {each.file for each in files} == {f.file for f in files if f.state == "found"}


def several(step: Step, threads: int, device: str) -> tuple[Step, int]:
    """So many steps that they take `SECONDS`, and their number."""
    torch.set_num_threads(threads)
    cost = min(interleave({"": step}, 3, 1, device=device).seconds[""])
    number = max(1, min(5_000, int(SECONDS / cost)))

    def run() -> None:
        torch.set_num_threads(threads)
        for _ in range(number):
            step()

    return run, number


def measure(problem: FairnessProblem, method: str, size: int, device: str) -> dict[str, Any]:
    """One size, beside everything it is compared with."""
    where, runs = torch.device(device), runs_of(method, size)
    threads = environment.available_cores()
    steps, counts = {}, {}
    steps["sequential"], counts["sequential"] = several(problem.start(*runs[0]).step, 1, "cpu")
    training: Any = None
    for mode in MODES[device]:
        training = problem.fleet(runs, where)
        training.fleet.mode = mode
        steps[mode], number = several(training.step, threads, device)
        counts[mode] = number * size
    timings = interleave(steps, ROUNDS, 1, warm_up=0, device=device)
    per_step = {name: [s / counts[name] for s in own] for name, own in timings.seconds.items()}
    of_run = EPOCHS * training.steps_per_epoch
    return {
        "method": method, "device": device, "runs": size, "steps": of_run,
        "rows": rows(Timings(per_step), of_run),
    }  # fmt: skip


def rows(timings: Timings, steps: int) -> dict[str, Any]:
    """What is told of each candidate, from seconds for one step of one run."""
    return {
        name: {
            "run_step_us": round(1e6 * timings.median(name), 3),
            "runs_per_second": float(f"{1 / (timings.median(name) * steps):.4g}"),
            "over_sequential": round(timings.ratio("sequential", name), 3),
        }
        for name in timings.seconds
    }


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """Runs per second (times sequential)."""
    names = ("sequential", *MODES["cuda"])
    rows = [["method", "device", "runs", *names]]
    for result in results:
        own = [result["rows"].get(name) for name in names]
        cells = (f"{r['runs_per_second']:.4g} ({r['over_sequential']:.2f}x)" if r else "-"
                 for r in own)  # fmt: skip
        rows.append([result["method"], result["device"], f"{result['runs']:,}", *cells])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--json", action="store_true", help="last line: one JSON object")
    add("--quick", action="store_true", help="two sizes, one method, generated data")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--sizes", type=int, nargs="+", help=f"runs of a fleet; {' '.join(map(str, SIZES))}")
    options = parser.parse_args(arguments)
    shape = {"rows": 2000, "test_rows": 2000, "features": 107} if options.quick else None
    if shape is None and not found_adult():
        shape = ADULT
    source = "Adult" if shape is None else f"generated, {shape['rows']} rows"
    print(f"Data: {source}. Runs per second are extrapolated from steps, without evaluations.")
    devices = ["cpu", "cuda"] if options.device == "auto" else [options.device]
    devices = [d for d in devices if d == "cpu" or torch.cuda.is_available()]
    if not devices:
        parser.exit(1, "There is no GPU.\n")
    results, problem = [], make(shape)
    for word in ["sonex"] if options.quick else METHODS:
        for device in devices:
            for size in options.sizes or ((1, 20) if options.quick else SIZES):
                print(f"{word}, {device}: {size} runs", file=sys.stderr, flush=True)
                results.append(measure(problem, word, size, device))
    print(publish.plain(table(results)))
    if options.json:
        print(json.dumps({"data": source, "extrapolated": "runs_per_second", "results": results}))


if __name__ == "__main__":
    main()
