"""Convex outer functions of several inner values at once, applied to the last axis.

All but the two-sided hinge are support functions, see `fcco.outer.support`; the averages of the
largest entries have a file of their own, `fcco.outer.top`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import relu

from .. import _checks
from .base import AbstractOuter
from .projections import indicator, project_ball, project_box, project_subsimplex
from .scalar import DeadZone
from .support import AbstractSupportFunction
from .top import CVaR, Maximum, TopMean

__all__ = [
    "CVaR",
    "EuclideanNorm",
    "Maximum",
    "PositiveMaximum",
    "SeparableHinge",
    "TopMean",
    "TwoSidedHinge",
]


@dataclass(frozen=True)
class PositiveMaximum(AbstractSupportFunction):
    r"""The hinge of the largest entry: one penalty for all constraints u_i <= 0.

    .. math::
        f(u) = [\max_i u_i]_+

    Example:
        >>> from fcco.outer import PositiveMaximum
        >>> PositiveMaximum()(torch.tensor([[1.0, 3.0], [-1.0, -2.0]]))
        tensor([3., 0.])
    """

    monotone = True
    lipschitz = 1.0

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return relu(u.amax(dim=-1))

    def gradient(self, u: Tensor) -> Tensor:
        """Weight 1 shared by the largest entries where they are positive."""
        top = u.amax(dim=-1, keepdim=True)
        tied = (u == top).to(u.dtype)
        return tied * (top > 0).to(u.dtype) / tied.sum(dim=-1, keepdim=True)

    def violation(self, u: Tensor) -> Tensor:
        """The largest entry."""
        return u.amax(dim=-1)

    def slope(self, gradient: Tensor) -> Tensor:
        """The sum of the weights."""
        return gradient.sum(dim=-1)

    def _project(self, u: Tensor, size: float | Tensor) -> Tensor:
        return project_subsimplex(u, size)


@dataclass(frozen=True)
class EuclideanNorm(AbstractSupportFunction):
    r"""The Euclidean norm, an exact penalty for a vector constraint g_i(w) = 0.

    .. math::
        f(u) = w\,\|u\|_2

    Args:
        scale: the weight w.

    Example:
        >>> from fcco.outer import EuclideanNorm
        >>> EuclideanNorm().prox(torch.tensor([3.0, 4.0]), 1.0)
        tensor([2.4000, 3.2000])
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _checks.positive("EuclideanNorm", "scale", self.scale)

    @property
    def lipschitz(self) -> float:
        """The weight w."""
        return self.scale

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self.scale * torch.linalg.vector_norm(u, dim=-1)

    def gradient(self, u: Tensor) -> Tensor:
        """The unit vector along u times w, and 0 at 0."""
        norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        return self.scale * u / torch.where(norm > 0, norm, 1.0)

    def violation(self, u: Tensor) -> Tensor:
        """The norm of u."""
        return torch.linalg.vector_norm(u, dim=-1)

    def slope(self, gradient: Tensor) -> Tensor:
        """The norm of the gradient."""
        return torch.linalg.vector_norm(gradient, dim=-1)

    def _project(self, u: Tensor, size: float | Tensor) -> Tensor:
        return project_ball(u, size * self.scale)


@dataclass(frozen=True)
class SeparableHinge(AbstractSupportFunction):
    r"""The sum of hinges: one exact penalty for each constraint u_j <= 0.

    .. math::
        f(u) = \sum_j \rho\,[u_j]_+

    Args:
        scale: the penalty weight rho.
        dim: d, where known; the Lipschitz constant rho sqrt(d) needs it and is `inf` without.

    Example:
        >>> from fcco.outer import SeparableHinge
        >>> SeparableHinge(scale=2.0)(torch.tensor([1.0, -3.0, 0.5]))
        tensor(3.)
        >>> SeparableHinge(scale=2.0).prox(torch.tensor([1.0, -3.0, 0.5]), 0.25)
        tensor([ 0.5000, -3.0000,  0.0000])
    """

    scale: float = 1.0
    dim: int | None = None

    monotone = True

    def __post_init__(self) -> None:
        _checks.positive("SeparableHinge", "scale", self.scale)
        _checks.at_least("SeparableHinge", "dim", self.dim, 1)

    @property
    def lipschitz(self) -> float:
        """Rho sqrt(d)."""
        return math.inf if self.dim is None else self.scale * self.dim**0.5

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self.scale * relu(u).sum(dim=-1)

    def gradient(self, u: Tensor) -> Tensor:
        """Rho where u_j > 0, else 0."""
        return self.scale * (u > 0).to(u.dtype)

    def violation(self, u: Tensor) -> Tensor:
        """One number for each of the d constraints: u itself."""
        return u

    def slope(self, gradient: Tensor) -> Tensor:
        """One number for each of the d constraints: the gradient itself."""
        return gradient

    def _project(self, u: Tensor, size: float | Tensor) -> Tensor:
        return project_box(u, 0.0, size * self.scale)


