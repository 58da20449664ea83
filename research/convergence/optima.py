"""Optima by a convex solver (cvxpy, imported here only): where the stored numbers come from."""

from __future__ import annotations

from typing import Any

from .logistic import Logistic
from .problems import NonSmooth

__all__ = ["logistic", "nonsmooth"]


def nonsmooth(problem: NonSmooth) -> Any:
    """The minimiser of S4, written as a convex program."""
    import cvxpy as cp

    w, weight = cp.Variable(problem.rows.shape[1]), problem.weight
    square = cp.sum_squares(w) * (-problem.curvature / 2)  # c/2 |w|^2
    linear = cp.abs(problem.rows.numpy() @ w) + problem.shifts.numpy()
    penalty = cp.sum(cp.maximum(linear, square)) * (weight / problem.total)
    # |w - a|^2 / 2 - rho c/2 |w|^2, expanded so that the solver sees it is convex.
    scale = 0.5 + weight * problem.curvature / 2
    target = problem.target.numpy()
    rest = scale * cp.sum_squares(w) - target @ w + 0.5 * float(target @ target)
    goal = cp.Problem(cp.Minimize(rest + penalty), [cp.norm(w) <= problem.radius])
    goal.solve(solver=cp.CLARABEL)
    return w.value


def logistic(problem: Logistic) -> Any:
    """The minimiser of the logistic CVaR."""
    import cvxpy as cp

    w, s = cp.Variable(problem.data.shape[-1]), cp.Variable()
    losses = cp.hstack([cp.sum(cp.logistic(-z @ w)) / len(z) for z in problem.data.numpy()])
    tail = s + cp.sum(cp.pos(losses - s)) / (problem.ratio * problem.total)
    goal = cp.Problem(cp.Minimize(problem.decay / 2 * cp.sum_squares(w) + tail))
    goal.solve(solver=cp.CLARABEL)
    return w.value
