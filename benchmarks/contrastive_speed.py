"""What a step of the global contrastive loss costs beside the plain CLIP loss: time and memory.

    python -m benchmarks.contrastive_speed --json                 # one GPU, a few minutes
    python -m benchmarks.contrastive_speed --json --quick         # tiny backbones, also on a CPU

Two backbones of the size of CLIP ViT-B/16 with random weights, bf16 autocast, AdamW. In every round
each candidate makes the same number of steps: the plain CLIP loss (cross-entropy both ways, learned
scale), ours with moving averages, the same chunked, ours with MSVR, and a forward pass without
gradient, which is what MSVR adds. Peak memory is that of each candidate alone, after warm-up. MSVR
holds one more copy of the parameters, with `offload` in the host's memory. From 1,024 pairs on, the
activations of every block are computed anew in the backward pass.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

import fcco
from studies import publish

from .timing import Timings, interleave

PAIRS = 200_000


@dataclass(frozen=True)
class Size:
    """Sizes of both backbones: (layers, width, heads)."""

    image: tuple[int, int, int] = (12, 768, 12)
    text: tuple[int, int, int] = (12, 512, 8)
    side: int = 224
    patch: int = 16
    tokens: int = 77
    words: int = 49_408
    joint: int = 512


TINY = Size((2, 32, 2), (2, 32, 2), side=32, tokens=16, words=100, joint=16)


class Backbone(nn.Module):
    """Transformer layers with their norms in front, and a projection; reads one position."""

    def __init__(self, shape: tuple[int, int, int], length: int, joint: int, causal: bool) -> None:
        super().__init__()
        layers, width, heads = shape
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )  # fmt: skip
        self.norm, self.projection = nn.LayerNorm(width), nn.Linear(width, joint, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(length) if causal else None
        self.register_buffer("mask", mask, persistent=False)
        self.read, self.recompute = -1 if causal else 0, False

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, joint)."""
        x = x + self.place
        for block in self.blocks:
            run = partial(block, src_mask=self.mask, is_causal=self.mask is not None)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = run(x)
        return self.projection(self.norm(x[:, self.read]))


class Pair(nn.Module):
    """An image backbone, a text backbone and the logarithm of the scale 1/tau."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        patches, width = (size.side // size.patch) ** 2, size.image[1]
        self.patch = nn.Conv2d(3, width, size.patch, size.patch, bias=False)
        self.start = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.words = nn.Embedding(size.words, size.text[1])
        self.image = Backbone(size.image, patches + 1, size.joint, causal=False)
        self.text = Backbone(size.text, size.tokens, size.joint, causal=True)
        self.log_scale = nn.Parameter(torch.tensor(20.0).log())

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Features of both kinds."""
        patches = self.patch(images).flatten(2).transpose(1, 2)
        start = self.start.to(patches.dtype).expand(len(images), -1, -1)
        return self.image(torch.cat([start, patches], dim=1)), self.text(self.words(texts))


@dataclass
class Bench:
    """A batch for a pair of backbones."""

    size: Size
    batch: int
    device: str
    recompute: bool

    def __post_init__(self) -> None:
        side, tokens = self.size.side, (self.batch, self.size.tokens)
        shape = (self.batch, 3, side, side)
        self.images = torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        self.texts = torch.randint(self.size.words, tokens, device=self.device)

    def model(self) -> Pair:
        """Fresh backbones, the same each time."""
        torch.manual_seed(0)
        model = Pair(self.size).to(self.device)
        model.image.recompute = model.text.recompute = self.recompute
        return model

    def features(self, model: Pair) -> tuple[Tensor, Tensor]:
        """The features of the batch."""
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return model(self.images, self.texts)

    def adam(self, model: Pair) -> torch.optim.Optimizer:
        """AdamW, with steps too small to change what is measured."""
        return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=self.device == "cuda")


Step = Callable[[], None]


