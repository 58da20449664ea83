"""Single-loop recipes: an outer function, a tracker, one gradient per step."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from .. import _checks
from ..objective import Compositional
from ..outer.base import AbstractOuter
from ..terms import CoupledTerm, Smoothing
from ..tracker import for_model
from .facts import InnerKind, dimension, monotone_if_weakly_convex, smooth_inner

__all__ = ["sonex", "sonx", "sox"]


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
    inner: InnerKind = "smooth",
    process_group: Any = "auto",
    offload: bool = False,
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
        inner: what the g_i are; SONEX refuses `"weakly_convex"` ones, which have kinks.
        process_group: see `Compositional`.
        offload: see `Compositional`.
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
    smooth_inner("sonex", inner)
    return _single_loop(
        "sonex",
        model,
        optimizer,
        outer,
        num_inner,
        smoothing,
        dim,
        process_group,
        offload,
        gamma=gamma,
        correction=correction,
        read=read,
        **options,
    )


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
    inner: InnerKind = "smooth",
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
        model: your model.
        optimizer: plain SGD is the method; others are allowed.
        outer: f, weakly convex and Lipschitz; non-decreasing when the g_i have kinks.
        num_inner: n.
        gamma: weight of the new value in u.
        correction: gamma'; see `InnerTracker`.
        read: `"old"` uses u_{i,t} in G_t as printed, `"new"` uses u_{i,t+1}.
        dim: d1, when `outer` leaves it open.
        inner: `"smooth"`, or `"weakly_convex"` when the g_i have kinks.
        process_group: see `Compositional`.
        offload: see `Compositional`.
        options: further options of `InnerTracker`.

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
        smooth), g_i(.; xi) Lipschitz in mean square. Blocks are sampled, one inner batch per
        step, one more evaluation at w_{t-1} without gradient.
    """
    monotone_if_weakly_convex("sonx", outer, inner)
    return _single_loop(
        "sonx",
        model,
        optimizer,
        outer,
        num_inner,
        0.0,
        dim,
        process_group,
        offload,
        gamma=gamma,
        correction=correction,
        read=read,
        **options,
    )


def sox(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: AbstractOuter,
    num_inner: int,
    *,
    gamma: float = 0.1,
    read: Literal["old", "new"] = "old",
    dim: int | None = None,
    inner: InnerKind = "smooth",
    process_group: Any = "auto",
    **options: Any,
) -> Compositional:
    r"""SOX: a smooth outer function, a moving average, momentum.

    .. math::
        u_{i,t+1} &= (1-\gamma)u_{i,t} + \gamma g_i(w_t;\mathcal B), && i\in\mathcal B_1^t \\
        v_{t+1} &= (1-\beta)v_t + \beta\,\frac{1}{B_1}\sum_{i\in\mathcal B_1^t}
            \nabla g_i(w_t;\mathcal B)\,\nabla f(u_{i,t}), \qquad w_{t+1} = w_t - \eta v_{t+1}

    The last line is your optimizer, `momentum_type(lr=eta, beta=beta)`. (Code that uses SGD with
    momentum 1 - beta and no dampening takes the same direction with steps 1/beta times as long.)
    With gamma = 1, beta = 1 and `read="new"` it is BSGD, the plug-in gradient, biased by the noise.

    Args:
        model: your model.
        optimizer: your optimizer.
        outer: f, smooth, such as `SquaredHinge` or `TauLog`.
        num_inner: n.
        gamma: weight of the new value in u.
        read: `"old"` uses u_{i,t} in the gradient, unbiased with one batch; `"new"` uses
            u_{i,t+1}, as the authors' code does.
        dim: d1, when `outer` leaves it open.
        inner: SOX refuses `"weakly_convex"` inner functions.
        process_group: see `Compositional`.
        options: further options of `InnerTracker`.

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
        smooth Lipschitz f and g_i. Blocks are sampled, one inner batch per step, no further
        evaluation.
    """
    _checks.requires("sox", outer, "smooth")
    smooth_inner("sox", inner)
    return _single_loop(
        "sox",
        model,
        optimizer,
        outer,
        num_inner,
        0.0,
        dim,
        process_group,
        False,  # nothing to keep: no correction
        gamma=gamma,
        correction=0.0,
        read=read,
        **options,
    )


def _single_loop(
    method: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: AbstractOuter,
    num_inner: int,
    smoothing: Smoothing,
    dim: int | None,
    process_group: Any,
    offload: bool,
    **options: Any,
) -> Compositional:
    """The engine that all single-loop methods share."""
    tracker = for_model(model, num_inner, dimension(method, outer, dim), **options)
    term = CoupledTerm(outer, tracker, smoothing=smoothing)
    return Compositional(model, optimizer, term, process_group=process_group, offload=offload)
