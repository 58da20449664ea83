"""SONEX: smoothed outer function, corrected tracker, momentum (paper, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from .._schedules import Smoothing
from ..constraints import ConstrainedObjective
from ..inputs import known_settings
from ..objective import Compositional
from ..outer import AbstractOuter
from ..terms import AbstractTerm
from ..terms.limits import Tolerance
from ._common import Auto, automatic, coupled, multiplied, penalized, penalty_function

__all__ = ["constrained_sonex", "sonex"]


@known_settings()
def sonex(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: AbstractOuter,
    num_inner: int,
    *,
    smoothing: Smoothing = "auto",
    gamma: float | Auto | None = None,
    correction: float | Literal["theory", "auto"] | None = None,
    read: Literal["old", "new"] | None = None,
    dim: int | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **options: Any,
) -> Compositional:
    r"""SONEX: smoothed outer function, MSVR tracker, momentum or Adam (paper, Algorithm 1).

    .. math::
        u_{i,t+1} &= (1-\gamma)u_{i,t} + \gamma g_i(w_t;\mathcal B)
            + \gamma'\bigl(g_i(w_t;\mathcal B) - g_i(w_{t-1};\mathcal B)\bigr)
            && i\in\mathcal B_1^t \\
        G_t &= \frac{1}{B_1}\sum_{i\in\mathcal B_1^t}
            \nabla g_i(w_t;\mathcal B)\,\nabla f_\lambda(u_{i,t}) \\
        v_{t+1} &= (1-\beta)v_t + \beta G_t, \qquad w_{t+1} = w_t - \eta v_{t+1}

    The last line is your optimizer: `momentum_type`, `adam_type`, or any other.

    Args:
        model: your model.
        optimizer: your optimizer.
        outer: f, weakly convex (rho_f), such as `Hinge()`; the inner functions must be smooth.
        num_inner: n, the number of blocks.
        smoothing: lambda, below 1/rho_f; or a schedule; or a `fcco.Width`. `"auto"`: as wide as the
            estimates are off, see `fcco.terms.OuterTerm`.
        gamma: weight of the new value in u. None: `"auto"` where the smoothing is, else 0.1.
        correction: gamma'; see `InnerTracker`. None: 0 where the smoothing is `"auto"`, which needs
            no second forward pass, else `"auto"`.
        read: `"old"` uses u_{i,t} in G_t as printed, `"new"` uses u_{i,t+1}. None: new where the
            smoothing is `"auto"`, else old.
        dim: d1, when `outer` leaves it open.
        process_group: see `Compositional`.
        offload: see `Compositional`.
        options: further options of `InnerTracker`.

    Example:
        Find the point with the least mean distance to noisy data: f = |.|, g_i(w) = w_i - c_i.

        >>> import torch, fcco
        >>> _ = torch.manual_seed(0)
        >>> c, model = torch.tensor([1.0, -2.0]), torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = fcco.momentum_type(model.parameters(), lr=0.02, beta=0.2)
        >>> objective = fcco.sonex(model, optimizer, fcco.Absolute(), 2, smoothing=0.1)
        >>> for _ in range(1000):
        ...     noise = 0.1 * torch.randn(2)
        ...     loss = objective(lambda: model.weight.view(2) - c + noise)
        ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
        >>> bool((model.weight.view(2) - c).abs().max() < 0.1)
        True

    References:
        Paper, Algorithm 1 and Theorem `thm:ema_msvr`: an approximate eps-stationary point after
        O(n / (B1 sqrt(B2)) eps^-5) steps.
    """
    auto = isinstance(smoothing, str)
    defaults = ("auto", 0.0, "new") if auto else (0.1, "auto", "old")
    names = ("gamma", "correction", "read")
    tracker: dict[str, Any] = dict(zip(names, defaults, strict=True)) | {"measure": auto} | options
    given = zip(names, (gamma, correction, read), strict=True)
    tracker |= {name: value for name, value in given if value is not None}
    return coupled(
        "sonex", model, optimizer, outer, num_inner, smoothing=smoothing, dim=dim,
        process_group=process_group, offload=offload, **tracker,
    )  # fmt: skip


def constrained_sonex(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    smoothing: Smoothing | Auto = "auto",
    penalty: float | Auto = "auto",
    gamma: float | Auto | None = None,
    correction: float | Literal["theory", "auto"] | None = None,
    read: Literal["old", "new"] | None = None,
    outer: AbstractOuter | None = None,
    dim: int | None = None,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    objective: AbstractTerm | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **options: Any,
) -> ConstrainedObjective:
    r"""SONEX on a smoothed hinge penalty, whose settings are found unless given.

    .. math::
        \min_w\; g_0(w) + \frac1m\sum_{i=1}^m f_\lambda\bigl(g_i(w) - \text{tolerance}_i\bigr),
        \qquad f = \rho\,[\cdot]_+

    Each value is tracked, so a noisy mini-batch value is not penalised for its noise.

    Without `smoothing` and `penalty` the smoothed hinge is that of the method of multipliers: its
    limit is shifted until no violation is left, and its width and slope come from the measured
    noise; see `fcco.terms.MultiplierTerm`. The function must then return the loss too.

    With numbers the penalty is the one above. A constraint with multiplier nu* ends about
    lambda m nu* above its limit (while nu* < rho/m; above that it is not enforced): choose lambda
    by that law, or set `margin` to it.

    Args:
        smoothing: lambda of the smoothed hinge (its quadratic zone is lambda rho wide), or a
            schedule such as `Annealed`; or that width itself, `fcco.Width(0.02)`.
        penalty: rho; the penalty is exact for rho/m above the largest multiplier. Both are given
            or neither.
        gamma: as in `sonex`; None: 0.2 without settings, 0.1 with.
        correction: None: 0 without settings, `"auto"` with.
        read: None: `"new"` without settings, `"old"` with.
        outer: an outer function of your own, such as `TwoSidedHinge`; it holds its own weight rho,
            and `smoothing` is needed, which may be 0 for it.

    The others as in `sonex` and in `constrained`.

    References:
        Paper, section 6.2: an eps-KKT point after O(eps^-5) steps.
    """
    shared: dict[str, Any] = {
        "dim": dim, "tolerance": tolerance, "margin": margin, "objective": objective,
        "process_group": process_group, "offload": offload, **options,
    }  # fmt: skip
    if automatic("sonex", {"smoothing": smoothing, "penalty": penalty}, outer):
        return multiplied(
            "sonex", model, optimizer, constraints, gamma=gamma, correction=correction, read=read,
            **shared,
        )  # fmt: skip
    weight: Any = None if penalty == "auto" else penalty
    function = penalty_function("sonex", outer, weight)
    return penalized(
        "sonex", model, optimizer, constraints, function,
        smoothing=smoothing,  # type: ignore[arg-type]
        gamma=0.1 if gamma is None else gamma,
        correction="auto" if correction is None else correction,
        read=read or "old",
        **shared,
    )  # fmt: skip
