"""Averages of the largest entries of the last axis: maximum, mean of the top k, CVaR.

All three are support functions of a simplex with capped weights {0 <= y <= cap, sum y = 1}.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import Tensor

from .. import _checks
from .projections import capped_threshold, project_capped_simplex, project_simplex
from .support import AbstractSupportFunction

__all__ = ["CVaR", "Maximum", "TopMean"]


class _WeightedTop(AbstractSupportFunction):
    """The largest entries, each with weight cap until the weights add up to 1."""

    monotone = True

    @abc.abstractmethod
    def _cap(self, size: int) -> float:
        """The largest weight, for `size` entries."""

    def __call__(self, u: Tensor) -> Tensor:
        """The value f(u)."""
        return self.value_and_gradient(u)[0]

    def gradient(self, u: Tensor) -> Tensor:
        """The weights; entries that tie at the threshold share what is left to them."""
        cap = self._cap(u.shape[-1])
        threshold = self._threshold(u)
        above, tied = (u > threshold).to(u.dtype), (u == threshold).to(u.dtype)
        left = 1 - cap * above.sum(dim=-1, keepdim=True)
        return cap * above + tied * (left / tied.sum(dim=-1, keepdim=True))

    def value_and_gradient(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one sort."""
        weights = self.gradient(u)
        return (weights * u).sum(dim=-1), weights

    def _threshold(self, u: Tensor) -> Tensor:
        return capped_threshold(u, self._cap(u.shape[-1]))

    def _project(self, u: Tensor, size: float | Tensor) -> Tensor:
        return project_capped_simplex(u, size * self._cap(u.shape[-1]), size)


@dataclass(frozen=True)
class Maximum(_WeightedTop):
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
class TopMean(_WeightedTop):
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
class CVaR(_WeightedTop):
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
        _checks.at_least("CVaR", "dim", self.dim, 1)

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
