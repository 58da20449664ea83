"""How several processes share a model (DDP), and what of it a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import distributed


def wrap(model: nn.Module, device: torch.device | str) -> nn.Module:
    """The model for all ranks; make the optimizer and the objective after this, from the result.

    Every rank must come with the same weights. On GPUs batch norm uses the statistics of the batch
    of all ranks; on CPUs torch has no such layer and each rank uses its own.
    """
    place = torch.device(device)
    model = model.to(place)
    if distributed.world_size() == 1:
        return model
    if place.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return DistributedDataParallel(model, device_ids=[place] if place.type == "cuda" else None)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel; any other as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def state(model: nn.Module, optimizer: Any, objective: nn.Module | None = None) -> dict[str, Any]:
    """All that `load` needs: the same on every rank, and fit for any number of ranks."""
    return {
        "model": unwrapped(model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "objective": None if objective is None else objective.state_dict(),
    }


def load(
    model: nn.Module, optimizer: Any, objective: nn.Module | None, state: Mapping[str, Any]
) -> None:
    """Go on where `state` was taken; that may hold other keys, too."""
    unwrapped(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if objective is not None:
        objective.load_state_dict(state["objective"])
