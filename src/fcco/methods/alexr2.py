"""ALEXR2: ALEXR's extrapolated tracker inside a proximal-point loop (paper, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .. import _checks
from .._schedules import Smoothing
from ..constraints import ConstrainedObjective
from ..inputs import known_settings
from ..objective import Compositional
from ..optim import ProximalPoint
from ..outer import AbstractOuter
from ..previous import unwrap
from ..terms import AbstractTerm
from ..terms.coupled import as_lambda
from ..terms.limits import Tolerance
from ..tracker import GAMMA, THETA
from ._common import (
    Auto,
    automatic,
    coupled,
    multiplied,
    penalized,
    penalty_function,
)

__all__ = ["alexr2", "constrained_alexr2"]


@known_settings("correction")
def alexr2(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: AbstractOuter,
    num_inner: int,
    *,
    smoothing: Smoothing = "auto",
    nu: float | Auto = "auto",
    eta: float | Auto = "auto",
    inner_steps: int | Callable[[int], int] = 5,
    gamma: float = GAMMA,
    theta: float = THETA,
    dim: int | None = None,
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
        optimizer: the outer optimizer (`momentum_type` with step alpha, Adam, ...).
        outer: f, convex; non-decreasing too when the g_i have kinks.
        nu: proximal parameter, below 1/rho_F; `"auto"` is twice the learning rate that `optimizer`
            starts with.
        eta: inner step size; `"auto"` is that learning rate.
        inner_steps: K_t.
        gamma: gamma-hat, weight of the extrapolated value in u (dual step gamma / (1 - gamma)).
        theta: extrapolation.

    The others as in `sonex`.

    References:
        Paper, Algorithm 2 with line 13 corrected (docs/concepts/mathematics.md): nearly
        eps-stationary after O(n / (B1 B2) eps^-5) inner steps.
    """
    tracker = _tracker_options(outer, smoothing, gamma, theta, options)
    proximal = _proximal(optimizer, nu, eta, inner_steps)
    return coupled(
        "alexr2", model, proximal, outer, num_inner, smoothing=smoothing, dim=dim,
        process_group=process_group, offload=offload, **tracker,
    )  # fmt: skip


def constrained_alexr2(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    smoothing: Smoothing | Auto = "auto",
    penalty: float | Auto = "auto",
    nu: float | Auto = "auto",
    eta: float | Auto = "auto",
    inner_steps: int | Callable[[int], int] | Auto = "auto",
    gamma: float | Auto | None = None,
    theta: float | None = None,
    outer: AbstractOuter | None = None,
    dim: int | None = None,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    objective: AbstractTerm | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **options: Any,
) -> ConstrainedObjective:
    """ALEXR2 on a smoothed hinge penalty: the settings of `alexr2` and of `constrained_sonex`.

    Args:
        smoothing: as in `constrained_sonex`: without it and `penalty`, the constraints are a
            `fcco.terms.MultiplierTerm`.
        penalty: likewise.
        nu: as in `alexr2`; `"auto"` is twice the learning rate that `optimizer` starts with.
        eta: `"auto"` is that learning rate.
        inner_steps: `"auto"` is 2 without `smoothing` and `penalty`, 5 with.
        gamma: None: 0.2 without `smoothing` and `penalty`, 0.8 with.
        theta: None: 0 without, 0.125 with.
    """
    alone = automatic("alexr2", {"smoothing": smoothing, "penalty": penalty}, outer)
    if alone and theta is not None:
        raise ValueError(
            "`alexr2(theta=...)` needs numbers as `smoothing` and `penalty`: without them the "
            "values are averaged."
        )
    if inner_steps == "auto":
        inner_steps = 2 if alone else 5
    proximal = _proximal(optimizer, nu, eta, inner_steps)
    shared: dict[str, Any] = {
        "dim": dim, "tolerance": tolerance, "margin": margin, "objective": objective,
        "process_group": process_group, "offload": offload,
    }  # fmt: skip
    if alone:
        return multiplied("alexr2", model, proximal, constraints, gamma=gamma, **shared, **options)
    function = penalty_function("alexr2", outer, None if penalty == "auto" else penalty)
    number: Any = smoothing
    tracker = _tracker_options(
        function,
        number,
        GAMMA if gamma is None else gamma,  # type: ignore[arg-type]
        THETA if theta is None else theta,
        options,
    )
    return penalized(
        "alexr2", model, proximal, constraints, function, smoothing=number, **shared, **tracker
    )


def _proximal(
    optimizer: torch.optim.Optimizer,
    nu: float | Auto,
    eta: float | Auto,
    inner_steps: int | Callable[[int], int],
) -> ProximalPoint:
    """The loop; an inner step goes as far as one of the optimizer, and a round twice as far."""
    lr = float(unwrap(optimizer).param_groups[0]["lr"])
    return ProximalPoint(
        optimizer,
        nu=2 * lr if nu == "auto" else nu,
        eta=lr if eta == "auto" else eta,
        inner_steps=inner_steps,
    )


def _tracker_options(
    outer: AbstractOuter,
    smoothing: Smoothing,
    gamma: float,
    theta: float,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The tracker of ALEXR2."""
    _checks.requires("alexr2", outer, "convex")
    _checks.in_interval("alexr2", "theta", theta, 0.0, 1.0)
    smoothing = as_lambda("alexr2", outer, smoothing)
    if isinstance(smoothing, str):
        options = {"measure": True, **options}
    elif not callable(smoothing):
        _checks.positive("alexr2", "smoothing", smoothing)
    # u+ = (1 - gamma) u + gamma (g + theta (g - g_before)): MSVR's form with gamma' = theta gamma.
    return {"read": "new", **options, "gamma": gamma, "correction": theta * gamma}
