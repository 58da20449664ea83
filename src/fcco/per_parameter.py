"""A tensor for each parameter of an optimizer, kept with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .visit import local_part

__all__ = ["Optimizers", "PerParameter", "parameters_of", "unwrap"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class PerParameter(nn.Module):
    """A tensor for each parameter of some optimizers, saved by position in `state_dict()`.

    Args:
        optimizer: the optimizer, or several.
    """

    def __init__(self, optimizer: Optimizers) -> None:
        super().__init__()
        self._optimizers = tuple(unwrap(o) for o in _as_sequence(optimizer))
        self._saved: dict[Tensor, Tensor] = {}
        self._loaded: dict[str, Tensor] | None = None

    def get_extra_state(self) -> dict[str, Any]:
        """The tensors, by parameter position, for `state_dict()`."""
        if self._loaded is not None:
            return {"parameters": dict(self._loaded)}
        keys = {parameter: str(k) for k, parameter in enumerate(self._parameters_in_order())}
        saved = {keys[p]: saved.clone() for p, saved in self._saved.items() if p in keys}
        return {"parameters": saved}

    def set_extra_state(self, state: Any) -> None:
        """Restore the tensors (checked against the parameters when they are first used)."""
        self._saved.clear()
        loaded = dict(state["parameters"])
        self._loaded = loaded or None

    def _fitted(self, tensor: Tensor, local: Tensor) -> Tensor:
        """A copy of a loaded tensor on the device of its parameter; as wide as it was."""
        return tensor.to(local.device, copy=True)

    def _adopt_loaded(self) -> None:
        if self._loaded is None:
            return
        call, parameters = f"`{type(self).__name__}.load_state_dict`", self._parameters_in_order()
        for key, tensor in self._loaded.items():
            if int(key) >= len(parameters):
                raise ValueError(
                    f"{call}: the checkpoint has parameter {key} but the optimizer only "
                    f"{len(parameters)}; it belongs to another model."
                )
            parameter = parameters[int(key)]
            local = local_part(parameter)
            if tensor.shape != local.shape:
                raise ValueError(
                    f"{call}: parameter {key} has shape {tuple(tensor.shape)} in the checkpoint "
                    f"but {tuple(local.shape)} in the optimizer; the checkpoint belongs to another "
                    "model or sharding."
                )
            self._saved[parameter] = self._fitted(tensor, local)
        self._loaded = None

    def _parameters_in_order(self) -> list[Tensor]:
        return [p for optimizer in self._optimizers for p in parameters_of(optimizer)]


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside a wrapper such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return unwrap(inner)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"`optimizer` must be a torch.optim.Optimizer but is: {type(optimizer).__name__}."
        )
    return optimizer


def _as_sequence(optimizer: Any) -> Sequence[Any]:
    return optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that it steps, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