def plain(bench: Bench, model: Pair) -> Step:
    """The CLIP loss of the batch, as it is usually written."""
    optimizer = bench.adam(model)
    matching = torch.arange(bench.batch, device=bench.device)

    def loss() -> Tensor:  # a function, so that its matrices are not held longer than needed
        with torch.autocast(bench.device, dtype=torch.bfloat16):
            images, texts = (normalize(x, dim=-1) for x in model(bench.images, bench.texts))
            scores = model.log_scale.exp() * images @ texts.T
            return (cross_entropy(scores, matching) + cross_entropy(scores.T, matching)) / 2

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(
    correction: float, chunk: int | None = None, offload: bool = False
) -> Callable[[Bench, Pair], Step]:
    """The global contrastive loss."""

    def build(bench: Bench, model: Pair) -> Step:
        optimizer = bench.adam(model)
        objective = fcco.GlobalContrastive(
            model,
            optimizer,
            PAIRS,
            temperature=lambda: model.log_scale.neg().exp(),
            correction=correction,
            chunk=chunk,
            offload=offload,
        )
        draws = [torch.randint(PAIRS, (2 * bench.batch,)).unique()[: bench.batch] for _ in range(8)]
        number = 0

        def step() -> None:
            nonlocal number
            number += 1
            objective(lambda: bench.features(model), draws[number % 8]).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


def forward(bench: Bench, model: Pair) -> Step:
    """The backbones at work without gradient: what MSVR adds to a step."""

    def step() -> None:
        with torch.no_grad():
            bench.features(model)

    return step


def candidates(batch: int) -> dict[str, Callable[[Bench, Pair], Step]]:
    return {
        "clip": plain,
        "ema": ours(0.0),
        "chunked": ours(0.0, max(batch // 8, 1)),
        "msvr": ours(0.1),
        "msvr-offload": ours(0.1, offload=True),
        "forward": forward,
    }


def peak(bench: Bench, build: Callable[[Bench, Pair], Step]) -> float | None:
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
    builds = candidates(bench.batch)
    memory = {name: peak(bench, build) for name, build in builds.items()}
    model = bench.model()  # one for all: only their optimizers differ
    made = {name: build(bench, model) for name, build in builds.items()}
    timings = interleave(made, rounds, steps, warm_up=2, device=bench.device)
    rows = {name: row(name, timings, memory) for name in builds}
    return {"batch": bench.batch, "recompute": bench.recompute, "rows": rows}


def row(name: str, timings: Timings, memory: dict[str, float | None]) -> dict[str, Any]:
    """One candidate's figures, beside the plain CLIP loss."""
    own, base = memory[name], memory["clip"]
    return {
        "milliseconds": round(1e3 * timings.median(name), 2),
        "ratio": round(timings.ratio(name, "clip"), 4),
        "spread": [round(each, 4) for each in timings.spread(name, "clip")],
        "gib": None if own is None else round(own, 3),
        "mib_more": None if own is None or base is None else round(1024 * (own - base), 1),
    }


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each candidate and batch."""
    rows = [["batch, loss", "milliseconds", "ratio", "gib", "mib_more"]]
    for result in results:
        for name, own in result["rows"].items():
            cells = ["-" if own.get(key) is None else str(own[key]) for key in rows[0][1:]]
            rows.append([f"{result['batch']}, {name}", *cells])
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--quick", action="store_true", help="tiny backbones, few steps")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--publish", action="store_true", help="write docs/results")
    parser.add_argument("--commit", help="of the code, where git is not at hand")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    tiny = options.quick or options.device == "cpu"
    results = []
    for batch in options.batches or ([16] if tiny else [256, 4096]):
        bench = Bench(TINY if tiny else Size(), batch, options.device, batch >= 1024)
        rounds = options.rounds or (2 if tiny else 6 if batch >= 1024 else 16)
        results.append(measure(bench, rounds, 1 if batch >= 1024 or tiny else 4))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        del bench
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print(publish.plain(table(results)))
    found = {"backbones": "tiny" if tiny else "ViT-B/16", "cases": results}
    if options.publish:
        folder = publish.RESULTS / "continual-speed"
        publish.write(folder, found, device=options.device, commit=options.commit)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
