"""Nearly-stationarity: the prox-linear step, computable where the proximal point of F is not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import _checks
from ..outer import AbstractOuter
from ._box import TwoSlopes, isometric_copy, quadratic_in_box, two_slopes
from ._full_data import FullData, Inner, Loss, norm, trainable

__all__ = ["ProxLinear", "prox_linear"]


@dataclass(frozen=True, eq=False)
class ProxLinear:
    """The prox-linear step z - w at a point w.

    Attributes:
        distance: |z - w|.
        stationarity: |z - w| / t, the measure of nearly-stationarity.
        gap: the duality gap of the subproblem; |z - w| is exact up to sqrt(2 t gap).
        multipliers: y, subgradients of f at the linearised values; shape of the inner values.
        displacement: z - w, one tensor per parameter.
    """

    distance: float
    stationarity: float
    gap: float
    multipliers: Tensor
    displacement: tuple[Tensor, ...]

    def __str__(self) -> str:
        return (
            f"prox-linear point at distance {self.distance:.3g}, stationarity "
            f"{self.stationarity:.3g} (gap {self.gap:.1g})"
        )


def prox_linear(
    inner: Inner,
    outer: AbstractOuter,
    num_inner: int,
    parameters: Iterable[Tensor],
    step: float,
    *,
    loss: Loss | None = None,
    chunk: int = 64,
    tile: int = 32,
    per_layer: bool = True,
    tolerance: float = 1e-12,
    max_iterations: int = 20_000,
) -> ProxLinear:
    r"""The prox-linear step, whose length measures nearly-stationarity for convex f.

    .. math::
        z = \arg\min_z \tfrac1n \sum_i f(g_i + J_i (z - w)) + \nabla g_0^\top (z - w)
            + \tfrac{1}{2t}\|z - w\|^2

    For t <= 1/rho_F, |z - w| / t equals the norm of the gradient of the Moreau envelope of F up to
    constants, and it is that norm where g is affine and g_0 linear. It is found from the dual,

    .. math::
        \max_{y_i \in \mathrm{dom} f^*} \tfrac1n \sum_i \big(y_i^\top g_i - f^*(y_i)\big)
        - \tfrac t2 \Big\|\nabla g_0 + \tfrac1n J^\top y\Big\|^2, \qquad
        z - w = -t \big(\nabla g_0 + \tfrac1n J^\top y\big),

    which needs only the Gram matrix. An f with two slopes (hinge, absolute value, CVaR hinge:
    every f with a `dual_zone`) leads to a quadratic program over a box, solved exactly; any other
    convex f to an accelerated proximal gradient method on the dual, through `outer.prox`.

    Args:
        outer: f, convex; f_lambda (`MoreauEnvelope`) measures the smoothed objective instead.
        step: t, at most 1/rho_F with rho_F = sqrt(d1) C_f L_g for convex f.
        loss: g_0, if there is one; it enters through its gradient.
        tolerance: gap at which the iterative method stops, relative to the size of the objective.
        max_iterations: limit of the iterative method.

    The other arguments are those of `fcco.diagnostics`.

    Example:
        F(w) = (|w_1| + |w_2|) / 2; the step is soft thresholding by t / 2.

        >>> import torch
        >>> from fcco.diagnostics import prox_linear
        >>> from fcco.outer import Absolute
        >>> w = torch.tensor([0.3, -2.0], requires_grad=True)
        >>> result = prox_linear(lambda index: w[index], Absolute(), 2, [w], step=1.0)
        >>> result.displacement
        (tensor([-0.3000,  0.5000], dtype=torch.float64),)
        >>> result.multipliers
        tensor([ 0.6000, -1.0000], dtype=torch.float64)

    References:
        Drusvyatskiy and Paquette (2019), Efficiency of minimizing compositions of convex functions
        and smooth maps.
    """
    call = "prox_linear"
    _checks.positive(call, "step", step)
    _checks.requires(call, outer, "convex")
    data = FullData(call, inner, num_inner, trainable(call, parameters), loss, chunk)
    values = data.values(outer)
    gram = data.gram(tile, per_layer)
    slopes = two_slopes(outer)
    if slopes is not None:
        y, gap = _solve_box(call, slopes, values, gram, step)
    else:
        y, gap = _accelerate(outer, values, gram, step, tolerance, max_iterations)
    gradient = data.gradient(y / num_inner)
    stationarity = norm(gradient)
    displacement = tuple(-step * part for part in gradient)
    return ProxLinear(step * stationarity, stationarity, gap, y, displacement)


def _solve_box(
    call: str, slopes: TwoSlopes, values: Tensor, gram: Tensor, step: float
) -> tuple[Tensor, float]:
    """The dual solution and its gap where f* is linear on the interval of slopes."""
    size = values.numel()
    copy = isometric_copy(gram) * math.sqrt(step)
    # The columns after the first `size` are those of grad g_0: one, or none (then the sum is 0).
    matrix, border = copy[:, :size] / size, copy[:, size:].sum(1)
    linear = (values.reshape(-1).cpu().numpy() - slopes.kink) / size
    low, high = np.full(size, slopes.low), np.full(size, slopes.high)
    solution, gap = quadratic_in_box(call, matrix, -border, linear, low, high)
    return torch.from_numpy(solution).to(values).reshape(values.shape), gap


def _accelerate(
    outer: AbstractOuter,
    values: Tensor,
    gram: Tensor,
    step: float,
    tolerance: float,
    max_iterations: int,
) -> tuple[Tensor, float]:
    """Proximal gradient with momentum on the dual, restarted where the momentum points uphill."""
    size = values.numel()
    border = gram[:size, size:].sum(1)  # J grad g_0, or zero without g_0
    gram = gram[:size, :size]
    base = values.reshape(-1) - step * border

    def linearised(y: Tensor) -> Tensor:
        """The values g + J (z - w) at the z that belongs to y."""
        moved = gram @ y.reshape(-1) * (step / len(values))
        return (base - moved).reshape(values.shape)

    def duality_gap(y: Tensor, nearest: Tensor) -> float:
        """Mean of f(u) + f*(y) - <y, u> at the linearised u; f*(y) = <y, nearest> - f(nearest)."""
        point = linearised(y)
        inner_product = y * (point - nearest)
        if outer.dim != 1:
            inner_product = inner_product.sum(-1)
        return float((outer(point) - outer(nearest) - inner_product).detach().mean())

    # The dual is smooth with the constant t lambda_max(J J^T) / n; its inverse is the step.
    largest = float(torch.linalg.eigvalsh(gram)[-1]) * step / len(values)
    inverse = largest if largest > 0 else 1.0
    target_gap = tolerance * (1.0 + float(outer(values).detach().abs().mean()))
    y = extrapolated = best = torch.zeros_like(values)
    momentum, smallest_gap = 1.0, math.inf
    for _ in range(max_iterations):
        # Moreau: the prox of f* from the envelope of f; y is a subgradient of f at `nearest`.
        shifted = inverse * extrapolated + linearised(extrapolated)
        new = outer.envelope_gradient(shifted, inverse).detach()
        nearest = shifted - inverse * new
        gap = duality_gap(new, nearest)
        if gap < smallest_gap:
            best, smallest_gap = new, gap
        if smallest_gap <= target_gap:
            break
        # Restart (O'Donoghue and Candes 2015): the momentum points against the gradient step.
        if float(((extrapolated - new) * (new - y)).sum()) > 0:
            momentum = 1.0
        next_momentum = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        extrapolated = new + (momentum - 1) / next_momentum * (new - y)
        y, momentum = new, next_momentum
    return best, max(smallest_gap, 0.0)
