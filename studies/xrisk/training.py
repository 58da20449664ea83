"""One run: a method with a setting and a seed on a data set."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcco.groups import PositiveBatchSampler
from studies.runner import Job

from . import methods
from .problems import METRICS, Part, Problem, load, metrics_of

BATCH = 128
POSITIVES = 32  # of a batch for the pairwise losses
QUERIES = 16
WARM = 1 / 3  # share of the steps with cross-entropy before an X-risk
WARM_RATE = 1e-3
DROPOUT = 0.5  # for all methods: without it all of them overfit within two epochs
CHECKPOINTS = 18
STEPS = {"ranking": 600}
USUAL_STEPS = 1200


@dataclass(frozen=True)
class Figures:
    """By metric: the best value on validation data, that checkpoint's on test data, its step."""

    val: dict[str, float]
    test: dict[str, float]
    step: dict[str, int]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


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


def with_positives(y: Tensor, seed: int) -> Iterator[Tensor]:
    sampler = PositiveBatchSampler(y, BATCH, POSITIVES, seed=seed)
    while True:
        yield from map(torch.tensor, sampler)


def whole_queries(query: Tensor, seed: int) -> Iterator[Tensor]:
    rows = query.argsort(stable=True).split(query.bincount().tolist())
    for chosen in shuffled(len(rows), min(QUERIES, len(rows)), seed):
        yield torch.cat([rows[each] for each in chosen])


def batches(train: Part, plain: bool, seed: int) -> Iterator[Tensor]:
    if train.query is not None:
        return whole_queries(train.query, seed)
    if plain:
        return shuffled(len(train.y), min(BATCH, len(train.y)), seed)
    return with_positives(train.y, seed)


def run(job: Job, arrays: Path | None = None) -> Figures:
    """Train as the job says; its problem is `DATA` or `DATA / METRIC`, its steps `evaluations`."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    data, _, metric = job.problem.partition(" / ")
    problem = load(data, arrays, job.seed)
    wanted = [metric] if metric else metrics_of(data)
    method = methods.METHODS[wanted[0]][job.method]
    steps = job.evaluations or STEPS.get(data, USUAL_STEPS)
    best: dict[str, tuple[float, float, int]] = {}

    def look(predict: Callable[[Tensor], Tensor], step: int) -> None:
        ahead, on_test = predict(problem.val.x), None
        for name in wanted:
            value = METRICS[name](problem.val, ahead) if ahead.isfinite().all() else math.nan
            if name not in best or value > best[name][0]:
                on_test = predict(problem.test.x) if on_test is None else on_test
                best[name] = value, METRICS[name](problem.test, on_test), step

    if method.build is None:
        trees(problem, wanted, job, look)
    else:
        train(problem, metric, method, job, steps, look)
    val, test, step = ({name: found[i] for name, found in best.items()} for i in range(3))
    return Figures(val, test, step, round(time.perf_counter() - start, 2))  # type: ignore[arg-type]


def train(
    problem: Problem,
    metric: str,
    method: methods.Method,
    job: Job,
    steps: int,
    look: Callable[[Callable[[Tensor], Tensor], int], None],
) -> None:
    """Weights and plain batches depend on the seed alone: every X-risk has the same start."""
    torch.manual_seed(job.seed)
    part = problem.train
    model = network(part.x.shape[1])

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        model.eval()
        found = methods.scores(model, x)
        model.train()
        return found

    assert method.build is not None
    every = max(1, steps // CHECKPOINTS)
    begin = methods.listwise if problem.ranking else methods.cross_entropy
    warm = 0 if method.plain else round(WARM * steps)
    step = begin(model, part, metric, {"lr": WARM_RATE}) if warm else None
    draw = batches(part, True, job.seed)
    for done in range(steps):
        if done == warm:
            step = method.build(model, part, metric, job.setting)
            draw = batches(part, method.plain, job.seed)
        assert step is not None
        step(next(draw))
        # A checkpoint of the warm start would be one of cross-entropy, the same for every X-risk.
        if (done + 1) % every == 0 and done >= warm:
            look(predict, done + 1)


def trees(
    problem: Problem,
    wanted: list[str],
    job: Job,
    look: Callable[[Callable[[Tensor], Tensor], int], None],
) -> None:
    """LightGBM's LambdaRank; a checkpoint every 10 trees."""
    import lightgbm  # pyright: ignore[reportMissingImports]

    train = problem.train
    assert train.query is not None
    order = train.query.argsort(stable=True)
    model = lightgbm.LGBMRanker(
        n_estimators=300,
        learning_rate=job.setting["lr"],
        num_leaves=job.setting["num_leaves"],
        subsample=0.8,
        subsample_freq=1,
        colsample_bytree=0.8,
        random_state=job.seed,
        n_jobs=1,
        verbose=-1,
    )
    model.fit(
        train.x[order].numpy(), train.y[order].int().numpy(), group=train.query.bincount().numpy()
    )
    for count in range(10, 301, 10):

        def predict(x: Tensor, count: int = count) -> Tensor:
            return torch.from_numpy(model.booster_.predict(x.numpy(), num_iteration=count))

        look(predict, count)
