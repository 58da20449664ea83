"""Group DRO on PACS, AudioMNIST and AfriSenti: every method with eight settings, as fleets.

    python -m studies.group_dro.cards arrays --data pacs --out build/pacs.npz
    python -m studies.group_dro.cards train --arrays build/pacs.npz --out build/cards.jsonl
    python -m studies.group_dro.cards publish --out build/cards.jsonl --commit HASH

`arrays` needs the data of the card, `train` torch and `fcco` alone (and TorchJD for its row). On
PACS heads are trained on features of a frozen EfficientNet-lite0, on AudioMNIST a small network for
spectrograms from scratch, on AfriSenti a linear model of 4,096 hashed character n-grams. All runs
of a method are trained together. For each split the setting with the least CVaR on its validation
data counts.
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
from torch.nn.functional import cross_entropy, unfold

import fcco
from fcco.fleet import Fleet, Member, signature_of

EPOCHS: dict[str, float] = {"pacs": 10, "audiomnist": 15, "afrisenti": 4}
RATIO, BATCH, SEEDS, DECAY = 0.15, 64, range(5), 0.01
SHAPES = {"paper": 4, "library": None}
"""Groups of a batch; None: as `GroupBatchSampler` chooses them."""
PARTS = {"train": "train", "validation": "val", "test": "test"}  # and how their figures are called
FOLDER = "group-dro-cards"
KEY = ("data", "shape", "name", "seed", "setting")
Setting = dict[str, Any]


class Small(nn.Module):
    """Three convolutions with stride 2 as matrix products: a fleet maps those best."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        widths = itertools.pairwise((1, 16, 32, 64))
        self.layers = nn.ModuleList(nn.Linear(9 * before, after) for before, after in widths)
        self.head = nn.Linear(64 * 16, classes)

    def forward(self, images: Tensor) -> Tensor:
        found = images.unsqueeze(1) / 64 - 1
        for layer in self.layers:
            side = found.shape[-1] // 2
            patches = unfold(found, 3, padding=1, stride=2).transpose(1, 2)
            found = layer(patches).relu().transpose(1, 2).unflatten(2, (side, side))
        return self.head(found.flatten(1))


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


def read(path: Path, device: str) -> Data:
    """What `arrays` wrote; features get mean 0 and deviation 1 over the training rows."""
    found = np.load(path)
    x, inputs = torch.from_numpy(found["x"]).to(device).float(), []
    parts = [
        {p: tuple(torch.from_numpy(found[f"{s}/{p}"]).long().to(device)) for p in PARTS}
        for s in SEEDS
    ]
    for own in parts:
        seen = x[own["train"][0]]
        scaled = str(found["name"]) == "pacs"
        inputs.append((x - seen.mean(0)) / seen.std(0).clamp(min=1e-6) if scaled else x)
    return Data(str(found["name"]), inputs, int(found["classes"]), parts)  # type: ignore[arg-type]


