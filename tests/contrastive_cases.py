"""Cases of test_contrastive_ranks.py, and the worker process that runs them on one rank."""

from __future__ import annotations

import argparse
import datetime
import math
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import full, wrap_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fcco
from fcco.contrastive import log_means

PAIRS, STEPS = 20, 12
_draw = torch.Generator().manual_seed(4)
X = torch.randn(PAIRS, 6, generator=_draw, dtype=torch.float64)
T = torch.randn(PAIRS, 6, generator=_draw, dtype=torch.float64)
SIZES = {
    1: ((8,),),
    2: ((3, 5), (7, 1), (4, 4), (8, 0)),
    3: ((3, 1, 4), (2, 6, 0), (1, 1, 6), (3, 2, 3)),
}
"""Number of ranks -> pairs of each rank, step by step: always eight in total."""


class Backbones(nn.Module):
    """Two linear encoders and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 4), nn.Linear(6, 4)
        self.log_tau = nn.Parameter(torch.tensor([math.log(0.4)]))
        self.tau = torch.zeros(1)
        self.double()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        self.tau = self.log_tau.exp()
        return self.image(X[ids]).tanh(), self.text(T[ids]).tanh()


@dataclass(frozen=True)
class Case:
    """Settings of one run.

    Attributes:
        options: of `GlobalContrastive`.
        learned: whether the temperature is learned.
        from_parameter: the temperature is computed from the parameter after the forward pass, not
            in it.
        labels: (numbers of pairs) -> labels.
        anchors: (numbers of pairs) -> anchors.
        plain_loss: add an ordinary loss, one value per pair.
    """

    options: dict[str, Any] = field(default_factory=dict)
    learned: bool = False
    from_parameter: bool = False
    labels: Callable[[Tensor], Tensor] | None = None
    anchors: Callable[[Tensor], Tensor] | None = None
    plain_loss: bool = False


MSVR = {"gamma": 0.5, "correction": 0.2}
CASES = {
    "ema": Case({"gamma": 0.5, "correction": 0.0}),
    "ema-old": Case({"gamma": 0.5, "correction": 0.0, "read": "old"}),
    "msvr": Case(MSVR),
    "msvr-learned": Case({**MSVR, "radius": 0.5}, learned=True),
    "learned-unscaled": Case({**MSVR, "scaled": False}, learned=True, from_parameter=True),
    "chunked": Case({**MSVR, "chunk": 2}, learned=True),
    "labels": Case(MSVR, labels=lambda ids: ids % 3),
    "anchors": Case(MSVR, anchors=lambda ids: ids % 2 == 0),
    "everything": Case(
        {**MSVR, "chunk": 3, "radius": 0.2, "offset": 0.1},
        learned=True,
        from_parameter=True,
        labels=lambda ids: ids % 4,
        anchors=lambda ids: ids % 5 != 1,
        plain_loss=True,
    ),
}


SHARDED = ("msvr-learned", "labels")
"""Cases that run under FSDP2 too."""


@dataclass
class Record:
    """Results of a run."""

    loss: list[float] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def batches(step: int, world: int) -> list[Tensor]:
    """The same eight pairs for any number of ranks, in the same order."""
    order = torch.randperm(PAIRS, generator=torch.Generator().manual_seed(step))
    sizes = SIZES[world][step % len(SIZES[world])]
    return list(order[:8].split(list(sizes)))


def train(case: Case, wrap: Callable[[nn.Module], nn.Module], rank: int, world: int) -> Record:
    """Train on this rank's part of the batches."""
    backbones = Backbones()
    backbones.log_tau.requires_grad_(case.learned)
    model = wrap(backbones)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    temperature: Any = 0.4
    if case.learned:
        temperature = (
            (lambda: backbones.log_tau.exp()) if case.from_parameter else (lambda: backbones.tau)
        )
    objective = fcco.GlobalContrastive(
        model, optimizer, PAIRS, temperature=temperature, **case.options
    )
    record = Record()
    for step in range(STEPS):
        ids = batches(step, world)[rank]
        options = {
            "label": None if case.labels is None else case.labels(ids),
            "anchor": None if case.anchors is None else case.anchors(ids),
        }

        def inner(ids: Tensor = ids) -> Any:
            images, texts = model(ids)
            loss = 0.1 * (images.square().sum(1) + texts.square().sum(1))
            return (loss, (images, texts)) if case.plain_loss else (images, texts)

        optimizer.zero_grad()
        loss = objective(inner, ids, **options)
        loss.backward()
        record.loss.append(loss.item())
        grads = [p.grad for p in backbones.parameters() if p.requires_grad]
        record.gradients.append(torch.cat([full(g).flatten() for g in grads if g is not None]))
        optimizer.step()
    objective.eval()
    ids = batches(STEPS, world)[rank]
    record.loss.append(objective(lambda: model(ids), ids).item())
    record.parameters = [full(p) for p in backbones.parameters()]
    record.state = {name: buffer.clone() for name, buffer in objective.named_buffers()}
    return record


def inner_values(rank: int, world: int, dtype: torch.dtype) -> Tensor:
    """The inner values of this rank's pairs."""
    ids = batches(0, world)[rank]
    return log_means(X[ids].to(dtype), T[ids].to(dtype), 0.8, chunk=2 if world == 3 else None)


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return "no error"


def one_label(rank: int, world: int) -> str:
    """One label for all pairs: every rank must raise, or the others would wait for ever."""
    ids = batches(0, world)[rank]
    anchor = torch.full((len(ids),), rank == 0)
    same = torch.zeros(len(ids), dtype=torch.int64)
    return error_of(lambda: log_means(X[ids], T[ids], 0.8, label=same, anchor=anchor))


def one_pair(rank: int, world: int) -> str:
    """One pair on all ranks together."""
    ids = torch.arange(1 if rank == 0 else 0)
    return error_of(lambda: log_means(X[ids], T[ids], 0.8))


def run(rank: int, world: int) -> dict[str, Any]:
    """Every case on this rank."""
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        results[name] = vars(train(case, DistributedDataParallel, rank, world))
    for name in SHARDED:
        sharded = train(CASES[name], wrap_of("fsdp-root"), rank, world)
        results[f"sharded/{name}"] = vars(sharded)
    results["rows"] = {
        str(k): inner_values(rank, world, k) for k in (torch.float64, torch.bfloat16)
    }
    results["one label"], results["one pair"] = one_label(rank, world), one_pair(rank, world)
    results["local"] = log_means(X[:5], T[:5], 0.8, process_group=None)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, convert in (("rank", int), ("world", int), ("folder", Path)):
        parser.add_argument(f"--{name}", type=convert, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.FileStore(str(options.folder / "store"), options.world)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=options.rank,
        world_size=options.world,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        results = run(options.rank, options.world)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    torch.save(results, options.folder / f"{options.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
