"""Tables: files of rows and columns, as groups of samples or as features with a binary label."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
    Cut,
    GroupedData,
    WholeGroups,
    WithinCells,
    WithinGroups,
    kept,
    rarest_group,
    sampled,
)
from .samples import Samples, Vectors, distinct_rows, image_samples
from .sources import WrongData, digest, few, members, opened

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
    """Rows of text, and what their images are read from."""

    where: str  # the file, for errors
    frame: Frame  # every cell is text, or missing
    files: Path | Mapping[str, bytes] | None = None  # folder of the images, or contents by path
    # Height and width that images are given; unless given, all must be alike.
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
    if place.name.lower().removesuffix(".gz").endswith(".parquet"):
        try:
            frame = pd.read_parquet(place).reset_index(drop=True).rename(columns=str)
        except (ImportError, ValueError, OSError) as error:
            raise WrongData(f"{place}: {error} Or write the table as csv.") from error
        frame = frame.astype(object).where(frame.notna(), "").map(str).replace("", None)
        return Table(str(place), frame, files, size)
    # The header is read as a row, or pandas would number repeated names and take the first cells of
    # rows that are too long for the names of rows.
    rows = read_frame(place, str(place), sep=_separator(place), header=None)
    names, frame = rows.iloc[0].fillna(""), rows.iloc[1:].reset_index(drop=True)
    twice = names[names.duplicated() & (names != "")]
    if len(twice):
        raise WrongData(f"{place} has several columns of one name: {', '.join(twice)}.")
    frame.columns = [name or f"Unnamed: {number}" for number, name in enumerate(names)]
    # A first column without a name holds the names of rows that R and pandas write.
    return Table(str(place), frame if names[0] else frame.iloc[:, 1:], files, size)


def read_frame(source: Any, where: str, **options: Any) -> Frame:
    """The cells of a text table as text: nothing is guessed, `007` and `NA` stay what they are.

    `options` are those of `pandas.read_csv`, `where` is the file for errors.
    """
    settings = {"dtype": str, "keep_default_na": False, "na_values": [""]}
    try:
        return pd.read_csv(source, encoding="utf-8-sig", **settings, **options)
    except (ValueError, OSError, EOFError) as error:  # pandas' own errors are ValueErrors
        raise WrongData(f"{where} cannot be read as a table: {str(error).strip()}.") from error


def _separator(path: Path) -> str:
    """The separator of a text table: of a .tsv file a tab, else what its header has most of."""
    if path.name.lower().removesuffix(".gz").endswith(".tsv"):
        return "\t"
    try:
        with opened(path) as stream:
            header = stream.readline().decode(errors="replace")
    except (OSError, EOFError) as error:
        raise WrongData(f"{path} cannot be read as a table: {error}.") from error
    return max(",\t;", key=re.sub('"[^"]*"', "", header).count)


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


def _wrong(table: Table, role: str, name: str, cells: Frame, places: np.ndarray, why: str) -> Any:
    """What to raise for some cells, with the first of them."""
    cell = cells.fillna("an empty cell").iloc[places[0]]
    return WrongData(
        f"`{role}`: data row {_number(table, places)} of {table.where} has {name} = {cell}; {why}."
    )


def _one_of(table: Table, role: str, name: str, cells: Frame, known: Collection[str]) -> None:
    """Refuse a column with other cells than those."""
    wrong = np.flatnonzero(~cells.isin(list(known)))
    if len(wrong):
        why = f"it must be one of {', '.join(known)}"
        raise _wrong(table, role, name, cells, wrong, why)


def _parsed(cells: Frame) -> tuple[np.ndarray, np.ndarray]:
    """The cells as float64, and the places of those that are no finite numbers."""
    parsed: Frame = pd.to_numeric(cells, errors="coerce")
    values = parsed.to_numpy(np.float64)
    return values, np.flatnonzero(~np.isfinite(values))


def numbers_in(table: Table, role: str, name: str) -> np.ndarray:
    """The cells of a column as float64; all must be finite numbers."""
    cells = _column(table, role, name)
    values, bad = _parsed(cells)
    if len(bad):
        raise _wrong(table, role, name, cells, bad, "it must be a finite number")
    return values


def plain_cells(table: Table, role: str, name: str) -> Frame:
    """The cells of a column as texts.

    Whole numbers lose the `.0` that pandas writes where a column once had an empty cell.
    """
    cells = _column(table, role, name)
    whole = cells.str.fullmatch(r"-?\d+\.0+").all()
    return cells.str.replace(r"\.0+$", "", regex=True) if whole else cells


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
        cells = plain_cells(table, role, name)
    else:
        own = plain_cells(table, role, column) == value
        if not own.any():
            raise WrongData(f"`{role}`: no row of {table.where} has {column} = {value}.")
        cells = own.map({True: value, False: f"not {value}"})
        values = values or {f"not {value}": f"not {value}", value: value}
    if values is None:
        values = {value: value for value in sorted(cells.unique(), key=_natural)}
    _one_of(table, role, name, cells, values)
    codes = cells.map({value: code for code, value in enumerate(values)})
    return codes.to_numpy(np.int64), tuple(values.values())


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
    """Which rows are in which group, (rows, groups), and their names; see `Columns.overlapping`."""
    names = _matches(table, "overlapping", names)
    if len(names) > 1 or names[0] not in table.frame:
        return np.stack([_member(table, name) for name in names], axis=1), tuple(names)
    cells = table.frame[names[0]].fillna("")  # a row without a group
    rows = [{word.strip() for word in cell.split("|")} - {""} for cell in cells]
    if all(len(row) < 2 for row in rows):
        raise WrongData(
            f"`overlapping`: no cell of the column `{names[0]}` of {table.where} has two groups, "
            "as in `a|b`. Name several columns of 0 and 1, or use --group for one group a row."
        )
    words = sorted(set().union(*rows), key=_natural)
    return np.array([[group in row for group in words] for row in rows]), tuple(words)


def _member(table: Table, name: str) -> np.ndarray:
    """Which rows are in a group, from a column of 0 and 1 or from `COLUMN=VALUE`."""
    if name not in table.frame and "=" in name:
        return coded(table, "overlapping", name)[0] == 1
    cells = plain_cells(table, "overlapping", name).str.lower()
    _one_of(table, "overlapping", name, cells, (*TRUE, *FALSE))
    found = cells.isin(TRUE).to_numpy()
    if not found.any():
        raise WrongData(f"`overlapping`: no row of {table.where} is in {name}.")
    return found


def _split(table: Table, name: str) -> np.ndarray | None:
    """The place of each row in `PARTS`."""
    if not name:
        return None
    cells = plain_cells(table, "split", name).str.lower()
    _one_of(table, "split", name, cells, SPLITS)
    codes = cells.map(SPLITS).to_numpy(np.int64)
    for place in (TRAIN, TEST):
        if not (codes == place).any():
            raise WrongData(f"`split`: no row of {table.where} has {name} = {PARTS[place]}.")
    return codes


def encoded(
    table: Table, columns: Columns, split: np.ndarray | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Float64 features (n, d) and their names: numbers, then 0 and 1 for each category.

    A column whose cells are all numbers is one feature. An empty cell is a category of its own, but
    not a number. Categories that no row has to train on get no feature.
    """
    fit = np.full(len(table.frame), True) if split is None else split == TRAIN
    names = _matches(table, "features", columns.features) or _without_role(table, columns)
    if not names:
        raise WrongData(f"`features`: {table.where} has no column that is left for features.")
    found: dict[str, np.ndarray] = {}
    categories: dict[str, np.ndarray] = {}
    for name in names:
        cells = table.frame[name]
        numbers, bad = _parsed(cells)
        if not len(bad):
            found[name] = numbers
            if len(large := np.flatnonzero(np.abs(numbers) > LARGEST)):
                why = f"up to {LARGEST:.2g} is read (float32). Divide the column, or leave it out"
                raise _wrong(table, "features", name, cells, large, why)
            continue
        if 2 * len(bad) < len(numbers):
            why = "most are numbers. Write one, leave the row out, or choose columns by --features"
            raise _wrong(table, "features", name, cells, bad, why)
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


