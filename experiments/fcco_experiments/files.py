"""Files of runs: JSON and tables, whole or not at all.

Every file is written beside its place and then moved over it, so that a process that dies at any
moment leaves the old file or the new one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fcco._files import atomic

from .task import Row

__all__ = [
    "FolderError",
    "atomic",
    "clean",
    "numbers",
    "read_json",
    "read_lines",
    "read_rows",
    "write_json",
    "write_rows",
    "write_text",
]


class FolderError(Exception):
    """A folder that cannot be used as asked."""


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with atomic(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file; NaN and infinities, which JSON lacks, become null."""
    write_text(path, json.dumps(clean(value), indent=1) + "\n")


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write JSON lines."""
    write_text(path, "".join(json.dumps(clean(row)) + "\n" for row in rows))


def clean(value: Any) -> Any:
    """Tensors and arrays as lists, tuples too; numbers that are not finite as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): clean(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file that these functions wrote."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise FolderError(f"{path} cannot be read: {error}.") from error


def read_rows(path: Path) -> list[Row]:
    """Read rows that `write_rows` wrote."""
    return [numbers(row) for row in read_lines(path)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines as they are."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, OSError) as error:
        raise FolderError(f"{path} cannot be read: {error}.") from error
    if not all(isinstance(row, dict) for row in rows):
        raise FolderError(f"{path} is damaged: a line is no mapping.")
    return rows


def numbers(row: Row) -> Row:
    """What was not finite when it was written comes back as NaN."""
    return {key: _number(value) for key, value in row.items()}


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(each) for each in value]
    return math.nan if value is None else value
