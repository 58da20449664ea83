"""The program of README.md beside methods that one would write by hand: 200 groups, 8 in a batch.

    python -m studies.many_groups --publish          # one minute
    python -m studies.many_groups --quick --json     # two other seeds

A linear classifier for 200 groups of 100 people. Twenty groups follow another rule than the rest,
and of half of the groups 15 % of the labels are wrong: their batch means are noisy and often high.
Minimised is the CVaR, the mean loss of the worst tenth of the groups. Every method has the same
model, Adam, learning rate, schedule and number of steps; all but the first have the same batches.
The last row has a constant learning rate instead.

Printed is the CVaR on all data, less the least possible, which a convex solver finds for each seed
together with a bound from below. A seed makes the data, the first weights and the batches. The
problem was chosen with seeds 100 to 102.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import fcco
from studies import publish
from studies.runner import Job, Runner, command, parse

GROUPS, SIZE, RATIO = 200, 100, 0.1
STEPS, RATE, PER_BATCH, PER_GROUP = 800, 0.03, 8, 4
STEP_SIZES = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0)  # of group DRO by hand
OURS, CONSTANT, LEAST = "fcco", "fcco, constant learning rate", "least"
WEIGHTS = (0.03, 0.1, 0.3, 0.9)  # of a new value in a moving average by hand


class Data(NamedTuple):
    """Features, label and group of each person."""

    x: Tensor
    y: Tensor
    group: Tensor


def people(seed: int) -> Data:
    """As in README.md; the first weights of a model are drawn next."""
    x = torch.randn(20_000, 10, generator=torch.manual_seed(seed))
    group = torch.arange(200).repeat_interleave(100)
    wrong = (torch.rand(20_000) < 0.15) & (group >= 100)
    y = ((x[:, 0] + 2 * x[:, 1] * (group < 20) > 0) ^ wrong).float()
    return Data(x, y, group)


# A method turns the mean losses of the groups of a batch, and their numbers, into the loss.
Method = Callable[[Tensor, Tensor], Tensor]


def balanced() -> Method:
    return lambda losses, index: losses.mean()


def worst_of_batch() -> Method:
    number = max(1, round(RATIO * PER_BATCH))
    return lambda losses, index: losses.topk(number).values.mean()


def group_dro(step: float) -> Method:
    """Sagawa et al. (2020): weights grow exponentially with the losses seen."""
    weights = torch.ones(GROUPS)

    def method(losses: Tensor, index: Tensor) -> Tensor:
        weights[index] *= torch.exp(step * losses.detach())
        weights.div_(weights.sum())
        return (weights[index] * losses).sum() / weights[index].sum()

    return method


def moving_average(weight: float, number: int = GROUPS, ratio: float = RATIO) -> Method:
    """The groups whose moving average is above the quantile of all count."""
    average = torch.full((number,), torch.nan)

    def method(losses: Tensor, index: Tensor) -> Tensor:
        new, old = losses.detach(), average[index]
        average[index] = torch.where(old.isnan(), new, old + weight * (new - old))
        chosen = average[index] >= average.nanquantile(1 - ratio)
        return (chosen * losses).sum() / (ratio * len(losses))

    return method


METHODS: dict[str, Callable[[], Method] | None] = {
    "mean, random batches": None,
    "mean, balanced batches": balanced,
    "worst of each batch": worst_of_batch,
    **{f"group DRO, step {s:g}": lambda s=s: group_dro(s) for s in STEP_SIZES},
    **{f"moving average, weight {w:g}": lambda w=w: moving_average(w) for w in WEIGHTS},
    OURS: None,
    CONSTANT: None,
}


def train(name: str, seed: int) -> float:
    """The CVaR on all data that a method ends with."""
    x, y, group = data = people(seed)
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    end = 1.0 if name == CONSTANT else 0.01
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, end, STEPS)
    sampler = fcco.GroupBatchSampler(group, PER_BATCH, PER_GROUP, seed=seed)
    ours = name in (OURS, CONSTANT)
    dro = fcco.CVaRGroupDRO(model, optimizer, GROUPS, RATIO) if ours else None
    make = METHODS[name]
    method = make() if make else None

    def losses(rows: Tensor) -> Tensor:
        return bce(model(x[rows]).squeeze(1), y[rows], reduction="none")

    for _ in range(STEPS):
        rows = torch.as_tensor(sampler.draw())
        if dro is not None:
            loss = dro(lambda rows=rows: losses(rows), group[rows])
        elif method is not None:  # the rows of a batch come by group
            means = losses(rows).view(PER_BATCH, PER_GROUP).mean(1)
            loss = method(means, group[rows[::PER_GROUP]])
        else:
            loss = losses(torch.randint(len(x), (PER_BATCH * PER_GROUP,))).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        return cvar(group_losses(model(x).squeeze(1), data))


def group_losses(logits: Tensor, data: Data) -> Tensor:
    return bce(logits, data.y.to(logits), reduction="none").view(GROUPS, SIZE).mean(1)


def cvar(losses: Tensor) -> float:
    """The mean of the worst tenth."""
    return losses.topk(round(RATIO * GROUPS)).values.mean().item()


def weights_of(losses: Tensor, width: float) -> Tensor:
    """Weights of a CVaR whose kink is rounded: rising from 0 to the cap within that width."""
    cap = 1 / (RATIO * GROUPS)
    low, high = losses.min() - width, losses.max()
    for _ in range(60):  # bisection: the weights sum to 1
        middle = (low + high) / 2
        total = cap * ((losses - middle) / width).clamp(0, 1).sum()
        low, high = (middle, high) if total > 1 else (low, middle)
    weights = ((losses - high) / width).clamp(0, 1)
    return weights / weights.sum()


def optimum(data: Data, gap: float = 1e-4) -> tuple[float, float]:
    """The least CVaR of a linear classifier on all data: reached, and a bound from below.

    For any weights of the groups that a CVaR allows, no classifier has a CVaR below the least
    weighted loss. Both are found for a kink that is rounded less and less.
    """
    x = torch.cat([data.x, torch.ones(len(data.x), 1)], 1).double()
    w = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    upper, lower = math.inf, -math.inf

    def minimise(weigh: Callable[[Tensor], Tensor], width: float) -> float:
        solver = torch.optim.LBFGS(
            [w], max_iter=500, history_size=30, line_search_fn="strong_wolfe",
            tolerance_grad=1e-10, tolerance_change=1e-14,
        )  # fmt: skip

        def loss() -> Tensor:
            solver.zero_grad()
            losses = group_losses(x @ w, data)
            weights = weigh(losses.detach())
            value = weights @ losses - width * RATIO * GROUPS / 2 * weights.square().sum()
            value.backward()
            return value

        solver.step(loss)
        return loss().item()

    width = 1.0
    while upper - lower > gap and width > 1e-6:
        minimise(partial(weights_of, width=width), width)
        losses = group_losses(x @ w, data).detach()
        upper, start = min(upper, cvar(losses)), w.detach().clone()
        fixed = weights_of(losses, width)
        lower = max(lower, minimise(lambda losses, fixed=fixed: fixed, 0.0))
        with torch.no_grad():
            w.copy_(start)
        width /= 3
    return upper, lower


def run(job: Job) -> dict[str, Any]:
    """The least CVaR of a seed, or what a method ends with."""
    torch.set_num_threads(1)
    if job.method == LEAST:
        return {"least": [round(value, 6) for value in optimum(people(job.seed))]}
    return {"cvar": train(job.method, job.seed)}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(command("many_groups", __doc__), arguments, (2, 10))
    seeds = range(100, 100 + options.seeds) if options.quick else range(options.seeds)
    runner = Runner(run, dict, options.workers, options.out)
    jobs = {name: [Job("README", name, {}, seed) for seed in seeds] for name in (LEAST, *METHODS)}
    ends = runner.each(jobs)
    least = [row["least"] for row in ends.pop(LEAST)]
    found = {
        name: [round(r["cvar"] - upper, 6) for r, (upper, _) in zip(rows, least, strict=True)]
        for name, rows in ends.items()
    }
    rows = [[n, publish.mean_std(own, 4), f"{max(own):.4f}"] for n, own in found.items()]
    print(publish.plain([["CVaR above the least possible", "mean ± std", "largest"], *rows]))
    result = {"seeds": list(seeds), "least": least, "excess": found}
    publish.conclude(options, "many-groups", result)


SHOWN = {
    "mean, random batches": "mean loss, random batches",
    "mean, balanced batches": "mean loss, balanced batches",
    "worst of each batch": "worst group of each batch",
    "group DRO, step 0.01": "group DRO by hand, step 0.01",
    "group DRO": "group DRO by hand, best of 6 steps",
    "moving average": "moving average by hand, best of 4 weights",
    "fcco": "fcco, nothing set",
}
"""A name or the beginning of several, of which the best counts; and what pages call it."""


def published(shown: str) -> list[float]:
    """The excess of a method by seed."""
    found: dict[str, list[float]] = publish.table("many-groups")["excess"]
    own = [shown] if shown in found else [name for name in found if name.startswith(shown)]
    return min((found[name] for name in own), key=statistics.fmean)


def table() -> list[list[str]]:
    """Of README.md."""
    rows = [["trained on", "distance"]]
    for name, label in SHOWN.items():
        mark = "**" if name == OURS else ""
        rows.append([f"{mark}{label}{mark}", f"{mark}{publish.mean_std(published(name))}{mark}"])
    return rows


if __name__ == "__main__":
    main()
