"""SONEX: smoothed outer function, corrected tracker, momentum (paper, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .._schedules import Smoothing
from .settings import Auto, Penalty

__all__ = ["Sonex"]


@dataclass(frozen=True, kw_only=True)
class Sonex(Penalty):
    r"""SONEX: smoothed outer function, MSVR tracker, momentum or Adam (paper, Algorithm 1).

    .. math::
        u_{i,t+1} &= (1-\gamma)u_{i,t} + \gamma g_i(w_t;\mathcal B)
            + \gamma'\bigl(g_i(w_t;\mathcal B) - g_i(w_{t-1};\mathcal B)\bigr)
            && i\in\mathcal B_1^t \\
        G_t &= \frac{1}{B_1}\sum_{i\in\mathcal B_1^t}
            \nabla g_i(w_t;\mathcal B)\,\nabla f_\lambda(u_{i,t}) \\
        v_{t+1} &= (1-\beta)v_t + \beta G_t, \qquad w_{t+1} = w_t - \eta v_{t+1}

    The last line is your optimizer: `momentum_type`, `adam_type`, or any other. For limits f is
    rho [.]_+ of the excess. A limit with multiplier nu* is then exceeded by about lambda m nu*
    (while nu* < rho/m; above that it is not enforced): choose lambda by that law, or set `margin`.

    Args:
        smoothing: lambda, below 1/rho_f for a weakly convex f (of a hinge, the quadratic zone is
            lambda rho wide); or a schedule; or that width, `fcco.Width(0.02)`. `"auto"`: as wide as
            the estimates are off, see `fcco.terms.OuterTerm`.
        gamma: weight of the new value in u. None: `"auto"` where the smoothing is, else 0.1.
        correction: gamma'; see `InnerTracker`. None: 0 where the smoothing is `"auto"`, which needs
            no second forward pass, else `"auto"`.
        read: `"old"` uses u_{i,t} in G_t as printed, `"new"` uses u_{i,t+1}. None: new where the
            smoothing is `"auto"`, else old.

    References:
        Paper, Algorithm 1 and Theorem `thm:ema_msvr`: an approximate eps-stationary point after
        O(n / (B1 sqrt(B2)) eps^-5) steps; section 6.2: an eps-KKT point after O(eps^-5).
    """

    smoothing: Smoothing = field()  # type: ignore[misc]
    gamma: float | Auto | None = None
    correction: float | Literal["theory", "auto"] | None = None
    read: Literal["old", "new"] | None = None

    word = "sonex"

    def tracking(self) -> dict[str, Any]:
        tracking: dict[str, Any] = {"gamma": 0.1, "correction": "auto", "read": "old"}
        if isinstance(self.smoothing, str):
            tracking = {"gamma": "auto", "correction": 0.0, "read": "new", "measure": True}
        own = {"gamma": self.gamma, "correction": self.correction, "read": self.read}
        return tracking | {name: value for name, value in own.items() if value is not None}
