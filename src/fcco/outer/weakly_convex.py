r"""Weakly convex outer functions: f + rho_f/2 u^2 is convex, for a finite rho_f.

Most of them saturate, so that one very large inner value cannot dominate the mean. Their envelope
exists for lambda < 1/rho_f only, and prox refuses a larger step.

The truncated hinge min([u]_+, c) is not offered: at its concave kink u = c no rho makes
f + rho/2 u^2 convex, so it is not weakly convex and no theory here covers it. `OneSidedMCP` is
the weakly convex function of the same shape, `LogTruncatedHinge` one that keeps growing slowly.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import relu

from .. import _checks
from .base import AbstractOuter
from .smooth import TauLog

__all__ = ["MCP", "SCAD", "AbsoluteSquareGap", "LogTruncatedHinge", "OneSidedMCP"]


class _Profile(AbstractOuter):
    """A concave, increasing function h of a magnitude t >= 0, with h(0) = 0."""

    @abc.abstractmethod
    def _value(self, t: Tensor) -> Tensor:
        """h(t)."""

    @abc.abstractmethod
    def _slope(self, t: Tensor) -> Tensor:
        """h'(t)."""

    @abc.abstractmethod
    def _shrink(self, t: Tensor, step: float | Tensor) -> Tensor:
        """The prox of h on t >= 0."""

    def _envelope_slope(self, t: Tensor, nearest: Tensor, step: float | Tensor) -> Tensor:
        """The slope of the envelope of h at t >= 0, where `nearest` is the prox."""
        # It is h'(nearest) for nearest > 0, and t / step for nearest = 0. The smaller of the two is
        # the right one, since nearest = t - step h'(nearest) in the first case and
        # t <= step h'(0) in the second. The quotient (t - nearest) / step would lose all digits
        # of a slope below t / step times the machine epsilon.
        return torch.minimum(t / step, self._slope(nearest))


class _Even(_Profile):
    """f(u) = h(|u|)."""

    @property
    def jump(self) -> float:
        """Twice the slope of h at 0, which is its largest."""
        return 2 * self.lipschitz

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self._value(u.abs())

    def gradient(self, u: Tensor) -> Tensor:
        """The slope of h, with the sign of u; 0 at 0."""
        return u.sign() * self._slope(u.abs())

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """The prox of h at |u|, with the sign of u."""
        self._check_step(step)
        return u.sign() * self._shrink(u.abs(), step)

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both from one prox; the gradient has the sign of u."""
        nearest = self.prox(u, step)
        slope = u.sign() * self._envelope_slope(u.abs(), nearest.abs(), step)
        return self._envelope_value(nearest, slope, step), slope

    def violation(self, u: Tensor) -> Tensor:
        """The magnitude of u."""
        return u.abs()


class _OneSided(_Profile):
    """f(u) = h([u]_+)."""

    monotone = True

    @property
    def jump(self) -> float:
        """The slope of h at 0, which is its largest."""
        return self.lipschitz

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self._value(relu(u))

    def gradient(self, u: Tensor) -> Tensor:
        """The slope of h where u > 0, else 0."""
        return (u > 0).to(u.dtype) * self._slope(relu(u))

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """The prox of h where u > 0, else u."""
        self._check_step(step)
        return u.clamp(max=0) + self._shrink(relu(u), step)

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both from one prox; the gradient is 0 for u <= 0."""
        nearest = self.prox(u, step)
        slope = self._envelope_slope(relu(u), relu(nearest), step)
        return self._envelope_value(nearest, slope, step), slope


@dataclass(frozen=True)
class LogTruncatedHinge(_OneSided):
    r"""A hinge that grows like a logarithm.

    .. math::
        f(u) = \alpha \log(1 + [u]_+ / \alpha)

    Args:
        level: alpha, the height at which f leaves the hinge. rho_f = 1/alpha.

    Example:
        >>> from fcco.outer import LogTruncatedHinge
        >>> LogTruncatedHinge(level=2.0)(torch.tensor([-1.0, 0.1, 10.0]))
        tensor([0.0000, 0.0976, 3.5835])
    """

    level: float

    lipschitz = 1.0

    def __post_init__(self) -> None:
        _checks.positive("LogTruncatedHinge", "level", self.level)

    @property
    def weak_convexity(self) -> float:
        """1 / alpha."""
        return 1 / self.level

    def _value(self, t: Tensor) -> Tensor:
        return self.level * torch.log1p(t / self.level)

    def _slope(self, t: Tensor) -> Tensor:
        return self.level / (self.level + t)

    def _shrink(self, t: Tensor, step: float | Tensor) -> Tensor:
        # On t >= 0, f is alpha log(t + alpha) up to a constant.
        return TauLog(self.level, self.level).prox(t, step)


@dataclass(frozen=True)
class _MinimaxConcave(_Profile):
    """h(t) = m t - c t^2 / 2 up to its top at t = m/c, constant beyond."""

    scale: float
    curvature: float

    def __post_init__(self) -> None:
        _checks.positive(type(self).__name__, "scale", self.scale)
        _checks.positive(type(self).__name__, "curvature", self.curvature)

    @property
    def lipschitz(self) -> float:
        """The slope at 0."""
        return self.scale

    @property
    def weak_convexity(self) -> float:
        """The curvature c."""
        return self.curvature

    def _value(self, t: Tensor) -> Tensor:
        rising = t.clamp(max=self.scale / self.curvature)
        return rising * (self.scale - rising * (self.curvature / 2))

    def _slope(self, t: Tensor) -> Tensor:
        return relu(self.scale - self.curvature * t)

    def _shrink(self, t: Tensor, step: float | Tensor) -> Tensor:
        # The quadratic piece's solution exceeds t exactly where t lies on the constant piece.
        rising = relu(t - step * self.scale) / (1 - step * self.curvature)
        return torch.minimum(rising, t)


