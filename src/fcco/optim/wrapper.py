"""Optimizers that are part of a method and step others: what an objective knows of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..previous import parameters_of, unwrap


class MethodOptimizer(torch.optim.Optimizer):
    """Base of optimizers that decide when and how others step.

    An objective calls `join` when it is built and `leave` when it detaches. In between, a wrapped
    optimizer that is stepped on its own raises an error: the rest of the method would be left out
    silently. A subclass sets `wrapped`, then calls `super().__init__`.
    """

    wrapped: tuple[torch.optim.Optimizer, ...] = ()  # make the steps
    model: nn.Module | None = None  # whose parameters these are, once an objective has joined
    _guards: Sequence[Any] = ()  # hooks of the wrapped optimizers
    _stepping = False

    @property
    def round_begins(self) -> bool:
        """Whether the next step is the first of a round, where w_{t-1} = w_t."""
        return False

    @property
    def parameters(self) -> list[Tensor]:
        return parameters_of(self)

    def join(self, model: nn.Module) -> None:
        """Tell whose parameters these are; from now on the wrapped optimizers step only here."""
        self.leave()
        self.model = model
        self._guards = [each.register_step_pre_hook(self._refuse_alone) for each in self.wrapped]

    def leave(self) -> None:
        for guard in self._guards:
            guard.remove()
        self._guards = []

    def _refuse_alone(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._stepping:
            raise RuntimeError(
                f"Step `objective.optimizer` ({type(self).__name__}), not the "
                f"{type(optimizer).__name__} inside it: the method would be left out."
            )

    def step_wrapped(self, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
        """Step one of the wrapped optimizers with `factor` times its step sizes."""
        rates = [(group, group["lr"]) for group in optimizer.param_groups if factor != 1]
        self._stepping = True
        try:
            for group, rate in rates:
                group["lr"] = rate * factor
            optimizer.step()
        finally:
            self._stepping = False
            for group, rate in rates:
                group["lr"] = rate

    @staticmethod
    def _evaluated(closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def own_state(self) -> dict[str, Any]:
        """What `state_dict()` must hold beside the states of this and the wrapped optimizers."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restore what `own_state` gave."""

    def state_dict(self) -> dict[str, Any]:
        wrapped = [each.state_dict() for each in self.wrapped]
        return {**super().state_dict(), "wrapped": wrapped, "own": self.own_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        saved, own = rest.pop("wrapped"), rest.pop("own")
        if len(saved) != len(self.wrapped):
            call, own = f"`{type(self).__name__}.load_state_dict`", len(self.wrapped)
            raise ValueError(f"{call}: it has {len(saved)} wrapped optimizer(s) instead of {own}.")
        for each, state in zip(self.wrapped, saved, strict=True):
            # torch's optimizers keep the tensors they load and then change them in place.
            each.load_state_dict(copy.deepcopy(state))
        super().load_state_dict(rest)
        self.load_own_state(own)

    def __getstate__(self) -> dict[str, Any]:
        # torch's own version keeps the groups and the state only. Hooks stay behind; an objective
        # that is copied along joins again.
        dropped = ("_guards", "step", "_zero_grad_profile_name")
        kept = (k for k in self.__dict__ if k not in dropped and not k.startswith("_optimizer_"))
        return {k: self.__dict__[k] for k in kept}


class SharedGroupsOptimizer(MethodOptimizer):
    """Base of wrappers whose parameter groups are those of the first wrapped optimizer.

    They are the very same objects, so that a scheduler may drive either. All wrapped optimizers
    must hold the same parameters.
    """

    _shared = False

    def __init__(self, *wrapped: torch.optim.Optimizer) -> None:
        self.wrapped = tuple(dict.fromkeys(unwrap(each) for each in wrapped))  # each once, in order
        held = [set(parameters_of(each)) for each in self.wrapped]
        if any(parameters != held[0] for parameters in held):
            raise ValueError(f"{type(self).__name__} needs optimizers of the same parameters.")
        first = self.wrapped[0]
        super().__init__([{"params": list(group["params"])} for group in first.param_groups], {})
        self.param_groups, self._shared = first.param_groups, True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to every wrapped optimizer; options go to the first."""
        if not self._shared:  # called by torch's constructor
            super().add_param_group(param_group)
            return
        first, *others = self.wrapped
        first.add_param_group(param_group)
        for other in others:
            other.add_param_group({"params": list(param_group["params"])})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.param_groups = self.wrapped[0].param_groups  # loading replaced them
