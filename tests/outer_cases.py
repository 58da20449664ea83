"""One database of outer functions, and independent ways to compute what they claim.

Nothing here uses a formula of the library: functions are written again in plain numpy or cvxpy,
minima are found on grids or by a solver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
import torch
from numpy.typing import NDArray

from fcco import outer as fo

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """An outer function, the same function written independently, and where to test it."""

    outer: fo.AbstractOuter
    plain: Callable[[Array], Array]
    low: float = -3.0
    high: float = 3.0
    size: int = 1
    step: float = 0.4
    solver: Callable[[Any], Any] | None = None  # the function as a cvxpy expression

    def __repr__(self) -> str:
        return repr(self.outer)

    def points(self, count: int = 60, seed: int = 0) -> torch.Tensor:
        """Random points of the box [low, high]."""
        generator = torch.Generator().manual_seed(seed)
        shape = (count,) if self.size == 1 else (count, self.size)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        return self.low + (self.high - self.low) * uniform


def plus(u: Array) -> Array:
    return np.maximum(u, 0.0)


def mcp(t: Array, m: float, b: float) -> Array:
    return np.where(t <= b * m, m * t - t**2 / (2 * b), b * m**2 / 2)


def separation(gap: Array, u: Array) -> Array:
    """Two variances, from the means of scores and of their squares, and a squared gap."""
    return u[..., 1] - u[..., 0] ** 2 + u[..., 3] - u[..., 2] ** 2 + gap**2


def cvar(u: Array, r: float) -> Array:
    """Rockafellar and Uryasev: the best threshold is one of the entries."""
    size = u.shape[-1]
    excess = plus(u[..., None, :] - u[..., :, None]).sum(-1)
    return (u + excess / (r * size)).min(-1)


def cvar_expression(v: Any, r: float) -> Any:
    threshold = cp.Variable()
    return threshold + cp.sum(cp.pos(v - threshold)) / (r * v.size)


SCALAR_CONVEX = [
    Case(fo.Hinge(1.5), lambda u: 1.5 * plus(u)),
    Case(fo.Absolute(0.75), lambda u: 0.75 * np.abs(u)),
    Case(fo.DeadZone(0.5, 1.25), lambda u: 1.25 * plus(np.abs(u) - 0.5)),
    Case(fo.SquaredHinge(1.5), lambda u: 0.75 * plus(u) ** 2),
]
WEAKLY_CONVEX = [
    Case(fo.OneSidedMCP(1.2, 0.5), lambda u: mcp(plus(u), 1.2, 2.0)),
    Case(fo.OneSidedMCP(0.9, 0.8), lambda u: mcp(plus(u), 0.9, 1 / 0.8)),
]
VECTOR_CONVEX = [
    Case(fo.CVaR(0.25), lambda u: u.max(-1), size=4, solver=cp.max),
    Case(
        fo.CVaR(0.4),
        lambda u: np.sort(u)[..., -2:].mean(-1),
        size=5,
        solver=lambda v: cp.sum_largest(v, 2) / 2,
    ),
    Case(
        fo.CVaR(0.3),
        lambda u: cvar(u, 0.3),
        size=5,
        solver=lambda v: cvar_expression(v, 0.3),
    ),
    Case(fo.CVaR(1.0), lambda u: u.mean(-1), size=3, solver=lambda v: cp.sum(v) / 3),
    Case(
        fo.TwoSidedHinge(0.5, 1.5),
        lambda u: 1.5 * plus(np.abs(u[..., 0] - u[..., 1]) - 0.5),
        size=2,
        solver=lambda v: 1.5 * cp.pos(cp.abs(v[0] - v[1]) - 0.5),
    ),
]
SMOOTH_ONLY = [
    Case(fo.Ratio(), lambda u: -u[..., 0] / u[..., 1], size=2, low=0.3),
    Case(
        fo.ClassSeparation(0.8), lambda u: separation(plus(0.8 + u[..., 2] - u[..., 0]), u), size=4
    ),
    Case(fo.Linear(), lambda u: u),
    Case(fo.Discount(), lambda u: -1 / np.log2(1 + u), low=0.3),
    Case(fo.LogMeanExp(0.5), lambda u: 0.5 * u),
    Case(fo.LogMeanExp(0.5, offset=0.2), lambda u: 0.5 * np.log(np.exp(u) + 0.2)),
]
SCALAR_PROX = SCALAR_CONVEX + WEAKLY_CONVEX
CONVEX = SCALAR_CONVEX + VECTOR_CONVEX
WITH_PROX = SCALAR_PROX + VECTOR_CONVEX
ALL = WITH_PROX + SMOOTH_ONLY


def grid_prox(
    plain: Callable[[Array], Array], u: Array, step: float, reach: float = 12.0
) -> tuple[Array, Array]:
    """The global minimum of f(v) + (u - v)^2/(2 step): a dense grid, then four finer ones."""
    centre, count = u, 4001
    offsets = np.linspace(-1.0, 1.0, count)
    for _ in range(5):
        v = centre[:, None] + reach * offsets
        total = plain(v) + (u[:, None] - v) ** 2 / (2 * step)
        best = total.argmin(1)
        centre, reach = v[np.arange(len(u)), best], 3 * reach / (count - 1)
    return centre, total.min(1)


def solve(problem: Any) -> float:
    """The optimal value, by an interior-point solver."""
    return float(problem.solve(solver=cp.CLARABEL))


def found(variable: Any) -> Array:
    """The solver's value of a variable."""
    assert variable.value is not None
    return variable.value


def solver_prox(case: Case, u: Array, step: float) -> tuple[Array, float]:
    """The prox and the envelope of a vector function by a conic solver."""
    assert case.solver is not None
    v = cp.Variable(len(u))
    problem = cp.Problem(cp.Minimize(case.solver(v) + cp.sum_squares(v - u) / (2 * step)))
    value = solve(problem)
    return found(v), value
