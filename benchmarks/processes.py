"""What an objective adds to a step of DDP: messages, their bytes, state and time, by processes.

    python -m benchmarks.processes --json        # 1, 2 and 4 processes of one thread each (gloo)

Each process has 64 samples of 8 groups; the network is a perceptron 64-256-256-1.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

import fcco
from studies import publish

from .cases import stepping
from .timing import interleave

GROUPS, SAMPLES = 1000, 64


class Counted:
    """How often a collective was called, and the bytes that a process sent."""

    def __init__(self, call: Callable[..., Any], what: int) -> None:
        self.call, self.what, self.number, self.bytes = call, what, 0, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Count, and call."""
        self.number += 1
        self.bytes += arguments[self.what].nbytes
        return self.call(*arguments, **options)


def work(rank: int, size: int, rounds: int, folder: str) -> None:
    """One process: steps with the mean of the losses and with two objectives."""
    torch.set_num_threads(1)
    if size > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", store, rank=rank, world_size=size)
    torch.manual_seed(rank)
    x = torch.randn(SAMPLES, 64)
    group = torch.randperm(GROUPS)[:8].repeat_interleave(SAMPLES // 8)
    wide = lambda width: [torch.nn.Linear(width, 256), torch.nn.ReLU()]  # noqa: E731

    def make(kind: str) -> tuple[Callable[[], None], Any]:
        model: Any = torch.nn.Sequential(*wide(64), *wide(256), torch.nn.Linear(256, 1))
        model = DistributedDataParallel(model) if size > 1 else model
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def losses() -> torch.Tensor:
            return softplus(model(x).squeeze(1))

        def limited() -> Any:
            loss = losses()
            return loss, {f"limit {k}": part.mean() for k, part in enumerate(loss.split(8))}

        if kind == "groups":
            dro = fcco.CVaRGroupDRO(model, optimizer, GROUPS, ratio=0.1)
            return stepping(optimizer, lambda: dro(losses, group)), dro
        if kind == "limits":
            limits = {f"limit {k}": 0.5 for k in range(8)}
            constrained = fcco.constrained(model, optimizer, limits)
            return stepping(optimizer, lambda: constrained(limited)), constrained
        return stepping(optimizer, lambda: losses().mean()), None

    made = {kind: make(kind) for kind in ("mean", "groups", "limits")}
    times = interleave({kind: step for kind, (step, _) in made.items()}, rounds, 20)
    rows = []
    for kind, (step, objective) in made.items():
        gathers, sums = Counted(dist.all_gather, 1), Counted(dist.all_reduce, 0)
        dist.__dict__.update(all_gather=gathers, all_reduce=sums)
        step()
        dist.__dict__.update(all_gather=gathers.call, all_reduce=sums.call)
        state = objective.buffers() if objective is not None else ()
        rows.append({
            "processes": size, "objective": kind, "messages": gathers.number + sums.number,
            "bytes": gathers.bytes + sums.bytes, "state": sum(value.nbytes for value in state),
            "milliseconds": 1000 * times.median(kind), "ratio": times.ratio(kind, "mean"),
        })  # fmt: skip
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure(size: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of one number of processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (size, rounds, folder), size)
        return json.loads(Path(folder, "rows.json").read_text())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="all of it as the last line")
    parser.add_argument("--commit", help="of the code, where git is not at hand")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = [row for size in options.processes for row in measure(size, options.rounds)]
    for row in rows:
        print(*(f"{v:.3g}" if isinstance(v, float) else v for v in row.values()), sep="\t")
    if options.json:
        print(json.dumps(publish.about(commit=options.commit) | {"rows": rows}))


if __name__ == "__main__":
    main()
