"""What an outer function f must offer and may declare, and its Moreau envelope.

An outer function is a frozen dataclass of numbers, without state. A scalar one (`dim = 1`) acts
elementwise on a tensor of any shape; a vector function acts on the last axis and removes it.

No method branches on the values of a tensor, so all of them run under `torch.func.vmap` and
`torch.compile(fullgraph=True)`, also when a parameter such as `scale` is itself a tensor.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _checks

derived: Any = property
"""A fact that follows from the parameters; a `property` that may replace a plain attribute."""


class AbstractOuter(abc.ABC):
    r"""An outer function f: R^{d1} -> R.

    A subclass needs a value (`__call__`). Without its own `gradient` it is differentiated by
    autograd. Of `prox` and `envelope_and_gradient` one follows from the other; with neither of its
    own a scalar function uses `numeric_prox`. It declares the facts below where they hold.
    """

    dim: int | None = 1  # d1; 1 acts elementwise, None accepts any length of the last axis
    convex: bool = False
    monotone: bool = False  # non-decreasing in every argument
    smooth: bool = False  # with a Lipschitz gradient, so that it needs no envelope
    lipschitz: float = math.inf  # C_f
    jump: float | None = None  # of the slope at each kink, rounded over lambda times as much

    @property
    def weak_convexity(self) -> float:
        """rho_f, the smallest r for which f + r/2 |.|^2 is convex; `inf` if there is none."""
        return 0.0 if self.convex else math.inf

    @abc.abstractmethod
    def __call__(self, u: Tensor) -> Tensor: ...

    def gradient(self, u: Tensor) -> Tensor:
        """A (sub)gradient of f at u, with the same shape as u; 0 is chosen at a kink of [.]_+."""
        return self._differentiate(u)[1]

    def value_and_gradient(self, u: Tensor) -> tuple[Tensor, Tensor]:
        # Autograd evaluates f anyway: where it provides the gradient, its value is used too.
        if type(self).gradient is AbstractOuter.gradient:
            return self._differentiate(u)
        return self(u), self.gradient(u)

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        r"""prox_{step f}(u) = argmin_v f(v) + |u - v|^2 / (2 step), for step < 1/rho_f."""
        if type(self).envelope_and_gradient is AbstractOuter.envelope_and_gradient:
            return numeric_prox(self, u, step)
        return u - step * self.envelope_gradient(u, step)

    def envelope_gradient(self, u: Tensor, step: float | Tensor) -> Tensor:
        return self.envelope_and_gradient(u, step)[1]

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """The envelope min_v f(v) + |u - v|^2 / (2 step) and its gradient (u - prox(u)) / step."""
        # For a small step u and prox(u) share most of their digits. The difference is therefore
        # taken in float64; subclasses of this package have formulas without a difference.
        wide = _widen(u)
        nearest = self.prox(wide, step)
        slope = (wide - nearest) / step
        # The step stands between the slopes, whose square alone may overflow.
        value = self(nearest) + self._sum(slope * (step / 2) * slope)
        return value.to(u.dtype), slope.to(u.dtype)

    def violation(self, u: Tensor) -> Tensor:
        """The excess over the constraint that f penalises; by default the constraint is u <= 0."""
        self._check_scalar()
        return u

    def multiplier(self, u: Tensor) -> Tensor:
        """The Lagrange multiplier that the penalty f implies at u: its slope along the constraint.

        That of an equality, or of a limit on both sides, has the sign of u.
        """
        return self.slope(self.gradient(u))

    def slope(self, gradient: Tensor) -> Tensor:
        """The derivative of f along `violation`, from a gradient of f (or of its envelope)."""
        self._check_scalar()
        return gradient

    def _check_scalar(self) -> None:
        if self.dim != 1:
            raise ValueError(f"{self!r} does not say which constraint it penalises.")

    def _differentiate(self, u: Tensor) -> tuple[Tensor, Tensor]:
        def total(point: Tensor) -> tuple[Tensor, Tensor]:
            value = self(point)
            return value.sum(), value

        # torch.func.grad, unlike autograd.grad on a fresh leaf, also runs inside vmap.
        gradient, value = torch.func.grad(total, has_aux=True)(u)
        return value, gradient

    def _sum(self, elementwise: Tensor) -> Tensor:
        return elementwise if self.dim == 1 else elementwise.sum(-1)


def check_step(outer: AbstractOuter, step: float | Tensor, envelope: bool = False) -> None:
    """Raise unless 0 < step < 1/rho_f."""
    call, name = f"{type(outer).__name__}.prox", "step"
    reason = "prox is not unique otherwise"
    if envelope:
        call, name = "MoreauEnvelope", "smoothing"
        reason = "the envelope is not smooth otherwise"
    _checks.positive(call, name, step)
    rho = outer.weak_convexity
    # A tensor is never compared: it may be a batch of parameters under vmap.
    limit = math.inf if isinstance(rho, (int, float)) and rho == 0 else 1 / rho
    _checks.below(call, name, step, limit, "1/weak_convexity", reason)


@dataclass(frozen=True)
class MoreauEnvelope(AbstractOuter):
    r"""The smoothed outer function f_lambda (paper, section 4: outer smoothing).

    .. math::
        f_\lambda(u) = \min_v f(v) + \tfrac{1}{2\lambda}\|u - v\|^2, \qquad
        \nabla f_\lambda(u) = \tfrac{1}{\lambda}(u - \mathrm{prox}_{\lambda f}(u)).

    Both are exact; autograd gives the same gradient (first derivatives only). For convex f,
    f_lambda <= f <= f_lambda + lambda C_f^2 / 2.

    Args:
        outer: the function f.
        smoothing: lambda, below 1/rho_f: for rho [u]_+ the quadratic zone is 0 < u < lambda rho.
    """

    outer: AbstractOuter
    smoothing: float

    smooth = True

    def __post_init__(self) -> None:
        check_step(self.outer, self.smoothing, envelope=True)

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

    def slope(self, gradient: Tensor) -> Tensor:
        return self.outer.slope(gradient)


# Each iteration keeps 0.618 of the bracket: after 62 of them 1e-13 of it is left.
_GOLDEN = (math.sqrt(5) - 1) / 2
_ITERATIONS = 62
_DOUBLINGS = 40


def numeric_prox(outer: AbstractOuter, u: Tensor, step: float | Tensor) -> Tensor:
    r"""prox_{step f}(u) by golden-section search, elementwise.

    For step < 1/rho_f the objective f(v) + (u - v)^2/(2 step) is strongly convex, so the search
    finds its minimum, right to about 1e-8: comparing values in float64 resolves a minimum to the
    root of the precision. f may be `inf` or `nan` elsewhere, but not at u.
    """
    if outer.dim != 1:
        raise ValueError(f"{outer!r} is a function of a vector: it must define its own `prox`.")
    rho = outer.weak_convexity
    if isinstance(rho, (int, float)) and math.isinf(rho):
        raise ValueError(
            f"{outer!r} has no known prox: declare `convex = True`, or `weak_convexity = rho` "
            "where f + rho/2 u^2 is convex."
        )
    check_step(outer, step)
    centre = _widen(u.detach())

    def objective(v: Tensor) -> Tensor:
        total = outer(v) + (centre - v).square() / (2 * step)
        return torch.where(total.isnan(), torch.inf, total)  # outside the domain of f

    low, high = _bracket(outer, objective, centre, step)
    for _ in range(_ITERATIONS):
        reach = _GOLDEN * (high - low)
        left, right = high - reach, low + reach
        in_left = objective(left) <= objective(right)
        low, high = torch.where(in_left, low, left), torch.where(in_left, right, high)
    return ((low + high) / 2).to(u.dtype)


def _bracket(
    outer: AbstractOuter, objective: Callable[[Tensor], Tensor], u: Tensor, step: float | Tensor
) -> tuple[Tensor, Tensor]:
    lipschitz = outer.lipschitz
    if isinstance(lipschitz, Tensor) or math.isfinite(lipschitz):
        return u - step * lipschitz, u + step * lipschitz
    # Each end doubles while it lies below the centre.
    centre = objective(u)
    below = above = step * torch.ones_like(u)
    for _ in range(_DOUBLINGS):
        below = torch.where(objective(u - below) < centre, 2 * below, below)
        above = torch.where(objective(u + above) < centre, 2 * above, above)
    return u - below, u + above


def clip(point: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Each entry within [low, high]."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        # Two calls, because one refuses a number and a tensor together.
        return point.clamp(min=low).clamp(max=high)
    return point.clamp(low, high)


def _widen(u: Tensor) -> Tensor:
    # MPS has no float64.
    return u if u.device.type == "mps" else u.double()
