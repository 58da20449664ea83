"""Problems over groups, and methods for the worst of them that nobody has tuned."""

from __future__ import annotations

import functools
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fcco_experiments import backbones
from fcco_experiments.data import load_grouped
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import fcco
from studies.constrained.problems import Setting
from studies.runner import Job

from . import constraints
from .constraints import Figures

DECADES = (1e-3, 1e-2, 1e-1)
PROBLEMS = {
    **dict.fromkeys(("celeba", "sentiment", "amazon", "S2"), DECADES),
    **dict.fromkeys(("reviews", "quick start"), (3e-3, 3e-2, 3e-1)),
}
"""First learning rates, over two decades; for the tabular MLP see `networks`."""
RATIOS = (0.05, 0.15, 0.5, 1.0)


@dataclass(frozen=True)
class Groups:
    """Samples in groups, and a model for them.

    Attributes:
        inputs: (N, d).
        targets: classes, or numbers that the losses want.
        group: id of each sample.
        model: makes a fresh model.
        losses: of model, inputs and targets, one for each sample.
        ratio: share of the groups that counts.
        steps: of a training.
        batch_size: samples of a batch.
    """

    inputs: Tensor
    targets: Tensor
    group: Tensor
    model: Callable[[], nn.Module]
    losses: Callable[[nn.Module, Tensor, Tensor], Tensor]
    ratio: float = 0.15
    steps: int = 1000
    batch_size: int = 64

    @property
    def number(self) -> int:
        """Of the groups."""
        return int(self.group.max()) + 1

    @torch.no_grad()
    def group_losses(self, model: nn.Module) -> Tensor:
        """On all samples, in float64."""
        model.eval()
        losses = torch.cat(
            [
                self.losses(model, x, y)
                for x, y in zip(self.inputs.split(1024), self.targets.split(1024), strict=True)
            ]
        )
        return fcco.group_mean(losses.double(), self.group).values


def classified(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs), targets, reduction="none")


def _head(inputs: Tensor, targets: Tensor, group: Tensor, **options: Any) -> Groups:
    """A linear classifier on standardised features."""
    scaled = (inputs - inputs.mean(0)) / inputs.std(0).clamp_min(1e-6)
    classes = int(targets.max()) + 1
    model = functools.partial(nn.Linear, inputs.shape[1], classes)
    return Groups(scaled, targets, group, model, classified, **options)


def _features(name: str, backbone: str, **options: Any) -> Groups:
    """The training part of an experiment's data as a frozen backbone sees it."""
    data = load_grouped(name, download=False, **options)
    train = data.cut(0)["train"]
    found = backbones.features(backbone, data, size=(128, 104), tokens=128)
    return _head(found.values[train.rows], train.label, train.group)


def _reviews(dimension: int = 50, words: int = 2000, least: int = 8) -> Groups:
    """Users with several reviews, and the 50 first directions of their words.

    Stars by a linear model of so few features: the groups must trade off.
    """
    data = load_grouped("amazon", download=False, distinct=True)
    rows, label, user, known = [], [], [], 0
    for part in data.cut(0).values():
        sizes = torch.bincount(part.group)
        kept = torch.where(sizes >= least, (sizes >= least).cumsum(0) - 1 + known, -1)
        known += int((sizes >= least).sum())
        own = kept[part.group] >= 0
        rows += part.rows[own].tolist()
        label.append(part.label[own])
        user.append(kept[part.group][own])
    texts = [re.findall(r"[a-z']+", str(data.samples[row]).lower()) for row in rows]
    seen = Counter(word for text in texts for word in set(text))
    place = {word: k for k, (word, _) in enumerate(seen.most_common(words))}
    table = np.zeros((len(texts), len(place)))
    for row, text in enumerate(texts):
        for word in text:
            if word in place:
                table[row, place[word]] += 1
    table = np.log1p(table) * np.log(len(texts) / (1 + (table > 0).sum(0)))  # rare words count more
    table /= np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-9)
    _, vectors = np.linalg.eigh(table.T @ table)
    found = torch.tensor(table @ vectors[:, -dimension:]).float()
    return _head(found, torch.cat(label), torch.cat(user))


