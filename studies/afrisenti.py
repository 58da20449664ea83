"""The worst of twelve languages: sentiment of tweets, one linear classifier for all.

    python -m studies.afrisenti --publish            # ten minutes
    python -m studies.afrisenti --quick --json       # one seed, a quarter of the steps

AfriSenti (Muhammad et al. 2023): 804 to 3,000 tweets in each of twelve African languages, positive,
neutral or negative. Features are 4,096 hashed character n-grams. Every method has the same model,
Adam, learning rate, schedule and number of steps. Groups are the three labels of each language; all
methods but the first have the same batches, three tweets of each group. Printed is the macro F1 on
the test tweets: of the worst language, and the mean over languages. The settings of a method, of
`fcco` the share of the groups that count, are those with the best worst language on the development
tweets, over all seeds. The reference of the last row are losses of small models, one for each
language, on the half of its tweets that they were not trained on.
"""

from __future__ import annotations

import csv
import functools
import gzip
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fcco
from studies import publish
from studies.runner import Job, Runner, command, parse

FILE, LABELS = "afrisenti_12.csv.gz", ("negative", "neutral", "positive")
WIDTH, STEPS, QUICK_STEPS, RATE, PER_GROUP = 4096, 1500, 400, 0.003, 3
STEP_SIZES, OFFSETS, RATIOS = (0.001, 0.01, 0.1), (0.1, 1.0), (1 / 12, 1 / 3)
METHODS: dict[str, list[dict[str, Any]]] = {
    "ERM": [{}],
    "uniform": [{}],
    "OOA": [{"step": step} for step in STEP_SIZES],
    "CTC-DRO": [{"step": step, "offset": a} for step in STEP_SIZES for a in OFFSETS],
    "fcco": [{"ratio": ratio} for ratio in RATIOS],
    "fcco, with a reference": [{"ratio": ratio} for ratio in RATIOS],
}


class Split(NamedTuple):
    """Features, label and group of each tweet: three for each language."""

    x: Tensor
    y: Tensor
    group: Tensor


@functools.cache
def tweets() -> tuple[tuple[str, ...], dict[str, Split]]:
    """The names of the languages; the splits train, dev and test."""
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.preprocessing import normalize

    path = Path(os.environ.get("FCCO_DATA", "")) / FILE
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = tuple(sorted({row["language"] for row in rows}))
    plain: Any = None  # no norm
    grams = HashingVectorizer(analyzer="char_wb", ngram_range=(1, 4), n_features=WIDTH, norm=plain)
    counts: Any = grams.transform(row["text"] for row in rows)
    counts.data = np.sign(counts.data) * np.log1p(abs(counts.data))
    unit: Any = normalize(counts)
    x = torch.as_tensor(unit.toarray() * WIDTH**0.5 / 4, dtype=torch.float32)
    y = torch.tensor([LABELS.index(row["label"]) for row in rows])
    group = 3 * torch.tensor([names.index(row["language"]) for row in rows]) + y
    splits = {}
    for name in ("train", "dev", "test"):
        own = torch.tensor([row["split"] == name for row in rows])
        splits[name] = Split(x[own], y[own], group[own])
    return names, splits


