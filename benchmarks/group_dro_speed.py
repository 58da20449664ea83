"""How fast group DRO trains the paper's networks on a GPU, and how long its three runs would take.

    python -m benchmarks.group_dro_speed --json      # ten minutes or more on one GPU

Networks of `fcco_experiments.backbones` with random weights, bf16 autocast, the paper's batches.
Measured side by side in one run: plain training (ERM), SONEX with moving averages (EMA) and with
MSVR, and a forward pass alone. The bound of MSVR is ERM plus one forward pass. `compiled` rows have
the network under `torch.compile`, to see whether the host's launches are what costs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fcco_experiments import backbones
from fcco_experiments.tasks.network import Classifier
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .models import Case
from .overhead import forward_only, plain_step, sonex_step
from .timing import interleave

RUNS = {
    # backbone: data, training samples an epoch, epochs, hours that the paper reports
    "densenet121": ("Camelyon17", 302_436, 10, 4.0),
    "resnet50": ("CelebA", 162_079, 15, 5.0),
    "distilbert": ("Amazon", 245_502, 4, 12.0),
}
"""Sizes: the official training part of each data set, 8 of 10 parts of CelebA. The paper's hours
are on an A30 (Camelyon17, CelebA) and an A100 (Amazon)."""


def network(backbone: str, classes: int) -> nn.Module:
    """A classifier with random weights, its norms in training mode."""
    options: dict[str, Any] = {"pretrained": False, "batch_norm": "batch", "tokens": 512}
    if backbone == "resnet50":
        options["size"] = (224, 224)
    if backbone == "densenet121":
        options["size"] = (96, 96)
    made = backbones.build(backbone, **options)
    model = Classifier(made, made.width, (), classes).cuda().train()
    return model if backbone == "distilbert" else model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def batch_of(backbone: str, number: int) -> Tensor:
    """Raw inputs, as the task has them."""
    if backbone == "distilbert":
        return torch.randint(1000, 30_000, (number, 512), device="cuda", dtype=torch.int32)
    side = 224 if backbone == "resnet50" else 96
    return torch.randint(256, (number, 3, side, side), device="cuda", dtype=torch.uint8)


def case(backbone: str, number: int, compiled: bool) -> Case:
    """A network with a batch."""
    classes = 5 if backbone == "distilbert" else 2
    model = network(backbone, classes)
    inputs, label = batch_of(backbone, number), torch.randint(classes, (number,), device="cuda")
    run: Callable[[Tensor], Tensor] = torch.compile(model) if compiled else model

    def scores() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return run(inputs).float()

    def losses() -> Tensor:
        return cross_entropy(scores(), label, reduction="none")

    name = f"{backbone}, {number}" + (", compiled" if compiled else "")
    return Case(name, model, scores, losses, number, device="cuda")


def cases(names: list[str]) -> Iterator[tuple[str, Case]]:
    """The paper's batches, plain and compiled, and one that keeps a large GPU busy."""
    sizes = {"resnet50": (64, 256), "densenet121": (256, 1024), "distilbert": (32, 128)}
    for backbone in names:
        paper, large = sizes[backbone]
        for number, compiled in ((paper, False), (paper, True), (large, False)):
            yield backbone, case(backbone, number, compiled)


def measure(backbone: str, own: Case, rounds: int) -> dict[str, Any]:
    """Samples per second, ratios, and the hours of the paper's run."""
    candidates = {
        "erm": plain_step(own, torch.optim.AdamW(own.model.parameters(), lr=1e-4)),
        "ema": sonex_step(own, 0.0, RUNS[backbone][1] // 200),
        "msvr": sonex_step(own, 0.1, RUNS[backbone][1] // 200),
        "forward": forward_only(own),
    }
    timings = interleave(candidates, rounds, 5, warm_up=6, device="cuda")
    seconds = {name: timings.median(name) for name in candidates}
    bound = 1 + timings.ratio("forward", "erm")
    _, samples, epochs, hours = RUNS[backbone]
    row: dict[str, Any] = {f"{n}_per_second": round(own.batch_size / s) for n, s in seconds.items()}
    row |= {
        "ema": round(timings.ratio("ema", "erm"), 4),
        "msvr": round(timings.ratio("msvr", "erm"), 4),
        "bound": round(bound, 4),
        "msvr_over_bound": round(timings.ratio("msvr", "erm") / bound, 4),
        "spread": [round(each, 3) for each in timings.spread("msvr", "erm")],
        "hours": round(samples * epochs * seconds["msvr"] / own.batch_size / 3600, 3),
        "paper_hours": hours,
    }
    return row


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line for each case."""
    heads = ["erm_per_second", "ema_per_second", "msvr_per_second", "ema", "msvr", "bound",
             "msvr_over_bound", "hours", "paper_hours"]  # fmt: skip
    lines = [f"{'network, batch':<28}" + "".join(f"{name:>17}" for name in heads)]
    for name, row in results.items():
        lines.append(f"{name:<28}" + "".join(f"{row[key]:>17}" for key in heads))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--backbones", default="resnet50,densenet121,distilbert")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a GPU.")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    results: dict[str, dict[str, Any]] = {}
    for backbone, own in cases(options.backbones.split(",")):
        results[own.name] = measure(backbone, own, options.rounds)
        print(own.name, results[own.name], file=sys.stderr, flush=True)
        del own
        torch.cuda.empty_cache()
    print(table(results))
    if options.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "cases": results}))


if __name__ == "__main__":
    main()