def _s2(samples: int = 200) -> Groups:
    """S2 of `studies.convergence`, |w - e_i|^2 / 2, on samples whose noise has mean zero."""
    from studies.convergence.problems import PROBLEMS as CONVERGENCE

    problem: Any = CONVERGENCE["S2"]
    generator = torch.Generator().manual_seed(0)
    number, d = problem.rows.shape
    noise = torch.randn(number, samples, d + 1, generator=generator)
    noise = (noise - noise.mean(1, keepdim=True)) * torch.tensor(
        [problem.noise[0]] + d * [problem.noise[1]]
    )
    rows = problem.rows.float()[:, None] + noise[..., 1:]
    shifts = problem.shifts.float()[:, None] + noise[..., 0]

    def model() -> nn.Module:
        made = nn.Linear(d, 1, bias=False)
        made.weight.data[:] = problem.start.float()
        return made

    def losses(made: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        square = sum(each.square().sum() for each in made.parameters()) / 2
        return made(inputs).squeeze(1) + targets + square

    group = torch.arange(number).repeat_interleave(samples)
    size = problem.blocks * problem.samples
    return Groups(
        rows.flatten(0, 1), shifts.flatten(), group, model, losses, problem.ratio,
        steps=3000, batch_size=size,
    )  # fmt: skip


def _binary(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(model(inputs).squeeze(1), targets, reduction="none")


def _quick_start() -> Groups:
    """The program of docs/start/groups.md."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(10).repeat_interleave(200)
    x = torch.randn(2000, 5, generator=generator)
    y = (x[:, 0] + 2 * x[:, 1] * (group < 2) > 0).float()
    model = functools.partial(nn.Linear, 5, 1)
    return Groups(x, y, group, model, _binary, 0.2, steps=320)


def _tabular(rows: int = 2000, number: int = 16, features: int = 20, wrong: float = 0.1) -> Groups:
    """Groups of 25 to 225 rows, each with a rule of its own, and a tenth of the labels wrong.

    The MLP has ten times as many weights as there are rows: it can fit every group.
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

    return Groups(x, y.long(), group, model, classified, steps=1500)


@functools.lru_cache
def make(name: str) -> Groups:
    """The problem of that name; raises `MissingData` when it needs a file that is not there."""
    return {
        "celeba": lambda: _features("celeba", "efficientnet-lite0"),
        "sentiment": lambda: _features("sentiment", "minilm", distinct=True),
        "amazon": lambda: _features("amazon", "minilm"),
        "reviews": _reviews,
        "S2": _s2,
        "quick start": _quick_start,
        "tabular MLP": _tabular,
    }[name]()


# Methods: from a model, its optimizer and a problem to a function of (losses, group ids) -> loss.
Losses = Callable[[], Tensor]
Objective = Callable[[Losses, Tensor], Tensor]


def _ours(model: nn.Module, optimizer: Any, number: int, ratio: float, **setting: Any) -> Objective:
    return fcco.CVaRGroupDRO(model, optimizer, num_groups=number, ratio=ratio, **setting)


def _ooa(
    model: nn.Module, optimizer: Any, number: int, ratio: float | None, *,
    step: float = 0.01, plain: bool = False,
) -> Objective:  # fmt: skip
    return fcco.methods.ooa(model, optimizer, number, ratio=None if plain else ratio, step=step)


def _average(*_: Any) -> Objective:
    """The mean of the batch: uniform over groups, or over samples, as batches are drawn."""
    return lambda losses, group: losses().mean()


def _by_hand(
    model: nn.Module, optimizer: Any, number: int, ratio: float, gamma: float = 0.1
) -> Objective:
    """Moving averages, their quantile as threshold, weight 1/r above it."""
    u: Any = None

    def loss(losses: Losses, group: Tensor) -> Tensor:
        nonlocal u
        fresh, index, _ = fcco.group_mean(losses(), group)
        u = fresh.detach().new_full((number,), torch.nan) if u is None else u
        old = torch.where(u[index].isnan(), fresh.detach(), u[index])
        u[index] = (1 - gamma) * old + gamma * fresh.detach()
        weight = (u >= u.nanquantile(1 - ratio)).to(fresh) / ratio
        return (weight[index] * fresh).mean()

    return loss


METHODS: dict[str, Callable[..., Objective]] = {
    "fcco": _ours,
    "uniform": _average,
    "OOA": _ooa,
    "EMA + quantile": _by_hand,
    "ERM": _average,
}

# Step 0.01 is the default of the code released with the paper of group DRO, and of `ooa`.
DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "uniform": ("uniform", {}),
    "OOA": ("OOA", {"plain": True}),
    "OOA-CVaR": ("OOA", {}),
    "EMA + quantile": ("EMA + quantile", {}),
    "ERM": ("ERM", {}),
}


def optimizer_of(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """`"Adam 0.9"` or `"SGD 0.9"`: the number is beta1, or the momentum."""
    kind, beta = name.split()
    weights = list(model.parameters())
    fused = weights[0].is_cuda or None
    if kind == "SGD":
        return torch.optim.SGD(weights, lr, momentum=float(beta), fused=fused)
    return torch.optim.Adam(weights, lr, betas=(float(beta), 0.999), fused=fused)


def train(
    problem: Groups, method: str, setting: Setting, seed: int, steps: int | None = None
) -> tuple[nn.Module, float]:
    """A trained model, and the seconds it took.

    Args:
        problem: the problem.
        method: a name of `METHODS`.
        setting: `lr`, perhaps `ratio`, `shape` (groups per batch, samples of each), `optimizer`;
            the rest is the method's own.
        seed: of the first weights and of the batches.
        steps: instead of the problem's.
    """
    options = dict(setting)
    lr, ratio = options.pop("lr"), options.pop("ratio", problem.ratio)
    shape = options.pop("shape", None)
    steps = steps or problem.steps
    torch.manual_seed(seed)
    model = problem.model()
    optimizer = optimizer_of(options.pop("optimizer", "Adam 0.9"), model, lr)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / steps)
    objective = METHODS[method](model, optimizer, problem.number, ratio, **options)
    ids = problem.group
    drawn = torch.zeros_like(ids) if method == "ERM" else ids
    own = {} if shape else {"batch_size": problem.batch_size}
    sampler = fcco.GroupBatchSampler(drawn, *(shape or ()), seed=seed, **own)
    start = time.perf_counter()
    for _ in range(steps):
        rows = torch.tensor(sampler.draw(), device=ids.device)
        inputs, targets = problem.inputs[rows], problem.targets[rows]
        objective(lambda x=inputs, y=targets: problem.losses(model, x, y), ids[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
    return model, time.perf_counter() - start


def run(job: Job) -> Figures:
    """Train as the job says, under constraints or over groups: then the objective is the CVaR."""
    if job.problem not in PROBLEMS:
        return constraints.run(job)
    torch.set_num_threads(1)
    problem = make(job.problem)
    try:
        model, seconds = train(problem, job.method, job.setting, job.seed, job.evaluations)
    except fcco.tracker.NonFiniteValue:
        return Figures(math.inf, cvar=dict.fromkeys(map(str, RATIOS), math.inf))
    losses = problem.group_losses(model)
    cvar = {str(ratio): fcco.outer.CVaR(ratio)(losses).item() for ratio in RATIOS}
    found = fcco.outer.CVaR(job.setting.get("ratio", problem.ratio))(losses).item()
    return Figures(found, seconds=round(seconds, 2), cvar=cvar)
