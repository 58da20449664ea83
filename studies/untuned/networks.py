"""Networks that can fit every group: a tabular MLP and a small CNN, three larger ones on a GPU.

    python -m studies.untuned --gpu --minutes 9 --only 'residual|ResNet|Efficient' --out build/gpu

Faces are those of CelebA's first 10,000 that are for training, in 16 groups. The larger networks
run side by side on one GPU, the most telling first; ResNet-18 needs torchvision.

Figures are the training CVaR, and how many runs ended at a constant: all outputs nearly alike and a
CVaR near ln 2.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import product
from typing import Any

import torch
from fcco_experiments import backbones
from fcco_experiments.data import load_grouped
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, relu

import fcco
from studies.runner import Job

from . import groups
from .constraints import Figures

OURS = "fcco"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("fcco", {}),
    "uniform": ("uniform", {}),
    "OOA": ("OOA", {"plain": True}),
    **{f"SONEX {s:g}": ("fcco", {"smoothing": s, "gamma": 0.9}) for s in (0.1, 1.0, 10.0)},
}
PLAIN = (OURS, "uniform", "OOA")
SHAPES = ((16, 4), (4, 16))  # groups of a batch and samples of each
SIDE_BY_SIDE = 14  # processes that share a GPU


class Residual(nn.Module):
    """Two 3x3 convolutions with group norm, the first with stride 2, beside a 1x1 shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        norm = functools.partial(nn.GroupNorm, min(8, outputs // 2), outputs)
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), norm(), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(),
        )  # fmt: skip
        self.past = nn.Conv2d(inputs, outputs, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Half as many rows and columns."""
        return relu(self.past(x) + self.inner(x))


def _residual(width: int) -> nn.Module:
    """Four stages of `width` to 8 `width` channels."""
    first = nn.Conv2d(3, width, 3, padding=1)
    stages = [Residual(width * max(1, 2**k // 2), width * 2**k) for k in range(4)]
    last = nn.Linear(8 * width, 2)
    return nn.Sequential(first, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


def _lite0() -> nn.Module:
    made = backbones.build("efficientnet-lite0", size=(128, 104))
    return nn.Sequential(made, nn.Linear(made.width, 2))


class OfImages(nn.Module):
    """A network of uint8 images; in bfloat16 on a GPU."""

    def __init__(self, network: nn.Module, scaled: bool = True) -> None:
        super().__init__()
        self.network, self.scaled = network, scaled

    def forward(self, images: Tensor) -> Tensor:
        """The two logits of each image."""
        x = images.float() / 127.5 - 1 if self.scaled else images
        on = images.is_cuda
        with torch.autocast(images.device.type, torch.bfloat16, enabled=on, cache_enabled=False):
            return self.network(x).float()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "CNN 22x27": lambda: OfImages(_residual(8)),
    "residual CNN": lambda: OfImages(_residual(32)),
    "ResNet-18": lambda: OfImages(import_module("torchvision.models").resnet18(num_classes=2)),
    "EfficientNet-lite0": lambda: OfImages(_lite0(), scaled=False),  # it scales by itself
}
NAMES = ("tabular MLP", *NETWORKS)


def _model(network: str, shape: Sequence[int], device: torch.device) -> nn.Module:
    """On a GPU its forward and backward pass are one graph each: launches would take the time."""
    model: Any = NETWORKS[network]().to(device)
    if device.type != "cuda":
        return model
    model = model.to(memory_format=torch.channels_last)
    kept = {name: value.clone() for name, value in model.named_buffers()}
    sample = torch.zeros(tuple(shape), dtype=torch.uint8, device=device)
    sample = (sample.to(memory_format=torch.channels_last),)
    model = torch.cuda.make_graphed_callables(model, sample)
    for name, value in model.named_buffers():  # statistics moved while the graph was made
        value.data.copy_(kept[name])
    return model


@functools.cache
def faces(small: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels (blond or not) and groups, 16 by attractive, mouth open, man, blond.

    They are on the GPU if there is one; the small ones, of 22 x 27 pixels, are not.
    """
    data: Any = load_grouped("celeba", download=False)
    train = data.cut(0)["train"]
    images = data.samples.values[train.rows]
    if small:
        images = torch.cat([avg_pool2d(each.float(), 4).byte() for each in images.split(500)])
    device = "cuda" if torch.cuda.is_available() and not small else "cpu"
    return images.to(device), train.label.to(device), train.group.to(device)


@functools.cache
def make(name: str) -> groups.Groups:
    """What a network is trained on, for ten passes, for four with pretrained weights.

    Raises `MissingData` or `ImportError` when it needs what is not there.
    """
    if name == "tabular MLP":
        return groups.make(name)
    images, label, group = faces(small=name == "CNN 22x27")
    NETWORKS[name]()  # here, not in the first run, one learns that its weights are missing
    model = functools.partial(_model, name, (64, *images.shape[1:]), images.device)
    steps = len(label) * (4 if name == "EfficientNet-lite0" else 10) // 64
    return groups.Groups(images, label, group, model, groups.classified, steps=steps)


def run(job: Job) -> Figures:
    """Train a network as the job says; its method is one of `METHODS`. Other jobs: `groups.run`."""
    if job.problem not in NAMES:
        return groups.run(job)
    torch.set_num_threads(1)
    problem, (method, own) = make(job.problem), METHODS[job.method]
    setting = own | job.setting
    try:
        model, seconds = groups.train(problem, method, setting, job.seed, job.evaluations)
    except fcco.tracker.NonFiniteValue:
        return Figures(math.inf)
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(each) for each in problem.inputs.split(1000)]).double()
    losses = cross_entropy(logits, problem.targets, reduction="none")
    means = fcco.group_mean(losses, problem.group).values
    cvar = fcco.outer.CVaR(problem.ratio)(means).item()
    objective = round(cvar, 5) if math.isfinite(cvar) else math.inf
    spread = round(logits.diff(dim=1).std().item(), 4)
    return Figures(objective, seconds=round(seconds, 2), spread=spread)


