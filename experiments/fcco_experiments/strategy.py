"""How several processes share a model, and what of it a checkpoint holds.

`"ddp"` keeps the whole model on each rank, `"fsdp2"` a shard of every parameter. A single process
uses the model as it is, whatever the strategy.

Of a sharded model a checkpoint holds the part of each rank. `torch.distributed.checkpoint` would
gather the whole, but knows neither the optimizers of fcco (it steps an optimizer to find out what
its state is) nor the w_{t-1} of an objective, which are plain tensors of one rank.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from fcco.previous import any_sharded, reshard

from . import distributed

_SHARD = "fcco.shard"  # the key by which a saved shard is known


class Staged(nn.Module, abc.ABC):
    """A network that is a chain of stages, each a chain of layers."""

    @abc.abstractmethod
    def stages(self) -> Sequence[Sequence[nn.Module]]:
        """The stages, in order; no layer is in two of them."""


def wrap(model: nn.Module, strategy: str, device: torch.device | str) -> nn.Module:
    """The model for all ranks; make the optimizer and the objective after this, from the result.

    Every rank must come with the same weights. On GPUs batch norm uses the statistics of the batch
    of all ranks; on CPUs torch has no such layer and each rank uses its own. FSDP2 gathers the
    layers of `Staged` parts one after another, and the rest at once.
    """
    place = torch.device(device)
    model = model.to(place)
    if distributed.world_size() == 1:
        return model
    if place.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if strategy == "ddp":
        return DistributedDataParallel(model, device_ids=[place] if place.type == "cuda" else None)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Of this device: torch would take a GPU when the machine has one.
    mesh = init_device_mesh(place.type, (distributed.world_size(),))
    staged = [module for module in model.modules() if isinstance(module, Staged)]
    for layer in (layer for module in staged for stage in module.stages() for layer in stage):
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel; any other as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds a part of the weights alone (FSDP2)."""
    return any_sharded(model.parameters())


def state(model: nn.Module, optimizer: Any, objective: nn.Module | None = None) -> dict[str, Any]:
    """All that `load` needs, under the keys `model`, `optimizer` and `objective`.

    Without shards it is the same on every rank and fits any number of ranks. Of a sharded model it
    is this rank's part: the training must say `sharded = True`, so that every rank's is saved.
    """
    whole = {
        "model": unwrapped(model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "objective": None if objective is None else objective.state_dict(),
    }
    return tree_map(_packed, whole) if is_sharded(model) else whole


def load(
    model: nn.Module, optimizer: Any, objective: nn.Module | None, state: Mapping[str, Any]
) -> None:
    """Go on where `state` was taken; that may hold other keys, too."""
    reshard(model)  # a pass without gradient leaves weights gathered: no shards to be seen
    parts = {key: state[key] for key in ("model", "optimizer", "objective")}
    if is_sharded(model):
        parts = _unpacked(parts, model)
    unwrapped(model).load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    if objective is not None:
        objective.load_state_dict(parts["objective"])


def _packed(value: Any) -> Any:
    """A shard as a plain tensor with what is needed to make a shard of it again."""
    if not isinstance(value, Tensor) or not any_sharded((value,)):
        return value
    shard: Any = value.detach()
    dimensions = [placement.dim if placement.is_shard() else None for placement in shard.placements]
    facts = {"shape": list(shard.shape), "stride": list(shard.stride()), "of": dimensions}
    return {_SHARD: shard.to_local(), **facts}


def _unpacked(parts: Any, model: nn.Module) -> Any:
    """What was packed, as shards on the devices of the model."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = next(p for p in model.parameters() if isinstance(p, DTensor)).device_mesh

    is_packed = lambda value: isinstance(value, dict) and _SHARD in value  # noqa: E731

    def unpack(value: Any) -> Any:
        if not is_packed(value):
            return value
        return DTensor.from_local(
            value[_SHARD].to(mesh.device_type).clone(),
            mesh,
            [Replicate() if dim is None else Shard(dim) for dim in value["of"]],
            run_check=False,
            shape=torch.Size(value["shape"]),
            stride=tuple(value["stride"]),
        )

    return tree_map(unpack, parts, is_leaf=is_packed)
