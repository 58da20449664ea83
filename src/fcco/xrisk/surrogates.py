"""Surrogates of the 0-1 loss of a pair: how bad it is that one score is above another."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _checks

__all__ = ["LOGIT_MARGIN", "SURROGATES", "PairHinge", "PairSquaredHinge", "Surrogate"]


class Surrogate(abc.ABC):
    """A function l(d) of the difference d of the score that should be lower and the other one."""

    monotone = True
    """Whether l never falls, so that the worst pairs are those with the largest d."""

    @abc.abstractmethod
    def value_and_slope(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        """The values l(d) and the derivatives l'(d), elementwise.

        Two different tensors, which the caller may overwrite; so may be `difference` itself.
        """


@dataclass(frozen=True)
class _Margin(Surrogate):
    margin: float = 1.0

    def __post_init__(self) -> None:
        _checks.positive(type(self).__name__, "margin", self.margin)


@dataclass(frozen=True)
class PairSquaredHinge(_Margin):
    """[margin + d]_+^2 / margin^2, which is 1 at d = 0.

    Example:
        >>> PairSquaredHinge(2.0).value_and_slope(torch.tensor([-3.0, 0.0, 2.0]))[0]
        tensor([0., 1., 4.])
    """

    def value_and_slope(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        excess = (difference / self.margin + 1).relu_()
        return excess * excess, excess * (2 / self.margin)


@dataclass(frozen=True)
class PairHinge(_Margin):
    """[margin + d]_+ / margin, which is 1 at d = 0; its derivative is 0 at the kink."""

    def value_and_slope(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        excess = (difference / self.margin + 1).relu_()
        return excess, (excess > 0).to(excess) / self.margin


@dataclass(frozen=True)
class Squared(_Margin):
    """(margin + d)^2 / margin^2, which is 1 at d = 0; it falls below d = -margin."""

    monotone = False

    def value_and_slope(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        excess = difference / self.margin + 1
        return excess * excess, excess * (2 / self.margin)


@dataclass(frozen=True)
class Logistic(_Margin):
    """log2(1 + exp(d / margin)), which is 1 at d = 0; no overflow for any d."""

    def value_and_slope(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        scaled, base = difference / self.margin, math.log(2)
        return torch.nn.functional.softplus(scaled) / base, scaled.sigmoid() / (base * self.margin)


@dataclass(frozen=True)
class Sigmoid(_Margin):
    """2 / (1 + exp(-d / margin)), which is 1 at d = 0 and at most 2: outliers count little."""

    def value_and_slope(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        share = (difference / self.margin).sigmoid()
        return 2 * share, share * (1 - share) * (2 / self.margin)


@dataclass(frozen=True)
class Linear(Surrogate):
    """The difference d itself, for exponentials of it."""

    def value_and_slope(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        return difference, torch.ones_like(difference)


SURROGATES = {
    "squared_hinge": PairSquaredHinge,
    "logistic": Logistic,
    "hinge": PairHinge,
    "sigmoid": Sigmoid,
    "squared": Squared,
}
"""The surrogates by name."""

LOGIT_MARGIN = 5.0
"""The margin between logits that a trained classifier has room for."""


def find_surrogate(
    call: str, surrogate: str | Surrogate, margin: float | None, usual: float = 1.0
) -> Surrogate:
    """Read `surrogate=...` and `margin=...` of a call; `usual` is the margin unless given."""
    if isinstance(surrogate, Surrogate):
        if margin is not None:
            raise ValueError(
                f"`{call}(margin=...)` belongs to a surrogate given by name; {surrogate!r} has its "
                "own."
            )
        return surrogate
    _checks.one_of(call, "surrogate", surrogate, tuple(SURROGATES))
    if margin is not None:
        _checks.positive(call, "margin", margin)
    return SURROGATES[surrogate](usual if margin is None else margin)
