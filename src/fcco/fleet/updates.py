r"""What steps the weights of a run: SGD, Adam, and rounds of ALEXR2.

The rules of torch's optimizers are written out, because `torch.optim` takes one step size for all
parameters, not one per run:

.. math::
    \text{SGD:}\quad v^+ = \mu v + (1-d)\,G,\quad w^+ = w - \eta v^+ \qquad
    \text{Adam:}\quad w^+ = w - \eta\,\hat v/(\sqrt{\hat s} + \epsilon)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..optim import ProximalPoint, proximal_step
from .hyperparameters import Hyperparameter, as_flag
from .run import Flag, Run, State, Unsupported, choose

__all__ = [
    "SGD",
    "Adam",
    "ProximalPointUpdate",
    "RoundLength",
    "Rounds",
    "Update",
    "only_group",
    "read_torch_optimizer",
]

RoundLength = int | Callable[[int], int]
"""The number of steps of a round, or a function of the round that gives it."""


class Update(Protocol):
    """Steps the weights of one run."""

    def start(self, weights: Tensor) -> State:
        """Its state before the first step."""
        ...

    def step(self, run: Run, hyperparameters: Any, gradient: Tensor, state: State) -> State:
        """The weights after a step from those in `state`, and what else changed."""
        ...


class SGDHyperparameters(NamedTuple):
    """The numbers of `torch.optim.SGD`."""

    lr: Hyperparameter
    momentum: Hyperparameter
    dampening: Hyperparameter
    weight_decay: Hyperparameter


@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD`, with momentum or without."""

    momentum: bool

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> tuple[SGD, SGDHyperparameters]:
        """The update of an optimizer, and its numbers."""
        group = only_group(optimizer)
        numbers = SGDHyperparameters(*(float(group[name]) for name in SGDHyperparameters._fields))
        return cls(numbers.momentum != 0), numbers

    def start(self, weights: Tensor) -> State:
        """The number of steps and the velocity."""
        count = weights.new_zeros((), dtype=torch.float64)
        return {"count": count} | ({"velocity": torch.zeros_like(weights)} if self.momentum else {})

    def step(
        self, run: Run, hyperparameters: SGDHyperparameters, gradient: Tensor, state: State
    ) -> State:
        """One step of one run."""
        numbers: SGDHyperparameters = run.narrow(hyperparameters)
        direction = gradient + numbers.weight_decay * state["weights"]
        changed = {"count": state["count"] + 1}
        if self.momentum:
            kept = numbers.momentum * state["velocity"] + (1 - numbers.dampening) * direction
            # torch starts with v = G, without dampening.
            direction = torch.where(state["count"] == 0, direction, kept)
            changed["velocity"] = direction
        return {"weights": state["weights"] - numbers.lr * direction, **changed}


class AdamHyperparameters(NamedTuple):
    """The numbers of `torch.optim.Adam` and `AdamW`."""

    lr: Hyperparameter
    beta1: Hyperparameter
    beta2: Hyperparameter
    eps: Hyperparameter
    weight_decay: Hyperparameter


@dataclass(frozen=True)
class Adam:
    """`torch.optim.Adam`, or `AdamW` when the weight decay is decoupled."""

    decoupled: bool

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> tuple[Adam, AdamHyperparameters]:
        """The update of an optimizer, and its numbers."""
        group = only_group(optimizer)
        numbers = [float(group["lr"]), *map(float, group["betas"])]
        numbers += [float(group["eps"]), float(group["weight_decay"])]
        decoupled = isinstance(optimizer, torch.optim.AdamW)
        adam = cls(decoupled or bool(group.get("decoupled_weight_decay")))
        return adam, AdamHyperparameters(*numbers)

    def start(self, weights: Tensor) -> State:
        """Both moments and the number of steps."""
        zeros = torch.zeros_like(weights)
        count = weights.new_zeros((), dtype=torch.float64)
        return {"mean": zeros, "square": zeros.clone(), "count": count}

    def step(
        self, run: Run, hyperparameters: AdamHyperparameters, gradient: Tensor, state: State
    ) -> State:
        """One step of one run."""
        # 1 - beta^t cancels in single precision: such numbers are formed in double.
        exact, point, count = hyperparameters, state["weights"], state["count"] + 1
        numbers: AdamHyperparameters = run.narrow(exact)
        if self.decoupled:
            point = point * (1 - numbers.lr * numbers.weight_decay)
        else:
            gradient = gradient + numbers.weight_decay * point
        mean = torch.lerp(state["mean"], gradient, (1 - exact.beta1).to(gradient))
        fresh = (1 - exact.beta2).to(gradient)
        square = numbers.beta2 * state["square"] + fresh * (gradient * gradient)
        size = (exact.lr / (1 - exact.beta1**count)).to(gradient)
        spread = (1 - exact.beta2**count).sqrt().to(gradient)
        weights = point - size * (mean / (square.sqrt() / spread + numbers.eps))
        return {"weights": weights, "mean": mean, "square": square, "count": count}


