"""Nearly-stationarity: the prox-linear step, computable where the proximal point of F is not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .. import _checks
from .box import isometric_copy, quadratic_in_box, two_slopes
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

    which needs only the Gram matrix. Supported are all convex f: those with two slopes (hinge,
    absolute value, CVaR hinge: every f with a `dual_zone`) by an exact quadratic program over a
    box, the others by an accelerated proximal gradient method on the dual, through `outer.prox`,
    until the gap is small or `max_iterations` is reached. The gap is part of the result.

    Args:
        inner: maps a LongTensor of blocks to g_i(w) with a graph, full data, deterministic.
        outer: f, convex; f_lambda (`MoreauEnvelope`) measures the smoothed objective instead.
        num_inner: n.
        parameters: w.
        step: t, at most 1/rho_F with rho_F = sqrt(d1) C_f L_g for convex f.
        loss: g_0, if there is one; it enters through its gradient.
        chunk: blocks per graph.
        tile: blocks per tile of the Gram matrix (see `gram_matrix`).
        per_layer: accumulate the Gram matrix over groups of layers.
        tolerance: gap at which the iterative method stops, relative to the size of the objective.
        max_iterations: limit of the iterative method.

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
    weights = trainable(call, parameters)
    index = all_blocks(call, num_inner, weights[0])
    values = inner_values(call, inner, index, chunk)
    fits(call, outer, values)
    gram = bordered_gram(call, inner, index, weights, loss, tile, per_layer)
    problem = _Dual(outer, values, gram, step)
    if two_slopes(outer) is None:
        y, gap = problem.accelerate(tolerance, max_iterations)
    else:
        y, gap = problem.solve_box(call)
    pull = weighted_gradient(call, inner, y / num_inner, weights, chunk, loss)
    displacement = tuple(-step * gradient for gradient in pull)
    stationarity = norm(pull)
    return ProxLinear(step * stationarity, stationarity, gap, y, displacement)


class _Dual:
    """The dual problem, in terms of the Gram matrix."""

    def __init__(self, outer: AbstractOuter, values: Tensor, gram: Tensor, step: float) -> None:
        self.outer, self.values, self.step, self.bordered = outer, values, step, gram
        self.size = values.numel()
        self.gram = gram[: self.size, : self.size]
        border = gram[: self.size, self.size :].sum(1)  # J grad g_0, or zero without a border
        self.base = values.reshape(-1) - step * border

    def at(self, y: Tensor) -> Tensor:
        """The linearised values g + J (z - w) at the z that belongs to y."""
        moved = self.gram @ y.reshape(-1) * (self.step / len(self.values))
        return (self.base - moved).reshape(self.values.shape)

    def solve_box(self, call: str) -> tuple[Tensor, float]:
        slopes = two_slopes(self.outer)
        assert slopes is not None
        copy = isometric_copy(self.bordered) * math.sqrt(self.step)
        matrix, border = copy[:, : self.size] / self.size, copy[:, self.size :].sum(1)
        linear = (self.values.reshape(-1).cpu().numpy() - slopes.kink) / self.size
        low, high = np.full(self.size, slopes.low), np.full(self.size, slopes.high)
        solution, gap = quadratic_in_box(call, matrix, -border, linear, low, high)
        return torch.from_numpy(solution).to(self.values).reshape(self.values.shape), gap

    def accelerate(self, tolerance: float, max_iterations: int) -> tuple[Tensor, float]:
        """Proximal gradient with momentum, restarted where the momentum points uphill."""
        largest = float(torch.linalg.eigvalsh(self.gram)[-1]) * self.step / len(self.values)
        inverse = largest if largest > 0 else 1.0  # inverse of the dual step
        enough = tolerance * (1.0 + float(self.outer(self.values).detach().abs().mean()))
        y = torch.zeros_like(self.values)
        ahead, momentum = y, 1.0
        best, smallest = y, math.inf
        for _ in range(max_iterations):
            # Moreau: prox of f* from the envelope of f; y is a subgradient of f at `nearest`.
            shifted = inverse * ahead + self.at(ahead)
            following = self.outer.envelope_gradient(shifted, inverse).detach()
            gap = self.gap(following, shifted - inverse * following)
            if gap < smallest:
                best, smallest = following, gap
            if smallest <= enough:
                break
            if float(((ahead - following) * (following - y)).sum()) > 0:
                momentum = 1.0
            longer = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            ahead = following + (momentum - 1) / longer * (following - y)
            y, momentum = following, longer
        return best, max(smallest, 0.0)

    def gap(self, y: Tensor, nearest: Tensor) -> float:
        """Mean of f(u) + f*(y) - <y, u> at u = at(y); f*(y) = <y, nearest> - f(nearest)."""
        point = self.at(y)
        inner_product = y * (point - nearest)
        if self.outer.dim != 1:
            inner_product = inner_product.sum(-1)
        return float((self.outer(point) - self.outer(nearest) - inner_product).detach().mean())
