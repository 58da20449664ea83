"""Eigenvalues of the inner functions' Jacobian, KKT residuals, and the error of tracked values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..tracker import theory_correction
from ._full_data import FullData, Inner, Loss

__all__ = [
    "KKT", "ConstraintCondition", "Spectrum", "constraint_condition", "expected_tracking_error",
    "kkt", "smallest_eigenvalue",
]  # fmt: skip


@dataclass(frozen=True)
class Spectrum:
    """Extreme eigenvalues of the Gram matrix J J^T.

    Attributes:
        smallest: lambda_min, the delta of the paper's assumption LBSV; never below 0, and 0
            whatever the model does if n d1 > d.
        largest: lambda_max.
    """

    smallest: float
    largest: float


def smallest_eigenvalue(
    inner: Inner, num_inner: int, parameters: Iterable[Tensor], *, per_layer: bool = True
) -> Spectrum:
    r"""The smallest eigenvalue delta of J J^T, which the assumption LBSV bounds from below.

    .. math::
        J = [J_1; \dots; J_n] \in \mathbb{R}^{n d_1 \times d}, \qquad J J^\top \in
        \mathbb{R}^{n d_1 \times n d_1}

    (The transposed product of the paper would be d x d and singular; see
    docs/concepts/mathematics.md.) The Jacobian itself is never held: gradients are recomputed. For
    CVaR, whose inner functions are L_i - s, s is one of the parameters.

    Example:
        >>> import torch
        >>> from fcco.diagnostics import smallest_eigenvalue
        >>> w = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
        >>> s = torch.zeros((), dtype=torch.float64, requires_grad=True)
        >>> losses = lambda index: (w - torch.eye(3)[index]).square().sum(1) / 2
        >>> round(smallest_eigenvalue(lambda index: losses(index) - s, 3, [w, s]).smallest, 6)
        1.0
    """
    data = FullData("smallest_eigenvalue", inner, num_inner, parameters)
    eigenvalues = torch.linalg.eigvalsh(data.gram(per_layer))
    # Rounding can make the smallest of a singular matrix slightly negative.
    return Spectrum(max(float(eigenvalues[0]), 0.0), float(eigenvalues[-1]))


@dataclass(frozen=True)
class ConstraintCondition:
    """The singular values behind the assumption on constraints of the paper's section 5.

    Attributes:
        feasible: max_i g_i <= 0; the assumption then asks nothing and the rest is None.
        smallest: sigma_min of the Jacobian of all m constraints, the delta of the assumption.
        violated: sigma_min of the Jacobian of the violated constraints {i: g_i > 0} alone. It is
            never smaller, and enough for the proof, whose multipliers vanish where g_i <= 0.
    """

    feasible: bool
    smallest: float | None = None
    violated: float | None = None


def constraint_condition(
    inner: Inner, num_constraints: int, parameters: Iterable[Tensor], *, per_layer: bool = True
) -> ConstraintCondition:
    r"""The smallest singular value of the constraints' Jacobian, at an infeasible point only.

    .. math::
        \sigma_{\min}(J(w)) \ge \delta \quad \text{at every } w \text{ with } \max_i g_i(w) > 0

    As the assumption is written, J holds the gradients of all m constraints, violated or not; its
    proof uses those of the violated ones.
    """
    data = FullData("constraint_condition", inner, num_constraints, parameters)
    violated = data.constraint_values() > 0
    if not bool(violated.any()):
        return ConstraintCondition(feasible=True)
    matrix = data.gram(per_layer)
    part = matrix[violated][:, violated]
    singular = [math.sqrt(max(float(torch.linalg.eigvalsh(g)[0]), 0.0)) for g in (matrix, part)]
    return ConstraintCondition(False, *singular)


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
    per_layer: bool = True,
) -> KKT:
    r"""The KKT residuals at a point, with given multipliers or the best ones.

    .. math::
        \Big\|\nabla g_0 + \sum_i \nu_i \nabla g_i\Big\|, \qquad \max_i [g_i]_+, \qquad
        \max_i |\nu_i g_i|

    Without `multipliers`, nu = argmin |grad g_0 + J^T nu| over nu >= 0 with nu_i = 0 where
    g_i < -0.001, which depends on the point alone and not on the method that found it. Much larger
    residuals with those of a method say that these have not converged.

    Args:
        multipliers: nu, shape (m,).

    Example:
        min |w - 1|^2 / 2 subject to w <= 0.3, at the solution; the multipliers are 0.7.

        >>> import torch
        >>> from fcco.diagnostics import kkt
        >>> w = torch.full((2,), 0.3, dtype=torch.float64, requires_grad=True)
        >>> kkt(lambda: (w - 1).square().sum() / 2, lambda i: w[i] - 0.3, 2, [w]).multipliers
        tensor([0.7000, 0.7000], dtype=torch.float64)
    """
    data = FullData("kkt", inner, num_constraints, parameters, loss)
    values = data.constraint_values()
    if multipliers is None:
        nu = _best_multipliers(data, values, per_layer)
    else:
        if multipliers.shape != values.shape or bool((multipliers < 0).any()):
            raise ValueError(
                f"`kkt(multipliers=...)` must be non-negative (constraints are g_i <= 0), of shape "
                f"({len(values)},), but is: {multipliers}."
            )
        nu = multipliers.detach().to(values)
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


def expected_tracking_error(
    gamma: float,
    num_inner: int,
    blocks: int,
    *,
    correction: float | None = None,
    drift: float = 0.0,
    systematic: bool = True,
    value_noise: float = 0.0,
    samples: int = 1,
) -> float:
    r"""Steady E(u_i - g_i)^2 after an update, exactly, for scalar g_i moving at constant speed.

    With p = B1/n, a = gamma' - (1 - gamma) and g_i moving by delta per step,

    .. math::
        E(u - g)^2 = \frac{\gamma}{2 - \gamma} \frac{\sigma_0^2}{B_2}
        + \frac{\delta^2 (p a^2 + 1 - p) + 2 \delta m (p (1 - \gamma) a - (1 - p))}
        {p \gamma (2 - \gamma)}, \qquad m = \delta \frac{p a - (1 - p)}{p \gamma},

    where m = E(u - g) is 0 for steps of random sign. The theory's gamma' makes the second
    bracket 0.

    Args:
        num_inner: n, and `blocks` B1 of them in a step, each with B2 `samples`.
        correction: gamma'; `theory_correction(gamma, n, B1)` unless given.
        drift: delta, the size of each g_i's motion per step.
        systematic: the motion keeps its sign; otherwise each step has an independent random one.
        value_noise: sigma_0, the same at both points of the correction.

    Example:
        >>> from fcco.diagnostics import expected_tracking_error
        >>> round(expected_tracking_error(0.5, 10, 10, value_noise=3.0, samples=4), 6)
        0.75
    """
    call = "expected_tracking_error"
    _checks.in_interval(call, "gamma", gamma, 0, 1, open_low=True)
    _checks.in_interval(call, "blocks", blocks, 1, num_inner)
    if correction is None:
        if blocks < num_inner:
            reason = "the correction of the theory is infinite there unless all blocks are sampled"
            _checks.below(call, "gamma", gamma, 1, "its limit", reason)
        correction = float(theory_correction(gamma, num_inner, blocks))
    excess = correction - (1 - gamma)  # a of the law
    share = blocks / num_inner
    lag = drift * (share * excess - (1 - share)) / (share * gamma) if systematic else 0.0
    motion = drift**2 * (share * excess**2 + 1 - share)
    motion += 2 * drift * lag * (share * (1 - gamma) * excess - (1 - share))
    noise = gamma / (2 - gamma) * value_noise**2 / samples
    return noise + motion / (share * gamma * (2 - gamma))
