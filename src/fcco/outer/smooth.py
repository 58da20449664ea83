r"""Smooth outer functions: squared hinge, average precision, NDCG, contrastive losses.

`smooth` holds on the domain of each function, away from its boundary: u >= 0 for the logarithm,
u_2 > 0 bounded away from 0 for average precision, u > 0 bounded away from 0 for NDCG, bounded sets
of u >= 0 for the power. Where no Lipschitz constant holds on the whole domain, `lipschitz` is
`inf`, and so is `weak_convexity`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import relu

from .. import _checks
from .base import AbstractOuter
from .projections import indicator

__all__ = [
    "NDCG",
    "AveragePrecision",
    "ClassSeparation",
    "LogMeanExp",
    "Power",
    "SquaredHinge",
    "TauLog",
]


class _SmoothOnly(AbstractOuter):
    """A smooth function without a prox: methods use its value and gradient only."""

    smooth = True

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """Raise a `ValueError`."""
        raise ValueError(
            f"{self!r} is smooth: it offers no prox and needs none; use it without smoothing."
        )


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

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """The gradient is f'(prox(u)): f has no kink."""
        nearest = self.prox(u, step)
        slope = self.gradient(nearest)
        return self._envelope_value(nearest, slope, step), slope

    def conjugate(self, y: Tensor) -> Tensor:
        """y^2 / (2 rho) for y >= 0."""
        return y.square() / (2 * self.scale) + indicator(relu(-y))


@dataclass(frozen=True)
class TauLog(AbstractOuter):
    r"""The logarithm of a global contrastive loss, and of KL-regularised robust optimisation.

    .. math::
        f(u) = \tau \log(u + e), \qquad u \ge 0

    Concave and smooth: methods use it as it is. Its prox takes f as infinite for u < 0, so the
    envelope grows again there; the declared facts hold on u >= 0.

    Args:
        temperature: tau.
        offset: e, positive. C_f = tau/e and rho_f = tau/e^2.

    Example:
        >>> from fcco.outer import TauLog
        >>> log = TauLog(temperature=0.5, offset=1.0)
        >>> log(torch.tensor([0.0, 1.0]))
        tensor([0.0000, 0.3466])
        >>> log.prox(torch.tensor([0.25, 1.0]), 1.0)
        tensor([0.0000, 0.7071])
    """

    temperature: float
    offset: float

    monotone = smooth = True

    def __post_init__(self) -> None:
        _checks.positive("TauLog", "temperature", self.temperature)
        _checks.positive("TauLog", "offset", self.offset)

    @property
    def lipschitz(self) -> float:
        """Tau / e."""
        return self.temperature / self.offset

    @property
    def weak_convexity(self) -> float:
        """Tau / e^2."""
        return self.temperature / self.offset**2

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self.temperature * torch.log(u + self.offset)

    def gradient(self, u: Tensor) -> Tensor:
        """Tau / (u + e)."""
        return self.temperature / (u + self.offset)

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """0 for u <= step tau/e, beyond it the larger root of v^2 + (e - u) v = e u - step tau."""
        self._check_step(step)
        edge = step * self.temperature / self.offset
        beyond = u.clamp(min=edge)
        linear, constant = beyond - self.offset, self.offset * (beyond - edge)
        # sqrt(linear^2 + 4 constant), divided by u + e first so that no square overflows.
        size = beyond + self.offset
        root = size * torch.sqrt((linear / size).square() + 4 * (constant / size) / size)
        # Of the two forms of the larger root, the one that adds numbers of the same sign.
        return torch.where(
            linear > 0,
            (linear + root) / 2,
            2 * constant / (root - linear.clamp(max=0)),
        )

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """The gradient is f'(prox(u)) where prox(u) > 0, and u / step where it is 0."""
        nearest = self.prox(u, step)
        # The smaller is the right one: u - step f'(prox) = prox >= 0, with f'(0) >= u / step at 0.
        slope = torch.minimum(u / step, self.gradient(nearest))
        return self._envelope_value(nearest, slope, step), slope


