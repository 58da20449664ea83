r"""The rules of torch's optimizers as pure functions: `torch.optim` refuses a step size per run.

.. math::
    \text{SGD:}\quad v^+ = \mu v + (1-d)\,G,\quad w^+ = w - \eta v^+ \qquad
    \text{Adam:}\quad w^+ = w - \eta\,\hat v/(\sqrt{\hat s} + \epsilon)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..proximal_point import proximal_step
from .member import Numbers, State, Unsupported
from .run import Run, choose

__all__ = [
    "SGD",
    "Adam",
    "ProximalUpdate",
    "Update",
    "adam",
    "check_decay",
    "renamed",
    "scaled",
    "sgd",
    "unprefixed",
]


class Update(Protocol):
    """What steps the weights of one run."""

    def start(self, weights: Tensor) -> State:
        """Its state before the first step."""
        ...

    def step(self, run: Run, point: Tensor, gradient: Tensor, state: State) -> State:
        """The weights after a step from a point, and what else changed."""
        ...


def scaled(run: Run, factor: Tensor | float) -> Run:
    """The same run with `factor` times its step size."""
    rate = run.exact["lr"] * factor
    numbers = {**run.numbers, "lr": rate.to(run.numbers["lr"])}
    return dataclasses.replace(run, numbers=numbers, exact={**run.exact, "lr": rate})


def renamed(run: Run, prefix: str) -> Run:
    """The same run as the second of two optimizers sees it, whose numbers have a prefix."""
    numbers = {**run.numbers, **unprefixed(run.numbers, prefix)}
    exact = {**run.exact, **unprefixed(run.exact, prefix)}
    return dataclasses.replace(run, numbers=numbers, exact=exact)


def unprefixed(values: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The values with a prefix, without it."""
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def check_decay(unused: list[str], numbers: Numbers) -> None:
    """`torch.optim` skips parameters without a gradient; here it is 0, which decays them.

    Args:
        unused: names of such parameters.
        numbers: of all runs.

    Raises:
        Unsupported: when there is one and a run has weight decay.
    """
    decays = [row for name, row in numbers.items() if name.endswith("weight_decay")]
    if unused and any(bool(row.any()) for row in decays):
        raise Unsupported(
            "`Fleet.step`: with `weight_decay` every trained parameter must have a part in the "
            f"loss, but {unused[0]} has none; leave it out of the optimizer."
        )


def sgd(
    point: Tensor,
    gradient: Tensor,
    velocity: Tensor | None,
    first: Tensor,
    numbers: Numbers,
) -> tuple[Tensor, Tensor | None]:
    """`torch.optim.SGD` of one run: the next point and the next velocity.

    Args:
        point: w.
        gradient: G.
        velocity: v, None without momentum.
        first: whether this is the first step, where v = G.
        numbers: lr, momentum, dampening, weight_decay.
    """
    gradient = gradient + numbers["weight_decay"] * point
    if velocity is None:
        return point - numbers["lr"] * gradient, None
    kept = numbers["momentum"] * velocity + (1 - numbers["dampening"]) * gradient
    velocity = torch.where(first, gradient, kept)
    return point - numbers["lr"] * velocity, velocity


def adam(
    point: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    count: Tensor,
    numbers: Numbers,
    exact: Numbers,
    decoupled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.optim.Adam` and `AdamW` of one run: the next point and moments.

    Args:
        point: w.
        gradient: G.
        mean: of the gradients.
        square: mean of their squares.
        count: steps made, this one included.
        numbers: lr, beta1, beta2, eps, weight_decay.
        exact: the same in double precision: 1 - beta^t cancels in single.
        decoupled: whether weight decay is apart from the gradient (AdamW).
    """
    if decoupled:
        point = point * (1 - numbers["lr"] * numbers["weight_decay"])
    else:
        gradient = gradient + numbers["weight_decay"] * point
    mean = torch.lerp(mean, gradient, (1 - exact["beta1"]).to(mean))
    fresh = (1 - exact["beta2"]).to(square)
    square = numbers["beta2"] * square + fresh * (gradient * gradient)
    size = exact["lr"] / (1 - exact["beta1"] ** count)
    spread = (1 - exact["beta2"] ** count).sqrt()
    scale = square.sqrt() / spread.to(square) + numbers["eps"]
    return point - size.to(mean) * (mean / scale), mean, square


@dataclass(frozen=True)
class SGD:
    """SGD, with momentum or without."""

    momentum: bool

    def start(self, weights: Tensor) -> State:
        """The velocity and the number of steps."""
        count = weights.new_zeros((), dtype=torch.float64)
        return {"count": count} | ({"mean": torch.zeros_like(weights)} if self.momentum else {})

    def step(self, run: Run, point: Tensor, gradient: Tensor, state: State) -> State:
        """One step of one run."""
        count = state["count"]
        weights, velocity = sgd(point, gradient, state.get("mean"), count == 0, run.numbers)
        return {"weights": weights, "count": count + 1} | (
            {} if velocity is None else {"mean": velocity}
        )


@dataclass(frozen=True)
class Adam:
    """Adam, or AdamW when the weight decay is decoupled."""

    decoupled: bool

    def start(self, weights: Tensor) -> State:
        """Both moments and the number of steps."""
        zeros = torch.zeros_like(weights)
        count = weights.new_zeros((), dtype=torch.float64)
        return {"mean": zeros, "square": zeros.clone(), "count": count}

    def step(self, run: Run, point: Tensor, gradient: Tensor, state: State) -> State:
        """One step of one run."""
        count = state["count"] + 1
        weights, mean, square = adam(
            point,
            gradient,
            state["mean"],
            state["square"],
            count,
            run.numbers,
            run.exact,
            self.decoupled,
        )
        return {"weights": weights, "mean": mean, "square": square, "count": count}


@dataclass(frozen=True)
class ProximalUpdate:
    """The double loop of ALEXR2, see `fcco.ProximalPoint`.

    Args:
        outer: the update of the outer loop.
    """

    outer: Update

    def start(self, weights: Tensor) -> State:
        """The anchor, and the state of the outer loop."""
        return {"anchor": weights.clone(), **self.outer.start(weights)}

    def step(self, run: Run, point: Tensor, gradient: Tensor, state: State) -> State:
        """One inner step; where a round ends, one outer step too."""
        numbers, ends = run.numbers, run.phase.ends
        anchor = choose(run.phase.begins, lambda: point, lambda: state["anchor"])
        inner = proximal_step(point, anchor, gradient, numbers["eta"], numbers["nu"])
        if ends is False:
            return {"weights": inner, "anchor": anchor}
        outer = self.outer.step(run, anchor, (anchor - inner) / numbers["nu"], state)
        held = {**state, "weights": inner}
        chosen = {
            name: choose(ends, lambda value=value: value, lambda name=name: held[name])
            for name, value in outer.items()
        }
        return {**chosen, "anchor": anchor}
