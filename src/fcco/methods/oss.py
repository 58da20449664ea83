"""OSS: quadratically regularised subproblems, solved with virtual queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import _checks
from ..constraints import ProximalLagrangian, VirtualQueue
from ..terms.limits import Tolerance

__all__ = ["oss"]


def oss(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    proximal: float,
    inner_steps: int,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    process_group: Any = "auto",
) -> ProximalLagrangian:
    r"""OSS: quadratically regularised subproblems, solved with virtual queues.

    With :math:`\phi_i = g_i - \text{tolerance}_i + \tfrac{\hat\rho}2\|\cdot - w_k\|^2` (and no
    tolerance in phi_0), round k starts at x_0 = w_k, y = 0, makes T steps

    .. math::
        x_{t+1} &= \Pi_X\Bigl(x_t - \tfrac1{2\sqrt T}\bigl(\nabla\phi_0
            + \textstyle\sum_i y_i\nabla\phi_i\bigr)(x_t;\xi_t)\Bigr) \\
        y_i &\leftarrow \Bigl[y_i + \tfrac1{\sqrt T}\bigl(\phi_i(x_t;\xi_t)
            + \langle\nabla\phi_i(x_t;\xi_t), x_{t+1}-x_t\rangle\bigr)\Bigr]_+

    and ends at w_{k+1}, the mean of x_1, ..., x_T (the source averages x_0, ..., x_{T-1}, which
    differs by (x_T - x_0)/T). Here y = Q/V with the queues Q, V = sqrt(T) and alpha = T of the
    source. Since y starts at 0 and ends at the sum of the violations over sqrt(T), w_{k+1} is about
    nu*/sqrt(T) above a limit whose multiplier is nu*: choose T, or `margin`, by that law. Step
    `objective.optimizer`; y is `multipliers()`.

    Args:
        optimizer: makes the primal steps; plain SGD with lr=1 is the printed method, another lr
            scales its step 1/(2 sqrt(T)).
        proximal: rho-hat, above the weak convexity rho of g_0 and of all g_i; 2 rho is usual.
        inner_steps: T.

    The others as in `constrained`.

    Example:
        >>> import torch
        >>> from fcco.methods import oss
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> objective = oss(model, optimizer, 1, proximal=1.0, inner_steps=400)
        >>> def loss_and_constraint():
        ...     w = model.weight.view(1)
        ...     return (w - 1).square().sum() / 2, w - 0.3
        >>> for _ in range(10 * 400):
        ...     objective(loss_and_constraint).backward()
        ...     objective.optimizer.step(); objective.optimizer.zero_grad()
        >>> objective.optimizer.round, bool((model.weight - 0.3).abs() < 0.05)
        (10, True)

    References:
        R. Ma, Q. Lin and T. Yang, Quadratically regularized subgradient methods for weakly convex
        optimization with weakly convex constraints, ICML 2020 (the rounds). H. Yu, M. Neely and
        X. Wei, Online convex optimization with stochastic constraints, NeurIPS 2017 (the steps).
        Nearly eps-KKT after O(eps^-2) rounds of O(eps^-4) steps. Assumes weakly convex functions
        with bounded subgradients, bounded X, a feasible start, and a Slater point of every
        regularised problem with a common margin.
    """
    _checks.positive("oss", "proximal", proximal)
    # A round adds c |. - w_k|^2 to every function; the source writes (rho-hat/2) |. - w_k|^2.
    objective = ProximalLagrangian(
        model, optimizer, constraints, rule=VirtualQueue(), coefficient=proximal / 2,
        inner_steps=inner_steps, tolerance=tolerance, margin=margin, process_group=process_group,
    )  # fmt: skip
    objective.method = "oss"
    return objective
