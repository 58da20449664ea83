"""Recursive (SPIDER) estimates of constraints under a smoothed hinge penalty."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .._schedules import Smoothing
from .settings import Penalty

__all__ = ["RecursiveHinge"]


@dataclass(frozen=True, kw_only=True)
class RecursiveHinge(Penalty):
    r"""A smoothed hinge penalty on recursive estimates of all constraints (Liu and Xu 2025).

    .. math::
        u_k &= \begin{cases} g(w_k; S_1) & k \bmod q = 0 \\
            u_{k-1} + g(w_k; S_2) - g(w_{k-1}; S_2) & \text{else}\end{cases} \\
        w_{k+1} &= w_k - \alpha\bigl(\zeta_0 + \beta\,\mathrm{clip}(u_k/\nu_s, 0, 1)\,\zeta_g\bigr),
        \qquad \zeta_0 \in \partial g_0,\ \zeta_g \in \partial g \text{ on independent samples}

    The clipped slope is that of the hinge with weight beta smoothed with lambda = nu_s / beta; the
    optimizer of the source is SGD without momentum. Every q-th step wants a large batch: look at
    `objective.refresh_due` before you draw one. The recursion has no memory of what it missed, so
    each call must hold all constraints. Give the samples of zeta as `objective(inner,
    gradient=other)`; without them one batch serves both.

    Args:
        penalty: beta.
        smoothing: lambda = nu_s / beta, or a schedule; 0 is the hard hinge.
        refresh_every: q.

    References:
        W. Liu and Y. Xu, A single-loop SPIDER-type stochastic subgradient method for
        expectation-constrained nonconvex nonsmooth optimization, 2025 (arXiv:2501.19214).
        O(eps^-4) subgradients and O(eps^-6) constraint values to an eps-KKT point, with alpha,
        nu_s of order eps^2, q and S_2 of order eps^-2, S_1 of order eps^-4. Assumes g_0 and g
        weakly convex, g(.; xi) mean-Lipschitz.
    """

    smoothing: Smoothing = field()  # type: ignore[misc]
    refresh_every: int

    word = "recursive-hinge"
    couples = False
    sampled = False

    def tracking(self) -> dict[str, Any]:
        # The recursion is MSVR's update with gamma = 0 and gamma' = 1.
        every = {"refresh_every": self.refresh_every, "sampled": False}
        return {"gamma": 0.0, "correction": 1.0, "read": "new", **every}
