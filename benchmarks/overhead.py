"""What the library costs per training step, beside a plain one.

    python -m benchmarks.overhead --json            # CPU: MLP 2x64, MLP 2x256, small CNN
    python -m benchmarks.overhead --gpu --json      # GPU: MLP 2x256; ResNet-50, DistilBERT in bf16
    python -m benchmarks.overhead --out docs/results/step-cost/cpu.json     # what the page shows

Measured are the defaults of `CVaRGroupDRO` (SONEX with the exact threshold and every check of the
input) on 1,000 groups of which a batch holds 8. The base is a plain step: the mean of the same
per-sample losses, torch's Adam. All variants take turns in short rounds on one thread; a ratio is
the median over rounds of the ratio within a round. On the CPU the clock is the thread's own: time
that other processes take from it does not count. With `--gpu` every model is measured as it is and
compiled by `torch.compile`.

The JSON has, by model, `plain_ms` and ratios to the plain step. docs/research/details/step-cost.md
says what each is; a library that is not installed is null. On a GPU a ratio comes with what a step
adds to a plain one: `launches` of kernels, graphs and copies, and `waits` of the host.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import fcco
from studies import publish
from studies.constrained import peers
from studies.constrained.problems import Batch, Schedule

from .cases import Case, Step, cpu_cases, gpu_cases, stepping
from .timing import interleave, launched

GROUPS_PER_BATCH = 8
PEERS: dict[str, dict[str, Any]] = {
    "Cooper simultaneous": {"dual_lr": 0.01}, "HCT ALM": {"dual_range": [-100.0, 100.0]}
}  # fmt: skip
"""Other libraries for limits, with their defaults."""


def adam(case: Case) -> torch.optim.Optimizer:
    return torch.optim.Adam(case.model.parameters(), lr=1e-4)


def sonex_step(case: Case, num_groups: int = 1000, **options: Any) -> Step:
    """A step of `CVaRGroupDRO`."""
    optimizer = adam(case)
    dro = fcco.CVaRGroupDRO(case.model, optimizer, num_groups, 0.15, **options)
    # All groups are known before the clock runs: the exact threshold sorts those that are.
    weight, known = next(case.model.parameters()), torch.rand(num_groups, device=case.device)
    every = torch.arange(num_groups)
    stepping(optimizer, lambda: dro(lambda: known + 0 * weight.float().sum(), every))()
    group = torch.arange(GROUPS_PER_BATCH).repeat_interleave(case.batch_size // GROUPS_PER_BATCH)
    offset = 0

    def loss() -> Tensor:
        nonlocal offset
        offset = (offset + GROUPS_PER_BATCH) % num_groups
        return dro(case.losses, group + offset)

    return stepping(optimizer, loss)


def group_means(case: Case, number: int) -> Tensor:
    """The matrix that turns losses of samples into those of groups, which take turns."""
    group = torch.arange(case.batch_size, device=case.device) % number
    one_hot = torch.nn.functional.one_hot(group, number).float()
    return (one_hot / one_hot.sum(0)).T


class PairwiseLimits:
    """The losses of 18 groups of a batch may differ by 0.05 at most: 306 constraints."""

    groups, num_constraints, sampled = 18, 306, False

    def __init__(self, case: Case) -> None:
        self.case, self.schedule = case, Schedule(evaluations=1, every=1, lr=1e-4)
        self.means = group_means(case, self.groups)
        every = torch.cartesian_prod(torch.arange(self.groups), torch.arange(self.groups))
        self.first, self.second = every[every[:, 0] != every[:, 1]].T.to(case.device)

    def measure(self, model: Any, batch: Any = None) -> tuple[Tensor, Tensor]:
        """The mean loss, and the differences less 0.05."""
        losses = self.case.losses()
        means = self.means @ losses.float()
        return losses.mean(), means[self.first] - means[self.second] - 0.05


def candidates(case: Case) -> dict[str, Step]:
    """Steps on the CPU and on a GPU alike."""
    limits, optimizer = PairwiseLimits(case), adam(case)
    objective = fcco.constrained(case.model, optimizer, limits.num_constraints)

    def penalty() -> Tensor:
        found, values = limits.measure(None)
        return found + values.relu().sum()

    return {
        "plain": stepping(adam(case), lambda: case.losses().mean()),
        "defaults": sonex_step(case),
        "constrained": stepping(optimizer, lambda: objective(lambda: limits.measure(case.model))),
        "by_hand": stepping(adam(case), penalty),
    }


def cpu_candidates(case: Case) -> dict[str, Step]:
    """The paper's settings, a forward pass, and other libraries where they are installed."""
    paper: dict[str, Any] = {"smoothing": 0.1, "gamma": 0.1, "read": "old"}
    nothing, limits = Batch(torch.zeros(()), torch.zeros(())), cast(Any, PairwiseLimits(case))

    @torch.no_grad()
    def forward() -> None:
        case.losses()

    own = {
        "ema": sonex_step(case, correction=0.0, **paper),
        "msvr": sonex_step(case, correction="auto", **paper),
        "forward": forward,
    }
    for name, build in peers.methods().items():
        if name in PEERS:
            step = build(limits, case.model, PEERS[name]).step
            own[name.split()[0].lower()] = functools.partial(step, nothing)
    return own


