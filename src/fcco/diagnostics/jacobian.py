"""The singular values of the stacked Jacobian of the inner functions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _checks
from ._full_data import FullData, Inner, trainable

__all__ = ["ConstraintCondition", "Spectrum", "constraint_condition", "smallest_eigenvalue"]


@dataclass(frozen=True)
class Spectrum:
    """Extreme eigenvalues of the Gram matrix J J^T.

    Attributes:
        smallest: lambda_min, the delta of the paper's assumption LBSV; never below 0.
        largest: lambda_max.
        trace: the sum of all eigenvalues.
        trivially_singular: n d1 > d, so that lambda_min = 0 whatever the model does.
    """

    smallest: float
    largest: float
    trace: float
    trivially_singular: bool


def smallest_eigenvalue(
    inner: Inner,
    num_inner: int,
    parameters: Iterable[Tensor],
    *,
    with_threshold: bool = False,
    per_layer: bool = True,
) -> Spectrum:
    r"""The smallest eigenvalue delta of J J^T, which the assumption LBSV bounds from below.

    .. math::
        J = [J_1; \dots; J_n] \in \mathbb{R}^{n d_1 \times d}, \qquad J J^\top \in
        \mathbb{R}^{n d_1 \times n d_1}

    (The transposed product of the paper would be d x d and singular; see
    docs/concepts/mathematics.md.) The Jacobian itself is never held: gradients are recomputed.

    Args:
        with_threshold: add the column of the CVaR threshold s, for inner = L_i: the gradient of
            L_i - s is (grad L_i, -1), which adds 1 to each entry.

    The other arguments are those of `fcco.diagnostics`.

    Example:
        >>> import torch
        >>> from fcco.diagnostics import smallest_eigenvalue
        >>> w = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
        >>> losses = lambda index: (w - torch.eye(3)[index]).square().sum(1) / 2
        >>> round(smallest_eigenvalue(losses, 3, [w], with_threshold=True).smallest, 6)
        1.0
    """
    call = "smallest_eigenvalue"
    weights = trainable(call, parameters)
    matrix = FullData(call, inner, num_inner, weights).gram(per_layer)
    if with_threshold:
        if len(matrix) != num_inner:
            raise ValueError(f"`{call}(with_threshold=True)` needs scalar inner functions.")
        matrix += 1  # the column of s is -1 in every row
    eigenvalues = torch.linalg.eigvalsh(matrix)
    # Rounding can make the smallest of a singular matrix slightly negative.
    smallest, largest = max(float(eigenvalues[0]), 0.0), float(eigenvalues[-1])
    columns = sum(weight.numel() for weight in weights) + with_threshold  # s is one more
    return Spectrum(smallest, largest, float(matrix.trace()), len(matrix) > columns)


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
    inner: Inner,
    num_constraints: int,
    parameters: Iterable[Tensor],
    *,
    chunk: int = 64,
    per_layer: bool = True,
) -> ConstraintCondition:
    r"""The smallest singular value of the constraints' Jacobian, at an infeasible point only.

    .. math::
        \sigma_{\min}(J(w)) \ge \delta \quad \text{at every } w \text{ with } \max_i g_i(w) > 0

    As the assumption is written, J holds the gradients of all m constraints, violated or not; the
    value over the violated ones, which its proof uses, is reported beside it. The arguments are
    those of `fcco.diagnostics`; constraints are scalar.
    """
    call = "constraint_condition"
    _checks.integer(call, "num_constraints", num_constraints, 1)
    data = FullData(call, inner, num_constraints, trainable(call, parameters), chunk=chunk)
    violated = data.constraint_values() > 0
    if not bool(violated.any()):
        return ConstraintCondition(feasible=True)
    matrix = data.gram(per_layer)
    part = matrix[violated][:, violated]
    singular = [math.sqrt(max(float(torch.linalg.eigvalsh(g)[0]), 0.0)) for g in (matrix, part)]
    return ConstraintCondition(False, *singular)
