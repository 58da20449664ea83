"""A coupled term (1/n) sum_i f_i(g_i(w)): an outer function and a tracker."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .. import _checks
from .._schedules import Schedule, Smoothing, Width
from .._state import KeepsPrecision
from ..outer import AbstractOuter, MoreauEnvelope
from ..tracker import InnerTracker, Tracked
from .base import AbstractTerm

__all__ = [
    "AtLeast",
    "CoupledTerm",
    "Equal",
    "Limit",
    "Limits",
    "OuterTerm",
    "Tolerance",
    "as_lambda",
    "automatic_width",
    "bounds",
    "number_and_names",
    "weighted_mean",
    "widest",
]


@dataclass(frozen=True)
class AtLeast:
    """A lower limit: the value of a constraint shall be at least `limit`."""

    limit: float

    def __str__(self) -> str:
        return f"at least {self.limit:.4g}"


@dataclass(frozen=True)
class Equal:
    """An equality: the value of a constraint shall be `limit`."""

    limit: float

    def __str__(self) -> str:
        return f"= {self.limit:.4g}"


Limit = float | AtLeast | Equal | tuple[float | None, float | None]
"""The limit of a constraint: a number (at most), `AtLeast`, `Equal`, or (low, high)."""

Tolerance = float | AtLeast | Equal | Sequence[Limit] | Tensor


def bounds(call: str, name: Any, limit: Any) -> tuple[float, float]:
    """Read a `Limit` as (low, high), infinite where a side is open; the others are for errors."""
    low, high = -math.inf, limit
    if isinstance(limit, AtLeast):
        low, high = limit.limit, math.inf
    elif isinstance(limit, Equal):
        low = high = limit.limit
    elif isinstance(limit, (tuple, list)) and len(limit) == 2:
        low = low if limit[0] is None else limit[0]
        high = math.inf if limit[1] is None else limit[1]
    if not (_is_number(low) and _is_number(high)):
        raise TypeError(
            f"`{call}` must give each constraint a number (at most), `fcco.AtLeast(b)`, "
            f"`fcco.Equal(b)` or (low, high), but that of `{name}` is: {limit!r}."
        )
    low, high = float(low), float(high)
    if not low <= high or (math.isinf(low) and math.isinf(high)):
        raise ValueError(
            f"`{call}` must give a finite limit of each constraint, low <= high, but that of "
            f"`{name}` is: {limit!r}. Leave out what has no limit."
        )
    return low, high


def _is_number(value: Any) -> bool:
    one = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, numbers.Real)
    return one and not isinstance(value, bool)


def number_and_names(call: str, constraints: int | Sequence[str]) -> tuple[int, Any]:
    """Read `constraints=...`: a number, or a list of names."""
    if isinstance(constraints, str):
        raise ValueError(
            f"`{call}(constraints=...)` must be a number or a list of names but is one string: "
            f"{constraints!r}."
        )
    if isinstance(constraints, Mapping):
        raise ValueError(
            f"`{call}(constraints=...)` must be a number or a list of names, with the limits as "
            "`tolerance=[...]`; a dict of limits is for `fcco.constrained`."
        )
    names = tuple(constraints) if isinstance(constraints, Iterable) else None
    number: Any = constraints if names is None else len(names)
    _checks.integer(call, "constraints", number, 1)
    return int(number), names


class Limits(KeepsPrecision):
    """The limits of constraints, low_i <= g_i(w) <= high_i, with a margin and names.

    Args:
        number: m, the number of blocks.
        like: a tensor whose precision and device the limits take.
        tolerance: g_i <= tolerance_i, one number or one per block; or other limits, see `Limit`.
        margin: train for so much less than high_i and more than low_i, to land on the safe side; at
            most to the middle of the two.
        names: names of the blocks, for values given by name and for reports.
        call: the caller's name, for the error text.

    Example:
        >>> import torch
        >>> limits = Limits(2, torch.zeros(()), tolerance=[0.1, (0.2, 0.3)], names=("a", "b"))
        >>> limits.excess(torch.tensor([0.5, 0.1]))
        tensor([0.4000, 0.1000])
        >>> limits.named(torch.tensor([1.0, 2.0]))
        {'a': 1.0, 'b': 2.0}
    """

    tolerance: Tensor  # high_i
    low: Tensor | None  # low_i, unless all limits are upper ones

    def __init__(
        self,
        number: int,
        like: Tensor,
        tolerance: Tolerance = 0.0,
        margin: float = 0.0,
        names: Sequence[str] | None = None,
        call: str = "Limits",
    ) -> None:
        super().__init__()
        self.number, self.margin = number, margin
        self.names = None if names is None else tuple(names)
        named = self.names or range(number)
        if {len(named), len(set(named))} != {number}:
            raise ValueError(
                f"`{call}(names=...)` must be {number} different names, one per block, but is: "
                f"{self.names}."
            )
        if isinstance(tolerance, str) or tolerance is None:
            raise TypeError(
                f"`{call}(tolerance=...)` must be a number or {number} numbers but is: "
                f"{tolerance!r}."
            )
        low = None
        if isinstance(tolerance, (AtLeast, Equal)):
            tolerance = [tolerance] * number
        limit: Any = tolerance
        if isinstance(tolerance, (list, tuple)) and len(tolerance) == number:
            argument = f"{call}(tolerance=...)"
            pairs = [bounds(argument, *each) for each in zip(named, tolerance, strict=True)]
            low, limit = zip(*pairs, strict=True)
            low = like.new_tensor(low) if max(low) > -math.inf else None
        elif isinstance(tolerance, (list, tuple)):  # refused below
            limit = torch.zeros(len(tolerance))
        limit = torch.as_tensor(limit, dtype=like.dtype, device=like.device)
        if limit.dim() > 1 or (limit.dim() == 1 and len(limit) != number):
            raise ValueError(
                f"`{call}(tolerance=...)` must be one number or {number}, one per block, but has "
                f"shape {tuple(limit.shape)}."
            )
        if low is None and not bool(limit.isfinite().all()):
            raise ValueError(f"`{call}(tolerance=...)` must be finite but is: {tolerance}.")
        if low is not None and margin != 0 and bool((low == limit).all()):
            raise ValueError(f"`{call}(margin=...)` has no meaning for equalities.")
        self.upper = low is None
        self.register_buffer("low", low, persistent=False)
        self.moved = bool((limit != 0).any())
        self.plain = limit.dim() == 0 and not self.moved and margin == 0
        # A setting: a checkpoint must not replace the limits of the program that loads it.
        self.register_buffer("tolerance", limit, persistent=False)

    def of(self, index: Tensor | None, dim: int = 1, low: bool = False) -> Tensor:
        """high_i or low_i of some blocks (None: all), for values of dimension `dim`."""
        limit: Any = self.low if low else self.tolerance
        if limit.dim() and index is not None:
            limit = limit[index]
        return limit if dim == 1 or limit.dim() == 0 else limit.unsqueeze(-1)

    def excess(self, values: Tensor, index: Tensor | None = None, dim: int = 1) -> Tensor:
        """How far values are outside their limits, margin included: <= 0 is wanted."""
        if self.upper:
            return values if self.plain else values - self.of(index, dim) + self.margin
        half = (self.of(index) - self.of(index, low=True)) / 2
        return self.violation(values, index) + half.clip(max=self.margin)

    def violation(self, values: Tensor, index: Tensor | None = None, dim: int = 1) -> Tensor:
        """How far values are outside their limits; inside, minus the way to the nearer one."""
        above = values - self.of(index, dim)
        return above if self.upper else torch.maximum(above, self.of(index, low=True) - values)

    def side(self, values: Tensor, index: Tensor | None = None) -> Any:
        """The slope of `violation`: 1, or -1 where the lower limit is the nearer one."""
        if self.upper:
            return 1.0
        return 2 * (values - self.of(index) >= self.of(index, low=True) - values).to(values) - 1

    def written(self) -> list[Limit]:
        """The limits, one per block, as they would be written."""
        high = self.tolerance.expand(self.number).tolist()
        low = [-math.inf] * self.number if self.low is None else self.low.tolist()
        return [
            Equal(a) if a == b else AtLeast(a) if math.isinf(b) else b if math.isinf(a) else (a, b)
            for a, b in zip(low, high, strict=True)
        ]

    def named(self, values: Tensor) -> Any:
        """One value per block: the tensor itself, or a dict when the blocks have names."""
        if self.names is None:
            return values
        return dict(zip(self.names, values.tolist(), strict=True))


def weighted_mean(
    outer: AbstractOuter, excess: Tensor, weight: float | Tensor, blocks: int | Tensor
) -> tuple[Tensor, Tensor]:
    r"""The estimate of a coupled term and its slopes, pure and branch-free.

    .. math::
        \frac{\text{weight}}{B_1}\sum_{i\in\mathcal B_1} f(u_i), \qquad
        \frac{\text{weight}}{B_1}\nabla f(u_i)

    Args:
        outer: f.
        excess: u_i.
        weight: factor in front.
        blocks: B1, the number of blocks in the batch.
    """
    values, slope = outer.value_and_gradient(excess)
    share = weight / blocks
    return values.sum() * share, slope * share


NOISE, LAG = 4.0, 8.0
"""Width of the rounded kink for `smoothing="auto"`, in standard errors of u by noise and by lag."""


def automatic_width(noise: Any, lag: Any, limit: Any) -> Any:
    """The width of the rounded kink for `smoothing="auto"`; pure.

    Args:
        noise: standard error of u by noise, a number or a tensor.
        lag: the same by lag.
        limit: see `widest`.

    Example:
        >>> round(automatic_width(0.1, 0.01, limit=math.inf), 4)
        0.48
    """
    width = NOISE * noise + LAG * lag + 1e-12  # above 0 by a hair: the envelope divides by lambda
    return width.clip(max=limit) if isinstance(width, Tensor) else min(width, limit)


def widest(outer: AbstractOuter) -> Any:
    """The largest width that is useful: a weakly convex f asks for lambda below 1/weak_convexity.

    At half of that lambda its envelope is as smooth as it can be.
    """
    rho, jump = outer.weak_convexity, outer.jump
    assert jump is not None
    return math.inf if isinstance(rho, (int, float)) and rho == 0 else jump / (2 * rho)


def as_lambda(call: str, outer: AbstractOuter, smoothing: Smoothing) -> Schedule | Literal["auto"]:
    """Read `smoothing=...`: lambda as it is, or from the `Width` of the rounded kink of f."""
    if isinstance(smoothing, str):
        _checks.one_of(call, "smoothing", smoothing, ("auto",))
    elif not isinstance(smoothing, Width):
        return smoothing
    if outer.jump is None:
        raise ValueError(
            f"`{call}(smoothing={smoothing!r})` needs a kink whose slope jumps by a known amount, "
            f"which {outer!r} does not declare (`jump`); give lambda itself, a number."
        )
    return "auto" if isinstance(smoothing, str) else smoothing.smoothing(outer.jump)


class OuterTerm(AbstractTerm):
    r"""A term with an outer function f, smoothed or not.

    With `smoothing="auto"` the rounded kink is as wide as the estimates are wrong:

    .. math::
        \lambda\cdot\text{jump} = 4\,\text{error of } u \text{ by noise}
            + 8\,\text{error of } u \text{ by lag},

    wide while the estimates lag behind a model that moves, and narrow when only noise is left. See
    `fcco.tracker.error` for the two.

    Args:
        outer: f.
        tracker: the running estimates u_i.
        smoothing: lambda, 0 for f itself, or a function of the step; a `Width`; or `"auto"`, which
            needs a tracker with `measure=True` or `gamma="auto"`.
    """

    width: Tensor | None

    def __init__(self, outer: AbstractOuter, tracker: InnerTracker, smoothing: Smoothing) -> None:
        super().__init__(tracker)
        if tracker.dim != (outer.dim or max(tracker.dim, 2)):
            raise ValueError(
                f"{outer!r} acts on inner values of dimension {outer.dim or 'two or more'} but the "
                f"tracker has `dim={tracker.dim}`."
            )
        schedule = as_lambda(type(self).__name__, outer, smoothing)
        self.outer, self.smoothing_schedule = outer, schedule
        self._smoothed: tuple[float, AbstractOuter] | None = None
        # The width of the last step, for evaluations and reports.
        self.register_buffer("width", self._first_width(schedule))
        if isinstance(schedule, str):
            return
        first = schedule(0) if callable(schedule) else schedule
        if not (isinstance(first, float) and first > 0):
            _checks.at_least(type(self).__name__, "smoothing", first, 0.0)
        self.smoothed_by(first)  # one above 1/weak_convexity is refused at once

    @property
    def smoothing(self) -> Any:
        """The current lambda; a schedule is a function of the steps this term had a part in.

        With `"auto"` it is a tensor where the state is on a GPU, so that nobody waits for it.
        """
        schedule = self.smoothing_schedule
        if isinstance(schedule, str):
            width = self._buffers["width"]
            assert width is not None and self._jump is not None
            return (width.item() if width.device.type == "cpu" else width[0]) / self._jump
        return schedule(self.step) if callable(schedule) else schedule

    @smoothing.setter
    def smoothing(self, value: Smoothing) -> None:
        schedule = as_lambda(type(self).__name__, self.outer, value)
        self.width, self.smoothing_schedule = self._first_width(schedule), schedule

    def _first_width(self, schedule: Schedule | Literal["auto"]) -> Tensor | None:
        """The width before any step, None unless it is automatic."""
        if not isinstance(schedule, str):
            return None
        if self.tracker.estimate is None:
            raise ValueError(
                f"`{type(self).__name__}(smoothing='auto')` needs a tracker that measures its own "
                "error: `InnerTracker(..., measure=True)` or `gamma='auto'`."
            )
        self._jump, self._widest = self.outer.jump, widest(self.outer)
        return self.tracker.value.new_full((1,), 1e-12)

    def set_width(self, at_first: Callable[[], Tensor] | None = None) -> None:
        """Follow the error of the estimates, with `smoothing="auto"`; before each training loss.

        Args:
            at_first: gives the width while that error is not known; 0 unless given.
        """
        width, tracker = self._buffers["width"], self.tracker
        if width is None or tracker.estimate is None:
            return
        noise, lag, steps = tracker.estimate.pooled_error(tracker.constant_gamma)
        found = automatic_width(noise, lag, self._widest)
        if at_first is not None and isinstance(steps, Tensor):  # to look would make the host wait
            found = torch.where(steps > 0, found, at_first())
        elif at_first is not None and steps == 0:
            found = at_first()
        width.fill_(found)

    def excess(self, values: Tensor | None = None) -> Tensor:
        """What f is applied to, for all blocks: u_i less a limit or threshold, where there is one.

        Args:
            values: other values of all blocks than the tracked ones.
        """
        return self.tracker.rows if values is None else values

    @property
    def smoothed(self) -> AbstractOuter:
        """f_lambda for the current lambda, or f itself when that is 0."""
        return self.smoothed_by(self.smoothing)

    def smoothed_by(self, smoothing: float) -> AbstractOuter:
        """f_lambda, or f itself when lambda is 0; the last one is kept."""
        if isinstance(smoothing, Tensor):  # to compare it would make the host wait
            return MoreauEnvelope(self.outer, smoothing)  # type: ignore[arg-type]
        if self._smoothed is None or self._smoothed[0] != smoothing:
            # The envelope refuses a negative lambda, or one above 1/weak_convexity.
            smoothed = MoreauEnvelope(self.outer, smoothing) if smoothing else self.outer
            self._smoothed = (smoothing, smoothed)
        return self._smoothed[1]


class CoupledTerm(OuterTerm):
    r"""A weighted coupled term, optionally read as penalised constraints.

    .. math::
        \frac{\text{weight}}{n}\sum_{i=1}^n f_\lambda\bigl(g_i(w) - \text{tolerance}_i\bigr)

    Args:
        outer: f.
        tracker: the tracker of g_i.
        smoothing: lambda, 0 for f itself, or a function of the step (annealing); or a `Width`.
        weight: factor in front of the sum, or a function of the step (a ramp).
        tolerance: subtracted from g_i, one number or one per block: g_i <= tolerance_i. For other
            limits (see `Limit`) f must not decrease, and is applied to how far g_i is outside.
        margin: train for g_i <= tolerance_i - margin, to land on the safe side.
        names: names of the blocks, for values given by name and for reports.

    Example:
        >>> import torch, fcco
        >>> tracker = fcco.InnerTracker(2, gamma=1.0)
        >>> term = fcco.CoupledTerm(fcco.Hinge(3.0), tracker, smoothing=0.1)
        >>> term.tracker.set_values(torch.tensor([0, 1]), torch.tensor([0.2, -1.0]))
        >>> term.value()
        tensor(0.3000)
        >>> term.violation(), term.multipliers()
        (tensor([ 0.2000, -1.0000]), tensor([1., 0.]))
    """

    def __init__(
        self,
        outer: AbstractOuter,
        tracker: InnerTracker,
        *,
        smoothing: Smoothing = 0.0,
        weight: Schedule = 1.0,
        tolerance: Tolerance = 0.0,
        margin: float = 0.0,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(outer, tracker, smoothing)
        if not callable(weight) and weight != 1:
            _checks.positive("CoupledTerm", "weight", weight)
        self.weight_schedule = weight
        self.limits = Limits(
            tracker.num_inner, tracker.value, tolerance, margin, names, call="CoupledTerm"
        )
        self.names = self.limits.names
        if margin != 0 and not outer.monotone:
            raise ValueError(
                f"`CoupledTerm(margin=...)` needs a non-decreasing outer function: {outer!r} "
                "would be moved, not made stricter. Lower its own tolerance instead."
            )
        if not self.limits.upper and not (outer.monotone and tracker.dim == 1):
            raise ValueError(
                "`CoupledTerm(tolerance=...)`: `AtLeast`, `Equal` and (low, high) need a "
                f"non-decreasing outer function of one number, which {outer!r} is not."
            )
        if self.limits.moved and outer.dim != 1 and not outer.monotone:
            raise ValueError(
                f"`CoupledTerm(tolerance=...)` is subtracted from every component of g_i, which "
                f"does not loosen {outer!r}; give the outer function its own tolerance."
            )

    @property
    def weight(self) -> float:
        """The current factor; a schedule is a function of the steps this term had a part in."""
        schedule = self.weight_schedule
        return schedule(self.step) if callable(schedule) else schedule

    def excess(self, values: Tensor | None = None) -> Tensor:
        """The u_i - tolerance_i + margin, or those of given values of all blocks."""
        return self.limits.excess(super().excess(values), dim=self.tracker.dim)

    def loss(self, tracked: Tracked) -> Tensor:
        """The mean of f_lambda over the sampled blocks, which estimates the mean over all."""
        if self.tracker.updating:
            self.set_width()
        smoothing, weight = self.smoothing, self.weight
        excess = self.limits.excess(tracked.value, tracked.index, self.tracker.dim)
        blocks = max(tracked.index.shape[0], 1)
        value, slope = weighted_mean(self.smoothed_by(smoothing), excess, weight, blocks)
        if not self.limits.upper:
            slope = slope * self.limits.side(tracked.value, tracked.index)
        return tracked.as_loss(value, slope)

    def value(self) -> Tensor:
        """Mean of weight * f(u_i - tolerance_i) over the blocks seen."""
        beyond = self.limits.violation(self.table(), self.tracker.seen, self.tracker.dim)
        return self.weight * self.outer(beyond).mean()

    def violation(self) -> Tensor:
        """How far each constraint is exceeded (positive: violated), NaN where never seen."""
        return self.where_seen(lambda u: self.at(u)[0])

    def multipliers(self) -> Tensor:
        """(weight/n) grad f_lambda(u_i - tolerance_i), NaN where never seen.

        Read from the tracked u, they carry its noise divided by lambda; `fcco.diagnostics.kkt`
        recomputes them on full data.
        """
        return self.where_seen(lambda u: self.at(u)[1])

    def at(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Violations and multipliers of all constraints at given values g_i."""
        limits, dim = self.limits, self.tracker.dim
        slope = self.smoothed.multiplier(limits.excess(values, dim=dim)) * limits.side(values)
        violation = self.outer.violation(limits.violation(values, dim=dim))
        return violation, slope * (self.weight / self.tracker.num_inner)

    def where_seen(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of the table, NaN for blocks that were never seen."""
        result = function(self.tracker.rows)
        seen = self.tracker.seen.view(-1, *(1 for _ in result.shape[1:]))
        return torch.where(seen, result, torch.nan)
