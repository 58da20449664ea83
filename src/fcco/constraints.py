"""Penalised constraints: an objective under g_i(w) <= tolerance_i, as one loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import checks
from .objective import Compositional
from .outer.base import AbstractOuter
from .outer.scalar import Absolute, Hinge, SquaredHinge
from .terms import CoupledTerm, Smoothing
from .tracker import for_model

__all__ = ["Penalized"]

Kind = Literal["smoothed_hinge", "hinge", "squared_hinge"]


class Penalized(Compositional):
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
        penalty: rho; the penalty is exact for rho/m above the largest multiplier.
        kind: `"smoothed_hinge"` (SONEX), `"hinge"` (SONX), `"squared_hinge"` (SOX).
        smoothing: lambda of the smoothed hinge (its quadratic zone is lambda rho wide), or a
            schedule such as `Annealed`.
        equality: penalise |g_i| instead, for g_i = 0 up to the tolerance.
        tolerance: g_i <= tolerance_i, one number or one per constraint.
        margin: train for tolerance - margin.
        gamma: weight of the new value.
        correction: gamma' of the tracker, see `InnerTracker`.
        outer: an outer function of your own instead of `kind`, such as `TwoSidedHinge`.
        process_group: see `Compositional`.
        options: further options of `InnerTracker`.

    Example:
        >>> import torch, fcco
        >>> w = torch.nn.Linear(1, 1, bias=False).double()
        >>> optimizer = torch.optim.SGD(w.parameters(), lr=0.01)
        >>> objective = fcco.Penalized(w, optimizer, 1, penalty=2.0, smoothing=0.1, gamma=1.0)
        >>> for _ in range(500):
        ...     loss = objective(lambda: ((w.weight - 1).square().sum() / 2, w.weight.view(1) - 0.3))
        ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
        >>> round(w.weight.item(), 4), objective.multipliers().round(decimals=4)
        (0.3636, tensor([0.6364], dtype=torch.float64))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        constraints: int | Sequence[str],
        *,
        penalty: float,
        kind: Kind = "smoothed_hinge",
        smoothing: Smoothing | None = None,
        equality: bool = False,
        tolerance: float | Sequence[float] | Tensor = 0.0,
        margin: float = 0.0,
        gamma: float = 0.1,
        correction: float | Literal["theory", "auto"] = "auto",
        outer: AbstractOuter | None = None,
        process_group: Any = "auto",
        **options: Any,
    ) -> None:
        checks.one_of("Penalized", "kind", kind, ("smoothed_hinge", "hinge", "squared_hinge"))
        checks.positive("Penalized", "penalty", penalty)
        names = None if isinstance(constraints, int) else tuple(constraints)
        number = constraints if isinstance(constraints, int) else len(constraints)
        if kind == "smoothed_hinge" and smoothing is None:
            raise ValueError(
                "`Penalized(smoothing=...)` is needed for the smoothed hinge: the residual "
                "violation is about smoothing * m * multiplier."
            )
        if outer is None:
            outer = _penalty_function(kind, penalty, equality)
        term = CoupledTerm(
            outer,
            for_model(
                model, number, outer.dim or 1, gamma=gamma, correction=correction, **options
            ),
            smoothing=smoothing if kind == "smoothed_hinge" and smoothing is not None else 0.0,
            tolerance=tolerance,
            margin=margin,
            names=names,
        )
        super().__init__(model, optimizer, term, process_group=process_group)

    def violation(self) -> Any:
        """Tracked g_i - tolerance_i (positive: violated); a dict when constraints have names."""
        return self._named(self.term.violation())

    def multipliers(self) -> Any:
        """The multipliers that the penalty implies, (1/m) f_lambda'(g_i - tolerance_i)."""
        return self._named(self.term.multipliers())

    def _named(self, values: Tensor) -> Any:
        names = self.term.names
        return values if names is None else dict(zip(names, values.tolist(), strict=True))


def _penalty_function(kind: Kind, penalty: float, equality: bool) -> AbstractOuter:
    if equality:
        if kind == "squared_hinge":
            raise ValueError(
                "`Penalized(equality=True)` offers the exact penalty |g| only; state an equality "
                "with a quadratic penalty as part of the loss g0."
            )
        return Absolute(penalty)
    return SquaredHinge(penalty) if kind == "squared_hinge" else Hinge(penalty)
