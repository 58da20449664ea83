"""The state of every global random generator, as plain values that a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["restore", "seed_all", "state"]


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def state() -> dict[str, Any]:
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


def restore(held: Mapping[str, Any]) -> None:
    """Go back to a state."""
    torch.set_rng_state(held["torch"])
    version, internal, gauss = held["python"]
    random.setstate((version, tuple(internal), gauss))
    key = held["numpy_key"].numpy().astype(np.uint32)
    has_gauss, cached = held["numpy_gauss"]
    np.random.set_state(("MT19937", key, held["numpy_position"], has_gauss, cached))
    if "cuda" in held and torch.cuda.is_available():
        torch.cuda.set_rng_state(held["cuda"])
