r"""What steps the weights of a run: SGD, Adam, the rounds of ALEXR2, and the branches of SSG.

The rules of torch's optimizers are written out, because `torch.optim` takes one step size for all
parameters, not one per run:

.. math::
    \text{SGD:}\quad v^+ = \mu v + (1-d)\,G,\quad w^+ = w - \eta v^+ \qquad
    \text{Adam:}\quad w^+ = w - \eta\,\hat v/(\sqrt{\hat s} + \epsilon)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..methods.switching import PolyakStep, SwitchingOptimizer
from ..optim import ProximalPoint
from ..rules.proximal import envelope_gradient, proximal_step
from ..rules.switching import polyak_length
from .numbers import Numbers
from .run import Flag, Run, State, Unsupported, choose

__all__ = ["ProximalPointUpdate", "Rounds", "SwitchingUpdate", "read_torch_optimizer"]

RoundLength = int | Callable[[int], int]
"""The number of steps of a round, or a function of the round that gives it."""
SECOND = "constraint."
"""Prefix of the state and the numbers of the optimizer of the constraints."""


@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD`, with momentum or without."""

    momentum: bool

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> tuple[SGD, Numbers]:
        group = only_group(optimizer)
        names = ("lr", "momentum", "dampening", "weight_decay")
        return cls(group["momentum"] != 0), {name: float(group[name]) for name in names}

    def start(self, weights: Tensor) -> State:
        count = weights.new_zeros((), dtype=torch.float64)
        return {"count": count} | ({"velocity": torch.zeros_like(weights)} if self.momentum else {})

    def step(self, run: Run, gradient: Tensor, state: State) -> State:
        numbers = run.numbers
        direction = gradient + numbers["weight_decay"] * state["weights"]
        changed = {"count": state["count"] + 1}
        if self.momentum:
            kept = numbers["momentum"] * state["velocity"] + (1 - numbers["dampening"]) * direction
            # torch starts with v = G, without dampening.
            direction = torch.where(state["count"] == 0, direction, kept)
            changed["velocity"] = direction
        return {"weights": state["weights"] - numbers["lr"] * direction, **changed}


@dataclass(frozen=True)
class Adam:
    """`torch.optim.Adam`, or `AdamW` when the weight decay is decoupled."""

    decoupled: bool

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> tuple[Adam, Numbers]:
        group = only_group(optimizer)
        numbers = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
        numbers["beta1"], numbers["beta2"] = map(float, group["betas"])
        decoupled = isinstance(optimizer, torch.optim.AdamW)
        return cls(decoupled or bool(group.get("decoupled_weight_decay"))), numbers

    def start(self, weights: Tensor) -> State:
        zeros = torch.zeros_like(weights)
        count = weights.new_zeros((), dtype=torch.float64)
        return {"mean": zeros, "square": zeros.clone(), "count": count}

    def step(self, run: Run, gradient: Tensor, state: State) -> State:
        # 1 - beta^t cancels in single precision: such numbers are formed in double.
        exact, numbers = run.exact, run.numbers
        beta1, beta2, point = exact["beta1"], exact["beta2"], state["weights"]
        count = state["count"] + 1
        if self.decoupled:
            point = point * (1 - numbers["lr"] * numbers["weight_decay"])
        else:
            gradient = gradient + numbers["weight_decay"] * point
        mean = torch.lerp(state["mean"], gradient, (1 - beta1).to(gradient))
        square = numbers["beta2"] * state["square"]
        square = square + (1 - beta2).to(gradient) * (gradient * gradient)
        size = (exact["lr"] / (1 - beta1**count)).to(gradient)
        spread = (1 - beta2**count).sqrt().to(gradient)
        weights = point - size * (mean / (square.sqrt() / spread + numbers["eps"]))
        return {"weights": weights, "mean": mean, "square": square, "count": count}


_TORCH: dict[type, type[SGD] | type[Adam]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: Adam,
}


def read_torch_optimizer(optimizer: torch.optim.Optimizer) -> tuple[Any, Numbers]:
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


@dataclass(frozen=True)
class ProximalPointUpdate:
    """The double loop of ALEXR2, see `fcco.ProximalPoint`; `outer` steps its outer loop."""

    outer: Any

    @classmethod
    def of(cls, optimizer: ProximalPoint) -> tuple[ProximalPointUpdate, Numbers, RoundLength]:
        group = only_group(optimizer)
        outer, numbers = read_torch_optimizer(optimizer.outer)
        numbers |= {"nu": float(group["nu"]), "eta": float(group["lr"])}
        return cls(outer), numbers, optimizer.inner_steps

    def start(self, weights: Tensor) -> State:
        return {"anchor": weights.clone(), **self.outer.start(weights)}

    def step(self, run: Run, gradient: Tensor, state: State) -> State:
        """One inner step; where a round ends, one outer step too."""
        z, ends, nu = state["weights"], run.data.ends, run.numbers["nu"]
        anchor = choose(run.data.begins, lambda: z, lambda: state["anchor"])
        after = proximal_step(z, anchor, gradient, run.numbers["eta"], nu)
        if ends is False:
            return {"weights": after, "anchor": anchor}
        at_anchor = {**state, "weights": anchor}
        outer = self.outer.step(run, envelope_gradient(anchor, after, nu), at_anchor)
        if ends is not True:
            inside = {**state, "weights": after}
            outer = {name: torch.where(ends, new, inside[name]) for name, new in outer.items()}
        return {**outer, "anchor": anchor}


