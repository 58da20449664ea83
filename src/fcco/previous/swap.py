"""Temporarily replace parameter values; random streams, buffers and weights are restored."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._state import KeepsPrecision, Uninterrupted

__all__ = [
    "ParameterSwap", "any_sharded", "copy_all", "empty_copy", "fits", "local_part",
    "parameters_at", "reshard", "versions_kept", "wait_for_copies", "without_reduction",
]  # fmt: skip


def any_sharded(parameters: Iterable[Tensor]) -> bool:
    """Whether any parameter is a DTensor (FSDP2)."""
    # It can exist only after its module was imported; importing that here would be slow.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(p, module.DTensor) for p in parameters)


def local_part(parameter: Tensor) -> Tensor:
    """The tensor that this process holds, without gradient."""
    plain = parameter.detach()
    return plain.to_local() if any_sharded((parameter,)) else plain  # type: ignore[attr-defined]


def copy_all(targets: list[Tensor], sources: list[Tensor], *, to_host: bool = False) -> None:
    """Copy many tensors with few kernels: one for each dtype.

    Copies `to_host` are only queued: later work of the same stream finds them done, and the host
    does after `wait_for_copies`.
    """
    dtypes = {target.dtype for target in targets}
    queued = to_host and all(source.device.type in ("cpu", "cuda") for source in sources)
    with torch.no_grad():
        if len(dtypes) == 1:
            torch._foreach_copy_(targets, sources, non_blocking=queued)
            return
        for dtype in dtypes:
            pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t.dtype == dtype]
            torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs], non_blocking=queued)


def empty_copy(tensor: Tensor, *, host: bool) -> Tensor:
    """Memory for a copy, on the tensor's device or in the host's memory (pinned for CUDA)."""
    if not host:
        return torch.empty_like(tensor, requires_grad=False)
    pinned = tensor.device.type == "cuda"
    return torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=pinned)


def fits(copy: Tensor, tensor: Tensor, *, host: bool) -> bool:
    """Whether `empty_copy` would make such a tensor."""
    if copy.dtype != tensor.dtype or copy.shape != tensor.shape:
        return False
    if not host:
        return copy.device == tensor.device
    return copy.device.type == "cpu" and (tensor.device.type != "cuda" or copy.is_pinned())


def wait_for_copies(parameters: Iterable[Tensor]) -> None:
    """Wait until the host can read copies in its memory."""
    for device in {p.device for p in parameters if p.device.type == "cuda"}:
        torch.cuda.synchronize(device)


class _Undo(NamedTuple):
    """What was changed, and what stood there before."""

    random: Tensor
    device_random: dict[torch.device, Tensor]
    buffers: list[tuple[dict[str, Any], dict[str, Any]]]
    ddp_flags: list[tuple[Any, bool]]
    parameters: list[Tensor]
    values: list[Tensor]
    sharded: bool


class ParameterSwap:
    """Evaluate a model at other parameter values and restore everything afterwards.

    Plain parameters change their pointer (`parameter.data`), so everything that uses them is
    rerouted: sub-modules, tied weights, a bare parameter captured in a closure. Shards (FSDP2)
    exchange the content of the local shard.

    What must be restored is written down before anything changes. Should an interrupt (Ctrl-C)
    hit the restoring itself, the next use of this object completes it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = (model,)
        self._undo: _Undo | None = None
        # Copies of buffers by the buffer's id, kept between uses: a network with batch norm has
        # hundreds, and one kernel fills them all. A buffer that two modules share has one copy.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def at(self, values: Mapping[Tensor, Tensor]) -> Iterator[None]:
        if self._undo is not None:
            self.restore()
        (model,) = self._model
        parameters = list(values)
        sharded = any_sharded(parameters)
        if sharded:
            reshard(model)
        current = [local_part(p).clone() if sharded else p.data for p in parameters]
        devices = {p.device for p in values or model.parameters() if p.device.type != "cpu"}
        random = {d: torch.get_device_module(d).get_rng_state(d) for d in devices}
        # All memory is taken before anything changes: running out of it leaves no trace.
        buffers, copies, flags = self._scratch_buffers(model)
        originals = [(owned, dict(owned)) for owned in buffers]  # the same tensors, not copies
        self._undo = _Undo(
            torch.get_rng_state(), random, originals, flags, parameters, current, sharded
        )
        try:
            for owned in buffers:
                for name, buffer in owned.items():
                    if buffer is not None:
                        owned[name] = copies[id(buffer)][1]
            self._copies = copies
            _put(parameters, list(values.values()), sharded)
            torch.clear_autocast_cache()  # casts of the current weights must not be used here
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Restore everything: when `at` ends, and by the next use if that was interrupted."""
        if self._undo is not None:
            with Uninterrupted():
                self._put_back(self._undo)

    def _put_back(self, undo: _Undo) -> None:
        (model,) = self._model
        if undo.sharded:
            reshard(model)
        _put(undo.parameters, undo.values, undo.sharded)
        torch.clear_autocast_cache()  # nor casts made there afterwards
        for owned, originals in undo.buffers:  # also those that the function added or filled
            if owned or originals:
                owned.clear()
                owned.update(originals)
        for ddp, needed in undo.ddp_flags:
            ddp.require_forward_param_sync = needed
        torch.set_rng_state(undo.random)
        for device, state in undo.device_random.items():
            torch.get_device_module(device).set_rng_state(state, device)
        self._undo = None

    def _scratch_buffers(
        self, model: nn.Module
    ) -> tuple[list[dict[str, Any]], dict[int, tuple[Tensor, Tensor]], list[tuple[Any, bool]]]:
        """Filled copies of all buffers that a forward pass may change (BatchNorm statistics)."""
        owners: list[dict[str, Any]] = []
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        flags: list[tuple[Any, bool]] = []
        for module in _modules(model):
            if "require_forward_param_sync" in module.__dict__:
                # DDP: after a pass without gradient, the next would not send rank 0's buffers.
                flags.append((module, module.__dict__["require_forward_param_sync"]))
            if isinstance(module, KeepsPrecision):
                continue  # a tracker inside the model: large, and no forward pass changes it
            # A module without buffers may get one in the pass, which has to go again.
            owners.append(module._buffers)
            for buffer in module._buffers.values():
                if buffer is not None:
                    pair = copies.get(id(buffer)) or self._copies.get(id(buffer))
                    if pair is None or pair[0] is not buffer:
                        pair = (buffer, torch.empty_like(buffer))
                    copies[id(buffer)] = pair
        if copies:
            copy_all([copy for _, copy in copies.values()], [own for own, _ in copies.values()])
        return owners, copies, flags


@contextmanager
def versions_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Restore the version counters of tensors on exit; their values must be restored too.

    An open graph then stays valid, and an open tracking step open, which an objective would end at
    parameters that changed. Inside, the counters do differ, so that a backward pass of a graph from
    outside is still refused.
    """
    with ExitStack() as stack:
        for parameter in parameters:
            stack.enter_context(torch.autograd._unsafe_preserve_version_counter(parameter))
        yield


