"""SSG: the switching subgradient method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from .. import _checks
from .._schedules import Schedule
from ..constraints import Switching
from ..optim import PolyakStep, SwitchingOptimizer
from ..previous import parameters_of
from ..terms.limits import Tolerance
from ._common import Auto

__all__ = ["ssg"]


def ssg(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    threshold: Schedule | Auto = "auto",
    constraint_optimizer: torch.optim.Optimizer | Literal["polyak"] | None = None,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    process_group: Any = "auto",
) -> Switching:
    r"""SSG: switching subgradient steps (Huang and Lin 2023).

    With :math:`\hat g = \max_i g_i(w_t;\mathcal B) - \text{tolerance}_i` and its index i*,

    .. math::
        w_{t+1} = \begin{cases}
            \Pi_X\bigl(w_t - \eta_t\nabla g_0(w_t)\bigr) & \hat g \le \epsilon_t, \; t\in I \\
            \Pi_X\bigl(w_t - \eta_t\nabla g_{i^*}(w_t)\bigr) & \text{else}, \; t\in J
        \end{cases}

    Output: w_tau with tau in I, tau >= S, with probability proportional to eta_tau, which
    `objective.output_iterate()` keeps from the step S on at which it is called. The projection onto
    X is `fcco.project_after_step`. The multipliers are not part of the method; `multipliers()`
    estimates them by :math:`\nu_i = \sum_{t\in J, i^*=i}\eta_t / \sum_{t\in I}\eta_t`, with the
    sizes of the steps made (with Adam, its step size is taken for that).

    Step `objective.optimizer`; pass an independent batch for the gradient as
    `objective(inner, gradient=other)`.

    Args:
        optimizer: for steps on g_0; lr is eta_t.
        threshold: eps_t, a number or a function of the step; `"auto"` is the measured standard
            deviation of the worst constraint's batch values.
        constraint_optimizer: for steps on the worst constraint: `"polyak"` (the step
            g / |grad g|^2, for weakly convex constraints), an optimizer over the same parameters,
            or None: the first one, which must then be plain SGD.

    The others as in `constrained`.

    Example:
        min (w - 1)^2 / 2 subject to w <= 0.3: the multiplier is 0.7.

        >>> import torch
        >>> from fcco.methods import ssg
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> objective = ssg(model, optimizer, 1, threshold=1e-3)
        >>> def loss_and_constraint():
        ...     w = model.weight.view(1)
        ...     return (w - 1).square().sum() / 2, w - 0.3
        >>> def train(steps):
        ...     for _ in range(steps):
        ...         objective(loss_and_constraint).backward()
        ...         objective.optimizer.step(); objective.optimizer.zero_grad()
        >>> train(300)
        >>> output = objective.output_iterate("average")
        >>> train(700)
        >>> with output.applied():
        ...     bool((model.weight - 0.3).abs() < 0.01)
        True
        >>> bool((objective.multipliers() - 0.7).abs() < 0.1)
        True

    References:
        Y. Huang and Q. Lin, Oracle complexity of single-loop switching subgradient methods for
        non-smooth weakly convex functional constrained optimization, NeurIPS 2023. Nearly
        eps-stationary after O(eps^-4) steps with exact values, O(eps^-8) samples with noisy ones
        (batches of O(eps^-4) for the switch). Assumes g_0 weakly convex, subgradients bounded by
        M, and g_i convex with a Slater point (eta = eps_t/M^2, eps_t of order eps^2), or weakly
        convex (rho) with subgradients of max_i g_i of norm at least nu where it is violated
        (eta = nu/(4M^2) min{eps^2/M, nu/(4 rho)}, eps_t = M^2 eta, Polyak steps).
    """
    if isinstance(constraint_optimizer, str):
        _checks.one_of("ssg", "constraint_optimizer", constraint_optimizer, ("polyak",))
        constraint_optimizer = PolyakStep(parameters_of(optimizer))
    return Switching(
        model, SwitchingOptimizer(optimizer, constraint_optimizer), constraints,
        threshold=threshold, tolerance=tolerance, margin=margin, process_group=process_group,
    )  # fmt: skip
