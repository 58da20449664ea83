"""One setting at a time instead of the automatic ones, on `reviews`, and a network without any.

    python -m studies.untuned.settings --workers 2 --publish    # three minutes
    python -m studies.untuned.settings --quick --json           # one seed, one learning rate

Training CVaR of the worst 15 % of the groups, Adam with a learning rate that falls to 0, batches of
64, means over 3 seeds. `rows`: a linear model of reviews, which cannot fit every user, at three
learning rates. `networks`: a perceptron that can fit every group, beside other weights, 16 groups
with 4 samples in a batch.
`python -m docs.tables` then writes the tables of the pages. The data are those of `fcco data
amazon`.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fcco_experiments.data import MissingData, load_grouped
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco
from studies import publish
from studies.many_groups import moving_average
from studies.runner import Job, Runner, command, parse, short

BATCH, RATIO = 64, 0.15
RATES = (3e-3, 3e-2, 3e-1)
PAPER: dict[str, Any] = {"smoothing": 0.1, "gamma": 0.1, "correction": "auto", "read": "old"}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "defaults": ("fcco", {}),
    **{f"gamma {gamma:g}": ("fcco", {"gamma": gamma}) for gamma in (0.05, 0.2, 0.5, 0.9)},
    "no smoothing": ("fcco", {"smoothing": 0.0}),
    "smoothing 0.1": ("fcco", {"smoothing": 0.1}),
    "SONEX as published": ("fcco", PAPER),
    **{f"{k} x {64 // k}": ("fcco", {"shape": (k, 64 // k)}) for k in (2, 4, 8, 16, 64)},
    "uniform": ("uniform", {}),
    "OOA": ("OOA", {}),
    "EMA + quantile": ("EMA + quantile", {}),
}
CELLS = (("Adam 0.9", 3e-3), ("Adam 0.99", 3e-3), ("SGD 0.9", 0.3), ("SGD 0.99", 0.03))
"""Optimizer with its beta1 or momentum, learning rate."""
NETWORK_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "fcco": ("fcco", {}),
    "uniform": ("uniform", {}),
    "OOA": ("OOA", {"plain": True}),
    "SONEX 1": ("fcco", {"smoothing": 1.0, "gamma": 0.9}),
}
FRESH = 20  # the first seed of networks: constants were chosen with seed 10


@dataclass(frozen=True)
class Problem:
    """Samples in groups, with classes, and a model for them."""

    inputs: Tensor
    targets: Tensor
    group: Tensor
    model: Callable[[], nn.Module]
    steps: int


def reviews(dimension: int = 50, words: int = 2000, least: int = 8) -> Problem:
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
    x, y = torch.tensor(table @ vectors[:, -dimension:]).float(), torch.cat(label)
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-6)
    model = functools.partial(nn.Linear, dimension, int(y.max()) + 1)
    return Problem(x, y, torch.cat(user), model, steps=1000)


def tabular(rows: int = 2000, number: int = 16, features: int = 20, wrong: float = 0.1) -> Problem:
    """Groups of 25 to 225 rows, each with a rule of its own, and a tenth of the labels wrong.

    The perceptron has ten times as many weights as there are rows: it can fit every group.
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

    return Problem(x, y.long(), group, model, steps=1500)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "reviews": functools.cache(reviews),
    "tabular MLP": functools.cache(tabular),
}


# Methods: from a model, its optimizer and the groups to a function of (losses, group ids) -> loss.
Losses = Callable[[], Tensor]
Objective = Callable[[Losses, Tensor], Tensor]


def cvar(*model: Any, **setting: Any) -> Objective:
    """The worst groups, all settings but the named ones automatic."""
    return fcco.CVaRGroupDRO(*model, ratio=RATIO, **setting)


def ooa(*model: Any, plain: bool = False) -> Objective:
    """Online weights with the default step; `plain` without the cap of CVaR."""
    return fcco.methods.ooa(*model, ratio=None if plain else RATIO, step=0.01)


