"""Outer functions with kinks: zero on an interval, linear on either side of it, or saturating."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import relu

from .. import _checks
from .base import AbstractOuter, check_step, clip, derived


class _PiecewiseLinear(AbstractOuter):
    r"""scale [u - kink]_+ and, unless f is monotone, as much on the left: scale [-kink - u]_+.

    The gradient of its envelope is clip(t / step, low, scale), where t is the signed distance of u
    from [-kink, kink], on which f is 0.
    """

    convex = True
    scale: float
    kink = 0.0
    lipschitz = derived(lambda self: self.scale)
    jump = derived(lambda self: self.scale - self._low)

    def __post_init__(self) -> None:
        _checks.positive(type(self).__name__, "scale", self.scale)

    @property
    def _low(self) -> float:
        """The slope left of the zero set."""
        return 0.0 if self.monotone else -self.scale

    def _distance(self, u: Tensor) -> Tensor:
        """The signed distance t of u from the zero set."""
        return u

    def __call__(self, u: Tensor) -> Tensor:
        return self.scale * relu(u - self.kink) - self._low * relu(-self.kink - u)

    def gradient(self, u: Tensor) -> Tensor:
        right, left = (u > self.kink).to(u.dtype), (u < -self.kink).to(u.dtype)
        return self.scale * right + self._low * left

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both from one clip: slope * (t - slope step / 2), and the slope."""
        distance, low, high = self._distance(u), self._low, self.scale
        if isinstance(step, Tensor) or isinstance(high, Tensor):
            check_step(self, step)
            slope = clip(distance / step, low, high)
            return slope * (distance - slope * (step / 2)), slope
        if not 0 < step < math.inf:
            check_step(self, step)
        # In every training step: plain numbers need no checks, and `alpha` saves an operation.
        slope = (distance / step).clamp(low, high)
        return slope * torch.sub(distance, slope, alpha=step / 2), slope

    def violation(self, u: Tensor) -> Tensor:
        """How far u lies beyond the zero set; on its right only, if f is monotone."""
        return u if self.monotone else u.abs() - self.kink


@dataclass(frozen=True)
class Hinge(_PiecewiseLinear):
    """f(u) = scale [u]_+, an exact penalty for a constraint g_i(w) <= 0."""

    scale: float = 1.0

    monotone = True


@dataclass(frozen=True)
class Absolute(_PiecewiseLinear):
    """f(u) = scale abs(u), an exact penalty for g_i(w) = 0; its envelope is the Huber function."""

    scale: float = 1.0


@dataclass(frozen=True)
class DeadZone(_PiecewiseLinear):
    """f(u) = scale [abs(u) - width]_+, an exact penalty for abs(g_i(w)) <= width."""

    width: float
    scale: float = 1.0

    jump = derived(lambda self: self.scale)
    kink = derived(lambda self: self.width)

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.finite("DeadZone", "width", self.width, 0)

    def _distance(self, u: Tensor) -> Tensor:
        return relu(u - self.width) - relu(-self.width - u)


@dataclass(frozen=True)
class TwoSidedHinge(AbstractOuter):
    """f(u) = scale [abs(u_1 - u_2) - tolerance]_+: two tracked rates may differ by a tolerance.

    It is the dead zone phi of one number, phi(a^T u) with a = (1, -1), hence
    f_lambda(u) = phi_{2 lambda}(u_1 - u_2) (see docs/research/details/mathematics.md).
    """

    tolerance: float
    scale: float = 1.0

    dim = 2
    convex = True
    lipschitz = derived(lambda self: 2**0.5 * self.scale)
    jump = derived(lambda self: 2 * self.scale)  # its width is that of the difference u_1 - u_2

    def __post_init__(self) -> None:
        _checks.finite("TwoSidedHinge", "tolerance", self.tolerance, 0)
        _checks.positive("TwoSidedHinge", "scale", self.scale)

    def __call__(self, u: Tensor) -> Tensor:
        return self._dead_zone()(_gap(u))

    def gradient(self, u: Tensor) -> Tensor:
        return _plus_minus(self._dead_zone().gradient(_gap(u)))

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        check_step(self, step)
        value, slope = self._dead_zone().envelope_and_gradient(_gap(u), 2 * step)
        return value, _plus_minus(slope)

    def violation(self, u: Tensor) -> Tensor:
        return self._dead_zone().violation(_gap(u))

    def slope(self, gradient: Tensor) -> Tensor:
        """y_1, for a gradient y = (y_1, -y_1): positive when the first entry is too large."""
        return gradient[..., 0]

    def _dead_zone(self) -> DeadZone:
        return DeadZone(self.tolerance, self.scale)


def _gap(u: Tensor) -> Tensor:
    first, second = u.unbind(dim=-1)
    return first - second


def _plus_minus(value: Tensor) -> Tensor:
    return torch.stack([value, -value], dim=-1)


@dataclass(frozen=True)
class OneSidedMCP(AbstractOuter):
    r"""The minimax concave penalty of [u]_+: a weakly convex hinge that saturates.

    .. math::
        f(u) = \text{scale}\; t - \tfrac12\,\text{curvature}\; t^2, \qquad
        t = \min([u]_+,\, \text{scale}/\text{curvature})

    One very large inner value cannot dominate the mean. Its weak convexity rho_f is `curvature`:
    the envelope exists for lambda < 1/curvature only.

    References:
        Zhang (2010), Nearly unbiased variable selection under minimax concave penalty.
    """

    scale: float
    curvature: float

    monotone = True
    lipschitz = jump = derived(lambda self: self.scale)
    weak_convexity = derived(lambda self: self.curvature)

    def __post_init__(self) -> None:
        _checks.positive("OneSidedMCP", "scale", self.scale)
        _checks.positive("OneSidedMCP", "curvature", self.curvature)

    def __call__(self, u: Tensor) -> Tensor:
        rising = relu(u).clamp(max=self.scale / self.curvature)
        return rising * (self.scale - rising * (self.curvature / 2))

    def gradient(self, u: Tensor) -> Tensor:
        return (u > 0).to(u.dtype) * relu(self.scale - self.curvature * relu(u))

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        check_step(self, step)
        t = relu(u)
        # The quadratic piece's solution exceeds t exactly where t lies on the constant piece.
        rising = relu(t - step * self.scale) / (1 - step * self.curvature)
        return u.clamp(max=0) + torch.minimum(rising, t)
