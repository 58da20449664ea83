"""The worst of twelve languages: sentiment of tweets, one linear classifier for all.

    python -m studies.afrisenti --publish            # a quarter of an hour
    python -m studies.afrisenti --quick --json       # one seed, a quarter of the steps

AfriSenti (Muhammad et al. 2023): 804 to 3,000 tweets in each of twelve African languages, positive,
neutral or negative. Features are the 256 first singular vectors of hashed character n-grams, from
the training tweets. Every method has the same model, Adam, learning rate, schedule and number of
steps; all but the first have the same batches, eight tweets of each language. Printed is the macro
F1 on the test tweets, of the worst language and on average over languages. Settings of the other
methods are those with the best worst language on the development tweets, over all seeds; `fcco` has
none. The reference of the last row are losses of small models, one for each language, on the half
of its tweets that they were not trained on.
"""

from __future__ import annotations

import csv
import functools
import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
from torch import Tensor
from torch.nn.functional import cross_entropy

import fcco
from studies import publish
from studies.runner import Job, Runner, command, parse

FILE, LABELS = "afrisenti_12.csv.gz", ("negative", "neutral", "positive")
WIDTH, STEPS, QUICK_STEPS, RATE, PER_GROUP = 256, 1500, 400, 0.01, 8
STEP_SIZES, OFFSETS, RATIO = (0.001, 0.01, 0.1), (0.1, 1.0), 1 / 12
METHODS: dict[str, list[dict[str, Any]]] = {
    "ERM": [{}],
    "uniform": [{}],
    "OOA": [{"step": step} for step in STEP_SIZES],
    "CTC-DRO": [{"step": step, "offset": a} for step in STEP_SIZES[1:] for a in OFFSETS],
    "fcco": [{}],
    "fcco, with a reference": [{}],
}


class Split(NamedTuple):
    """Features, label and language of each tweet."""

    x: Tensor
    y: Tensor
    group: Tensor


@functools.cache
def tweets() -> tuple[tuple[str, ...], dict[str, Split]]:
    """The names of the languages; the splits train, dev and test."""
    path = Path(os.environ.get("FCCO_DATA", "")) / FILE
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = tuple(sorted({row["language"] for row in rows}))
    hashed = HashingVectorizer(analyzer="char_wb", ngram_range=(1, 4), n_features=2**16, norm=None)
    counts = hashed.transform(row["text"] for row in rows)
    where = {
        split: np.array([k for k, row in enumerate(rows) if row["split"] == split])
        for split in ("train", "dev", "test")
    }
    weigh = TfidfTransformer(sublinear_tf=False).fit(abs(counts[where["train"]]))
    parts = {split: weigh.transform(counts[own]) for split, own in where.items()}
    svd = TruncatedSVD(WIDTH, random_state=0).fit(parts["train"])
    scale = svd.transform(parts["train"]).std(0).mean()

    def split(name: str) -> Split:
        own = [rows[k] for k in where[name]]
        return Split(
            torch.as_tensor(svd.transform(parts[name]) / scale, dtype=torch.float32),
            torch.tensor([LABELS.index(row["label"]) for row in own]),
            torch.tensor([names.index(row["language"]) for row in own]),
        )

    return names, {name: split(name) for name in where}


@functools.cache
def possible() -> fcco.ReferenceLosses:
    """The loss of each training tweet in a model of the other half of its language."""
    data = tweets()[1]["train"]
    half = torch.rand(len(data.y), generator=torch.Generator().manual_seed(0)) < 0.5
    losses = torch.empty(len(data.y))
    for group in data.group.unique():
        for side in (half, ~half):
            own, other = ((data.group == group) & each for each in (side, ~side))
            model = torch.nn.Linear(WIDTH, 3)
            torch.nn.init.zeros_(model.weight)
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100)

            def loss(model: Any = model, own: Tensor = own) -> Tensor:
                model.zero_grad()
                value = cross_entropy(model(data.x[own]), data.y[own])
                value = value + 0.01 * model.weight.square().sum()
                value.backward()
                return value

            optimizer.step(loss)
            with torch.no_grad():
                losses[other] = cross_entropy(model(data.x[other]), data.y[other], reduction="none")
    return fcco.ReferenceLosses(losses)


def objective_of(job: Job, model: torch.nn.Module, optimizer: Any, number: int) -> Any:
    """The objective of a method; None for a plain mean."""
    build: dict[str, Callable[..., Any]] = {
        "OOA": fcco.methods.ooa,
        "CTC-DRO": fcco.methods.ctc_dro,
    }
    if job.method in build:
        return build[job.method](model, optimizer, number, **job.setting)
    if job.method.startswith("fcco"):
        reference = possible() if "reference" in job.method else None
        return fcco.CVaRGroupDRO(model, optimizer, number, RATIO, reference=reference)
    return None


def f1(logits: Tensor, data: Split, number: int) -> list[float]:
    """The macro F1 of each language."""
    said, found = logits.argmax(1), []
    for group in range(number):
        own = data.group == group
        table = torch.bincount(3 * data.y[own] + said[own], minlength=9).view(3, 3).double()
        each = 2 * table.diag() / (table.sum(0) + table.sum(1)).clamp(min=1)
        found.append(round(each.mean().item(), 5))
    return found


def run(job: Job) -> dict[str, Any]:
    """The macro F1 of each language that a method ends with, on the dev and the test tweets."""
    torch.set_num_threads(1)
    names, splits = tweets()
    data, steps = splits["train"], job.evaluations or STEPS
    torch.manual_seed(job.seed)
    model = torch.nn.Linear(WIDTH, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    sampler = fcco.GroupBatchSampler(data.group, len(names), PER_GROUP, seed=job.seed)
    objective = objective_of(job, model, optimizer, len(names))
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


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(command("afrisenti", __doc__), arguments, (1, 5))
    steps = QUICK_STEPS if options.quick else None
    runner = Runner(run, dict, options.workers, options.out)
    jobs = {
        (name, json.dumps(setting)): [
            Job("AfriSenti", name, setting, seed, evaluations=steps)
            for seed in range(options.seeds)
        ]
        for name, grid in METHODS.items()
        for setting in grid
    }
    runner([job for own in jobs.values() for job in own], "runs")

    def worst(cell: tuple[str, str], split: str) -> list[float]:
        return [min(row[split]) for row in runner.of(jobs[cell])]

    figures, rows = {}, [["macro F1", "worst language", "mean", "setting"]]
    for name in METHODS:
        cells = [cell for cell in jobs if cell[0] == name]
        best = max(cells, key=lambda cell: sum(worst(cell, "dev")))
        mean = [sum(row["test"]) / len(row["test"]) for row in runner.of(jobs[best])]
        tests = [row["test"] for row in runner.of(jobs[best])]
        figures[name] = {"setting": json.loads(best[1]), "test": tests}
        shown = ", ".join(f"{k} {v:g}" for k, v in json.loads(best[1]).items())
        rows.append([name, publish.mean_std(worst(best, "test")), publish.mean_std(mean), shown])
    print(publish.plain(rows))
    result = {"languages": list(tweets()[0]), "methods": figures}
    if options.publish:
        publish.write(publish.RESULTS / "afrisenti", result, commit=options.commit)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
