"""The worst of twelve languages: sentiment of tweets, one classifier for all.

    python -m studies.afrisenti --publish            # ten minutes
    python -m studies.afrisenti --quick --json       # one seed, a quarter of the steps
    python -m studies.afrisenti --model minilm       # other features
    python -m studies.afrisenti --model finetuned --device cuda --seeds 3 --workers 3

AfriSenti (Muhammad et al. 2023): 804 to 3,000 tweets in each of twelve African languages, positive,
neutral or negative. The model is linear on 4,096 hashed character n-grams, or on the features of
MiniLM, or MiniLM fine-tuned with a linear head. Every method has the same model,
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
from fcco_experiments import backbones
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco
from studies import publish
from studies.runner import Job, Runner, command, parse

FILE, LABELS = "afrisenti_12.csv.gz", ("negative", "neutral", "positive")
MODELS = {"ngrams": (1500, 0.003), "minilm": (1500, 0.003), "finetuned": (600, 1e-4)}  # steps, rate
WIDTH, QUICK_STEPS, PER_GROUP, TOKENS = 4096, 400, 3, 64
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
    """Features or token ids, label and group of each tweet: three groups for each language."""

    x: Tensor
    y: Tensor
    group: Tensor


def ngrams(texts: Sequence[str]) -> Tensor:
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.preprocessing import normalize

    plain: Any = None  # no norm
    grams = HashingVectorizer(analyzer="char_wb", ngram_range=(1, 4), n_features=WIDTH, norm=plain)
    counts: Any = grams.transform(texts)
    counts.data = np.sign(counts.data) * np.log1p(abs(counts.data))
    unit: Any = normalize(counts)
    return torch.as_tensor(unit.toarray() * WIDTH**0.5 / 4, dtype=torch.float32)


@torch.no_grad()
def _minilm(ids: Tensor, device: str) -> Tensor:
    """The features of MiniLM, centred, of one variance."""
    backbone = backbones.build("minilm").to(device).eval()
    found = torch.cat([backbone(part.to(device)).cpu() for part in ids.split(256)])
    return (found - found.mean(0)) / found.std()


@functools.cache
def tweets(model: str, device: str) -> tuple[tuple[str, ...], dict[str, Split]]:
    """The names of the languages; the splits train, dev and test."""
    path = Path(os.environ.get("FCCO_DATA", "")) / FILE
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names, texts = tuple(sorted({row["language"] for row in rows})), [row["text"] for row in rows]
    if model == "ngrams":
        x = ngrams(texts)
    else:
        ids: Any = backbones.encode("minilm", tuple(texts), tokens=TOKENS)
        x = ids.values if model == "finetuned" else _minilm(ids.values, device)
    y = torch.tensor([LABELS.index(row["label"]) for row in rows])
    group = 3 * torch.tensor([names.index(row["language"]) for row in rows]) + y
    splits = {}
    for name in ("train", "dev", "test"):
        own = torch.tensor([row["split"] == name for row in rows])
        splits[name] = Split(*(each[own].to(device) for each in (x, y, group)))
    return names, splits


def network(model: str) -> nn.Module:
    """A linear model, from 0, or MiniLM with such a head."""
    head = nn.Linear(WIDTH if model == "ngrams" else 384, 3)
    nn.init.zeros_(head.weight)
    return nn.Sequential(backbones.build("minilm"), head) if model == "finetuned" else head


@functools.cache
def possible(model: str) -> fcco.ReferenceLosses:
    """The loss of each training tweet in a linear model of the other half of its language.

    Each model gives the three labels the same weight.
    """
    names, splits = tweets(model, "cpu")
    data = splits["train"]
    half = torch.rand(len(data.y), generator=torch.Generator().manual_seed(0)) < 0.5
    losses = torch.empty(len(data.y))
    for language in range(len(names)):
        for side in (half, ~half):
            own, other = ((data.group // 3 == language) & each for each in (side, ~side))
            weight = len(data.y[own]) / 3 / torch.bincount(data.y[own], minlength=3)
            linear: Any = network(model)
            optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=20)

            def loss(
                model: Any = linear, x: Tensor = data.x[own], y: Tensor = data.y[own],
                weight: Tensor = weight,
            ) -> Tensor:  # fmt: skip
                model.zero_grad()
                value = cross_entropy(model(x), y, weight=weight)
                value = value + 0.1 * model.weight.square().sum()
                value.backward()
                return value

            optimizer.step(loss)
            with torch.no_grad():
                losses[other] = cross_entropy(
                    linear(data.x[other]), data.y[other], reduction="none"
                )
    return fcco.ReferenceLosses(losses)


def objective_of(job: Job, model: torch.nn.Module, optimizer: Any, number: int) -> Any:
    """The objective of a method; None for a plain mean."""
    if job.method == "OOA":
        return fcco.methods.ooa(model, optimizer, number, **job.setting)
    if job.method == "CTC-DRO":
        return fcco.methods.ctc_dro(model, optimizer, number, **job.setting)
    if job.method.startswith("fcco"):
        # Of fine-tuned models those of the features: each language has too few tweets for its own.
        kind, device = job.problem.split(" / ")
        kind = "minilm" if kind == "finetuned" else kind
        reference = possible(kind).to(device) if "reference" in job.method else None
        return fcco.CVaRGroupDRO(model, optimizer, number, reference=reference, **job.setting)
    return None


def f1(logits: Tensor, data: Split, number: int) -> list[float]:
    """The macro F1 of each language."""
    from sklearn.metrics import f1_score

    rows = [data.group // 3 == language for language in range(number)]
    labels, said = data.y.cpu(), logits.argmax(1).cpu()
    scores = (f1_score(labels[o], said[o], average="macro") for o in (r.cpu() for r in rows))
    return [round(float(score), 5) for score in scores]


def run(job: Job) -> dict[str, Any]:
    """The macro F1 of each language that a method ends with, on the dev and the test tweets."""
    torch.set_num_threads(1)
    kind, device = job.problem.split(" / ")
    names, splits = tweets(kind, device)
    data, (steps, rate) = splits["train"], MODELS[kind]
    steps = job.evaluations or steps
    torch.manual_seed(job.seed)
    model = network(kind).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    number = 3 * len(names)
    sampler = fcco.GroupBatchSampler(data.group.cpu(), number, PER_GROUP, seed=job.seed)
    objective = objective_of(job, model, optimizer, number)
    for _ in range(steps):
        rows = torch.as_tensor(sampler.draw(), device=device)
        if job.method == "ERM":
            rows = torch.randint(len(data.y), (len(rows),), device=device)

        def losses(rows: Tensor = rows) -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(data.x[rows])
            return cross_entropy(logits.float(), data.y[rows], reduction="none")

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
        logits = {s: torch.cat([model(x) for x in splits[s].x.split(500)]) for s in ("dev", "test")}
    return {s: f1(found, splits[s], len(names)) for s, found in logits.items()}


def table(methods: Mapping[str, Any]) -> list[list[str]]:
    """Macro F1 of each method with its chosen setting."""
    rows = [["trained by", "worst language", "mean", "chosen setting"]]
    for name, found in methods.items():
        worst, mean = [min(row) for row in found["test"]], [sum(r) / len(r) for r in found["test"]]
        shown = ", ".join(f"{k} {v:.2g}" for k, v in found["setting"].items())
        rows.append([name, publish.mean_std(worst), publish.mean_std(mean), shown])
    return rows


def published(model: str = "ngrams") -> list[list[str]]:
    """Of docs/recipes/data-mixtures.md."""
    return table(publish.table(folder(model))["methods"])


def folder(model: str) -> str:
    return "afrisenti" if model == "ngrams" else f"afrisenti-{model}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("afrisenti", __doc__)
    parser.add_argument("--model", default="ngrams", choices=MODELS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parse(parser, arguments, (1, 5))
    steps, problem = QUICK_STEPS if options.quick else None, f"{options.model} / {options.device}"
    runner = Runner(run, dict, options.workers, options.out)
    runs = runner.each({
        (name, k): [Job(problem, name, setting, s, evaluations=steps) for s in range(options.seeds)]
        for name, grid in METHODS.items()
        for k, setting in enumerate(grid)
    })  # fmt: skip
    methods = {}
    for name, grid in METHODS.items():
        own = [runs[name, k] for k in range(len(grid))]
        k = max(range(len(own)), key=lambda k: sum(min(row["dev"]) for row in own[k]))
        methods[name] = {"setting": grid[k], "test": [row["test"] for row in own[k]]}
    print(publish.plain(table(methods)))
    languages = list(tweets(options.model, options.device)[0])
    result = {"languages": languages, "methods": methods}
    publish.conclude(options, folder(options.model), result)


if __name__ == "__main__":
    main()
