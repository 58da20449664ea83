"""Time and memory of a training step of ours against LibAUC's.

python -m benchmarks.risk_steps --json      # in an environment with LibAUC
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from studies import publish
from studies.runner import command, parse
from studies.xrisk.methods import METHODS, OURS, Step
from studies.xrisk.problems import Part

from .cases import mlp, small_cnn
from .timing import interleave

PAIRS = {"AP": "libauc SOAP", "pAUC": "libauc SOPA", "tpAUC": "libauc STACO"}
SIZE, BATCH = 1280, 128  # of the training set, on which the time does not depend, and a batch
LARGE = 4096  # of the loss alone
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "mlp64": (lambda: mlp(64), (128,), 300, 5),
    "mlp256": (lambda: mlp(256), (128,), 200, 5),
    "cnn": (small_cnn, (3, 32, 32), 15, 1),
}
"""Model, shape of a row, rounds, steps of a round."""


def make_step(
    method: str, metric: str, model: nn.Module, size: int, shape: tuple[int, ...]
) -> Step:
    """On random rows, of which every second is positive."""
    part = Part(torch.randn(size, *shape), (torch.arange(size) % 2).float())
    found = METHODS[metric][method]
    assert found.build is not None
    return found.build(model, part, metric, {"lr": 1e-4})


def times(name: str, quick: bool) -> dict[str, Any]:
    """The time of a step relative to that of LibAUC's loss for the metric."""
    make, shape, rounds, steps = CASES[name]

    def candidate(method: str, metric: str) -> Callable[[], None]:
        step = make_step(method, metric, make(), SIZE, shape)
        batches = itertools.cycle(torch.arange(SIZE).split(BATCH))
        return lambda: step(next(batches))

    candidates = {
        f"{metric}, {method}": candidate(method, metric)
        for metric, other in PAIRS.items()
        for method in (OURS, other)
    }
    count = max(3, rounds // 20) if quick else rounds
    timings = interleave(candidates, count, steps, clock=time.thread_time)
    return {
        metric: {"to_libauc": round(timings.ratio(f"{metric}, {OURS}", f"{metric}, {other}"), 3)}
        for metric, other in PAIRS.items()
    }


def peak(method: str, metric: str) -> float:
    """By how many MiB the loss alone raises the peak of a process of its own."""
    torch.set_num_threads(1)
    step = make_step(method, metric, nn.Linear(1, 1), LARGE, (1,))  # a model of hardly any cost
    step(torch.arange(64))  # what is imported and allocated once
    return growth(lambda: step(torch.arange(LARGE)))


def growth(run: Callable[[], object]) -> float:
    """By how many MiB a few calls raise the peak resident set of this process (Linux)."""
    before = _peak_resident()
    for _ in range(3):
        run()
    return round((_peak_resident() - before) / 1024, 1)


def _peak_resident() -> int:
    """In KiB. Not `ru_maxrss`: a process inherits that of the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def in_process(call: Callable[..., float], *arguments: Any) -> float:
    """What a call gives in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(command("risk_steps", __doc__), arguments, (1, 1))
    torch.manual_seed(0)
    step = {name: times(name, options.quick) for name in CASES}
    memory = {
        metric: {
            "mib": in_process(peak, OURS, metric), "libauc_mib": in_process(peak, other, metric)
        }
        for metric, other in PAIRS.items()
    }  # fmt: skip
    print(json.dumps({"step": step, "memory": memory}, indent=1))
    publish.conclude(options, "xrisk-speed", {"step": step, "memory": memory})


if __name__ == "__main__":
    main()
