r"""Smooth outer functions: squared hinge, ratio, discount, class separation, log-mean-exp.

`smooth` holds on the domain of each function, away from its boundary. Where no Lipschitz constant
holds on the whole domain, `lipschitz` is `inf`, and so is `weak_convexity`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import relu

from .. import _checks
from .base import AbstractOuter, check_step, derived


@dataclass(frozen=True)
class SquaredHinge(AbstractOuter):
    """f(u) = scale/2 [u]_+^2, a smooth but inexact penalty for g_i(w) <= 0."""

    scale: float = 1.0

    convex = monotone = smooth = True

    def __post_init__(self) -> None:
        _checks.positive("SquaredHinge", "scale", self.scale)

    def __call__(self, u: Tensor) -> Tensor:
        return relu(u).square() * (self.scale / 2)

    def gradient(self, u: Tensor) -> Tensor:
        return relu(u) * self.scale

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """The envelope is such a function again, of a smaller scale."""
        check_step(self, step)
        scale, beyond = self.scale / (1 + step * self.scale), relu(u)
        return beyond.square() * (scale / 2), beyond * scale


@dataclass(frozen=True)
class Linear(AbstractOuter):
    """f(u) = u: plain averages as a coupled term."""

    convex = monotone = smooth = True
    lipschitz = 1.0

    def __call__(self, u: Tensor) -> Tensor:
        return u

    def gradient(self, u: Tensor) -> Tensor:
        return torch.ones_like(u)


@dataclass(frozen=True)
class Ratio(AbstractOuter):
    """f(u_1, u_2) = -u_1 / u_2 for u_2 > 0: minus the precision at one positive example.

    u_1 is the surrogate rank among the positives, u_2 among all examples.
    """

    dim = 2
    smooth = True

    def __call__(self, u: Tensor) -> Tensor:
        positives, total = u.unbind(dim=-1)
        return -positives / total

    def gradient(self, u: Tensor) -> Tensor:
        positives, total = u.unbind(dim=-1)
        # Divided twice: the square of u_2 may overflow.
        return torch.stack([-1 / total, positives / total / total], dim=-1)


@dataclass(frozen=True)
class Discount(AbstractOuter):
    """f(u) = -1 / log2(1 + u) for u > 0: minus the discount of NDCG at a (surrogate) rank u."""

    monotone = smooth = True

    def __call__(self, u: Tensor) -> Tensor:
        return -math.log(2) / torch.log1p(u)

    def gradient(self, u: Tensor) -> Tensor:
        return math.log(2) / ((1 + u) * torch.log1p(u).square())


@dataclass(frozen=True)
class ClassSeparation(AbstractOuter):
    r"""The spread of the scores within two classes, and the lack of a margin between them.

    .. math::
        f(a, a_2, b, b_2) = (a_2 - a^2) + (b_2 - b^2) + [\,\text{margin} + b - a\,]_+^2

    a and b are the mean scores of positives and negatives, a_2 and b_2 the means of their squares;
    see `fcco.xrisk.AUC`.
    """

    margin: float = 1.0

    dim = 4
    smooth = True

    def __post_init__(self) -> None:
        _checks.positive("ClassSeparation", "margin", self.margin)

    def __call__(self, u: Tensor) -> Tensor:
        positive, positive_square, negative, negative_square = u.unbind(dim=-1)
        spread = positive_square - positive.square() + negative_square - negative.square()
        return spread + relu(self.margin + negative - positive).square()

    def gradient(self, u: Tensor) -> Tensor:
        positive, _, negative, _ = u.unbind(dim=-1)
        gap, one = relu(self.margin + negative - positive), torch.ones_like(positive)
        return torch.stack([-2 * (positive + gap), one, 2 * (gap - negative), one], dim=-1)


@dataclass(frozen=True)
class LogMeanExp(AbstractOuter):
    r"""tau log(u + offset) for a tracker that keeps nu = log u itself, so that nothing overflows.

    .. math::
        f(\nu) = \tau \log(\exp(\nu) + \text{offset}), \qquad
        \nu = \log \operatorname{mean} \exp(\ell / \tau), \qquad \tau = \text{temperature}

    In nu it is linear without an offset, and convex with one (in u it is concave).
    """

    temperature: float
    offset: float = 0.0

    convex = monotone = smooth = True
    lipschitz = derived(lambda self: self.temperature)

    def __post_init__(self) -> None:
        _checks.positive("LogMeanExp", "temperature", self.temperature)
        _checks.finite("LogMeanExp", "offset", self.offset, 0)

    def _log_offset(self, u: Tensor) -> Tensor:
        """Without an offset -inf, with which both formulas below are right too."""
        return (torch.zeros_like(u) + self.offset).log()

    def __call__(self, u: Tensor) -> Tensor:
        return self.temperature * torch.logaddexp(u, self._log_offset(u))

    def gradient(self, u: Tensor) -> Tensor:
        return self.temperature * torch.sigmoid(u - self._log_offset(u))
