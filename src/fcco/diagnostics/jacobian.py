"""The singular values of the stacked Jacobian of the inner functions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _checks
from ._full_data import FullData, Inner, trainable

__all__ = [
    "ConstraintCondition",
    "Spectrum",
    "constraint_condition",
    "smallest_eigenvalue",
]


@dataclass(frozen=True)
class Spectrum:
    """Extreme eigenvalues of the Gram matrix J J^T.

    Attributes:
        smallest: lambda_min, the delta of the paper's assumption LBSV; never below 0.
        largest: lambda_max.
        trace: the sum of all eigenvalues.
        condition: largest / smallest.
        trivially_singular: n d1 > d, so that lambda_min = 0 whatever the model does.
    """

    smallest: float
    largest: float
    trace: float
    condition: float
    trivially_singular: bool

    def __str__(self) -> str:
        note = "; singular because n d1 > d" if self.trivially_singular else ""
        return (
            f"eigenvalues of J J^T in [{self.smallest:.3g}, {self.largest:.3g}], trace "
            f"{self.trace:.3g}, condition {self.condition:.3g}{note}"
        )


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
        inner: see `fcco.diagnostics`.
        num_inner: n.
        parameters: w.
        with_threshold: add the column of the CVaR threshold s, for inner = L_i: the gradient of
            L_i - s is (grad L_i, -1), which adds 1 to each entry.
        per_layer: see `fcco.diagnostics`.

    Example:
        >>> import torch
        >>> from fcco.diagnostics import smallest_eigenvalue
        >>> w = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
        >>> losses = lambda index: (w - torch.eye(3)[index]).square().sum(1) / 2
        >>> print(smallest_eigenvalue(losses, 3, [w], with_threshold=True))
        eigenvalues of J J^T in [1, 3], trace 5, condition 3

    References:
        The paper, assumption LBSV and its verification on Camelyon17 and CelebA.
    """
    call = "smallest_eigenvalue"
    weights = trainable(call, parameters)
    matrix = FullData(call, inner, num_inner, weights).gram(per_layer)
    if with_threshold:
        if len(matrix) != num_inner:
            raise ValueError(
                f"`{call}(with_threshold=True)` needs scalar inner functions (d1 = 1)."
            )
        matrix += 1  # the column of s is -1 in every row
    eigenvalues = torch.linalg.eigvalsh(matrix)
    # Rounding can make the smallest of a singular matrix slightly negative.
    smallest, largest = max(float(eigenvalues[0]), 0.0), float(eigenvalues[-1])
    columns = sum(weight.numel() for weight in weights) + with_threshold  # s is one more
    return Spectrum(
        smallest=smallest,
        largest=largest,
        trace=float(matrix.trace()),
        condition=largest / smallest if smallest > 0 else math.inf,
        trivially_singular=len(matrix) > columns,
    )


@dataclass(frozen=True)
class ConstraintCondition:
    """The singular values behind the paper's assumption on constraints, at one point.

    Attributes:
        feasible: max_i g_i <= 0; the assumption then asks nothing and the rest is None.
        largest_value: max_i g_i.
        smallest: sigma_min of the Jacobian of all m constraints, the delta of the assumption.
        violated: sigma_min of the Jacobian of the violated constraints {i: g_i > 0} alone. It is
            never smaller, and enough for the proof, whose multipliers vanish where g_i <= 0.
        num_violated: how many constraints are violated.
    """

    feasible: bool
    largest_value: float
    smallest: float | None = None
    violated: float | None = None
    num_violated: int = 0

    def __str__(self) -> str:
        if self.feasible:
            return f"feasible (max g = {self.largest_value:.3g}): nothing to check"
        return (
            f"sigma_min = {self.smallest:.3g} over all constraints, {self.violated:.3g} over the "
            f"{self.num_violated} violated (max g = {self.largest_value:.3g})"
        )


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

    Example:
        >>> import torch
        >>> from fcco.diagnostics import constraint_condition
        >>> w = torch.tensor([1.0, 0.0], requires_grad=True)
        >>> matrix = torch.tensor([[2.0, 0.0], [0.0, 0.5]])
        >>> print(constraint_condition(lambda index: matrix[index] @ w - 0.1, 2, [w]))
        sigma_min = 0.5 over all constraints, 2 over the 1 violated (max g = 1.9)

    References:
        The paper, section 5: the assumption on constraints before the exact-penalty proposition.
    """
    call = "constraint_condition"
    _checks.integer(call, "num_constraints", num_constraints, 1)
    data = FullData(call, inner, num_constraints, trainable(call, parameters), chunk=chunk)
    values = data.constraint_values()
    largest_value = float(values.max())
    if largest_value <= 0:
        return ConstraintCondition(feasible=True, largest_value=largest_value)
    matrix = data.gram(per_layer)
    violated = values > 0  # the Gram matrix of these alone is a part of `matrix`
    return ConstraintCondition(
        feasible=False,
        largest_value=largest_value,
        smallest=_smallest_singular_value(matrix),
        violated=_smallest_singular_value(matrix[violated][:, violated]),
        num_violated=int(violated.sum()),
    )


def _smallest_singular_value(gram: Tensor) -> float:
    return math.sqrt(max(float(torch.linalg.eigvalsh(gram)[0]), 0.0))
