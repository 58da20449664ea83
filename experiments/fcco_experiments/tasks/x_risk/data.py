"""Data sets with a rare class, and lists to rank, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ... import backbones, data
from ...data.grouped import GroupedData
from ...data.sources import Place, Progress

NAMES = ("hiv", "toxicity", "celeba", "ranking")
LABELS = {"celeba": "Bald"}  # another label than that of the card
ROWS = {"toxicity": 60_000}  # computing features of all would take long without a GPU
BACKBONES = {"text": "minilm", "image": "efficientnet-lite0", "vector": "none"}


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a data set.

    Args:
        features: (n, d), float32, not scaled.
        label: (n,) of 0 and 1, or the relevance of each row.
        query: (n,) ids from 0 on, for lists; else None.
    """

    features: np.ndarray
    label: np.ndarray
    query: np.ndarray | None = None


def load(
    name: str,
    *,
    label: str = "",
    seed: int = 0,
    rows: int | None = None,
    folder: Place = None,
    progress: Progress | None = None,
) -> dict[str, Part]:
    """The parts `"train"`, `"validation"` and `"test"` of a data set, with frozen features.

    `hiv` has Morgan fingerprints, `toxicity` features of MiniLM and `celeba` those of
    EfficientNet-lite0; `ranking` has its own. Features are kept in the cache.

    Args:
        name: one of `NAMES`.
        label: another column as the label, such as `Gray_Hair` of `celeba`, which has `Bald`.
        seed: of the split, where the data set has no official one.
        rows: keep about so many, of each part and class its share; 0 keeps all. Unless given,
            60,000 of `toxicity` and all of the others.
        folder: where to look for files first.
        progress: is told about downloads, and how many features are done.
    """
    own = data.load_grouped(
        name, folder, label=label or LABELS.get(name, ""),
        rows=ROWS.get(name, 0) if rows is None else rows, progress=progress,
    )  # fmt: skip
    features = _features(own, "morgan" if name == "hiv" else BACKBONES[own.kind], progress)
    lists = data.card(name).whole_groups
    values = torch.tensor([float(word) for word in own.class_names]) if lists else torch.arange(2)
    return {
        part: Part(
            features[rows.rows.numpy()],
            values[rows.label].numpy(),
            rows.group.numpy() if lists else None,
        )
        for part, rows in own.cut(seed).items()
    }


def _features(own: GroupedData, backbone: str, progress: Progress | None) -> np.ndarray:
    samples = own.samples
    if backbone != "none":
        samples = backbones.features(backbone, own, progress=progress)
    assert isinstance(samples, data.Vectors)
    return samples.values.numpy()
