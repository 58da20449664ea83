"""The Moreau envelope of an outer function, as an outer function."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import _checks
from .base import AbstractOuter

__all__ = ["MoreauEnvelope"]


@dataclass(frozen=True)
class MoreauEnvelope(AbstractOuter):
    r"""The smoothed outer function f_lambda (paper, section 4: outer smoothing).

    .. math::
        f_\lambda(u) = \min_v f(v) + \tfrac{1}{2\lambda}\|u - v\|^2, \qquad
        \nabla f_\lambda(u) = \tfrac{1}{\lambda}(u - \mathrm{prox}_{\lambda f}(u)).

    Exact, with the gradient above through autograd (first derivatives only: the prox is held
    constant). For convex f it equals Nesterov smoothing, and
    f_lambda <= f <= f_lambda + lambda C_f^2 / 2.

    Args:
        outer: the function f.
        smoothing: lambda, below 1/rho_f. It includes the scale of f: for rho [u]_+ the quadratic
            zone is 0 < u < lambda rho.

    Example:
        >>> import torch, fcco
        >>> huber = fcco.MoreauEnvelope(fcco.Absolute(), smoothing=1.0)
        >>> u = torch.tensor([0.5, 3.0], requires_grad=True)
        >>> huber(u).sum().backward()
        >>> u.grad
        tensor([0.5000, 1.0000])
    """

    outer: AbstractOuter
    smoothing: float

    smooth = True

    def __post_init__(self) -> None:
        _checks.positive("MoreauEnvelope", "smoothing", self.smoothing)
        _checks.below(
            "MoreauEnvelope",
            "smoothing",
            self.smoothing,
            self.outer._step_limit(),
            "1/weak_convexity",
            "the envelope is not smooth otherwise",
        )

    @property
    def dim(self) -> int | None:
        """d1, that of f."""
        return self.outer.dim

    @property
    def convex(self) -> bool:
        """The envelope of a convex function is convex."""
        return self.outer.convex

    @property
    def monotone(self) -> bool:
        """The envelope of a non-decreasing function is non-decreasing."""
        return self.outer.monotone

    @property
    def lipschitz(self) -> float:
        """C_f, that of f."""
        return self.outer.lipschitz

    @property
    def weak_convexity(self) -> float:
        """rho_f / (1 - lambda rho_f)."""
        rho = self.outer.weak_convexity
        return rho / (1 - self.smoothing * rho)

    @property
    def smoothness(self) -> float:
        """L_f, the Lipschitz constant of the gradient: max(1/lambda, weak convexity)."""
        return max(1 / self.smoothing, self.weak_convexity)

    def __call__(self, u: Tensor) -> Tensor:
        """The value f_lambda(u); autograd gives (u - prox(u)) / lambda."""
        nearest = self.outer.prox(u.detach(), self.smoothing)
        distance = self._reduce((u - nearest).square())
        return self.outer(nearest) + distance / (2 * self.smoothing)

    def gradient(self, u: Tensor) -> Tensor:
        """The gradient (u - prox(u)) / lambda."""
        return self.outer.envelope_gradient(u, self.smoothing)

    def value_and_gradient(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one prox."""
        return self.outer.envelope_and_gradient(u, self.smoothing)

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """Prox of an envelope (Beck 2017, theorem 6.63), exact when that of f is."""
        total = self.smoothing + step
        return u + (step / total) * (self.outer.prox(u, total) - u)

    def conjugate(self, y: Tensor) -> Tensor:
        """f*(y) + lambda/2 |y|^2."""
        return self.outer.conjugate(y) + self._reduce(y.square()) * (self.smoothing / 2)

    def violation(self, u: Tensor) -> Tensor:
        """That of f."""
        return self.outer.violation(u)

    def slope(self, gradient: Tensor) -> Tensor:
        """That of f."""
        return self.outer.slope(gradient)