@dataclass(frozen=True)
class TwoSidedHinge(AbstractOuter):
    r"""The fairness hinge on R^2: two tracked rates may differ by a tolerance.

    .. math::
        f(u) = w\,[\,|u_1 - u_2| - \kappa\,]_+

    It is the dead zone phi of one number, phi(a^T u) with a = (1, -1), hence
    f_lambda(u) = phi_{2 lambda}(u_1 - u_2). Not monotone: y = (c, -c) has both signs (see
    docs/mathematics.md).

    Args:
        tolerance: kappa, at least 0.
        scale: the weight w.

    Example:
        >>> from fcco.outer import TwoSidedHinge
        >>> fairness, rates = TwoSidedHinge(tolerance=0.1), torch.tensor([0.8, 0.5])
        >>> fairness(rates)
        tensor(0.2000)
        >>> fairness.prox(rates, 0.05)
        tensor([0.7500, 0.5500])
    """

    tolerance: float
    scale: float = 1.0

    dim = 2
    convex = True

    def __post_init__(self) -> None:
        _checks.in_interval(
            "TwoSidedHinge", "tolerance", self.tolerance, 0, math.inf, open_high=True
        )
        _checks.positive("TwoSidedHinge", "scale", self.scale)

    @property
    def lipschitz(self) -> float:
        """Sqrt(2) w."""
        return 2**0.5 * self.scale

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self._of_gap()(_gap(u))

    def gradient(self, u: Tensor) -> Tensor:
        """The slope of the dead zone times (1, -1)."""
        return _opposite(self._of_gap().gradient(_gap(u)))

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """Both numbers move by half of what their gap moves."""
        self._check_step(step)
        gap = _gap(u)
        return u + _opposite((self._of_gap().prox(gap, 2 * step) - gap) / 2)

    def envelope(self, u: Tensor, step: float | Tensor) -> Tensor:
        """The dead zone's envelope at twice the step."""
        return self.envelope_and_gradient(u, step)[0]

    def envelope_gradient(self, u: Tensor, step: float | Tensor) -> Tensor:
        """The slope of the dead zone's envelope at twice the step, times (1, -1)."""
        return self.envelope_and_gradient(u, step)[1]

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both from the dead zone at twice the step."""
        self._check_step(step)
        value, slope = self._of_gap().envelope_and_gradient(_gap(u), 2 * step)
        return value, _opposite(slope)

    def conjugate(self, y: Tensor) -> Tensor:
        """Kappa |y_1| where y_1 = -y_2 and |y_1| <= w."""
        first, second = y.unbind(dim=-1)
        return self._of_gap().conjugate(first) + indicator((first + second).abs())

    def violation(self, u: Tensor) -> Tensor:
        """By how much the gap exceeds the tolerance."""
        return self._of_gap().violation(_gap(u))

    def slope(self, gradient: Tensor) -> Tensor:
        """|y_1|, for a gradient y = (y_1, -y_1)."""
        return gradient[..., 0].abs()

    def _of_gap(self) -> DeadZone:
        return DeadZone(self.tolerance, self.scale)


def _gap(u: Tensor) -> Tensor:
    first, second = u.unbind(dim=-1)
    return first - second


def _opposite(value: Tensor) -> Tensor:
    return torch.stack([value, -value], dim=-1)
