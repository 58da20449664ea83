"""Time and memory of a training step of ours against LibAUC's."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from studies import publish
from studies.xrisk.methods import METHODS, OURS, Step, cross_entropy, missing
from studies.xrisk.problems import Part

from .models import mlp, small_cnn
from .timing import interleave

PAIRS = {"AP": "libauc SOAP", "pAUC": "libauc SOPA", "tpAUC": "libauc STACO"}
SIZE = 1280  # training set; the time of a step does not depend on it
BATCH = 128
LARGE = 4096  # of the loss alone


def cases() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[int, ...], int, int]]:
    """Name, model, shape of a row, rounds, steps of a round."""
    yield "mlp64", lambda: mlp(64), (128,), 300, 5
    yield "mlp256", lambda: mlp(256), (128,), 200, 5
    yield "cnn", small_cnn, (3, 32, 32), 15, 1


def random_part(shape: tuple[int, ...], size: int = SIZE) -> Part:
    """Every second row is positive."""
    return Part(torch.randn(size, *shape), (torch.arange(size) % 2).float())


def in_turn(step: Step) -> Callable[[], None]:
    """The step on one batch after the other."""
    batches = cycle(torch.arange(SIZE).split(BATCH))
    return lambda: step(next(batches))


def make_step(method: str, metric: str, model: nn.Module, part: Part) -> Step:
    found = METHODS[metric][method]
    assert found.build is not None
    return found.build(model, part, metric, {"lr": 1e-4})


def times(quick: bool) -> dict[str, Any]:
    """Milliseconds of a step, its ratio to plain cross-entropy and that of ours to LibAUC."""
    found: dict[str, Any] = {}
    others = {} if "libauc" in missing() else PAIRS
    for name, make, shape, rounds, steps in cases():
        part = random_part(shape)
        candidates = {"bce": cross_entropy(make(), part, "AP", {"lr": 1e-4})}
        for metric in PAIRS:
            candidates[f"{OURS} {metric}"] = make_step(OURS, metric, make(), part)
            if metric in others:
                candidates[others[metric]] = make_step(others[metric], metric, make(), part)
        calls = {key: in_turn(step) for key, step in candidates.items()}
        count = max(3, rounds // 20) if quick else rounds
        timings = interleave(calls, count, steps, clock=time.thread_time)
        row: dict[str, Any] = {"bce_ms": round(1000 * timings.median("bce"), 4)}
        for metric in PAIRS:
            mine = f"{OURS} {metric}"
            row[metric] = {
                "ms": round(1000 * timings.median(mine), 4),
                "to_bce": round(timings.ratio(mine, "bce"), 3),
            }
            if metric in others:
                other = others[metric]
                row[metric]["libauc_ms"] = round(1000 * timings.median(other), 4)
                row[metric]["libauc_to_bce"] = round(timings.ratio(other, "bce"), 3)
                row[metric]["to_libauc"] = round(timings.ratio(mine, other), 3)
        found[name] = row
    return found


class _Scores(nn.Module):
    """A model that costs nothing: one weight times the only feature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def peak(method: str, metric: str, batch: int) -> None:
    """In a process of its own: print by how many MiB steps raise the peak resident set."""
    torch.set_num_threads(1)
    step = make_step(method, metric, _Scores(), random_part((1,), LARGE))
    step(torch.arange(64))  # what is imported and allocated once
    print(growth(lambda: step(torch.arange(batch))))


def growth(run: Callable[[], object]) -> float:
    """By how many MiB a few calls raise the peak resident set of this process (Linux)."""
    before = _peak_resident()
    for _ in range(3):
        run()
    return (_peak_resident() - before) / 1024


def _peak_resident() -> int:
    """In KiB. Not `ru_maxrss`: a process inherits that of the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def memory() -> dict[str, Any]:
    """MiB that the loss alone takes at a batch of 4,096, half positive."""
    found: dict[str, Any] = {}
    others = {} if "libauc" in missing() else PAIRS
    for metric in PAIRS:
        row = {"mib": _peak_of(OURS, metric)}
        if metric in others:
            row["libauc_mib"] = _peak_of(others[metric], metric)
            row["to_libauc"] = round(row["mib"] / row["libauc_mib"], 3)
        found[metric] = row
    return found


def _peak_of(method: str, metric: str) -> float:
    return in_process(f"risk_steps.peak({method!r}, {metric!r}, {LARGE})")


def in_process(code: str) -> float:
    """The number that the code prints in a fresh process ."""
    done = subprocess.run(
        [sys.executable, "-c", f"from benchmarks import risk_steps\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return round(float(done.stdout.splitlines()[-1]), 1)


def report(options: argparse.Namespace) -> None:
    """Measure and print."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = {"step": times(options.quick), "memory": memory()}
    rows = [["", *PAIRS]]
    for name, row in found["step"].items():
        rows += [[f"{name}, {k}", *(str(row[metric][k]) for metric in PAIRS)] for k in row["AP"]]
    for key in found["memory"]["AP"]:
        cells = (str(found["memory"][metric][key]) for metric in PAIRS)
        rows.append([f"loss alone, batch {LARGE}, {key}", *cells])
    print(publish.plain(rows))
    if options.publish:
        publish.write(publish.RESULTS / "xrisk-speed", found, commit=options.commit)
    if options.json:
        print(json.dumps(found))
