"""SONX: a subgradient of the outer function, corrected tracker, plain SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .settings import Penalty

__all__ = ["HingePenalty", "Sonx"]


@dataclass(frozen=True, kw_only=True)
class Sonx(Penalty):
    r"""SONX: a subgradient of the outer function itself, MSVR tracker, plain SGD.

    .. math::
        u_{i,t+1} &= (1-\gamma)u_{i,t} + \gamma g_i(w_t;\mathcal B)
            + \gamma'\bigl(g_i(w_t;\mathcal B) - g_i(w_{t-1};\mathcal B)\bigr)
            && i\in\mathcal B_1^t \\
        G_t &= \frac{1}{B_1}\sum_{i\in\mathcal B_1^t}
            \partial g_i(w_t;\mathcal B)\,\partial f(u_{i,t}), \qquad w_{t+1} = w_t - \eta G_t

    SONEX without smoothing and, with `torch.optim.SGD(lr=eta)`, without momentum; other optimizers
    run, without theory. At a kink of [.]_+ the derivative 0 is taken. f is weakly convex, and
    non-decreasing when the g_i have kinks. In the source gamma is called tau, and gamma' gamma.

    Args:
        gamma: weight of the new value.
        correction: gamma', see `InnerTracker`.
        read: which u enters the gradient; `"old"` as printed.

    References:
        Q. Hu, D. Zhu, T. Yang, Non-smooth weakly-convex finite-sum coupled compositional
        optimization, NeurIPS 2023, Algorithm 1: a nearly eps-stationary point after
        O(n / (B1 sqrt(B2)) eps^-6) steps, for g_i(.; xi) Lipschitz in mean square.
    """

    gamma: float = 0.1
    correction: float | Literal["theory", "auto"] = "auto"
    read: Literal["old", "new"] = "old"

    word = "sonx"

    def tracking(self) -> dict[str, Any]:
        return {"gamma": self.gamma, "correction": self.correction, "read": self.read}


@dataclass(frozen=True, kw_only=True)
class HingePenalty(Sonx):
    r"""SONX on a hinge penalty (Yang et al. 2025).

    .. math::
        G_t = \partial g_0(w_t) + \frac1{B_1}\sum_{k\in\mathcal B_1^t}
            \rho\,1[u_{k,t} > 0]\,\partial h_k(w_t;\mathcal B), \qquad w_{t+1} = w_t - \eta G_t

    A single multiplier is 0 or rho/m: at the solution u_k crosses 0 again and again, and
    nu_k = (rho/m) P(u_k > 0), which `objective.keep_average()` estimates.

    Args:
        gamma: weight of the new value (the authors: 0.8).
        correction: gamma' (the authors: 0.1), see `InnerTracker`.

    References:
        M. Yang, G. Li, Q. Hu, Q. Lin and T. Yang, Single-loop algorithms for stochastic non-convex
        optimization with weakly-convex constraints, 2025 (arXiv:2504.15243). O(eps^-6) steps to a
        nearly eps-KKT point, with rho > m (C + 1)/delta, constant in eps, where the least singular
        value of the constraints' subgradients is at least delta wherever one is violated.
    """

    word = "hinge"
