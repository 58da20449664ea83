"""What the library costs per training step, beside a plain one.

    python -m benchmarks.overhead --json            # CPU: MLP 2x64, MLP 2x256, small CNN
    python -m benchmarks.overhead --gpu --json      # GPU: MLP 2x256; ResNet-50, DistilBERT in bf16
    python -m benchmarks.overhead --out docs/results/step-cost/cpu.json     # what the page shows

Measured are the defaults of `CVaRGroupDRO` (SONEX with the exact threshold and every check of the
input) on 1,000 groups of which a batch holds 8. The base
is a plain step: the mean of the same per-sample losses, torch's Adam. All variants take turns in
short rounds on one thread; a ratio is the median over rounds of the ratio within a round. On the
CPU the clock is the thread's own: time that other processes take from it does not count. With
`--gpu` every model is measured as it is and compiled by `torch.compile`.

Keys of `models` in the JSON, by model; all but `plain_ms` are ratios to the plain step unless said:

| key | meaning |
|---|---|
| `plain_ms` | milliseconds of the plain step |
| `defaults` | nothing set: gamma and smoothing from the measured error |
| `ema` | the paper's settings without correction: a moving average of fixed weight |
| `msvr` | the paper's settings: a correction, with a second forward pass, without gradient |
| `msvr_p10`, `msvr_p90` | 10th and 90th percentile of `msvr` over rounds |
| `forward_bound` | `ema` plus such a forward pass: what `msvr` must cost at least |
| `msvr_over_bound` | `msvr` over `forward_bound` |
| `msvr_over_plain_bound` | `msvr` over a plain step plus such a forward pass |
| `libauc` | a step of LibAUC's partial AUC loss with its optimizer; null if not installed |
| `constrained` | `fcco.constrained` with 306 limits, differences of 18 group losses; nothing set |
| `by_hand` | the same limits as a penalty by hand: mean loss + sum of the violations |
| `cooper`, `hct` | the same limits with the defaults of these libraries; null if not installed |

On a GPU: `defaults`, `sixteen` (16 groups), `constrained`, `average_precision`, and `cvar_by_hand`
(a moving average, sorted) and `by_hand`; each an object with `ratio`, `p10`, `p90`, and what a step
adds to a plain one: `launches` of kernels, graphs and copies, and `waits` of the host.

`tracker`: `build_s`, seconds to build a tracker of 10^7 blocks; `step_ratio`, its step to that of
one of 10^3.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import fcco
from studies import publish
from studies.constrained import peers
from studies.constrained.problems import Batch, Schedule

from .models import Case, cpu_cases, gpu_cases
from .timing import interleave, launched

GROUPS_PER_BATCH = 8
CPU_CLOCK = time.thread_time  # one thread does all the work


def adam(case: Case) -> torch.optim.Optimizer:
    return torch.optim.Adam(case.model.parameters(), lr=1e-4)


def stepping(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A step of an optimizer on a loss."""

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_step(case: Case) -> Callable[[], None]:
    return stepping(adam(case), lambda: case.losses().mean())


def sonex_step(
    case: Case, correction: Any = "auto", num_groups: int = 1000, **options: Any
) -> Callable[[], None]:
    """A step of `CVaRGroupDRO` with the paper's settings, or `options` instead.

    With `correction=None` it has no setting at all.
    """
    if correction is not None:
        paper = {"smoothing": 0.1, "gamma": 0.1, "read": "old"}
        options = {**paper, "correction": correction, **options}
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

    name, groups, num_constraints, sampled = "pairs", 18, 306, False

    def __init__(self, case: Case) -> None:
        self.case, self.schedule = case, Schedule(evaluations=1, every=1, lr=1e-4)
        self.means = group_means(case, self.groups)
        every = torch.cartesian_prod(torch.arange(self.groups), torch.arange(self.groups))
        self.first, self.second = every[every[:, 0] != every[:, 1]].T.to(case.device)

    def measure(self, model: Any, batch: Any = None, form: Any = None) -> tuple[Tensor, Tensor]:
        """The mean loss, and the differences less 0.05."""
        losses = self.case.losses()
        means = self.means @ losses.float()
        return losses.mean(), means[self.first] - means[self.second] - 0.05


