"""What steps the weights of a run: SGD, Adam, and the double loops of ALEXR2 and ICPPAC.

The rules of torch's optimizers are written out, because `torch.optim` takes one step size for all
parameters, not one per run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..methods.lagrangian import ProximalRound
from ..methods.switching import SwitchingOptimizer
from ..optim import ProximalPoint
from ..rules.proximal import envelope_gradient, proximal_step, pull_strength, running_average
from .estimators import Numbers
from .run import Run, State, Unsupported, choose

Update = tuple[Any, Numbers, int | None]
"""What steps the weights, its numbers and, where steps come in rounds, the length of a round."""


@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD`, with momentum or without."""

    momentum: bool

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Update:
        group = only_group(optimizer)
        names = ("lr", "momentum", "dampening", "weight_decay")
        return cls(group["momentum"] != 0), {name: float(group[name]) for name in names}, None

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
    def of(cls, optimizer: torch.optim.Optimizer) -> Update:
        group = only_group(optimizer)
        numbers = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
        numbers["beta1"], numbers["beta2"] = map(float, group["betas"])
        decoupled = isinstance(optimizer, torch.optim.AdamW)
        return cls(decoupled or bool(group.get("decoupled_weight_decay"))), numbers, None

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


_TORCH: dict[type, Any] = {
    torch.optim.SGD: SGD, torch.optim.Adam: Adam, torch.optim.AdamW: Adam
}  # fmt: skip


def _read_torch(optimizer: torch.optim.Optimizer) -> Update:
    """The update of an optimizer that steps by itself, alone or inside another."""
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

    outer: SGD | Adam

    @classmethod
    def of(cls, optimizer: ProximalPoint) -> Update:
        group = only_group(optimizer)
        if callable(optimizer.inner_steps):
            raise Unsupported("A fleet has no rounds whose length is a function of the round.")
        outer, numbers, _ = _read_torch(optimizer.outer)
        numbers |= {"nu": float(group["nu"]), "eta": float(group["lr"])}
        return cls(outer), numbers, optimizer.inner_steps

    def start(self, weights: Tensor) -> State:
        return {"anchor": weights.clone(), **self.outer.start(weights)}

    def step(self, run: Run, gradient: Tensor, state: State) -> State:
        """One inner step; where a round ends, one outer step too."""
        z, ends, nu = state["weights"], run.data.ends, run.numbers["nu"]
        anchor = choose(run.data.begins, z, state["anchor"])
        after = proximal_step(z, anchor, gradient, run.numbers["eta"], nu)
        if ends is False:
            return {"weights": after, "anchor": anchor}
        at_anchor = {**state, "weights": anchor}
        outer = self.outer.step(run, envelope_gradient(anchor, after, nu), at_anchor)
        inside = {**state, "weights": after}
        outer = {name: choose(ends, new, inside[name]) for name, new in outer.items()}
        return {**outer, "anchor": anchor}


@dataclass(frozen=True)
class RoundUpdate:
    """Steps of `primal` around an anchor that end at their average: ICPPAC."""

    primal: SGD | Adam

    @classmethod
    def of(cls, optimizer: ProximalRound) -> Update:
        if optimizer.inner_step:
            raise Unsupported("A fleet starts between rounds, but ProximalRound is within one.")
        primal, numbers, _ = _read_torch(optimizer.wrapped[0])
        return cls(primal), numbers, optimizer.inner_steps

    def start(self, weights: Tensor) -> State:
        average = weights.to(torch.promote_types(weights.dtype, torch.float32), copy=True)
        count = weights.new_zeros((), dtype=torch.float64)
        state = {"anchor": weights.clone(), "average": average, "inner_step": count}
        return {**state, **self.primal.start(weights)}

    def step(self, run: Run, gradient: Tensor, state: State) -> State:
        """One inner step; where a round ends, the weights become the average."""
        data, point = run.data, state["weights"]
        anchor = choose(data.begins, point, state["anchor"])
        strength = pull_strength(run.numbers["coefficient"], state["multiplier"].sum())
        gradient = gradient + (point - anchor) * strength.to(point)
        changed = self.primal.step(run, gradient, state)
        reached, count, average = changed["weights"], state["inner_step"], state["average"]
        count = choose(data.begins, torch.zeros_like(count), count) + 1
        average = running_average(choose(data.begins, anchor.to(average), average), reached, count)
        changed["weights"] = choose(data.ends, average.to(reached), reached)
        return {**changed, "anchor": anchor, "average": average, "inner_step": count}


def _of_switching(optimizer: SwitchingOptimizer) -> Update:
    """That of its only optimizer: the gradient is that of one of the branches."""
    first, *others = optimizer.wrapped
    if others or optimizer.polyak:
        raise Unsupported("A fleet has no SSG with an optimizer of its own for the constraints.")
    return _read_torch(first)


_METHODS: dict[type, Callable[[Any], Update]] = {
    ProximalPoint: ProximalPointUpdate.of,
    ProximalRound: RoundUpdate.of,
    SwitchingOptimizer: _of_switching,
}


def read_optimizer(optimizer: torch.optim.Optimizer) -> Update:
    """The update of an optimizer."""
    return _METHODS.get(type(optimizer), _read_torch)(optimizer)
