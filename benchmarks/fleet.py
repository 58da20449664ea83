"""Many runs as one program, beside the same runs one after another and one process per core.

    python -m benchmarks.fleet --json                    # the GPU when there is one, and the CPU
    python -m benchmarks.fleet --quick --json            # two sizes of one method, a minute
    python -m benchmarks.fleet --device cpu --sizes 20   # one size
    python -m benchmarks.fleet --grid --json             # the paper's ALEXR2 grid, end to end

The fairness experiment on Adult, network 107-64-64-1, batch 128, with SONEX (Adam-type, MSVR) and
ALEXR2 (Adam, independent batches, K = 5); settings times five seeds. Steps are measured; a run is
60 epochs of them, so runs per second are EXTRAPOLATED from steps, without evaluations. In every
round each candidate is measured once, and ratios are taken within a round: `sequential` is a step
of one ordinary run on the CPU with one thread (more do not help operations this small), `processes`
one such run on each core at once; then the fleet in its modes, with all threads. The floor:
`products`, the matrix products of a step alone, and `state`, one read and one write of all that a
step changes. Sizes that do not fit are capped, which the table says.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from fcco_experiments import store
from fcco_experiments.run import fleets
from fcco_experiments.tasks.fairness import FairnessProblem

from studies import publish

from .fleet_cases import (
    ADULT,
    METHODS,
    Case,
    Measure,
    Meter,
    Processes,
    copies,
    found_adult,
    products,
)
from .timing import Timings

SIZES = (1, 10, 20, 64, 100, 1_000, 10_000)
MODES = {"cpu": ("eager", "traced"), "cuda": ("eager", "traced", "graph", "compiled")}
FLOOR = ("products", "state")
LARGE = 1_000
"""From here on memory is asked first; above it a CPU measures one mode."""
SLOW = 12.0
"""Seconds for a candidate in all rounds: slower ones are measured in fewer."""
SYNTHETIC = ("--data", "synthetic")


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.quick:
        options.sizes, options.methods, options.rounds = "1,20", "sonex", 3
        options.generated, options.limit, options.epochs = 2000, 4, 2
    options.threads = options.threads or torch.get_num_threads()
    gpu = options.device != "cpu" and torch.cuda.is_available()
    about = publish.about("cuda" if gpu else "cpu", options.commit)
    told = {"grid": whole_grid(options)} if options.grid else speed(options)
    if options.publish:
        folder = "fleet-grid" if options.grid else f"fleet-speed-{options.device}"
        publish.write(publish.RESULTS / folder, told, commit=options.commit)
    if options.json:
        print(json.dumps({"meta": about, **told}))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = found.add_argument
    add("--json", action="store_true", help="last line: one JSON object")
    add("--quick", action="store_true", help="two sizes, one method, generated data")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--sizes", default=",".join(map(str, SIZES)), help="runs of a fleet: 1,20")
    add("--methods", default=",".join(METHODS))
    add("--modes", default=None, help="of the fleet: eager,traced")
    add("--seconds", type=float, default=0.4, help="of one measurement")
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=None, help="of a fleet on the CPU")
    add("--processes", type=int, default=None, help="one per core unless given")
    add("--generated", type=int, default=None, metavar="ROWS", help="no Adult")
    add("--grid", action="store_true", help="the paper's ALEXR2 grid, end to end")
    add("--publish", action="store_true", help="write docs/results")
    add("--commit", help="of the code, where git is not at hand")
    add("--limit", type=int, default=None, help="settings of the grid")
    add("--epochs", type=int, default=60)
    return found


# --- steps ----------------------------------------------------------------------------------------


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """All methods, devices and sizes."""
    shape = None
    if options.generated is not None:
        shape = {**ADULT, "rows": options.generated, "test_rows": options.generated}
    elif not found_adult():
        shape = ADULT
    source = "Adult" if shape is None else f"generated, {shape['rows']} rows"
    devices = ["cpu", "cuda"] if options.device == "auto" else [options.device]
    devices = [d for d in devices if d == "cpu" or torch.cuda.is_available()]
    if not devices:
        raise SystemExit("There is no GPU.")
    print(f"Data: {source}. Runs per second are extrapolated from steps, without evaluations.")
    results = []
    for word in options.methods.split(","):
        generated = None if shape is None else tuple(shape.items())
        case = Case(word, epochs=options.epochs, generated=generated)
        problem, processes = case.problem(), Processes(case, options.processes)
        for device in devices:
            for size in map(int, options.sizes.split(",")):
                print(f"{word}, {device}: {size} runs", file=sys.stderr, flush=True)
                results.append(measure(case, problem, size, device, processes, options))
        processes.close()
    print(publish.plain(table(results)))
    return {
        "data": source, "threads": options.threads, "extrapolated": "runs_per_second",
        "results": results,
    }  # fmt: skip


def measure(
    case: Case,
    problem: FairnessProblem,
    size: int,
    device: str,
    processes: Processes,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One size, beside everything it is compared with."""
    where, runs = torch.device(device), case.runs(size)
    single = problem.start(*runs[0])
    fit = size
    if size >= LARGE and device == "cuda":
        fit = fleets.capacity(lambda number: problem.fleet(runs[:number], where), size, where)
        runs = runs[:fit]
    meter = Meter(device, options.seconds, options.threads)
    found: dict[str, Measure] = {
        "sequential": Meter("cpu", options.seconds, 1)(single.step, 1),
        "processes": lambda: processes(options.seconds),
    }
    modes = options.modes.split(",") if options.modes else MODES[device]
    if device == "cpu" and fit > LARGE and not options.modes:
        modes = ("traced",)
    start = time.perf_counter()
    training: Any = None
    for mode in modes:
        training = problem.fleet(runs, where)
        training.fleet.mode = mode
        found[mode] = meter(training.step, fit)
    built = (time.perf_counter() - start) / len(modes)
    forward = (
        2 if runs[0][0].independent else 1
    ) + training.fleet.signature.estimator.needs_previous
    features = single.train.inputs.shape[1]
    alone = products(case, features, fit, forward, device)
    found["products"] = meter(alone, fit)
    found["state"] = meter(copies(training.fleet.state), fit)
    rounds = max(2, min(options.rounds, int(SLOW / meter.slowest)))
    timings = alternate(found, rounds)
    steps = case.epochs * training.steps_per_epoch
    died = sum(each >= 0 for each in training.died)
    del found, training, alone
    gc.collect()
    return {
        "method": case.method,
        "device": device,
        "runs": size,
        "fit": fit,
        "steps": steps,
        "rounds": rounds,
        "died": died,
        "build_s": round(built, 3),
        "rows": rows(timings, steps, modes),
    }


