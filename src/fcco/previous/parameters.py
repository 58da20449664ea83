r"""The previous parameters w_{t-1}: copied by a hook, evaluated without side effects.

MSVR's and ALEXR's corrections need :math:`g_i(w_t;\mathcal B) - g_i(w_{t-1};\mathcal B)` on the
*same* samples with the same dropout masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .._state import CheckedState, Uninterrupted, pack, unpack
from .swap import (
    ParameterSwap,
    any_sharded,
    copy_all,
    empty_copy,
    fits,
    local_part,
    wait_for_copies,
    without_reduction,
)

__all__ = [
    "Optimizers", "PreviousParameters", "after_closure", "parameters_of", "unwrap",
]  # fmt: skip

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Result = TypeVar("Result")


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside a wrapper such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return unwrap(inner)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"`optimizer` must be a torch.optim.Optimizer but is: {type(optimizer).__name__}. The "
            "model comes first, then the optimizer."
        )
    return optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that it steps, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class PreviousParameters(CheckedState):
    r"""Hold w_{t-1} and evaluate functions there.

    Only torch's random streams are replayed; draw NumPy or Python random numbers in the data
    loader, not in the function.

    Args:
        model: the module (plain, DDP, FSDP2 or compiled).
        optimizer: the optimizer, or several that share the model; w_{t-1} is where the first of
            them to step since the last evaluation found it. A skipped step (GradScaler) copies
            nothing.
        offload: keep w_{t-1} in the host's memory (pinned, for CUDA) instead of on the GPU, which
            then holds it during an evaluation only. The values are the same; a step sends the
            parameters over the bus twice. CUDA graphs are recorded anew.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers, *, offload: bool = False) -> None:
        super().__init__()
        several = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
        self.optimizers, self.offload = tuple(unwrap(each) for each in several), offload
        if any(hasattr(p, "_fsdp_flattened") for p in self._parameters_in_order()):
            raise TypeError(
                "`PreviousParameters` cannot put other values into a model wrapped by "
                "FullyShardedDataParallel (FSDP 1). Use `torch.distributed.fsdp.fully_shard` "
                "(FSDP2), or a tracker without correction."
            )
        # A tuple hides the model from the module registry: it has its own state_dict.
        self._model = (model,)
        self._swap = ParameterSwap(model)
        self._saved: dict[Tensor, Tensor] = {}
        self._loaded: dict[str, Tensor] | None = None  # from a checkpoint, not yet checked
        self.snapshots = 0  # how often the parameters were copied
        self._stepped: set[int] = set()  # optimizers that stepped since the last evaluation
        self._handles: list[Any] = []
        self.attach_hooks()

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
        if self.offload:
            wait_for_copies(self._saved)
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
            if int(key) >= len(parameters):
                raise ValueError(
                    f"the checkpoint has parameter {key} but the optimizer only "
                    f"{len(parameters)}; it belongs to another model."
                )
            local = local_part(parameters[int(key)])
            if tensor.shape != local.shape:
                raise ValueError(
                    f"parameter {key} has shape {tuple(tensor.shape)} in the checkpoint but "
                    f"{tuple(local.shape)} in the optimizer: another model or sharding."
                )
            found.append((parameters[int(key)], local, tensor))
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

    def attach_hooks(self) -> None:
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))

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
            self.attach_hooks()


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
