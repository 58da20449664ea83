"""Steps per second of a fleet of linear heads under group DRO, all defaults.

    python -m benchmarks.fleet_heads --json                     # 256 runs, a GPU if there is one
    python -m benchmarks.fleet_heads --runs 8 --steps 5 --json  # a quick look

A linear layer on 1,280 features, batches of 16 groups with 4 samples each, Adam, 8 data streams
that the runs share. `run_steps_per_s` is the median over rounds of runs x steps per second;
`first_step_s` includes tracing and, on a GPU, capture.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import fcco
from fcco.fleet import Fleet, Member

FEATURES, GROUPS, PER_GROUP, STREAMS = 1280, 16, 4, 8


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return binary_cross_entropy_with_logits(model(x).squeeze(-1), y, reduction="none")


def measure(runs: int, steps: int, rounds: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    members = []
    for _ in range(runs):
        model = nn.Linear(FEATURES, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        objective = fcco.CVaRGroupDRO(model, optimizer, GROUPS, ratio=0.15)
        members.append(Member(model, optimizer, objective))
    streams = [run % STREAMS for run in range(runs)]
    fleet = Fleet(members, losses, streams=streams, device=device)
    rows = min(STREAMS, runs), GROUPS * PER_GROUP
    x = torch.randn(*rows, FEATURES, device=device)
    y = torch.randint(2, rows, device=device).float()
    index = torch.arange(GROUPS, device=device).repeat_interleave(PER_GROUP).expand(rows)

    def timed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            fleet.step((x, y), index=index)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first = timed(1)
    timed(3)
    speeds = [runs * steps / timed(steps) for _ in range(rounds)]
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {
        "runs": runs,
        "device": where,
        "torch": torch.__version__,
        "first_step_s": round(first, 2),
        "run_steps_per_s": round(statistics.median(speeds)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--runs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    found = measure(options.runs, options.steps, options.rounds, options.device)
    print(f"{found['runs']} runs: {found['run_steps_per_s']:,} run-steps/s")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
