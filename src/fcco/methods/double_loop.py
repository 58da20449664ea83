"""The double-loop recipe: ALEXR2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from .. import _checks
from ..objective import Compositional
from ..outer.base import AbstractOuter
from ..proximal_point import ProximalPoint
from ..terms import CoupledTerm
from ..tracker import for_model
from .facts import InnerKind, dimension, monotone_if_weakly_convex

__all__ = ["alexr2"]


def alexr2(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: AbstractOuter,
    num_inner: int,
    *,
    smoothing: float,
    nu: float,
    eta: float,
    inner_steps: int | Callable[[int], int] = 5,
    gamma: float = 0.8,
    theta: float = 0.125,
    dual: Literal["u", "y"] = "u",
    dim: int | None = None,
    inner: InnerKind = "smooth",
    process_group: Any = "auto",
    offload: bool = False,
    **options: Any,
) -> Compositional:
    r"""ALEXR2: ALEXR's extrapolated tracker inside a proximal-point loop (paper, Algorithm 2).

    .. math::
        \tilde g_i &= g_i(z_{t,k};\mathcal B) + \theta\bigl(g_i(z_{t,k};\mathcal B)
            - g_i(z_{t,k-1};\mathcal B)\bigr), \qquad
        u_i^+ = (1-\hat\gamma)u_i + \hat\gamma\tilde g_i, \quad y_i = \nabla f_\lambda(u_i^+) \\
        z_{t,k+1} &= \frac{\nu z_{t,k} + \eta w_t - \eta\nu G_{t,k}}{\eta+\nu}, \qquad
        G_{t,k} = \frac1{B_1}\sum_i \nabla g_i(z_{t,k};\tilde{\mathcal B})\,y_i \\
        G_t &= (w_t - z_{t,K_t})/\nu, \qquad
        v_{t+1} = (1-\beta)v_t + \beta G_t, \quad w_{t+1} = w_t - \alpha v_{t+1}

    Your optimizer is the outer one (last line). Step `objective.optimizer`, a `ProximalPoint`: it
    makes the inner steps and calls yours once per round. Pass an independent batch for the
    gradient as `objective(inner, index, gradient=other)`; without it one batch serves both.

    Args:
        model: your model.
        optimizer: the outer optimizer (`momentum_type` with step alpha, Adam, ...).
        outer: f, convex.
        num_inner: n.
        smoothing: lambda.
        nu: proximal parameter, below 1/rho_F.
        eta: inner step size.
        inner_steps: K_t.
        gamma: gamma-hat, weight of the extrapolated value in u (dual step gamma / (1 - gamma)).
        theta: extrapolation.
        dual: `"u"` tracks u; `"y"` keeps the dual variable in its box (scalar f whose conjugate
            lives on an interval: hinge, absolute value, pinball).
        dim: d1, when `outer` leaves it open.
        inner: `"smooth"`, or `"weakly_convex"` when the g_i have kinks (f must not decrease then).
        process_group: see `Compositional`.
        offload: see `Compositional`.
        options: further options of `InnerTracker`.

    References:
        Paper, Algorithm 2 with line 13 corrected (docs/mathematics.md): nearly
        eps-stationary after O(n / (B1 B2) eps^-5) inner steps.
    """
    _checks.requires("alexr2", outer, "convex")
    monotone_if_weakly_convex("alexr2", outer, inner)
    _checks.one_of("alexr2", "dual", dual, ("u", "y"))
    _checks.in_interval("alexr2", "theta", theta, 0.0, 1.0)
    _checks.positive("alexr2", "smoothing", smoothing)
    if dual == "y":
        zone = outer.dual_zone(smoothing)
        if zone is None:
            raise ValueError(
                f"`alexr2(dual='y')` needs an outer function whose conjugate lives on an interval "
                f"(hinge, absolute value, pinball), which {outer!r} does not declare; use 'u'."
            )
        options["bounds"] = zone
    options.setdefault("read", "new")
    tracker = for_model(
        model,
        num_inner,
        dimension("alexr2", outer, dim),
        gamma=gamma,
        correction=theta * gamma,
        **options,
    )
    proximal = ProximalPoint(optimizer, nu=nu, eta=eta, inner_steps=inner_steps)
    term = CoupledTerm(outer, tracker, smoothing=smoothing)
    return Compositional(model, proximal, term, process_group=process_group, offload=offload)
