"""Penalised constraints: an objective under g_i(w) <= tolerance_i, as one loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from ..limits import number_and_names
from ..outer import Absolute, Hinge, SquaredHinge
from ..outer.base import AbstractOuter
from ..terms import AbstractTerm, CoupledTerm, Smoothing
from ..tracker import for_model
from .base import ConstrainedObjective as ConstrainedObjective
from .base import ConstraintReport as ConstraintReport
from .base import MultiplierAverage as MultiplierAverage

__all__ = ["ConstrainedObjective", "ConstraintReport", "MultiplierAverage", "Penalized"]

Kind = Literal["smoothed_hinge", "hinge", "squared_hinge"]


class Penalized(ConstrainedObjective):
    r"""Minimise g0(w) subject to constraints, by an exact or smoothed penalty.

    .. math::
        \min_w\; g_0(w) + \frac{\rho}{m}\sum_{i=1}^m \bigl[g_i(w) - \text{tolerance}_i\bigr]_+

    The function you pass returns `(loss, values)`: values of all constraints (m,), of a sampled
    subset with `index`, or a dict by name. A constraint that is absent from a batch is left alone.
    Each value is tracked, so a noisy mini-batch value is not penalised for its noise.

    With the smoothed hinge, a constraint with multiplier nu* ends about lambda m nu* above its
    limit (while nu* < rho/m; above that it is not enforced): choose lambda by that law, or set
    `margin` to it.

    Args:
        model: your model.
        optimizer: your optimizer.
        constraints: their number m, or their names.
        penalty: rho; the penalty is exact for rho/m above the largest multiplier. Needed unless
            `outer` is given.
        kind: `"smoothed_hinge"` (SONEX), `"hinge"` (SONX), `"squared_hinge"` (SOX).
        smoothing: lambda of the smoothed hinge (its quadratic zone is lambda rho wide), or a
            schedule such as `Annealed`.
        equality: penalise |g_i - tolerance_i| instead, for g_i = tolerance_i. (For
            |g_i| <= kappa give `outer=DeadZone(kappa, rho)`.)
        tolerance: g_i <= tolerance_i, one number or one per constraint.
        margin: train for tolerance - margin; not for equalities.
        gamma: weight of the new value.
        correction: gamma' of the tracker, see `InnerTracker`.
        outer: an outer function of your own instead of `kind`, such as `TwoSidedHinge`; it
            holds its own weight rho, and `smoothing` may be 0 for it.
        dim: d1, when `outer` leaves it open.
        objective: a coupled term of the objective, when g0 or a part of it is coupled too; its
            tracker and outer function are its own. The function you pass then returns
            `{"objective": entries, "constraints": values}`, or `(loss, {...})`, and `index` is a
            dict likewise.
        process_group: see `Compositional`.
        offload: see `Compositional`.
        options: further options of `InnerTracker`.

    Example:
        >>> import torch, fcco
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> objective = fcco.Penalized(model, optimizer, 1, penalty=2.0, smoothing=0.1, gamma=1.0)
        >>> def loss_and_constraint():
        ...     w = model.weight.view(1)
        ...     return (w - 1).square().sum() / 2, w - 0.3
        >>> for _ in range(500):
        ...     objective(loss_and_constraint).backward()
        ...     optimizer.step(); optimizer.zero_grad()
        >>> round(model.weight.item(), 4), objective.multipliers().round(decimals=4)
        (0.3636, tensor([0.6364], dtype=torch.float64))

        With a coupled objective, here the mean of |w - c_i| over three blocks:

        >>> c, model = torch.tensor([0.2, 0.9, 1.0]).double(), torch.nn.Linear(1, 1).double()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> apart = fcco.CoupledTerm(
        ...     fcco.Absolute(), fcco.msvr(3, gamma=1.0, dtype=torch.float64), smoothing=0.1)
        >>> objective = fcco.Penalized(
        ...     model, optimizer, ["bound"], penalty=2.0, smoothing=0.1, gamma=1.0, objective=apart)
        >>> def both():
        ...     w = model.bias
        ...     return {"objective": w - c, "constraints": {"bound": w.squeeze() - 0.3}}
        >>> for _ in range(1000):
        ...     objective(both).backward()
        ...     optimizer.step(); optimizer.zero_grad()
        >>> round(model.bias.item(), 4), objective.report().worst
        (0.3333, 'bound')
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        constraints: int | Sequence[str],
        *,
        penalty: float | None = None,
        kind: Kind = "smoothed_hinge",
        smoothing: Smoothing | None = None,
        equality: bool = False,
        tolerance: float | Sequence[float] | Tensor = 0.0,
        margin: float = 0.0,
        gamma: float = 0.1,
        correction: float | Literal["theory", "auto"] = "auto",
        outer: AbstractOuter | None = None,
        dim: int | None = None,
        objective: AbstractTerm | None = None,
        process_group: Any = "auto",
        offload: bool = False,
        **options: Any,
    ) -> None:
        _checks.one_of("Penalized", "kind", kind, ("smoothed_hinge", "hinge", "squared_hinge"))
        if penalty is not None:
            _checks.positive("Penalized", "penalty", penalty)
        number, names = number_and_names("Penalized", constraints)
        if kind == "smoothed_hinge" and smoothing is None:
            raise ValueError(
                "`Penalized(smoothing=...)` is needed for the smoothed hinge: the residual "
                "violation is about smoothing * m * multiplier."
            )
        if kind != "smoothed_hinge" and smoothing:
            raise ValueError(
                f"`Penalized(smoothing=...)` belongs to kind='smoothed_hinge'; kind={kind!r} would "
                f"ignore it, but it is: {smoothing}."
            )
        if outer is None:
            outer = _penalty_function(kind, penalty, equality)
        elif penalty is not None or equality:
            raise ValueError(
                "`Penalized(outer=...)` has its own weight and shape: leave `penalty` and "
                f"`equality` out, or {outer!r} would silently win over them."
            )
        term = CoupledTerm(
            outer,
            for_model(
                model, number, dim or outer.dim or 1, gamma=gamma, correction=correction, **options
            ),
            smoothing=smoothing or 0.0,
            tolerance=tolerance,
            margin=margin,
            names=names,
        )
        super().__init__(
            model,
            optimizer,
            term,
            objective=objective,
            process_group=process_group,
            offload=offload,
        )


def _penalty_function(kind: Kind, penalty: float | None, equality: bool) -> AbstractOuter:
    if penalty is None:
        raise ValueError("`Penalized(penalty=...)` is needed unless `outer` is given.")
    if equality:
        if kind == "squared_hinge":
            raise ValueError(
                "`Penalized(equality=True)` offers the exact penalty |g| only; state an equality "
                "with a quadratic penalty as part of the loss g0."
            )
        return Absolute(penalty)
    return SquaredHinge(penalty) if kind == "squared_hinge" else Hinge(penalty)
