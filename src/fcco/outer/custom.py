"""An outer function given by its value alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .. import _checks
from .base import AbstractOuter

__all__ = ["Custom"]


@dataclass(frozen=True)
class Custom(AbstractOuter):
    r"""A user's outer function from its value alone; gradient by autograd, prox by search.

    The declared facts are not verified, and methods and the search rely on them. A function that
    is neither convex nor declared weakly convex has no prox.

    Args:
        value: f, written with torch operations, elementwise for `dim=1`.
        lipschitz: C_f; `inf` if unknown, the search then looks for its own bracket.
        convex: f is convex.
        weak_convexity: rho_f; not needed for convex f.
        monotone: f is non-decreasing.
        smooth: f has a Lipschitz gradient.
        dim: d1; only a scalar function (1) has a numeric prox.

    Example:
        >>> import torch
        >>> from fcco.outer import Custom
        >>> softplus = Custom(torch.nn.functional.softplus, lipschitz=1.0, convex=True)
        >>> softplus.prox(torch.tensor([0.0, 2.0]), 1.0)
        tensor([-0.4011,  1.2268])
        >>> softplus.gradient(torch.tensor([0.0, 2.0]))
        tensor([0.5000, 0.8808])
    """

    # The fields replace the attributes and the read-only property of the base class.
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
        if self.dim is not None:
            _checks.integer("Custom", "dim", self.dim, 1)
        if self.convex:
            object.__setattr__(self, "weak_convexity", 0.0)

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self.value(u)
