"""Penalty methods for constraints: Li et al. 2024, Yang et al. 2025, Liu and Xu 2025."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from ..constraints import ConstrainedObjective, Penalized
from ..constraints.recursive import (
    LargestPenalty,
    LargestTerm,
    RecursivePenalty,
    recursive_tracker,
)
from ..limits import number_and_names
from ..outer import Hinge, SquaredHinge
from ..outer.base import AbstractOuter
from ..terms import AbstractTerm, CoupledTerm, Smoothing
from ..tracker import for_model

__all__ = ["RampedTerm", "li2024", "liu2025", "yang2025"]

Tolerance = float | Sequence[float] | Tensor


class RampedTerm(CoupledTerm):
    r"""A coupled term whose weight rises from almost 0 to 1 along half a cosine.

    .. math::
        \text{weight}_t = \tfrac12\bigl(1 - \cos(\pi \min\{1, (t+1)/T\})\bigr)

    Args:
        outer: f.
        tracker: the tracker of g_i.
        ramp_steps: T; 0 is a constant weight 1.
        options: tolerance, margin and names, see `CoupledTerm`.
    """

    def __init__(self, outer: AbstractOuter, tracker: Any, ramp_steps: int, **options: Any) -> None:
        _checks.integer("li2024", "ramp_steps", ramp_steps, 0)
        super().__init__(outer, tracker, **options)
        self._ramp_steps = ramp_steps

    @property
    def weight(self) -> float:
        """The factor of this step; a function of the steps that this term had a part in."""
        return self.weight_at(self.step)

    def weight_at(self, step: int) -> float:
        """The factor of a step."""
        left = self._ramp_steps - 1 - step
        if left <= 0:
            return self._full
        return self._full * (1 + math.cos(math.pi * left / self._ramp_steps)) / 2

    @weight.setter
    def weight(self, value: float) -> None:
        self._full = value


def li2024(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    penalty: float,
    gamma: float = 0.1,
    read: Literal["old", "new"] = "new",
    ramp_steps: int = 0,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    objective: AbstractTerm | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **options: Any,
) -> ConstrainedObjective:
    r"""Li et al. 2024: squared hinge penalty, moving averages of the constraints, any optimizer.

    .. math::
        u_{k,t+1} &= (1-\gamma)u_{k,t} + \gamma h_k(w_t;\mathcal B) && k\in\mathcal B_1^t \\
        G_t &= \nabla g_0(w_t) + \frac1{B_1}\sum_{k\in\mathcal B_1^t}
            \rho\,[u_{k,t+1}]_+\,\nabla h_k(w_t;\mathcal B), \qquad
        \min_w\; g_0(w) + \frac1m\sum_{k=1}^m \frac\rho2 [h_k(w)]_+^2

    This is the SOX estimator on the squared hinge. In the paper h_k(w) = L_k(w) - L_k(w_old): no
    protected task may get worse. Store the old per-sample losses once and return the difference
    on the same samples; give each task a head of its own with `fcco.heads.TaskHeads`.

    A constraint with multiplier nu* ends about m nu*/rho above its limit, at any rho: the penalty
    is not exact. Without a correction the loop lags: it oscillates unless
    lr (rho/m) |grad h|^2 (1/gamma + 1/beta) is at most about 1.

    Args:
        model: your model.
        optimizer: your optimizer (the authors: AdamW).
        constraints: their number m, or their names.
        penalty: rho (the paper's beta; the authors' code multiplies it by the temperature tau).
        gamma: gamma_2, weight of the new value (the authors: 0.8). The squared hinge penalises
            the noise of u, since E[u]_+^2 > [E u]_+^2: keep gamma small when batches are.
        read: `"new"` uses u_{t+1} with the gradient of the same batch, as the authors' code does;
            `"old"` uses u_t, which is unbiased.
        ramp_steps: raise rho from 0 along half a cosine over so many steps (the authors' option
            does so over all epochs); 0 is a constant rho.
        tolerance: h_k <= tolerance_k, one number or one per constraint.
        margin: train for tolerance - margin.
        objective: a coupled term of the objective, see `Penalized`.
        process_group: see `Compositional`.
        offload: see `Compositional`.
        options: further options of `InnerTracker`.

    Example:
        >>> import torch, fcco
        >>> from fcco.methods.penalties import li2024
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        >>> objective = li2024(model, optimizer, ["bound"], penalty=20.0, gamma=1.0)
        >>> def loss_and_constraint():
        ...     w = model.weight.view(())
        ...     return (w - 1).square() / 2, {"bound": w - 0.3}
        >>> for _ in range(300):
        ...     objective(loss_and_constraint).backward()
        ...     optimizer.step(); optimizer.zero_grad()
        >>> {name: round(value, 4) for name, value in objective.multipliers().items()}
        {'bound': 0.6667}

    References:
        G. Li, W. Yu, Y. Yao, W. Tong, Y. Liang, Q. Lin and T. Yang, Model developmental safety: a
        safety-centric method and applications in vision-language models, 2024 (arXiv:2410.03955).
        O(eps^-7) steps to an eps-KKT point, with rho of order m/eps. Assumes g_0 and h_k smooth
        and the least singular value of their Jacobian at least delta wherever one is violated.
        Constraints may be sampled, one batch serves values and gradients, no further evaluation.
    """
    number, names = number_and_names("li2024", constraints)
    _checks.positive("li2024", "penalty", penalty)
    tracker = for_model(model, number, gamma=gamma, correction=0.0, read=read, **options)
    term = RampedTerm(
        SquaredHinge(penalty), tracker, ramp_steps, tolerance=tolerance, margin=margin, names=names
    )
    problem = ConstrainedObjective(
        model, optimizer, term, objective=objective, process_group=process_group, offload=offload
    )
    problem.method = "li2024"
    return problem


def yang2025(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    penalty: float | None = None,
    gamma: float = 0.1,
    correction: float | Literal["theory", "auto"] = "auto",
    read: Literal["old", "new"] = "old",
    average: int | None = None,
    equality: bool = False,
    outer: AbstractOuter | None = None,
    dim: int | None = None,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    objective: AbstractTerm | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **options: Any,
) -> ConstrainedObjective:
    r"""Yang et al. 2025: hinge penalty, MSVR tracker, plain SGD (SONX on the penalised problem).

    .. math::
        u_{k,t+1} &= (1-\gamma)u_{k,t} + \gamma h_k(w_t;\mathcal B)
            + \gamma'\bigl(h_k(w_t;\mathcal B) - h_k(w_{t-1};\mathcal B)\bigr)
            && k\in\mathcal B_1^t \\
        G_t &= \partial g_0(w_t) + \frac1{B_1}\sum_{k\in\mathcal B_1^t}
            \rho\,1[u_{k,t} > 0]\,\partial h_k(w_t;\mathcal B), \qquad
        w_{t+1} = w_t - \eta G_t

    A single multiplier is 0 or rho/m: at the solution u_k crosses 0 again and again, and
    nu_k = (rho/m) P(u_k > 0). With `average`, `objective.average_multipliers()` is that average
    over time.

    Args:
        model: your model.
        optimizer: `torch.optim.SGD` without momentum is the method; others run, without theory.
        constraints: their number m, or their names.
        penalty: rho; exact for rho/m above the largest multiplier.
        gamma: weight of the new value (the authors: 0.8).
        correction: gamma' (the authors: 0.1), see `InnerTracker`.
        read: `"old"` uses u_t in G_t as printed, `"new"` u_{t+1}.
        average: steps over which to average the multipliers, None not to; some tensor
            operations per step, a noticeable part of the step of a small model.
        equality: penalise |h_k - tolerance_k| instead.
        outer: an outer function of your own instead of the hinge, see `Penalized`.
        dim: d1, when `outer` leaves it open.
        tolerance: h_k <= tolerance_k, one number or one per constraint.
        margin: train for tolerance - margin.
        objective: a coupled term of the objective, see `Penalized`.
        process_group: see `Compositional`.
        offload: see `Compositional`.
        options: further options of `InnerTracker`.

    References:
        M. Yang, G. Li, Q. Hu, Q. Lin and T. Yang, Single-loop algorithms for stochastic non-convex
        optimization with weakly-convex constraints, 2025 (arXiv:2504.15243). O(eps^-6) steps to a
        nearly eps-KKT point, with rho > m (C + 1)/delta, constant in eps. Assumes g_0 and h_k
        weakly convex and Lipschitz, h_k(.; xi) mean-Lipschitz, and the least singular value of the
        constraints' subgradients at least delta wherever one is violated. Constraints may be
        sampled, one batch serves values and subgradients; one more forward pass, at w_{t-1}.
    """
    problem = Penalized(
        model, optimizer, constraints, penalty=penalty, kind="hinge", gamma=gamma,
        correction=correction, read=read, equality=equality, outer=outer, dim=dim,
        tolerance=tolerance, margin=margin, objective=objective, process_group=process_group,
        offload=offload, **options,
    )  # fmt: skip
    if average is not None:
        problem.keep_average(average)
    problem.method = "yang2025"
    return problem


def liu2025(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    penalty: float,
    smoothing: Smoothing,
    refresh_every: int,
    aggregate: Literal["each", "max"] = "each",
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    process_group: Any = "auto",
    **options: Any,
) -> RecursivePenalty:
    r"""Liu and Xu 2025: smoothed hinge penalty, recursive (SPIDER) estimates of all constraints.

    .. math::
        u_k &= \begin{cases} g(w_k; S_1) & k \bmod q = 0 \\
            u_{k-1} + g(w_k; S_2) - g(w_{k-1}; S_2) & \text{else}\end{cases} \\
        w_{k+1} &= w_k - \alpha\bigl(\zeta_0 + \beta\,\mathrm{clip}(u_k/\nu_s, 0, 1)\,\zeta_g\bigr),
        \qquad \zeta_0 \in \partial g_0,\ \zeta_g \in \partial g \text{ on independent samples}

    The clipped slope is that of the hinge with weight beta smoothed with
    lambda = nu_s / beta. Every q-th step wants a large batch: look at `objective.refresh_due`
    before you draw one. The recursion has no memory of what it missed, so each call
    must hold all constraints.

    Args:
        model: your model.
        optimizer: `torch.optim.SGD` without momentum is the method (lr = alpha).
        constraints: their number m, or their names.
        penalty: beta.
        smoothing: lambda = nu_s / beta, or a schedule; 0 is the hard hinge.
        refresh_every: q.
        aggregate: `"each"` penalises every constraint with weight beta/m; `"max"` the one
            constraint max_i g_i with weight beta, by the envelope of [max_i u_i]_+ on R^m (ties
            share the slope; the formula above where one constraint leads by nu_s).
        tolerance: g_i <= tolerance_i, one number or one per constraint.
        margin: train for tolerance - margin.
        process_group: see `Compositional`.
        options: further options of `InnerTracker`.

    Give the independent samples of zeta as `objective(inner, gradient=other)`; without
    them one batch serves both.

    References:
        W. Liu and Y. Xu, A single-loop SPIDER-type stochastic subgradient method for
        expectation-constrained nonconvex nonsmooth optimization, 2025 (arXiv:2501.19214).
        O(eps^-4) subgradients and O(eps^-6) constraint values to an eps-KKT point, with alpha,
        nu_s of order eps^2, q and S_2 of order eps^-2, S_1 of order eps^-4: the surrogate's error
        beta (u - g)^2 / (2 nu_s) then stays of order eps^2, because E(u - g)^2 is at most
        sigma^2 / S_1 + (q / S_2) C_g^2 alpha^2 M^2 for steps of length alpha M (these orders are
        derived here). Assumes g_0 and g weakly convex, g(.; xi) mean-Lipschitz. No sampling of
        constraints; two batches, one more forward pass at w_{k-1} except at a refresh.
    """
    _checks.positive("liu2025", "penalty", penalty)
    _checks.one_of("liu2025", "aggregate", aggregate, ("each", "max"))
    number, names = number_and_names("liu2025", constraints)
    _checks.integer("liu2025", "constraints", number, 1)
    if options.get("on_nonfinite") == "skip":
        raise ValueError(
            "`liu2025(on_nonfinite='skip')` would leave a constraint out of a step, and its "
            "estimate would miss that difference until the next refresh; use 'raise'."
        )
    as_one = aggregate == "max" and number > 1
    tracker = recursive_tracker(model, number, refresh_every, as_one, **options)
    limits: dict[str, Any] = {"tolerance": tolerance, "margin": margin, "names": names}
    if as_one:
        term = LargestTerm(tracker, penalty=penalty, smoothing=smoothing, **limits)
        return LargestPenalty(model, optimizer, term, process_group=process_group)
    term = CoupledTerm(Hinge(penalty), tracker, smoothing=smoothing, **limits)
    return RecursivePenalty(model, optimizer, term, process_group=process_group)
