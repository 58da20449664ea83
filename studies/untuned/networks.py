"""Networks that can fit every group: a tabular MLP and a small CNN here, larger ones on a GPU.

    python -m studies.untuned.networks --prepare build/faces.pt
    python -m studies.untuned.networks --data build/faces.pt --minutes 9 --out build/gpu.jsonl

The first command keeps the first 10,000 faces of CelebA (16 groups) as JPEG in a file of 27 MB. The
second trains, on a GPU unless `--device` says otherwise, as many runs side by side as `--workers`
says, the most telling first, until the time is over. It needs torch, NumPy, pillow and fcco, for
ResNet-18 torchvision, for EfficientNet-lite0 `fcco_experiments` with its weights. Each finished run
is a line of `--out`; runs that the file holds are not made again.

Figures are the training CVaR, and how many runs ended at a constant: all outputs nearly alike and a
CVaR near ln 2.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, relu

import fcco

from . import groups
from .groups import Groups, classified

RATIO, SHAPES = 0.15, ((16, 4), (4, 16))
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fcco": ("fcco", {}),
    "uniform": ("uniform", {}),
    "OOA": ("OOA", {"plain": True}),
    **{f"SONEX {s:g}": ("fcco", {"smoothing": s, "gamma": 0.9}) for s in (0.1, 1.0, 10.0)},
}
OURS = "fcco"
PLAIN = (OURS, "uniform", "OOA")


@dataclass(frozen=True)
class Job:
    """One run, as data.

    Attributes:
        network: its name.
        method: a name of `METHODS`.
        optimizer: see `groups.optimizer_of`.
        lr: the first learning rate.
        shape: groups of a batch and samples of each.
        seed: of the weights, the batches and the split.
        tiny: a few steps on a few small faces, to see that it runs.
    """

    network: str
    method: str
    optimizer: str
    lr: float
    shape: tuple[int, int]
    seed: int
    tiny: bool = False

    @property
    def key(self) -> str:
        """A text that tells jobs apart."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def cell(self) -> str:
        """What rows of different methods are compared in, but for the learning rate."""
        return f"{self.network}, {self.shape[0]} x {self.shape[1]}, {self.optimizer}"


@dataclass(frozen=True)
class Result:
    """What a run ended with, on all training data.

    Attributes:
        cvar: of the group losses; infinite when the run diverged.
        spread: standard deviation of the outputs, as differences of the two logits.
        seconds: of all steps.
    """

    cvar: float
    spread: float
    seconds: float

    @property
    def constant(self) -> bool:
        """Whether the network tells nobody apart: ln 2 is .693."""
        return self.spread < 0.25 and 0.6 < self.cvar < 0.8

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


# Networks and data.


class Residual(nn.Module):
    """Two 3x3 convolutions with group norm, the first with stride 2, beside a 1x1 shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.past = nn.Conv2d(inputs, outputs, 1, 2, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(min(8, outputs // 2), outputs) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Half as many rows and columns."""
        inner = self.two(relu(self.norms[0](self.one(x))))
        return relu(self.past(x) + self.norms[1](inner))


