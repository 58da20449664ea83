"""Columns of csv files."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterable, Iterator, Sequence

from .sources import WrongData

__all__ = ["long_cells", "rows_of"]


CELL_LIMIT = 1 << 30


@contextlib.contextmanager
def long_cells() -> Iterator[None]:
    """Lift the limit of `csv` on the length of cells, which holds for the whole process."""
    before = csv.field_size_limit(CELL_LIMIT)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def rows_of(
    data: str, name: str, lines: Iterable[str], columns: Sequence[str], delimiter: str = ","
) -> Iterator[tuple[str, ...]]:
    """These columns of each row of a csv file with a header.

    Args:
        data: name of the data set, for errors.
        name: of the file, for errors.
        lines: of the file, with their ends.
        columns: names in the header.
        delimiter: what stands between cells.

    Raises:
        WrongData: when a column is missing, or when a row has more or fewer cells than the header.
    """
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        header = next(reader, [])
        gaps = [column for column in columns if column not in header]
        if gaps:
            raise WrongData(
                f"`{data}`: {name} lacks the columns {', '.join(gaps)}; its header is "
                f"{', '.join(header) or 'empty'}."
            )
        places = [header.index(column) for column in columns]
        for row in reader:
            if len(row) != len(header):
                raise WrongData(
                    f"`{data}`: line {reader.line_num} of {name} must have {len(header)} "
                    f"cells, as its header, but has {len(row)}."
                )
            yield tuple(row[place] for place in places)
    except csv.Error as error:
        raise WrongData(
            f"`{data}`: line {reader.line_num} of {name} is no csv: {error}."
        ) from error
