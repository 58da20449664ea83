"""Approximate stationarity, exactly, for outer functions with two slopes such as the hinge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .. import _checks
from .box import TwoSlopes, isometric_copy, least_squares_in_box, require_two_slopes
from .evaluation import (
    Inner,
    Loss,
    all_blocks,
    fits,
    inner_values,
    norm,
    trainable,
    weighted_gradient,
)
from .gram import bordered_gram

if TYPE_CHECKING:
    from ..outer.base import AbstractOuter

__all__ = ["HingeStationarity", "hinge_stationarity"]


@dataclass(frozen=True, eq=False)
class HingeStationarity:
    """The epsilon of approximate stationarity, with the multipliers that attain it.

    Attributes:
        value: epsilon, the larger of `radius` and `gradient`.
        radius: the blocks whose g_i is at most this far from the kink have a free multiplier.
        gradient: q(radius) = |(1/n) sum_i J_i^T y_i (+ grad g_0)|.
        multipliers: y, shape (n,).
        num_free: how many multipliers are free.
    """

    value: float
    radius: float
    gradient: float
    multipliers: Tensor
    num_free: int

    def __str__(self) -> str:
        return (
            f"approximately stationary with epsilon = {self.value:.3g} (gradient "
            f"{self.gradient:.3g}, {self.num_free} of {len(self.multipliers)} multipliers free)"
        )


def hinge_stationarity(
    inner: Inner,
    outer: AbstractOuter,
    num_inner: int,
    parameters: Iterable[Tensor],
    *,
    radius: float | None = None,
    loss: Loss | None = None,
    chunk: int = 64,
    tile: int = 32,
    per_layer: bool = True,
) -> HingeStationarity:
    r"""The exact epsilon of approximate stationarity for a function with two slopes.

    For f = rho [.]_+ and a radius epsilon, y_i may be any subgradient of f within epsilon of g_i:

    .. math::
        Y_i(\epsilon) = \{0\} \;(g_i < -\epsilon), \quad \{\rho\} \;(g_i > \epsilon), \quad
        [0, \rho] \text{ otherwise}; \qquad
        q(\epsilon) = \min_{y \in \prod Y_i} \Big\|\tfrac1n J^\top y + \nabla g_0\Big\|

    and epsilon* = inf{epsilon: q(epsilon) <= epsilon}. q is a non-increasing step function with
    steps at |g_i|, so a binary search over these n values ends at epsilon* itself. Each q is a
    least-squares problem over a box in R^n, after one Gram matrix. The same holds with other slopes
    and another kink: |u|, the pinball loss, (1/r) [u - s]_+.

    Args:
        inner: maps a LongTensor of blocks to g_i(w) with a graph, full data, deterministic; d1 = 1.
        outer: f itself, a function with a `dual_zone`.
        num_inner: n.
        parameters: w.
        radius: evaluate q at this radius only, instead of the search; the value is then
            max(radius, q(radius)).
        loss: g_0, if there is one.
        chunk: blocks per graph.
        tile: blocks per tile of the Gram matrix (see `gram_matrix`).
        per_layer: accumulate the Gram matrix over groups of layers.

    Example:
        F(w) = (|w_1| + |w_2|) / 2 near its minimum: both kinks are within 0.01, and y = 0 will do.

        >>> import torch
        >>> from fcco.diagnostics import hinge_stationarity
        >>> from fcco.outer import Absolute
        >>> w = torch.tensor([0.01, -0.01], requires_grad=True)
        >>> print(hinge_stationarity(lambda index: w[index], Absolute(), 2, [w]))
        approximately stationary with epsilon = 0.01 (gradient 0, 2 of 2 multipliers free)

    References:
        The paper, definition of approximate stationarity.
    """
    call = "hinge_stationarity"
    slopes = require_two_slopes(call, outer)
    weights = trainable(call, parameters)
    index = all_blocks(call, num_inner, weights[0])
    values = inner_values(call, inner, index, chunk)
    fits(call, outer, values)
    gram = bordered_gram(call, inner, index, weights, loss, tile, per_layer)
    copy = isometric_copy(gram)
    matrix = copy[:, :num_inner] / num_inner
    target = -copy[:, num_inner] if loss is not None else np.zeros(len(copy))
    signed = values.reshape(-1).cpu().numpy() - slopes.kink

    def residual(epsilon: float) -> tuple[float, np.ndarray]:
        low, high = _allowed(signed, slopes, epsilon)
        solution = least_squares_in_box(call, matrix, target, low, high)
        return float(np.linalg.norm(matrix @ solution - target)), solution

    if radius is None:
        radius, multipliers = _search(np.unique(np.append(np.abs(signed), 0.0)), residual)
    else:
        _checks.at_least(call, "radius", radius, 0)
        multipliers = residual(radius)[1]
    y = torch.from_numpy(multipliers).to(values.device)
    # Measured on the model: the factor of the Gram matrix has the root of the rounding error.
    gradient = norm(weighted_gradient(call, inner, y / num_inner, weights, chunk, loss))
    return HingeStationarity(
        value=max(radius, gradient),
        radius=radius,
        gradient=gradient,
        multipliers=y,
        num_free=int((np.abs(signed) <= radius).sum()),
    )


def _allowed(
    signed: np.ndarray, slopes: TwoSlopes, epsilon: float
) -> tuple[np.ndarray, np.ndarray]:
    """The interval of slopes of f within epsilon of each value."""
    low = np.where(signed > epsilon, slopes.high, slopes.low)
    high = np.where(signed < -epsilon, slopes.low, slopes.high)
    return low, high


def _search(steps: np.ndarray, residual) -> tuple[float, np.ndarray]:
    """The step after which q falls below the radius: the first with q(step) < next step."""
    first, last = 0, len(steps) - 1
    best = None
    while first < last:
        middle = (first + last) // 2
        value, solution = residual(float(steps[middle]))
        if value < steps[middle + 1]:
            last, best = middle, solution
        else:
            first = middle + 1
    radius = float(steps[first])
    return radius, residual(radius)[1] if best is None else best