def constrained_step(problem: PairwiseLimits) -> Callable[[], None]:
    model, optimizer = problem.case.model, adam(problem.case)
    objective = fcco.constrained(model, optimizer, problem.num_constraints)
    return stepping(optimizer, lambda: objective(lambda: problem.measure(model)))


def penalty_step(problem: PairwiseLimits) -> Callable[[], None]:
    def loss() -> Tensor:
        found, values = problem.measure(None)
        return found + values.relu().sum()

    return stepping(adam(problem.case), loss)


def peer_steps(problem: PairwiseLimits) -> dict[str, Callable[[], None]]:
    """Those of other libraries for limits that are installed, with their defaults."""
    found: dict[str, Callable[[], None]] = {}
    nothing, limits = Batch(torch.zeros(()), torch.zeros(())), cast(Any, problem)
    settings: dict[str, dict[str, Any]] = {
        "Cooper simultaneous": {"dual_lr": 0.01}, "HCT ALM": {"dual_range": [-100.0, 100.0]}
    }  # fmt: skip
    for name, setting in settings.items():
        if peers.installed(name.split()[0]):
            step = peers.methods()[name](limits, problem.case.model, setting).step
            found[name.split()[0].lower()] = functools.partial(step, nothing)
    return found


def forward_only(case: Case) -> Callable[[], None]:
    def step() -> None:
        with torch.no_grad():
            case.losses()

    return step


def libauc_step(case: Case) -> Callable[[], None] | None:
    """LibAUC's one-way partial AUC loss with its own optimizer, when it is installed."""
    if case.targets is None:
        return None
    try:
        from libauc.losses import pAUC_CVaR_Loss  # pyright: ignore[reportMissingImports]
        from libauc.optimizers import SOPA  # pyright: ignore[reportMissingImports]
    except Exception:  # its imports fail in several ways
        return None
    size = 10_000
    half = case.batch_size // 2
    targets = torch.cat([torch.ones(half), torch.zeros(half)])
    device = torch.device("cpu")
    loss = pAUC_CVaR_Loss(data_len=size, pos_len=size, device=device)
    optimizer = SOPA(case.model.parameters(), mode="adam", lr=1e-4, device=device)
    index = torch.arange(case.batch_size)
    return stepping(optimizer, lambda: loss(torch.sigmoid(case.scores()), targets, index))


def measure(case: Case, rounds: int, steps: int, show: bool) -> dict[str, float | None]:
    candidates = {
        "plain": plain_step(case),
        "defaults": sonex_step(case, None),
        "ema": sonex_step(case, 0.0),
        "msvr": sonex_step(case),
        "forward": forward_only(case),
    }
    limits = PairwiseLimits(case)
    candidates |= {"constrained": constrained_step(limits), "by_hand": penalty_step(limits)}
    candidates |= peer_steps(limits)
    peer = libauc_step(case)
    if peer is not None:
        candidates["libauc"] = peer

    def tick(done: int, total: int) -> None:
        if show:
            print(f"\r  {case.name}: round {done}/{total}", end="", file=sys.stderr, flush=True)

    clock = CPU_CLOCK if case.device == "cpu" else time.perf_counter
    timings = interleave(candidates, rounds, steps, device=case.device, clock=clock, tick=tick)
    if show:
        print(file=sys.stderr)
    ema = timings.ratio("ema", "plain")
    bound = ema + timings.ratio("forward", "plain")
    msvr = timings.ratio("msvr", "plain")
    low, high = timings.spread("msvr", "plain")
    return {
        "plain_ms": round(1000 * timings.median("plain"), 4),
        "defaults": round(timings.ratio("defaults", "plain"), 4),
        "ema": round(ema, 4),
        "msvr": round(msvr, 4),
        "msvr_p10": round(low, 4),
        "msvr_p90": round(high, 4),
        "forward_bound": round(bound, 4),
        "msvr_over_bound": round(msvr / bound, 4),
        "msvr_over_plain_bound": round(msvr / (1 + bound - ema), 4),
        **{
            name: round(timings.ratio(name, "plain"), 4) if name in candidates else None
            for name in ("libauc", "constrained", "by_hand", "cooper", "hct")
        },
    }


