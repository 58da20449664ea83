"""ALEXR: extrapolated dual ascent on sampled blocks, for convex problems and constraints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from .. import _checks
from .._schedules import Width
from ..terms import CoupledTerm, DualTerm
from ..terms.coupled import as_lambda
from .settings import Penalty

__all__ = ["Alexr"]


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

    Two distances D_psi give two dual steps:

    * `"v1"`, psi = f*, for smooth f: u_i+ = (u_i + alpha g~_i)/(1 + alpha), y_i+ = grad f(u_i+).
      With `smoothing` it is applied to f_lambda.
    * `"v2"`, psi = |.|^2/2, for any f with a prox: y_i+ = prox_{alpha f*}(y_i + alpha g~_i). For
      limits, y_i+ = clip(y_i + alpha g~_i, 0, rho): the multipliers y/m collect the violations, up
      to rho/m, and end where the limit holds. See `DualTerm`.

    The step on w is your optimizer: SGD with lr = eta for r = 0; for r(w) = |w - w_0|^2/(2 nu) a
    `ProximalPoint(..., nu=nu, eta=eta)`, whose inner step it is. An independent batch for the
    gradient is `objective(inner, index, gradient=other)`; with one batch for both it is biased. The
    output of the theory is the average iterate, which `OutputIterate(optimizer, "average")` keeps.

    Args:
        dual_step: alpha.
        theta: extrapolation; 0 needs no evaluation at w_{t-1}. Above 1, outside the theory, it adds
            a part proportional to the violation, which damps the loop.
        version: `"v1"` or `"v2"`.
        smoothing: lambda or a `fcco.Width`, for `"v1"`; 0 asks for a smooth f.

    References:
        B. Wang and T. Yang, ALEXR: an optimal single-loop algorithm for convex finite-sum coupled
        compositional stochastic optimization, 2023. With r strongly convex (mu) and f smooth:
        eta = (1 - theta)/(theta mu), alpha = (1 - theta)/(theta - 1 + B1/n) reach a gap eps in
        O(n/B1 + 1/(mu eps) + n/(B1 eps)) steps up to logarithms. For convex F and non-smooth f:
        theta = 0 and alpha, eta of order eps, O(eps^-2).
    """

    dual_step: float
    theta: float = 1.0
    version: Literal["v1", "v2"] = "v2"
    smoothing: float | Width = 0.0  # type: ignore[misc]

    word = "alexr"
    couples = False
    requires = ("convex",)

    def term(self, model: nn.Module, number: int, limits: Mapping[str, Any]) -> CoupledTerm:
        outer = self.function()
        smoothing = as_lambda(self.word, outer, self.smoothing)
        _checks.one_of(self.word, "version", self.version, ("v1", "v2"))
        _checks.positive(self.word, "dual_step", self.dual_step)
        _checks.at_least(self.word, "theta", self.theta, 0.0)
        _checks.at_least(self.word, "smoothing", smoothing, 0.0)
        if self.version == "v2":
            if smoothing:
                raise ValueError(
                    "`alexr(smoothing=...)` belongs to version='v1'; version='v2' takes f as it "
                    "is. Give `outer=MoreauEnvelope(f, smoothing)` if you mean the smoothed one."
                )
            return DualTerm(
                outer, number, dual_step=self.dual_step, theta=self.theta,
                dim=self.dimension(outer), **limits, **self.table(model),
            )  # fmt: skip
        if not smoothing and not outer.smooth:
            raise ValueError(
                f"`alexr(version='v1')` needs a smooth outer function, which {outer!r} is not: "
                "give `smoothing`, or use version='v2', which needs the prox of f only."
            )
        return super().term(model, number, limits)

    def tracking(self) -> dict[str, Any]:
        # The mirror step with psi = f* is a moving average of u with this weight.
        gamma = self.dual_step / (1 + self.dual_step)
        return {"gamma": gamma, "correction": self.theta * gamma, "read": "new"}
