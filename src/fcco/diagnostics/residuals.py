"""Residuals: of the KKT conditions of min g_0(w) subject to g_i(w) <= 0, and of the tracker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..outer import AbstractOuter
from ._full_data import FullData, Inner, Loss, trainable

__all__ = ["KKT", "kkt", "tracking_error"]

_ACTIVE = 1e-3
"""Constraints with g_i at least minus this may have a multiplier."""


@dataclass(frozen=True, eq=False)
class KKT:
    """Residuals of the KKT conditions; zero at a KKT point.

    Attributes:
        stationarity: |grad g_0 + sum_i nu_i grad g_i|.
        feasibility: max_i [g_i]_+.
        complementarity: max_i |nu_i g_i|.
        multipliers: nu, shape (m,).
    """

    stationarity: float
    feasibility: float
    complementarity: float
    multipliers: Tensor

    def __str__(self) -> str:
        return (
            f"stationarity {self.stationarity:.3g}, feasibility {self.feasibility:.3g}, "
            f"complementarity {self.complementarity:.3g}, multipliers <= "
            f"{float(self.multipliers.max()):.3g}"
        )


def kkt(
    loss: Loss,
    inner: Inner,
    num_constraints: int,
    parameters: Iterable[Tensor],
    *,
    multipliers: Tensor | None = None,
    outer: AbstractOuter | None = None,
    chunk: int = 64,
    per_layer: bool = True,
) -> KKT:
    r"""The KKT residuals at a point, with given multipliers, a penalty's, or the best ones.

    .. math::
        \Big\|\nabla g_0 + \sum_i \nu_i \nabla g_i\Big\|, \qquad \max_i [g_i]_+, \qquad
        \max_i |\nu_i g_i|

    With neither `multipliers` nor `outer`, nu = argmin |grad g_0 + J^T nu| over nu >= 0 with
    nu_i = 0 where g_i < -0.001, which depends on the point alone and not on the method that found
    it. Much larger residuals with a penalty's multipliers say that these have not converged.

    Args:
        multipliers: nu itself, shape (m,).
        outer: the outer function f of a penalty (1/m) sum_i f(g_i), which implies
            nu_i = f'(g_i) / m; smoothed as in training (at the kink of an unsmoothed hinge the
            multiplier is not determined).

    The other arguments are those of `fcco.diagnostics`; constraints are scalar.

    Example:
        min |w - 1|^2 / 2 subject to w <= 0.3, at the solution; the multipliers are 0.7.

        >>> import torch
        >>> from fcco.diagnostics import kkt
        >>> w = torch.full((2,), 0.3, dtype=torch.float64, requires_grad=True)
        >>> kkt(lambda: (w - 1).square().sum() / 2, lambda i: w[i] - 0.3, 2, [w]).multipliers
        tensor([0.7000, 0.7000], dtype=torch.float64)
    """
    call = "kkt"
    if multipliers is not None and outer is not None:
        raise ValueError("`kkt(multipliers=..., outer=...)` takes one source of multipliers.")
    _checks.integer(call, "num_constraints", num_constraints, 1)
    data = FullData(call, inner, num_constraints, trainable(call, parameters), loss, chunk)
    values = data.constraint_values()
    if multipliers is not None:
        if multipliers.shape != values.shape or bool((multipliers < 0).any()):
            raise ValueError(
                f"`kkt(multipliers=...)` must be non-negative (constraints are g_i <= 0), of shape "
                f"({len(values)},), but is: {multipliers}."
            )
        nu = multipliers.detach().to(values)
    elif outer is not None:
        if outer.dim != 1:
            raise ValueError(f"`kkt(outer=...)` must be a scalar function but is: {outer!r}.")
        nu = outer.gradient(values).detach() / num_constraints
    else:
        nu = _best_multipliers(data, values, per_layer)
    gradient = data.gradient(nu)
    return KKT(
        stationarity=float(torch.stack([part.norm() for part in gradient]).norm()),
        feasibility=max(float(values.max()), 0.0),
        complementarity=float((nu * values).abs().max()),
        multipliers=nu,
    )


def _best_multipliers(data: FullData, values: Tensor, per_layer: bool) -> Tensor:
    try:
        import scipy.optimize
    except ImportError as error:
        raise ImportError("`kkt` needs scipy: pip install scipy.") from error
    nu = torch.zeros_like(values)
    near = data.index[values >= -_ACTIVE]
    if len(near) > 0:
        # Non-negative least squares with m + 1 equations instead of d: a square matrix R with
        # R^T R = gram has columns of the lengths and angles of the gradients, grad g_0 last.
        eigenvalues, vectors = torch.linalg.eigh(data.gram(per_layer, near).cpu())
        copy: Any = (eigenvalues.clamp(min=0).sqrt().unsqueeze(1) * vectors.T).numpy()
        solution, _ = scipy.optimize.nnls(copy[:, :-1], -copy[:, -1], maxiter=100 * len(copy))
        nu[near] = torch.from_numpy(solution).to(nu)
    return nu


def tracking_error(
    tracked: Tensor, inner: Inner, *, seen: Tensor | None = None, chunk: int = 64
) -> float:
    r"""The error (1/n) sum_i |u_i - g_i(w)|^2 of the tracked values against the full data.

    `fcco.theory.expected_tracking_error` is its value in a steady state.

    Args:
        tracked: u, shape (n,) or (n, d1): `tracker.value`.
        seen: shape (n,), True for blocks that have a tracked value (`tracker.seen`) and count; all
            by default.

    The other arguments are those of `fcco.diagnostics`.

    Example:
        >>> import torch
        >>> from fcco.diagnostics import tracking_error
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> tracking_error(torch.tensor([1.0, 1.5]), lambda index: w[index])
        0.125
    """
    call, number = "tracking_error", len(tracked)
    seen = torch.ones(number, dtype=torch.bool) if seen is None else seen.bool()
    if seen.shape != (number,) or not bool(seen.any()):
        raise ValueError(
            f"`{call}(seen=...)` must have the shape ({number},) and a seen block but is: {seen}."
        )
    index = seen.to(tracked.device).nonzero().reshape(-1)
    values = FullData(call, inner, number, [tracked], chunk=chunk).values(index)
    rows = tracked.detach().to(values)[index]
    if rows.numel() != values.numel():
        raise ValueError(
            f"`{call}(tracked=...)` has the shape {tuple(tracked.shape)} but inner gives "
            f"{tuple(values.shape[1:])} per block."
        )
    return float((rows.reshape(values.shape) - values).square().sum() / len(index))
