"""A visit to other parameters that leaves no trace: random streams, buffers, weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "any_sharded",
    "copy_all",
    "exchanged",
    "fits",
    "local_part",
    "own_buffers",
    "reshard",
    "room_for",
    "same_randomness",
    "standing_at",
    "wait_for_copies",
    "without_reduction",
]


def any_sharded(parameters: Iterable[Tensor]) -> bool:
    """Whether any parameter is a DTensor."""
    # It can exist only after its module was imported; importing that here would be slow.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(p, module.DTensor) for p in parameters)


def local_part(parameter: Tensor) -> Tensor:
    """The tensor that this process holds, without gradient."""
    plain = parameter.detach()
    return plain.to_local() if any_sharded((parameter,)) else plain  # type: ignore[attr-defined]


def copy_all(targets: list[Tensor], sources: list[Tensor], *, to_host: bool = False) -> None:
    """Copy many tensors with few kernels: one for each kind of number.

    Args:
        targets: filled.
        sources: in the same order.
        to_host: the targets come from `room_for(..., host=True)`. Copies into pinned memory are
            only queued then: later work of the same stream finds them done, and the host does
            after `wait_for_copies`.
    """
    kinds = {target.dtype for target in targets}
    queued = to_host and all(source.device.type in ("cpu", "cuda") for source in sources)
    with torch.no_grad():
        if len(kinds) == 1:
            torch._foreach_copy_(targets, sources, non_blocking=queued)
            return
        for kind in kinds:
            pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t.dtype == kind]
            torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs], non_blocking=queued)


def room_for(tensor: Tensor, *, host: bool) -> Tensor:
    """Empty room for a copy, on the tensor's device or in the host's memory (pinned for CUDA)."""
    if not host:
        return torch.empty_like(tensor, requires_grad=False)
    pinned = tensor.device.type == "cuda"
    return torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=pinned)


def fits(room: Tensor, tensor: Tensor, *, host: bool) -> bool:
    """Whether `room_for` would make such room: same shape and precision, the right place."""
    if room.dtype != tensor.dtype or room.shape != tensor.shape:
        return False
    if not host:
        return room.device == tensor.device
    return room.device.type == "cpu" and (tensor.device.type != "cuda" or room.is_pinned())


def wait_for_copies(parameters: Iterable[Tensor]) -> None:
    """Wait until copies into the host's memory are there for the host to read."""
    for device in {p.device for p in parameters if p.device.type == "cuda"}:
        torch.cuda.synchronize(device)


@contextmanager
def same_randomness(devices: Set[torch.device]) -> Iterator[None]:
    """Restore the random streams of the CPU and of `devices` on exit."""
    state = torch.get_rng_state()
    others = {d: torch.get_device_module(d).get_rng_state(d) for d in devices}
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for device, saved in others.items():
            torch.get_device_module(device).set_rng_state(saved, device)


@contextmanager
def own_buffers(model: nn.Module, copies: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let a function change copies of the buffers; put the originals back on exit.

    Args:
        model: the module.
        copies: room for pairs of a buffer and its copy, by the buffer's id, which the caller
            keeps between visits: a network with batch norm has hundreds, and one kernel fills
            them all. A buffer that two modules share has one copy.
    """
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    present: dict[int, tuple[Tensor, Tensor]] = {}
    synchronised: list[tuple[Any, bool]] = []
    for module in _modules(model):
        if "require_forward_param_sync" in module.__dict__:
            # DDP: after a pass without gradient, the next would not send rank 0's buffers out.
            synchronised.append((module, module.__dict__["require_forward_param_sync"]))
        buffers = module._buffers
        if buffers and type(module).__module__.startswith("fcco."):
            continue  # a tracker inside the model: large, and not changed by a forward pass
        kept.append((buffers, dict(buffers)))
        for name, buffer in buffers.items():
            if buffer is not None:
                pair = present.get(id(buffer)) or copies.get(id(buffer))
                if pair is None or pair[0] is not buffer:
                    pair = (buffer, torch.empty_like(buffer))
                present[id(buffer)] = pair
                buffers[name] = pair[1]
    if present:
        copy_all([copy for _, copy in present.values()], [own for own, _ in present.values()])
    copies.clear()
    copies.update(present)
    try:
        yield
    finally:
        for buffers, originals in kept:  # also those that the function added or filled
            if buffers or originals:
                buffers.clear()
                buffers.update(originals)
        for ddp, needed in synchronised:
            ddp.require_forward_param_sync = needed


@contextmanager
def exchanged(saved: dict[Tensor, Tensor], model: nn.Module) -> Iterator[None]:
    """Put the saved parameters in place of the current ones for a while.

    Plain parameters change their pointer, shards (FSDP2) their content.
    """
    parameters = list(saved)
    sharded = any_sharded(parameters)
    if sharded:
        reshard(model)
        current = [local_part(parameter).clone() for parameter in parameters]
        put = _copy_in
    else:
        current = [parameter.data for parameter in parameters]
        put = _point_to
    try:
        put(parameters, list(saved.values()))
        torch.clear_autocast_cache()  # casts of the current weights must not be used here
        yield
    finally:
        if sharded:
            reshard(model)
        put(parameters, current)
        torch.clear_autocast_cache()  # nor those made here afterwards


@contextmanager
def standing_at(points: Mapping[Tensor, Tensor], model: nn.Module | None = None) -> Iterator[None]:
    """Copy other values into parameters for a while, between steps; no graph may be open.

    Args:
        points: the values.
        model: whose parameters these are, for shards (FSDP2): what was gathered from other shards
            must not serve a forward pass.
    """
    sharded = any_sharded(points)
    if sharded and model is None:
        raise TypeError(
            "Parameters of a sharded model (FSDP2) cannot stand at another point unless the model "
            "is known, whose gathered weights must be freed: give the optimizer to an objective."
        )
    kept = {parameter: parameter.detach().clone() for parameter in points}
    try:
        with torch.no_grad():
            for parameter, point in points.items():
                parameter.copy_(point)
        if sharded and model is not None:
            reshard(model)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept.items():
                parameter.copy_(value)
        if sharded and model is not None:
            reshard(model)


@contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """Let a backward pass go unseen by DDP, so that its gradients stay those of this rank."""
    with ExitStack() as stack:
        for module in _modules(model):
            if "require_backward_grad_sync" in module.__dict__:
                stack.enter_context(module.no_sync())  # type: ignore[operator]
                # With a static graph it would take this pass for the first one.
                begun = module.__dict__.get("_static_graph_delay_allreduce_enqueued")
                stack.callback(setattr, module, "_static_graph_delay_allreduce_enqueued", begun)
                module._static_graph_delay_allreduce_enqueued = True  # type: ignore[assignment]
        yield


def _copy_in(parameters: list[Tensor], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        local = local_part(parameter)
        local.copy_(_arrived(value, local.device))


def _point_to(parameters: list[Tensor], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        value = _arrived(value, parameter.device)
        parameter.data = value if value.dtype == parameter.dtype else value.to(parameter.dtype)


def _arrived(value: Tensor, device: torch.device) -> Tensor:
    """The value on this device: as it is, or a copy in the order of the stream.

    Into the host's memory the host waits for it. From there it need not, and must not read the
    value itself (a change of precision would), since a copy into it may be queued still.
    """
    if value.device == device:
        return value
    return value.to(device, non_blocking=value.device.type == "cpu")


def _modules(model: nn.Module) -> list[nn.Module]:
    """`model.modules()`, several times faster."""
    found, seen = [model], {id(model)}
    for module in found:  # grows while it is read
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the next forward gathers the shards anew (FSDP2)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()  # type: ignore[operator]
