"""Recursive (SPIDER) estimates of constraints under a smoothed hinge penalty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import _checks
from .._schedules import Smoothing
from ..constraints import ConstrainedObjective
from ..outer import Hinge
from ..terms.limits import Tolerance
from ._common import penalized

__all__ = ["recursive_penalty"]


def recursive_penalty(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    penalty: float,
    smoothing: Smoothing,
    refresh_every: int,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    process_group: Any = "auto",
    **options: Any,
) -> ConstrainedObjective:
    r"""A smoothed hinge penalty on recursive estimates of all constraints (Liu and Xu 2025).

    .. math::
        u_k &= \begin{cases} g(w_k; S_1) & k \bmod q = 0 \\
            u_{k-1} + g(w_k; S_2) - g(w_{k-1}; S_2) & \text{else}\end{cases} \\
        w_{k+1} &= w_k - \alpha\bigl(\zeta_0 + \beta\,\mathrm{clip}(u_k/\nu_s, 0, 1)\,\zeta_g\bigr),
        \qquad \zeta_0 \in \partial g_0,\ \zeta_g \in \partial g \text{ on independent samples}

    The clipped slope is that of the hinge with weight beta smoothed with lambda = nu_s / beta.
    Every q-th step wants a large batch: look at `objective.refresh_due` before you draw one. The
    recursion has no memory of what it missed, so each call must hold all constraints. Give the
    samples of zeta as `objective(inner, gradient=other)`; without them one batch serves both.

    Args:
        optimizer: `torch.optim.SGD` without momentum is the method (lr = alpha).
        penalty: beta.
        smoothing: lambda = nu_s / beta, or a schedule; 0 is the hard hinge.
        refresh_every: q.

    The others as in `constrained_sonex`.

    References:
        W. Liu and Y. Xu, A single-loop SPIDER-type stochastic subgradient method for
        expectation-constrained nonconvex nonsmooth optimization, 2025 (arXiv:2501.19214).
        O(eps^-4) subgradients and O(eps^-6) constraint values to an eps-KKT point, with alpha,
        nu_s of order eps^2, q and S_2 of order eps^-2, S_1 of order eps^-4: the surrogate's error
        beta (u - g)^2 / (2 nu_s) then stays of order eps^2, because E(u - g)^2 is at most
        sigma^2 / S_1 + (q / S_2) C_g^2 alpha^2 M^2 for steps of length alpha M (these orders are
        derived here). Assumes g_0 and g weakly convex, g(.; xi) mean-Lipschitz.
    """
    call = "recursive-hinge"
    _checks.positive(call, "penalty", penalty)
    # The recursion is MSVR's update with gamma = 0 and gamma' = 1.
    return penalized(
        call, model, optimizer, constraints, Hinge(penalty), smoothing=smoothing, gamma=0.0,
        correction=1.0, read="new", refresh_every=refresh_every, sampled=False,
        tolerance=tolerance, margin=margin, process_group=process_group, **options,
    )  # fmt: skip