def uniform(*_: Any) -> Objective:
    """The mean over the groups of the batch."""
    return lambda losses, group: losses().mean()


def by_hand(model: nn.Module, optimizer: Any, number: int) -> Objective:
    """A moving average of the losses of each group, the groups above its quantile count."""
    weigh = moving_average(0.1, number, RATIO)
    return lambda losses, group: weigh(*fcco.group_mean(losses(), group)[:2])


METHODS: dict[str, Callable[..., Objective]] = {
    "fcco": cvar,
    "uniform": uniform,
    "OOA": ooa,
    "EMA + quantile": by_hand,
}


def run(job: Job) -> dict[str, float]:
    """The CVaR on all samples, infinite where training diverges.

    The setting has `lr`, perhaps `shape` (groups per batch, samples of each) and `optimizer`; the
    rest is the method's own.
    """
    torch.set_num_threads(1)
    problem, own = PROBLEMS[job.problem](), dict(job.setting)
    lr, shape = own.pop("lr"), own.pop("shape", None)
    kind, beta = own.pop("optimizer", "Adam 0.9").split()
    steps, number = job.evaluations or problem.steps, int(problem.group.max()) + 1
    torch.manual_seed(job.seed)
    model = problem.model()
    if kind == "SGD":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr, momentum=float(beta))
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr, betas=(float(beta), 0.999))
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / steps)
    objective = METHODS[job.method](model, optimizer, number, **own)
    shaped = {} if shape else {"batch_size": BATCH}
    sampler = fcco.GroupBatchSampler(problem.group, *(shape or ()), seed=job.seed, **shaped)
    try:
        for _ in range(steps):
            rows = torch.tensor(sampler.draw())
            x, y = problem.inputs[rows], problem.targets[rows]
            loss = objective(
                lambda x=x, y=y: cross_entropy(model(x), y, reduction="none"), problem.group[rows]
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
    except fcco.tracker.NonFiniteValue:
        return {"cvar": math.inf}
    with torch.no_grad():
        losses = cross_entropy(model(problem.inputs), problem.targets, reduction="none")
    means = fcco.group_mean(losses.double(), problem.group).values
    return {"cvar": fcco.outer.CVaR(RATIO)(means).item()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("untuned.settings", __doc__)
    options = parse(parser, arguments, (1, 3))
    rates, cells = (RATES[1:2], CELLS[:1]) if options.quick else (RATES, CELLS)
    runner = Runner(run, dict, options.workers, options.out)

    def means(
        problem: str, row: tuple[str, dict[str, Any]], columns: Sequence[dict[str, Any]],
        first: int = 0,
    ) -> list[float]:  # fmt: skip
        seeds = range(first, first + options.seeds)
        jobs = {
            k: [Job(problem, row[0], column | row[1], seed) for seed in seeds]
            for k, column in enumerate(columns)
        }
        ends = runner.each(jobs, f"{problem}, {row[0]}").values()
        return [round(statistics.fmean(run["cvar"] for run in own), 4) for own in ends]

    found: dict[str, Any] = {"lrs": rates, "cells": [f"{name}, {lr:g}" for name, lr in cells]}
    own = [{"optimizer": name, "lr": lr, "shape": (16, 4)} for name, lr in cells]
    found["networks"] = {
        name: means("tabular MLP", row, own, FRESH) for name, row in NETWORK_ROWS.items()
    }
    try:
        by_rate = [{"lr": lr} for lr in rates]
        found["rows"] = {name: means("reviews", row, by_rate) for name, row in ROWS.items()}
    except MissingData as reason:
        parser.exit(1, f"{short(reason)}\n")
    for part in ("rows", "networks"):
        rows = [[name, *(f"{mean:.4f}" for mean in own)] for name, own in found[part].items()]
        print(publish.plain(rows) + "\n")
    publish.conclude(options, "automatic-settings", found, runner.entries())


if __name__ == "__main__":
    main()
