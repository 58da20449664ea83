"""Tensors in files: written atomically, read only if key and checksum are right."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from .previous import any_sharded

TEMPORARY = re.compile(r"\..+\.\d+\.fcco-tmp")
"""Names of the files that `atomic` writes to; a process that is killed leaves them behind."""


class DamagedFile(Exception):
    """A file cannot be read, was changed after it was written, or has another key."""


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing so that it is replaced as a whole or not at all."""
    # In the same folder, hence on the same file system, where os.replace is atomic. Without fsync
    # the new name could reach the disk before the content does.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.fcco-tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_values(path: Path, key: str, values: Tensor | Mapping[str, Tensor]) -> None:
    """Write tensors with their checksum and their key, that of all they were computed from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as file:
        torch.save({"key": key, "sha256": _checksum(values), "values": values}, file)


def read_values(path: Path, key: str) -> Any:
    """Read what `write_values` wrote under this key; None if there is no file."""
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        values, intact = content["values"], content["sha256"] == _checksum(content["values"])
    except FileNotFoundError:
        return None
    except Exception as error:  # torch, pickle and zipfile raise different ones
        raise DamagedFile(f"{path} cannot be read ({type(error).__name__})") from error
    if not intact:
        raise DamagedFile(f"{path} was changed after it was written: its checksum differs")
    # The file's name holds only the first digits of the key, and files can be renamed.
    if content["key"] != key:
        raise DamagedFile(f"{path} belongs to another model or to other data")
    return values


def state_checksum(module: nn.Module) -> str:
    """The sha256 of a state dict, the same inside DDP or `torch.compile`; FSDP2: on all ranks."""
    ddp = isinstance(module, nn.parallel.DistributedDataParallel)
    inside = module.module if ddp else getattr(module, "_orig_mod", None)
    return _checksum(module.state_dict()) if inside is None else state_checksum(inside)


def _checksum(values: Tensor | Mapping[str, Any]) -> str:
    """The sha256 of one tensor's bytes, or of named tensors in the order of their names."""
    if isinstance(values, Tensor):
        return hashlib.sha256(_content(values)).hexdigest()
    digest = hashlib.sha256()
    for name, value in sorted(values.items(), key=lambda item: item[0]):
        if not isinstance(value, Tensor):  # the extra state of a module
            digest.update(f"{name} {type(value).__name__} ".encode() + pickle.dumps(value))
            continue
        if any_sharded((value,)):
            value = value.full_tensor()  # type: ignore[attr-defined]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(_content(value))
    return digest.hexdigest()


def _content(tensor: Tensor) -> bytes | memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # Seen as uint8 because NumPy has no bfloat16.
    return flat.view(torch.uint8).numpy().data if len(flat) else b""