def residual(width: int) -> nn.Module:
    """Four stages of `width` to 8 `width` channels."""
    stages = [Residual(width * max(1, 2**k // 2), width * 2**k) for k in range(4)]
    first = nn.Conv2d(3, width, 3, padding=1)
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(first, *stages, pool, nn.Flatten(), nn.Linear(8 * width, 2))


def _resnet18() -> nn.Module:
    from torchvision.models import resnet18  # pyright: ignore[reportMissingImports]

    return resnet18(num_classes=2)


def _lite0() -> nn.Module:
    from fcco_experiments import backbones

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


NETWORKS = {
    "residual CNN": lambda: OfImages(residual(32)),
    "ResNet-18": lambda: OfImages(_resnet18()),
    "EfficientNet-lite0": lambda: OfImages(_lite0(), scaled=False),  # it scales by itself
    "CNN 22x27": lambda: OfImages(residual(8)),
}


def _fifths(done: float) -> float:
    return 0.2 ** int(4 * done)


def _model(
    network: str, problem_shape: Sequence[int], device: torch.device, graphs: bool
) -> nn.Module:
    """On a GPU its forward and backward pass are one graph each: launches would take the time."""
    model: Any = NETWORKS[network]().to(device)
    if device.type != "cuda":
        return model
    model = model.to(memory_format=torch.channels_last)
    if not graphs:
        return model
    kept = {name: value.clone() for name, value in model.named_buffers()}
    sample = torch.zeros(tuple(problem_shape), dtype=torch.uint8, device=device)
    sample = sample.to(memory_format=torch.channels_last)
    model = torch.cuda.make_graphed_callables(model, (sample,))
    for name, value in model.named_buffers():  # statistics moved while the graph was made
        value.data.copy_(kept[name])
    return model


@dataclass(frozen=True)
class Faces:
    """Images, labels (blond or not) and groups, 16 by attractive, mouth open, man, blond.

    With `graphs` networks on a GPU are graphs.
    """

    images: Tensor
    label: Tensor
    group: Tensor
    graphs: bool = True

    def problem(self, network: str, seed: int, tiny: bool = False) -> Groups:
        """A training set of 85 % of them; steps for ten passes (four for pretrained weights)."""
        order = torch.randperm(len(self.label), generator=torch.Generator().manual_seed(seed))
        rows = order[: round(0.85 * len(order))].to(self.group.device)
        images = self.images[rows]
        pretrained = network == "EfficientNet-lite0"
        model = functools.partial(
            _model, network, (64, *images.shape[1:]), images.device, self.graphs
        )
        steps = 4 if tiny else len(rows) * (4 if pretrained else 10) // 64
        more: dict[str, Any] = {"decay": _fifths} if pretrained else {}
        return Groups(
            images, self.label[rows], self.group[rows], model, classified, RATIO,
            steps=steps, **more,
        )  # fmt: skip


def prepare(path: Path) -> None:
    """Keep the faces of `fcco data` in one file, as they are compressed there."""
    from fcco_experiments.data import card, load_grouped, sources

    data = load_grouped("celeba", download=False)
    (archive,) = [file for copy in card("celeba").copies for file in copy.files]
    (content,) = sources.contents("celeba", [archive], download=False)
    found = sources.members(archive.name, content)
    jpegs = [found[name] for name in sorted(found) if name.endswith(".jpg")]
    label, group = torch.empty(2, len(jpegs), dtype=torch.long)
    for part in data.cut(0).values():
        label[part.rows], group[part.rows] = part.label, part.group
    ends = torch.tensor([len(each) for each in jpegs]).cumsum(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        (torch.frombuffer(bytearray(b"".join(jpegs)), dtype=torch.uint8), ends, label, group), path
    )


def load(path: Path, every: int = 1) -> Faces:
    """The faces of a file of `prepare`, or each n-th of them."""
    import numpy as np
    from PIL import Image

    flat, ends, label, group = torch.load(path)
    content, stops = flat.numpy().tobytes(), ends.tolist()
    jpegs = [content[a:b] for a, b in zip([0, *stops], stops, strict=False)][::every]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(each)).convert("RGB")) for each in jpegs])
    return Faces(torch.from_numpy(pixels).permute(0, 3, 1, 2), label[::every], group[::every])


def _small_faces() -> Faces:
    """22 x 27 pixels, from the data of `fcco data`."""
    from fcco_experiments.data import load_grouped

    data: Any = load_grouped("celeba", download=False)
    parts = data.cut(0).values()
    rows = torch.cat([part.rows for part in parts])
    small = [avg_pool2d(each.float(), 4).byte() for each in data.samples.values[rows].split(500)]
    label, group = (torch.cat([getattr(p, name) for p in parts]) for name in ("label", "group"))
    return Faces(torch.cat(small), label, group)


def tabular(rows: int = 2000, number: int = 16, features: int = 20, wrong: float = 0.1) -> Groups:
    """Groups of 25 to 225 rows, each with a rule of its own, and a tenth of the labels wrong.

    The MLP has ten times as many weights as there are rows.
    """
    generator = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator)
    share = torch.linspace(1, 9, number)
    group = torch.multinomial(share, rows - 8 * number, True, generator=generator)
    group = torch.cat([group, torch.arange(number).repeat(8)])
    x = normal(rows, features) + 0.5 * normal(number, features)[group]
    rules = normal(1, features) + 0.7 * normal(number, features)
    flipped = torch.rand(rows, generator=generator) < wrong
    y = ((x * rules[group]).sum(1) > 0) ^ flipped

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
        )

    return Groups(x, y.long(), group, model, classified, RATIO, steps=1500)


# Runs.


def fit(problem: Groups, job: Job) -> Result:
    """Train as the job says."""
    method, setting = METHODS[job.method]
    full = {**setting, "lr": job.lr, "ratio": RATIO, "shape": job.shape, "optimizer": job.optimizer}
    try:
        model, seconds = groups.train(problem, method, full, job.seed)
    except fcco.tracker.NonFiniteValue:
        return Result(math.inf, math.inf, 0.0)
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(each) for each in problem.inputs.split(1000)]).double()
    losses = fcco.group_mean(
        cross_entropy(logits, problem.targets, reduction="none"), problem.group
    ).values
    cvar = fcco.outer.CVaR(RATIO)(losses).item()
    spread = logits.diff(dim=1).std().item()
    if not math.isfinite(cvar):
        cvar = spread = math.inf
    return Result(round(cvar, 5), round(spread, 4), round(seconds, 2))


