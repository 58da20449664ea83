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

from ..files import atomic
from .task import Row

__all__ = ["FolderError", "atomic", "clean", "read_json", "write_json", "write_rows", "write_text"]


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
