"""Files in the exact layout of Adult and COMPAS, generated from a seed, and a wheel with them."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import zipfile
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
from fcco_experiments.data import DATA_SETS, DataFile, DataSet, Form, Wheel

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


def form(name: str, content: bytes) -> Form:
    return Form(name, hashlib.sha256(content).hexdigest(), len(content))


@dataclass(frozen=True)
class Generated:
    """Contents by file name, and data sets whose checksums are theirs."""

    contents: dict[str, bytes]
    sets: dict[str, DataSet]

    def write(self, folder: Path, *names: str, compress: bool = False) -> Path:
        """Write these files, all by default."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in names or self.contents:
            content = self.contents[name]
            path = folder / (f"{name}.gz" if compress else name)
            path.write_bytes(gzip.compress(content) if compress else content)
        return folder

    def files(self, name: str) -> tuple[DataFile, ...]:
        return self.sets[name].files

    def wheel(self, folder: Path) -> Path:
        """A folder with a wheel that pip accepts, which carries the files."""
        folder.mkdir(parents=True, exist_ok=True)
        entries = [file for entry in self.sets.values() for file in entry.files]
        wheel = entries[0].wheel
        assert wheel is not None
        info = f"{wheel.package}-{wheel.version}.dist-info"
        with zipfile.ZipFile(
            folder / f"{wheel.package}-{wheel.version}-py3-none-any.whl", "w"
        ) as archive:
            for file in entries:
                archive.writestr(file.member, self.contents[Path(file.member).name])
            for name, content in metadata(wheel).items():
                archive.writestr(f"{info}/{name}", content)
        return folder

    def install(self, folder: Path) -> Path:
        """What pip would leave in site-packages; importing the package raises."""
        entries = [file for entry in self.sets.values() for file in entry.files]
        wheel = entries[0].wheel
        assert wheel is not None
        for file in entries:
            path = folder / file.member
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.contents[path.name])
        (folder / wheel.package / "__init__.py").write_text("raise ImportError('imported')\n")
        info = folder / f"{wheel.package}-{wheel.version}.dist-info"
        info.mkdir()
        for name, content in metadata(wheel).items():
            (info / name).write_text(content)
        return folder


def metadata(wheel: Wheel) -> dict[str, str]:
    return {
        "METADATA": f"Metadata-Version: 2.1\nName: {wheel.package}\nVersion: {wheel.version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }


def generated(seed: int = 0, source: Path | None = None) -> Generated:
    """Small files in the layout of Adult and COMPAS.

    Args:
        seed: of all values.
        source: a folder that plays the original source; nothing is there until `write`.
    """
    contents = {**adult_contents(seed), **compas_contents(seed)}

    def url(name: str) -> str:
        return "" if source is None else (source / name).as_uri()

    adult = tuple(
        replace(file, form=form(file.name, contents[file.name]), url=url(file.name))
        for file in DATA_SETS["adult"].files
    )
    (file,) = DATA_SETS["compas"].files
    assert file.reduce is not None
    raw = contents["compas-scores-two-years.csv"]
    compas = replace(
        file,
        form=form(file.name, file.reduce(raw)),
        others=tuple(form(other.name, contents[other.name]) for other in file.others),
        url=url("compas-scores-two-years.csv"),
    )
    sets = {
        "adult": replace(DATA_SETS["adult"], files=adult),
        "compas": replace(DATA_SETS["compas"], files=(compas,)),
    }
    return Generated(contents, sets)
