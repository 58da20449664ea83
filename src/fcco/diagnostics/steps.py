"""The observed bounds of Adam-type step sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer, RMSprop

__all__ = ["StepSizeBounds", "step_size_bounds"]


@dataclass(frozen=True)
class StepSizeBounds:
    """The smallest and the largest factor 1 / (sqrt(s) + eps), over coordinates and steps.

    `StepSizeBounds()` is empty; merging with it changes nothing.

    Attributes:
        lower: c_l.
        upper: c_u.
    """

    lower: float = math.inf
    upper: float = 0.0

    @property
    def ratio(self) -> float:
        """c_u / c_l, which enters the iteration complexity to the power 2.5."""
        return self.upper / self.lower

    def merge(self, other: StepSizeBounds) -> StepSizeBounds:
        """The bounds that hold for both."""
        return StepSizeBounds(min(self.lower, other.lower), max(self.upper, other.upper))

    def __str__(self) -> str:
        return f"step sizes in lr * [{self.lower:.3g}, {self.upper:.3g}], ratio {self.ratio:.3g}"


@torch.no_grad()
def step_size_bounds(optimizer: Optimizer) -> StepSizeBounds:
    r"""The bounds c_l and c_u of the step sizes an Adam-type optimizer has just used.

    .. math::
        c_l \le \frac{1}{\sqrt{\hat s} + \varepsilon} \le c_u, \qquad
        \hat s = \frac{s}{1 - \beta_2^t}

    with s the running mean of squared gradients (its running maximum for `amsgrad`; without the
    bias correction, and less the squared mean where `centered`, for RMSprop). The theory of SONEX
    with adaptive steps assumes such bounds; the effective step is lr times this factor.

    Args:
        optimizer: `Adam`, `AdamW` or `RMSprop` of torch, after at least one step.

    Example:
        Merge over training:

        >>> import torch
        >>> from fcco.diagnostics import StepSizeBounds, step_size_bounds
        >>> w = torch.tensor([1.0, -10.0], requires_grad=True)
        >>> optimizer = torch.optim.Adam([w], lr=0.1)
        >>> bounds = StepSizeBounds()
        >>> for _ in range(3):
        ...     w.grad = 2 * w.detach()
        ...     optimizer.step()
        ...     bounds = bounds.merge(step_size_bounds(optimizer))
        >>> print(bounds)
        step sizes in lr * [0.05, 0.553], ratio 11.1

    References:
        The paper, appendix on adaptive step sizes; Kingma and Ba (2015), Adam.
    """
    if not isinstance(optimizer, (Adam, AdamW, RMSprop)):
        raise TypeError(
            "`step_size_bounds(optimizer=...)` must be a torch Adam, AdamW or RMSprop but is: "
            f"{type(optimizer).__name__} (other optimizers scale their steps differently)."
        )
    bounds = StepSizeBounds()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state and parameter.numel() > 0:
                bounds = bounds.merge(_bounds(group, state))
    if bounds.upper == 0:
        raise ValueError("`step_size_bounds(optimizer=...)` has no state yet: call `step()` first.")
    return bounds


def _bounds(group: dict[str, Any], state: dict[str, Any]) -> StepSizeBounds:
    smallest, largest = torch.aminmax(_second_moment(group, state))
    return StepSizeBounds(*(_factor(float(square), group["eps"]) for square in (largest, smallest)))


def _factor(square: float, eps: float | Tensor) -> float:
    # Rounding can make the centred moment slightly negative.
    denominator = math.sqrt(max(square, 0.0)) + float(eps)
    return 1 / denominator if denominator > 0 else math.inf


def _second_moment(group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    if "square_avg" in state:
        square = state["square_avg"].double()
        return square - state["grad_avg"].double().square() if group["centered"] else square
    name = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
    correction = 1 - float(group["betas"][1]) ** float(state["step"])
    return state[name].double() / correction
