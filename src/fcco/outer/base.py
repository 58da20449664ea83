"""The outer function f: what every f_i must offer, and what it may declare.

An outer function is a value object: a frozen dataclass of numbers with a value, a (sub)gradient
and, wherever they exist, a proximal map and a conjugate. It holds no tensors and no state.

Scalar functions (`dim = 1`) act elementwise on a tensor of any shape. Vector functions act on the
last axis and remove it: `(..., d1) -> (...)`; `dim = None` means any d1.

Every method is free of data-dependent branches, so that it runs under `torch.func.vmap` and
`torch.compile(fullgraph=True)`, also when a parameter such as `scale` is itself a tensor.
"""

from __future__ import annotations

import abc
import math

import torch
from torch import Tensor

from .. import _checks

__all__ = ["AbstractOuter"]


class AbstractOuter(abc.ABC):
    r"""An outer function f: R^{d1} -> R.

    A subclass needs a value (`__call__`); `gradient` falls back to autograd and `prox` to a
    numeric search (scalar f). The declared facts decide which methods accept it:

    Attributes:
        dim: d1; 1 acts elementwise, None accepts any length of the last axis.
        convex: f is convex.
        monotone: f is non-decreasing in every argument.
        smooth: f is differentiable with a Lipschitz gradient, so it needs no envelope.
        lipschitz: C_f, the Lipschitz constant (`inf` where there is none).
        weak_convexity: rho_f, the smallest r such that f + r/2 |.|^2 is convex (0 for convex f,
            `inf` for a function that is not weakly convex).

    Example:
        A user's own outer function, here [u]_+ with an exact prox:

        >>> from dataclasses import dataclass
        >>> import torch, fcco
        >>> @dataclass(frozen=True)
        ... class Relu(fcco.outer.AbstractOuter):
        ...     convex = monotone = True
        ...     lipschitz = 1.0
        ...     def __call__(self, u):
        ...         return u.clamp(min=0)
        ...     def prox(self, u, step):
        ...         return torch.where(u > 0, (u - step).clamp(min=0), u)
        >>> fcco.MoreauEnvelope(Relu(), 0.5)(torch.tensor([-1.0, 0.25, 2.0]))
        tensor([0.0000, 0.0625, 1.7500])
    """

    dim: int | None = 1
    convex: bool = False
    monotone: bool = False
    smooth: bool = False
    lipschitz: float = math.inf

    @property
    def weak_convexity(self) -> float:
        """rho_f; 0 when f is convex."""
        return 0.0 if self.convex else math.inf

    @abc.abstractmethod
    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""

    def gradient(self, u: Tensor) -> Tensor:
        """A (sub)gradient of f at u, with the same shape as u; 0 is chosen at a kink of [.]_+."""
        # torch.func.grad, unlike autograd.grad on a fresh leaf, also runs inside vmap.
        return torch.func.grad(lambda point: self(point).sum())(u.detach())

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        r"""prox_{step f}(u) = argmin_v f(v) + |u - v|^2 / (2 step), for step < 1/rho_f."""
        from .numeric import numeric_prox

        return numeric_prox(self, u, step)

    def envelope(self, u: Tensor, step: float | Tensor) -> Tensor:
        """The Moreau envelope f_step(u) = min_v f(v) + |u - v|^2 / (2 step)."""
        nearest = self.prox(u, step)
        distance = (u - nearest).square()
        return self(nearest) + self._reduce(distance) / (2 * step)

    def envelope_gradient(self, u: Tensor, step: float | Tensor) -> Tensor:
        """The gradient of the envelope, (u - prox(u)) / step."""
        return (u - self.prox(u, step)) / step

    def value_and_gradient(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """f(u) and a (sub)gradient, what a training step needs."""
        return self(u), self.gradient(u)

    def envelope_and_gradient(self, u: Tensor, step: float | Tensor) -> tuple[Tensor, Tensor]:
        """The envelope and its gradient from one prox."""
        slope = self.envelope_gradient(u, step)
        return self(u - step * slope) + self._reduce(slope.square()) * (step / 2), slope

    def conjugate(self, y: Tensor) -> Tensor:
        r"""f*(y) = sup_u <y, u> - f(u), `inf` outside its domain (convex f only)."""
        raise ValueError(f"{self!r} has no closed-form conjugate.")

    def dual_zone(self, step: float | Tensor) -> tuple[float | Tensor, float | Tensor] | None:
        r"""The interval of u on which the envelope's gradient is one-to-one, else None.

        Only scalar functions whose conjugate is linear on a box [low, high] have one: there
        y = grad f_step(u) = (u - shift) / step, so clamping a tracked u to this interval keeps
        y itself (the y-form of ALEXR2).
        """
        return None

    def _step_limit(self) -> float:
        """1/rho_f, below which prox is single-valued and the envelope smooth; inf if convex."""
        rho = self.weak_convexity
        # A tensor is never compared: it may be a batch of parameters under vmap.
        return math.inf if isinstance(rho, (int, float)) and rho == 0 else 1 / rho

    def _check_step(self, step: float | Tensor) -> None:
        """Raise unless 0 < step < 1/rho_f."""
        call = f"{type(self).__name__}.prox"
        _checks.positive(call, "step", step)
        limit = self._step_limit()
        _checks.below(call, "step", step, limit, "1/weak_convexity", "prox is not unique otherwise")

    def violation(self, u: Tensor) -> Tensor:
        """How far a constraint with inner value u is exceeded; by default u <= 0 is meant."""
        if self.dim != 1:
            raise ValueError(f"{self!r} does not say which constraint it penalises.")
        return u

    def multiplier(self, u: Tensor) -> Tensor:
        """The Lagrange multiplier that the penalty f implies at u: its slope along `violation`."""
        return self.slope(self.gradient(u))

    def slope(self, gradient: Tensor) -> Tensor:
        """The derivative of f along `violation`, from a gradient of f (or of its envelope)."""
        if self.dim != 1:
            raise ValueError(f"{self!r} does not say which constraint it penalises.")
        return gradient

    def _reduce(self, elementwise: Tensor) -> Tensor:
        """Sum over the inner dimension: nothing to do for a scalar function."""
        return elementwise if self.dim == 1 else elementwise.sum(-1)
