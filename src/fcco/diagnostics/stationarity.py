"""Approximate stationarity: an upper bound, the exact value for two slopes, and what it implies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import _checks
from ..outer import AbstractOuter
from ._box import isometric_copy, least_squares_in_box, two_slopes
from ._full_data import FullData, Inner, Loss, norm, trainable

__all__ = [
    "ApproximateStationarity",
    "HingeStationarity",
    "NearlyStationaryBounds",
    "approximate_stationarity",
    "hinge_stationarity",
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
        outer: f itself, not its envelope.
        smoothing: lambda, one or several, each below 1/rho_f; by default the 17 half-decades from
            1e-6 to 1e2, those below 1/rho_f.

    The other arguments are those of `fcco.diagnostics`.

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
    grid = _grid(call, outer, smoothing)
    data = FullData(call, inner, num_inner, trainable(call, parameters), loss, chunk)
    values = data.values(outer)
    rows = []
    for step in grid:
        difference = values - outer.prox(values, step).detach()
        distance = float(difference.reshape(num_inner, -1).norm(dim=1).max())
        # The weights are y_i / n, with y_i = (g_i - t_i) / lambda.
        rows.append((step, distance, norm(data.gradient(difference / (step * num_inner)))))
    best_step, distance, gradient = min(rows, key=lambda row: max(row[1:]))
    table = torch.tensor(rows, dtype=torch.float64)
    return ApproximateStationarity(max(distance, gradient), best_step, distance, gradient, table)


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
    reason = "the prox is not unique otherwise"
    for step in grid:
        _checks.positive(call, "smoothing", step)
        _checks.below(call, "smoothing", step, largest, "1/weak_convexity", reason)
    return grid


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

    and epsilon* = inf{epsilon: q(epsilon) <= epsilon}. Each q is a least-squares problem over a box
    in R^n, after one Gram matrix. The same holds with other slopes and another kink: |u|, the
    pinball loss, (1/r) [u - s]_+.

    Args:
        outer: f itself, a function with a `dual_zone`.
        radius: evaluate q at this radius only, instead of the search; the value is then
            max(radius, q(radius)).

    The other arguments are those of `fcco.diagnostics`; d1 = 1.

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
    if radius is not None:
        _checks.at_least(call, "radius", radius, 0)
    slopes = two_slopes(outer)
    if slopes is None:
        raise ValueError(
            f"`{call}(outer=...)` needs a scalar function with two slopes, such as the hinge, the "
            f"absolute value or the CVaR hinge (those with a `dual_zone`), but is: {outer!r}."
        )
    data = FullData(call, inner, num_inner, trainable(call, parameters), loss, chunk)
    values = data.values(outer)
    copy = isometric_copy(data.gram(tile, per_layer))
    matrix = copy[:, :num_inner] / num_inner
    target = -copy[:, num_inner] if loss is not None else np.zeros(len(copy))
    signed = values.reshape(-1).cpu().numpy() - slopes.kink  # distance to the kink

    def residual(epsilon: float) -> tuple[float, np.ndarray]:
        """q(epsilon) and its multipliers, over the slopes of f within epsilon of each value."""
        # Beyond epsilon only one slope is left: equal bounds fix that multiplier.
        low = np.where(signed > epsilon, slopes.high, slopes.low)
        high = np.where(signed < -epsilon, slopes.low, slopes.high)
        solution = least_squares_in_box(call, matrix, target, low, high)
        return float(np.linalg.norm(matrix @ solution - target)), solution

    if radius is None:
        # q is constant between these values; 0, because epsilon* may lie below all |g_i - kink|.
        radius, multipliers = _search(np.unique(np.append(np.abs(signed), 0.0)), residual)
    else:
        multipliers = residual(radius)[1]
    y = torch.from_numpy(multipliers).to(values.device)
    # Measured on the model, because the root of the Gram matrix has the root of its rounding error.
    gradient = norm(data.gradient(y / num_inner))
    return HingeStationarity(
        value=max(radius, gradient),
        radius=radius,
        gradient=gradient,
        multipliers=y,
        num_free=int((np.abs(signed) <= radius).sum()),
    )


def _search(
    steps: np.ndarray, residual: Callable[[float], tuple[float, np.ndarray]]
) -> tuple[float, np.ndarray]:
    """The first step with q(step) < next step, after which q is below the radius."""
    # q is a non-increasing step function that changes at these values only, so a binary search
    # over them ends at epsilon* itself.
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

    The limit carries n^2: the theorem needs the singular values of the stacked Jacobian to persist
    between w and w', not those of each block (docs/concepts/mathematics.md).

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
    denominator = 16 * (num_inner * inner_lipschitz) ** 2 * inner_smoothness
    return NearlyStationaryBounds(
        distance=distance,
        gradient=epsilon + curvature * distance,
        limit=smallest_eigenvalue**2 / denominator if denominator > 0 else math.inf,
    )
