"""Files in the exact layout of Adult and COMPAS, from a seed; other checksums in cards."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
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


def adult_text(rows: int, random: np.random.RandomState, end: str) -> str:
    """Rows in the order of the file; every tenth comes from the rare country if an end is given."""
    rich = random.rand(rows) < 0.4
    frame = pd.DataFrame({
        "age": random.randint(17, 90, rows) + 5 * rich,
        "workclass": "",
        "fnlwgt": random.randint(10_000, 400_000, rows),
        "education": "",
        "education-num": random.randint(1, 17, rows),
        **dict.fromkeys(("marital-status", "occupation", "relationship", "race"), ""),
        "sex": np.where(random.rand(rows) < 0.6, "Male", "Female"),
        "gain": random.randint(1, 99_999, rows) * (random.rand(rows) < 0.1),
        "loss": random.randint(1, 4000, rows) * (random.rand(rows) < 0.1),
        "hours": random.randint(10, 60, rows),
        "native-country": "",
        "income": np.where(rich, f">50K{end}", f"<=50K{end}"),
    })  # fmt: skip
    for name, values in ADULT_VALUES.items():
        frame[name] = random.choice(values, rows)
    if end:
        frame.loc[::10, "native-country"] = RARE
    return "".join(", ".join(map(str, row)) + "\n" for row in frame.to_numpy()) + "\n"


def adult_contents(seed: int = 0, rows: int = 300, test_rows: int = 120) -> dict[str, bytes]:
    random = np.random.RandomState(seed)
    train, test = adult_text(rows, random, ""), adult_text(test_rows, random, ".")
    test = f"|1x3 Cross validator\n{test}"
    return {"adult.data": train.encode(), "adult.test": test.encode()}


PERSONAL = ("name", "first", "last", "dob", "c_case_number", "r_case_number", "vr_case_number")
RACES = ("African-American", "Caucasian", "Hispanic", "Other")


def compas_contents(seed: int = 0, rows: int = 400) -> dict[str, bytes]:
    """ProPublica's columns that matter, two of which it has twice, and the same without names."""
    random, number = np.random.RandomState(seed), np.arange(rows).astype(str).astype(object)
    start = pd.Timestamp("2013-01-01") + pd.to_timedelta(random.randint(500_000, size=rows), "min")
    end = start + pd.to_timedelta(random.randint(-600, 80_000, size=rows), "min")
    jailed, score = random.rand(rows) < 0.9, random.randint(1, 11, rows)
    days = np.where(random.rand(rows) < 0.05, "", random.randint(-40, 41, rows).astype(str))
    frame = pd.DataFrame({
        "name": NAME.lower() + " " + number + ", jr",  # the comma makes a quoted cell
        "first": NAME,
        "last": f"Last{NAME}" + number,
        "dob": f"{BIRTH}-04-02",
        "age": random.randint(18, 70, rows),
        "race": random.choice(RACES, rows),
        "juv_fel_count": random.randint(3, size=rows),
        "decile_score": score,
        "juv_misd_count": random.randint(3, size=rows),
        "priors_count": random.randint(20, size=rows),
        "days_b_screening_arrest": days,
        "c_jail_in": np.where(jailed, start.astype(str), ""),
        "c_jail_out": np.where(jailed, end.astype(str), ""),
        "c_case_number": CASE + number,
        "c_charge_degree": random.choice(["F", "M", "M", "O"], rows),
        "is_recid": random.choice(["0", "1", "1", "-1"], rows),
        "r_case_number": f"{CASE}R" + number,
        "vr_case_number": "",
        "decile_score.1": score,
        "score_text": random.choice(["Low", "Medium", "High", "N/A"], rows),
        "v_decile_score": random.randint(1, 11, rows),
        "priors_count.1": random.randint(20, size=rows),  # not the one that is used
        "two_year_recid": random.randint(2, size=rows),
    })  # fmt: skip
    raw = frame.to_csv(index=False, header=[name.removesuffix(".1") for name in frame])
    # pandas writes a column of integers with gaps as floats
    floats = pd.Series(days).where(days == "", days.astype(object) + ".0")
    plain = frame.drop(columns=list(PERSONAL)).assign(days_b_screening_arrest=floats)
    return {
        "compas-scores-two-years.csv": raw.replace("\n", "\r\n").encode(),
        "compas_two_years_deidentified.csv": plain.to_csv(index=False).encode(),
    }


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
