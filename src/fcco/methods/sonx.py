"""SONX: a subgradient of the outer function, corrected tracker, plain SGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from ..constraints import ConstrainedObjective
from ..inputs import known_settings
from ..objective import Compositional
from ..outer import AbstractOuter
from ..terms import AbstractTerm
from ..terms.limits import Tolerance
from ._common import coupled, penalized, penalty_function

__all__ = ["hinge_penalty", "sonx"]


@known_settings()
def sonx(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: AbstractOuter,
    num_inner: int,
    *,
    gamma: float = 0.1,
    correction: float | Literal["theory", "auto"] = "auto",
    read: Literal["old", "new"] = "old",
    dim: int | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **options: Any,
) -> Compositional:
    r"""SONX: a subgradient of the outer function itself, MSVR tracker, plain SGD.

    .. math::
        u_{i,t+1} &= (1-\gamma)u_{i,t} + \gamma g_i(w_t;\mathcal B)
            + \gamma'\bigl(g_i(w_t;\mathcal B) - g_i(w_{t-1};\mathcal B)\bigr)
            && i\in\mathcal B_1^t \\
        G_t &= \frac{1}{B_1}\sum_{i\in\mathcal B_1^t}
            \partial g_i(w_t;\mathcal B)\,\partial f(u_{i,t}), \qquad w_{t+1} = w_t - \eta G_t

    SONEX without smoothing and, with `torch.optim.SGD(lr=eta)`, without momentum. At a kink of
    [.]_+ the derivative 0 is taken. In the source gamma is called tau, and gamma' gamma.

    Args:
        optimizer: plain SGD is the method; others are allowed.
        outer: f, weakly convex and Lipschitz; non-decreasing when the g_i have kinks.

    The others as in `sonex`.

    Example:
        >>> import torch, fcco
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> objective = fcco.sonx(model, optimizer, fcco.Hinge(), 2, gamma=0.5)
        >>> loss = objective(lambda: model.weight.view(2).abs() - 0.1)
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()

    References:
        Q. Hu, D. Zhu, T. Yang, Non-smooth weakly-convex finite-sum coupled compositional
        optimization, NeurIPS 2023, Algorithm 1: a nearly eps-stationary point after
        O(n / (B1 sqrt(B2)) eps^-6) steps, for weakly convex f and g_i, f non-decreasing (or g_i
        smooth), g_i(.; xi) Lipschitz in mean square.
    """
    return coupled(
        "sonx", model, optimizer, outer, num_inner, gamma=gamma, correction=correction, read=read,
        dim=dim, process_group=process_group, offload=offload, **options,
    )  # fmt: skip


def hinge_penalty(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    penalty: float | None = None,
    gamma: float = 0.1,
    correction: float | Literal["theory", "auto"] = "auto",
    read: Literal["old", "new"] = "old",
    average: int | None = None,
    outer: AbstractOuter | None = None,
    dim: int | None = None,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    objective: AbstractTerm | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **options: Any,
) -> ConstrainedObjective:
    r"""SONX on a hinge penalty: MSVR tracker, plain SGD (Yang et al. 2025).

    .. math::
        u_{k,t+1} &= (1-\gamma)u_{k,t} + \gamma h_k(w_t;\mathcal B)
            + \gamma'\bigl(h_k(w_t;\mathcal B) - h_k(w_{t-1};\mathcal B)\bigr)
            && k\in\mathcal B_1^t \\
        G_t &= \partial g_0(w_t) + \frac1{B_1}\sum_{k\in\mathcal B_1^t}
            \rho\,1[u_{k,t} > 0]\,\partial h_k(w_t;\mathcal B), \qquad
        w_{t+1} = w_t - \eta G_t

    A single multiplier is 0 or rho/m: at the solution u_k crosses 0 again and again, and
    nu_k = (rho/m) P(u_k > 0). With `average`, `objective.average_multipliers()` is that average
    over time.

    Args:
        optimizer: `torch.optim.SGD` without momentum is the method; others run, without theory.
        gamma: weight of the new value (the authors: 0.8).
        correction: gamma' (the authors: 0.1), see `InnerTracker`.
        average: steps over which to average the multipliers, None not to; some tensor
            operations per step, a noticeable part of the step of a small model.

    The others as in `constrained_sonex`.

    References:
        M. Yang, G. Li, Q. Hu, Q. Lin and T. Yang, Single-loop algorithms for stochastic non-convex
        optimization with weakly-convex constraints, 2025 (arXiv:2504.15243). O(eps^-6) steps to a
        nearly eps-KKT point, with rho > m (C + 1)/delta, constant in eps. Assumes g_0 and h_k
        weakly convex and Lipschitz, h_k(.; xi) mean-Lipschitz, and the least singular value of the
        constraints' subgradients at least delta wherever one is violated.
    """
    problem = penalized(
        "hinge", model, optimizer, constraints, penalty_function("hinge", outer, penalty),
        gamma=gamma, correction=correction, read=read, dim=dim, tolerance=tolerance,
        margin=margin, objective=objective, process_group=process_group, offload=offload,
        **options,
    )  # fmt: skip
    if average is not None:
        problem.keep_average(average)
    return problem