def network(data: Data, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    x = data.inputs[0]
    return Small(data.classes) if x.dim() == 3 else nn.Linear(x.shape[1], data.classes)


def grids() -> dict[str, list[Setting]]:
    """Eight settings of each method: four learning rates, and two values of one more number."""

    def grid(key: str, values: Sequence[Any], low: float = 1e-3, **fixed: Any) -> list[Setting]:
        rates = (low, 3 * low, 10 * low, 30 * low)
        return [{"lr": lr, key: value, **fixed} for lr in rates for value in values]

    printed = {"gamma": 0.1, "correction": "auto", "read": "old"}
    return {
        "automatic": grid("beta", (0.1, 0.5)),
        "sonex": grid("smoothing", (0.1, 1.0), **printed),
        "alexr2": grid("eta", (0.005, 0.05), smoothing=0.1, gamma=0.5, correction=0.0625),
        "sonx": grid("gamma", (0.1, 0.5), 0.01, smoothing=0.0, correction="auto", read="old"),
        "ooa-cvar": grid("step", (0.01, 0.1), ratio=RATIO),
        "ooa": grid("step", (0.01, 0.1)),
        "TorchJD STCH": grid("mu", (0.1, 1.0)),
        "uniform": grid("beta", (0.1, 0.5), ratio=1.0),
        "erm": grid("beta", (0.1, 0.5)),
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


class Batches:
    """Places of every batch of all splits, drawn once: (steps, splits, batch)."""

    def __init__(self, data: Data, shape: str, plain: bool) -> None:
        rows, group = data.parts[0]["train"][0], data.parts[0]["train"][2]
        each = SHAPES[shape]
        sizes = {"batch_size": BATCH} if each is None else {
            "groups_per_batch": each, "per_group": BATCH // each}  # fmt: skip
        sizes = {"groups_per_batch": 1, "per_group": BATCH} if plain else sizes
        self.steps = -(-len(rows) // BATCH)
        drawn = []
        for seed in SEEDS:
            group = data.parts[seed]["train"][2].cpu()
            group = torch.zeros_like(group) if plain else group
            sampler = fcco.GroupBatchSampler(
                group, **sizes, seed=seed, batches_per_epoch=self.steps
            )
            total = max(1, round(EPOCHS[data.name] * self.steps))
            drawn.append(torch.tensor([sampler.draw() for _ in range(total)]))
        self.places = torch.stack(drawn, 1).to(rows.device)
        self.per_group = sampler.per_group


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def fleet_of(
    data: Data, name: str, runs: list[tuple[Setting, int]], batches: Batches, until: float
) -> Fleet | None:
    """Trained runs (a setting and a split each); None where the time was up before."""
    models = [network(data, seed) for seed in SEEDS]
    members = [member(name, setting, models[seed], data.groups) for setting, seed in runs]
    plain, function = members[0].objective is None, losses
    if plain:
        combine: Any = torch.mean
        if name != "erm":
            from torchjd.scalarization import STCH

            number = batches.places.shape[2] // batches.per_group
            stch = STCH(runs[0][0]["mu"], torch.ones(number, device=data.inputs[0].device))
            combine = lambda own: stch(own.view(number, -1).mean(1))  # noqa: E731
        function = lambda model, batch: combine(losses(model, batch))  # noqa: E731
    streams = [seed for _, seed in runs]
    fleet = Fleet(members, function, streams=streams, device=data.inputs[0].device)
    rates = torch.tensor([setting["lr"] for setting, _ in runs], dtype=torch.float64)
    total = len(batches.places)
    train = [own["train"] for own in data.parts]
    for step, places in enumerate(batches.places):
        if time.time() > until:
            return None
        if step % 20 == 0:  # half a cosine
            factor = (1 + np.cos(np.pi * step / total)) / 2
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
    weights, model = fleet.weights(), network(data, 0).to(data.inputs[0].device)
    found: list[dict[str, float]] = [{} for _ in streams]
    for seed, part in itertools.product(sorted(set(streams)), PARTS):
        own = [k for k, stream in enumerate(streams) if stream == seed]
        rows, label, group = data.parts[seed][part]
        mine = {name: value[own] for name, value in weights.items()}
        number = int(group.max()) + 1
        sums = torch.zeros(2, len(own), number, device=label.device)
        for at in torch.arange(len(rows), device=label.device).split(2048):
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
    model = network(data, 0).to(data.inputs[0].device)
    fleet.load_into(run, model)
    rows, label, group = data.parts[seed]["train"]

    def inner(index: Tensor) -> Tensor:
        of = [(group == k).nonzero().squeeze(1) for k in index]
        return torch.stack([
            losses(model, (data.inputs[seed][rows[at]], label[at])).mean() for at in of
        ])  # fmt: skip

    found = fcco.diagnostics.eigenvalues(inner, data.groups, model.parameters())
    return float(found[0])


def train(data: Data, shape: str, until: float) -> Iterator[dict[str, Any]]:
    """The rows of all runs, fleet by fleet."""
    drawn = {plain: Batches(data, shape, plain) for plain in (False, True)}
    for name, grid in grids().items():
        kinds: dict[Any, list[tuple[Setting, int]]] = {}
        for setting, seed in itertools.product(grid, SEEDS):
            own = member(name, setting, network(data, 0), data.groups)
            kinds.setdefault((signature_of(own), setting.get("mu")), []).append((setting, seed))
        for runs in kinds.values():
            begun = time.time()
            try:
                fleet = fleet_of(data, name, runs, drawn[name == "erm"], until)
            except ImportError as reason:
                print(f"{name} is left out: {reason}")
                continue
            if fleet is None:
                return
            rows = figures(data, fleet, [seed for _, seed in runs])
            first = [k for k, (_, seed) in enumerate(runs) if seed == SEEDS[0]]
            best = min(first, key=lambda k: np.nan_to_num(rows[k]["val_cvar"], nan=np.inf))
            if np.isfinite(rows[best]["train_cvar"]):
                rows[best]["gram_smallest"] = eigenvalue(data, fleet, best, SEEDS[0])
            seconds = (time.time() - begun) / len(runs)
            place = data.inputs[0].device
            machine = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
            facts = {"data": data.name, "shape": shape, "name": name}
            facts |= {"device": machine, "torch": torch.__version__}
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


def published(data: str, shape: str = "paper") -> list[list[str]]:
    """A table of docs/research/group-dro.md; bold: it differs from automatic SONEX."""
    from studies import publish

    from . import report

    rows = publish.table(FOLDER)["rows"]
    own = [row for row in rows if (row["data"], row["shape"]) == (data, shape)]
    return report.table(own, list(grids()), "automatic")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.group_dro.cards", description=__doc__)
    add = parser.add_argument
    add("part", choices=("arrays", "train", "publish"))
    add("--data", choices=list(EPOCHS))
    add("--arrays", type=Path, help="file that `arrays` has written")
    add("--out", type=Path, required=True, help="file of arrays, or of runs as JSON lines")
    add("--shape", default="paper", choices=list(SHAPES), help="of batches")
    add("--device", default="cpu")
    add("--seconds", type=float, default=float("inf"), help="no longer than that")
    add("--commit", help="of the code that made the runs")
    options = parser.parse_args(arguments)
    if options.part == "arrays":
        arrays(options.data, options.out)
    elif options.part == "train":
        until = time.time() + options.seconds
        data = read(options.arrays, options.device)
        with options.out.open("at") as file:
            for row in train(data, options.shape, until):
                file.write(json.dumps(row) + "\n")
                file.flush()
    else:
        from studies import publish

        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
        runs = {json.dumps([row[k] for k in KEY]): row for row in rows}
        publish.write(publish.RESULTS / FOLDER, {"rows": chosen(rows)}, runs, commit=options.commit)


if __name__ == "__main__":
    main()
