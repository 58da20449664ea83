"""The Moreau envelope of an outer function, itself an outer function."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import AbstractOuter, check_step

__all__ = ["MoreauEnvelope"]


@dataclass(frozen=True)
class MoreauEnvelope(AbstractOuter):
    r"""The smoothed outer function f_lambda (paper, section 4: outer smoothing).

    .. math::
        f_\lambda(u) = \min_v f(v) + \tfrac{1}{2\lambda}\|u - v\|^2, \qquad
        \nabla f_\lambda(u) = \tfrac{1}{\lambda}(u - \mathrm{prox}_{\lambda f}(u)).

    Both are exact; autograd gives the same gradient (first derivatives only). For convex f the
    envelope equals Nesterov smoothing, and f_lambda <= f <= f_lambda + lambda C_f^2 / 2.

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
        reason = "the envelope is not smooth otherwise"
        check_step(self.outer, "MoreauEnvelope", "smoothing", self.smoothing, reason)

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
        """The value f_lambda(u)."""
        point = u.detach()
        value, slope = self.value_and_gradient(point)
        # u - point is 0 and its derivative is 1: the product leaves the value as it is and makes
        # autograd return `slope`, with all its digits, instead of differentiating the formula.
        return value + self._sum(slope * (u - point))

    def gradient(self, u: Tensor) -> Tensor:
        """The gradient (u - prox(u)) / lambda."""
        return self.outer.envelope_gradient(u, self.smoothing)

    def value_and_gradient(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one prox."""
        return self.outer.envelope_and_gradient(u, self.smoothing)

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        """Exact when that of f is, since the envelope of f_lambda is that of f at lambda + step.

        References:
            Beck (2017), First-order methods in optimization, theorem 6.63.
        """
        self._check_step(step)
        return u - step * self.outer.envelope_gradient(u, self.smoothing + step)

    def envelope_gradient(self, u: Tensor, step: float | Tensor) -> Tensor:
        """The gradient of the envelope of f at lambda + step."""
        self._check_step(step)
        return self.outer.envelope_gradient(u, self.smoothing + step)

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """The envelope of f at lambda + step, and its gradient."""
        self._check_step(step)
        return self.outer.envelope_and_gradient(u, self.smoothing + step)

    def violation(self, u: Tensor) -> Tensor:
        """That of f."""
        return self.outer.violation(u)

    def slope(self, gradient: Tensor) -> Tensor:
        """That of f."""
        return self.outer.slope(gradient)
