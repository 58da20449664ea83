"""One setting at a time instead of the automatic ones, on `reviews`, and a network without any.

    python -m studies.untuned.settings --out docs/results/automatic-settings.json

Training CVaR, means over 3 seeds: `rows` at three learning rates, and `networks` beside other
weights, 16 groups with 4 samples in a batch. It takes three minutes on two cores and needs the data
of `fcco data amazon`. `python -m docs.tables` then writes the tables of the concepts pages.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fcco
from studies.publish import about

from . import groups, networks

PROBLEM, SEEDS = "reviews", range(3)
PAPER: dict[str, Any] = {"smoothing": 0.1, "gamma": 0.1, "correction": "auto", "read": "old"}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "defaults": ("fcco", {}),
    **{f"gamma {gamma:g}": ("fcco", {"gamma": gamma}) for gamma in (0.05, 0.2, 0.5, 0.9)},
    "no smoothing": ("fcco", {"smoothing": 0.0}),
    "smoothing 0.1": ("fcco", {"smoothing": 0.1}),
    "old u": ("fcco", {"read": "old"}),
    "correction, gamma 0.2": ("fcco", {"gamma": 0.2, "correction": "auto"}),
    "SONEX as published": ("fcco", PAPER),
    **{f"{k} x {64 // k}": ("fcco", {"shape": (k, 64 // k)}) for k in (2, 4, 8, 16, 64)},
    "uniform": ("uniform", {}),
    "OOA": ("OOA", {}),
    "EMA + quantile": ("EMA + quantile", {}),
}


NETWORK, FRESH = "tabular MLP", range(20, 23)  # constants were chosen with seed 10
CELLS = (("Adam 0.9", 3e-3), ("Adam 0.99", 3e-3), ("SGD 0.9", 0.3), ("SGD 0.99", 0.03))


def measure_network(method: str) -> tuple[str, list[float]]:
    """The mean training CVaR of a method in each cell, on a network that can fit every group."""
    means = []
    for optimizer, lr in CELLS:
        jobs = [networks.Job(NETWORK, method, optimizer, lr, (16, 4), seed) for seed in FRESH]
        means.append(round(statistics.fmean(networks.run(job).cvar for job in jobs), 4))
    return method, means


def measure(name: str) -> tuple[str, list[float]]:
    """The mean training CVaR of a row at each learning rate."""
    torch.set_num_threads(1)
    problem = groups.make(PROBLEM)
    method, setting = ROWS[name]
    means = []
    for lr in problem.lrs:
        full = {"lr": lr, "ratio": problem.ratio, "shape": groups.shape(problem), **setting}
        models = [groups.train(problem, method, full, seed)[0] for seed in SEEDS]
        cvar = fcco.outer.CVaR(problem.ratio)
        means.append(statistics.fmean(cvar(problem.group_losses(m)).item() for m in models))
    return name, [round(mean, 4) for mean in means]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the JSON object to this file")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"command": "python -m studies.untuned.settings"}
    found |= {
        "commit": about()["revision"],
        "torch": torch.__version__,
        "lrs": groups.make(PROBLEM).lrs,
    }
    rows = found["rows"] = dict[str, list[float]]()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for name, means in pool.imap(measure, ROWS):
            rows[name] = means
            print(f"{name:<24}" + "".join(f"{mean:>8.3f}" for mean in means), flush=True)
        found["cells"] = [f"{optimizer}, {lr:g}" for optimizer, lr in CELLS]
        found["networks"] = dict(pool.imap(measure_network, (*networks.PLAIN, "SONEX 1")))
        print(found["cells"], found["networks"])
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
