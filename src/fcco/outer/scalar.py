"""Scalar convex outer functions, applied elementwise.

All but the squared hinge are piecewise linear, see `fcco.outer.piecewise`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import relu

from .. import _checks
from .base import AbstractOuter
from .piecewise import AbstractOneKink, AbstractPiecewiseLinear, Bounds
from .projections import indicator

__all__ = ["Absolute", "CVaRHinge", "DeadZone", "Hinge", "Pinball", "SquaredHinge"]


@dataclass(frozen=True)
class Hinge(AbstractOneKink):
    r"""The hinge, an exact penalty for a constraint g_i(w) <= 0.

    .. math::
        f(u) = \rho\,[u]_+

    Args:
        scale: the penalty weight rho.

    Example:
        >>> from fcco.outer import Hinge
        >>> hinge, u = Hinge(scale=2.0), torch.tensor([-1.0, 0.5, 3.0])
        >>> hinge(u)
        tensor([0., 1., 6.])
        >>> hinge.prox(u, 1.0)
        tensor([-1.,  0.,  1.])
        >>> hinge.envelope_gradient(u, 1.0)
        tensor([0.0000, 0.5000, 2.0000])
    """

    scale: float = 1.0

    monotone = True

    def __post_init__(self) -> None:
        _checks.positive("Hinge", "scale", self.scale)

    def _slopes(self) -> Bounds:
        return 0.0, self.scale


@dataclass(frozen=True)
class CVaRHinge(AbstractOneKink):
    r"""The hinge of the conditional value at risk: s + mean f(loss) is least at the best s.

    .. math::
        f(u) = \tfrac{1}{r}\,[u - s]_+

    The scale 1/r is part of f, so the quadratic zone of the envelope has width lambda / r (see
    docs/mathematics.md).

    Args:
        ratio: r in (0, 1], the share of the worst cases.
        threshold: s.

    Example:
        >>> from fcco.outer import CVaRHinge
        >>> worst_quarter = CVaRHinge(ratio=0.25, threshold=1.0)
        >>> worst_quarter(torch.tensor([0.5, 1.5, 3.0]))
        tensor([0., 2., 8.])
        >>> worst_quarter.dual_zone(0.1)
        (1.0, 1.4)
    """

    ratio: float
    threshold: float = 0.0

    monotone = True

    def __post_init__(self) -> None:
        _checks.in_interval("CVaRHinge", "ratio", self.ratio, 0, 1, open_low=True)
        _checks.in_interval(
            "CVaRHinge",
            "threshold",
            self.threshold,
            -math.inf,
            math.inf,
            open_low=True,
            open_high=True,
        )

    def _slopes(self) -> Bounds:
        return 0.0, 1 / self.ratio

    def _shift(self) -> float:
        return self.threshold


@dataclass(frozen=True)
class Absolute(AbstractOneKink):
    r"""The absolute value, an exact penalty for g_i(w) = 0. Its envelope is the Huber function.

    .. math::
        f(u) = w\,|u|

    Args:
        scale: the weight w.

    Example:
        >>> from fcco.outer import Absolute
        >>> Absolute().prox(torch.tensor([-3.0, 0.5, 2.0]), 1.0)
        tensor([-2.,  0.,  1.])
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _checks.positive("Absolute", "scale", self.scale)

    def _slopes(self) -> Bounds:
        return -self.scale, self.scale


@dataclass(frozen=True)
class Pinball(AbstractOneKink):
    r"""The pinball function of quantile regression.

    .. math::
        f(u) = w \max(\tau u, (\tau - 1) u)

    Args:
        quantile: tau in (0, 1).
        scale: the weight w.

    Example:
        >>> from fcco.outer import Pinball
        >>> Pinball(quantile=0.75)(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0.2500, 0.0000, 0.7500])
    """

    quantile: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        _checks.in_interval(
            "Pinball", "quantile", self.quantile, 0, 1, open_low=True, open_high=True
        )
        _checks.positive("Pinball", "scale", self.scale)

    def _slopes(self) -> Bounds:
        return self.scale * (self.quantile - 1), self.scale * self.quantile


@dataclass(frozen=True)
class DeadZone(AbstractPiecewiseLinear):
    r"""The absolute value with a tolerance: an exact penalty for |g_i(w)| <= kappa.

    .. math::
        f(u) = w\,[\,|u| - \kappa\,]_+

    Args:
        width: the tolerance kappa, at least 0.
        scale: the weight w.

    Example:
        >>> from fcco.outer import DeadZone
        >>> DeadZone(width=0.5, scale=2.0)(torch.tensor([-1.0, 0.25, 2.0]))
        tensor([1., 0., 3.])
        >>> DeadZone(width=0.5, scale=2.0).prox(torch.tensor([-1.0, 0.25, 2.0]), 0.5)
        tensor([-0.5000,  0.2500,  1.0000])
    """

    width: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        _checks.in_interval("DeadZone", "width", self.width, 0, math.inf, open_high=True)
        _checks.positive("DeadZone", "scale", self.scale)

    def _slopes(self) -> Bounds:
        return -self.scale, self.scale

    def _zero_set(self) -> Bounds:
        return -self.width, self.width


@dataclass(frozen=True)
class SquaredHinge(AbstractOuter):
    r"""The squared hinge, a smooth but inexact penalty for g_i(w) <= 0.

    .. math::
        f(u) = \tfrac{\rho}{2}\,[u]_+^2

    Args:
        scale: the penalty weight rho.

    Example:
        >>> from fcco.outer import SquaredHinge
        >>> SquaredHinge(scale=2.0)(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])
        >>> SquaredHinge(scale=2.0).prox(torch.tensor([-1.0, 3.0]), 1.0)
        tensor([-1.,  1.])
    """

    scale: float = 1.0

    convex = monotone = smooth = True

    def __post_init__(self) -> None:
        _checks.positive("SquaredHinge", "scale", self.scale)

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return relu(u).square() * (self.scale / 2)

    def gradient(self, u: Tensor) -> Tensor:
        """The gradient rho [u]_+."""
        return relu(u) * self.scale

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """Shrink a positive u by the factor 1 + step rho."""
        self._check_step(step)
        return torch.where(u > 0, u / (1 + step * self.scale), u)

    def conjugate(self, y: Tensor) -> Tensor:
        """y^2 / (2 rho) for y >= 0."""
        return y.square() / (2 * self.scale) + indicator(relu(-y))
