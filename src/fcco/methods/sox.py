"""SOX: a smooth outer function, a moving average, momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from .. import _checks
from .._schedules import CosineRamp
from ..constraints import ConstrainedObjective
from ..inputs import known_settings
from ..objective import Compositional
from ..outer import AbstractOuter, SquaredHinge
from ..terms import AbstractTerm
from ..terms.limits import Tolerance
from ._common import coupled, penalized

__all__ = ["sox", "squared_hinge_penalty"]


@known_settings("correction")
def sox(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: AbstractOuter,
    num_inner: int,
    *,
    gamma: float = 0.1,
    read: Literal["old", "new"] = "old",
    dim: int | None = None,
    process_group: Any = "auto",
    **options: Any,
) -> Compositional:
    r"""SOX: a smooth outer function, a moving average, momentum.

    .. math::
        u_{i,t+1} &= (1-\gamma)u_{i,t} + \gamma g_i(w_t;\mathcal B), && i\in\mathcal B_1^t \\
        v_{t+1} &= (1-\beta)v_t + \beta\,\frac{1}{B_1}\sum_{i\in\mathcal B_1^t}
            \nabla g_i(w_t;\mathcal B)\,\nabla f(u_{i,t}), \qquad w_{t+1} = w_t - \eta v_{t+1}

    The last line is your optimizer, `momentum_type(lr=eta, beta=beta)`. With gamma = 1, beta = 1
    and `read="new"` it is BSGD, the plug-in gradient, biased by the noise.

    Args:
        outer: f, smooth, such as `SquaredHinge`.
        read: `"old"` uses u_{i,t} in the gradient, unbiased with one batch; `"new"` uses
            u_{i,t+1}, as the authors' code does.

    The others as in `sonex`.

    Example:
        >>> import torch, fcco
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> optimizer = fcco.momentum_type(model.parameters(), lr=0.1, beta=0.5)
        >>> objective = fcco.sox(model, optimizer, fcco.SquaredHinge(), 2, gamma=0.5)
        >>> loss = objective(lambda: model.weight.view(2) - 0.1)
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()
        >>> fcco.sox(model, optimizer, fcco.Hinge(), 2)
        Traceback (most recent call last):
        ValueError: Hinge(scale=1.0) is not compatible with sox: it must be smooth; missing: smooth.

    References:
        B. Wang, T. Yang, Finite-sum coupled compositional stochastic optimization: theory and
        applications, ICML 2022: an eps-stationary point after O(n / (B1 B2) eps^-4) steps, for
        smooth Lipschitz f and g_i.
    """
    _checks.requires("sox", outer, "smooth")
    # Without a correction there is no evaluation at w_{t-1}, and no copy of it is kept.
    return coupled(
        "sox", model, optimizer, outer, num_inner, gamma=gamma, correction=0.0, read=read, dim=dim,
        process_group=process_group, **options,
    )  # fmt: skip


def squared_hinge_penalty(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    penalty: float,
    gamma: float = 0.1,
    read: Literal["old", "new"] = "new",
    ramp_steps: int = 0,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    objective: AbstractTerm | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **options: Any,
) -> ConstrainedObjective:
    r"""SOX on a squared hinge penalty: moving averages of the constraints (Li et al. 2024).

    .. math::
        u_{k,t+1} &= (1-\gamma)u_{k,t} + \gamma h_k(w_t;\mathcal B) && k\in\mathcal B_1^t \\
        G_t &= \nabla g_0(w_t) + \frac1{B_1}\sum_{k\in\mathcal B_1^t}
            \rho\,[u_{k,t+1}]_+\,\nabla h_k(w_t;\mathcal B), \qquad
        \min_w\; g_0(w) + \frac1m\sum_{k=1}^m \frac\rho2 [h_k(w)]_+^2

    In the paper h_k(w) = L_k(w) - L_k(w_old): no protected task may get worse. `ReferenceLosses`
    stores the old per-sample losses, `TaskHeads` gives each task a head of its own.

    A constraint with multiplier nu* ends about m nu*/rho above its limit, at any rho: the penalty
    is not exact. Without a correction the loop lags: it oscillates unless
    lr (rho/m) |grad h|^2 (1/gamma + 1/beta) is at most about 1.

    Args:
        optimizer: your optimizer (the authors: AdamW).
        penalty: rho (the paper's beta; the authors' code multiplies it by the temperature tau).
        gamma: gamma_2, weight of the new value (the authors: 0.8). The squared hinge penalises
            the noise of u, since E[u]_+^2 > [E u]_+^2: keep gamma small when batches are.
        read: `"new"` uses u_{t+1} with the gradient of the same batch, as the authors' code does;
            `"old"` uses u_t, which is unbiased.
        ramp_steps: raise rho from 0 along half a cosine over so many steps (the authors' option
            does so over all epochs); 0 is a constant rho.

    The others as in `constrained_sonex`.

    Example:
        >>> import torch, fcco
        >>> from fcco.methods import squared_hinge_penalty
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        >>> objective = squared_hinge_penalty(
        ...     model, optimizer, ["bound"], penalty=20.0, gamma=1.0)
        >>> def loss_and_constraint():
        ...     w = model.weight.view(())
        ...     return (w - 1).square() / 2, {"bound": w - 0.3}
        >>> for _ in range(300):
        ...     objective(loss_and_constraint).backward()
        ...     optimizer.step(); optimizer.zero_grad()
        >>> {name: round(value, 4) for name, value in objective.multipliers().items()}
        {'bound': 0.6667}

    References:
        G. Li, W. Yu, Y. Yao, W. Tong, Y. Liang, Q. Lin and T. Yang, Model developmental safety: a
        safety-centric method and applications in vision-language models, 2024 (arXiv:2410.03955).
        O(eps^-7) steps to an eps-KKT point, with rho of order m/eps. Assumes g_0 and h_k smooth
        and the least singular value of their Jacobian at least delta wherever one is violated.
    """
    call = "squared-hinge"
    _checks.positive(call, "penalty", penalty)
    _checks.integer(call, "ramp_steps", ramp_steps, 0)
    return penalized(
        call, model, optimizer, constraints, SquaredHinge(penalty),
        weight=CosineRamp(ramp_steps) if ramp_steps else 1.0, gamma=gamma, correction=0.0,
        read=read, tolerance=tolerance, margin=margin, objective=objective,
        process_group=process_group, offload=offload, **options,
    )  # fmt: skip