@contextmanager
def parameters_at(
    points: Mapping[Tensor, Tensor], model: nn.Module | None = None
) -> Iterator[None]:
    """Copy other values into parameters for a while, between steps.

    The model is needed for shards (FSDP2): what was gathered must not serve a forward pass.
    """
    sharded = any_sharded(points)
    if sharded and model is None:
        raise TypeError(
            "Parameters of a sharded model (FSDP2) cannot be moved unless the model is known, "
            "whose gathered weights must be freed: give the optimizer to an objective."
        )
    kept = {parameter: parameter.detach().clone() for parameter in points}

    def put(values: Mapping[Tensor, Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in values.items():
                parameter.copy_(value)
        if sharded and model is not None:
            reshard(model)

    with versions_kept(points):
        try:
            put(points)
            yield
        finally:
            put(kept)


@contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """Hide a backward pass from DDP, so that its gradients stay those of this rank."""
    with ExitStack() as stack:
        for module in _modules(model):
            if "require_backward_grad_sync" in module.__dict__:
                stack.enter_context(module.no_sync())  # type: ignore[operator]
                # With a static graph DDP would take this pass for the first one.
                begun = module.__dict__.get("_static_graph_delay_allreduce_enqueued")
                stack.callback(setattr, module, "_static_graph_delay_allreduce_enqueued", begun)
                module._static_graph_delay_allreduce_enqueued = True  # type: ignore[assignment]
        yield


def _put(parameters: list[Tensor], values: list[Tensor], sharded: bool) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        if value.device != parameter.device:
            # Copies to the host are synchronous. Copies from it are queued, and the dtype is
            # converted on the device, because a copy into the host's memory may be pending still.
            value = value.to(parameter.device, non_blocking=value.device.type == "cpu")
        if sharded:
            local_part(parameter).copy_(value)
        else:
            parameter.data = value if value.dtype == parameter.dtype else value.to(parameter.dtype)


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
