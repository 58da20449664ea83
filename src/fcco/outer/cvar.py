"""CVaR of a vector: the support function of the simplex with capped weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import _checks
from .base import AbstractOuter
from .projections import capped_threshold, project_capped_simplex

__all__ = ["CVaR"]


@dataclass(frozen=True)
class CVaR(AbstractOuter):
    r"""The conditional value at risk: the mean of the worst share r of the entries.

    .. math::
        f(u) = \min_s\, s + \tfrac{1}{r d} \sum_{j=1}^{d} [u_j - s]_+
            = \max_{y\in Y} \langle y, u\rangle, \qquad
        Y = \Bigl\{0 \le y \le \tfrac1{rd},\ \textstyle\sum_j y_j = 1\Bigr\}

    r d need not be an integer: the last entry then has a part of the weight. The gradient of
    f_lambda is the projection of u / lambda onto Y; a step is a number or a 0-dimensional tensor.

    Args:
        ratio: r in (0, 1]; 1/d is the maximum.
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

    convex = monotone = True

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

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self.value_and_gradient(u)[0]

    def gradient(self, u: Tensor) -> Tensor:
        """The weights y; entries that tie at the threshold share the remaining weight."""
        cap = self._cap(u.shape[-1])
        threshold = capped_threshold(u, cap)
        above, tied = (u > threshold).to(u.dtype), (u == threshold).to(u.dtype)
        remaining = 1 - cap * above.sum(dim=-1, keepdim=True)
        return cap * above + tied * (remaining / tied.sum(dim=-1, keepdim=True))

    def value_and_gradient(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one sort."""
        weights = self.gradient(u)
        return (weights * u).sum(dim=-1), weights

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

    def _cap(self, size: int) -> float:
        """The largest weight, for `size` entries."""
        return 1 / (self.ratio * size)

    def _project(self, u: Tensor, size: float | Tensor) -> Tensor:
        """The projection of u onto size Y."""
        return project_capped_simplex(u, size * self._cap(u.shape[-1]), size)
