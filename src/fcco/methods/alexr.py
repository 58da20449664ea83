"""ALEXR: extrapolated dual ascent on sampled blocks; and in a proximal-point loop, ALEXR2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _checks
from .._schedules import Smoothing
from ..optim import ProximalPoint
from ..previous import unwrap
from ..terms import DualTerm
from ..terms.coupled import as_lambda
from .settings import Auto, Penalty, Problem

__all__ = ["Alexr", "Alexr2"]


@dataclass(frozen=True, kw_only=True)
class Alexr(Penalty):
    r"""ALEXR: extrapolated dual ascent on sampled blocks, proximal descent on w, for convex F.

    .. math::
        \tilde g_i &= g_i(w_t;\mathcal B) + \theta\bigl(g_i(w_t;\mathcal B)
            - g_i(w_{t-1};\mathcal B)\bigr) \\
        y_i^+ &= \arg\max_y \langle y, \tilde g_i\rangle - f^*(y) - \tfrac1\alpha D_\psi(y, y_i)
            \qquad i\in\mathcal B_1 \\
        z_t &= \frac1{B_1}\sum_{i\in\mathcal B_1}\nabla g_i(w_t;\tilde{\mathcal B})\,y_i^+, \qquad
        w_{t+1} = \arg\min_w \langle z_t, w\rangle + \tfrac1{2\eta}\|w - w_t\|^2 + r(w)

    Here psi = |.|^2/2, for any f with a prox: y_i+ = prox_{alpha f*}(y_i + alpha g~_i), see
    `DualTerm`. For limits, y_i+ = clip(y_i + alpha g~_i, 0, rho): the multipliers y/m collect the
    violations, up to rho/m, and end where the limit holds. For a smooth f, psi = f* is a tracker:
    `CoupledTerm(f, InnerTracker(n, gamma=g, correction=theta * g, read="new"))` with
    g = alpha / (1 + alpha).

    The step on w is your optimizer: SGD with lr = eta for r = 0; for r(w) = |w - w_0|^2/(2 nu) a
    `ProximalPoint(..., nu=nu, eta=eta)`, whose inner step it is. An independent batch for the
    gradient is `objective(inner, index, gradient=other)`; with one batch for both it is biased. The
    output of the theory is the average iterate, which `OutputIterate(optimizer, "average")` keeps.

    Args:
        dual_step: alpha.
        theta: extrapolation; 0 needs no evaluation at w_{t-1}. Above 1, outside the theory, it adds
            a part proportional to the violation, which damps the loop.

    References:
        B. Wang and T. Yang, ALEXR: an optimal single-loop algorithm for convex finite-sum coupled
        compositional stochastic optimization, 2023. With r strongly convex (mu) and f smooth:
        eta = (1 - theta)/(theta mu), alpha = (1 - theta)/(theta - 1 + B1/n) reach a gap eps in
        O(n/B1 + 1/(mu eps) + n/(B1 eps)) steps up to logarithms. For convex F and non-smooth f:
        theta = 0 and alpha, eta of order eps, O(eps^-2).
    """

    dual_step: float
    theta: float = 1.0

    word = "alexr"
    couples = False
    requires = ("convex",)

    def term(self, problem: Problem) -> DualTerm:
        outer = self.function()
        _checks.positive(self.word, "dual_step", self.dual_step)
        _checks.at_least(self.word, "theta", self.theta, 0.0)
        return DualTerm(
            outer, problem.number, dual_step=self.dual_step, theta=self.theta,
            dim=self.dimension(outer), table=self.table(problem.model), **problem.limits,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Alexr2(Penalty):
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
    gradient as `objective(inner, index, gradient=other)`; without it one batch serves both. f is
    convex, and non-decreasing too when the g_i have kinks.

    Args:
        smoothing: lambda, as in `Sonex`, above 0.
        nu: proximal parameter, below 1/rho_F; `"auto"` is twice the learning rate that the
            optimizer starts with.
        eta: inner step size; `"auto"` is that learning rate.
        inner_steps: K_t, a number or a function of the round.
        gamma: gamma-hat, weight of the extrapolated value in u (dual step gamma / (1 - gamma)).
        theta: extrapolation.

    References:
        Paper, Algorithm 2 with line 13 corrected (docs/concepts/mathematics.md): nearly
        eps-stationary after O(n / (B1 B2) eps^-5) inner steps.
    """

    smoothing: Smoothing = field()  # type: ignore[misc]
    nu: float | Auto = "auto"
    eta: float | Auto = "auto"
    inner_steps: int | Callable[[int], int] = 5
    gamma: float = 0.8
    theta: float = 0.125

    word = "alexr2"
    requires = ("convex",)

    def tracking(self) -> dict[str, Any]:
        _checks.in_interval(self.word, "theta", self.theta, 0.0, 1.0)
        smoothing = as_lambda(self.word, self.function(), self.smoothing)
        auto = isinstance(smoothing, str)
        if not auto and not callable(smoothing):
            _checks.positive(self.word, "smoothing", smoothing)
        # u+ = (1 - gamma) u + gamma (g + theta (g - g_before)): MSVR's form, gamma' = theta gamma.
        correction = self.theta * self.gamma
        return {"gamma": self.gamma, "correction": correction, "read": "new", "measure": auto}

    def stepped(self, optimizer: torch.optim.Optimizer, term: Any) -> ProximalPoint:
        """An inner step goes as far as one of the optimizer, and a round twice as far."""
        lr = float(unwrap(optimizer).param_groups[0]["lr"])
        nu = 2 * lr if self.nu == "auto" else self.nu
        eta = lr if self.eta == "auto" else self.eta
        return ProximalPoint(optimizer, nu=nu, eta=eta, inner_steps=self.inner_steps)
