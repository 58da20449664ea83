"""The Moreau envelope of an outer function, itself an outer function."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import AbstractOuter, check_step, derived

__all__ = ["MoreauEnvelope"]


@dataclass(frozen=True)
class MoreauEnvelope(AbstractOuter):
    r"""The smoothed outer function f_lambda (paper, section 4: outer smoothing).

    .. math::
        f_\lambda(u) = \min_v f(v) + \tfrac{1}{2\lambda}\|u - v\|^2, \qquad
        \nabla f_\lambda(u) = \tfrac{1}{\lambda}(u - \mathrm{prox}_{\lambda f}(u)).

    Both are exact; autograd gives the same gradient (first derivatives only). For convex f the
    envelope equals Nesterov smoothing, and f_lambda <= f <= f_lambda + lambda C_f^2 / 2. It is
    convex, monotone and C_f-Lipschitz where f is. The envelope of f_lambda is that of f at a larger
    lambda (Beck 2017, First-order methods in optimization, theorem 6.63), so its prox is exact too.

    Args:
        outer: the function f.
        smoothing: lambda, below 1/rho_f. It includes the scale of f: for rho [u]_+ the quadratic
            zone is 0 < u < lambda rho.

    Example:
        >>> import torch, fcco
        >>> huber = fcco.outer.MoreauEnvelope(fcco.outer.Absolute(), smoothing=1.0)
        >>> u = torch.tensor([0.5, 3.0], requires_grad=True)
        >>> huber(u).sum().backward()
        >>> u.grad
        tensor([0.5000, 1.0000])
    """

    outer: AbstractOuter
    smoothing: float

    smooth = True

    def __post_init__(self) -> None:
        argument = "MoreauEnvelope", "smoothing"
        check_step(self.outer, self.smoothing, argument, "the envelope is not smooth otherwise")

    dim = derived(lambda self: self.outer.dim)
    convex = derived(lambda self: self.outer.convex)
    monotone = derived(lambda self: self.outer.monotone)
    lipschitz = derived(lambda self: self.outer.lipschitz)

    @property
    def weak_convexity(self) -> float:
        rho = self.outer.weak_convexity
        return rho / (1 - self.smoothing * rho)

    def __call__(self, u: Tensor) -> Tensor:
        point = u.detach()
        value, slope = self.value_and_gradient(point)
        # u - point is 0 and its derivative is 1: the product leaves the value as it is and makes
        # autograd return `slope`, with all its digits, instead of differentiating the formula.
        return value + self._sum(slope * (u - point))

    def gradient(self, u: Tensor) -> Tensor:
        return self.value_and_gradient(u)[1]

    def value_and_gradient(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return self.outer.envelope_and_gradient(u, self.smoothing)

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        return u - step * self.envelope_gradient(u, step)

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        check_step(self, step)
        return self.outer.envelope_and_gradient(u, self.smoothing + step)

    def violation(self, u: Tensor) -> Tensor:
        return self.outer.violation(u)

    def slope(self, gradient: Tensor) -> Tensor:
        return self.outer.slope(gradient)
