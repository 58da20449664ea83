"""Real data on fixed features, and the metrics: all by scikit-learn or from its ROC curve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_FPR = 0.3  # of the one-way partial AUC
TWO_WAY = {"max_fpr": 0.5, "min_tpr": 0.5}
PARTS = ("train", "val", "test")
DATA = {  # name: the reader's name, another label than its usual one, column of it in a .npz file
    "hiv": ("hiv", "", 0),
    "toxicity": ("toxicity", "", 0),
    "bald": ("celeba", "Bald", 0),
    "gray_hair": ("celeba", "Gray_Hair", 1),
    "ranking": ("ranking", "", 0),
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


@dataclass(frozen=True)
class Problem:
    """A data set in three parts."""

    train: Part
    val: Part
    test: Part

    @property
    def ranking(self) -> bool:
        """Whether rows belong to queries."""
        return self.train.query is not None


def load(name: str, arrays: Path | None = None, seed: int = 0) -> Problem:
    """A data set by its name, from the readers of `fcco_experiments` or a folder of .npz files.

    Args:
        name: its name.
        arrays: the folder, with `train_x`, `train_y`, ... in each file; fingerprints may be packed.
        seed: of the parts of faces, which have no custom: 60, 20 and 20 % of each class. The
            others are split by scaffold, officially, or by query.
    """
    arrays_of, column = _read(name, arrays)
    return make(split(arrays_of, column, seed) if DATA[name][0] == "celeba" else arrays_of, column)


def split(arrays: dict[str, NDArray], column: int, seed: int) -> dict[str, NDArray]:
    """The rows of all parts in three new parts."""
    x, y = (np.concatenate([arrays[f"{part}_{k}"] for part in PARTS]) for k in "xy")
    label = y.reshape(len(y), -1)[:, column]
    generator, chosen = np.random.default_rng(seed), {part: [] for part in PARTS}
    for value in (0, 1):
        rows = generator.permutation(np.flatnonzero(label == value))
        for part, some in zip(
            PARTS, np.split(rows, [len(rows) * 6 // 10, len(rows) * 8 // 10]), strict=True
        ):
            chosen[part].append(some)
    rows = {part: np.concatenate(some) for part, some in chosen.items()}
    return {
        f"{part}_{k}": table[rows[part]]
        for part in PARTS
        for k, table in zip("xy", (x, y), strict=True)
    }


@cache
def _read(name: str, arrays: Path | None) -> tuple[dict[str, NDArray], int]:
    """All arrays of a data set, and the column of the label."""
    own, label, column = DATA[name]
    if arrays is not None:
        with np.load(arrays / f"{own}.npz") as file:
            found = {key: file[key] for key in file.files}
        packed = found["train_x"].dtype == np.uint8 and found["train_x"].max() > 1
        if own == "hiv" and packed:
            found |= {f"{part}_x": np.unpackbits(found[f"{part}_x"], axis=1) for part in PARTS}
        return found, column
    from fcco_experiments.data import MissingData
    from fcco_experiments.tasks.x_risk import data  # pyright: ignore[reportMissingImports]

    try:
        parts = data.load(own, label=label)
    except MissingData as reason:
        raise FileNotFoundError(str(reason)) from reason
    found = {}
    for part, rows in parts.items():
        short = "val" if part == "validation" else part
        found |= {f"{short}_x": rows.features, f"{short}_y": rows.label}
        if rows.query is not None:
            found[f"{short}_q"] = rows.query
    return found, 0


def make(arrays: dict[str, NDArray], column: int = 0) -> Problem:
    """From `train_x`, `train_y`, `val_x` and so on, in ranking also `train_q`."""

    def part(name: str) -> Part:
        y = arrays[f"{name}_y"].reshape(len(arrays[f"{name}_x"]), -1)[:, column]
        query = None
        if f"{name}_q" in arrays:
            query = torch.from_numpy(np.unique(arrays[f"{name}_q"], return_inverse=True)[1])
        x = torch.from_numpy(arrays[f"{name}_x"].astype(np.float32))
        return Part((x - mean) / scale, torch.from_numpy(y.astype(np.float32)), query)

    x = torch.from_numpy(arrays["train_x"].astype(np.float32))
    mean, scale = torch.zeros(1), torch.ones(1)
    if not ((x == 0) | (x == 1)).all():  # the bits of a fingerprint stay bits
        mean, scale = x.mean(0), x.std(0)
        scale[scale == 0] = 1
    return Problem(part("train"), part("val"), part("test"))


def partial_auc(y: Tensor, scores: Tensor, max_fpr: float, min_tpr: float = 0.0) -> float:
    """The area where FPR <= `max_fpr` and TPR >= `min_tpr`, as a share of the largest possible.

    With `min_tpr=0` it is the plain area: `roc_auc_score(max_fpr=...)` of scikit-learn gives the
    same area rescaled such that guessing has 0.5 (McClish).
    """
    from sklearn.metrics import roc_curve

    fpr, tpr, _ = roc_curve(y.numpy(), scores.numpy())
    # The curve has upright pieces; along fpr + tpr it is a function.
    along = fpr + tpr
    cuts = [np.interp(max_fpr, fpr, along), np.interp(min_tpr, tpr, along)]
    points = np.sort(np.concatenate([along, cuts]))
    width = np.interp(points, along, fpr).clip(max=max_fpr)
    height = (np.interp(points, along, tpr) - min_tpr).clip(min=0)
    return float(np.trapezoid(height, width)) / (max_fpr * (1 - min_tpr))


def ndcg(part: Part, scores: Tensor, k: int) -> float:
    """Mean over the queries with a relevant row; gains are 2^relevance - 1."""
    from sklearn.metrics import ndcg_score

    assert part.query is not None
    gains = fill(2**part.y - 1, part.query, 0.0).numpy()
    ranked = fill(scores, part.query, float(scores.min()) - 1).numpy()
    some = gains.sum(1) > 0
    return float(ndcg_score(gains[some], ranked[some], k=k))


def fill(values: Tensor, query: Tensor, empty: float) -> Tensor:
    """One row per query, with `empty` after the last value of the query."""
    order = torch.argsort(query, stable=True)
    counts = torch.bincount(query)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(query)) - starts.repeat_interleave(counts)
    table = torch.full((len(counts), int(counts.max())), empty, dtype=values.dtype)
    return table.index_put((query[order], place), values[order])


def average_precision(part: Part, scores: Tensor) -> float:
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(part.y.numpy(), scores.numpy()))


BINARY: dict[str, Callable[[Part, Tensor], float]] = {
    "AP": average_precision,
    "pAUC": lambda part, scores: partial_auc(part.y, scores, MAX_FPR),
    "tpAUC": lambda part, scores: partial_auc(part.y, scores, **TWO_WAY),
}
RANKING: dict[str, Callable[[Part, Tensor], float]] = {
    "NDCG@5": lambda part, scores: ndcg(part, scores, 5),
    "NDCG@10": lambda part, scores: ndcg(part, scores, 10),
}
METRICS = {**BINARY, **RANKING}


def metrics_of(data: str) -> list[str]:
    """The metrics that are reported on a data set."""
    return list(RANKING if data == "ranking" else BINARY)