@functools.cache
def possible() -> fcco.ReferenceLosses:
    """The loss of each training tweet in a model of the other half of its language.

    Each model gives the three labels the same weight.
    """
    data = tweets()[1]["train"]
    half = torch.rand(len(data.y), generator=torch.Generator().manual_seed(0)) < 0.5
    losses = torch.empty(len(data.y))
    for language in range(len(tweets()[0])):
        for side in (half, ~half):
            own, other = ((data.group // 3 == language) & each for each in (side, ~side))
            weight = len(data.y[own]) / 3 / torch.bincount(data.y[own], minlength=3)
            model = torch.nn.Linear(WIDTH, 3)
            torch.nn.init.zeros_(model.weight)
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=20)

            def loss(
                model: Any = model, x: Tensor = data.x[own], y: Tensor = data.y[own],
                weight: Tensor = weight,
            ) -> Tensor:  # fmt: skip
                model.zero_grad()
                value = cross_entropy(model(x), y, weight=weight)
                value = value + 0.1 * model.weight.square().sum()
                value.backward()
                return value

            optimizer.step(loss)
            with torch.no_grad():
                losses[other] = cross_entropy(model(data.x[other]), data.y[other], reduction="none")
    return fcco.ReferenceLosses(losses)


def objective_of(job: Job, model: torch.nn.Module, optimizer: Any, number: int) -> Any:
    """The objective of a method; None for a plain mean."""
    if job.method == "OOA":
        return fcco.methods.ooa(model, optimizer, number, **job.setting)
    if job.method == "CTC-DRO":
        return fcco.methods.ctc_dro(model, optimizer, number, **job.setting)
    if job.method.startswith("fcco"):
        reference = possible() if "reference" in job.method else None
        return fcco.CVaRGroupDRO(model, optimizer, number, reference=reference, **job.setting)
    return None


def f1(logits: Tensor, data: Split, number: int) -> list[float]:
    """The macro F1 of each language."""
    from sklearn.metrics import f1_score

    rows = [data.group // 3 == language for language in range(number)]
    scores = (f1_score(data.y[own], logits[own].argmax(1), average="macro") for own in rows)
    return [round(float(score), 5) for score in scores]


def run(job: Job) -> dict[str, Any]:
    """The macro F1 of each language that a method ends with, on the dev and the test tweets."""
    torch.set_num_threads(1)
    names, splits = tweets()
    data, steps = splits["train"], job.evaluations or STEPS
    torch.manual_seed(job.seed)
    model = torch.nn.Linear(WIDTH, 3)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    number = 3 * len(names)
    sampler = fcco.GroupBatchSampler(data.group, number, PER_GROUP, seed=job.seed)
    objective = objective_of(job, model, optimizer, number)
    for _ in range(steps):
        rows = torch.as_tensor(sampler.draw())
        if job.method == "ERM":
            rows = torch.randint(len(data.y), (len(rows),))

        def losses(rows: Tensor = rows) -> Tensor:
            return cross_entropy(model(data.x[rows]), data.y[rows], reduction="none")

        if objective is None:
            loss = losses().mean()
        else:
            given = {"rows": rows} if "reference" in job.method else {}
            loss = objective(losses, data.group[rows], **given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        return {s: f1(model(splits[s].x), splits[s], len(names)) for s in ("dev", "test")}


def table(methods: Mapping[str, Any]) -> list[list[str]]:
    """Macro F1 of each method with its chosen setting."""
    rows = [["trained by", "worst language", "mean", "chosen setting"]]
    for name, found in methods.items():
        worst, mean = [min(row) for row in found["test"]], [sum(r) / len(r) for r in found["test"]]
        shown = ", ".join(f"{k} {v:.2g}" for k, v in found["setting"].items())
        rows.append([name, publish.mean_std(worst), publish.mean_std(mean), shown])
    return rows


def published() -> list[list[str]]:
    """Of docs/recipes/data-mixtures.md."""
    return table(publish.table("afrisenti")["methods"])


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(command("afrisenti", __doc__), arguments, (1, 5))
    steps = QUICK_STEPS if options.quick else None
    runner = Runner(run, dict, options.workers, options.out)
    jobs = {
        name: [
            [Job("AfriSenti", name, setting, seed, evaluations=steps)
             for seed in range(options.seeds)]
            for setting in grid
        ]
        for name, grid in METHODS.items()
    }  # fmt: skip
    runner([job for own in jobs.values() for some in own for job in some], "runs")
    methods = {}
    for name, own in jobs.items():
        found = [runner.of(some) for some in own]
        k = max(range(len(own)), key=lambda k: sum(min(row["dev"]) for row in found[k]))
        methods[name] = {"setting": METHODS[name][k], "test": [row["test"] for row in found[k]]}
    print(publish.plain(table(methods)))
    result = {"languages": list(tweets()[0]), "methods": methods}
    publish.conclude(options, "afrisenti", result)


if __name__ == "__main__":
    main()
