"""Methods on tracked values: multipliers, SONEX, SONX, SOX, ALEXR, OOA, SCENT, and penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from .. import _checks
from .._schedules import Smoothing
from ..optim import ProximalPoint
from ..outer import LogMeanExp, SquaredHinge
from ..previous import unwrap
from ..rules.track import scent_track
from ..terms import CoupledTerm, DualTerm, GroupWeights, MultiplierTerm
from ..terms.coupled import as_lambda
from ..tracker import InnerTracker
from .settings import Auto, Penalty, Problem, TrackedSettings


@dataclass(frozen=True, kw_only=True)
class Multipliers(TrackedSettings):
    r"""The method of multipliers in units of the measured noise; nothing needs to be set.

    .. math::
        c_i &= \bigl[\nu_i + k_i (u_i - \text{tolerance}_i)\bigr]_+, \qquad
        G_t = \nabla g_0 + \frac m{B_1}\sum_{i\in\mathcal B_1} c_i\nabla g_i \\
        \nu_i &\leftarrow \bigl[\nu_i + k'_i\,(g_i(w_t;\mathcal B) - \text{tolerance}_i)\bigr]_+

    The gains and a margin are measured, see `fcco.terms.MultiplierTerm`. The function must return
    the loss too, of a batch like the values: beside a loss without noise, noisy values have no
    unit, and the multipliers hardly move.

    Args:
        gamma: weight of the new value in u_i; `"auto"` measures the best one, at least 0.2: a
            later u damps the multipliers too late.

    References:
        D. P. Bertsekas, Constrained optimization and Lagrange multiplier methods, 1982.
    """

    gamma: float | Auto = "auto"

    word = "multipliers"

    def term(self, problem: Problem) -> MultiplierTerm:
        tracker = InnerTracker(
            problem.number, gamma=self.gamma, least=0.2, correction=0.0, read="new", measure=True,
            **self.table(problem.model),
        )  # fmt: skip
        return MultiplierTerm(tracker, **problem.limits)


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

    The last line is your optimizer. For limits f is rho [.]_+ of the excess. A limit with
    multiplier nu* is then exceeded by about lambda m nu* (while nu* < rho/m; above that it is not
    enforced): choose lambda by that law, or set `margin`.

    Args:
        smoothing: lambda, below 1/rho_f for a weakly convex f; see `fcco.terms.OuterTerm`.
        gamma: weight of the new value in u. None: `"auto"` where the smoothing is, else 0.1.
        correction: gamma'; see `InnerTracker`. None: 0 where the smoothing is `"auto"`, which needs
            no second forward pass, else `"auto"`.
        read: `"old"` uses u_{i,t} in G_t as printed, `"new"` uses u_{i,t+1}. None: new where the
            smoothing is `"auto"`, else old.

    References:
        Paper, Algorithm 1 and Theorem `thm:ema_msvr`; section 6.2 for limits.
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
    derivative 0 is taken. In the source gamma is called tau, and gamma' gamma.

    Args:
        gamma: as in `Sonex`, like the next two.
        correction: see `InnerTracker`.
        read: `"old"` or `"new"`.

    References:
        Q. Hu, D. Zhu and T. Yang, NeurIPS 2023, Algorithm 1; for g_i(.; xi) mean-Lipschitz.
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

    A single multiplier is 0 or rho/m; nu_k = (rho/m) P(u_k > 0) is the mean of
    `objective.multipliers()` over many steps. The authors set gamma = 0.8 and gamma' = 0.1.

    References:
        M. Yang, G. Li, Q. Hu, Q. Lin and T. Yang, 2025 (arXiv:2504.15243): rho > m (C + 1)/delta,
        with delta the least singular value of the subgradients wherever a limit is violated.
    """

    word = "hinge"


@dataclass(frozen=True, kw_only=True)
class Sox(Penalty):
    r"""SOX: a smooth outer function, a moving average, momentum.

    .. math::
        u_{i,t+1} &= (1-\gamma)u_{i,t} + \gamma g_i(w_t;\mathcal B), && i\in\mathcal B_1^t \\
        v_{t+1} &= (1-\beta)v_t + \beta\,\frac{1}{B_1}\sum_{i\in\mathcal B_1^t}
            \nabla g_i(w_t;\mathcal B)\,\nabla f(u_{i,t}), \qquad w_{t+1} = w_t - \eta v_{t+1}

    The last line is your optimizer, `momentum_type(lr=eta, beta=beta)`.

    Args:
        gamma: weight of the new value; 1 (and `read="new"`) is the plug-in gradient, biased by the
            noise.
        read: `"old"` uses u_{i,t} in the gradient, unbiased with one batch; `"new"` uses
            u_{i,t+1}, as the authors' code does.

    References:
        B. Wang and T. Yang, ICML 2022.
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

    In the paper h_k(w) = L_k(w) - L_k(w_old), see `ReferenceLosses`. A limit with multiplier nu* is
    exceeded by about m nu*/rho, at any rho: the penalty is not exact. The loop oscillates unless lr
    (rho/m) |grad h|^2 (1/gamma + 1/beta) is about 1.

    Args:
        penalty: rho (the paper's beta; the authors' code multiplies it by the temperature tau).
        gamma: gamma_2, weight of the new value (the authors: 0.8). The squared hinge penalises
            the noise of u, since E[u]_+^2 > [E u]_+^2: keep gamma small when batches are.
        read: `"new"` as in the authors' code; `"old"` is unbiased.

    References:
        G. Li, W. Yu, Y. Yao, W. Tong, Y. Liang, Q. Lin and T. Yang, 2024 (arXiv:2410.03955); rho of
        order m/eps.
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

    The clipped slope is that of the hinge with weight beta smoothed with lambda = nu_s / beta. The
    source steps by SGD without momentum. Every q-th step wants a large batch: look at
    `objective.refresh_due` before you draw one. Each call must hold all constraints. Give the
    samples of zeta as `objective(inner, gradient=other)`; without them one batch serves both.

    Args:
        penalty: beta.
        smoothing: lambda = nu_s / beta, or a schedule; 0 is the hard hinge.
        refresh_every: q.

    References:
        W. Liu and Y. Xu, 2025 (arXiv:2501.19214): alpha, nu_s of order eps^2, q and S_2 of order
        eps^-2, S_1 of order eps^-4, for g(.; xi) mean-Lipschitz.
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

    Here psi = |.|^2/2, see `DualTerm`; for limits, y_i+ = clip(y_i + alpha g~_i, 0, rho): the
    multipliers y/m collect the violations, up to rho/m, and end where the limit holds. For a smooth
    f, psi = f* is a `CoupledTerm` on a tracker with gamma = alpha / (1 + alpha), gamma' = theta
    gamma and `read="new"`.

    The step on w is your optimizer: SGD with lr = eta for r = 0; for r(w) = |w - w_0|^2/(2 nu) a
    `ProximalPoint(..., nu=nu, eta=eta)`, whose inner step it is. An independent batch for the
    gradient is `objective(inner, index, gradient=other)`; with one batch for both it is biased. The
    output of the theory is the average iterate.

    Args:
        dual_step: alpha.
        theta: extrapolation; 0 needs no evaluation at w_{t-1}. Above 1, outside the theory, it adds
            a part proportional to the violation, which damps the loop.

    References:
        B. Wang and T. Yang, ALEXR, 2023. With r strongly convex (mu) and f smooth: eta =
        (1 - theta)/(theta mu), alpha = (1 - theta)/(theta - 1 + B1/n). For convex F and non-smooth
        f: theta = 0 and alpha, eta of order eps.
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
        tracker = InnerTracker(
            problem.number, self.dimension(outer), gamma=1.0, correction=0.0, read="new",
            **self.table(problem.model),
        )  # fmt: skip
        return DualTerm(outer, tracker, self.dual_step, self.theta, **problem.limits)


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

    Your optimizer is the outer one (last line). Step `objective.optimizer`, a `ProximalPoint`.
    Pass an independent batch for the gradient as `objective(inner, index, gradient=other)`;
    without it one batch serves both.

    Args:
        smoothing: lambda, as in `Sonex`, above 0.
        nu: proximal parameter, below 1/rho_F; `"auto"` is twice the learning rate that the
            optimizer starts with.
        eta: inner step size; `"auto"` is that learning rate.
        inner_steps: K_t, a number or a function of the round.
        gamma: gamma-hat (a dual step of gamma / (1 - gamma)).
        theta: extrapolation.

    References:
        Paper, Algorithm 2 with line 13 corrected (docs/research/details/mathematics.md).
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


@dataclass(frozen=True, kw_only=True)
class Ooa(TrackedSettings):
    r"""OOA: online group DRO, plain or with CVaR; weights by mirror ascent, then descent on w.

    .. math::
        \min_w &\max_{p\in\Omega} \textstyle\sum_i p_i L_i(w), \qquad
        \Omega = \bigl\{p : \textstyle\sum_i p_i = 1,\ 0 \le p_i \le \tfrac{1}{rn}\bigr\} \\
        \hat\ell_i &= \tfrac{n}{B_1} L_i(w_t;\mathcal B)\,1[i\in\mathcal B_1], \qquad
        p \leftarrow \Pi^{KL}_\Omega\bigl(p\circ e^{\eta_p\hat\ell}\bigr)
        \ \text{ or }\ \Pi_\Omega(p + \eta_p\hat\ell) \\
        G_t &= \tfrac{n}{B_1}\sum_{i\in\mathcal B_1} p_i\,\nabla L_i(w_t;\mathcal B)
        \quad\text{with the new } p

    The step on G_t is your optimizer. With gamma = 1 there is no memory of losses but p.

    Args:
        ratio: r, the share of groups that count; None (or 1/n) is plain group DRO, 1 the mean over
            groups.
        step: eta_p (eta_q in the paper of group DRO).
        geometry: `"kl"` (exponentiated weights) or `"euclidean"`.
        scaling: `"unbiased"` uses the factors n/B1; `"batch"` leaves them out of both lines, as
            the released code of group DRO does: absent groups count as loss 0.
        gamma: weight of the new loss of a group in a running average that moves p; `"auto"`
            weighs its noise against its lag.
        offset: a; p moves along the losses divided by p + a, see `CtcDro`.

    References:
        S. Sagawa, P. W. Koh, T. Hashimoto and P. Liang, 2020 (plain, KL). The cap 1/(r n) is its
        extension to CVaR. The theory, for convex losses, is of the average iterate.
    """

    ratio: float | None = None
    step: float = 0.01
    geometry: Literal["kl", "euclidean"] = "kl"
    scaling: Literal["unbiased", "batch"] = "unbiased"
    gamma: float | Auto = 1.0
    offset: float | None = None

    word = "ooa"

    def term(self, problem: Problem) -> GroupWeights:
        _checks.positive(self.word, "step", self.step)
        tracker = InnerTracker(
            problem.number, gamma=self.gamma, correction=0.0, read="new",
            **self.table(problem.model),
        )  # fmt: skip
        # ratio 1/n leaves the weights uncapped: the adversary may put all of p on one group.
        ratio = 1 / problem.number if self.ratio is None else self.ratio
        return GroupWeights(
            tracker, self.step, ratio, geometry=self.geometry, scaling=self.scaling,
            offset=self.offset,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CtcDro(Ooa):
    r"""CTC-DRO: OOA whose weights do not all go to the group with the largest loss.

    .. math::
        p_i \leftarrow \frac{p_i\,e^{\eta_p \hat\ell_i/(p_i + a)}}
            {\sum_j p_j\,e^{\eta_p \hat\ell_j/(p_j + a)}}

    This is ascent on :math:`\sum_i L_i\log(p_i + a)`, so the weights end at :math:`p_i = (1 + n a)
    L_i/\sum_j L_j - a`, or 0: they are proportional to the losses for a small a, all equal for a
    large one. The authors wait until every group was seen before each move of p; here a step
    moves p by the losses of its groups, times n/B1.

    Args:
        offset: a; the authors try 0.1, 0.5 and 1.

    References:
        M. Bartelds et al., CTC-DRO, ICLR 2026 (arXiv:2502.01777).
    """

    offset: float | None = 0.5

    word = "ctc-dro"


@dataclass(frozen=True, kw_only=True)
class Scent(TrackedSettings):
    r"""SCENT: log-mean-exp of many blocks; a block with a large mean takes more of a new value.

    .. math::
        \min_w\; &\frac\tau n\sum_i \log \mathbb E\,e^{s_i(w;\xi)} \\
        u_i &\leftarrow (1-\gamma_i)\,u_i + \gamma_i\,\tfrac1{B_2}\sum_b e^{s_{ib}}, \qquad
        \gamma_i = \frac{\alpha u_i}{1 + \alpha u_i} \\
        G_t &= \frac\tau{B_1}\sum_{i\in\mathcal B_1}\frac1{B_2}\sum_b
            \frac{e^{s_{ib}}}{u_i}\,\nabla s_{ib} \quad\text{with the new } u

    The function returns the exponents s, one per sample; u is kept as log u, so nothing overflows.

    Args:
        temperature: tau; s is a loss divided by tau.
        gamma: the weight of a new value in a block whose u is the median of the batch, which makes
            :math:`\alpha = \gamma/(1-\gamma)/\text{median}`: adding a constant to all s changes
            nothing.
        alpha: a number in its place, as in the paper.

    References:
        X. Wei, L. Zhou, B. Wang, C.-J. Lin and T. Yang, 2026 (arXiv:2602.02877): a proximal step
        on the dual variable log u, in a geometry of its own.
    """

    temperature: float = 1.0
    gamma: float = 0.1
    alpha: float | None = None

    word = "scent"

    def term(self, problem: Problem) -> CoupledTerm:
        gamma = self.gamma
        if self.alpha is not None:
            _checks.positive(self.word, "alpha", self.alpha)
            gamma = self.alpha / (1 + self.alpha)
        tracker = InnerTracker(
            problem.number, gamma=gamma, correction=0.0, read="new", log_space=True,
            **self.table(problem.model),
        )  # fmt: skip
        formula = scent_track if self.alpha is None else partial(scent_track, middle=0.0)
        tracker.rule = replace(tracker.rule, formula=formula)
        term = CoupledTerm(LogMeanExp(self.temperature), tracker, **problem.limits)
        term.branch_free = False  # padding rows would move the median
        return term
