"""ALEXR: extrapolated dual ascent on sampled blocks, for convex problems and constraints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from .. import _checks
from .._schedules import Width
from ..constraints import ConstrainedObjective
from ..inputs import known_settings
from ..objective import Compositional
from ..outer import AbstractOuter, Hinge
from ..terms import DualTerm
from ..terms.coupled import as_lambda
from ..terms.limits import Tolerance, number_and_names
from ..tracker import like_model
from ._common import Auto, automatic, coupled, dimension, multiplied

__all__ = ["alexr", "constrained_alexr"]


@known_settings("gamma", "correction", also=("offload",))
def alexr(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: AbstractOuter,
    num_inner: int,
    *,
    version: Literal["v1", "v2"] = "v1",
    dual_step: float = 1.0,
    theta: float = 0.0,
    smoothing: float | Width = 0.0,
    dim: int | None = None,
    process_group: Any = "auto",
    **options: Any,
) -> Compositional:
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
      This is the tracker `alexr_tracker` with gamma = alpha/(1 + alpha). With `smoothing` it is
      applied to f_lambda.
    * `"v2"`, psi = |.|^2/2, for any f with a prox: y_i+ = prox_{alpha f*}(y_i + alpha g~_i), for
      a hinge clip(y_i + alpha g~_i, 0, rho). See `DualTerm`.

    The step on w is your optimizer: SGD with lr = eta for r = 0; for r(w) = |w - w_0|^2/(2 nu) a
    `ProximalPoint(..., nu=nu, eta=eta)`, whose inner step it is. An independent batch for the
    gradient is `objective(inner, index, gradient=other)`; with one batch for both it is biased. The
    output of the theory is the average iterate, which `OutputIterate(optimizer, "average")` keeps.

    Args:
        outer: f, convex; non-decreasing too unless the g_i are affine.
        version: `"v1"` or `"v2"`.
        dual_step: alpha.
        theta: extrapolation in [0, 1]; 0 needs no evaluation at w_{t-1}.
        smoothing: lambda or a `fcco.Width`, for `"v1"`; 0 asks for a smooth f.
        options: as in `sonex`; with `"v2"` only `on_nonfinite`, `dtype` and `device`.

    The others as in `sonex`.

    Example:
        >>> import torch, fcco
        >>> from fcco.methods import alexr
        >>> model, centre = torch.nn.Linear(2, 1, bias=False), torch.tensor([1.0, -2.0])
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> objective = alexr(
        ...     model, optimizer, fcco.Absolute(), 2, version="v2", theta=1.0)
        >>> for _ in range(300):
        ...     loss = objective(lambda: model.weight.view(2) - centre)
        ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
        >>> model.weight.data.round(decimals=3)
        tensor([[ 1., -2.]])

    References:
        B. Wang and T. Yang, ALEXR: an optimal single-loop algorithm for convex finite-sum coupled
        compositional stochastic optimization, 2023. With r strongly convex (mu) and f smooth:
        eta = (1 - theta)/(theta mu), alpha = (1 - theta)/(theta - 1 + B1/n) reach a gap eps in
        O(n/B1 + 1/(mu eps) + n/(B1 eps)) steps up to logarithms. For convex F and non-smooth f:
        theta = 0 and alpha, eta of order eps, O(eps^-2).
    """
    _checks.one_of("alexr", "version", version, ("v1", "v2"))
    _checks.positive("alexr", "dual_step", dual_step)
    _checks.in_interval("alexr", "theta", theta, 0.0, 1.0)
    number = as_lambda("alexr", outer, smoothing)
    _checks.at_least("alexr", "smoothing", number, 0.0)
    _checks.requires("alexr", outer, "convex")
    size = dimension("alexr", outer, dim)
    if version == "v1":
        if not number and not outer.smooth:
            raise ValueError(
                f"`alexr(version='v1')` needs a smooth outer function, which {outer!r} is not: "
                "give `smoothing`, or use version='v2', which needs the prox of f only."
            )
        # The mirror step with psi = f* is a moving average of u with this weight.
        gamma = dual_step / (1 + dual_step)
        # The caller may choose `read`; gamma and gamma' follow from alpha and theta.
        tracker = {"read": "new", **options, "gamma": gamma, "correction": theta * gamma}
        return coupled(
            "alexr", model, optimizer, outer, num_inner, smoothing=number, dim=size,
            process_group=process_group, **tracker,
        )  # fmt: skip
    if number:
        raise ValueError(
            "`alexr(smoothing=...)` belongs to version='v1'; version='v2' takes f as it is. "
            "Give `outer=MoreauEnvelope(f, smoothing)` if you mean the smoothed one."
        )
    if other := {"read", "offload"} & options.keys():
        raise ValueError(
            f"`alexr(version='v2')` keeps dual variables instead of averages: it has no "
            f"`{other.pop()}`, a setting of version='v1'."
        )
    term = DualTerm(
        outer, num_inner, dual_step=dual_step, theta=theta, dim=size, **like_model(model, options)
    )
    return Compositional(model, optimizer, term, process_group=process_group)


def constrained_alexr(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    penalty: float | Auto = "auto",
    dual_step: float | Auto = "auto",
    theta: float | None = None,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    process_group: Any = "auto",
    **options: Any,
) -> ConstrainedObjective:
    """ALEXR (v2) on the penalised problem: y+ = clip(y + dual_step g~, 0, penalty).

    The multipliers y/m collect the violations, up to penalty/m, and end where the constraint
    holds: no smoothing is left. `theta` (default 1) above 1, outside the theory, adds a part
    proportional to the violation, measured on the same samples at both ends of a step, which damps
    the loop. Without `penalty` and `dual_step` the rule is that of `fcco.terms.MultiplierTerm`:
    dual variables with a proportional part, whose steps come from the measured noise, and no cap.
    The other arguments are those of `alexr` and of `constrained`.
    """
    if automatic("alexr", {"penalty": penalty, "dual_step": dual_step}):
        if theta is not None:
            raise ValueError(
                "`alexr(theta=...)` needs numbers as `penalty` and `dual_step`: without them the "
                "part proportional to the violation is found too."
            )
        return multiplied(
            "alexr", model, optimizer, constraints, tolerance=tolerance, margin=margin,
            process_group=process_group, **options,
        )  # fmt: skip
    theta = 1.0 if theta is None else theta
    _checks.at_least("alexr", "theta", theta, 0.0)
    _checks.positive("alexr", "penalty", penalty)
    number, names = number_and_names("alexr", constraints)
    # The box [0, penalty] of y is the domain of the hinge's conjugate.
    term = DualTerm(
        Hinge(penalty), number, dual_step=dual_step, theta=theta,  # type: ignore[arg-type]
        tolerance=tolerance, margin=margin, names=names, **like_model(model, options),
    )  # fmt: skip
    problem = ConstrainedObjective(model, optimizer, term, process_group=process_group)
    problem.method = "alexr"
    return problem
