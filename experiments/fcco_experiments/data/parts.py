"""What the fairness task trains on: features, label and group, in three parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from fcco._checks import in_interval, integer

__all__ = ["Encoder", "FairnessData", "Part", "Standardisation", "assemble", "stratified"]

Columns = Mapping[str, Sequence[str]]


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

    def cells(self) -> np.ndarray:
        """How many rows each cell has: (2, 2) counts, group by label."""
        return np.bincount(self._cell(), minlength=4).reshape(2, 2)

    def rows(self, index: np.ndarray) -> Part:
        """These rows, in this order."""
        return Part(self.features[index], self.label[index], self.group[index])

    def _cell(self) -> np.ndarray:
        return 2 * self.group + self.label


@dataclass(frozen=True, eq=False)
class Standardisation:
    r"""Columns with mean 0 and deviation 1 on the rows it was fitted to.

    .. math::
        x_j \mapsto \frac{x_j - \mu_j}{\sigma_j}, \qquad \sigma_j = 1 \text{ for a constant column}
    """

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def fit(cls, features: np.ndarray) -> Self:
        """The mean and the deviation (divided by n) of each column."""
        # Not `deviation > 0`: a rounded mean leaves a constant column with about 1e-17.
        constant = (features == features[:1]).all(axis=0)
        return cls(features.mean(axis=0), np.where(constant, 1.0, features.std(axis=0)))

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Standardised columns, computed in float64 and rounded to float32."""
        return ((features - self.mean) / self.deviation).astype(np.float32)


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
        standardisation: what was applied to the columns, fitted on `train` alone.
        fingerprint: sha256 of all the arrays, to recognise the data that a checkpoint belongs to.
    """

    name: str
    train: Part
    validation: Part | None
    test: Part
    feature_names: tuple[str, ...]
    group_names: tuple[str, str]
    standardisation: Standardisation
    fingerprint: str

    def parts(self) -> dict[str, Part]:
        """The parts that there are, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}


@dataclass(frozen=True)
class Encoder:
    """Numbers as they are, then one column of 0 and 1 for each category, sorted by name.

    A category that was not there when it was fitted gives zeros in all columns of its name.

    Args:
        numeric: names of columns that hold numbers.
        categories: for each other column its name and its values.
    """

    numeric: tuple[str, ...]
    categories: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def fit(cls, columns: Columns, numeric: Sequence[str], categorical: Sequence[str]) -> Self:
        """Take the categories that occur in the columns."""
        found = tuple((name, tuple(sorted(set(columns[name])))) for name in categorical)
        return cls(tuple(numeric), found)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """One for each column of the result."""
        pairs = ((name, value) for name, values in self.categories for value in values)
        return (*self.numeric, *(f"{name}={value}" for name, value in pairs))

    def __call__(self, columns: Columns) -> np.ndarray:
        """Float64 features (n, d)."""
        rows = len(columns[self.numeric[0]])
        table = np.zeros((rows, len(self.feature_names)))
        for place, name in enumerate(self.numeric):
            table[:, place] = [float(value) for value in columns[name]]
        start = len(self.numeric)
        for name, values in self.categories:
            index = {value: place for place, value in enumerate(values)}
            places = np.array([index.get(value, -1) for value in columns[name]])
            known = places >= 0
            table[known.nonzero()[0], start + places[known]] = 1.0
            start += len(values)
        return table


def stratified(part: Part, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split rows so that each cell (group, label) gives the same share.

    The cells are taken in the order (0, 0), (0, 1), (1, 0), (1, 1); of a cell with n rows the
    first `round(share * n)` of `numpy.random.RandomState(seed).permutation(rows)` are set aside
    (one generator for all cells; numpy promises that its stream never changes).

    Args:
        part: the rows.
        share: of the rows to set aside, in [0, 1).
        seed: of the permutations.

    Returns:
        The rows that stay and those set aside, both in the order of the file.

    Raises:
        ValueError: when a cell would have no row on one of the sides.
    """
    in_interval("stratified", "share", share, 0, 1, open_high=True)
    integer("stratified", "seed", seed, 0)
    if share == 0:
        return np.arange(len(part)), np.arange(0)
    random = np.random.RandomState(seed)
    aside = np.zeros(len(part), dtype=bool)
    cell = part._cell()
    for number in range(4):
        rows = (cell == number).nonzero()[0]
        taken = round(share * len(rows))
        if not 0 < taken < len(rows):
            raise ValueError(
                f"`stratified(share={share})` leaves no row of group {number // 2}, label "
                f"{number % 2} on one of the sides: there are {len(rows)}. Take another share, or "
                "0 for no validation part."
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
    validation: float,
    seed: int,
) -> FairnessData:
    """Set the validation part aside, standardise by what is left, take the fingerprint.

    Args:
        name: of the data set.
        train: official training rows, features in float64.
        test: test rows, features in float64.
        feature_names: one for each column.
        group_names: of group 0 and of group 1.
        validation: share of the training rows to set aside, see `stratified`.
        seed: of that split.
    """
    stay, aside = stratified(train, validation, seed)
    scale = Standardisation.fit(train.features[stay])

    def scaled(part: Part) -> Part:
        return Part(scale(part.features), part.label.astype(np.int64), part.group.astype(np.int64))

    kept, tested = scaled(train.rows(stay)), scaled(test)
    held = scaled(train.rows(aside)) if len(aside) else None
    parts = [kept, tested] if held is None else [kept, held, tested]
    names = tuple(feature_names)
    return FairnessData(name, kept, held, tested, names, group_names, scale, _fingerprint(parts))


def _fingerprint(parts: Sequence[Part]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for array in (part.features, part.label, part.group):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
