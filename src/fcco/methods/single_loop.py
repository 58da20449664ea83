"""Single-loop recipes: an outer function, a tracker, one gradient per step."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from ..objective import Compositional
from ..outer.base import AbstractOuter
from ..terms import CoupledTerm, Smoothing
from ..tracker import for_model
from .facts import dimension

__all__ = ["sonex"]


def sonex(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: AbstractOuter,
    num_inner: int,
    *,
    smoothing: Smoothing,
    gamma: float = 0.1,
    correction: float | Literal["theory", "auto"] = "auto",
    read: Literal["old", "new"] = "old",
    dim: int | None = None,
    process_group: Any = "auto",
    **options: Any,
) -> Compositional:
    r"""SONEX: smoothed outer function, MSVR tracker, momentum or Adam (paper, Algorithm 1).

    .. math::
        u_{i,t+1} &= (1-\gamma)u_{i,t} + \gamma g_i(w_t;\mathcal B)
            + \gamma'\bigl(g_i(w_t;\mathcal B) - g_i(w_{t-1};\mathcal B)\bigr)
            && i\in\mathcal B_1^t \\
        G_t &= \frac{1}{B_1}\sum_{i\in\mathcal B_1^t}
            \nabla g_i(w_t;\mathcal B)\,\nabla f_\lambda(u_{i,t}) \\
        v_{t+1} &= (1-\beta)v_t + \beta G_t, \qquad w_{t+1} = w_t - \eta v_{t+1}

    The last line is your optimizer: `momentum_type`, `adam_type`, or any other.

    Args:
        model: your model.
        optimizer: your optimizer.
        outer: f, weakly convex (rho_f), such as `Hinge()`.
        num_inner: n, the number of blocks.
        smoothing: lambda, below 1/rho_f; or a schedule.
        gamma: weight of the new value in u.
        correction: gamma'; see `InnerTracker`.
        read: `"old"` uses u_{i,t} in G_t as printed, `"new"` uses u_{i,t+1}.
        dim: d1, when `outer` leaves it open.
        process_group: see `Compositional`.
        options: further options of `InnerTracker`.

    Example:
        Find the point with the least mean distance to noisy data: f = |.|, g_i(w) = w_i - c_i.

        >>> import torch, fcco
        >>> _ = torch.manual_seed(0)
        >>> c, model = torch.tensor([1.0, -2.0]), torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = fcco.momentum_type(model.parameters(), lr=0.02, beta=0.2)
        >>> objective = fcco.sonex(model, optimizer, fcco.Absolute(), 2, smoothing=0.1)
        >>> for _ in range(1000):
        ...     noise = 0.1 * torch.randn(2)
        ...     loss = objective(lambda: model.weight.view(2) - c + noise)
        ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
        >>> bool((model.weight.view(2) - c).abs().max() < 0.1)
        True

    References:
        Paper, Algorithm 1 and Theorem `thm:ema_msvr`: an approximate eps-stationary point after
        O(n / (B1 sqrt(B2)) eps^-5) steps.
    """
    tracker = for_model(
        model,
        num_inner,
        dimension("sonex", outer, dim),
        gamma=gamma,
        correction=correction,
        read=read,
        **options,
    )
    term = CoupledTerm(outer, tracker, smoothing=smoothing)
    return Compositional(model, optimizer, term, process_group=process_group)