@dataclass(frozen=True)
class MCP(_MinimaxConcave, _Even):
    r"""The minimax concave penalty: the absolute value near 0, constant far out.

    .. math::
        f(u) = m|u| - \tfrac{c}{2} u^2 \ \text{ for } |u| \le m/c, \qquad
        f(u) = \tfrac{m^2}{2c} \ \text{ beyond.}

    Args:
        scale: m, the slope at 0.
        curvature: c = rho_f; 1/c is the parameter often written gamma or b.

    Example:
        >>> from fcco.outer import MCP
        >>> MCP(scale=1.0, curvature=0.5)(torch.tensor([-1.0, 2.0, 5.0]))
        tensor([0.7500, 1.0000, 1.0000])

    References:
        Zhang (2010), Nearly unbiased variable selection under minimax concave penalty.
    """


@dataclass(frozen=True)
class OneSidedMCP(_MinimaxConcave, _OneSided):
    r"""The minimax concave penalty of [u]_+: a hinge that saturates.

    .. math::
        f(u) = \mathrm{MCP}([u]_+)

    Args:
        scale: m, the slope at 0.
        curvature: c = rho_f; f is constant, m^2/(2c), from u = m/c on.

    Example:
        >>> from fcco.outer import OneSidedMCP
        >>> OneSidedMCP(scale=1.0, curvature=0.5)(torch.tensor([-1.0, 1.0, 5.0]))
        tensor([0.0000, 0.7500, 1.0000])
    """


@dataclass(frozen=True)
class SCAD(_Even):
    r"""The smoothly clipped absolute deviation.

    .. math::
        f(0) = 0, \qquad f'(u) = s \ (0 < u \le s), \quad \tfrac{a s - u}{a - 1} \ (s < u \le a s),
        \quad 0 \ (u > a s), \qquad f(-u) = f(u).

    Args:
        scale: s, the slope at 0.
        shape: a > 2. rho_f = 1/(a - 1).

    Example:
        >>> from fcco.outer import SCAD
        >>> SCAD(scale=1.0, shape=3.0)(torch.tensor([0.5, -2.0, 9.0]))
        tensor([0.5000, 1.7500, 2.0000])

    References:
        Fan and Li (2001), Variable selection via nonconcave penalized likelihood.
    """

    scale: float
    shape: float

    def __post_init__(self) -> None:
        _checks.positive("SCAD", "scale", self.scale)
        _checks.in_interval("SCAD", "shape", self.shape, 2, math.inf, open_low=True, open_high=True)

    @property
    def lipschitz(self) -> float:
        """The slope at 0."""
        return self.scale

    @property
    def weak_convexity(self) -> float:
        """1 / (a - 1)."""
        return 1 / (self.shape - 1)

    def _value(self, t: Tensor) -> Tensor:
        end, a_minus_1 = self.shape * self.scale, self.shape - 1
        # From t = s on: the final height minus the area under the slope from t to the end.
        bent = self.scale**2 * (self.shape + 1) / 2 - relu(end - t).square() / (2 * a_minus_1)
        return torch.where(t <= self.scale, self.scale * t, bent)

    def _slope(self, t: Tensor) -> Tensor:
        falling = relu(self.shape * self.scale - t) / (self.shape - 1)
        return falling.clamp(max=self.scale)

    def _shrink(self, t: Tensor, step: float | Tensor) -> Tensor:
        # The three pieces intersect exactly where one takes over from the other.
        a_minus_1, shift = self.shape - 1, step * self.scale
        bent = (a_minus_1 * t - self.shape * shift) / (a_minus_1 - step)
        return torch.minimum(torch.maximum(relu(t - shift), bent), t)


@dataclass(frozen=True)
class AbsoluteSquareGap(AbstractOuter):
    r"""The distance of a square from 1, as in robust phase retrieval.

    .. math::
        f(u) = |u^2 - 1|

    rho_f = 2; not Lipschitz.

    Example:
        >>> from fcco.outer import AbsoluteSquareGap
        >>> AbsoluteSquareGap().prox(torch.tensor([0.25, 1.2, -3.0]), 0.25)
        tensor([ 0.5000,  1.0000, -2.0000])
    """

    @property
    def weak_convexity(self) -> float:
        """2, the curvature of -u^2."""
        return 2.0

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return (u.square() - 1).abs()

    def gradient(self, u: Tensor) -> Tensor:
        """2u or -2u; 0 at the kinks."""
        return 2 * u * (u.square() - 1).sign()

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """Towards 1 in magnitude, from either side; sign(u) in between."""
        self._check_step(step)
        t = u.abs()
        inside = (t / (1 - 2 * step)).clamp(max=1)
        return u.sign() * torch.maximum(inside, t / (1 + 2 * step))

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both from one prox; the gradient has the sign of u."""
        nearest, t = self.prox(u, step), u.abs()
        # -2 prox below 1, 2 prox above 1, and (t - 1) / step where the prox sits on the kink. The
        # three pieces intersect exactly where one takes over from the other.
        slope = torch.maximum((t - 1) / step, -2 * t / (1 - 2 * step))
        slope = u.sign() * torch.minimum(slope, 2 * t / (1 + 2 * step))
        return self._envelope_value(nearest, slope, step), slope
