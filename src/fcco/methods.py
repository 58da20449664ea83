"""Recipes: each method is an outer function, a tracker and perhaps a proximal point.

A recipe returns an objective; your optimizer steps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import checks
from .objective import Compositional
from .outer.base import AbstractOuter
from .proximal_point import ProximalPoint
from .terms import CoupledTerm, Smoothing
from .tracker import for_model

__all__ = ["adam_type", "alexr2", "momentum_type", "sonex"]


def momentum_type(
    params: Iterable[Tensor], lr: float, beta: float = 0.1, **options: Any
) -> torch.optim.SGD:
    r"""The paper's momentum update as a torch optimizer (Alg. 1, lines 10-11).

    .. math:: v_{t+1} = (1-\beta) v_t + \beta G_t, \qquad w_{t+1} = w_t - \eta v_{t+1}

    This is SGD with `momentum = dampening = 1 - beta`, whose first buffer is v = G_0. (SGD
    without dampening goes the same way with steps 1/beta times as long.)

    Args:
        params: the parameters.
        lr: eta.
        beta: weight of the new gradient; 1 is plain SGD.
        options: further options of `torch.optim.SGD`.
    """
    checks.in_interval("momentum_type", "beta", beta, 0.0, 1.0, open_low=True)
    return torch.optim.SGD(params, lr=lr, momentum=1 - beta, dampening=1 - beta, **options)


def adam_type(
    params: Iterable[Tensor], lr: float, beta: float = 0.1, beta2: float = 0.001, **options: Any
) -> torch.optim.AdamW:
    r"""The paper's Adam-type update as a torch optimizer.

    .. math::
        s_{t+1} = (1-\beta')s_t + \beta' G_t\circ G_t, \qquad
        w_{t+1} = w_t - \eta\,\hat v_{t+1}/(\sqrt{\hat s_{t+1}} + \epsilon)

    with bias corrections and decoupled weight decay: AdamW with `betas = (1-beta, 1-beta2)`.

    Args:
        params: the parameters.
        lr: eta.
        beta: weight of the new gradient.
        beta2: beta', weight of the new squared gradient.
        options: further options of `torch.optim.AdamW` (`weight_decay` is 0 unless given).
    """
    checks.in_interval("adam_type", "beta", beta, 0.0, 1.0, open_low=True)
    checks.in_interval("adam_type", "beta2", beta2, 0.0, 1.0, open_low=True)
    options.setdefault("weight_decay", 0.0)
    return torch.optim.AdamW(params, lr=lr, betas=(1 - beta, 1 - beta2), **options)


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
        _dimension("sonex", outer, dim),
        gamma=gamma,
        correction=correction,
        read=read,
        **options,
    )
    term = CoupledTerm(outer, tracker, smoothing=smoothing)
    return Compositional(model, optimizer, term, process_group=process_group)


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
    process_group: Any = "auto",
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
        process_group: see `Compositional`.
        options: further options of `InnerTracker`.

    References:
        Paper, Algorithm 2 with line 13 corrected (docs/mathematics.md): nearly
        eps-stationary after O(n / (B1 B2) eps^-5) inner steps.
    """
    checks.requires("alexr2", outer, "convex")
    checks.one_of("alexr2", "dual", dual, ("u", "y"))
    checks.in_interval("alexr2", "theta", theta, 0.0, 1.0)
    checks.positive("alexr2", "smoothing", smoothing)
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
        _dimension("alexr2", outer, dim),
        gamma=gamma,
        correction=theta * gamma,
        **options,
    )
    proximal = ProximalPoint(optimizer, nu=nu, eta=eta, inner_steps=inner_steps)
    term = CoupledTerm(outer, tracker, smoothing=smoothing)
    return Compositional(model, proximal, term, process_group=process_group)


def _dimension(method: str, outer: AbstractOuter, dim: int | None) -> int:
    dimension = outer.dim if dim is None else dim
    if dimension is None:
        raise ValueError(f"`{method}(dim=...)` is needed: {outer!r} takes vectors of any length.")
    return dimension
