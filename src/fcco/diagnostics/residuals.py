"""KKT residuals of a constrained problem: min g_0(w) subject to g_i(w) <= 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import _checks
from ..outer import AbstractOuter
from ._full_data import FullData, Inner, Loss, norm, trainable

__all__ = ["KKT", "KKTReport", "kkt", "kkt_report"]

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
    it.

    Args:
        multipliers: nu itself, shape (m,).
        outer: the outer function f of a penalty (1/m) sum_i f(g_i), which implies
            nu_i = f'(g_i) / m; smoothed as in training (at the kink of an unsmoothed hinge the
            multiplier is not determined: leave `outer` out).

    The other arguments are those of `fcco.diagnostics`; constraints are scalar.

    Example:
        min |w - 1|^2 / 2 subject to w <= 0.3, at the solution; the multipliers are 0.7.

        >>> import torch
        >>> from fcco.diagnostics import kkt
        >>> w = torch.full((2,), 0.3, dtype=torch.float64, requires_grad=True)
        >>> result = kkt(lambda: (w - 1).square().sum() / 2, lambda index: w[index] - 0.3, 2, [w])
        >>> result.multipliers
        tensor([0.7000, 0.7000], dtype=torch.float64)
        >>> result.feasibility
        0.0

    References:
        The paper, section 5: the proposition on the exact penalty and its proof.
    """
    call = "kkt"
    if multipliers is not None and outer is not None:
        raise ValueError("`kkt(multipliers=..., outer=...)` takes one source of multipliers.")
    _checks.integer(call, "num_constraints", num_constraints, 1)
    data = FullData(call, inner, num_constraints, trainable(call, parameters), loss, chunk)
    values = data.constraint_values()
    if multipliers is not None:
        nu = _checked_multipliers(multipliers, values)
    elif outer is not None:
        if outer.dim != 1:
            raise ValueError(
                f"`kkt(outer=...)` must be a scalar function (dim=1) but is: {outer!r}."
            )
        nu = outer.gradient(values).detach() / num_constraints
    else:
        nu = torch.zeros_like(values)
        near = data.index[values >= -_ACTIVE]
        if len(near) > 0:
            # Non-negative least squares with m + 1 equations instead of d: the columns of the copy
            # have the lengths and angles of the gradients; the last one stands for grad g_0.
            copy = _isometric_copy(data.gram(per_layer, near))
            solution, _ = _scipy_optimize(call).nnls(
                copy[:, :-1], -copy[:, -1], maxiter=100 * len(copy)
            )
            nu[near] = torch.from_numpy(solution).to(nu)
    return KKT(
        stationarity=norm(data.gradient(nu)),
        feasibility=max(float(values.max()), 0.0),
        complementarity=float((nu * values).abs().max()),
        multipliers=nu,
    )


def _isometric_copy(gram: Tensor) -> np.ndarray:
    """A square matrix R with R^T R = gram.

    Its columns have the lengths and angles of the gradients behind the Gram matrix, so a
    least-squares problem over gradients in R^d is solved in R^n with the same minimisers.
    """
    eigenvalues, vectors = torch.linalg.eigh(gram.cpu())
    return (eigenvalues.clamp(min=0).sqrt().unsqueeze(1) * vectors.T).numpy()


def _scipy_optimize(call: str) -> Any:
    """The module `scipy.optimize`; an optional dependency."""
    try:
        import scipy.optimize
    except ImportError as error:
        raise ImportError(f"`{call}` needs scipy: pip install scipy.") from error
    return scipy.optimize


def _checked_multipliers(multipliers: Tensor, values: Tensor) -> Tensor:
    if multipliers.shape != values.shape:
        raise ValueError(
            f"`kkt(multipliers=...)` must have the shape ({len(values)},), one per constraint, but "
            f"has: {tuple(multipliers.shape)}."
        )
    if bool((multipliers < 0).any()):
        raise ValueError(
            "`kkt(multipliers=...)` must be non-negative (constraints are g_i <= 0) but the "
            f"smallest is: {float(multipliers.min()):g}."
        )
    return multipliers.detach().to(values)


@dataclass(frozen=True, eq=False)
class KKTReport:
    """The residuals with the penalty's multipliers and with the best ones, side by side."""

    penalty: KKT
    least_squares: KKT

    def __str__(self) -> str:
        return f"penalty: {self.penalty}\nbest:    {self.least_squares}"


def kkt_report(
    loss: Loss,
    inner: Inner,
    num_constraints: int,
    parameters: Iterable[Tensor],
    outer: AbstractOuter,
    **options: Any,
) -> KKTReport:
    r"""The KKT residuals with the penalty's multipliers and with the best ones, side by side.

    A large difference of the two stationarity residuals says that the penalty's multipliers have
    not converged although the point may be good. All arguments are those of `kkt`; `options` are
    its `chunk` and `per_layer`.

    Example:
        A point that violates w_1 <= 0.3 by 0.05; the penalty pushes back with 0.05 / (lambda m).

        >>> import torch
        >>> from fcco.diagnostics import kkt_report
        >>> from fcco.outer import Hinge, MoreauEnvelope
        >>> w = torch.tensor([0.35, 0.9], dtype=torch.float64, requires_grad=True)
        >>> print(kkt_report(lambda: (w - 1).square().sum() / 2, lambda index: w[:1] - 0.3,
        ...                  1, [w], MoreauEnvelope(Hinge(4.0), 0.05)))
        penalty: stationarity 0.364, feasibility 0.05, complementarity 0.05, multipliers <= 1
        best:    stationarity 0.1, feasibility 0.05, complementarity 0.0325, multipliers <= 0.65
    """
    problem = loss, inner, num_constraints, trainable("kkt_report", parameters)
    return KKTReport(
        penalty=kkt(*problem, outer=outer, **options), least_squares=kkt(*problem, **options)
    )
