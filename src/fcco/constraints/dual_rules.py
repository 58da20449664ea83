"""Dual rules of the proximal Lagrangian methods: virtual queues (OSS) and ConEx (ICPPAC)."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

from torch import Tensor

from .. import _checks

__all__ = [
    "ConEx",
    "ConstantConEx",
    "DualRule",
    "StochasticConEx",
    "StronglyConvexConEx",
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
        exact_values: the rule is for constraint values without noise.
    """

    warm_start: bool = True
    follows_step = False
    exact_values = False

    @abc.abstractmethod
    def dual(self, y: Tensor, now: Tensor, before: Tensor, t: Count, steps: Count) -> Tensor:
        """The next multipliers, from l_t and l_{t-1} (which is l_0 at t = 0)."""

    def step(self, t: Count, steps: Count) -> Number:
        """The step size, as a factor of the optimizer's own."""
        return 1.0

    def weight(self, t: Count, steps: Count) -> Number:
        """The weight of x_{t+1} in the average that ends the round."""
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
class ConEx(DualRule):
    r"""Constraint extrapolation (Boob, Deng and Lan 2023), whose loop is that of `icppac`.

    .. math::
        y_{t+1} = \bigl[y_t + \bigl((1+\theta_t)\ell_t - \theta_t\ell_{t-1}\bigr)/\tau_t\bigr]_+

    The paper's eta is the inverse of the step here. The output of a round is the average of
    x_{t+1} with the weights of the schedule.
    """

    @abc.abstractmethod
    def divisor(self, t: Count, steps: Count) -> Number:
        """tau_t."""

    @abc.abstractmethod
    def extrapolation(self, t: Count) -> Number:
        """theta_t."""

    def dual(self, y: Tensor, now: Tensor, before: Tensor, t: Count, steps: Count) -> Tensor:
        """y+ = [y + ((1 + theta) l_t - theta l_{t-1}) / tau]_+."""
        theta = self.extrapolation(t)
        # At t = 0 `before` is `now`: the first step is not extrapolated.
        ahead = (1 + theta) * now - theta * before
        return (y + ahead / self.divisor(t, steps)).clamp(min=0)


@dataclass(frozen=True, kw_only=True)
class ConstantConEx(ConEx):
    """Constants, as in the authors' experiments; the step is the optimizer's own.

    Args:
        tau: divisor of the dual step, tried in {1, 10, 100}.
        theta: extrapolation; 0 is Arrow-Hurwicz with linearised values.
    """

    tau: float = 10.0
    theta: float = 0.1

    def __post_init__(self) -> None:
        _checks.positive("ConstantConEx", "tau", self.tau)
        _checks.at_least("ConstantConEx", "theta", self.theta, 0.0)

    def divisor(self, t: Count, steps: Count) -> Number:
        """The constant tau."""
        return self.tau

    def extrapolation(self, t: Count) -> Number:
        """The constant theta."""
        return self.theta


@dataclass(frozen=True, kw_only=True)
class StronglyConvexConEx(ConEx):
    r"""Growing dual steps, for constraint values without noise only.

    .. math::
        t_0 = \frac{4(L_0 + BL)}{\alpha_0} + 2, \quad
        \theta_t = \frac{t+t_0+1}{t+t_0+2}, \quad
        \eta_t = \frac{2}{\alpha_0(t+t_0+1)}, \quad
        \tau_t = \frac{32M^2}{\alpha_0(t+1)}, \quad \gamma_t = t+t_0+2

    With noisy values the dual step 1/tau_t ~ t carries y away from the solution, so an
    independent batch (`gradient=`) is refused. The step sizes are complete: give the optimizer
    lr=1.

    Args:
        strong_convexity: alpha_0 of the regularised objective: 2 mu minus its weak convexity.
        smoothness: L_0 + B L of the regularised functions, with a bound B of the multipliers.
        lipschitz: M, of the constraints.
    """

    strong_convexity: float
    smoothness: float
    lipschitz: float
    exact_values = True

    def __post_init__(self) -> None:
        for name in ("strong_convexity", "smoothness", "lipschitz"):
            _checks.positive("StronglyConvexConEx", name, getattr(self, name))

    def _shifted(self, t: Count) -> Number:
        return t + 4 * self.smoothness / self.strong_convexity + 2

    def divisor(self, t: Count, steps: Count) -> Number:
        """32 M^2 / (alpha_0 (t + 1))."""
        return 32 * self.lipschitz**2 / (self.strong_convexity * (t + 1))

    def extrapolation(self, t: Count) -> Number:
        """(t + t_0 + 1) / (t + t_0 + 2)."""
        return (self._shifted(t) + 1) / (self._shifted(t) + 2)

    def step(self, t: Count, steps: Count) -> Number:
        """2 / (alpha_0 (t + t_0 + 1))."""
        return 2 / (self.strong_convexity * (self._shifted(t) + 1))

    def weight(self, t: Count, steps: Count) -> Number:
        """The weight t + t_0 + 2."""
        return self._shifted(t) + 2


@dataclass(frozen=True, kw_only=True)
class StochasticConEx(ConEx):
    r"""Steps for noisy values and gradients: theta = 1 and

    .. math::
        \eta = \frac{D}{B_y\sigma\sqrt T}, \qquad \frac1\tau = \frac{B_y}{\sigma D\sqrt T}

    The step sizes are complete: give the optimizer lr=1.

    Args:
        distance: D, how far the solution of a round may be from its start.
        multiplier_bound: B_y, at least the norm of the multipliers.
        noise: sigma, of the gradient of the Lagrangian.
    """

    distance: float
    multiplier_bound: float
    noise: float

    def __post_init__(self) -> None:
        for name in ("distance", "multiplier_bound", "noise"):
            _checks.positive("StochasticConEx", name, getattr(self, name))

    def divisor(self, t: Count, steps: Count) -> Number:
        """The number sigma D sqrt(T) / B_y."""
        return self.noise * self.distance * _root(steps) / self.multiplier_bound

    def extrapolation(self, t: Count) -> Number:
        """Always 1."""
        return 1.0

    def step(self, t: Count, steps: Count) -> Number:
        """D / (B_y sigma sqrt(T))."""
        return self.distance / (self.multiplier_bound * self.noise * _root(steps))
