"""How several processes share a model, and what of it a checkpoint holds.

`"ddp"` keeps the whole model on each rank, `"fsdp2"` a shard of every parameter. A single process
uses the model as it is, whatever the strategy.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fcco import _checks
from fcco.previous.swap import any_sharded, reshard

from . import distributed

__all__ = [
    "Staged",
    "full_state",
    "is_sharded",
    "load",
    "load_model_state",
    "model_state",
    "state",
    "unwrapped",
    "wrap",
]

_SHARD = "fcco.shard"  # the key by which a saved shard is known


class Staged(nn.Module, abc.ABC):
    """A network that is a chain of stages, each a chain of layers."""

    @abc.abstractmethod
    def stages(self) -> Sequence[Sequence[nn.Module]]:
        """The stages, in order; no layer is in two of them."""


def wrap(model: nn.Module, strategy: str, device: torch.device | str) -> nn.Module:
    """The model for all ranks; make the optimizer and the objective after this, from the result.

    Every rank must come with the same weights. On GPUs batch norm that uses the statistics of a
    batch takes those of all ranks; on CPUs torch has no such layer and each rank takes its own.

    Args:
        model: FSDP2 gathers the layers of its `Staged` parts one after another, and the rest at
            once.
        strategy: `"ddp"` or `"fsdp2"`.
        device: of this rank.
    """
    _checks.one_of("wrap", "strategy", strategy, ("ddp", "fsdp2"))
    place = torch.device(device)
    model = model.to(place)
    if distributed.world_size() == 1:
        return model
    if place.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return _replicated(model, place) if strategy == "ddp" else _sharded(model, place)


def _replicated(model: nn.Module, place: torch.device) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, device_ids=[place] if place.type == "cuda" else None)


def _sharded(model: nn.Module, place: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Of this device: torch would take a GPU when the machine has one.
    mesh = init_device_mesh(place.type, (distributed.world_size(),))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Layers of the model's stages that have parameters."""
    staged = [module for module in model.modules() if isinstance(module, Staged)]
    for layer in (layer for module in staged for stage in module.stages() for layer in stage):
        if next(layer.parameters(), None) is not None:
            yield layer


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel; any other as it is."""
    from torch.nn.parallel import DistributedDataParallel

    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds a part of the weights alone (FSDP2)."""
    return any_sharded(model.parameters())


def state(model: nn.Module, optimizer: Any, objective: nn.Module | None = None) -> dict[str, Any]:
    """All that `load` needs, under the keys `model`, `optimizer` and `objective`.

    Without shards it is the same on every rank and fits any number of ranks. Of a sharded model it
    is this rank's part: the training must say `sharded = True`, so that every rank's is saved.

    Args:
        model: as `wrap` gave it.
        optimizer: of its parameters.
        objective: of fcco, if there is one.
    """
    return {
        "model": model_state(model),
        "optimizer": _packed(optimizer.state_dict(), model),
        "objective": None if objective is None else _packed(objective.state_dict(), model),
    }


def load(
    model: nn.Module, optimizer: Any, objective: nn.Module | None, state: Mapping[str, Any]
) -> None:
    """Go on where `state` was taken.

    Args:
        model: as `wrap` gave it.
        optimizer: of its parameters.
        objective: of fcco, if there is one.
        state: may hold other keys, too.
    """
    load_model_state(model, state["model"])
    optimizer.load_state_dict(_unpacked(state["optimizer"], model))
    if objective is not None:
        objective.load_state_dict(_unpacked(state["objective"], model))


def model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers as plain tensors, of a sharded model those of this rank."""
    return _packed(unwrapped(model).state_dict(), model)


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Put the result of `model_state` back."""
    reshard(model)  # a pass without gradient leaves weights gathered: no shards to be seen
    unwrapped(model).load_state_dict(_unpacked(state, model))


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights on the CPU, for a single process to load; every rank must call this."""
    held = unwrapped(model).state_dict()
    return {
        name: (value.full_tensor() if any_sharded((value,)) else value).detach().cpu().clone()
        for name, value in held.items()
    }


def _walk(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested dicts, lists and tuples with `change` made wherever it does not return None."""
    changed = change(value)
    if changed is not None:
        return changed
    if isinstance(value, Mapping):
        return {key: _walk(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_walk(each, change) for each in value)
    return value


def _packed(value: Any, model: nn.Module) -> Any:
    """Shards as plain tensors with what is needed to make shards of them again."""
    if not is_sharded(model):
        return value

    def pack(each: Any) -> Any:
        if not isinstance(each, Tensor) or not any_sharded((each,)):
            return None
        shard: Any = each.detach()
        dimensions = [getattr(placement, "dim", None) for placement in shard.placements]
        facts = {"shape": list(shard.shape), "stride": list(shard.stride()), "of": dimensions}
        return {_SHARD: shard.to_local(), **facts}

    return _walk(value, pack)


def _unpacked(value: Any, model: nn.Module) -> Any:
    """What was packed, as shards on the devices of the model."""
    if not is_sharded(model):
        return value
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = next(p for p in model.parameters() if isinstance(p, DTensor)).device_mesh

    def unpack(each: Any) -> Any:
        if not isinstance(each, Mapping) or _SHARD not in each:
            return None
        return DTensor.from_local(
            each[_SHARD].to(mesh.device_type).clone(),
            mesh,
            [Replicate() if place is None else Shard(place) for place in each["of"]],
            run_check=False,
            shape=torch.Size(each["shape"]),
            stride=tuple(each["stride"]),
        )

    return _walk(value, unpack)