def _without_role(table: Table, columns: Columns) -> list[str]:
    """The columns that are nothing else."""
    roles = {columns.label, columns.text, columns.image, columns.split, *columns.group}
    roles |= set(_matches(table, "overlapping", columns.overlapping))
    roles |= {role.partition("=")[0] for role in roles}
    return [name for name in table.frame.columns if name not in roles]


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


def grouped(
    name: str,
    table: Table,
    columns: Columns,
    values: Values,
    *,
    classes: Sequence[str] = (),
    limit: int = 0,
    keep: int = 0,
    validation: float | None = None,
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
        validation: for features with two classes and two groups: the share of the training rows of
            each cell that validate, see `WithinCells`.
        distinct: drop texts that repeat one of their own group.
        reported: columns of the groups whose accuracies are reported; all unless given.
        by_user: the groups are users, each in one part alone, see `ByUser`.
        whole_groups: each group is in one part alone, such as a query; see `WholeGroups`.
        near: drop images that repeat another one, see `distinct_rows`.
        summary: see `GroupedData`.
    """
    for role in ("text", "image", "overlapping") if validation is not None else ():
        if vars(columns)[role]:
            raise WrongData(f"`{role}`: this experiment takes features and --group.")
    _needs(table, columns, ("label",) if validation is None else ("label", "group"))
    if columns.overlapping and (columns.group or limit or classes or by_user or whole_groups):
        raise WrongData("`overlapping` is for group-dro, without `group` and `sample_limit`.")
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
    for role, names in {"label": class_names, "group": groups}.items():
        if validation is not None and len(names) != 2:
            raise WrongData(
                f"`{role}` must have two values but has {len(names)} in {table.where}: "
                f"{few(names, 8)}. Compare one with all others by --{role} COLUMN=VALUE."
            )
    split = _split(table, columns.split)
    part_of = _part_of(table, group, split) if by_user or whole_groups else None
    counts = torch.bincount(_tensor(group), minlength=len(groups))
    cells = _tensor(group * 3 + (0 if split is None else split))
    own = kept(cells, limit)
    own = own[sampled(cells[own], keep)].numpy()
    table, label, group = _rows(table, own), label[own], group[own]
    split, members = (None if each is None else each[own] for each in (split, members))
    cut: Cut
    if by_user:
        cut = ByUser(_tensor(label), _tensor(group), groups, part_of, counts=counts)
    elif whole_groups:
        cut = WholeGroups(_tensor(label), _tensor(group), groups, part_of)
    elif validation is not None:
        cut = WithinCells(_tensor(label), _tensor(group), groups, _place(split), validation)
    else:
        shown, shown_names = crossed(table, reported, values) if reported else (None, ())
        cut = WithinGroups(
            _tensor(label), _tensor(group), groups, _place(split), _place(shown), shown_names,
            members=None if members is None else torch.from_numpy(members),
        )  # fmt: skip
    _check_parts(table, "overlapping" if columns.overlapping else "group", class_names, cut)
    kind, samples, marks, feature_names = _samples(table, columns, split)
    if isinstance(samples, Vectors) and kind == "vector" and validation is None:
        samples = Vectors(samples.values.float())
    marked = (group if members is None else members).tobytes()
    return GroupedData(
        name, kind, samples, class_names, cut,
        digest(
            name, kind, class_names, groups, label.tobytes(), marked,
            b"" if split is None else split.tobytes(), *marks,
        ),
        summary, digest(kind, *marks), feature_names,
    )  # fmt: skip


def _chosen(
    table: Table, columns: Columns, classes: Sequence[str], distinct: bool, near: float | None
) -> Table:
    """The rows of the classes, without texts and images that repeat others; images are checked."""
    if len([role for role in (columns.text, columns.image, columns.features) if role]) > 1:
        raise WrongData("Name one of `text`, `image` and `features`: one kind of input.")
    if classes:
        if columns.label not in table.frame:
            _column(table, "label", columns.label)
        cells = table.frame[columns.label]
        missing = [name for name in classes if not (cells == name).any()]
        if missing:
            there = few(sorted(cells.dropna().unique()), 20)
            raise WrongData(
                f"{table.where} has no row of the class {', '.join(missing)}, but: {there}."
            )
        table = _rows(table, np.flatnonzero(cells.isin(classes)))
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


def _needs(table: Table, columns: Columns, roles: Sequence[str]) -> None:
    for role in roles:
        if not vars(columns)[role]:
            raise WrongData(f"{table.where}: say which column is the {role}: --{role} COLUMN.")
    if not len(table.frame):
        raise WrongData(f"{table.where} has no rows.")


def _tensor(values: np.ndarray) -> Tensor:
    return torch.tensor(np.asarray(values, dtype=np.int64))


def _place(values: np.ndarray | None) -> Tensor | None:
    return None if values is None else _tensor(values)


def _rows(table: Table, rows: np.ndarray) -> Table:
    return replace(table, frame=table.frame.iloc[rows])


def _part_of(table: Table, group: np.ndarray, split: np.ndarray | None) -> Tensor | None:
    """The part of each group."""
    if split is None:
        return None
    parts: Frame = pd.Series(split).groupby(group)
    if (parts.nunique() > 1).any():
        raise WrongData(f"{table.where}: a group must belong to one part, but some are in several.")
    return _tensor(parts.first().to_numpy())


def _check_parts(table: Table, role: str, classes: Sequence[str], cut: Cut) -> None:
    """Refuse tables whose parts lack classes or groups."""
    if len(classes) < 2:
        raise WrongData(f"`label`: there is one class alone in {table.where}, {classes[0]}.")
    for name, own in cut(0).items():
        found, least = len(own.group_names), 2 if name == "train" else 1
        if found < least:
            raise WrongData(
                f"`{role}`: the {name} data of {table.where} have too few groups: {found} of "
                f"{least}. Take columns with larger groups, or give a --split column."
            )


def _check_images(table: Table, column: str) -> None:
    """Every image must be there."""
    names, files = _column(table, "image", column), table.files
    assert files is not None
    folder = files if isinstance(files, Path) else None
    there = [(folder / name).is_file() if folder else name in files for name in names]
    wrong = np.flatnonzero(~np.array(there))
    if len(wrong):
        raise WrongData(
            f"`image`: {len(wrong):,} of {len(names):,} images of {table.where} are not in "
            f"{folder or 'the archive'}; the first is {names.iloc[wrong[0]]} in data row "
            f"{_number(table, wrong)}, column `{column}`. Name their folder or tar archive by "
            "--files."
        )


def _images(table: Table, column: str) -> Any:
    assert table.files is not None
    return image_samples(table.files, list(table.frame[column]), table.size)


def _samples(
    table: Table, columns: Columns, split: np.ndarray | None
) -> tuple[Literal["image", "text", "vector"], Samples, list[Any], tuple[str, ...]]:
    """The kind of the samples, the samples, what changes when they do, and names of features."""
    if columns.text:
        texts = tuple(_column(table, "text", columns.text))
        return "text", texts, list(texts), ()
    if columns.image:
        images = _images(table, columns.image)
        if isinstance(images, Vectors):
            return "image", images, [images.values.numpy().tobytes()], ()
        sizes = [os.path.getsize(Path(images.folder, name)) for name in images.names]
        return "image", images, [*images.names, *sizes, images.size], ()
    values, names = encoded(table, columns, split)
    return "vector", Vectors(torch.from_numpy(values)), [values.tobytes()], names
