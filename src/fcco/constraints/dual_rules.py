"""Dual rules of the proximal Lagrangian methods: virtual queues (OSS) and ConEx (ICPPAC)."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

from torch import Tensor

from .. import _checks

__all__ = [
    "ConstantConEx",
    "DualRule",
    "VirtualQueue",
]

Count = int | Tensor
"""A number of steps; a tensor where many runs are one program."""
Number = float | Tensor


def _root(count: Count) -> Number:
    return count.sqrt() if isinstance(count, Tensor) else math.sqrt(count)


@dataclass(frozen=True, kw_only=True)
class DualRule(abc.ABC):
    """How the multipliers move in a round of T inner steps t = 0, ..., T-1.

    A rule is given linearised values of the regularised constraints

        l_t = phi(x) + <grad phi(x), x' - x>,    phi_i = g_i - tolerance_i + c |. - w|^2

    and has no state: the objective keeps y and l_{t-1}. Pure and branch-free: its numbers, t and T
    may be tensors.

    Args:
        warm_start: whether a round starts with the y of the one before, or with 0.

    Attributes:
        follows_step: True: l_t is taken at x = x_t along the step, x' = x_{t+1}, and y moves
            after it. False: at x = x_{t-1} with x' = x_t, and y moves before the step.
    """

    warm_start: bool = True
    follows_step = False

    @abc.abstractmethod
    def dual(self, y: Tensor, now: Tensor, before: Tensor, t: Count, steps: Count) -> Tensor:
        """The next multipliers, from l_t and l_{t-1} (which is l_0 at t = 0)."""

    def step(self, t: Count, steps: Count) -> Number:
        """The step size, as a factor of the optimizer's own."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class VirtualQueue(DualRule):
    r"""OSS: queues that collect the linearised violations (Yu, Neely and Wei 2017).

    .. math::
        Q_i^+ = \bigl[Q_i + \phi_i(x_t) + \langle\nabla\phi_i(x_t), x_{t+1}-x_t\rangle\bigr]_+

    In terms of y = Q/V, with the source's V = sqrt(T) and alpha = T, the step is 1/(2 sqrt(T)) on
    the Lagrangian, and y_i moves by l_i / sqrt(T).

    Example:
        >>> import torch
        >>> rule, y = VirtualQueue(), torch.tensor([0.1, 0.1])
        >>> l = torch.tensor([0.5, -0.5])
        >>> rule.dual(y, l, l, t=0, steps=25), rule.step(0, 25)
        (tensor([0.2000, 0.0000]), 0.1)
    """

    warm_start: bool = False
    follows_step = True

    def dual(self, y: Tensor, now: Tensor, before: Tensor, t: Count, steps: Count) -> Tensor:
        """y+ = [y + l / sqrt(T)]_+."""
        return (y + now / _root(steps)).clamp(min=0)

    def step(self, t: Count, steps: Count) -> Number:
        """1 / (2 sqrt(T)): the 2 comes from the source's quadratic term alpha |x - x_t|^2."""
        return 1 / (2 * _root(steps))


@dataclass(frozen=True, kw_only=True)
class ConstantConEx(DualRule):
    r"""Constraint extrapolation (Boob, Deng and Lan 2023), whose loop is that of `icppac`.

    .. math::
        y_{t+1} = \bigl[y_t + \bigl((1+\theta)\ell_t - \theta\ell_{t-1}\bigr)/\tau\bigr]_+

    Constants, as in the authors' experiments; the step is the optimizer's own, whose inverse is the
    paper's eta.

    Args:
        tau: divisor of the dual step, tried in {1, 10, 100}.
        theta: extrapolation; 0 is Arrow-Hurwicz with linearised values.
    """

    tau: float = 10.0
    theta: float = 0.1

    def __post_init__(self) -> None:
        _checks.positive("ConstantConEx", "tau", self.tau)
        _checks.at_least("ConstantConEx", "theta", self.theta, 0.0)

    def dual(self, y: Tensor, now: Tensor, before: Tensor, t: Count, steps: Count) -> Tensor:
        """y+ = [y + ((1 + theta) l_t - theta l_{t-1}) / tau]_+."""
        # At t = 0 `before` is `now`: the first step is not extrapolated.
        ahead = (1 + self.theta) * now - self.theta * before
        return (y + ahead / self.tau).clamp(min=0)