@dataclass(frozen=True)
class AveragePrecision(_SmoothOnly):
    r"""The ratio of two tracked means: minus the precision at one positive example.

    .. math::
        f(u_1, u_2) = -\frac{u_1}{u_2}, \qquad u_2 > 0

    u_1 is the surrogate rank among the positives, u_2 among all examples.

    Example:
        >>> from fcco.outer import AveragePrecision
        >>> AveragePrecision()(torch.tensor([1.0, 2.0]))
        tensor(-0.5000)
        >>> AveragePrecision().gradient(torch.tensor([1.0, 2.0]))
        tensor([-0.5000,  0.2500])
    """

    dim = 2

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        positives, total = u.unbind(dim=-1)
        return -positives / total

    def gradient(self, u: Tensor) -> Tensor:
        """(-1/u_2, u_1/u_2^2)."""
        positives, total = u.unbind(dim=-1)
        # Divided twice: the square of u_2 may overflow.
        return torch.stack([-1 / total, positives / total / total], dim=-1)


@dataclass(frozen=True)
class ClassSeparation(_SmoothOnly):
    r"""The spread of the scores within two classes, and the lack of a margin between them.

    .. math::
        f(a, a_2, b, b_2) = (a_2 - a^2) + (b_2 - b^2) + [\,m + b - a\,]_+^2

    a and b are the mean scores of positives and negatives, a_2 and b_2 the means of their squares.
    Without the hinge it is the mean of (m + h_j - h_i)^2 over all pairs of a positive i and a
    negative j; with it, the margin loss of AUC (AUCM), as a minimum instead of a min-max problem.

    Args:
        margin: m.
        hinge: whether classes that are further apart than the margin cost nothing.

    Example:
        >>> from fcco.outer import ClassSeparation
        >>> ClassSeparation()(torch.tensor([1.0, 1.5, 0.5, 0.25]))
        tensor(0.7500)

    References:
        Z. Yuan et al., Large-scale robust deep AUC maximization: a new surrogate loss and empirical
        studies on medical image classification, 2021 (AUCM).
    """

    margin: float = 1.0
    hinge: bool = True

    dim = 4

    def __post_init__(self) -> None:
        _checks.positive("ClassSeparation", "margin", self.margin)

    def _gap(self, positive: Tensor, negative: Tensor) -> Tensor:
        gap = self.margin + negative - positive
        return relu(gap) if self.hinge else gap

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        positive, positive_square, negative, negative_square = u.unbind(dim=-1)
        spread = positive_square - positive.square() + negative_square - negative.square()
        return spread + self._gap(positive, negative).square()

    def gradient(self, u: Tensor) -> Tensor:
        """(-2a - 2 gap, 1, -2b + 2 gap, 1)."""
        positive, _, negative, _ = u.unbind(dim=-1)
        gap, one = self._gap(positive, negative), torch.ones_like(positive)
        return torch.stack([-2 * (positive + gap), one, 2 * (gap - negative), one], dim=-1)


@dataclass(frozen=True)
class Power(_SmoothOnly):
    r"""The power of the p-norm push, which weighs the top of a ranked list.

    .. math::
        f(u) = u^p, \qquad u \ge 0

    Args:
        exponent: p, at least 1. Between 1 and 2 the gradient is not Lipschitz near 0.

    Example:
        >>> from fcco.outer import Power
        >>> Power(exponent=3.0).gradient(torch.tensor([0.0, 1.0, 2.0]))
        tensor([ 0.,  3., 12.])
    """

    exponent: float

    convex = monotone = True

    def __post_init__(self) -> None:
        _checks.in_interval("Power", "exponent", self.exponent, 1, math.inf, open_high=True)

    @property
    def lipschitz(self) -> float:
        """`inf`, but 1 for p = 1."""
        return 1.0 if self.exponent == 1 else math.inf

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return u**self.exponent

    def gradient(self, u: Tensor) -> Tensor:
        """The gradient p u^(p-1)."""
        return self.exponent * u ** (self.exponent - 1)

    def conjugate(self, y: Tensor) -> Tensor:
        """(p - 1) (y/p)^(p/(p-1)) for y >= 0, 0 below; on y <= 1 only, for p = 1."""
        if not isinstance(self.exponent, Tensor) and self.exponent == 1:
            return indicator(relu(y - 1))
        p, p_minus_1 = self.exponent, self.exponent - 1
        return p_minus_1 * (relu(y) / p) ** (p / p_minus_1)


