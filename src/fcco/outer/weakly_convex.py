r"""A weakly convex outer function: f + rho_f/2 u^2 is convex, for a finite rho_f.

Its envelope exists for lambda < 1/rho_f only, and prox refuses a larger step.

The truncated hinge min([u]_+, c) is not offered: at its concave kink u = c no rho makes
f + rho/2 u^2 convex, so it is not weakly convex and no theory here covers it. `OneSidedMCP` is the
weakly convex function of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import relu

from .. import _checks
from .base import AbstractOuter

__all__ = ["OneSidedMCP"]


@dataclass(frozen=True)
class OneSidedMCP(AbstractOuter):
    r"""The minimax concave penalty of [u]_+: a hinge that saturates.

    .. math::
        f(u) = h([u]_+), \qquad h(t) = m t - \tfrac{c}{2} t^2 \ \text{ for } t \le m/c, \qquad
        h(t) = \tfrac{m^2}{2c} \ \text{ beyond.}

    One very large inner value cannot dominate the mean.

    Args:
        scale: m, the slope at 0.
        curvature: c = rho_f.

    Example:
        >>> from fcco.outer import OneSidedMCP
        >>> OneSidedMCP(scale=1.0, curvature=0.5)(torch.tensor([-1.0, 1.0, 5.0]))
        tensor([0.0000, 0.7500, 1.0000])

    References:
        Zhang (2010), Nearly unbiased variable selection under minimax concave penalty.
    """

    scale: float
    curvature: float

    monotone = True

    def __post_init__(self) -> None:
        _checks.positive("OneSidedMCP", "scale", self.scale)
        _checks.positive("OneSidedMCP", "curvature", self.curvature)

    @property
    def lipschitz(self) -> float:
        """The slope at 0, which is the largest."""
        return self.scale

    @property
    def jump(self) -> float:
        """The slope at 0."""
        return self.scale

    @property
    def weak_convexity(self) -> float:
        """The curvature c."""
        return self.curvature

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        rising = relu(u).clamp(max=self.scale / self.curvature)
        return rising * (self.scale - rising * (self.curvature / 2))

    def gradient(self, u: Tensor) -> Tensor:
        """The slope of h where u > 0, else 0."""
        return (u > 0).to(u.dtype) * self._slope(relu(u))

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """The prox of h where u > 0, else u."""
        self._check_step(step)
        t = relu(u)
        # The quadratic piece's solution exceeds t exactly where t lies on the constant piece.
        rising = relu(t - step * self.scale) / (1 - step * self.curvature)
        return u.clamp(max=0) + torch.minimum(rising, t)

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both from one prox; the gradient is 0 for u <= 0."""
        nearest = self.prox(u, step)
        # The slope is h'(nearest) for nearest > 0, and t / step for nearest = 0, t = [u]_+. The
        # smaller of the two is the right one, since nearest = t - step h'(nearest) in the first
        # case and t <= step h'(0) in the second. The quotient (t - nearest) / step would lose all
        # digits of a slope below t / step times the machine epsilon.
        slope = torch.minimum(relu(u) / step, self._slope(relu(nearest)))
        return self._envelope_value(nearest, slope, step), slope

    def _slope(self, t: Tensor) -> Tensor:
        return relu(self.scale - self.curvature * t)
