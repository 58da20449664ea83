r"""The previous parameters w_{t-1}: kept by a hook, visited without leaving a trace.

MSVR's and ALEXR's corrections need :math:`g_i(w_t;\mathcal B) - g_i(w_{t-1};\mathcal B)` on the
*same* samples with the same dropout masks. `PreviousParameters` copies the parameters just before
each optimizer step and evaluates any function of the model there, and its gradient if asked for,
with the random stream, the buffers (BatchNorm statistics) and the current parameters left exactly
as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .per_parameter import Optimizers, PerParameter, parameters_of, unwrap
from .visit import (
    any_sharded,
    copy_all,
    exchanged,
    fits,
    local_part,
    own_buffers,
    room_for,
    same_randomness,
    wait_for_copies,
    without_reduction,
)

__all__ = ["PerParameter", "PreviousParameters", "after_closure", "unwrap"]

Result = TypeVar("Result")


class PreviousParameters(PerParameter):
    r"""Hold w_{t-1} and evaluate functions there.

    The parameters are exchanged by pointer (`parameter.data`), so everything that uses them is
    rerouted: sub-modules, tied weights, a bare parameter captured in a closure. Sharded
    parameters (FSDP2) exchange the content of the local shard.

    Only torch's random streams are replayed; draw NumPy or Python random numbers in the data
    loader, not in the function.

    Args:
        model: the module (plain, DDP, FSDP2 or compiled).
        optimizer: the optimizer, or several that share the model; w_{t-1} is where the first of
            them to step since the last evaluation found it. A skipped step (GradScaler) copies
            nothing.
        offload: keep w_{t-1} in the host's memory (pinned, for CUDA) instead of on the GPU, which
            then holds it during a visit only, before the activations of the forward pass with
            gradient exist. The values are the same; a step sends the parameters over the bus
            twice. CUDA graphs, which want parameters at fixed addresses, are recorded anew.

    Example:
        >>> import torch, fcco
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> previous = fcco.PreviousParameters(model, optimizer)
        >>> model(torch.ones(1, 1)).sum().backward()
        >>> optimizer.step()
        >>> model.weight.item(), previous.evaluate(lambda: model.weight.item())
        (1.0, 2.0)
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers, *, offload: bool = False) -> None:
        super().__init__(optimizer)
        self.offload = offload
        # A tuple hides the model from the module registry: it has its own state_dict.
        self._model = (model,)
        if any(hasattr(p, "_fsdp_flattened") for p in self._parameters_in_order()):
            raise TypeError(
                "`PreviousParameters` cannot put other values into a model wrapped by "
                "FullyShardedDataParallel (FSDP 1): it would evaluate at the current parameters. "
                "Use `torch.distributed.fsdp.fully_shard` (FSDP2), or a tracker without correction."
            )
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # room for buffers
        self._stepped: set[int] = set()  # optimizers that stepped since the last evaluation
        self._handles = []
        self.attach_hooks()

    @property
    def ready(self) -> bool:
        """Whether a step has been taken; before it, w_{-1} = w_0."""
        return bool(self._saved) or self._loaded is not None

    def snapshot(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Copy the parameters; called before every optimizer step by a hook."""
        self._adopt_loaded()
        for each in self._optimizers if optimizer is None else (optimizer,):
            parameters = parameters_of(each)
            current = parameters
            if any_sharded(parameters):
                current = [local_part(parameter) for parameter in parameters]
            saved = []
            for parameter, tensor in zip(parameters, current, strict=True):
                copy = self._saved.get(parameter)
                if copy is None or not fits(copy, tensor, host=self.offload):
                    self._saved[parameter] = copy = room_for(tensor, host=self.offload)
                saved.append(copy)
            copy_all(saved, current, to_host=self.offload)

    def get_extra_state(self) -> dict[str, Any]:
        """The tensors, by parameter position, for `state_dict()`."""
        if self.offload:
            wait_for_copies(self._saved)
        return super().get_extra_state()

    def forget(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Drop the copy, so that w_{t-1} = w_t at the next evaluation (start of a round)."""
        self._loaded = None
        if optimizer is None:
            self._saved.clear()
        else:
            for parameter in parameters_of(optimizer):
                self._saved.pop(parameter, None)

    def evaluate(self, function: Callable[[], Result]) -> Result:
        """Call `function` at w_{t-1}: no gradient, same randomness, nothing left behind.

        Call it before the forward pass that needs gradients, so that both start from the same
        random state.
        """
        with torch.no_grad(), self._visit():
            result = function()
            # A copy: a parameter, or a view of one, would show other values after the exchange.
            if isinstance(result, Tensor):
                return result.clone()  # type: ignore[return-value]
            return tree_map_only(Tensor, Tensor.clone, result)

    def gradient(
        self, function: Callable[[], tuple[Tensor, Result]], parameters: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], Result]:
        """Like `evaluate`, with gradients: `function` returns a scalar and anything else.

        Returns this rank's gradients of the scalar (None for a parameter that it does not use) and
        the other result. No `.grad` is touched, and DDP does not see the backward pass.
        """
        (model,) = self._model
        if any_sharded(parameters):
            raise TypeError(
                "`PreviousParameters.gradient` cannot take gradients at other parameters of a "
                "sharded model (FSDP2), whose backward pass reduces them into `.grad`; use DDP."
            )
        gradients: Sequence[Tensor | None] = [None] * len(parameters)
        with torch.enable_grad(), self._visit(), without_reduction(model):
            scalar, result = function()
            # Casts belong to the forward pass, here as in your own loop.
            with torch.autocast(parameters[0].device.type if parameters else "cpu", enabled=False):
                if scalar.requires_grad and parameters:
                    gradients = torch.autograd.grad(scalar, parameters, allow_unused=True)
            return list(gradients), tree_map_only(Tensor, lambda x: x.detach().clone(), result)

    def moved(self) -> dict[Tensor, Tensor]:
        """w_t - w_{t-1}, by parameter."""
        self._adopt_loaded()
        self._stepped.clear()
        return {p: local_part(p) - saved.to(p.device) for p, saved in self._saved.items()}

    @contextmanager
    def _visit(self) -> Iterator[None]:
        self._adopt_loaded()
        self._stepped.clear()
        (model,) = self._model
        devices = {p.device for p in self._saved or model.parameters() if p.device.type != "cpu"}
        with (
            same_randomness(devices),
            own_buffers(model, self._copies),
            exchanged(self._saved, model),
        ):
            yield

    def attach_hooks(self) -> None:
        """Listen to the optimizers (again)."""
        for each in self._optimizers:
            self._handles.append(each.register_step_pre_hook(self._before_step))
            self._handles.append(each.register_step_post_hook(self._after_step))

    def detach_hooks(self) -> None:
        """Stop listening to the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Copy now or, when the step runs a closure, after it: the closure still needs w_{t-1}."""
        return after_closure(args, kwargs, lambda: self._snapshot_once(optimizer))

    def _snapshot_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy all parameters, unless another optimizer's step did so in this iteration."""
        if not self._stepped or id(optimizer) in self._stepped:
            self._stepped.clear()
            self.snapshot()
        self._stepped.add(id(optimizer))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A proximal-point optimizer that begins a round has z_{-1} = z_0 (Alg. 2, line 3).
        if getattr(optimizer, "round_begins", False):
            self.forget(optimizer)

    def _fitted(self, tensor: Tensor, local: Tensor) -> Tensor:
        return room_for(local, host=self.offload).copy_(tensor)


def after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], action: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Act once a step's gradients are there: now or, when it runs a closure, after that.

    To be called by an optimizer's pre-hook with its arguments; returns what the hook returns.
    """
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
