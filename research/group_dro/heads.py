"""Linear heads on features of a frozen network: ten fresh seeds of each method as a fleet."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fcco_experiments.config import load as load_config
from fcco_experiments.task import Method
from fcco_experiments.tasks.base import learning_rate_factor
from fcco_experiments.tasks.group_dro import TASK
from fcco_experiments.tasks.group_dro.training import build
from fcco_experiments.tasks.network import Classifier, standardise
from torch import Tensor
from torch.nn.functional import cross_entropy

import fcco
from fcco.fleet import Fleet, Member
from fcco.groups import GroupBatchSampler

from .data import Prepared, load

TUNING = 1000
FRESH = tuple(range(2000, 2010))
RULES = {"val_cvar": "", "train_cvar": "-train"}
"""By which figure settings were chosen, and how the config with those settings ends."""


def automatic(decay: float) -> list[Method]:
    """Settings of the automatic method: what the optimizer has, and nothing else."""
    return [
        Method(method="sonex", lr=lr, beta=beta, weight_decay=decay)
        for lr in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
        for beta in (0.1, 0.5, 0.8)
    ]


@dataclass(frozen=True)
class Portion:
    """Runs that make a fleet: settings of a method, each with every seed.

    Attributes:
        name: of the method's row.
        methods: settings.
        seeds: of the splits, first weights and batches.
        curves: whether the training CVaR after each epoch is kept.
    """

    name: str
    methods: list[Method]
    seeds: tuple[int, ...]
    curves: bool = False


class Heads:
    """The data of some seeds on the device."""

    def __init__(self, data: Prepared, seeds: Sequence[int], device: str) -> None:
        self.data, self.seeds, self.device = data, list(seeds), device
        self.features = torch.stack([
            standardise(data.inputs.to(device), data.parts[seed]["train"].rows.to(device))
            for seed in self.seeds
        ])  # fmt: skip
        self.label = torch.zeros(data.inputs.shape[0], dtype=torch.long, device=device)
        for parts in data.parts.values():
            for part in parts.values():
                self.label[part.rows.to(device)] = part.label.to(device)
        # Seeds differ by a few samples where groups are rounded; the epochs have one length.
        train = data.parts[self.seeds[0]]["train"]
        self.steps_per_epoch = -(-len(train) // data.config.batch)

    def batches(self, grouped: bool) -> tuple[Tensor, Tensor]:
        """Rows and groups of all batches, (steps, seeds, batch); without groups for ERM."""
        config, steps = self.data.config, self.steps_per_epoch * self.data.config.epochs
        rows, groups = [], []
        for seed in self.seeds:
            part = self.data.parts[seed]["train"]
            ids = part.group if grouped else torch.zeros_like(part.group)
            shape = (config.groups_per_batch, config.per_group) if grouped else (1, config.batch)
            sampler = GroupBatchSampler(
                ids, *shape, batches_per_epoch=self.steps_per_epoch, seed=seed
            )
            places = torch.tensor([sampler.draw() for _ in range(steps)])
            rows.append(part.rows[places])
            groups.append(part.group[places])
        return torch.stack(rows, 1).to(self.device), torch.stack(groups, 1).to(self.device)

    @torch.no_grad()
    def figures(self, weights: dict[str, Tensor], seed: int, names: Sequence[str]) -> list[dict]:
        """The figures of runs of one seed, from their stacked weights."""
        matrix, bias = weights["top.0.weight"], weights["top.0.bias"]
        own, place = self.data.parts[seed], self.seeds.index(seed)
        table: dict[str, Tensor] = {}
        for name in names:
            part = own[name]
            x = self.features[place][part.rows.to(self.device)]
            scores = (x @ matrix.flatten(0, 1).T).view(len(x), *bias.shape) + bias
            label = part.label.to(self.device)
            picked = scores.gather(2, label[:, None, None].expand(-1, scores.shape[1], 1))
            loss = scores.logsumexp(2) - picked.squeeze(2)
            right = (scores.argmax(2) == label[:, None]).float()
            key = {"validation": "val"}.get(name, name)
            table[f"{key}_cvar"] = fcco.outer.CVaR(self.data.config.ratio)(
                self._means(loss, part.group).T
            )
            if name == "train":
                continue
            table[f"{key}_accuracy"] = right.mean(0)
            accuracy = self._means(right, part.reported)
            summary = (
                accuracy.amin(0) if self.data.summary == "worst" else accuracy.quantile(0.1, 0)
            )
            table[f"{key}_{self.data.summary}_accuracy"] = summary
        lists = {key: values.double().tolist() for key, values in table.items()}
        return [dict(zip(lists, line, strict=True)) for line in zip(*lists.values(), strict=True)]

    def _means(self, values: Tensor, ids: Tensor) -> Tensor:
        """The mean over each group, (groups, runs)."""
        ids = ids.to(self.device)
        total = torch.zeros(int(ids.max()) + 1, values.shape[1], device=self.device)
        return total.index_add_(0, ids, values) / torch.bincount(ids)[:, None]


def _losses(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, label = batch
    return cross_entropy(model(x), label, reduction="none")


def _mean_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return _losses(model, batch).mean()


def train(heads: Heads, portion: Portion) -> Iterator[dict[str, Any]]:
    """Train the runs of a portion as a fleet; a row for each run."""
    data, config = heads.data, heads.data.config
    averaged = portion.methods[0].method in ("erm", "uniform")
    steps = heads.steps_per_epoch * config.epochs
    models = {}
    for seed in portion.seeds:
        torch.manual_seed(seed)
        models[seed] = Classifier(None, data.inputs.shape[1], (), data.classes)
    members, runs = [], []
    for method in portion.methods:
        own = replace(method, method="erm") if averaged else method
        for seed in portion.seeds:
            sizes = torch.bincount(data.parts[seed]["train"].group)
            built = build(models[seed], own, config, sizes, steps)
            members.append(Member(models[seed], built.optimizer, built.objective))
            runs.append((method, seed))
    rows, groups = heads.batches(portion.methods[0].method != "erm")
    parts = ("train", "validation") if not portion.curves else ("train", "validation", "test")
    fleet = Fleet(
        members, _mean_loss if averaged else _losses,
        streams=[heads.seeds.index(seed) for _, seed in runs], device=heads.device,
    )  # fmt: skip
    rates = torch.tensor([method.lr for method, _ in runs], dtype=torch.float64)
    curves: list[list[float]] = [[] for _ in runs]
    place = torch.arange(len(heads.seeds), device=heads.device)[:, None]
    factor = None
    for step in range(steps):
        now = learning_rate_factor(config, step / heads.steps_per_epoch)
        if now != factor:
            factor = now
            fleet.set_hyperparameters(lr=factor * rates)
        batch = heads.features[place, rows[step]], heads.label[rows[step]]
        fleet.step(batch, index=None if averaged else groups[step])
        if portion.curves and (step + 1) % heads.steps_per_epoch == 0:
            for k, row in _rows(heads, fleet, runs, ("train",)):
                curves[k].append(float(f"{row['train_cvar']:.4g}"))
    died = fleet.died.tolist()
    for k, row in _rows(heads, fleet, runs, parts):
        method, seed = runs[k]
        yield {
            "name": portion.name, "seed": seed, "died": died[k] >= 0,
            "setting": setting_of(method), **row,
            **({"curve": curves[k]} if portion.curves else {}),
        }  # fmt: skip


def _rows(
    heads: Heads, fleet: Fleet, runs: Sequence[tuple[Method, int]], parts: Sequence[str]
) -> Iterator[tuple[int, dict[str, float]]]:
    weights = fleet.weights()
    for seed in dict.fromkeys(seed for _, seed in runs):
        places = [k for k, (_, own) in enumerate(runs) if own == seed]
        index = torch.tensor(places, device=heads.device)
        chosen = {name: value.index_select(0, index) for name, value in weights.items()}
        yield from zip(places, heads.figures(chosen, seed, parts), strict=True)


def setting_of(method: Method) -> dict[str, Any]:
    """The numbers of a setting, for a table."""
    beta = {} if method.update == "sgd" else {"beta": method.beta}
    return {"lr": method.lr, "update": method.update, **beta, **method.settings}


def study(file: Path, output: Path, device: str) -> None:
    """Train fresh seeds with the settings of the configs, and tune the automatic method first.

    The settings of the configs are the best of 30 for each method and rule, found by `fcco sweep`
    on the tuning seed. The automatic method has 18: a learning rate and a momentum.

    Args:
        file: of `prepare`.
        output: a file of JSON lines.
        device: where to train.
    """
    data, start = load(file), time.perf_counter()
    name = data.config.data
    configs_of_rules = {rule: load_config(TASK, name + end) for rule, end in RULES.items()}
    decay = next(iter(configs_of_rules["val_cvar"].methods.values())).weight_decay
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a") as lines:

        def run(stage: str, portion: Portion) -> list[dict[str, Any]]:
            found = list(train(Heads(data, portion.seeds, device), portion))
            for row in found:
                lines.write(json.dumps({"stage": stage, "data": name, **row}) + "\n")
            lines.flush()
            seconds = time.perf_counter() - start
            print(f"{seconds:6.0f} s  {name} {stage} {portion.name}: {len(found)}", flush=True)
            return found

        grid = automatic(decay)
        found = run("tuning", Portion("automatic", grid, (TUNING,)))
        found = [row for row in found if not row["died"]]
        chosen = {}
        for rule, config in configs_of_rules.items():
            best = min(found, key=lambda row, rule=rule: row[rule])["setting"]
            chosen["automatic", rule] = next(m for m in grid if setting_of(m) == best)
            chosen |= {(label, rule): method for label, method in config.methods.items()}
        for label in dict.fromkeys(label for label, _ in chosen):
            own = {json.dumps(setting_of(m)): m for m in (chosen[label, r] for r in RULES)}
            for method in own.values():
                rules = [r for r in RULES if setting_of(chosen[label, r]) == setting_of(method)]
                run("/".join(rules), Portion(label, [method], FRESH, curves=True))
