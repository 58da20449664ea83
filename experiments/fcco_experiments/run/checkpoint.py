"""Checkpoints of runs and fleets, and the state of the global random generators in them.

A file is one of `torch.save`, which reads it too, followed by the sha256 of all bytes before it.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import store
from ..store import FolderError


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with store.replacing(path) as file:
        file.write(buffer.getbuffer())
        file.write(hashlib.sha256(buffer.getbuffer()).digest())


def read(
    path: Path, differences: Callable[[Mapping[str, Any]], list[str]], fingerprint: str
) -> dict[str, Any] | None:
    """A checkpoint that is intact; None where there is none.

    Args:
        path: the file.
        differences: of a saved `spec` to the present one; a checkpoint with any is refused.
        fingerprint: of the data, likewise.
    """
    if not path.exists():
        return None
    way_out = f"Delete {path} to start anew, or give --overwrite for all runs."
    try:
        whole = memoryview(path.read_bytes())
        if hashlib.sha256(whole[:-32]).digest() != whole[-32:]:
            raise ValueError("its checksum is wrong, it is damaged or of another version")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, pickle and zipfile raise different ones
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise FolderError(f"The checkpoint {path} cannot be read: {reason}. {way_out}") from error
    changes = differences(content["spec"])
    if content["fingerprint"] != fingerprint:
        words = f"the data were {content['fingerprint'][:12]} and are {fingerprint[:12]} now"
        changes = [*changes, words]
    if changes:
        raise FolderError(
            f"The checkpoint {path} is that of another run: {'; '.join(changes)}. {way_out}"
        )
    return content


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """What `restore_random` needs."""
    kind, key, *rest = np.random.get_state()
    # One GPU is used; asking all would start work on those of other processes.
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    numpy_state = (kind, np.asarray(key).tolist(), *rest)
    own = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    return {**own, "cuda": cuda}


def restore_random(state: Mapping[str, Any]) -> None:
    """Go back to a state."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