def run(job: Job) -> Result:
    """`fit` on the CPU, on one thread."""
    torch.set_num_threads(1)
    found = make(job.network)
    return fit(found if isinstance(found, Groups) else found.problem(job.network, job.seed), job)


@functools.cache
def make(network: str) -> Groups | Faces:
    """What it is trained on; raises `MissingData` when it needs a file that is not there."""
    return tabular() if network == "tabular MLP" else _small_faces()


# First learning rates over two decades, by optimizer; the first is the one of a quick run.
ADAM, SGD = {"Adam 0.9": (3e-3, 3e-4, 3e-2)}, {"SGD 0.9": (3e-2, 3e-3, 3e-1)}
MOMENTA = {
    **{f"Adam {beta}": ADAM["Adam 0.9"] for beta in ("0", "0.99")},
    "SGD 0": (3e-1, 3e-2, 1.0),
    "SGD 0.99": (3e-3, 3e-4, 3e-2),
}
Rates = dict[str, tuple[float, ...]]


def grid(
    network: str,
    rates: Rates,
    seeds: Iterable[int],
    methods: Iterable[str] = PLAIN,
    tiny: bool = False,
) -> Iterator[Job]:
    """Seed by seed; the methods of a comparison one after another."""
    methods = tuple(methods)
    for seed, (optimizer, lrs) in product(seeds, rates.items()):
        for lr, shape, method in product(lrs, SHAPES, methods):
            yield Job(network, method, optimizer, lr, shape, seed, tiny)


def plan(seeds: Iterable[int], quick: bool) -> list[Job]:
    """On the CPU: the MLP with every momentum; SONEX and the CNN with two."""
    seeds, both = tuple(seeds), {**ADAM, **SGD}
    if quick:
        return list(grid("tabular MLP", {name: lrs[:1] for name, lrs in both.items()}, seeds))
    return [
        *grid("tabular MLP", both, seeds, METHODS),
        *grid("tabular MLP", MOMENTA, seeds),
        *grid("CNN 22x27", both, seeds, METHODS),
    ]


def plan_gpu(tiny: bool = False) -> list[Job]:
    """What tells most comes first."""
    rows = functools.partial(grid, tiny=tiny)
    cnn: Rates = {"Adam 0.9": (1e-3, 3e-4, 3e-3)}
    resnet: Rates = {"Adam 0.9": (3e-4, 1e-3)}
    return [
        *rows("residual CNN", cnn, (0, 1)),
        *rows("EfficientNet-lite0", {"Adam 0.9": (4e-4,)}, range(5)),
        *rows("ResNet-18", resnet, (0,)),
        *rows("residual CNN", {"SGD 0.9": (0.03, 0.003, 0.3)}, (0,)),
        *rows("residual CNN", cnn, (0,), ("SONEX 1",)),
        *rows("residual CNN", {"SGD 0.99": (3e-3, 3e-2), "SGD 0": (3e-1, 3e-2)}, (0,)),
        *rows("residual CNN", cnn, (2, 3, 4)),
        *rows("ResNet-18", resnet, (1, 2)),
        *rows("EfficientNet-lite0", {"Adam 0.9": (1e-4,)}, range(5)),
    ]


# What came out.


def collect(found: Iterable[tuple[Job, Result]]) -> dict[str, Any]:
    """By cell and method: mean CVaR at each learning rate, runs, and runs at a constant."""
    rows: dict[str, dict[str, dict[float, list[Result]]]] = {}
    for job, result in found:
        cell = rows.setdefault(job.cell, {}).setdefault(job.method, {})
        cell.setdefault(job.lr, []).append(result)
    return {
        cell: {
            method: {
                "cvar": {str(lr): _mean(own) for lr, own in sorted(by_lr.items())},
                "runs": sum(map(len, by_lr.values())),
                "constant": sum(each.constant for own in by_lr.values() for each in own),
            }
            for method, by_lr in methods.items()
        }
        for cell, methods in rows.items()
    }


def _mean(results: Sequence[Result]) -> float:
    values = [each.cvar for each in results]
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.inf


def table(found: dict[str, Any]) -> str:
    """Figures of all methods."""
    lines = []
    for cell, methods in found.items():
        lines.append(f"\n{cell:<50}{'runs':>5}{'constant':>9}   CVaR by learning rate")
        for method, row in methods.items():
            rates = "  ".join(f"{lr}: {value:.4f}" for lr, value in row["cvar"].items())
            lines.append(f"  {method:<48}{row['runs']:>5}{row['constant']:>9}   {rates}")
    return "\n".join(lines)


