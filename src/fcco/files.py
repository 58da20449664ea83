"""Files that are there whole or not at all, and values that are kept in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .fingerprint import mapping_checksum, tensor_checksum

__all__ = ["DamagedFile", "atomic", "read_values", "write_values"]

Values = Tensor | Mapping[str, Tensor]


class DamagedFile(Exception):
    """A file of kept values that is not whole, or holds others than its name says."""


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its place only when all is written and on disk.

    It is written beside its place and then moved over it, so that a process that dies at any
    moment leaves the old file or the new one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_values(path: Path, key: str, values: Values, **facts: Any) -> None:
    """Keep a tensor, or several by name, under a key, with a checksum; folders are made.

    Args:
        path: the file.
        key: what the values depend on, as one word.
        values: the tensor or tensors.
        facts: what else to keep beside it, for a reader.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"key": key, "sha256": _checksum(values), "values": values, **facts}
    with atomic(path) as stream:
        torch.save(whole, stream)


def read_values(path: Path, key: str) -> Any:
    """What `write_values` kept under this key; None when there is no file.

    Raises:
        DamagedFile: when the file is not whole or not of this key.
    """
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
        values, whole = found["values"], found["sha256"] == _checksum(found["values"])
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever torch.load makes of a damaged file
        raise DamagedFile(f"{path} cannot be read ({type(error).__name__})") from error
    if not whole:
        raise DamagedFile(f"{path} is not what was written there: its checksum differs")
    if found["key"] != key:
        raise DamagedFile(f"{path} holds values of something else")
    return values


def _checksum(values: Values) -> str:
    return tensor_checksum(values) if isinstance(values, Tensor) else mapping_checksum(values)
