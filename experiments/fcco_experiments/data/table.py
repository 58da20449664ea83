"""Tables: files of rows and columns, as groups of samples or as features with a binary label."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..config import did_you_mean
from ..task import Columns
from .grouped import (
    PARTS,
    TEST,
    TRAIN,
    VALIDATION,
    ByUser,
    GroupedData,
    Samples,
    Texts,
    Vectors,
    WholeGroups,
    WithinCells,
    WithinGroups,
    cut_within_groups,
    kept,
    rarest_group,
    sampled,
)
from .images import distinct_rows, image_samples, opened
from .sources import WrongData, digest, few, leads_out, members
from .sources import opened as unpacked

TABLES = (".csv", ".tsv", ".parquet")
SPLITS = {
    **dict.fromkeys(("train", "training", "0"), TRAIN),
    **dict.fromkeys(("validation", "val", "valid", "dev", "1"), VALIDATION),
    **dict.fromkeys(("test", "testing", "2"), TEST),
}
MOST_CATEGORIES = 200
LARGEST = float(np.finfo(np.float32).max)
TRUE, FALSE = ("1", "true", "yes"), ("0", "false", "no")

Frame = Any
"""A DataFrame or a Series of pandas."""
Values = Mapping[str, Mapping[str, str]]
"""Of some columns: the values that may occur, in order, each with its name in reports."""


@dataclass(frozen=True)
class Table:
    """Rows of text, and what their images are read from.

    Args:
        where: the file, for errors.
        frame: every cell is text, or missing.
        files: folder of the images, or contents by path.
        size: height and width that images are given; unless given, all must be alike.
    """

    where: str
    frame: Frame
    files: Path | Mapping[str, bytes] | None = None
    size: tuple[int, int] | None = None


def is_table(data: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a file with a table.

    Example:
        >>> is_table("reviews.csv"), is_table("data/reviews.tsv.gz"), is_table("adult")
        (True, True, False)
    """
    return str(data).lower().removesuffix(".gz").endswith(TABLES)


def read_table(
    path: str | os.PathLike[str],
    columns: Columns | None = None,
    size: tuple[int, int] | None = None,
) -> Table:
    """A csv, tsv or parquet file, also .gz; the images of `columns.files` are not read yet."""
    place = Path(path).expanduser()
    if not place.is_file():
        raise WrongData(f"There is no file {place}.")
    files: Path | Mapping[str, bytes] = place.parent
    if columns is not None and columns.files:
        files = Path(columns.files).expanduser()
        if files.is_file():
            files = members(str(files), files.read_bytes())
        elif not files.is_dir():
            raise WrongData(f"`files`: there is no folder or archive {files}.")
    frame = read_frame(place, str(place))
    if not isinstance(frame.index, pd.RangeIndex):  # pandas takes the first cells for names of rows
        raise WrongData(f"{place}: the rows have more cells than the header.")
    return Table(str(place), frame, files, size)


def read_frame(source: Any, where: str, **options: Any) -> Frame:
    """The cells of a file as text: nothing is guessed, `007` and `NA` stay what they are.

    Args:
        source: path or stream.
        where: the file, for errors; its name says what it is.
        options: of `pandas.read_csv`.
    """
    try:
        if where.lower().removesuffix(".gz").endswith(".parquet"):
            frame = pd.read_parquet(source).reset_index(drop=True).rename(columns=str)
            return frame.astype(object).where(frame.notna(), "").map(str).replace("", None)
        settings = {"dtype": str, "keep_default_na": False, "encoding": "utf-8-sig", **options}
        if not isinstance(source, Path):
            return pd.read_csv(source, na_values=[""], **settings)
        settings.setdefault("sep", _separator(source))
        with unpacked(source) as stream:
            names = pd.read_csv(stream, **settings | {"header": None, "nrows": 1, "usecols": None})
        twice = names.loc[0][names.loc[0].duplicated() & (names.loc[0] != "")]
        if len(twice):
            raise WrongData(f"{where} has several columns of one name: {', '.join(twice)}.")
        with unpacked(source) as stream:
            frame = pd.read_csv(stream, na_values=[""], **settings)
        if names.loc[0, 0] == "" and frame.columns[0] == "Unnamed: 0":  # R's and pandas' row names
            frame = frame.iloc[:, 1:]
        return frame
    except WrongData:
        raise
    except ImportError as error:
        raise WrongData(f"{where}: {error} Or write the table as csv.") from error
    except (ValueError, OSError, EOFError) as error:  # pandas' own errors are ValueErrors
        raise WrongData(f"{where} cannot be read as a table: {str(error).strip()}.") from error


