"""One run: a method with a setting and a seed on a data set."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fcco.groups import PositiveBatchSampler
from studies.runner import Job

from . import methods
from .problems import Part, Problem, figures, load, metrics_of

BATCH = 128
POSITIVES = 32  # of a batch for the pairwise losses
QUERIES = 16
WARM = 1 / 3  # share of the steps with cross-entropy before an X-risk
WARM_RATE = 1e-3
DROPOUT = 0.5  # for all methods: without it all of them overfit within two epochs
CHECKPOINTS = 18
STEPS = {"ranking": 600}
USUAL_STEPS = 1200

Look = Callable[[Callable[[Tensor], Tensor], int], None]


def network(features: int, width: int = 256) -> nn.Module:
    def layer(inputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(DROPOUT)]

    return nn.Sequential(*layer(features), *layer(width), nn.Linear(width, 1))


def shuffled(size: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Epochs of batches without end; the rest of an epoch is dropped."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(size, generator=generator)
        yield from order[: size - size % batch].split(batch)


def batches(train: Part, plain: bool, seed: int) -> Iterator[Tensor]:
    """Whole queries; rows of all kinds alike; or a fixed number of positives."""
    if train.query is not None:
        rows = train.query.argsort(stable=True).split(train.query.bincount().tolist())
        chosen = shuffled(len(rows), min(QUERIES, len(rows)), seed)
        yield from (torch.cat([rows[each] for each in some]) for some in chosen)
    if plain:
        yield from shuffled(len(train.y), min(BATCH, len(train.y)), seed)
    sampler = PositiveBatchSampler(train.y, BATCH, POSITIVES, seed=seed)
    while True:
        yield from map(torch.tensor, sampler)


def run(job: Job) -> dict[str, Any]:
    """Train as the job says; its problem is `DATA` or `DATA / METRIC`, its steps `evaluations`.

    By metric: the best value on validation data (`val`), that checkpoint's on test data, its step.
    """
    torch.set_num_threads(1)
    start = time.perf_counter()
    data, _, metric = job.problem.partition(" / ")
    problem = load(data, job.seed)
    wanted = [metric] if metric else metrics_of(data)
    found: dict[str, Any] = {"val": {}, "test": {}, "step": {}}

    def look(predict: Callable[[Tensor], Tensor], step: int) -> None:
        ahead, on_test = figures(problem["validation"], predict(problem["validation"].x)), None
        for name in wanted:
            value = ahead[name]
            if name not in found["val"] or value > found["val"][name]:
                on_test = on_test or figures(problem["test"], predict(problem["test"].x))
                for key, end in (("val", value), ("test", on_test[name]), ("step", step)):
                    found[key][name] = end

    if job.method == "lambdarank":
        trees(problem["train"], job, look)
    else:
        train(problem, metric, job, job.evaluations or STEPS.get(data, USUAL_STEPS), look)
    return found | {"seconds": round(time.perf_counter() - start, 2)}


def train(problem: Problem, metric: str, job: Job, steps: int, look: Look) -> None:
    """Weights and plain batches depend on the seed alone: every X-risk has the same start."""
    torch.manual_seed(job.seed)
    part, plain = problem["train"], job.method in methods.PLAIN
    model = network(part.x.shape[1])

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        model.eval()
        found = methods.scores(model, x)
        model.train()
        return found

    every = max(1, steps // CHECKPOINTS)
    warm = 0 if plain else round(WARM * steps)
    begin = "listwise" if part.query is not None else "bce"
    optimizer, loss = methods.build(begin, model, part, metric, {"lr": WARM_RATE})
    draw = batches(part, True, job.seed)
    for done in range(steps):
        if done == warm:
            optimizer, loss = methods.build(job.method, model, part, metric, job.setting)
            draw = batches(part, plain, job.seed)
        loss(next(draw)).backward()
        optimizer.step()
        optimizer.zero_grad()
        # A checkpoint of the warm start would be one of cross-entropy, the same for every X-risk.
        if (done + 1) % every == 0 and done >= warm:
            look(predict, done + 1)


def trees(train: Part, job: Job, look: Look) -> None:
    """LightGBM's LambdaRank; a checkpoint every 10 trees."""
    import lightgbm  # pyright: ignore[reportMissingImports]

    assert train.query is not None
    order = train.query.argsort(stable=True)
    model = lightgbm.LGBMRanker(
        n_estimators=300, learning_rate=job.setting["lr"], num_leaves=job.setting["num_leaves"],
        subsample=0.8, subsample_freq=1, colsample_bytree=0.8, random_state=job.seed, n_jobs=1,
        verbose=-1,
    )  # fmt: skip
    counts = train.query.bincount().numpy()
    model.fit(train.x[order].numpy(), train.y[order].int().numpy(), group=counts)

    def predict(count: int, x: Tensor) -> Tensor:
        return torch.from_numpy(model.booster_.predict(x.numpy(), num_iteration=count))

    for count in range(10, 301, 10):
        look(partial(predict, count), count)
