r"""Outer functions that are support functions, f(u) = max_{y in Y} <y, u>, of the last axis.

The set Y is one that is easy to project onto. Then grad f_lambda(u) = (projection of u/lambda onto
Y), prox = u - lambda grad f_lambda(u), and f* is 0 on Y and `inf` elsewhere. A step is a number or
a 0-dimensional tensor.
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
from .projections import (
    capped_threshold,
    indicator,
    project_ball,
    project_box,
    project_capped_simplex,
    project_simplex,
    project_subsimplex,
    safe_norm,
)

__all__ = ["CVaR", "EuclideanNorm", "Maximum", "PositiveMaximum", "SeparableHinge", "TopMean"]


class _SupportFunction(AbstractOuter):
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

    def envelope_gradient(self, u: Tensor, step: float | Tensor) -> Tensor:
        """The projection of u / step onto Y."""
        self._check_step(step)
        return self._project(u, step) / step

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both from one projection: <y, u> - step/2 |y|^2, and y."""
        y = self.envelope_gradient(u, step)
        return (y * (u - y * (step / 2))).sum(dim=-1), y

    def conjugate(self, y: Tensor) -> Tensor:
        """0 on Y, `inf` elsewhere."""
        return indicator((y - self._project(y, 1.0)).abs().amax(dim=-1))