def measure_tracker(rounds: int) -> dict[str, float]:
    """Time to build a tracker of 10^7 blocks, and its step against one of 10^3."""
    start = time.perf_counter()
    large = fcco.tracker.InnerTracker(10**7, gamma=0.1)
    build = time.perf_counter() - start
    small = fcco.tracker.InnerTracker(10**3, gamma=0.1)
    values = torch.rand(64, requires_grad=True)
    generator = torch.Generator().manual_seed(0)

    def step_of(tracker: fcco.tracker.InnerTracker) -> Callable[[], None]:
        indices = torch.randint(tracker.num_inner, (512, 64), generator=generator)
        # Once before the clock runs: memory of a table is mapped when it is first touched.
        for index in indices:
            tracker(values, index, values)
        count = 0

        def step() -> None:
            nonlocal count
            count = (count + 1) % len(indices)
            tracker(values, indices[count], values).sum().backward()

        return step

    steps = {"small": step_of(small), "large": step_of(large)}
    timings = interleave(steps, rounds, 10, clock=CPU_CLOCK)
    return {"build_s": round(build, 5), "step_ratio": round(timings.ratio("large", "small"), 4)}


def gpu_candidates(case: Case) -> dict[str, Callable[[], None]]:
    """Steps with nothing set, and the same goals by hand."""
    limits = PairwiseLimits(case)
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
        "plain": plain_step(case),
        "defaults": sonex_step(case, None),
        "sixteen": sonex_step(case, None, 16),
        "constrained": constrained_step(limits),
        "average_precision": stepping(optimizer, ranked),
        "cvar_by_hand": stepping(adam(case), cvar),
        "by_hand": penalty_step(limits),
    }


def measure_on_gpu(case: Case, rounds: int) -> dict[str, Any]:
    candidates = gpu_candidates(case)
    timings = interleave(candidates, rounds, case.steps, warm_up=30, device=case.device)
    result: dict[str, Any] = {"plain_ms": round(1000 * timings.median("plain"), 4)}
    launches, waits = launched(candidates.pop("plain"))
    result |= {"plain_launches": launches}
    for name, step in candidates.items():
        own, own_waits = launched(step)
        low, high = timings.spread(name, "plain")
        result[name] = {
            "ratio": round(timings.ratio(name, "plain"), 4),
            "p10": round(low, 4),
            "p90": round(high, 4),
            "launches": own - launches,
            "waits": own_waits - waits,
        }
    return result


def table(results: dict[str, dict[str, Any]]) -> str:
    names = ["plain_ms", "defaults", "ema", "msvr", "forward_bound", "msvr_over_bound", "libauc"]
    names += ["constrained", "by_hand", "cooper", "hct"]
    lines = [f"{'model':<18}" + "".join(f"{name:>16}" for name in names)]
    for model, row in results.items():
        cells = "".join(f"{'-' if row[n] is None else row[n]:>16}" for n in names)
        lines.append(f"{model:<18}{cells}")
    return "\n".join(lines)


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
    results = found["models"] = dict[str, dict[str, Any]]()
    if options.gpu:
        for compiled in (False, True):
            for case in gpu_cases(compiled):
                name = f"{case.name}{', compiled' * compiled}"
                results[name] = measure_on_gpu(case, options.rounds or case.rounds)
                print(name, json.dumps(results[name]), flush=True)
                if options.out:  # whatever ends this program, what was measured is kept
                    options.out.write_text(json.dumps(found, indent=1) + "\n")
                del case
    else:
        for case in cpu_cases():
            rounds = options.rounds or case.rounds
            results[case.name] = measure(case, rounds, case.steps, sys.stderr.isatty())
            del case
        tracker = found["tracker"] = measure_tracker(options.rounds or 200)
        print(table(results))
        print(f"tracker of 10^7 blocks: built in {tracker['build_s']:.4f} s, ", end="")
        print(f"step {tracker['step_ratio']:.3f} times that of 10^3")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
