r"""Smooth outer functions: squared hinge, average precision, NDCG, contrastive losses.

`smooth` holds on the domain of each function, away from its boundary: u_2 > 0 bounded away from 0
for average precision, u > 0 bounded away from 0 for NDCG. Where no Lipschitz constant holds on the
whole domain, `lipschitz` is `inf`, and so is `weak_convexity`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import relu

from .. import _checks
from .base import AbstractOuter

__all__ = [
    "NDCG",
    "AveragePrecision",
    "ClassSeparation",
    "Linear",
    "LogMeanExp",
    "SquaredHinge",
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
class Linear(_SmoothOnly):
    r"""A multiple of the value itself: plain averages as a coupled term.

    .. math::
        f(u) = c\,u

    Args:
        scale: c, above 0.

    Example:
        >>> from fcco.outer import Linear
        >>> Linear()(torch.tensor([-1.0, 2.0]))
        tensor([-1.,  2.])
    """

    scale: float = 1.0

    convex = monotone = True

    def __post_init__(self) -> None:
        _checks.positive("Linear", "scale", self.scale)

    @property
    def lipschitz(self) -> float:
        """The factor c."""
        return self.scale

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self.scale * u

    def gradient(self, u: Tensor) -> Tensor:
        """The factor c."""
        return self.scale * torch.ones_like(u)


@dataclass(frozen=True)
class NDCG(_SmoothOnly):
    r"""The discount of normalised discounted cumulative gain at a (surrogate) rank u.

    .. math::
        f(u) = \frac{c}{\log_2(1 + u)}, \qquad u > 0

    Decreasing in the rank. A gain is maximised, so a loss to minimise has a negative scale.

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
    outer function is linear without an offset, and convex with one (in u it is concave).

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