_TORCH: dict[type, type[SGD] | type[Adam]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: Adam,
}


def read_torch_optimizer(optimizer: torch.optim.Optimizer) -> tuple[Update, Any]:
    """The update of an optimizer that steps by itself, alone or inside another, and its numbers."""
    update = _TORCH.get(type(optimizer))
    if update is None:
        raise Unsupported(f"A fleet has no rule for the optimizer {type(optimizer).__name__} here.")
    return update.of(optimizer)


def only_group(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The only parameter group of an optimizer that has made no step."""
    name = type(optimizer).__name__
    if len(optimizer.param_groups) != 1:
        raise Unsupported(f"A fleet needs one group of parameters, but {name} has several.")
    if optimizer.state:
        raise Unsupported(f"A fleet starts from the first step, but {name} has made some.")
    group = optimizer.param_groups[0]
    if unknown := [key for key in ("nesterov", "maximize", "amsgrad") if group.get(key)]:
        raise Unsupported(f"A fleet has no rule for {name}({unknown[0]}=True).")
    return group


class ProximalPointHyperparameters(NamedTuple):
    """The numbers of a `ProximalPoint`, and those of its outer optimizer."""

    outer: Any
    nu: Hyperparameter
    eta: Hyperparameter


@dataclass(frozen=True)
class ProximalPointUpdate:
    """The double loop of ALEXR2, see `fcco.ProximalPoint`.

    Args:
        outer: the update of the outer loop.
    """

    outer: Update

    @classmethod
    def of(
        cls, optimizer: ProximalPoint
    ) -> tuple[ProximalPointUpdate, ProximalPointHyperparameters, RoundLength]:
        """The update of an optimizer, its numbers, and the length of its rounds."""
        group = only_group(optimizer)
        outer, of_outer = read_torch_optimizer(optimizer.outer)
        numbers = ProximalPointHyperparameters(of_outer, float(group["nu"]), float(group["lr"]))
        return cls(outer), numbers, optimizer.inner_steps

    def start(self, weights: Tensor) -> State:
        """The anchor, and the state of the outer loop."""
        return {"anchor": weights.clone(), **self.outer.start(weights)}

    def step(
        self,
        run: Run,
        hyperparameters: ProximalPointHyperparameters,
        gradient: Tensor,
        state: State,
    ) -> State:
        """One inner step; where a round ends, one outer step too."""
        numbers: ProximalPointHyperparameters = run.narrow(hyperparameters)
        z, ends = state["weights"], run.flags.ends
        anchor = choose(run.flags.begins, lambda: z, lambda: state["anchor"])
        after = proximal_step(z, anchor, gradient, numbers.eta, numbers.nu)
        if ends is False:
            return {"weights": after, "anchor": anchor}
        envelope_gradient = (anchor - after) / numbers.nu
        at_anchor = {**state, "weights": anchor}
        outer = self.outer.step(run, hyperparameters.outer, envelope_gradient, at_anchor)
        if ends is not True:
            inside = {**state, "weights": after}
            outer = {name: torch.where(ends, new, inside[name]) for name, new in outer.items()}
        return {**outer, "anchor": anchor}


class Rounds:
    """Where each run is in its rounds of inner steps; counted on the host.

    Args:
        lengths: K of each run.
        device: of the flags.

    Example:
        >>> rounds = Rounds([1, 2], torch.device("cpu"))
        >>> rounds.flags()
        (True, tensor([ True, False]))
        >>> rounds.advance()
        >>> rounds.flags()
        (tensor([ True, False]), True)
    """

    def __init__(self, lengths: Sequence[RoundLength], device: torch.device) -> None:
        self.lengths, self.device = list(lengths), device
        self.inner_step = np.zeros(len(self.lengths), dtype=np.int64)
        self.round = np.zeros_like(self.inner_step)
        self.current = self._lengths_of(range(len(self.lengths)))

    def _lengths_of(self, runs: Sequence[int]) -> np.ndarray[Any, Any]:
        """The lengths of the current rounds of some runs."""
        current = ((self.lengths[run], int(self.round[run])) for run in runs)
        return np.array([k(number) if callable(k) else k for k, number in current])

    def flags(self) -> tuple[Flag, Flag]:
        """Which runs begin a round with the next step, and which end one."""
        begins, ends = self.inner_step == 0, self.inner_step + 1 >= self.current
        return as_flag(begins, self.device), as_flag(ends, self.device)

    def advance(self) -> None:
        """Count a step."""
        self.inner_step += 1
        over = np.flatnonzero(self.inner_step >= self.current)
        self.inner_step[over] = 0
        self.round[over] += 1
        if len(over):
            self.current[over] = self._lengths_of(over.tolist())

    def state_dict(self) -> dict[str, Tensor]:
        """The counters."""
        return {"inner_step": torch.tensor(self.inner_step), "round": torch.tensor(self.round)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on where `state_dict` was taken."""
        self.inner_step[:] = state["inner_step"].numpy()
        self.round[:] = state["round"].numpy()
        self.current = self._lengths_of(range(len(self.lengths)))