@dataclass(frozen=True)
class NDCG(_SmoothOnly):
    r"""The discount of normalised discounted cumulative gain at a (surrogate) rank u.

    .. math::
        f(u) = \frac{c}{\log_2(1 + u)}, \qquad u > 0

    Decreasing in the rank. A gain is maximised, so a loss to minimise has a negative scale. The
    conjugate (convex case, c > 0) has no closed form.

    Args:
        scale: c, not 0; minus the normalised gain of the example makes f a loss.

    Example:
        >>> from fcco.outer import NDCG
        >>> NDCG()(torch.tensor([1.0, 3.0]))
        tensor([1.0000, 0.5000])
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _checks.number("NDCG", "scale", self.scale)
        _checks.positive("NDCG", "abs(scale)", abs(self.scale))

    @property
    def convex(self) -> bool:
        """Convex for a positive scale, concave for a negative one."""
        return self.scale > 0

    @property
    def monotone(self) -> bool:
        """Increasing for a negative scale."""
        return self.scale < 0

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self.scale * math.log(2) / torch.log1p(u)

    def gradient(self, u: Tensor) -> Tensor:
        """-c ln(2) / ((1 + u) ln(1 + u)^2)."""
        return -self.scale * math.log(2) / ((1 + u) * torch.log1p(u).square())


@dataclass(frozen=True)
class LogMeanExp(_SmoothOnly):
    r"""tau log(u + e) for a tracker that keeps nu = log u itself, so that nothing overflows.

    .. math::
        f(\nu) = \tau \log(\exp(\nu) + e), \qquad \nu = \log \operatorname{mean} \exp(\ell / \tau)

    A tracker with `log_space=True` averages exp(loss / tau) but stores its logarithm nu. In nu the
    outer function is linear without an offset, and convex with one (`TauLog` in u is concave).

    Args:
        temperature: tau.
        offset: e, at least 0.

    Example:
        >>> from fcco.outer import LogMeanExp
        >>> losses = torch.tensor([1.0, 2.0])
        >>> nu = torch.logsumexp(losses / 0.5, dim=0) - math.log(2)
        >>> LogMeanExp(temperature=0.5)(nu)
        tensor(1.7169)
        >>> LogMeanExp(temperature=0.5, offset=1.0)(torch.tensor([-10.0, 0.0, 100.0]))
        tensor([2.2699e-05, 3.4657e-01, 5.0000e+01])
    """

    temperature: float
    offset: float = 0.0

    convex = monotone = True

    def __post_init__(self) -> None:
        _checks.positive("LogMeanExp", "temperature", self.temperature)
        _checks.in_interval("LogMeanExp", "offset", self.offset, 0.0, math.inf, open_high=True)

    @property
    def lipschitz(self) -> float:
        """Tau."""
        return self.temperature

    @property
    def _linear(self) -> bool:
        return not isinstance(self.offset, Tensor) and self.offset == 0

    @property
    def _log_offset(self) -> float | Tensor:
        return self.offset.log() if isinstance(self.offset, Tensor) else math.log(self.offset)

    def __call__(self, u: Tensor) -> Tensor:
        """The value tau log(exp(nu) + e)."""
        if self._linear:
            return self.temperature * u
        return self.temperature * torch.logaddexp(u, torch.zeros_like(u) + self._log_offset)

    def gradient(self, u: Tensor) -> Tensor:
        """Tau exp(nu) / (exp(nu) + e)."""
        if self._linear:
            return self.temperature * torch.ones_like(u)
        return self.temperature * torch.sigmoid(u - self._log_offset)

    def conjugate(self, y: Tensor) -> Tensor:
        """For p = y/tau in [0, 1]: tau (p log p + (1-p) log(1-p) - (1-p) log e); p = 1 if e = 0."""
        if self._linear:
            return indicator((y - self.temperature).abs())
        share = (y / self.temperature).clamp(0, 1)
        entropy = torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share)
        value = self.temperature * (entropy - (1 - share) * self._log_offset)
        return value + indicator(relu(-y) + relu(y - self.temperature))
