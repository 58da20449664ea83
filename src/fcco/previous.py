r"""The previous parameters w_{t-1}: copied by a hook, evaluated without side effects.

MSVR's and ALEXR's corrections need :math:`g_i(w_t;\mathcal B) - g_i(w_{t-1};\mathcal B)` on the
*same* samples with the same dropout masks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ._state import CheckedState, KeepsPrecision, Uninterrupted, pack, unpack

__all__ = [
    "Optimizers", "ParameterSwap", "PreviousParameters", "after_closure", "any_sharded",
    "parameters_at", "parameters_of", "reshard", "unwrap",
]  # fmt: skip

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Result = TypeVar("Result")


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside a wrapper such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return unwrap(inner)
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"The model comes first, then a torch.optim.Optimizer: {kind}.")
    return optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that it steps, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class PreviousParameters(CheckedState):
    r"""The parameters before the last step, and functions evaluated there.

    Only torch's random streams are replayed; draw NumPy or Python random numbers in the data
    loader, not in the function.

    Args:
        model: the module (plain, DDP, FSDP2 or compiled).
        optimizer: the optimizer, or several that share the model; w_{t-1} is where the first of
            them to step since the last evaluation found it. A skipped step (GradScaler) copies
            nothing.
        offload: keep w_{t-1} in the host's memory (pinned, for CUDA) instead of on the GPU, which
            then holds it during an evaluation only: the same values, two transfers a step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers, *, offload: bool = False) -> None:
        super().__init__()
        several = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
        self.optimizers, self.offload = tuple(unwrap(each) for each in several), offload
        if any(hasattr(p, "_fsdp_flattened") for p in self._parameters_in_order()):
            raise TypeError(
                "FullyShardedDataParallel (FSDP 1) has no values at w_{t-1}. Use `fully_shard` "
                "(FSDP2), or a tracker without correction."
            )
        # A tuple hides the model from the module registry: it has its own state_dict.
        self._model = (model,)
        self._swap = ParameterSwap(model)
        self._saved: dict[Tensor, Tensor] = {}
        self._loaded: dict[str, Tensor] | None = None  # from a checkpoint, not yet checked
        self.snapshots = 0  # how often the parameters were copied
        self._stepped: set[int] = set()  # optimizers that stepped since the last evaluation
        self._listen()

    def _parameters_in_order(self) -> list[Tensor]:
        return [p for optimizer in self.optimizers for p in parameters_of(optimizer)]

    @property
    def tensors(self) -> dict[Tensor, Tensor]:
        """The copy of each parameter."""
        if self._loaded is not None:
            for parameter, local, tensor in self._matched(self._loaded):
                self._saved[parameter] = empty_copy(local, host=self.offload).copy_(tensor)
            self._loaded = None
        return self._saved

    @property
    def ready(self) -> bool:
        """Whether a step has been taken; before it, w_{-1} = w_0."""
        return bool(self._saved) or self._loaded is not None

    # The state: the copies by the position of their parameters.

    def get_extra_state(self) -> Tensor:
        self._swap.restore()
        if self._loaded is not None:
            return pack(self._loaded)
        if self.offload:  # the host reads copies that may be queued still
            for device in {p.device for p in self._saved if p.device.type == "cuda"}:
                torch.cuda.synchronize(device)
        keys = {parameter: str(k) for k, parameter in enumerate(self._parameters_in_order())}
        return pack({keys[p]: saved for p, saved in self._saved.items() if p in keys})

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if no training can have led to this state."""
        loaded = unpack(state["_extra_state"]) if state else {}
        self._matched(loaded)
        for key, tensor in loaded.items():
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"the previous value of parameter {key} is NaN or infinite.")

    def set_extra_state(self, state: Any) -> None:
        self._saved.clear()
        self._loaded = unpack(state) or None

    def _matched(self, loaded: dict[str, Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Parameters, what this process holds of each, and what was loaded for it."""
        found, parameters = [], self._parameters_in_order()
        for key, tensor in loaded.items():
            parameter = parameters[int(key)] if int(key) < len(parameters) else None
            if parameter is None or tensor.shape != local_part(parameter).shape:
                raise ValueError(
                    f"the optimizer has no parameter {key} of shape {tuple(tensor.shape)}: another "
                    "model or sharding."
                )
            found.append((parameter, local_part(parameter), tensor))
        return found

    def snapshot(self) -> None:
        """Copy the parameters; called before every optimizer step by a hook."""
        self._swap.restore()
        offload, saved = self.offload, self.tensors
        sources = parameters = self._parameters_in_order()
        if any_sharded(parameters):
            sources = [local_part(p) for p in parameters]
        targets = []
        for parameter, source in zip(parameters, sources, strict=True):
            copy = saved.get(parameter)
            if copy is None or not fits(copy, source, host=offload):
                saved[parameter] = copy = empty_copy(source, host=offload)
            targets.append(copy)
        with Uninterrupted():
            copy_all(targets, sources, to_host=offload)
            self.snapshots += 1

    def forget(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Drop the copy, so that w_{t-1} = w_t at the next evaluation (start of a round)."""
        self._loaded = None
        if optimizer is None:
            self._saved.clear()
        else:
            for parameter in parameters_of(optimizer):
                self._saved.pop(parameter, None)

    def evaluate(self, function: Callable[[], Result]) -> Result:
        """Call `function` at w_{t-1}: no gradient, same randomness, no side effects.

        To be called before the forward pass with gradients: both start from one random state.
        """
        self._stepped.clear()
        with torch.no_grad(), self._swap.at(self.tensors):
            result = function()
            # A copy: a parameter, or a view of one, would show other values after the swap.
            if isinstance(result, Tensor):
                return result.clone()  # type: ignore[return-value]
            return tree_map_only(Tensor, Tensor.clone, result)

    def evaluate_with_graph(self, function: Callable[[], Result]) -> Result:
        """Like `evaluate`, for a function that differentiates; DDP does not see it."""
        self._stepped.clear()
        (model,) = self._model
        with torch.enable_grad(), self._swap.at(self.tensors), without_reduction(model):
            return tree_map_only(Tensor, lambda x: x.detach().clone(), function())

    def moved(self) -> dict[Tensor, Tensor]:
        """w_t - w_{t-1}, by parameter."""
        self._stepped.clear()
        return {p: local_part(p) - saved.to(p.device) for p, saved in self.tensors.items()}

    def _listen(self) -> None:
        self._handles = [o.register_step_pre_hook(self._before_step) for o in self.optimizers]

    def detach_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Copy now or, when the step runs a closure, after it: the closure still needs w_{t-1}."""
        # args[0] is the optimizer itself; a closure would be args[1].
        if len(args) < 2 and not kwargs and len(self.optimizers) == 1:  # the usual step
            return self.snapshot()
        return after_closure(args, kwargs, lambda: self._snapshot_once(optimizer))

    def _snapshot_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy all parameters, unless another optimizer's step did so in this iteration."""
        if not self._stepped or id(optimizer) in self._stepped:
            self._stepped.clear()
            self.snapshot()
        self._stepped.add(id(optimizer))

    def __getstate__(self) -> dict[str, Any]:
        # A copy made by pickle or deepcopy has other optimizers: it attaches to those.
        self._swap.restore()
        state = {k: v for k, v in self.__dict__.items() if k not in ("_handles", "_swap")}
        return state | {"_listens": bool(self._handles), "_stepped": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        listens = state.pop("_listens")
        super().__setstate__(state)
        self._handles, self._swap = [], ParameterSwap(*self._model)
        if listens:
            self._listen()


def after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], action: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Act once a step's gradients are there, after its closure; returns what a pre-hook returns."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        action()
        return None

    def then_act() -> Any:
        with torch.enable_grad():
            loss = closure()
        action()
        return loss

    if len(args) > 1:
        return (args[0], then_act, *args[2:]), kwargs
    return args, {**kwargs, "closure": then_act}


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
        self._undo: list[Callable[[], Any]] = []  # each may be called again
        # Kept between uses: a network with batch norm has hundreds, and one kernel fills them all.
        self._copies: dict[Tensor, Tensor] = {}

    @contextmanager
    def at(self, values: Mapping[Tensor, Tensor]) -> Iterator[None]:
        if self._undo:
            self.restore()
        (model,) = self._model
        parameters, modules, sharded = list(values), _modules(model), any_sharded(values)
        if sharded:
            reshard(model)
        # All memory is taken before anything changes: running out of it leaves no trace.
        current = [local_part(p).clone() if sharded else p.data for p in parameters]
        devices = {p.device for p in values or model.parameters() if p.device.type != "cpu"}
        # A tracker inside the model is large, and no forward pass changes it. A module without
        # buffers may get one in the pass, which has to go again.
        owners = [m._buffers for m in modules if not isinstance(m, KeepsPrecision)]
        buffers = {b for owned in owners for b in owned.values() if b is not None}
        known = self._copies
        copies = {b: known[b] if b in known else torch.empty_like(b) for b in buffers}
        copy_all(list(copies.values()), list(copies))
        self._undo = [
            *([partial(reshard, model)] if sharded else []),
            partial(_put, parameters, current, sharded),
            torch.clear_autocast_cache,  # nor may casts made there be used afterwards
            partial(_refill, [(owned, dict(owned)) for owned in owners]),
            partial(torch.set_rng_state, torch.get_rng_state()),
        ]
        for device in devices:
            random = torch.get_device_module(device)
            self._undo.append(partial(random.set_rng_state, random.get_rng_state(device), device))
        for ddp in modules:
            # After a pass without gradient, DDP would not send rank 0's buffers in the next.
            if isinstance(ddp, nn.parallel.DistributedDataParallel):
                flag = "require_forward_param_sync"
                self._undo.append(partial(setattr, ddp, flag, ddp.require_forward_param_sync))
        try:
            for owned in owners:
                owned.update({name: copies[b] for name, b in owned.items() if b is not None})
            self._copies = copies
            _put(parameters, list(values.values()), sharded)
            torch.clear_autocast_cache()  # casts of the current weights must not be used here
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Restore everything: when `at` ends, and by the next use if that was interrupted."""
        if self._undo:
            with Uninterrupted():
                for undo in self._undo:
                    undo()
                self._undo = []


def _refill(buffers: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for owned, originals in buffers:  # also those that the function added or filled
        if owned or originals:
            owned.clear()
            owned.update(originals)


@contextmanager
def parameters_at(
    points: Mapping[Tensor, Tensor], model: nn.Module | None = None
) -> Iterator[None]:
    """Copy other values into parameters for a while, between steps.

    The model is needed for shards (FSDP2): what was gathered must not serve a forward pass.
    """
    sharded = any_sharded(points)
    if sharded and model is None:
        raise TypeError("To move shards (FSDP2), first give the optimizer to an objective.")
    kept = {parameter: parameter.detach().clone() for parameter in points}

    def put(values: Mapping[Tensor, Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in values.items():
                parameter.copy_(value)
        if sharded and model is not None:
            reshard(model)

    with ExitStack() as stack:
        # With its version counters an open graph stays valid, and an open tracking step open. They
        # differ inside, so that a backward pass of a graph from outside is refused there.
        for parameter in points:
            stack.enter_context(torch.autograd._unsafe_preserve_version_counter(parameter))
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
            if isinstance(module, nn.parallel.DistributedDataParallel):
                stack.enter_context(module.no_sync())
                if module.static_graph:  # DDP would take this pass for the first one
                    begun = module._static_graph_delay_allreduce_enqueued
                    stack.callback(setattr, module, "_static_graph_delay_allreduce_enqueued", begun)
                    module._static_graph_delay_allreduce_enqueued = True
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
    has to wait for them.
    """
    queued = to_host and all(source.device.type in ("cpu", "cuda") for source in sources)
    with torch.no_grad():
        for dtype in {target.dtype for target in targets}:
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
    same = copy.dtype == tensor.dtype and copy.shape == tensor.shape
    pinned = tensor.device.type != "cuda" or copy.is_pinned()
    return same and (copy.is_cpu and pinned if host else copy.device == tensor.device)
