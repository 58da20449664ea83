"""Piecewise linear functions: zero on an interval, linear on either side of it.

Hinge, CVaR hinge, absolute value and pinball have one kink (an interval of length zero), the dead
zone has two. Value, prox, envelope and conjugate of all of them are written once, here.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor
from torch.nn.functional import relu

from .base import AbstractOuter
from .projections import indicator, project_box

__all__ = ["AbstractOneKink", "AbstractPiecewiseLinear", "Bounds"]

Bounds = tuple[float, float]


class AbstractPiecewiseLinear(AbstractOuter):
    r"""high [u - end]_+ - low [start - u]_+, with low <= 0 <= high and start <= end.

    Its conjugate is max(start y, end y) on low <= y <= high, its envelope's gradient
    clip(t / step, low, high), where t is the signed distance of u from [start, end].
    """

    convex = True

    @abc.abstractmethod
    def _slopes(self) -> Bounds:
        """(low, high)."""

    @abc.abstractmethod
    def _zero_set(self) -> Bounds:
        """(start, end)."""

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

    def envelope(self, u: Tensor, step: float | Tensor) -> Tensor:
        """Quadratic near the zero set, linear further out."""
        self._check_step(step)
        return self.envelope_and_gradient(u, step)[0]

    def envelope_gradient(self, u: Tensor, step: float | Tensor) -> Tensor:
        """The clipped slope clip(t / step, low, high)."""
        self._check_step(step)
        return project_box(self._distance(u) / step, *self._slopes())

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both from one clip: slope * (t - slope step / 2), and the slope."""
        distance = self._distance(u)
        slope = project_box(distance / step, *self._slopes())
        if isinstance(step, Tensor):
            return slope * (distance - slope * (step / 2)), slope
        return slope * torch.sub(distance, slope, alpha=step / 2), slope

    def conjugate(self, y: Tensor) -> Tensor:
        """The support function of the zero set, on low <= y <= high."""
        (low, high), (start, end) = self._slopes(), self._zero_set()
        outside = relu(y - high) + relu(low - y)
        return end * relu(y) - start * relu(-y) + indicator(outside)

    def violation(self, u: Tensor) -> Tensor:
        """How far u lies beyond the zero set; on its right only, if f is monotone."""
        start, end = self._zero_set()
        return u - end if self.monotone else torch.maximum(u - end, start - u)

    def slope(self, gradient: Tensor) -> Tensor:
        """The magnitude of the gradient."""
        return gradient.abs()

    def _distance(self, u: Tensor) -> Tensor:
        start, end = self._zero_set()
        return relu(u - end) - relu(start - u)


class AbstractOneKink(AbstractPiecewiseLinear):
    """A piecewise linear function whose zero set is one point, the shift."""

    def _shift(self) -> float:
        return 0.0

    def _zero_set(self) -> Bounds:
        return self._shift(), self._shift()

    def dual_zone(self, step: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
        """The interval shift + step [low, high]: there y = (u - shift) / step."""
        (low, high), shift = self._slopes(), self._shift()
        return shift + step * low, shift + step * high

    def _distance(self, u: Tensor) -> Tensor:
        shift = self._shift()
        return u if isinstance(shift, float) and shift == 0 else u - shift
