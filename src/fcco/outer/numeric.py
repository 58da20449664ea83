r"""The prox of a scalar function of which only the value is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _checks
from .base import AbstractOuter

__all__ = ["Custom", "numeric_prox"]

# Each iteration keeps 0.618 of the bracket: 1e-13 of it is left.
_ITERATIONS = 62
_DOUBLINGS = 40
_GOLDEN = (math.sqrt(5) - 1) / 2


def numeric_prox(outer: AbstractOuter, u: Tensor, step: float | Tensor) -> Tensor:
    r"""prox_{step f}(u) by golden-section search, elementwise.

    For step < 1/rho_f the objective f(v) + (u - v)^2/(2 step) is strongly convex, so the search
    finds its minimum. With a finite C_f it lies within step C_f of u. Otherwise the bracket
    starts at u +- step and each end doubles while it lies below the centre, up to 2^40 times.

    The search runs in float64 (where the device has it) with a fixed number of iterations, and is
    right to about 1e-8: comparing values resolves a minimum to the root of the precision.

    Args:
        outer: a scalar function (`dim == 1`) that is convex or declares `weak_convexity`.
        u: where to evaluate, any shape; f may be `inf` or `nan` elsewhere, but not at u.
        step: lambda, below 1/rho_f.

    Example:
        >>> from fcco.outer import Absolute
        >>> numeric_prox(Absolute(), torch.tensor([-3.0, 2.0]), 0.5)
        tensor([-2.5000,  1.5000])
    """
    if outer.dim != 1:
        raise ValueError(
            f"`numeric_prox(outer=...)` must be scalar (dim=1) but is: {outer!r} "
            f"(dim={outer.dim}); a vector function must define its own `prox`."
        )
    rho = outer.weak_convexity
    if isinstance(rho, (int, float)) and math.isinf(rho):
        raise ValueError(
            f"{outer!r} has no known prox: declare `convex = True`, or `weak_convexity = rho` "
            "where f + rho/2 u^2 is convex, so that a numeric search is sure to find it."
        )
    outer._check_step(step)

    wide = u.detach().to(u.dtype if u.device.type == "mps" else torch.float64)

    def objective(v: Tensor) -> Tensor:
        total = outer(v) + (wide - v).square() / (2 * step)
        return torch.where(total.isnan(), torch.inf, total)  # outside the domain of f

    low, high = _bracket(outer, objective, wide, step)
    for _ in range(_ITERATIONS):
        reach = _GOLDEN * (high - low)
        left, right = high - reach, low + reach
        in_left = objective(left) <= objective(right)
        low, high = torch.where(in_left, low, left), torch.where(in_left, right, high)
    return ((low + high) / 2).to(u.dtype)


def _bracket(
    outer: AbstractOuter, objective: Callable[[Tensor], Tensor], u: Tensor, step: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Two ends with the minimum between them."""
    lipschitz = outer.lipschitz
    if isinstance(lipschitz, Tensor) or math.isfinite(lipschitz):
        return u - step * lipschitz, u + step * lipschitz
    centre = objective(u)
    below = above = step * torch.ones_like(u)
    for _ in range(_DOUBLINGS):
        below = torch.where(objective(u - below) < centre, 2 * below, below)
        above = torch.where(objective(u + above) < centre, 2 * above, above)
    return u - below, u + above


@dataclass(frozen=True)
class Custom(AbstractOuter):
    r"""A user's outer function from its value alone; gradient by autograd, prox by search.

    The facts are the user's word: methods and the search rely on them. A function that is neither
    convex nor declared weakly convex has no prox.

    Args:
        value: f, written with torch operations, elementwise for `dim=1`.
        lipschitz: C_f; `inf` if unknown, the search then looks for its own bracket.
        convex: f is convex.
        weak_convexity: rho_f; not needed for convex f.
        monotone: f is non-decreasing.
        smooth: f has a Lipschitz gradient.
        dim: d1; only a scalar function (1) has a numeric prox.

    Example:
        >>> from fcco.outer import Custom
        >>> softplus = Custom(torch.nn.functional.softplus, lipschitz=1.0, convex=True)
        >>> softplus.prox(torch.tensor([0.0, 2.0]), 1.0)
        tensor([-0.4011,  1.2268])
        >>> softplus.gradient(torch.tensor([0.0, 2.0]))
        tensor([0.5000, 0.8808])
    """

    # The class attributes replace the read-only properties of the base class.
    value: Callable[[Tensor], Tensor]
    lipschitz: float = math.inf
    convex: bool = False
    weak_convexity: float = math.inf
    monotone: bool = False
    smooth: bool = False
    dim: int | None = 1

    def __post_init__(self) -> None:
        _checks.at_least("Custom", "lipschitz", self.lipschitz, 0)
        _checks.at_least("Custom", "weak_convexity", self.weak_convexity, 0)
        if self.convex:
            object.__setattr__(self, "weak_convexity", 0.0)

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self.value(u)