def _separator(path: Path) -> str:
    """The separator of a text table: of a .tsv file a tab.

    Those inside quotes do not count. It stands in the first rows as often as in the header; of
    several such, or where there is none, it is the one that stands there most often.
    """
    if path.name.lower().removesuffix(".gz").endswith(".tsv"):
        return "\t"
    with unpacked(path) as stream:
        start = stream.read(1 << 20).decode(errors="replace")
    lines = [line for line in re.sub('"[^"]*"', "", start).splitlines() if line.strip()][:6]

    def fits(separator: str) -> tuple[bool, int]:
        counts = [line.count(separator) for line in lines] or [0]
        return counts[0] > 0 and len(set(counts)) == 1, counts[0]

    return max(",\t;", key=fits)


# --- Columns -------------------------------------------------------------------------------------


def _column(table: Table, role: str, name: str) -> Frame:
    """The cells of a column that must be there, all filled."""
    frame = table.frame
    if name not in frame:
        hint = did_you_mean(name, list(frame.columns))
        raise WrongData(
            f"`{role}`: {table.where} has no column `{name}`{hint} Its columns are "
            f"{few(list(frame.columns), 20)}."
        )
    empty = np.flatnonzero(frame[name].isna())
    if len(empty):
        raise WrongData(
            f"`{role}`: the column `{name}` of {table.where} is empty in {len(empty):,} rows, the "
            f"first is data row {_number(table, empty)}. Fill it in, or leave these rows out."
        )
    return frame[name]


def _number(table: Table, places: np.ndarray) -> int:
    """The number of the first of some rows, counted from 1 in the file."""
    return int(table.frame.index[places[0]]) + 1


