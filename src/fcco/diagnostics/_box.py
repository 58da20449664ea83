"""Outer functions with two slopes, and quadratic programs over the box of their slopes.

The hinge, the absolute value, the pinball loss and the CVaR hinge all read

    f(u) = max(low (u - kink), high (u - kink)) = max over y in [low, high] of y (u - kink),

so that stationarity measures become least-squares problems over a box. They are solved by the
bounded-variable least squares of scipy (an active-set method, exact up to rounding).

References:
    Stark and Parker (1995), Bounded-variable least-squares: an algorithm and applications.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..outer import AbstractOuter

__all__ = [
    "TwoSlopes",
    "isometric_copy",
    "least_squares_in_box",
    "quadratic_in_box",
    "scipy_optimize",
    "two_slopes",
]


@dataclass(frozen=True)
class TwoSlopes:
    """f(u) = max(low (u - kink), high (u - kink))."""

    kink: float
    low: float
    high: float


def two_slopes(outer: AbstractOuter) -> TwoSlopes | None:
    """The kink and the slopes of f where it has this form, else None."""
    once, twice = outer.dual_zone(1.0), outer.dual_zone(2.0)
    if once is None or twice is None:
        return None
    # dual_zone(step) = (kink + step low, kink + step high), and its ends may be tensors.
    ends = [torch.as_tensor(end, dtype=torch.float64).detach() for end in (*once, *twice)]
    low_1, high_1, low_2, high_2 = (end.item() for end in ends)
    low, high = low_2 - low_1, high_2 - high_1
    return TwoSlopes(low_1 - low, low, high)


def scipy_optimize(call: str) -> Any:
    """The module `scipy.optimize`; an optional dependency."""
    try:
        import scipy.optimize
    except ImportError as error:
        raise ImportError(f"`{call}` needs scipy: pip install 'fcco[solvers]'.") from error
    return scipy.optimize


def isometric_copy(gram: Tensor) -> np.ndarray:
    """A square matrix R with R^T R = gram.

    Its columns have the lengths and angles of the gradients behind the Gram matrix, so a
    least-squares problem over gradients in R^d is solved in R^n with the same minimisers.
    """
    eigenvalues, vectors = torch.linalg.eigh(gram.cpu())
    return (eigenvalues.clamp(min=0).sqrt().unsqueeze(1) * vectors.T).numpy()


def least_squares_in_box(
    call: str, matrix: np.ndarray, target: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Argmin of |matrix y - target| over low <= y <= high; equal bounds fix a coordinate."""
    solution = low.astype(float)
    free = high > low
    if free.any():
        width = (high - low)[free]
        # Unit intervals: the active-set method then treats all coordinates alike.
        result = scipy_optimize(call).lsq_linear(
            matrix[:, free] * width,
            target - matrix @ solution,
            bounds=(0.0, 1.0),
            method="bvls",
            tol=1e-14,
            max_iter=20 * len(width),
        )
        solution[free] += width * result.x
    return np.clip(solution, low, high)


def quadratic_in_box(
    call: str,
    matrix: np.ndarray,
    target: np.ndarray,
    linear: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    rounds: int = 100,
) -> tuple[np.ndarray, float]:
    """Argmin of |matrix y - target|^2 / 2 - linear^T y over a box, and its duality gap.

    The linear term need not lie in the range of matrix^T, so this is no least-squares problem.
    Each proximal-point round is one, in the step from the last solution.
    """
    number = len(low)
    # Weight of the proximal term, small against the curvature so that few rounds are enough.
    weight = np.sqrt(1e-7 * np.square(matrix).sum() / number) or 1.0
    stacked = np.vstack([matrix, weight * np.eye(number)])
    scale = float(((np.abs(linear) + np.abs(matrix.T @ target)) * (high - low)).sum())
    solution, best, gap = low.astype(float), low, np.inf
    for _ in range(rounds):
        residual = target - matrix @ solution
        slope = -matrix.T @ residual - linear
        excess = float((slope * solution - np.minimum(slope * low, slope * high)).sum())
        if excess < gap:
            best, gap = solution, excess
        if gap <= 1e-14 * scale:
            break
        # Coordinates whose slope pushes against their bound are left out of the round: the slopes
        # of the others vanish at the end, and with them the rounding error of the constant part
        # of the least squares.
        fixed = ((solution <= low) & (slope > 0)) | ((solution >= high) & (slope < 0))
        down, up = np.where(fixed, 0.0, low - solution), np.where(fixed, 0.0, high - solution)
        anchor = np.append(residual, linear / weight)
        step = least_squares_in_box(call, stacked, anchor, down, up)
        moved = np.where(step >= up, high, np.where(step <= down, low, solution + step))
        solution = np.where(fixed, solution, moved)
    return best, max(gap, 0.0)
