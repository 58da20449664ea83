"""One setting at a time instead of the automatic ones, on `reviews`: the tables of the docs.

    python -m benchmarks.untuned.settings --out docs/results/automatic-settings/reviews.json

Training CVaR, means over 3 seeds, at three learning rates. It takes two minutes on two cores and
needs the data of `fcco data amazon`. `python docs/tables.py` then writes the tables.
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

from ..overhead import commit
from . import groups

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
    found: dict[str, Any] = {"command": "python -m benchmarks.untuned.settings"}
    found |= {"commit": commit(), "torch": torch.__version__, "lrs": groups.make(PROBLEM).lrs}
    rows = found["rows"] = dict[str, list[float]]()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for name, means in pool.imap(measure, ROWS):
            rows[name] = means
            print(f"{name:<24}" + "".join(f"{mean:>8.3f}" for mean in means), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
