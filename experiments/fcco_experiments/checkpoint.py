"""The checkpoint of a run: all that later steps depend on, in one file."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from . import distributed
from .store import FolderError, RunSpec, atomic
from .task import Row, Training

__all__ = [
    "Checkpoint",
    "collect",
    "distribute",
    "random_state",
    "read",
    "restore_random",
    "save",
    "seed_all",
]

State = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A run at a step.

    Attributes:
        step: steps made.
        epoch: the same in epochs.
        seconds: training time so far.
        rows: evaluations so far.
        training: state of the `Training`; of a sharded one a list with that of each rank.
        fingerprint: of the data.
        spec: of the run, plain.
        random: state of the global random generators of each rank.
    """

    step: int
    epoch: float
    seconds: float
    rows: list[Row]
    training: State | list[State]
    fingerprint: str
    spec: dict[str, Any]
    random: list[State]


def collect(training: Training) -> tuple[State | list[State], list[State]] | None:
    """State of the training and of the generators, on rank 0; all ranks must call this."""
    state, sharded = training.state_dict(), training.sharded
    generators = distributed.gather(random_state())
    # On the CPU: rank 0 would open those tensors on the devices of the other ranks.
    shards = distributed.gather(tree_map_only(Tensor, Tensor.cpu, state)) if sharded else None
    return None if generators is None else (state if shards is None else shards, generators)


def distribute(load: Callable[[], Checkpoint | None], training: Training) -> Checkpoint | None:
    """Give every rank what rank 0 reads, and put its state into the training.

    The generators are for the caller to restore with `random[0]`, when all else is done.

    Args:
        load: reads the checkpoint, on rank 0; None when there is none.
        training: of this rank.
    """
    shards: list[State] | None = None

    def common() -> Checkpoint | None:
        nonlocal shards
        held = load()
        if held is None or not isinstance(held.training, list):
            return held
        shards = held.training
        return replace(held, training=[])  # each rank needs its own alone

    held = distributed.run_on_first(common)
    if held is None:
        return None
    state = distributed.scatter(shards) if isinstance(held.training, list) else held.training
    training.load_state_dict(state)
    # All ranks were seeded alike: one that was not there before takes the place of the first.
    own = distributed.rank() if distributed.rank() < len(held.random) else 0
    return replace(held, training=state, random=[held.random[own]])


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write it, whole or not at all."""
    shallow = {name: getattr(checkpoint, name) for name in checkpoint.__dataclass_fields__}
    with atomic(path) as file:
        torch.save(shallow, file)


def read(path: Path, spec: RunSpec, fingerprint: str, training: Training) -> Checkpoint:
    """Read it, and refuse that of another run, of other data or of other shards.

    Args:
        path: the file.
        spec: of the run that wants to go on.
        fingerprint: of its data.
        training: that will load it.
    """
    way_out = f"Delete {path.parent} to start this run anew, or give --overwrite for all."
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        held = Checkpoint(**{name: loaded[name] for name in Checkpoint.__dataclass_fields__})
        if isinstance(held.random, dict):  # as it was before there were ranks
            held = replace(held, random=[held.random])
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FolderError(f"The checkpoint {path} cannot be read: {reason} {way_out}") from error
    found = spec.differences(held.spec)
    if held.fingerprint != fingerprint:
        found.append(f"the data were {held.fingerprint[:12]} and are {fingerprint[:12]} now")
    if found:
        raise FolderError(
            f"The checkpoint {path} is that of another run: {'; '.join(found)}. {way_out}"
        )
    old = len(held.training) if isinstance(held.training, list) else 0
    new = distributed.world_size() if training.sharded else 0
    if old != new:
        raise FolderError(
            f"The checkpoint {path} holds {_parts(old)} but here it needs {_parts(new)}: start as "
            f"many processes as before (torchrun --nproc-per-node). {way_out}"
        )
    return held


def _parts(number: int) -> str:
    return f"the shards of {number} processes" if number else "an unsharded state"


# --- the global random generators -----------------------------------------------------------------


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """What `restore` needs."""
    numpy_state: Any = np.random.get_state(legacy=False)
    held = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy_key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": int(numpy_state["state"]["pos"]),
        "numpy_gauss": (int(numpy_state["has_gauss"]), float(numpy_state["gauss"])),
    }
    if torch.cuda.is_initialized():
        # One GPU is used; asking all would start work on those of other processes.
        held["cuda"] = torch.cuda.get_rng_state()
    return held


def restore_random(held: Mapping[str, Any]) -> None:
    """Go back to a state."""
    torch.set_rng_state(held["torch"])
    version, internal, gauss = held["python"]
    random.setstate((version, tuple(internal), gauss))
    key = held["numpy_key"].numpy().astype(np.uint32)
    has_gauss, cached = held["numpy_gauss"]
    np.random.set_state(("MT19937", key, held["numpy_position"], has_gauss, cached))
    if "cuda" in held and torch.cuda.is_available():
        torch.cuda.set_rng_state(held["cuda"])
