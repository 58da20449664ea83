"""One setting at a time instead of the automatic ones, on `reviews`, and a network without any.

    python -m studies.untuned.settings --out docs/results/automatic-settings.json

Training CVaR, means over 3 seeds: `rows` at three learning rates, and `networks` beside other
weights, 16 groups with 4 samples in a batch. It takes three minutes on two cores and needs the data
of `fcco data amazon`. `python -m docs.tables` then writes the tables of the concepts pages.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from studies.publish import about
from studies.runner import Job, Runner

from . import groups, networks
from .constraints import Figures

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
NETWORK_ROWS = (*networks.PLAIN, "SONEX 1")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the JSON object to this file")
    options = parser.parse_args(arguments)
    runner = Runner(networks.run, Figures, workers=2)

    def means(
        problem: str, method: str, settings: Sequence[dict[str, Any]], seeds: Sequence[int]
    ) -> list[float]:
        jobs = [[Job(problem, method, own, seed) for seed in seeds] for own in settings]
        runner([job for own in jobs for job in own], f"{problem}, {method}")
        return [round(statistics.fmean(e.objective for e in runner.of(own)), 4) for own in jobs]

    found: dict[str, Any] = {"command": "python -m studies.untuned.settings"}
    lrs = groups.PROBLEMS[PROBLEM]
    found |= {"commit": about()["revision"], "torch": torch.__version__, "lrs": lrs}
    found["rows"] = {
        name: means(PROBLEM, method, [{"lr": lr, **own} for lr in lrs], SEEDS)
        for name, (method, own) in ROWS.items()
    }
    found["cells"] = [f"{optimizer}, {lr:g}" for optimizer, lr in CELLS]
    cells = [{"optimizer": optimizer, "lr": lr, "shape": (16, 4)} for optimizer, lr in CELLS]
    found["networks"] = {method: means(NETWORK, method, cells, FRESH) for method in NETWORK_ROWS}
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