def compare(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each network: ours over the better of uniform and OOA, in the mean over learning rates.

    A learning rate counts where all three methods have runs and one of the others came to an end.
    """
    networks: dict[str, list[tuple[float, float]]] = {}
    constants: dict[str, int] = {}
    for cell, methods in found.items():
        name = cell.partition(",")[0]
        if set(PLAIN) <= methods.keys():
            mine, *others = (methods[each]["cvar"] for each in PLAIN)
            for lr in mine:
                best = min(own.get(lr, math.inf) for own in others)
                if math.isfinite(best):
                    networks.setdefault(name, []).append((mine[lr], best))
            constants[name] = constants.get(name, 0) + methods[OURS]["constant"]
    return {
        name: {
            "ours": statistics.fmean(mine for mine, _ in pairs),
            "others": statistics.fmean(best for _, best in pairs),
            "worst": max(mine / best for mine, best in pairs),
            "constant": constants[name],
        }
        for name, pairs in networks.items()
    }


def goals(found: dict[str, Any]) -> dict[str, dict[str, bool]]:
    """By network: what is asked for, in words with figures, and whether it is met."""
    return {
        name: {
            f"{row['ours'] / row['others']:.3f} of the better of uniform and OOA in the mean, "
            f"{row['worst']:.3f} at the worst": row["ours"] <= 1.1 * row["others"],
            f"{row['constant']} runs at a constant": row["constant"] == 0,
        }
        for name, row in compare(found).items()
    }


# Many runs on one device.

_held: dict[str, Any] = {}  # of a worker: the faces on its device


def _hold(faces: Faces, device: str) -> None:
    torch.set_num_threads(1)
    images, label, group = (each.to(device) for each in (faces.images, faces.label, faces.group))
    _held["faces"] = Faces(images, label, group, faces.graphs)


def _timed(job: Job) -> tuple[Job, Result | str]:
    try:
        return job, fit(_held["faces"].problem(job.network, job.seed, job.tiny), job)
    except Exception as error:  # a network that is not installed here: the others go on
        return job, repr(error)[:200]


def study(
    data: Path,
    out: Path,
    device: str,
    minutes: float,
    workers: int,
    tiny: bool = False,
    graphs: bool = True,
) -> dict[str, Any]:
    """Train what `plan_gpu` lists until the time is over; see the head of this module."""
    until = time.monotonic() + 60 * minutes
    jobs = {job.key: job for job in plan_gpu(tiny)}
    done: dict[str, Result] = {}
    if out.exists():
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        done = {line["job"]: Result(**line["result"]) for line in lines if line["job"] in jobs}
    left, faces = (
        [job for key, job in jobs.items() if key not in done],
        load(data, 40 if tiny else 1),
    )
    if tiny:
        faces = Faces(
            avg_pool2d(faces.images.float(), 4).byte(),
            faces.label,
            torch.arange(len(faces.label)) % 16,
        )
    faces = replace(faces, graphs=graphs)
    start, notes = time.monotonic(), set[str]()
    out.parent.mkdir(parents=True, exist_ok=True)
    # A fresh interpreter for each worker: neither threads nor CUDA survive a fork.
    context: Any = torch.multiprocessing.get_context("spawn")
    with context.Pool(workers, _hold, (faces, device)) as pool, out.open("a") as lines:
        found = pool.imap_unordered(_timed, left)
        for number in range(1, len(left) + 1):
            try:
                job, result = found.next(max(0.0, until - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            if isinstance(result, str):
                notes.add(f"{job.network}: {result}")
                continue
            done[job.key] = result
            lines.write(json.dumps({"job": job.key, "result": result.as_dict()}) + "\n")
            lines.flush()
            text = f"{time.monotonic() - start:5.0f} s {number}/{len(left)} {job.cell} {job.lr:g}"
            print(f"{text} {job.method} {job.seed}: {result}", file=sys.stderr, flush=True)
    for note in sorted(notes):
        print(f"left out: {note}", file=sys.stderr)
    return collect((job, done[key]) for key, job in jobs.items() if key in done)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="write the faces, and stop")
    parser.add_argument("--data", type=Path, help="a file of --prepare")
    parser.add_argument("--out", type=Path, help="a line of JSON for each run; read first")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--workers", type=int, default=14, help="processes that share the device")
    parser.add_argument("--tiny", action="store_true", help="a few steps on small faces")
    parser.add_argument("--eager", action="store_true", help="no graphs of networks")
    options = parser.parse_args(arguments)
    if options.prepare:
        prepare(options.prepare)
        return
    if not (options.data and options.out):
        parser.error("--data and --out are needed, or --prepare")
    found = study(
        options.data, options.out, options.device, options.minutes, options.workers,
        options.tiny, not options.eager,
    )  # fmt: skip
    print(table(found))
    for name, own in goals(found).items():
        words = [f"{'met' if met else 'MISSED'} ({text})" for text, met in own.items()]
        print(f"{name}: " + "; ".join(words))


if __name__ == "__main__":
    main()
