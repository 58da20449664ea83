"""What a step of the global contrastive loss costs beside the plain CLIP loss: time and memory.

    python -m benchmarks.contrastive_speed --json       # one GPU, a few minutes

CLIP's ViT-B/16 with random weights, bf16 autocast, AdamW. In every round each candidate makes the
same number of steps: the plain CLIP loss (cross-entropy both ways, learned scale), ours with moving
averages, ours with MSVR, and a forward pass without gradient, which is what MSVR adds. Peak memory
is that of each candidate alone, after warm-up. MSVR holds one more copy of the parameters, with
`offload` in the host's memory. From 1,024 pairs on, the activations of every block are computed
anew in the backward pass.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fcco_experiments import backbones
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import fcco
from studies import publish

from .cases import Step, stepping
from .timing import Timings, interleave

PAIRS, RECOMPUTE = 200_000, 1024


class Bench:
    """Both halves of CLIP with a learned scale, and a batch."""

    def __init__(self, batch: int, device: str) -> None:
        self.batch, self.device = batch, device
        self.images = torch.randint(256, (batch, 3, 224, 224), dtype=torch.uint8, device=device)
        self.texts = torch.randint(1, 49_000, (batch, 77), device=device)

    def model(self) -> nn.Module:
        """Fresh networks, the same each time."""
        torch.manual_seed(0)
        own = nn.ModuleDict()
        for kind in ("image", "text"):
            half = backbones.build(
                f"clip-{kind}", pretrained=False, size=(224, 224), tokens=77,
                recompute=self.batch >= RECOMPUTE,
            )  # fmt: skip
            layer = half.projection()
            assert layer is not None
            own[kind] = nn.Sequential(half, layer)
        own.log_scale = nn.Parameter(torch.tensor(20.0).log())
        return own.to(self.device)

    def features(self, model: Any) -> tuple[Tensor, Tensor]:
        """Of the batch."""
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return model["image"](self.images), model["text"](self.texts)

    def adam(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, with steps too small to change what is measured."""
        return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=self.device == "cuda")


def plain(bench: Bench, model: Any) -> Step:
    """The CLIP loss of the batch, as it is usually written."""
    matching = torch.arange(bench.batch, device=bench.device)

    def loss() -> Tensor:
        with torch.autocast(bench.device, dtype=torch.bfloat16):
            images, texts = (normalize(x, dim=-1) for x in bench.features(model))
            scores = model.log_scale.exp() * images @ texts.T
            return (cross_entropy(scores, matching) + cross_entropy(scores.T, matching)) / 2

    return stepping(bench.adam(model), loss)


def ours(correction: float, offload: bool = False) -> Callable[[Bench, Any], Step]:
    """The global contrastive loss."""

    def build(bench: Bench, model: Any) -> Step:
        optimizer = bench.adam(model)
        objective = fcco.GlobalContrastive(
            model, optimizer, PAIRS, temperature=lambda: model.log_scale.neg().exp(),
            correction=correction, offload=offload,
        )  # fmt: skip
        draws = [torch.randint(PAIRS, (2 * bench.batch,)).unique()[: bench.batch] for _ in range(8)]
        number = 0

        def loss() -> Tensor:
            nonlocal number
            number += 1
            return objective(lambda: bench.features(model), draws[number % 8])

        return stepping(optimizer, loss)

    return build


def forward(bench: Bench, model: nn.Module) -> Step:
    """The networks at work without gradient: what MSVR adds to a step."""

    @torch.no_grad()
    def step() -> None:
        bench.features(model)

    return step


CANDIDATES: dict[str, Callable[[Bench, Any], Step]] = {
    "clip": plain,
    "ema": ours(0.0),
    "msvr": ours(0.1),
    "msvr-offload": ours(0.1, offload=True),
    "forward": forward,
}


def peak(bench: Bench, build: Callable[[Bench, Any], Step]) -> float | None:
    """GiB at the height of a step of one candidate alone, or None without a GPU."""
    if bench.device != "cuda":
        return None
    step = build(bench, bench.model())
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    height = torch.cuda.max_memory_allocated() / 2**30
    del step
    gc.collect()
    torch.cuda.empty_cache()
    return height


def measure(bench: Bench, rounds: int, steps: int) -> dict[str, Any]:
    """Times and memory of every candidate on one batch."""
    memory = {name: peak(bench, build) for name, build in CANDIDATES.items()}
    model = bench.model()  # one for all: only their optimizers differ
    made = {name: build(bench, model) for name, build in CANDIDATES.items()}
    timings = interleave(made, rounds, steps, warm_up=2, device=bench.device)
    rows = {name: row(name, timings, memory) for name in CANDIDATES}
    return {"batch": bench.batch, "recompute": bench.batch >= RECOMPUTE, "rows": rows}


def row(name: str, timings: Timings, memory: dict[str, float | None]) -> dict[str, Any]:
    """One candidate's figures, beside the plain CLIP loss."""
    own, base = memory[name], memory["clip"]
    return {
        "milliseconds": round(1e3 * timings.median(name), 2),
        "ratio": round(timings.ratio(name, "clip"), 4),
        "spread": [round(each, 4) for each in timings.spread(name, "clip")],
        "mib_more": None if own is None or base is None else round(1024 * (own - base), 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--publish", action="store_true", help="write docs/results")
    parser.add_argument("--commit", help="of the code, where git is not at hand")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for batch in options.batches:
        large = batch >= RECOMPUTE
        rounds, steps = options.rounds or (6 if large else 16), 1 if large else 4
        results.append(measure(Bench(batch, device), rounds, steps))
        print(json.dumps(results[-1], indent=1), file=sys.stderr, flush=True)
        gc.collect()
    publish.conclude(options, "continual-speed", {"cases": results}, device=device)


if __name__ == "__main__":
    main()
