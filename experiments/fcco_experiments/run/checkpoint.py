"""Checkpoints of runs and fleets, and the state of the global random generators in them.

A file is one of `torch.save`, followed by a line with the version of the format and the sha256 of
all bytes before it. `torch.load` ignores what follows the archive, so it can open the file as well.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import store
from ..store import FolderError


def _last_line(digest: str) -> bytes:
    return f"fcco-checkpoint 0002 {digest}\n".encode()


def previous(path: Path) -> Path:
    """Where the checkpoint before the newest lies."""
    return path.with_suffix(f".previous{path.suffix}")


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all; the one before it is kept beside it."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with store.replacing(path) as file:
        file.write(buffer.getbuffer())
        file.write(_last_line(hashlib.sha256(buffer.getbuffer()).hexdigest()))
        file.flush()
        os.fsync(file.fileno())  # whole, before the old one gives up its name
        if path.exists():
            os.replace(path, previous(path))


def read(
    path: Path,
    differences: Callable[[Mapping[str, Any]], list[str]],
    fingerprint: str,
    warn: Callable[[str], None],
) -> dict[str, Any] | None:
    """The newest checkpoint that is intact; None where there is none.

    Args:
        path: the newest; where it is damaged, the one before takes its place and `warn` is called.
        differences: of a saved `spec` to the present one; a checkpoint with any is refused.
        fingerprint: of the data, likewise.
        warn: called with a sentence.
    """
    way_out = f"Delete {path.with_suffix('')}*.pt to start anew, or give --overwrite for all runs."
    damaged = None
    for file in (path, previous(path)):
        if not file.exists():
            continue
        try:
            content = _read_verified(file)
        except Exception as error:  # torch, pickle and zipfile raise different ones
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            damaged = damaged or f"The checkpoint {file} cannot be read: {reason}."
            continue
        changes = differences(content["spec"])
        if content["fingerprint"] != fingerprint:
            words = f"the data were {content['fingerprint'][:12]} and are {fingerprint[:12]} now"
            changes = [*changes, words]
        if changes:
            text = f"The checkpoint {file} is that of another run: {'; '.join(changes)}. {way_out}"
            raise FolderError(text)
        if damaged is not None:
            warn(f"{damaged} Going on from the checkpoint before it.")
        if file != path:
            os.replace(file, path)  # or the next one would push the good one out
        return content
    if damaged is not None:
        raise FolderError(f"{damaged} {way_out}")
    return None


def _read_verified(path: Path) -> dict[str, Any]:
    digest, left = hashlib.sha256(), max(path.stat().st_size - len(_last_line("0" * 64)), 0)
    with path.open("rb") as file:
        while left and (piece := file.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
        if file.read() != _last_line(digest.hexdigest()):
            raise ValueError("its checksum is wrong, it is damaged or of another version")
    content = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("step", "seconds"):
        if not 0 <= content[key] < math.inf:
            raise ValueError(f"`{key}` must be at least 0 but is: {content[key]}")
    return content


def remove(path: Path) -> None:
    """Delete a checkpoint and the one before it."""
    for file in (previous(path), path):
        file.unlink(missing_ok=True)


# --- the global random generators -----------------------------------------------------------------


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """What `restore_random` needs."""
    numpy_state: Any = np.random.get_state(legacy=False)
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy_key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": int(numpy_state["state"]["pos"]),
        "numpy_gauss": (int(numpy_state["has_gauss"]), float(numpy_state["gauss"])),
    }
    if torch.cuda.is_initialized():
        # One GPU is used; asking all would start work on those of other processes.
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random(state: Mapping[str, Any]) -> None:
    """Go back to a state."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key = state["numpy_key"].numpy().astype(np.uint32)
    has_gauss, cached = state["numpy_gauss"]
    np.random.set_state(("MT19937", key, state["numpy_position"], has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
