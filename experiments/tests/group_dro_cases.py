"""A small problem with groups, and trainings on it without readers, backbones or command line."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from fcco_experiments.data.grouped import GroupedPart, Samples, Vectors, cut_within_groups, part
from fcco_experiments.task import Method
from fcco_experiments.tasks.group_dro.training import GroupDRO, GroupDROTraining
from fcco_experiments.tasks.network import Classifier
from torch import Tensor, nn

CONFIG = GroupDRO(
    data="none", epochs=3, ratio=0.3, batch=24, groups_per_batch=4, hidden=(7,), evaluate_batch=50
)
SONEX = Method("sonex", 0.05, "momentum", settings={"smoothing": 0.1, "gamma": 0.5})
METHODS = {
    "sonex": SONEX,
    "sonex-adam": dataclasses.replace(SONEX, update="adam", lr=0.01, weight_decay=0.01),
    "sonx": Method("sonx", 0.05, "sgd", settings={"gamma": 0.5, "correction": 0.1}),
    "alexr2": Method(
        "alexr2", 0.05,
        settings={"smoothing": 0.1, "nu": 0.1, "eta": 0.05, "inner_steps": 3},
    ),
    "ooa": Method("ooa", 0.05, "sgd", settings={"step": 1.0, "plain": True}),
    "ooa-cvar": Method("ooa", 0.05, "sgd", settings={"step": 1.0}),
    "ooa-euclidean": Method("ooa", 0.05, "sgd", settings={"step": 0.1, "geometry": "euclidean"}),
    "uniform": Method("uniform", 0.05, "sgd"),
    "erm": Method("erm", 0.05, "sgd"),
}  # fmt: skip
SIZES = (60, 50, 40, 30, 20, 10)
DIM = 5


class OneByOne:
    """Samples that are not in one tensor, as image files are."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> Tensor:
        return self.values[row]


def data(seed: int = 0) -> tuple[Tensor, dict[str, GroupedPart]]:
    """210 vectors in 6 groups whose boundary turns with the group; three classes."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    values = torch.randn(len(group), DIM, generator=generator)
    angle = group * 0.4
    score = values[:, 0] * angle.cos() + values[:, 1] * angle.sin()
    label = (score > -0.5).long() + (score > 0.5).long()
    names = [f"group {index}" for index in range(len(SIZES))]
    shown = group // 3
    rows = cut_within_groups(group, seed)
    parts = {
        name: part(own, label, group, names, shown, ("large", "small"))
        for name, own in rows.items()
    }
    return values, parts


def training(
    method: Method | str = "sonex",
    seed: int = 0,
    *,
    one_by_one: bool = False,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    summary: str = "worst",
    **changes: Any,
) -> GroupDROTraining:
    """A training from its first step."""
    config = dataclasses.replace(CONFIG, **changes)
    values, parts = data()
    values = values.to(dtype)
    samples: Samples = OneByOne(values) if one_by_one else Vectors(values)
    torch.manual_seed(seed)
    if model is None:
        model = Classifier(None, DIM, config.hidden, 3).to(dtype)
    own = METHODS[method] if isinstance(method, str) else method
    device = torch.device("cpu")
    return GroupDROTraining(config, own, seed, model, samples, parts, summary, device)
