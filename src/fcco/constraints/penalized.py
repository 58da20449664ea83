"""Penalised constraints: an objective under g_i(w) <= tolerance_i, as one loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .. import checks
from ..inner import parse
from ..limits import number_and_names
from ..objective import Compositional
from ..outer.base import AbstractOuter
from ..outer.scalar import Absolute, Hinge, SquaredHinge
from ..precision import KeepsPrecision
from ..terms import CoupledTerm, Smoothing
from ..tracker import for_model

__all__ = ["ConstrainedObjective", "ConstraintReport", "MultiplierAverage", "Penalized"]

Kind = Literal["smoothed_hinge", "hinge", "squared_hinge"]


class ConstraintReport(NamedTuple):
    """What to log of the constraints."""

    violation: float
    """The largest g_i - tolerance_i; above 0 it is violated."""
    worst: str | int
    """The constraint it belongs to, by name or by number."""
    violated: int
    """How many constraints are above their limit."""
    seen: int
    """Out of how many; a constraint that was never seen has no value yet."""
    multiplier: float
    """The largest multiplier."""


class MultiplierAverage(KeepsPrecision):
    r"""A running average of the multipliers, one per constraint.

    .. math::
        \bar\nu_i \leftarrow \bar\nu_i + (\nu_i - \bar\nu_i) / \min(t_i, \text{horizon})

    This is the mean over the t_i steps since constraint i was first seen, and an exponential
    average with weight 1/horizon once there are more.

    Args:
        like: multipliers, whose shape, precision and device it takes.
        horizon: how many steps it looks back.

    Example:
        >>> import torch
        >>> from fcco.constraints import MultiplierAverage
        >>> average = MultiplierAverage(torch.zeros(2), horizon=100)
        >>> for multiplier in (0.0, 4.0, 2.0):
        ...     average.add(torch.tensor([multiplier, torch.nan]))
        >>> average.mean()
        tensor([2., nan])
    """

    value: Tensor
    count: Tensor

    def __init__(self, like: Tensor, horizon: int) -> None:
        super().__init__()
        checks.integer("MultiplierAverage", "horizon", horizon, 1)
        self.horizon = horizon
        self.register_buffer("value", torch.zeros_like(like))
        self.register_buffer("count", torch.zeros_like(like, dtype=torch.int64))

    @torch.no_grad()
    def add(self, multipliers: Tensor) -> None:
        """Take the multipliers of one step into account; NaN means not seen yet."""
        seen = ~multipliers.isnan()
        self.count.add_(seen).clamp_(max=self.horizon)
        moved = torch.where(seen, multipliers - self.value, 0)
        self.value.add_(moved / self.count.clamp(min=1))

    def mean(self) -> Tensor:
        """The average, NaN for constraints not seen yet."""
        return torch.where(self.count > 0, self.value, torch.nan)


class ConstrainedObjective(Compositional):
    """What every constrained method offers: a loss, violations and multipliers.

    Its only term holds the limits and answers `violation()` and `multipliers()`, one number per
    constraint; here they become dicts when the constraints have names.

    Attributes:
        method: the name of the method, where a recipe made the objective.
        samples_constraints: whether a call may hold only a part of the constraints.
    """

    method: str = ""
    samples_constraints: bool = True

    def violation(self) -> Any:
        """g_i - tolerance_i as the method sees it (positive: violated); a dict with names."""
        return self.term.limits.named(self.term.violation())

    def multipliers(self) -> Any:
        """The multiplier of each constraint: what the penalty implies, or the dual variable."""
        return self.term.limits.named(self.term.multipliers())

    def keep_average(self, horizon: int = 1000) -> None:
        """From now on average the multipliers over the last `horizon` steps or so.

        A multiplier read from tracked values carries their noise, and that of the hinge is either
        0 or rho/m; the average over steps is the estimate. It costs some tensor operations a step.
        """
        self.multiplier_average = MultiplierAverage(self.term.multipliers(), horizon)

    @property
    def _average(self) -> Any:
        return self._modules.get("multiplier_average")

    def average_multipliers(self) -> Any:
        """The running average of `multipliers()`, since `keep_average` was called."""
        if self._average is None:
            raise ValueError(
                "`average_multipliers()` needs `keep_average(horizon)` before the training: no "
                "average of the multipliers was kept."
            )
        return self.term.limits.named(self._average.mean())

    def close(self) -> None:
        """End the tracking step; a hook calls it after each optimizer step."""
        average = self._average
        before = 0 if average is None else self.term.step
        super().close()
        if average is not None and self.term.step > before:
            average.add(self.term.multipliers())

    def report(self, values: Tensor | Mapping[str, Tensor] | None = None) -> ConstraintReport:
        """Largest violation, number of violated constraints, largest multiplier.

        Args:
            values: g_i(w) of all constraints, from full data say, as a tensor or by name. The
                multipliers of a penalty are then those at these values; dual variables stay what
                they are. None: what the method has tracked.
        """
        if values is None:
            excess, multipliers = self.term.violation(), self.term.multipliers()
        else:
            excess, multipliers = self._at(self._in_order(values))
        if excess.dim() > 1:
            excess = excess.flatten(1).amax(1)
        seen = int((~excess.isnan()).sum())
        if not seen:
            raise ValueError("`report()` needs values: no constraint has been seen yet.")
        worst = int(excess.nan_to_num(nan=-torch.inf).argmax())
        names = self.term.limits.names
        return ConstraintReport(
            violation=excess[worst].item(),
            worst=worst if names is None else names[worst],
            violated=int((excess > 0).sum()),
            seen=seen,
            multiplier=multipliers.nan_to_num(nan=0.0).max().item(),
        )

    def _at(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Violations and multipliers at given values of all constraints."""
        term = self.term
        if not isinstance(term, CoupledTerm):  # dual variables do not depend on values
            return values - term.limits.of(None), term.multipliers()
        excess = values - term.limits.of(None, term.tracker.dim)
        slope = term.smoothed.multiplier(excess + term.limits.margin)
        return term.outer.violation(excess), slope * (term.weight / term.tracker.num_inner)

    def _in_order(self, values: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Given values of all constraints as a tensor."""
        limits = self.term.limits
        entry = parse("constraints", limits.names, values)
        rows = entry.value if entry.index is None else entry.value[entry.index.argsort()]
        if rows.shape[:1] != (limits.number,):
            raise ValueError(
                f"`report(values=...)` must hold all {limits.number} constraints, one row each, "
                f"but has shape {tuple(rows.shape)}."
            )
        return rows.detach().to(limits.tolerance)


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
        process_group: see `Compositional`.
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
        process_group: Any = "auto",
        **options: Any,
    ) -> None:
        checks.one_of("Penalized", "kind", kind, ("smoothed_hinge", "hinge", "squared_hinge"))
        checks.positive("Penalized", "penalty", penalty)
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
        super().__init__(model, optimizer, term, process_group=process_group)


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
