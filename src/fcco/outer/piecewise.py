"""Piecewise linear outer functions: zero on an interval, linear on either side of it.

Hinge, CVaR hinge, absolute value and pinball have one kink (an interval of length zero), the dead
zone has two. Value, prox and envelope of all of them are written once, in `_PiecewiseLinear`. The
two-sided hinge on R^2 is the dead zone of a difference.
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
from .projections import project_box

__all__ = ["Absolute", "CVaRHinge", "DeadZone", "Hinge", "Pinball", "TwoSidedHinge"]

Bounds = tuple[float, float]


class _PiecewiseLinear(AbstractOuter):
    r"""high [u - end]_+ - low [start - u]_+, with low <= 0 <= high and start <= end.

    The gradient of its envelope is clip(t / step, low, high), where t is the signed distance of u
    from [start, end].
    """

    convex = True

    @abc.abstractmethod
    def _slopes(self) -> Bounds:
        """The slopes (low, high) left and right of the zero set."""

    @abc.abstractmethod
    def _zero_set(self) -> Bounds:
        """The interval (start, end) on which f is 0."""

    @property
    def lipschitz(self) -> float:
        """The steeper of the two slopes."""
        low, high = self._slopes()
        return max(-low, high)

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        (low, high), (start, end) = self._slopes(), self._zero_set()
        return high * relu(u - end) - low * relu(start - u)

    def gradient(self, u: Tensor) -> Tensor:
        """The slope of the piece; 0 on the whole zero set."""
        (low, high), (start, end) = self._slopes(), self._zero_set()
        return high * (u > end).to(u.dtype) + low * (u < start).to(u.dtype)

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """Move towards the zero set by at most step times the slope."""
        self._check_step(step)
        low, high = self._slopes()
        return u - project_box(self._distance(u), step * low, step * high)

    def envelope_gradient(self, u: Tensor, step: float | Tensor) -> Tensor:
        """The clipped slope clip(t / step, low, high)."""
        self._check_step(step)
        return project_box(self._distance(u) / step, *self._slopes())

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both from one clip: slope * (t - slope step / 2), and the slope."""
        distance, (low, high) = self._distance(u), self._slopes()
        if isinstance(step, Tensor) or isinstance(low, Tensor) or isinstance(high, Tensor):
            slope = project_box(distance / step, low, high)
            return slope * (distance - slope * (step / 2)), slope
        if not 0 < step < math.inf:
            self._check_step(step)
        # In every training step: plain numbers need no checks, and `alpha` saves an operation.
        slope = (distance / step).clamp(low, high)
        return slope * torch.sub(distance, slope, alpha=step / 2), slope

    def violation(self, u: Tensor) -> Tensor:
        """How far u lies beyond the zero set; on its right only, if f is monotone."""
        start, end = self._zero_set()
        return u - end if self.monotone else torch.maximum(u - end, start - u)

    def _distance(self, u: Tensor) -> Tensor:
        """The signed distance t of u from the zero set."""
        start, end = self._zero_set()
        return relu(u - end) - relu(start - u)


class _OneKink(_PiecewiseLinear):
    """A piecewise linear function whose zero set is one point, the kink."""

    def _kink(self) -> float:
        return 0.0

    def _zero_set(self) -> Bounds:
        return self._kink(), self._kink()

    @property
    def jump(self) -> float:
        """The difference of the two slopes."""
        low, high = self._slopes()
        return high - low

    def _distance(self, u: Tensor) -> Tensor:
        kink = self._kink()
        return u if isinstance(kink, float) and kink == 0 else u - kink


@dataclass(frozen=True)
class Hinge(_OneKink):
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
class CVaRHinge(_OneKink):
    r"""The hinge of the conditional value at risk: s + mean f(loss) is least at the best s.

    .. math::
        f(u) = \tfrac{1}{r}\,[u - s]_+

    The scale 1/r is part of f, so the quadratic zone of the envelope has width lambda / r (see
    docs/concepts/mathematics.md).

    Args:
        ratio: r in (0, 1], the share of the worst cases.
        threshold: s.

    Example:
        >>> from fcco.outer import CVaRHinge
        >>> worst_quarter = CVaRHinge(ratio=0.25, threshold=1.0)
        >>> worst_quarter(torch.tensor([0.5, 1.5, 3.0]))
        tensor([0., 2., 8.])
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

    def _kink(self) -> float:
        return self.threshold


@dataclass(frozen=True)
class Absolute(_OneKink):
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
class Pinball(_OneKink):
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
class DeadZone(_PiecewiseLinear):
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

    @property
    def jump(self) -> float:
        """The weight w, at either end of the dead zone."""
        return self.scale

    def _slopes(self) -> Bounds:
        return -self.scale, self.scale

    def _zero_set(self) -> Bounds:
        return -self.width, self.width


@dataclass(frozen=True)
class TwoSidedHinge(AbstractOuter):
    r"""The fairness hinge on R^2: two tracked rates may differ by a tolerance.

    .. math::
        f(u) = w\,[\,|u_1 - u_2| - \kappa\,]_+

    It is the dead zone phi of one number, phi(a^T u) with a = (1, -1), hence
    f_lambda(u) = phi_{2 lambda}(u_1 - u_2). Not monotone: y = (c, -c) has both signs (see
    docs/concepts/mathematics.md).

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

    @property
    def jump(self) -> float:
        """2 w: the width is that of the difference u_1 - u_2."""
        return 2 * self.scale

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self._dead_zone()(_gap(u))

    def gradient(self, u: Tensor) -> Tensor:
        """The slope of the dead zone times (1, -1)."""
        return _plus_minus(self._dead_zone().gradient(_gap(u)))

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """Both numbers move by half of what their gap moves."""
        self._check_step(step)
        gap = _gap(u)
        return u + _plus_minus((self._dead_zone().prox(gap, 2 * step) - gap) / 2)

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both from the dead zone at twice the step; the gradient is its slope times (1, -1)."""
        self._check_step(step)
        value, slope = self._dead_zone().envelope_and_gradient(_gap(u), 2 * step)
        return value, _plus_minus(slope)

    def violation(self, u: Tensor) -> Tensor:
        """By how much the gap exceeds the tolerance."""
        return self._dead_zone().violation(_gap(u))

    def slope(self, gradient: Tensor) -> Tensor:
        """y_1, for a gradient y = (y_1, -y_1): positive when the first entry is too large."""
        return gradient[..., 0]

    def _dead_zone(self) -> DeadZone:
        return DeadZone(self.tolerance, self.scale)


def _gap(u: Tensor) -> Tensor:
    """The difference u_1 - u_2."""
    first, second = u.unbind(dim=-1)
    return first - second


def _plus_minus(value: Tensor) -> Tensor:
    """The pair (value, -value)."""
    return torch.stack([value, -value], dim=-1)