def numbers_in(table: Table, role: str, name: str, constant: bool = False) -> np.ndarray:
    """The cells of a column as float64; all must be finite numbers.

    Args:
        table: with the column.
        role: what it is used as, for errors.
        name: of the column.
        constant: whether all may be the same.
    """
    cells = _column(table, role, name)
    parsed: Frame = pd.to_numeric(cells, errors="coerce")
    values = parsed.to_numpy(np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise WrongData(
            f"`{role}`: the column `{name}` of {table.where} must hold finite numbers, but data "
            f"row {_number(table, bad)} has {cells.iloc[bad[0]]}."
        )
    if not constant and len(values) > 1 and (values == values[0]).all():
        raise WrongData(
            f"`{role}`: the column `{name}` of {table.where} is {values[0]:g} in all rows: there "
            "is nothing to compare."
        )
    return values


def coded(
    table: Table, role: str, name: str, values: Mapping[str, str] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Numbers from 0 on for the values of a column, and the name of each number.

    Args:
        table: with the column.
        role: `label` or `group`, for errors.
        name: of the column; `COLUMN=VALUE` gives 1 where it has that value, else 0.
        values: in the order of their numbers, with their names. Unless given they are sorted, as
            numbers if all of them are.
    """
    column, equals, value = name.partition("=")
    if name in table.frame or not equals:
        cells = _plain(_column(table, role, name))
    else:
        own = _plain(_column(table, role, column)) == value
        if not own.any():
            raise WrongData(f"`{role}`: no row of {table.where} has {column} = {value}.")
        cells = own.map({True: value, False: f"not {value}"})
        values = values or {f"not {value}": f"not {value}", value: value}
    if values is None:
        values = {value: value for value in sorted(cells.unique(), key=_natural)}
    codes = cells.map({value: code for code, value in enumerate(values)})
    codes = codes.fillna(-1).to_numpy(np.int64)
    if (codes < 0).any():
        wrong = np.flatnonzero(codes < 0)
        raise WrongData(
            f"`{role}`: data row {_number(table, wrong)} of {table.where} has {name} = "
            f"{cells.iloc[wrong[0]]}; it must be one of {', '.join(values)}."
        )
    return codes, tuple(values.values())


def plain_cells(table: Table, role: str, name: str) -> Frame:
    """The cells of a column as texts."""
    return _plain(_column(table, role, name))


def _plain(cells: Frame) -> Frame:
    """Whole numbers without `.0`, which pandas writes where a column once had an empty cell."""
    whole = cells.str.fullmatch(r"-?\d+\.0+").all()
    return cells.str.replace(r"\.0+$", "", regex=True) if whole else cells


def _natural(value: str) -> tuple[int, float, tuple[str | int, ...]]:
    """Sorts numbers by value, and `slide 2` before `slide 10`."""
    try:
        return 0, float(value), ()
    except ValueError:
        parts = enumerate(re.split(r"(\d+)", value))
        return 1, 0.0, tuple(int(part) if place % 2 else part for place, part in parts)


def crossed(
    table: Table, names: Sequence[str], values: Values
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The combinations of the values of columns; the last column changes fastest."""
    codes, words = np.zeros(len(table.frame), dtype=np.int64), ("",)
    for name in names:
        own, own_words = coded(table, "group", name, values.get(name))
        codes = codes * len(own_words) + own
        words = tuple(
            f"{first}, {word}" if first else word for first in words for word in own_words
        )
    return codes, words


def memberships(table: Table, names: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Which rows are in which group, (rows, groups), and the names of the groups.

    Args:
        table: with the columns.
        names: see `Columns.overlapping`.
    """
    names = _matches(table, "overlapping", names)
    if len(names) == 1 and names[0] in table.frame:
        return _listed(table, names[0])
    found = np.stack([_member(table, name) for name in names], axis=1)
    empty = np.flatnonzero(~found.any(axis=0))
    if len(empty) or len(names) < 2:
        what = f"no row is in {names[empty[0]]}" if len(empty) else f"{names[0]} is one group alone"
        raise WrongData(f"`overlapping`: {what} in {table.where}; there must be two groups.")
    return found, tuple(names)


def _member(table: Table, name: str) -> np.ndarray:
    """Which rows are in a group, from a column of 0 and 1 or from `COLUMN=VALUE`."""
    if name not in table.frame and "=" in name:
        return coded(table, "overlapping", name)[0] == 1
    cells = _plain(_column(table, "overlapping", name)).str.lower()
    wrong = np.flatnonzero(~cells.isin((*TRUE, *FALSE)))
    if len(wrong):
        raise WrongData(
            f"`overlapping`: data row {_number(table, wrong)} of {table.where} has {name} = "
            f"{cells.iloc[wrong[0]]}; it must be one of {', '.join((*TRUE, *FALSE))}. "
            f"`{name}=VALUE` is the group of the rows with that value."
        )
    return cells.isin(TRUE).to_numpy()


def _listed(table: Table, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """The groups of a column of lists; an empty cell is a row without a group."""
    cells = table.frame[name].fillna("")
    rows = [{word.strip() for word in cell.split("|")} - {""} for cell in cells]
    if all(len(row) < 2 for row in rows):
        raise WrongData(
            f"`overlapping`: no cell of the column `{name}` of {table.where} has two groups, as "
            "in `a|b`. Name several columns of 0 and 1, or use --group for one group a row."
        )
    names = sorted(set().union(*rows), key=_natural)
    return np.array([[group in row for group in names] for row in rows]), tuple(names)


def _split(table: Table, name: str) -> np.ndarray | None:
    """The place of each row in `PARTS`."""
    if not name:
        return None
    cells = _plain(_column(table, "split", name)).str.lower()
    split = cells.map(SPLITS)
    if split.isna().any():
        wrong = np.flatnonzero(split.isna())
        raise WrongData(
            f"`split`: data row {_number(table, wrong)} of {table.where} has {name} = "
            f"{cells.iloc[wrong[0]]}; it must be one of {', '.join(SPLITS)}."
        )
    codes = split.to_numpy(np.int64)
    for place in (TRAIN, TEST):
        if not (codes == place).any():
            raise WrongData(f"`split`: no row of {table.where} has {name} = {PARTS[place]}.")
    return codes


def encoded(
    table: Table, names: Sequence[str], fit: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Float64 features (n, d) and their names: numbers, then 0 and 1 for each category.

    Args:
        table: with the columns.
        names: of columns; a column whose cells are all numbers is one feature.
        fit: rows whose categories get a feature; others have zeros there. An empty cell is a
            category of its own, but not a number.
    """
    found: dict[str, np.ndarray] = {}
    categories: dict[str, np.ndarray] = {}
    for name in names:
        cells = table.frame[name]
        parsed: Frame = pd.to_numeric(cells, errors="coerce")
        numbers = parsed.to_numpy(np.float64)
        bad = np.flatnonzero(~np.isfinite(numbers))
        if not len(bad):
            found[name] = numbers
            if len(large := np.flatnonzero(np.abs(numbers) > LARGEST)):
                raise WrongData(
                    f"`features`: the column `{name}` of {table.where} in data row "
                    f"{_number(table, large)} has {cells.iloc[large[0]]}; up to {LARGEST:.2g} is "
                    "read (float32). Divide the column, or leave it out by --features."
                )
            continue
        if 2 * len(bad) < len(numbers):
            cell = cells.fillna("an empty cell").iloc[bad[0]]
            raise WrongData(
                f"`features`: the column `{name}` of {table.where} has numbers, but data row "
                f"{_number(table, bad)} has {cell}. Write a number "
                "there, leave the row out, or choose columns by --features."
            )
        cells = cells.fillna("")
        values = sorted(set(cells[fit]))
        if len(values) > MOST_CATEGORIES:
            raise WrongData(
                f"`features`: the column `{name}` of {table.where} has {len(values):,} different "
                f"texts; up to {MOST_CATEGORIES} are read as categories. Leave it out by naming "
                "the others with --features, or give it as --text."
            )
        for value in values:
            categories[f"{name}={value}"] = (cells == value).to_numpy(np.float64)
    found |= categories
    return np.stack(list(found.values()), axis=1), tuple(found)


def _feature_names(table: Table, columns: Columns) -> list[str]:
    """The columns that are features, in the order of the patterns."""
    header = list(table.frame.columns)
    if not columns.features:
        roles = {columns.label, columns.text, columns.image, columns.split, *columns.group}
        roles |= set(_matches(table, "overlapping", columns.overlapping))
        roles |= {role.partition("=")[0] for role in roles}
        names = [name for name in header if name not in roles]
    else:
        names = _matches(table, "features", columns.features)
    if not names:
        raise WrongData(f"`features`: {table.where} has no column that is left for features.")
    return names


def _matches(table: Table, role: str, patterns: Sequence[str]) -> list[str]:
    """The columns that patterns stand for, each once; `COLUMN=VALUE` stands for itself."""
    header, names = list(table.frame.columns), list[str]()
    for pattern in patterns:
        matches = [pattern] if pattern in header else fnmatch.filter(header, pattern)
        if not matches and role == "overlapping" and "=" in pattern:
            matches = [pattern]
        if not matches:
            _column(table, role, pattern)
        names += [name for name in matches if name not in names]
    return names


# --- Data sets -----------------------------------------------------------------------------------


def two_groups(
    name: str, table: Table, columns: Columns, values: Values, *, validation: float = 0.2
) -> GroupedData:
    """Features, a label of two classes and two groups, the second of which are called 1.

    Args:
        name: of the data set.
        table: the rows.
        columns: of the table.
        values: names of the values of columns.
        validation: see `WithinCells`.
    """
    if columns.overlapping:
        raise WrongData("`overlapping`: this experiment compares two groups; use --group.")
    _needs(table, columns, ("label", "group"), unused=("text", "image"))
    label, classes = coded(table, "label", columns.label, values.get(columns.label))
    group, groups = crossed(table, columns.group, values)
    for role, names in (("label", classes), ("group", groups)):
        if len(names) != 2:
            raise WrongData(
                f"`{role}` must have two values but has {len(names)} in {table.where}: "
                f"{few(names, 8)}. Compare one with all others by --{role} COLUMN=VALUE."
            )
    split = _split(table, columns.split)
    cut = WithinCells(
        _tensor(label), _tensor(group), groups, None if split is None else _tensor(split),
        validation,
    )  # fmt: skip
    fit = np.ones(len(label), dtype=bool) if split is None else split == TRAIN
    features, names = encoded(table, _feature_names(table, columns), fit)
    return GroupedData(
        name, "vector", Vectors(torch.from_numpy(features)), classes, cut,
        digest(name, features.tobytes(), label.tobytes(), group.tobytes()), feature_names=names,
    )  # fmt: skip


def grouped(
    name: str,
    table: Table,
    columns: Columns,
    values: Values,
    *,
    classes: Sequence[str] = (),
    limit: int = 0,
    keep: int = 0,
    distinct: bool = False,
    reported: Sequence[str] = (),
    by_user: bool = False,
    whole_groups: bool = False,
    near: float | None = None,
    summary: Literal["worst", "tenth"] = "worst",
) -> GroupedData:
    """Images, texts or features with a label, in groups.

    Args:
        name: of the data set.
        table: the rows.
        columns: without a group, the classes are the groups.
        values: names of the values of columns.
        classes: in the order of their labels; rows of others are left out. All unless given.
        limit: samples of each group (and part, where the table says it) that are kept; 0 keeps all.
        keep: about so many rows, of each group and part its share; 0 keeps all.
        distinct: drop texts that repeat one of their own group.
        reported: columns of the groups whose accuracies are reported; all unless given.
        by_user: the groups are users, each in one part alone, see `ByUser`.
        whole_groups: each group is in one part alone, such as a query; see `WholeGroups`.
        near: drop images that repeat another one, see `distinct_rows`.
        summary: see `GroupedData`.
    """
    _needs(table, columns, ("label",))
    if columns.overlapping and (columns.group or limit or classes or by_user or whole_groups):
        other = "group" if columns.group else "sample_limit" if limit else ""
        raise WrongData(
            f"`overlapping` does not go together with `{other}`; leave one of them out."
            if other
            else "`overlapping` is for group-dro; leave it out."
        )
    if classes:
        values = {**values, columns.label: {name: name for name in classes}}
    table = _chosen(table, columns, classes, distinct, near)
    label, class_names = coded(table, "label", columns.label, values.get(columns.label))
    members: np.ndarray | None = None
    if columns.overlapping:
        members, groups = memberships(table, columns.overlapping)
        group = rarest_group(torch.from_numpy(members)).numpy()
    elif by_user:
        group, users = pd.factorize(_column(table, "group", columns.group[0]))
        groups = tuple(map(str, range(len(users))))
    else:
        group, groups = crossed(table, columns.group or (columns.label,), values)
    split = _split(table, columns.split)
    whole = by_user or whole_groups
    counts = torch.bincount(_tensor(group), minlength=len(groups))
    part_of = None if split is None or not whole else _part_of(table, group, split)
    cells = _tensor(group * 3 + (0 if split is None else split))
    own = kept(cells, limit)
    own = own[sampled(cells[own], keep)].numpy()
    table, label, group = _rows(table, own), label[own], group[own]
    split, members = (None if each is None else each[own] for each in (split, members))
    places = None if split is None else _tensor(split)
    if by_user:
        cut: Any = ByUser(_tensor(label), _tensor(group), counts, part_of=part_of)
    elif whole_groups:
        if part_of is None and len(groups) < 5:
            raise WrongData(
                f"`group`: {', '.join(columns.group)} has {len(groups)} values in {table.where}, "
                "but five are needed for a 60:20:20 cut of whole groups. Or give a --split column."
            )
        cut = WholeGroups(_tensor(label), _tensor(group), groups, part_of)
    elif members is not None:
        cut = WithinGroups(
            _tensor(label), _tensor(group), groups, split=places, members=torch.from_numpy(members)
        )
        _check_overlapping(table, columns, class_names, cut)
        group = members
    else:
        _check_groups(table, columns, class_names, groups, group, split)
        shown, shown_names = crossed(table, reported, values) if reported else (None, ())
        cut = WithinGroups(
            _tensor(label), _tensor(group), groups,
            None if shown is None else _tensor(shown), shown_names, split=places,
        )  # fmt: skip
    kind, samples, marks = _samples(table, columns, split)
    return GroupedData(
        name=name,
        kind=kind,
        samples=samples,
        class_names=class_names,
        cut=cut,
        fingerprint=digest(
            name, kind, class_names, groups, label.tobytes(), group.tobytes(),
            b"" if split is None else split.tobytes(), *marks,
        ),
        summary=summary,
        inputs=digest(kind, *marks),
    )  # fmt: skip


def _chosen(
    table: Table, columns: Columns, classes: Sequence[str], distinct: bool, near: float | None
) -> Table:
    """The rows of the classes, without texts and images that repeat others; images are checked."""
    if len([role for role in (columns.text, columns.image, columns.features) if role]) > 1:
        raise WrongData("Name one of `text`, `image` and `features`: one kind of input.")
    if classes:
        table = _of_classes(table, columns.label, classes)
    if columns.text and distinct:
        _column(table, "text", columns.text)
        own = (*columns.group, *_matches(table, "overlapping", columns.overlapping), columns.text)
        same = [column if column in table.frame else column.partition("=")[0] for column in own]
        table = _rows(table, np.flatnonzero(~table.frame.duplicated(same)))
    if columns.image:
        _check_images(table, columns.image)
    if near is not None:
        table = _rows(table, distinct_rows(_images(table, columns.image), near).numpy())
    return table


def _needs(
    table: Table, columns: Columns, roles: Sequence[str], unused: Sequence[str] = ()
) -> None:
    for role in roles:
        if not vars(columns)[role]:
            raise WrongData(f"{table.where}: say which column is the {role}: --{role} COLUMN.")
    for role in unused:
        if vars(columns)[role]:
            raise WrongData(f"`{role}`: this experiment takes features, numbers and categories.")
    if not len(table.frame):
        raise WrongData(f"{table.where} has no rows.")


def _tensor(values: np.ndarray) -> Tensor:
    return torch.tensor(np.asarray(values, dtype=np.int64))


def _rows(table: Table, rows: np.ndarray) -> Table:
    return Table(table.where, table.frame.iloc[rows], table.files, table.size)


def _of_classes(table: Table, label: str, classes: Sequence[str]) -> Table:
    """The rows of some classes."""
    if len(classes) < 2 or len(set(classes)) < len(classes):
        raise ValueError(f"`classes` must be at least two different names but are: {classes}.")
    if label not in table.frame:
        _column(table, "label", label)
    cells = table.frame[label]
    missing = [name for name in classes if not (cells == name).any()]
    if missing:
        there = few(sorted(cells.dropna().unique()), 20)
        raise WrongData(
            f"{table.where} has no row of the class {', '.join(missing)}, but: {there}."
        )
    return _rows(table, np.flatnonzero(cells.isin(classes)))


def _part_of(table: Table, group: np.ndarray, split: np.ndarray) -> Tensor:
    """The part of each group."""
    parts: Frame = pd.Series(split).groupby(group)
    if (parts.nunique() > 1).any():
        raise WrongData(f"{table.where}: a group must belong to one part, but some are in several.")
    return _tensor(parts.first().to_numpy())


def _check_groups(
    table: Table,
    columns: Columns,
    classes: Sequence[str],
    names: Sequence[str],
    group: np.ndarray,
    split: np.ndarray | None,
) -> None:
    """Refuse tables whose parts would lack classes or groups."""
    if len(classes) < 2:
        raise WrongData(f"`label`: {columns.label} is {classes[0]} in every row of {table.where}.")
    counts = np.bincount(group, minlength=len(names))
    if (counts > 0).sum() < 2:
        what = ", ".join(columns.group or (columns.label,))
        raise WrongData(
            f"`group`: {what} has one value alone in {table.where}, {names[group[0]]}; there must "
            "be two groups at least."
        )
    if split is None and not len(cut_within_groups(_tensor(group), 0)["test"]):
        raise WrongData(
            f"`group`: every group of {table.where} has fewer than 3 rows, so that none can be in "
            "training, validation and test data. Choose columns with fewer values, or give a "
            "--split column."
        )


def _check_overlapping(
    table: Table, columns: Columns, classes: Sequence[str], cut: WithinGroups
) -> None:
    """Refuse tables of which a part would lack classes or groups."""
    if len(classes) < 2:
        raise WrongData(f"`label`: {columns.label} is {classes[0]} in every row of {table.where}.")
    for name, own in cut(0).items():
        if len(own.group_names) < 2:
            raise WrongData(
                f"`overlapping`: the {name} data of {table.where} have rows of "
                f"{len(own.group_names)} groups; there must be two at least. Larger groups, or "
                "other parts in the --split column, have rows in every part."
            )


def _check_images(table: Table, column: str) -> None:
    """Every image must be there; images of any size must be files that can be opened, too."""
    names, files = _column(table, "image", column), table.files
    assert files is not None
    folder = files if isinstance(files, Path) else None
    where = folder or "the archive"
    outside = np.flatnonzero([leads_out(name) for name in names])
    if len(outside):
        raise WrongData(
            f"`image`: data row {_number(table, outside)} of {table.where} has {column} = "
            f"{names.iloc[outside[0]]}, which leads out of {where}. Write paths inside it."
        )
    there = [(folder / name).is_file() if folder else name in files for name in names]
    wrong = np.flatnonzero(~np.array(there))
    if len(wrong):
        raise WrongData(
            f"`image`: {len(wrong):,} of {len(names):,} images of {table.where} are not in {where};"
            f" the first is {names.iloc[wrong[0]]} in data row {_number(table, wrong)}, column "
            f"`{column}`. Name their folder or tar archive by --files."
        )
    for place, name in enumerate(names) if table.size is not None else ():
        source = files / name if isinstance(files, Path) else files[name]
        row = _number(table, np.array([place]))
        with opened(source, f"{name} (column `{column}`, data row {row} of {table.where})"):
            pass


def _images(table: Table, column: str) -> Any:
    assert table.files is not None
    return image_samples(table.files, list(table.frame[column]), table.size)


def _samples(
    table: Table, columns: Columns, split: np.ndarray | None
) -> tuple[Literal["image", "text", "vector"], Samples, list[Any]]:
    """The kind of the samples, the samples, and what changes when they do."""
    if columns.text:
        texts = tuple(_column(table, "text", columns.text))
        return "text", Texts(texts), list(texts)
    if columns.image:
        images = _images(table, columns.image)
        if isinstance(images, Vectors):
            return "image", images, [images.values.numpy().tobytes()]
        sizes = [os.path.getsize(Path(images.folder, name)) for name in images.names]
        return "image", images, [*images.names, *sizes, images.size]
    fit = np.ones(len(table.frame), dtype=bool) if split is None else split == TRAIN
    values, _ = encoded(table, _feature_names(table, columns), fit)
    return "vector", Vectors(torch.from_numpy(values.astype(np.float32))), [values.tobytes()]