def gpu_candidates(case: Case) -> dict[str, Step]:
    """16 groups, with a CVaR by hand, and a risk."""
    optimizer, labels = adam(case), torch.arange(10_000) % 2
    risk = fcco.xrisk.AveragePrecision(case.model, optimizer, labels)
    rows = torch.arange(case.batch_size)

    def ranked() -> Tensor:
        return risk(lambda: case.scores().float()[:, 0], labels[rows], rows)

    averages = torch.zeros(16, device=case.device)
    means = group_means(case, 16)

    def cvar() -> Tensor:
        found = means @ case.losses()
        averages.lerp_(found.detach(), 0.1)
        return found[averages.topk(3).indices].mean()

    return {
        "sixteen": sonex_step(case, 16),
        "average_precision": stepping(optimizer, ranked),
        "cvar_by_hand": stepping(adam(case), cvar),
    }


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Every candidate beside the plain step."""
    gpu = case.device == "cuda"
    steps = candidates(case) | (gpu_candidates if gpu else cpu_candidates)(case)
    timings = interleave(
        steps, rounds, case.steps, warm_up=30 if gpu else 3, device=case.device,
        clock=time.perf_counter if gpu else time.thread_time,
    )  # fmt: skip
    found: dict[str, Any] = {"plain_ms": round(1000 * timings.median("plain"), 4)}
    step = steps.pop("plain")
    plain = launched(step) if gpu else (0, 0)
    for name, step in steps.items():
        found[name] = round(timings.ratio(name, "plain"), 4)
        if gpu:
            more, waits = (a - b for a, b in zip(launched(step), plain, strict=True))
            found[name] = {"ratio": found[name], "launches": more, "waits": waits}
    if not gpu:
        found["forward_bound"] = round(found["ema"] + found.pop("forward"), 4)
        found |= {name: found.get(name) for name in ("cooper", "hct")}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--gpu", action="store_true", help="large models on the GPU, bf16 autocast")
    parser.add_argument("--rounds", type=int, help="2 or more; a few for a quick look")
    parser.add_argument("--out", type=Path, help="write the JSON object to this file")
    parser.add_argument("--commit", help="of the code, where git is not at hand")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = publish.about("cuda" if options.gpu else "cpu", options.commit)
    found["models"] = {}
    for compiled in (False, True) if options.gpu else (False,):
        for case in gpu_cases(compiled) if options.gpu else cpu_cases():
            name = f"{case.name}{', compiled' * compiled}"
            row = found["models"][name] = measure(case, options.rounds or case.rounds)
            print(name, json.dumps(row), file=sys.stderr, flush=True)
            if options.out:  # whatever ends this program, what was measured is kept
                options.out.write_text(json.dumps(found, indent=1) + "\n")
            del case
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