def alternate(candidates: dict[str, Measure], rounds: int) -> Timings:
    """Each candidate once in a round; the order turns around every round."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        order = list(candidates) if number % 2 == 0 else list(reversed(candidates))
        for name in order:
            seconds[name].append(candidates[name]())
    return Timings(seconds)


def rows(timings: Timings, steps: int, modes: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """What is told of each candidate."""
    best = min(modes, key=timings.median)
    found = {}
    for name in timings.seconds:
        own = timings.median(name)
        found[name] = {"run_step_us": round(1e6 * own, 3)}
        if name in FLOOR:
            found[name]["share_of_best"] = round(timings.ratio(name, best), 4)
            continue
        found[name] |= {
            "runs_per_second": float(f"{1 / (own * steps):.4g}"),
            "over_sequential": round(timings.ratio("sequential", name), 3),
            "over_processes": round(timings.ratio("processes", name), 3),
        }
    return found


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """Runs per second (times sequential); of the floor, the share of the best mode's time."""
    names = ("sequential", "processes", *MODES["cuda"], *FLOOR)
    rows = [["method", "device", "runs", *names]]
    for result in results:
        capped = f", {result['fit']:,} fit" if result["fit"] < result["runs"] else ""
        cells = [result["method"], result["device"], f"{result['runs']:,}{capped}"]
        for name in names:
            row = result["rows"].get(name)
            if row is None:
                cells.append("-")
            elif name in FLOOR:
                cells.append(f"{row['share_of_best']:.3f}")
            else:
                cells.append(f"{row['runs_per_second']:.4g} ({row['over_sequential']:.2f}x)")
        rows.append(cells)
    return rows


# --- the paper's grid -----------------------------------------------------------------------------


def whole_grid(options: argparse.Namespace) -> dict[str, Any]:
    """The command that a user types, from its start to its end, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sweep"
        # Generated data have no variant of the paper; they are for a quick look at the command.
        known = ["--data", "adult", "--setting", "paper"]
        words = ["sweep", "fairness", *(known if options.generated is None else SYNTHETIC)]
        words += ["--grid", "paper", "--methods", "alexr2"]
        words += ["--seeds", "1000,1001,1002,1003,1004", "--epochs", str(options.epochs)]
        words += ["--out", str(out), "--quiet"]
        if options.limit is not None:
            words += ["--limit", str(options.limit)]
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "fcco_experiments", *words], check=True)
        wall = time.perf_counter() - start
        told = list(store.read_fleet_lines(out).values())
    print(
        f"{len(told):,} runs of {options.epochs} epochs with set-up, evaluation and table: "
        f"{wall:.1f} s"
    )
    return {
        "command": " ".join(["fcco", *words[: words.index("--out")]]),
        "runs": len(told),
        "diverged": sum(each["diverged"] is not None for each in told),
        "epochs": options.epochs,
        "wall_s": round(wall, 2),
        "runs_per_second": round(len(told) / wall, 3),
    }


if __name__ == "__main__":
    main()
