"""Group DRO on PACS, AudioMNIST and AfriSenti: every method with four settings, as fleets.

    python -m studies.group_dro.cards arrays --data pacs --out build/pacs.npz
    python -m studies.group_dro.cards train --arrays build/pacs.npz --out build/cards.jsonl
    python -m studies.group_dro.cards publish --out build/cards.jsonl --commit HASH

Linear models: on PACS of the features of a frozen EfficientNet-lite0, on AudioMNIST of the pixels
of spectrograms, on AfriSenti of 4,096 hashed character n-grams. All runs of a method are trained
together. For each split the setting with the least CVaR on its validation data counts. `arrays`
needs the data of the card, the row of TorchJD its package.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

import fcco
from fcco.fleet import Fleet, Member, signature_of

EPOCHS: dict[str, float] = {"pacs": 5, "audiomnist": 5, "afrisenti": 1}
RATIO, SEEDS, DECAY = 0.15, range(5), 0.01
GROUPS, EACH = 4, 16  # of a batch
PARTS = {"train": "train", "validation": "val", "test": "test"}  # and how their figures are called
FOLDER = "group-dro-cards"
KEY = ("data", "name", "seed", "setting")
Setting = dict[str, Any]


class Data(NamedTuple):
    """Inputs by split, and of each part labels, groups and rows."""

    name: str
    inputs: list[Tensor]  # by split; the same tensor where nothing is fitted
    classes: int
    parts: list[dict[str, tuple[Tensor, Tensor, Tensor]]]  # by split: rows, label, group

    @property
    def groups(self) -> int:
        return int(self.parts[0]["train"][2].max()) + 1


def arrays(name: str, path: Path) -> None:
    """Write what `train` reads: inputs, and the parts of each split."""
    from fcco_experiments import config as configs
    from fcco_experiments import data
    from fcco_experiments.tasks.group_dro import TASK, GroupDROProblem

    if name == "pacs":
        problem = GroupDROProblem(configs.load(TASK, name))
        loaded, values = problem.data, problem.samples.values.half()  # type: ignore[union-attr]
    else:
        loaded = data.load_grouped(name)
        if name == "audiomnist":
            values = loaded.samples.values[:, 0]  # type: ignore[union-attr]
        else:
            from studies.afrisenti import ngrams

            values = ngrams(list(loaded.samples)).half()  # type: ignore[arg-type]
    parts = {}
    for seed, part in itertools.product(SEEDS, PARTS):
        own = loaded.cut(seed)[part]
        parts[f"{seed}/{part}"] = torch.stack([own.rows, own.label, own.group]).int().numpy()
    np.savez_compressed(path, name=name, x=values.numpy(), classes=len(loaded.class_names), **parts)


def read(path: Path) -> Data:
    """What `arrays` wrote; features and pixels get mean 0 and deviation 1 on training rows."""
    found, inputs = np.load(path), []
    x = torch.from_numpy(found["x"]).float().flatten(1)
    parts = [{p: tuple(torch.from_numpy(found[f"{s}/{p}"]).long()) for p in PARTS} for s in SEEDS]
    for own in parts:
        seen = x[own["train"][0]]
        if str(found["name"]) == "afrisenti":  # of one length already
            inputs.append(x)
            continue
        scale = seen.std(0)
        # Columns that hardly vary in training, such as pixels at the border, stay small.
        inputs.append((x - seen.mean(0)) / torch.maximum(scale, scale.mean() / 10))
    return Data(str(found["name"]), inputs, int(found["classes"]), parts)  # type: ignore[arg-type]


def network(data: Data, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(data.inputs[0].shape[1], data.classes)


def grids() -> dict[str, list[Setting]]:
    """Four settings of each method: two learning rates, and two values of one more number."""

    def grid(key: str, values: Sequence[Any], low: float = 3e-3, **fixed: Any) -> list[Setting]:
        return [{"lr": lr, key: value, **fixed} for lr in (low, 3 * low) for value in values]

    printed: Any = {"correction": "auto", "read": "old"}
    return {
        "automatic": grid("beta", (0.1, 0.5)),
        "uniform": grid("beta", (0.1, 0.5), ratio=1.0),
        "sonex": grid("smoothing", (0.1, 1.0), gamma=0.1, **printed),
        "ooa": grid("step", (0.01, 0.1)),
        "erm": grid("beta", (0.1, 0.5)),
        "alexr2": grid("eta", (0.005, 0.05), 0.01, smoothing=0.1, gamma=0.5, correction=0.0625),
        "sonx": grid("gamma", (0.1, 0.5), 0.01, smoothing=0.0, **printed),
        "ooa-cvar": grid("step", (0.01, 0.1), ratio=RATIO),
        "TorchJD STCH": grid("mu", (0.1, 1.0)),
    }


def member(name: str, setting: Setting, model: nn.Module, groups: int) -> Member:
    """A run: all but SONX, a subgradient method, take steps of Adam."""
    settings = {k: v for k, v in setting.items() if k not in ("lr", "beta", "mu", "eta")}
    lr, weights = setting["lr"], list(model.parameters())
    optimizer: Any = fcco.optim.adam_type(weights, lr, setting.get("beta", 0.1), weight_decay=DECAY)
    if name in ("erm", "TorchJD STCH"):
        return Member(model, optimizer)
    if name in ("ooa", "ooa-cvar", "uniform"):
        return Member(model, optimizer, fcco.methods.ooa(model, optimizer, groups, **settings))
    if name == "sonx":
        optimizer = torch.optim.SGD(weights, lr, weight_decay=DECAY)
    if name == "alexr2":
        optimizer = fcco.optim.ProximalPoint(optimizer, nu=0.1, eta=setting["eta"], inner_steps=5)
    return Member(model, optimizer, fcco.CVaRGroupDRO(model, optimizer, groups, RATIO, **settings))


def batches(data: Data, plain: bool) -> Tensor:
    """Places of every batch of all splits, (steps, splits, batch); `plain` is without groups."""
    steps, shape = -(-len(data.parts[0]["train"][0]) // (GROUPS * EACH)), (GROUPS, EACH)
    drawn = []
    for seed in SEEDS:
        group = data.parts[seed]["train"][2]
        group, shape = (torch.zeros_like(group), (1, GROUPS * EACH)) if plain else (group, shape)
        sampler = fcco.GroupBatchSampler(group, *shape, seed=seed, batches_per_epoch=steps)
        drawn.append([sampler.draw() for _ in range(round(EPOCHS[data.name] * steps))])
    return torch.tensor(drawn).transpose(0, 1)


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def fleet_of(data: Data, name: str, runs: list[tuple[Setting, int]], drawn: Tensor) -> Fleet:
    """Trained runs, a setting and a split each."""
    models = [network(data, seed) for seed in SEEDS]
    members = [member(name, setting, models[seed], data.groups) for setting, seed in runs]
    plain, function = members[0].objective is None, losses
    if plain:
        combine: Any = torch.mean
        if name != "erm":
            from torchjd.scalarization import STCH

            stch = STCH(runs[0][0]["mu"], torch.ones(GROUPS))  # a batch comes group by group
            combine = lambda own: stch(own.view(GROUPS, EACH).mean(1))  # noqa: E731
        function = lambda model, batch: combine(losses(model, batch))  # noqa: E731
    streams = [seed for _, seed in runs]
    fleet = Fleet(members, function, streams=streams)
    rates = torch.tensor([setting["lr"] for setting, _ in runs], dtype=torch.float64)
    train = [own["train"] for own in data.parts]
    for step, places in enumerate(drawn):
        if step % 20 == 0:  # half a cosine
            factor = (1 + np.cos(np.pi * step / len(drawn))) / 2
            fleet.set_hyperparameters(lr=factor * rates)
        own = list(zip(data.inputs, train, places, strict=True))
        x = torch.stack([inputs[rows[at]] for inputs, (rows, _, _), at in own])
        y = torch.stack([label[at] for _, (_, label, _), at in own])
        group = None if plain else torch.stack([group[at] for _, (_, _, group), at in own])
        fleet.step((x, y), index=group)
    return fleet


@torch.no_grad()
def figures(data: Data, fleet: Fleet, streams: Sequence[int]) -> list[dict[str, float]]:
    """CVaR, accuracy and the accuracy of the worst group of each run, on each part."""
    weights, model = fleet.weights(), network(data, 0)
    found: list[dict[str, float]] = [{} for _ in streams]
    for seed, part in itertools.product(sorted(set(streams)), PARTS):
        own = [k for k, stream in enumerate(streams) if stream == seed]
        rows, label, group = data.parts[seed][part]
        mine = {name: value[own] for name, value in weights.items()}
        number = int(group.max()) + 1
        sums = torch.zeros(2, len(own), number)
        for at in torch.arange(len(rows)).split(2048):
            x = data.inputs[seed][rows[at]]
            logits = vmap(lambda values, x=x: functional_call(model, values, (x,)))(mine)
            said = logits.flatten(0, 1), label[at].repeat(len(own))
            loss = cross_entropy(*said, reduction="none").view(len(own), -1)
            right = (said[0].argmax(1) == said[1]).float().view(len(own), -1)
            sums.index_add_(2, group[at], torch.stack([loss, right]))
        means = (sums / torch.bincount(group)).cpu()
        share = (sums[1].sum(1) / len(rows)).cpu()
        for place, run in enumerate(own):
            found[run] |= {
                f"{PARTS[part]}_cvar": float(fcco.outer.CVaR(RATIO)(means[0, place].double())),
                f"{PARTS[part]}_worst_accuracy": float(means[1, place].min()),
                f"{PARTS[part]}_accuracy": float(share[place]),
            }
    return found


def eigenvalue(data: Data, fleet: Fleet, run: int, seed: int) -> float:
    """The least eigenvalue of the Gram matrix of the gradients of all training group losses."""
    model = network(data, 0)
    fleet.load_into(run, model)
    rows, label, group = data.parts[seed]["train"]

    def inner(index: Tensor) -> Tensor:
        of = [(group == k).nonzero().squeeze(1) for k in index]
        return torch.stack([
            losses(model, (data.inputs[seed][rows[at]], label[at])).mean() for at in of
        ])  # fmt: skip

    found = fcco.diagnostics.eigenvalues(inner, data.groups, model.parameters())
    return float(found[0])


def train(data: Data) -> Iterator[dict[str, Any]]:
    """The rows of all runs, fleet by fleet."""
    drawn = {plain: batches(data, plain) for plain in (False, True)}
    for name, grid in grids().items():
        kinds: dict[Any, list[tuple[Setting, int]]] = {}
        for setting, seed in itertools.product(grid, SEEDS):
            own = member(name, setting, network(data, 0), data.groups)
            kinds.setdefault((signature_of(own), setting.get("mu")), []).append((setting, seed))
        for runs in kinds.values():
            begun = time.time()
            try:
                fleet = fleet_of(data, name, runs, drawn[name == "erm"])
            except ImportError as reason:
                print(f"{name} is left out: {reason}")
                continue
            rows = figures(data, fleet, [seed for _, seed in runs])
            first = [k for k, (_, seed) in enumerate(runs) if seed == SEEDS[0]]
            best = min(first, key=lambda k: np.nan_to_num(rows[k]["val_cvar"], nan=np.inf))
            if np.isfinite(rows[best]["train_cvar"]):
                rows[best]["gram_smallest"] = eigenvalue(data, fleet, best, SEEDS[0])
            seconds = (time.time() - begun) / len(runs)
            facts = {"data": data.name, "name": name}
            for (setting, seed), row, died in zip(runs, rows, fleet.died.tolist(), strict=True):
                end = {"died": died} if died >= 0 else {}
                yield {**facts, "seed": seed, "setting": setting, **row, **end, "seconds": seconds}


def chosen(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the settings that validation data choose, split by split."""
    best: dict[Any, dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in KEY[:-1])
        if "died" not in row and row["val_cvar"] < best.get(key, {"val_cvar": np.inf})["val_cvar"]:
            best[key] = row
    return list(best.values())


def published(data: str) -> list[list[str]]:
    """A table of docs/research/group-dro.md; bold: it differs from automatic SONEX."""
    from studies import publish

    from . import report

    rows = publish.table(FOLDER)["rows"]
    own = [row for row in rows if row["data"] == data]
    return report.table(own, list(grids()), "automatic")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.group_dro.cards", description=__doc__)
    add = parser.add_argument
    add("part", choices=("arrays", "train", "publish"))
    add("--data", choices=list(EPOCHS))
    add("--arrays", type=Path, help="file that `arrays` has written")
    add("--out", type=Path, required=True, help="file of arrays, or of runs as JSON lines")
    add("--commit", help="of the code that made the runs")
    options = parser.parse_args(arguments)
    if options.part == "arrays":
        arrays(options.data, options.out)
    elif options.part == "train":
        data = read(options.arrays)
        with options.out.open("at") as file:
            for row in train(data):
                file.write(json.dumps(row) + "\n")
                file.flush()
    else:
        from studies import publish

        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
        runs = {json.dumps([row[k] for k in KEY]): row for row in rows}
        publish.write(publish.RESULTS / FOLDER, {"rows": chosen(rows)}, runs, commit=options.commit)


if __name__ == "__main__":
    main()
