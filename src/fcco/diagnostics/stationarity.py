"""Approximate stationarity: how far a point is from the paper's definition, and what it implies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _checks
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

if TYPE_CHECKING:
    from ..outer.base import AbstractOuter

__all__ = [
    "ApproximateStationarity",
    "NearlyStationaryBounds",
    "approximate_stationarity",
    "nearly_stationary_bounds",
]


@dataclass(frozen=True, eq=False)
class ApproximateStationarity:
    """An upper bound of the smallest epsilon for which a point is approximately stationary.

    Attributes:
        value: the smallest max(distance, gradient) over the grid.
        smoothing: the lambda that attains it.
        distance: max_i |g_i - t_i| at that lambda.
        gradient: |(1/n) sum_i J_i^T y_i (+ grad g_0)| at that lambda.
        table: one row (lambda, distance, gradient) for each lambda of the grid.
    """

    value: float
    smoothing: float
    distance: float
    gradient: float
    table: Tensor

    def __str__(self) -> str:
        return (
            f"approximately stationary with epsilon <= {self.value:.3g} (distance "
            f"{self.distance:.3g}, gradient {self.gradient:.3g}, smoothing {self.smoothing:.3g})"
        )


@dataclass(frozen=True)
class NearlyStationaryBounds:
    """What approximate stationarity implies: a stationary point nearby.

    Attributes:
        distance: a point w' with dist(0, dF(w')) <= gradient lies within this distance.
        gradient: the bound on dist(0, dF(w')).
        limit: both hold for epsilon up to this value.
    """

    distance: float
    gradient: float
    limit: float

    def __str__(self) -> str:
        return (
            f"a point within {self.distance:.3g} has a subgradient of norm at most "
            f"{self.gradient:.3g} (proved for epsilon <= {self.limit:.3g})"
        )


def approximate_stationarity(
    inner: Inner,
    outer: AbstractOuter,
    num_inner: int,
    parameters: Iterable[Tensor],
    smoothing: float | Sequence[float] | Tensor | None = None,
    *,
    loss: Loss | None = None,
    chunk: int = 64,
) -> ApproximateStationarity:
    r"""An upper bound of the epsilon of approximate stationarity, from the envelopes of f.

    A point is approximately epsilon-stationary when there are t_i and y_i in the subdifferential
    of f at t_i with |t_i - g_i| <= epsilon for all i and
    |(1/n) sum_i J_i^T y_i + grad g_0| <= epsilon. Each lambda gives one candidate:

    .. math::
        t_i = \mathrm{prox}_{\lambda f}(g_i), \quad y_i = (g_i - t_i)/\lambda, \quad
        r_1 = \max_i \|g_i - t_i\| \le \lambda C_f, \quad
        r_2 = \Big\|\tfrac1n \sum_i J_i^\top y_i + \nabla g_0\Big\|

    and the result is the smallest max(r_1, r_2) over a grid. `hinge_stationarity` gives the exact
    value for functions with two slopes. Each lambda costs one pass over the data.

    Args:
        inner: maps a LongTensor of blocks to g_i(w) with a graph, full data, deterministic.
        outer: f itself, not its envelope.
        num_inner: n.
        parameters: w.
        smoothing: lambda, one or several, each below 1/rho_f; by default the 17 half-decades from
            1e-6 to 1e2, those below 1/rho_f.
        loss: g_0, if there is one.
        chunk: blocks per graph.

    Example:
        F(w) = (|w_1| + |w_2|) / 2 near its minimum: t = 0 is 0.01 away, and y = w / lambda.

        >>> import torch
        >>> from fcco.diagnostics import approximate_stationarity
        >>> from fcco.outer import Absolute
        >>> w = torch.tensor([0.01, -0.01], requires_grad=True)
        >>> print(approximate_stationarity(lambda index: w[index], Absolute(), 2, [w]))
        approximately stationary with epsilon <= 0.01 (distance 0.01, gradient 0.00707, smoothing 1)

    References:
        The paper, definition of approximate stationarity and the theorem after it.
    """
    call = "approximate_stationarity"
    weights = trainable(call, parameters)
    grid = _grid(call, outer, smoothing)
    values = inner_values(call, inner, all_blocks(call, num_inner, weights[0]), chunk)
    fits(call, outer, values)
    rows = []
    for step in grid:
        nearest = outer.prox(values, step).detach()
        pull = (values - nearest) / (step * num_inner)
        distance = float((values - nearest).reshape(num_inner, -1).norm(dim=1).max())
        rows.append(
            (step, distance, norm(weighted_gradient(call, inner, pull, weights, chunk, loss)))
        )
    table = torch.tensor(rows, dtype=torch.float64)
    smoothest, distance, gradient = min(rows, key=lambda row: max(row[1:]))
    return ApproximateStationarity(max(distance, gradient), smoothest, distance, gradient, table)


def nearly_stationary_bounds(
    epsilon: float,
    num_inner: int,
    smallest_eigenvalue: float,
    *,
    inner_lipschitz: float,
    inner_smoothness: float,
    outer_lipschitz: float,
    loss_smoothness: float = 0.0,
) -> NearlyStationaryBounds:
    r"""What approximate epsilon-stationarity implies where the Jacobian is well conditioned.

    .. math::
        \|w' - w\| \le \frac{4 C_g n}{\delta}\,\epsilon, \qquad
        \mathrm{dist}(0, \partial F(w')) \le \Big(1 + \frac{4 C_g (C_f L_g + L_0) n}{\delta}\Big)
        \epsilon, \qquad \text{for } \epsilon \le \frac{\delta^2}{16 n^2 C_g^2 L_g}

    Both are O(epsilon) but neither is epsilon itself, so the numbers are reported and not a
    verdict. The limit carries n^2: the theorem needs the singular values of the stacked Jacobian
    to persist between w and w', not those of each block (docs/mathematics.md).

    Args:
        epsilon: epsilon, from `approximate_stationarity` or `hinge_stationarity`.
        num_inner: n.
        smallest_eigenvalue: delta = lambda_min(J J^T), from `smallest_eigenvalue`.
        inner_lipschitz: C_g.
        inner_smoothness: L_g.
        outer_lipschitz: C_f.
        loss_smoothness: L_0, the smoothness of g_0 (0 without one, or for a linear one).

    Example:
        >>> from fcco.diagnostics import nearly_stationary_bounds
        >>> print(nearly_stationary_bounds(1e-3, 10, 4.0, inner_lipschitz=2.0,
        ...                                inner_smoothness=0.1, outer_lipschitz=1.0))
        a point within 0.02 has a subgradient of norm at most 0.003 (proved for epsilon <= 0.025)

    References:
        The paper, the theorem "approximate implies nearly stationary" and its proof.
    """
    call = "nearly_stationary_bounds"
    _checks.at_least(call, "epsilon", epsilon, 0)
    _checks.at_least(call, "num_inner", num_inner, 1)
    _checks.at_least(call, "smallest_eigenvalue", smallest_eigenvalue, 0)
    _checks.positive(call, "inner_lipschitz", inner_lipschitz)
    _checks.at_least(call, "inner_smoothness", inner_smoothness, 0)
    _checks.at_least(call, "outer_lipschitz", outer_lipschitz, 0)
    _checks.at_least(call, "loss_smoothness", loss_smoothness, 0)
    if smallest_eigenvalue == 0:
        return NearlyStationaryBounds(math.inf, math.inf, 0.0)
    distance = 4 * inner_lipschitz * num_inner / smallest_eigenvalue * epsilon
    curvature = outer_lipschitz * inner_smoothness + loss_smoothness
    moving = 16 * (num_inner * inner_lipschitz) ** 2 * inner_smoothness
    return NearlyStationaryBounds(
        distance=distance,
        gradient=epsilon + curvature * distance,
        limit=smallest_eigenvalue**2 / moving if moving > 0 else math.inf,
    )


def _grid(
    call: str, outer: AbstractOuter, smoothing: float | Sequence[float] | Tensor | None
) -> list[float]:
    rho = outer.weak_convexity
    largest = math.inf if rho == 0 else 1 / rho
    if smoothing is None:
        grid = [10 ** (exponent / 2) for exponent in range(-12, 5)]
        grid = [step for step in grid if step < largest]
    else:
        grid = torch.as_tensor(smoothing, dtype=torch.float64).reshape(-1).tolist()
    if not grid:
        raise ValueError(
            f"`{call}(smoothing=...)` has no value below 1/weak_convexity = {largest:g}."
        )
    for step in grid:
        _checks.positive(call, "smoothing", step)
        _checks.below(
            call, "smoothing", step, largest, "1/weak_convexity", "the prox is not unique otherwise"
        )
    return grid
