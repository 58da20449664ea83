"""Features, a binary label and two groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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

    def rows(self, index: np.ndarray) -> Part:
        """These rows, in this order."""
        return Part(self.features[index], self.label[index], self.group[index])


@dataclass(frozen=True, eq=False)
class FairnessData:
    """A data set with one binary label and two groups.

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


def stratified(part: Part, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split rows so that each cell (group, label) gives the same share.

    The cells are taken in the order (0, 0), (0, 1), (1, 0), (1, 1); of a cell with n rows the
    first `round(share * n)` of `numpy.random.RandomState(seed).permutation(rows)` are set aside
    (one generator for all cells; numpy promises that its stream never changes).

    Returns:
        The rows that stay and those set aside, both in the order of the file.

    Raises:
        ValueError: when a cell would have no row on one of the sides.
    """
    if not 0 <= share < 1:
        raise ValueError(f"`stratified(share=...)` must be in [0, 1) but is: {share}.")
    if share == 0:
        return np.arange(len(part)), np.arange(0)
    random = np.random.RandomState(seed)
    aside = np.zeros(len(part), dtype=bool)
    cell = 2 * part.group + part.label
    for number in range(4):
        rows = (cell == number).nonzero()[0]
        taken = round(share * len(rows))
        if not 0 < taken < len(rows):
            raise ValueError(
                f"A share of {share} leaves no row of group {number // 2}, label {number % 2} on "
                f"one of the sides: there are {len(rows)}. Take another share, or 0 for no "
                "validation part."
            )
        aside[random.permutation(rows)[:taken]] = True
    return (~aside).nonzero()[0], aside.nonzero()[0]


def assemble(
    name: str,
    train: Part,
    test: Part,
    feature_names: Sequence[str],
    group_names: tuple[str, str],
    *,
    validation: float | Part,
    seed: int,
) -> FairnessData:
    r"""Set the validation part aside, standardise by what is left, take the fingerprint.

    .. math::
        x_j \mapsto \frac{x_j - \mu_j}{\sigma_j}, \qquad \sigma_j = 1 \text{ for a constant column}

    Args:
        name: of the data set.
        train: official training rows, features in float64.
        test: test rows, features in float64.
        feature_names: one for each column.
        group_names: of group 0 and of group 1.
        validation: share of the training rows to set aside, see `stratified`; or these rows.
        seed: of that split.
    """
    if isinstance(validation, Part):
        aside = validation
    else:
        stay, rows = stratified(train, validation, seed)
        train, aside = train.rows(stay), train.rows(rows)
    # Not `deviation > 0`: a rounded mean leaves a constant column with about 1e-17.
    constant = (train.features == train.features[:1]).all(axis=0)
    mean, deviation = train.features.mean(axis=0), train.features.std(axis=0)
    deviation = np.where(constant, 1.0, deviation)

    def scaled(part: Part) -> Part:
        features = ((part.features - mean) / deviation).astype(np.float32)
        return Part(features, part.label.astype(np.int64), part.group.astype(np.int64))

    parts = (scaled(train), scaled(aside) if len(aside) else None, scaled(test))
    arrays = [array for part in parts if part for array in (part.features, part.label, part.group)]
    mark = digest(*(part for array in arrays for part in (array.shape, array.tobytes())))
    return FairnessData(name, *parts, tuple(feature_names), group_names, mark)
