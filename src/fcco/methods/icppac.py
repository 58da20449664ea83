"""ICPPAC: inexact constrained proximal points, solved with ConEx."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import _checks
from ..constraints import ConstantConEx, ProximalLagrangian
from ..terms.limits import Tolerance

__all__ = ["icppac"]


def icppac(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    proximal: float,
    inner_steps: int,
    schedule: ConstantConEx | None = None,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    process_group: Any = "auto",
) -> ProximalLagrangian:
    r"""ICPPAC: inexact constrained proximal points, solved with ConEx.

    With :math:`\phi_i = g_i - \text{tolerance}_i + \mu\|\cdot - w_k\|^2` (no 1/2, and no tolerance
    in phi_0), round k starts at x_{-1} = x_0 = w_k, makes T steps

    .. math::
        \ell_t &= \phi(x_{t-1};\bar\xi_t) + \phi'(x_{t-1};\bar\xi_t)(x_t - x_{t-1}), \qquad
        s_t = (1+\theta)\ell_t - \theta\ell_{t-1} \\
        y_{t+1} &= [y_t + s_t/\tau]_+, \qquad
        x_{t+1} = \Pi_X\Bigl(x_t - \eta\bigl(\phi_0'
            + \textstyle\sum_i y_{t+1,i}\phi_i'\bigr)(x_t;\xi_t)\Bigr)

    (l_{-1} = l_0) and ends at the average of x_1, ..., x_T. Step `objective.optimizer`; y is
    `multipliers()`. The method draws two batches per step: pass
    `objective(dual_batch, gradient=primal_batch)`; with one function, one batch serves both.

    Args:
        optimizer: makes the primal steps; plain SGD is the method. Its lr is eta (a step; the
            source's eta is its inverse).
        proximal: mu; convex rounds need 2 mu at least the weak convexity of every function.
        inner_steps: T.
        schedule: theta and tau, and whether y is carried from round to round (it is by default):
            constants, as in the authors' experiments.

    The others as in `constrained`.

    Example:
        >>> import torch
        >>> from fcco.methods import icppac
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> objective = icppac(model, optimizer, 1, proximal=0.5, inner_steps=100)
        >>> def loss_and_constraint():
        ...     w = model.weight.view(1)
        ...     return (w - 1).square().sum() / 2, w - 0.3
        >>> for _ in range(10 * 100):
        ...     objective(loss_and_constraint).backward()
        ...     objective.optimizer.step(); objective.optimizer.zero_grad()
        >>> round(model.weight.item(), 2), objective.multipliers().round(decimals=2).item()
        (0.3, 0.7)

    References:
        D. Boob, Q. Deng and G. Lan, Stochastic first-order methods for convex and nonconvex
        functional constrained optimization, Mathematical Programming 197, 2023. Nearly eps-KKT
        after O(eps^-6) samples for non-smooth weakly convex functions. Assumes bounded
        subgradients and bounded noise, and a constraint qualification that holds at all
        regularised problems alike (bounded multipliers), which a uniform Slater margin gives.
    """
    _checks.positive("icppac", "proximal", proximal)
    rule = ConstantConEx() if schedule is None else schedule
    if not isinstance(rule, ConstantConEx):
        raise TypeError(
            f"`icppac(schedule=...)` must be a ConstantConEx but is: {type(rule).__name__}."
        )
    objective = ProximalLagrangian(
        model, optimizer, constraints, rule=rule, coefficient=proximal,
        inner_steps=inner_steps, tolerance=tolerance, margin=margin, process_group=process_group,
    )  # fmt: skip
    objective.method = "icppac"
    return objective
