r"""Support functions f(u) = max_{y in Y} <y, u> of a set Y that is easy to project onto.

Then grad f_lambda(u) = (projection of u/lambda onto Y), prox = u - lambda grad f_lambda(u), and f*
is 0 on Y and `inf` elsewhere. A step is a number or a 0-dimensional tensor.
"""

from __future__ import annotations

import abc

from torch import Tensor

from .base import AbstractOuter
from .projections import indicator

__all__ = ["AbstractSupportFunction"]


class AbstractSupportFunction(AbstractOuter):
    """f(u) = max_{y in Y} <y, u>; a subclass projects onto `size` Y."""

    dim = None
    convex = True

    @abc.abstractmethod
    def _project(self, u: Tensor, size: float | Tensor) -> Tensor:
        """The projection of u onto size Y."""

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """Subtract from u its projection onto step Y."""
        self._check_step(step)
        return u - self._project(u, step)

    def envelope(self, u: Tensor, step: float | Tensor) -> Tensor:
        """<y, u> - step/2 |y|^2 at y = the envelope's gradient."""
        return self.envelope_and_gradient(u, step)[0]

    def envelope_gradient(self, u: Tensor, step: float | Tensor) -> Tensor:
        """The projection of u / step onto Y."""
        self._check_step(step)
        return self._project(u, step) / step

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both from one projection."""
        y = self.envelope_gradient(u, step)
        return (y * (u - y * (step / 2))).sum(dim=-1), y

    def conjugate(self, y: Tensor) -> Tensor:
        """0 on Y, `inf` elsewhere."""
        return indicator((y - self._project(y, 1.0)).abs().amax(dim=-1))
