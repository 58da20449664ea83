"""Real data on fixed features, and the metrics: those of the task x-risk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from fcco_experiments.tasks.x_risk import data
from fcco_experiments.tasks.x_risk.training import list_figures, two_way_partial_auc
from sklearn.metrics import average_precision_score
from torch import Tensor

MAX_FPR = 0.3  # of the one-way partial AUC
TWO_WAY = {"max_fpr": 0.5, "min_tpr": 0.5}
BINARY, LISTS = ("AP", "pAUC", "tpAUC"), ("NDCG@5", "NDCG@10")
DATA = {  # the name of the data, and another label than its usual one
    "hiv": ("hiv", ""),
    "toxicity": ("toxicity", ""),
    "bald": ("celeba", "Bald"),
    "gray_hair": ("celeba", "Gray_Hair"),
    "ranking": ("ranking", ""),
}


@dataclass(frozen=True)
class Part:
    """Rows of one part of the data.

    Attributes:
        x: features.
        y: labels 0 and 1, or relevance.
        query: the query of each row in ranking, numbered from 0.
    """

    x: Tensor
    y: Tensor
    query: Tensor | None = None


Problem = dict[str, Part]
"""The parts `train`, `validation` and `test`."""


def load(name: str, seed: int = 0) -> Problem:
    """A data set by its name.

    Args:
        name: a key of `DATA`.
        seed: of the parts of faces, which have no custom: 60, 20 and 20 % of each class. The
            others are split by scaffold, officially, or by query.
    """
    parts = _read(name)
    return standardised(split(parts, seed) if DATA[name][0] == "celeba" else parts)


@cache
def _read(name: str) -> dict[str, data.Part]:
    own, label = DATA[name]
    return data.load(own, label=label)


def split(parts: dict[str, data.Part], seed: int) -> dict[str, data.Part]:
    """The rows of all parts in three new parts."""
    x, y = (np.concatenate([getattr(p, k) for p in parts.values()]) for k in ("features", "label"))
    generator, chosen = np.random.default_rng(seed), {part: [] for part in parts}
    for value in (0, 1):
        rows = generator.permutation(np.flatnonzero(y == value))
        cuts = [len(rows) * 6 // 10, len(rows) * 8 // 10]
        for own, some in zip(chosen.values(), np.split(rows, cuts), strict=True):
            own.append(some)
    rows = {part: np.concatenate(some) for part, some in chosen.items()}
    return {part: data.Part(x[own], y[own]) for part, own in rows.items()}


def standardised(parts: dict[str, data.Part]) -> Problem:
    """As tensors; features by mean and deviation of the training rows, fingerprints as they are."""
    x = torch.from_numpy(parts["train"].features.astype(np.float32))
    mean, scale = torch.zeros(1), torch.ones(1)
    if not ((x == 0) | (x == 1)).all():
        mean, scale = x.mean(0), x.std(0)
        scale[scale == 0] = 1

    def part(own: data.Part) -> Part:
        query = own.query
        ids = None if query is None else torch.from_numpy(np.unique(query, return_inverse=True)[1])
        x, y = (torch.from_numpy(each.astype(np.float32)) for each in (own.features, own.label))
        return Part((x - mean) / scale, y, ids)

    return {name: part(own) for name, own in parts.items()}


def fill(values: Tensor, query: Tensor, empty: float) -> Tensor:
    """One row per query, with `empty` after the last value of the query."""
    order, counts = torch.argsort(query, stable=True), torch.bincount(query)
    place = torch.arange(len(query)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    table = torch.full((len(counts), int(counts.max())), empty, dtype=values.dtype)
    return table.index_put((query[order], place), values[order])


def metrics_of(name: str) -> tuple[str, ...]:
    """The metrics that are reported on a data set."""
    return LISTS if name == "ranking" else BINARY


def figures(part: Part, scores: Tensor) -> dict[str, float]:
    """All metrics of a part; NaN where a score is not finite."""
    pair = part.y.numpy(), scores.numpy()
    if not scores.isfinite().all():
        return dict.fromkeys((*BINARY, *LISTS), math.nan)
    if part.query is not None:
        rows = (list_figures("", *pair, part.query.numpy(), k) for k in (5, 10))
        return {name: row["_ndcg"] for name, row in zip(LISTS, rows, strict=True)}
    found = (
        average_precision_score(*pair),
        two_way_partial_auc(*pair, 0.0, MAX_FPR),  # the plain area, over MAX_FPR
        two_way_partial_auc(*pair, **TWO_WAY),
    )
    return dict(zip(BINARY, map(float, found), strict=True))
