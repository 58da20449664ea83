"""Data sets with a rare class, and lists to rank, as arrays for code of your own."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from ... import config as configs
from ... import tasks
from ...data.grouped import Vectors
from . import XRiskProblem


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a data set.

    Args:
        features: (n, d), float32, not scaled.
        label: 0 or 1, or the relevance of each row; (n,), float32.
        query: (n,) ids from 0 on, for lists; else None.
    """

    features: np.ndarray
    label: np.ndarray
    query: np.ndarray | None = None


def load(name: str, *, label: str = "", seed: int = 0, rows: int | None = None) -> dict[str, Part]:
    """The parts `"train"`, `"validation"` and `"test"` of a data set, as the task x-risk has them.

    `hiv` has Morgan fingerprints, `toxicity` features of MiniLM and `celeba` those of
    EfficientNet-lite0; `ranking` has its own. Features are kept in the cache.

    Args:
        name: a config of the task.
        label: another column as the label, such as `Gray_Hair` of `celeba`.
        seed: of the split, where the data set has no official one.
        rows: about so many are kept, of each part and class its share; 0 keeps all. As in the
            config unless given.

    Example:
        >>> parts = load("rare-synthetic")
        >>> parts["train"].features.shape, int(parts["test"].label.sum())
        ((3200, 16), 20)
    """
    changes = [f"columns.label={json.dumps(label)}"] if label else []
    changes += [] if rows is None else [f"sample_limit={rows}"]
    config = configs.load(tasks.get("x-risk"), name, overrides=changes)
    problem = XRiskProblem(config)  # type: ignore[arg-type]
    assert isinstance(problem.samples, Vectors)
    return {
        part: Part(
            problem.samples.values[own.rows].numpy(),
            problem.values[own.label].numpy(),
            own.group.numpy() if problem.config.lists else None,
        )
        for part, own in problem.parts(seed).items()
    }
