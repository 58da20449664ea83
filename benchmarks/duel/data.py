"""Adult and COMPAS as numbers: features, label and group, without pandas.

The files are looked for in the folder that the environment variable `FCCO_DATA` names, plain or
gzipped, under any of the names listed in `FILES`.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

import numpy as np

__all__ = ["FILES", "MissingData", "Table", "adult", "compas", "encode", "load"]

VARIABLE = "FCCO_DATA"
FILES = {
    "adult": ("adult.data",),
    "compas": ("compas_two_years_deidentified.csv", "compas-scores-two-years.csv"),
}

ADULT_COLUMNS: list[str] = [
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
]
ADULT_NUMERIC = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
ADULT_CATEGORICAL = (
    *("workclass", "education", "marital-status", "occupation", "relationship", "race", "sex"),
    "native-country",
)
COMPAS_NUMERIC = (
    *("age", "juv_fel_count", "decile_score", "juv_misd_count", "priors_count"),
    *("v_decile_score", "decile_score.1", "days_in_jail"),
)
COMPAS_CATEGORICAL = ("race", "c_charge_degree")

Row = dict[str, str]


class MissingData(RuntimeError):
    """A data file that is not there, with what to do about it."""


@dataclass(frozen=True)
class Table:
    """Standardised features (n, d), labels and groups (n,) of 0 and 1."""

    features: np.ndarray
    label: np.ndarray
    group: np.ndarray


def load(name: str) -> Table:
    """The training part of `"adult"` or `"compas"`."""
    path = _find(name)
    with _open(path) as lines:
        return adult(lines) if name == "adult" else compas(lines)


def adult(lines: Iterable[str]) -> Table:
    """UCI Adult: 5 numbers and 8 one-hot columns, as Vogel et al.; group: male; label: > 50K."""
    cells = csv.reader(lines, skipinitialspace=True)
    rows: list[Row] = [
        dict(zip(ADULT_COLUMNS, cell, strict=True))
        for cell in cells
        if len(cell) == len(ADULT_COLUMNS)  # not the empty last line, nor the test file's comment
    ]
    features = encode(rows, ADULT_NUMERIC, ADULT_CATEGORICAL)
    label = np.array([row["income"].startswith(">50K") for row in rows])
    group = np.array([row["sex"] == "Male" for row in rows])
    return Table(features, label.astype(np.int64), group.astype(np.int64))


def compas(lines: Iterable[str], train_share: float = 0.8) -> Table:
    """COMPAS, ProPublica's filter, a random part for training; group: Caucasian.

    The label is a new arrest within two years. The rest of the rows is for tests, and no statistic
    of it is used.
    """
    rows = [row for row in csv.DictReader(lines) if _kept(row)]
    order = np.random.RandomState(42).permutation(len(rows))
    rows = [rows[k] for k in order[: round(train_share * len(rows))]]
    for row in rows:
        row["days_in_jail"] = str(_days(row["c_jail_in"], row["c_jail_out"]))
    features = encode(rows, COMPAS_NUMERIC, COMPAS_CATEGORICAL)
    label = np.array([row["two_year_recid"] == "1" for row in rows])
    group = np.array([row["race"] == "Caucasian" for row in rows])
    return Table(features, label.astype(np.int64), group.astype(np.int64))


def encode(rows: Sequence[Row], numeric: Sequence[str], categorical: Sequence[str]) -> np.ndarray:
    """Numbers, then one column per category; every column with mean 0 and deviation 1."""
    columns = [np.array([float(row[name]) for row in rows]) for name in numeric]
    for name in categorical:
        values = np.array([row[name] for row in rows])
        columns += [(values == value).astype(np.float64) for value in np.unique(values)]
    table = np.stack(columns, axis=1)
    deviation = table.std(axis=0)
    return (table - table.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)


def _kept(row: Row) -> bool:
    """ProPublica's filter: the score belongs to the charge, and the outcome is known."""
    days = row["days_b_screening_arrest"]
    return (
        days != ""
        and abs(float(days)) <= 30
        and row["is_recid"] != "-1"
        and row["c_charge_degree"] != "O"
        and row["score_text"] not in ("", "N/A")
    )


def _days(start: str, end: str) -> float:
    """Whole days in jail, 0 when a date is missing."""
    if not start or not end:
        return 0.0
    form = "%Y-%m-%d %H:%M:%S"
    return float((datetime.strptime(end, form) - datetime.strptime(start, form)).days)


def _find(name: str) -> Path:
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise MissingData(
            f"`{name}` needs data: set the environment variable {VARIABLE} to a folder that holds "
            f"{' or '.join(FILES[name])} (plain or .gz)."
        )
    for file in FILES[name]:
        for path in (Path(folder) / file, Path(folder) / f"{file}.gz"):
            if path.exists():
                return path
    raise MissingData(
        f"`{name}` needs {' or '.join(FILES[name])} (plain or .gz) in the folder that {VARIABLE} "
        "names, but none of them is there."
    )


def _open(path: Path) -> IO[str]:
    return gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
