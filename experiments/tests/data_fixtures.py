"""Files in the exact layout of Adult and COMPAS, from a seed; other checksums in cards."""

from __future__ import annotations

import csv
import gzip
import io
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
from fcco_experiments import data
from fcco_experiments.data import cards
from fcco_experiments.data.sources import checksum, tar_checksum

ADULT_VALUES = {
    "workclass": ("Private", "State-gov", "?", "Self-emp-inc"),
    "education": ("Bachelors", "HS-grad", "11th", "Masters"),
    "marital-status": ("Never-married", "Divorced", "Married-civ-spouse"),
    "occupation": ("Sales", "?", "Tech-support"),
    "relationship": ("Husband", "Wife", "Own-child"),
    "race": ("White", "Black", "Other"),
    "native-country": ("United-States", "?", "Cuba", "Holand-Netherlands"),
}
RARE = "Laos"  # a country that only the generated test file has
NAME = "Zebulon"
BIRTH = "1901"
CASE = "CASE"


def adult_lines(rows: int, random: np.random.RandomState, rare: bool) -> list[str]:
    lines = []
    for number in range(rows):
        male, rich = random.rand() < 0.6, random.rand() < 0.4
        pick = {name: values[random.randint(len(values))] for name, values in ADULT_VALUES.items()}
        if rare and number % 10 == 0:
            pick["native-country"] = RARE
        cells = [
            random.randint(17, 90) + 5 * rich,
            pick["workclass"],
            random.randint(10_000, 400_000),
            pick["education"],
            random.randint(1, 17),
            pick["marital-status"],
            pick["occupation"],
            pick["relationship"],
            pick["race"],
            "Male" if male else "Female",
            random.randint(1, 99_999) if random.rand() < 0.1 else 0,
            random.randint(1, 4000) if random.rand() < 0.1 else 0,
            random.randint(10, 60),
            pick["native-country"],
            ">50K" if rich else "<=50K",
        ]
        lines.append(", ".join(map(str, cells)))
    return lines


def adult_contents(seed: int = 0, rows: int = 300, test_rows: int = 120) -> dict[str, bytes]:
    random = np.random.RandomState(seed)
    train = adult_lines(rows, random, rare=False)
    test = adult_lines(test_rows, random, rare=True)
    return {
        "adult.data": "".join(f"{line}\n" for line in [*train, ""]).encode(),
        "adult.test": "".join(
            f"{line}\n" for line in ["|1x3 Cross validator", *(f"{row}." for row in test), ""]
        ).encode(),
    }


# ProPublica's header, down to the names that it has twice; shortened where nothing is read.
COMPAS_HEADER = (
    *("id", "name", "first", "last", "compas_screening_date", "sex", "dob", "age", "race"),
    *("juv_fel_count", "decile_score", "juv_misd_count", "juv_other_count", "priors_count"),
    *("days_b_screening_arrest", "c_jail_in", "c_jail_out", "c_case_number", "c_charge_degree"),
    *("c_charge_desc", "is_recid", "r_case_number", "vr_case_number", "decile_score"),
    *("score_text", "v_decile_score", "priors_count", "two_year_recid"),
)
PERSONAL = ("name", "first", "last", "dob", "c_case_number", "r_case_number", "vr_case_number")
RACES = ("African-American", "Caucasian", "Hispanic", "Other")


def compas_contents(seed: int = 0, rows: int = 400) -> dict[str, bytes]:
    """The raw file and one without names: the same rows."""
    random = np.random.RandomState(seed)
    table = []
    for number in range(rows):
        start = datetime(2013, 1, 1) + timedelta(minutes=int(random.randint(500_000)))
        end = start + timedelta(minutes=int(random.randint(-600, 80_000)))
        jailed, score = random.rand() < 0.9, int(random.randint(1, 11))
        days = "" if random.rand() < 0.05 else str(random.randint(-40, 41))
        table.append(
            [
                number + 1,
                f"{NAME.lower()} {number}, jr",  # the comma makes a quoted cell
                NAME,
                f"Last{NAME}{number}",
                "2013-08-14",
                "Male",
                f"{BIRTH}-04-{1 + number % 28:02d}",
                random.randint(18, 70),
                RACES[random.randint(4)],
                random.randint(3),
                score,
                random.randint(3),
                0,
                random.randint(20),
                days,
                f"{start:%Y-%m-%d %H:%M:%S}" if jailed else "",
                f"{end:%Y-%m-%d %H:%M:%S}" if jailed else "",
                f"{CASE}{number}",
                ("F", "M", "M", "O")[random.randint(4)],
                "Battery, simple",
                ("0", "1", "1", "-1")[random.randint(4)],
                f"{CASE}R{number}",
                "",
                score,
                ("Low", "Medium", "High", "N/A")[random.randint(4)],
                random.randint(1, 11),
                random.randint(20),  # the second priors_count: not the one that is used
                random.randint(2),
            ]
        )
    kept = [place for place, name in enumerate(COMPAS_HEADER) if name not in PERSONAL]
    names: list[str] = []
    for place in kept:
        name = COMPAS_HEADER[place]
        names.append(f"{name}.1" if name in names else name)
    days = COMPAS_HEADER.index("days_b_screening_arrest")
    plain = []
    for row in table:
        # pandas writes a column of integers with gaps as floats
        cells = [*row[:days], f"{row[days]}.0" if row[days] else "", *row[days + 1 :]]
        plain.append([cells[place] for place in kept])
    return {
        "compas-scores-two-years.csv": _csv([COMPAS_HEADER, *table], "\r\n"),
        "compas_two_years_deidentified.csv": _csv([names, *plain], "\n"),
    }


def _csv(rows: list, end: str) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows(rows)
    return text.getvalue().encode()


def change_card(monkeypatch, name: str, **contents: bytes) -> None:
    """Let the files of a card have these contents."""
    card, all_cards = data.card(name), data.card

    def changed(file: data.DataFile) -> data.DataFile:
        content = contents.get(file.name)
        if content is None:
            return file
        own = tar_checksum(file.name, content) if file.name.endswith(".tar") else checksum(content)
        return replace(file, sha256=own, others={})

    copies = tuple(replace(copy, files=tuple(map(changed, copy.files))) for copy in card.copies)
    new = replace(card, copies=copies)
    for module in (cards, data):
        monkeypatch.setattr(
            module, "card", lambda asked: new if asked == name else all_cards(asked)
        )


def put(folder: Path, name: str, content: bytes, compress: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (f"{name}.gz" if compress else name)
    path.write_bytes(gzip.compress(content) if compress else content)
    return folder
