"""The checkpoint of a run: all that later steps depend on, in one file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import randomness
from .record import FolderError, atomic
from .spec import RunSpec, differences
from .task import Row

__all__ = ["Checkpoint", "read", "save"]


@dataclass(frozen=True)
class Checkpoint:
    """A run at a step.

    Attributes:
        step: steps made.
        epoch: the same in epochs.
        seconds: training time so far.
        rows: evaluations so far.
        training: state of the `Training`.
        fingerprint: of the data.
        spec: of the run, plain.
        random: state of the global random generators.
    """

    step: int
    epoch: float
    seconds: float
    rows: list[Row]
    training: dict[str, Any]
    fingerprint: str
    spec: dict[str, Any]
    random: dict[str, Any] = field(default_factory=randomness.state)


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write it, whole or not at all."""
    shallow = {name: getattr(checkpoint, name) for name in checkpoint.__dataclass_fields__}
    with atomic(path) as file:
        torch.save(shallow, file)


def read(path: Path, spec: RunSpec, fingerprint: str) -> Checkpoint:
    """Read it, and refuse that of another run or of other data.

    Args:
        path: the file.
        spec: of the run that wants to go on.
        fingerprint: of its data.
    """
    way_out = f"Delete {path.parent} to start this run anew, or give --overwrite for all."
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        held = Checkpoint(**{name: loaded[name] for name in Checkpoint.__dataclass_fields__})
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FolderError(f"The checkpoint {path} cannot be read: {reason} {way_out}") from error
    found = differences(held.spec, spec.plain())
    if held.fingerprint != fingerprint:
        found.append(f"the data were {held.fingerprint[:12]} and are {fingerprint[:12]} now")
    if found:
        raise FolderError(
            f"The checkpoint {path} is that of another run: {'; '.join(found)}. {way_out}"
        )
    return held
