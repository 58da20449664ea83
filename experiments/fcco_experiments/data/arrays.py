"""Data of a binary label and two groups as arrays, standardised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .grouped import GroupedData, Vectors
from .sources import digest


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a data set.

    Args:
        features: (n, d) numbers.
        label: (n,) of 0 and 1, int64.
        group: (n,) of 0 and 1, int64.
    """

    features: np.ndarray
    label: np.ndarray
    group: np.ndarray

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True, eq=False)
class FairnessData:
    """A data set with one binary label and two groups, split by a seed.

    Args:
        name: of the data set.
        train: rows to train on.
        validation: rows for choices; `None` when no share was set aside.
        test: rows for the last figures.
        feature_names: one for each column; `column=value` for a category.
        group_names: of group 0 and of group 1.
        fingerprint: sha256 of all the arrays, to recognise the data that a checkpoint belongs to.
    """

    name: str
    train: Part
    validation: Part | None
    test: Part
    feature_names: tuple[str, ...]
    group_names: tuple[str, str]
    fingerprint: str

    def parts(self) -> dict[str, Part]:
        """The parts that there are, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}


def arrays(data: GroupedData, seed: int) -> FairnessData:
    r"""The parts of a seed, with features standardised by the training rows.

    .. math::
        x_j \mapsto \frac{x_j - \mu_j}{\sigma_j}, \qquad \sigma_j = 1 \text{ for a constant column}

    A category that test rows alone have is left out.
    """
    assert isinstance(data.samples, Vectors)
    values, cut = data.samples.values.numpy(), data.cut(seed)
    seen = np.concatenate([own.rows.numpy() for name, own in cut.items() if name != "test"])
    there = (values[seen] != 0).any(axis=0)
    columns = [k for k, name in enumerate(data.feature_names) if there[k] or "=" not in name]
    values = values if len(columns) == values.shape[1] else values[:, columns]
    train = values[cut["train"].rows.numpy()]
    # Not `deviation > 0`: a rounded mean leaves a constant column with about 1e-17.
    constant, mean = (train == train[:1]).all(axis=0), train.mean(axis=0)
    deviation = np.where(constant, 1.0, train.std(axis=0))
    parts = {
        name: Part(
            ((values[own.rows.numpy()] - mean) / deviation).astype(np.float32),
            own.label.numpy(),
            own.group.numpy(),
        )
        for name, own in cut.items()
    }
    every = [array for part in parts.values() for array in (part.features, part.label, part.group)]
    mark = digest(*(part for array in every for part in (array.shape, array.tobytes())))
    names, (first, second) = data.feature_names, cut["train"].group_names
    return FairnessData(
        data.name, parts["train"], parts.get("validation"), parts["test"],
        tuple(names[k] for k in columns), (first, second), mark,
    )  # fmt: skip