@dataclass(frozen=True)
class PolyakUpdate:
    """Polyak's step on the worst constraint."""

    @classmethod
    def of(cls, optimizer: PolyakStep) -> tuple[PolyakUpdate, Numbers]:
        return cls(), {"lr": float(only_group(optimizer)["lr"])}

    def start(self, weights: Tensor) -> State:
        return {}

    def step(self, run: Run, gradient: Tensor, state: State) -> State:
        point, wide = state["weights"], gradient.double()
        length = polyak_length(state["worst"].double(), (wide * wide).sum())
        return {"weights": point - (run.exact["lr"] * length).to(point) * gradient}


@dataclass(frozen=True)
class SwitchingUpdate:
    """The step of the optimizer whose branch was taken (SSG)."""

    objective: Any
    constraint: Any  # None where the first steps on constraints too

    @classmethod
    def of(cls, optimizer: SwitchingOptimizer) -> tuple[SwitchingUpdate, Numbers, None]:
        objective, numbers = read_torch_optimizer(optimizer.objective_optimizer)
        constraint, second = None, optimizer.constraint_optimizer
        if len(optimizer.wrapped) > 1:
            read = PolyakUpdate.of if isinstance(second, PolyakStep) else read_torch_optimizer
            constraint, more = read(second)  # type: ignore[arg-type]
            numbers |= {SECOND + name: value for name, value in more.items()}
        return cls(objective, constraint), numbers, None

    def start(self, weights: Tensor) -> State:
        others = {} if self.constraint is None else self.constraint.start(weights)
        prefixed = {SECOND + name: value for name, value in others.items()}
        return {**self.objective.start(weights), **prefixed}

    def step(self, run: Run, gradient: Tensor, state: State) -> State:
        """The optimizer of the other branch stays as it was."""
        first = self.objective.step(run, gradient, state)
        if self.constraint is None:
            return first
        # The second optimizer sees its own state and numbers under the names of the first.
        own, exact, numbers = map(_of_second, (state, run.exact, run.numbers))
        second = self.constraint.step(run._replace(exact=exact, numbers=numbers), gradient, own)
        feasible = state["feasible"]
        after = {name: torch.where(feasible, new, state[name]) for name, new in first.items()}
        after["weights"] = torch.where(feasible, first["weights"], second.pop("weights"))
        for name, new in second.items():
            after[SECOND + name] = torch.where(feasible, state[SECOND + name], new)
        return after


def _of_second(values: State) -> State:
    return values | {n.removeprefix(SECOND): v for n, v in values.items() if n.startswith(SECOND)}


class Rounds:
    """Where each run is in its rounds of inner steps; counted on the host.

    Example:
        >>> rounds = Rounds([1, 2], torch.device("cpu"))
        >>> rounds.flags()
        [True, tensor([ True, False])]
        >>> rounds.advance()
        >>> rounds.flags()
        [tensor([ True, False]), True]
    """

    def __init__(self, lengths: Sequence[RoundLength], device: torch.device) -> None:
        self.lengths, self.device = list(lengths), device
        self.inner_step = np.zeros(len(self.lengths), dtype=np.int64)
        self.round, self.current = np.zeros_like(self.inner_step), np.ones_like(self.inner_step)
        self._begin(range(len(self.lengths)))

    def _begin(self, runs: Iterable[int]) -> None:
        """Evaluate the lengths of the present rounds of some runs."""
        for run in runs:
            length = self.lengths[run]
            self.current[run] = length(int(self.round[run])) if callable(length) else length

    def flags(self) -> list[Flag]:
        """Which runs begin a round with the next step, and which end one."""
        masks = (self.inner_step == 0, self.inner_step + 1 >= self.current)
        return [
            bool(mask[0]) if mask.all() or not mask.any() else torch.tensor(mask).to(self.device)
            for mask in masks
        ]

    def advance(self) -> None:
        """Count a step."""
        self.inner_step += 1
        over = np.flatnonzero(self.inner_step >= self.current)
        self.inner_step[over], self.round[over] = 0, self.round[over] + 1
        self._begin(over.tolist())

    def state_dict(self) -> dict[str, Tensor]:
        return {"inner_step": torch.tensor(self.inner_step), "round": torch.tensor(self.round)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.inner_step[:], self.round[:] = state["inner_step"].numpy(), state["round"].numpy()
        self._begin(range(len(self.lengths)))
