"""SOX: a smooth outer function, a moving average, momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .. import _checks
from .._schedules import CosineRamp, Schedule
from ..outer import SquaredHinge
from .settings import Penalty

__all__ = ["Sox", "SquaredHingePenalty"]


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
        ramp_steps: raise rho from 0 along half a cosine over so many steps (the authors' option
            does so over all epochs).

    References:
        G. Li, W. Yu, Y. Yao, W. Tong, Y. Liang, Q. Lin and T. Yang, Model developmental safety: a
        safety-centric method and applications in vision-language models, 2024 (arXiv:2410.03955).
        O(eps^-7) steps to an eps-KKT point, with rho of order m/eps.
    """

    read: Literal["old", "new"] = "new"
    ramp_steps: int = 0

    word = "squared-hinge"

    def weight(self) -> Schedule:
        _checks.integer(self.word, "ramp_steps", self.ramp_steps, 0)
        return CosineRamp(self.ramp_steps) if self.ramp_steps else 1.0
