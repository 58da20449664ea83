"""Outer functions of tracked values: SONEX, SONX, SOX, and penalties by them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .._schedules import Smoothing
from ..outer import SquaredHinge
from .settings import Auto, Penalty

__all__ = ["HingePenalty", "RecursiveHinge", "Sonex", "Sonx", "Sox", "SquaredHingePenalty"]


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


@dataclass(frozen=True, kw_only=True)
class Sonx(Penalty):
    r"""SONX: a subgradient of the outer function itself, MSVR tracker, plain SGD.

    .. math::
        G_t = \frac{1}{B_1}\sum_{i\in\mathcal B_1^t}
            \partial g_i(w_t;\mathcal B)\,\partial f(u_{i,t}), \qquad w_{t+1} = w_t - \eta G_t

    with u as in `Sonex`. Other optimizers than SGD run, without theory. At a kink of [.]_+ the
    derivative 0 is taken. f is weakly convex, and non-decreasing when the g_i have kinks. In the
    source gamma is called tau, and gamma' gamma.

    Args:
        gamma, correction, read: see `InnerTracker`.

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
    nu_k = (rho/m) P(u_k > 0), the mean of `objective.multipliers()` over many steps.

    The authors set gamma = 0.8 and gamma' = 0.1.

    References:
        M. Yang, G. Li, Q. Hu, Q. Lin and T. Yang, Single-loop algorithms for stochastic non-convex
        optimization with weakly-convex constraints, 2025 (arXiv:2504.15243). O(eps^-6) steps to a
        nearly eps-KKT point, with rho > m (C + 1)/delta, constant in eps, where the least singular
        value of the constraints' subgradients is at least delta wherever one is violated.
    """

    word = "hinge"


@dataclass(frozen=True, kw_only=True)
class Sox(Penalty):
    r"""SOX: a smooth outer function, a moving average, momentum.

    .. math::
        u_{i,t+1} &= (1-\gamma)u_{i,t} + \gamma g_i(w_t;\mathcal B), && i\in\mathcal B_1^t \\
        v_{t+1} &= (1-\beta)v_t + \beta\,\frac{1}{B_1}\sum_{i\in\mathcal B_1^t}
            \nabla g_i(w_t;\mathcal B)\,\nabla f(u_{i,t}), \qquad w_{t+1} = w_t - \eta v_{t+1}

    The last line is your optimizer, `momentum_type(lr=eta, beta=beta)`. With gamma = 1, beta = 1
    and `read="new"` it is BSGD, the plug-in gradient, biased by the noise.

    Args:
        gamma: weight of the new value.
        read: `"old"` uses u_{i,t} in the gradient, unbiased with one batch; `"new"` uses
            u_{i,t+1}, as the authors' code does.

    References:
        B. Wang, T. Yang, Finite-sum coupled compositional stochastic optimization: theory and
        applications, ICML 2022: an eps-stationary point after O(n / (B1 B2) eps^-4) steps, for
        smooth Lipschitz f and g_i.
    """

    gamma: float = 0.1
    read: Literal["old", "new"] = "old"

    word = "sox"
    kind = SquaredHinge
    requires = ("smooth",)

    def tracking(self) -> dict[str, Any]:
        # Without a correction there is no evaluation at w_{t-1}, and no copy of it is kept.
        return {"gamma": self.gamma, "correction": 0.0, "read": self.read}


@dataclass(frozen=True, kw_only=True)
class SquaredHingePenalty(Sox):
    r"""SOX on a squared hinge penalty (Li et al. 2024).

    .. math::
        G_t = \nabla g_0(w_t) + \frac1{B_1}\sum_{k\in\mathcal B_1^t}
            \rho\,[u_{k,t+1}]_+\,\nabla h_k(w_t;\mathcal B), \qquad
        \min_w\; g_0(w) + \frac1m\sum_{k=1}^m \frac\rho2 [h_k(w)]_+^2

    In the paper h_k(w) = L_k(w) - L_k(w_old): no protected task may get worse. `ReferenceLosses`
    stores the old per-sample losses, `TaskHeads` gives each task a head of its own. A limit with
    multiplier nu* is exceeded by about m nu*/rho, at any rho: the penalty is not exact. Without a
    correction the loop oscillates unless lr (rho/m) |grad h|^2 (1/gamma + 1/beta) is about 1.

    Args:
        penalty: rho (the paper's beta; the authors' code multiplies it by the temperature tau).
        gamma: gamma_2, weight of the new value (the authors: 0.8). The squared hinge penalises
            the noise of u, since E[u]_+^2 > [E u]_+^2: keep gamma small when batches are.
        read: `"new"` as in the authors' code; `"old"` is unbiased.

    References:
        G. Li, W. Yu, Y. Yao, W. Tong, Y. Liang, Q. Lin and T. Yang, Model developmental safety: a
        safety-centric method and applications in vision-language models, 2024 (arXiv:2410.03955).
        O(eps^-7) steps to an eps-KKT point, with rho of order m/eps.
    """

    read: Literal["old", "new"] = "new"

    word = "squared-hinge"


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