class _TopAverage(_SupportFunction):
    """The largest entries, each with weight cap until the weights add up to 1.

    It is the support function of the simplex with capped weights, {0 <= y <= cap, sum y = 1}.
    """

    monotone = True

    @abc.abstractmethod
    def _cap(self, size: int) -> float:
        """The largest weight, for `size` entries."""

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self.value_and_gradient(u)[0]

    def gradient(self, u: Tensor) -> Tensor:
        """The weights y; entries that tie at the threshold share the remaining weight."""
        cap = self._cap(u.shape[-1])
        threshold = self._threshold(u)
        above, tied = (u > threshold).to(u.dtype), (u == threshold).to(u.dtype)
        remaining = 1 - cap * above.sum(dim=-1, keepdim=True)
        return cap * above + tied * (remaining / tied.sum(dim=-1, keepdim=True))

    def value_and_gradient(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one sort."""
        weights = self.gradient(u)
        return (weights * u).sum(dim=-1), weights

    def _threshold(self, u: Tensor) -> Tensor:
        """The smallest entry with a positive weight."""
        return capped_threshold(u, self._cap(u.shape[-1]))

    def _project(self, u: Tensor, size: float | Tensor) -> Tensor:
        return project_capped_simplex(u, size * self._cap(u.shape[-1]), size)


@dataclass(frozen=True)
class Maximum(_TopAverage):
    r"""The largest entry.

    .. math::
        f(u) = \max_i u_i

    Example:
        >>> import torch
        >>> from fcco.outer import Maximum
        >>> u = torch.tensor([1.0, 3.0, 2.5])
        >>> Maximum()(u)
        tensor(3.)
        >>> Maximum().envelope_gradient(u, 1.0)
        tensor([0.0000, 0.7500, 0.2500])
    """

    lipschitz = 1.0

    def _cap(self, size: int) -> float:
        return 1.0

    def _threshold(self, u: Tensor) -> Tensor:
        return u.amax(dim=-1, keepdim=True)

    def _project(self, u: Tensor, size: float | Tensor) -> Tensor:
        return project_simplex(u, size)


@dataclass(frozen=True)
class TopMean(_TopAverage):
    r"""The mean of the k largest entries.

    .. math::
        f(u) = \tfrac{1}{k} \sum_{j=1}^{k} u_{[j]}

    Args:
        k: how many entries, an integer; u must have at least as many.

    Example:
        >>> import torch
        >>> from fcco.outer import TopMean
        >>> TopMean(k=2)(torch.tensor([1.0, 3.0, 2.0]))
        tensor(2.5000)
    """

    k: int

    def __post_init__(self) -> None:
        _checks.at_least("TopMean", "k", self.k, 1)
        if isinstance(self.k, float):
            raise ValueError(
                f"`TopMean(k=...)` must be an integer but is: {self.k} "
                "(`CVaR(ratio=...)` averages over a fractional number of entries)."
            )

    @property
    def lipschitz(self) -> float:
        """1 / sqrt(k)."""
        return self.k**-0.5

    def _cap(self, size: int) -> float:
        if not isinstance(self.k, Tensor) and self.k > size:
            raise ValueError(f"`TopMean(k=...)` must be at most d = {size} but is: {self.k}.")
        return 1 / self.k


@dataclass(frozen=True)
class CVaR(_TopAverage):
    r"""The conditional value at risk: the mean of the worst share r of the entries.

    .. math::
        f(u) = \min_s\, s + \tfrac{1}{r d} \sum_{j=1}^{d} [u_j - s]_+

    r d need not be an integer: the last entry then has a part of the weight.

    Args:
        ratio: r in (0, 1].
        dim: d, where known. It only sharpens the Lipschitz constant, which is 1 for an unknown d
            and close to 1 / sqrt(r d) for a known one.

    Example:
        >>> import torch
        >>> from fcco.outer import CVaR
        >>> CVaR(ratio=0.5)(torch.tensor([1.0, 3.0, 2.0]))  # (3 + 2/2) / 1.5
        tensor(2.6667)
    """

    ratio: float
    dim: int | None = None

    def __post_init__(self) -> None:
        _checks.in_interval("CVaR", "ratio", self.ratio, 0, 1, open_low=True)
        if self.dim is not None:
            _checks.integer("CVaR", "dim", self.dim, 1)

    @property
    def lipschitz(self) -> float:
        """The norm of the weights: as many caps as fit into 1, and the rest."""
        if self.dim is None:
            return 1.0
        cap = self._cap(self.dim)
        full = 1 / cap // 1
        return (full * cap**2 + (1 - full * cap) ** 2) ** 0.5

    def _cap(self, size: int) -> float:
        return 1 / (self.ratio * size)


@dataclass(frozen=True)
class PositiveMaximum(_SupportFunction):
    r"""The hinge of the largest entry: one penalty for all constraints u_i <= 0.

    .. math::
        f(u) = [\max_i u_i]_+

    Example:
        >>> from fcco.outer import PositiveMaximum
        >>> PositiveMaximum()(torch.tensor([[1.0, 3.0], [-1.0, -2.0]]))
        tensor([3., 0.])
    """

    monotone = True
    lipschitz = 1.0

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return relu(u.amax(dim=-1))

    def gradient(self, u: Tensor) -> Tensor:
        """Weight 1 shared by the largest entries where they are positive."""
        top = u.amax(dim=-1, keepdim=True)
        tied = (u == top).to(u.dtype)
        return tied * (top > 0).to(u.dtype) / tied.sum(dim=-1, keepdim=True)

    def violation(self, u: Tensor) -> Tensor:
        """The largest entry."""
        return u.amax(dim=-1)

    def slope(self, gradient: Tensor) -> Tensor:
        """The sum of the weights."""
        return gradient.sum(dim=-1)

    def _project(self, u: Tensor, size: float | Tensor) -> Tensor:
        return project_subsimplex(u, size)


@dataclass(frozen=True)
class EuclideanNorm(_SupportFunction):
    r"""The Euclidean norm, an exact penalty for a vector constraint g_i(w) = 0.

    .. math::
        f(u) = w\,\|u\|_2

    Args:
        scale: the weight w.

    Example:
        >>> from fcco.outer import EuclideanNorm
        >>> EuclideanNorm().prox(torch.tensor([3.0, 4.0]), 1.0)
        tensor([2.4000, 3.2000])
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _checks.positive("EuclideanNorm", "scale", self.scale)

    @property
    def lipschitz(self) -> float:
        """The weight w."""
        return self.scale

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self.scale * safe_norm(u)

    def gradient(self, u: Tensor) -> Tensor:
        """The unit vector along u times w, and 0 at 0."""
        norm = safe_norm(u).unsqueeze(-1)
        return self.scale * (u / torch.where(norm > 0, norm, 1.0))

    def violation(self, u: Tensor) -> Tensor:
        """The norm of u."""
        return safe_norm(u)

    def slope(self, gradient: Tensor) -> Tensor:
        """The norm of the gradient."""
        return safe_norm(gradient)

    def _project(self, u: Tensor, size: float | Tensor) -> Tensor:
        return project_ball(u, size * self.scale)


@dataclass(frozen=True)
class SeparableHinge(_SupportFunction):
    r"""The sum of hinges: one exact penalty for each constraint u_j <= 0.

    .. math::
        f(u) = \sum_j \rho\,[u_j]_+

    Args:
        scale: the penalty weight rho.
        dim: d, where known; the Lipschitz constant rho sqrt(d) needs it and is `inf` without.

    Example:
        >>> from fcco.outer import SeparableHinge
        >>> SeparableHinge(scale=2.0)(torch.tensor([1.0, -3.0, 0.5]))
        tensor(3.)
        >>> SeparableHinge(scale=2.0).prox(torch.tensor([1.0, -3.0, 0.5]), 0.25)
        tensor([ 0.5000, -3.0000,  0.0000])
    """

    scale: float = 1.0
    dim: int | None = None

    monotone = True

    def __post_init__(self) -> None:
        _checks.positive("SeparableHinge", "scale", self.scale)
        if self.dim is not None:
            _checks.integer("SeparableHinge", "dim", self.dim, 1)

    @property
    def lipschitz(self) -> float:
        """Rho sqrt(d)."""
        return math.inf if self.dim is None else self.scale * self.dim**0.5

    @property
    def jump(self) -> float:
        """Rho, in each component."""
        return self.scale

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self.scale * relu(u).sum(dim=-1)

    def gradient(self, u: Tensor) -> Tensor:
        """Rho where u_j > 0, else 0."""
        return self.scale * (u > 0).to(u.dtype)

    def violation(self, u: Tensor) -> Tensor:
        """One number for each of the d constraints: u itself."""
        return u

    def slope(self, gradient: Tensor) -> Tensor:
        """One number for each of the d constraints: the gradient itself."""
        return gradient

    def _project(self, u: Tensor, size: float | Tensor) -> Tensor:
        return project_box(u, 0.0, size * self.scale)
