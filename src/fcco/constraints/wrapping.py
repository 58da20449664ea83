"""Optimizers that decide when and how others step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..previous import unwrap

__all__ = ["WrappingOptimizer"]


class WrappingOptimizer(torch.optim.Optimizer):
    """Base of optimizers that let others make the step.

    The parameter groups are those of the first, the very same objects, so that a scheduler may
    drive either. `state_dict()` holds the state of all. Once an objective uses it, an inner
    optimizer that is stepped on its own raises an error: the rest of the method would be left out
    silently.

    Args:
        inner: the optimizers that make the steps; all hold the same parameters.
    """

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        name = type(self).__name__
        self.inner = tuple(dict.fromkeys(unwrap(each) for each in inner))
        held = [{p for group in each.param_groups for p in group["params"]} for each in self.inner]
        if any(parameters != held[0] for parameters in held):
            raise ValueError(f"`{name}`: all of its optimizers must hold the same parameters.")
        first = self.inner[0]
        self._shared = False
        super().__init__([{"params": list(group["params"])} for group in first.param_groups], {})
        self.param_groups, self._shared = first.param_groups, True
        self._stepping = False
        self._guards: list[Any] = []

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in order."""
        return [p for group in self.param_groups for p in group["params"]]

    def hold(self) -> None:
        """From now on the inner optimizers step only here; an objective calls this."""
        self.release()
        self._guards = [each.register_step_pre_hook(self._refuse_alone) for each in self.inner]

    def release(self) -> None:
        """Give the inner optimizers back: they may step on their own again."""
        for guard in self._guards:
            guard.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to every inner optimizer; options go to the first."""
        if not self._shared:
            super().add_param_group(param_group)
            return
        first, *others = self.inner
        first.add_param_group(param_group)
        for other in others:
            other.add_param_group({"params": list(param_group["params"])})

    def _let_step(
        self,
        optimizer: torch.optim.Optimizer,
        factor: float = 1.0,
        closure: Callable[[], Any] | None = None,
    ) -> None:
        """Let one of the inner optimizers step, with `factor` times its step sizes."""
        rates = [group["lr"] for group in optimizer.param_groups]
        self._stepping = True
        try:
            if factor != 1:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
            optimizer.step() if closure is None else optimizer.step(closure)
        finally:
            self._stepping = False
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _refuse_alone(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._stepping:
            raise RuntimeError(
                f"Step `objective.optimizer` ({type(self).__name__}), not the "
                f"{type(optimizer).__name__} inside it: the method would be left out."
            )

    @staticmethod
    def _evaluated(closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _own_state(self) -> dict[str, Any]:
        """What a subclass adds to `state_dict()`."""
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Restore what `_own_state` gave."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the inner optimizers and its own."""
        state = super().state_dict()
        state["inner"] = [each.state_dict() for each in self.inner]
        state["own"] = self._own_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore everything that `state_dict` saved."""
        saved = state_dict["inner"]
        if len(saved) != len(self.inner):
            raise ValueError(
                f"`{type(self).__name__}.load_state_dict`: the checkpoint has {len(saved)} inner "
                f"optimizer(s) but this one {len(self.inner)}."
            )
        for each, state in zip(self.inner, saved, strict=True):
            # torch's optimizers keep the tensors they load and then change them in place.
            each.load_state_dict(copy.deepcopy(state))
        self.param_groups = self.inner[0].param_groups  # loading replaced them
        self._load_own_state(state_dict["own"])