# First learning rates over two decades, by optimizer; the first is the one of a quick run.
Rates = Mapping[str, tuple[float, ...]]
LOW = (3e-3, 3e-4, 3e-2)
BOTH: Rates = {"Adam 0.9": LOW, "SGD 0.9": (3e-2, 3e-3, 3e-1)}
MOMENTA: Rates = {"Adam 0": LOW, "Adam 0.99": LOW, "SGD 0": (3e-1, 3e-2, 1.0), "SGD 0.99": LOW}


def grid(
    network: str, rates: Rates, seeds: Sequence[int], methods: Collection[str] = PLAIN
) -> Iterator[Job]:
    """Seed by seed; the methods of a comparison one after another."""
    for seed, (optimizer, lrs) in product(seeds, rates.items()):
        for lr, shape, method in product(lrs, SHAPES, methods):
            setting = {"optimizer": optimizer, "lr": lr, "shape": shape}
            yield Job(network, method, setting, seed)


def plan(seeds: Sequence[int], quick: bool) -> list[Job]:
    """On the CPU: the MLP with every momentum; SONEX and the CNN with two."""
    if quick:
        return list(grid("tabular MLP", {name: lrs[:1] for name, lrs in BOTH.items()}, seeds))
    return [
        *grid("tabular MLP", BOTH, seeds, METHODS),
        *grid("tabular MLP", MOMENTA, seeds),
        *grid("CNN 22x27", BOTH, seeds, METHODS),
    ]


def plan_gpu() -> list[Job]:
    """What tells most comes first."""
    cnn, resnet = {"Adam 0.9": (1e-3, 3e-4, 3e-3)}, {"Adam 0.9": (3e-4, 1e-3)}
    return [
        *grid("residual CNN", cnn, (0, 1)),
        *grid("EfficientNet-lite0", {"Adam 0.9": (4e-4,)}, range(5)),
        *grid("ResNet-18", resnet, (0,)),
        *grid("residual CNN", {"SGD 0.9": (0.03, 0.003, 0.3)}, (0,)),
        *grid("residual CNN", cnn, (0,), ("SONEX 1",)),
        *grid("residual CNN", {"SGD 0.99": (3e-3, 3e-2), "SGD 0": (3e-1, 3e-2)}, (0,)),
        *grid("residual CNN", cnn, (2, 3, 4)),
        *grid("ResNet-18", resnet, (1, 2)),
        *grid("EfficientNet-lite0", {"Adam 0.9": (1e-4,)}, range(5)),
    ]


def cell(job: Job) -> str:
    """What methods are compared in, but for the learning rate."""
    number, each = job.setting["shape"]
    return f"{job.problem}, {number} x {each}, {job.setting['optimizer']}"


def collect(jobs: Iterable[Job], known: Mapping[str, Figures]) -> dict[str, dict[str, Any]]:
    """By cell and method: mean CVaR at each learning rate, runs, and runs at a constant."""
    runs: dict[tuple[str, str], dict[float, list[Figures]]] = {}
    for job in jobs:
        if job.key in known:
            by_lr = runs.setdefault((cell(job), job.method), {})
            by_lr.setdefault(job.setting["lr"], []).append(known[job.key])
    found: dict[str, dict[str, Any]] = {}
    for (name, method), by_lr in runs.items():
        means = {str(lr): statistics.fmean(e.objective for e in by_lr[lr]) for lr in sorted(by_lr)}
        ends = [each for own in by_lr.values() for each in own]
        # Outputs nearly alike, at ln 2 = .693: the network tells nobody apart.
        constant = sum(each.spread < 0.25 and 0.6 < each.objective < 0.8 for each in ends)
        row = {"cvar": min(means.values()), "by_lr": means, "runs": len(ends)}
        found.setdefault(name, {})[method] = row | {"constant": constant}
    return found


def goals(found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, bool]]:
    """By network: what is asked for, in words with figures, and whether it is met.

    Ours is compared with the better of uniform and OOA at each learning rate of each cell where all
    three have runs and one of the others came to an end.
    """
    told: dict[str, dict[str, bool]] = {}
    for network in NAMES:
        own = [rows for name, rows in found.items() if name.partition(",")[0] == network]
        rates = [[rows[m]["by_lr"] for m in PLAIN] for rows in own if {*PLAIN} <= {*rows}]
        pairs = [
            (mine[lr], min(other[lr] for other in others))
            for mine, *others in rates
            for lr in mine
            if all(lr in other for other in others)
        ]
        if pairs := [pair for pair in pairs if math.isfinite(pair[1])]:
            ours, best = (statistics.fmean(side) for side in zip(*pairs, strict=True))
            worst = max(mine / other for mine, other in pairs)
            count = sum(rows[OURS]["constant"] for rows in own if OURS in rows)
            told[network] = {
                f"{ours / best:.3f} of the better of uniform and OOA in the mean, "
                f"{worst:.3f} at the worst": ours <= 1.1 * best,
                f"{count} runs at a constant": count == 0,
            }
    return told
