"""Limits of constraints: at most, at least, equal, between; and what a term with limits offers."""

from __future__ import annotations

import abc
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._state import KeepsPrecision
from ..rules.arrays import per_row
from ..tracker import InnerTracker, for_model
from .base import AbstractTerm


@dataclass(frozen=True)
class AtLeast:
    """A lower limit: the value must be at least `limit`."""

    limit: float

    def __str__(self) -> str:
        return f"at least {self.limit:.4g}"


@dataclass(frozen=True)
class Equal:
    """An equality: the value must be `limit`."""

    limit: float

    def __str__(self) -> str:
        return f"= {self.limit:.4g}"


Limit = float | AtLeast | Equal | tuple[float | None, float | None]
"""The limit of a constraint: a number (at most), `AtLeast`, `Equal`, or (low, high)."""

Tolerance = float | AtLeast | Equal | Sequence[Limit] | Tensor


def bounds(argument: str, name: Any, limit: Any) -> tuple[float, float]:
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
            f"`{argument}` takes numbers (at most), `fcco.AtLeast(b)`, `fcco.Equal(b)` or "
            f"(low, high), but that of `{name}` is: {limit!r}."
        )
    low, high = float(low), float(high)
    if not low <= high or (math.isinf(low) and math.isinf(high)):
        raise ValueError(
            f"`{argument}` needs a finite limit and low <= high; that of `{name}` is: {limit!r}."
        )
    return low, high


def _is_number(value: Any) -> bool:
    one = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, numbers.Real)
    return one and not isinstance(value, bool)


# Of values (n,) or (n, d1) and their limits high and low, which is None without lower limits.


def violation(values: Tensor, high: Tensor, low: Tensor | None) -> Tensor:
    """How far values are outside their limits; inside, minus the way to the nearer one."""
    above = values - high
    return above if low is None else torch.maximum(above, low - values)


def excess(values: Tensor, high: Tensor, low: Tensor | None, margin: Any) -> Tensor:
    """How far values are outside their limits, margin included: <= 0 is wanted."""
    if low is None:
        return values - high + margin
    half = (high - low) / 2
    return violation(values, high, low) + half.clip(max=margin)


def side(values: Tensor, high: Tensor, low: Tensor | None) -> Any:
    """The slope of `violation`: 1, or -1 where the lower limit is the nearer one."""
    return 1.0 if low is None else 2 * (values - high >= low - values).to(values) - 1


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
            raise ValueError(f"`{call}(names=...)` must be {number} different names: {self.names}.")
        if isinstance(tolerance, (AtLeast, Equal)):
            tolerance = [tolerance] * number
        high: Any = tolerance
        low: Any = None
        listed = isinstance(tolerance, (list, tuple))
        if listed and not all(type(each) is float and math.isfinite(each) for each in tolerance):
            high = [0.0] * len(tolerance)  # of another length: refused below
            if len(tolerance) == number:
                argument, pairs = f"{call}(tolerance=...)", zip(named, tolerance, strict=True)
                low, high = zip(*(bounds(argument, *each) for each in pairs), strict=True)
                low = like.new_tensor(low) if max(low) > -math.inf else None
        high = torch.as_tensor(high, dtype=like.dtype, device=like.device)
        if high.dim() > 1 or (high.dim() == 1 and len(high) != number):
            shape = tuple(high.shape)
            raise ValueError(f"`{call}(tolerance=...)` must be one number or {number}: {shape}.")
        if low is None and not bool(high.isfinite().all()):
            raise ValueError(f"`{call}(tolerance=...)` must be finite but is: {tolerance}.")
        if low is not None and margin != 0 and bool((low == high).all()):
            raise ValueError(f"`{call}(margin=...)` has no meaning for equalities.")
        self.upper = low is None
        self.moved = bool((high != 0).any())
        self.plain = high.dim() == 0 and not self.moved and margin == 0
        # Settings: a checkpoint must not replace the limits of the program that loads it.
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("tolerance", high, persistent=False)

    def of(self, index: Tensor | None, dim: int = 1) -> tuple[Tensor, Tensor | None]:
        """high_i and low_i of some blocks (None: all), for values of dimension `dim`."""
        high, low = self.tolerance, self.low
        if high.dim() and index is not None:
            high, low = high[index], None if low is None else low[index]
        return high if dim == 1 or high.dim() == 0 else high.unsqueeze(-1), low

    def excess(self, values: Tensor, index: Tensor | None = None, dim: int = 1) -> Tensor:
        return values if self.plain else excess(values, *self.of(index, dim), self.margin)

    def violation(self, values: Tensor, index: Tensor | None = None, dim: int = 1) -> Tensor:
        return violation(values, *self.of(index, dim))

    def side(self, values: Tensor, index: Tensor | None = None) -> Any:
        return side(values, *self.of(index))

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


class ConstraintTerm(AbstractTerm):
    """A term of limits low_i <= g_i(w) <= high_i: the base of every method for them.

    Args:
        tracker: of the g_i.
        limits: `tolerance`, `margin` and `names`, see `Limits`.
    """

    beside_loss = True
    integrates: ClassVar[bool] = False  # multipliers grow with every step of an excess

    def __init__(self, tracker: InnerTracker, **limits: Any) -> None:
        super().__init__(tracker)
        limits.setdefault("call", type(self).__name__)
        self.limits = Limits(tracker.num_inner, tracker.value, **limits)
        self.names = self.limits.names

    def values(self) -> Tensor:
        """The g_i as the method knows them, of any value where never seen."""
        return self.tracker.rows

    def violation_at(self, values: Tensor) -> Tensor:
        """How far each constraint is exceeded at given values g_i (positive: violated)."""
        return self.limits.violation(values, dim=self.tracker.dim)

    @abc.abstractmethod
    def multipliers_at(self, values: Tensor) -> Tensor:
        """The multiplier of each constraint at given values g_i, where it depends on them."""

    def violation(self) -> Tensor:
        """How far each constraint is exceeded (positive: violated), NaN where never seen."""
        return self.where_seen(self.violation_at(self.values()))

    def multipliers(self) -> Tensor:
        """The multiplier of each constraint, NaN where never seen."""
        return self.where_seen(self.multipliers_at(self.values()))

    def where_seen(self, rows: Tensor) -> Tensor:
        return torch.where(per_row(self.tracker.seen, rows), rows, torch.nan)

    def group_weights(self) -> Tensor:
        """The weight of each value in the gradient, NaN where never seen."""
        return self.multipliers()

    def capped(self, values: Tensor | None) -> Tensor:
        """Which multipliers are the largest possible, at given values or the tracked ones."""
        return torch.zeros_like(self.tracker.seen)


class UnsampledTerm(ConstraintTerm):
    """Base of terms that see every constraint in each call, keep none and take one-sided limits."""

    def __init__(
        self, call: str, model: nn.Module, number: int, limits: Any, measure: bool = False
    ) -> None:
        once: Any = {"gamma": 1.0, "correction": 0.0, "read": "new", "sampled": False}
        super().__init__(for_model(model, number, measure=measure, **once), **limits)
        if any(isinstance(limit, (Equal, tuple)) for limit in self.limits.written()):
            raise ValueError(
                f"`{call}` takes limits on one side: write (low, high) and `Equal` as two limits, "
                "`AtLeast(low)` and high, of one value, or use the default method."
            )

    def signed(self, multipliers: Tensor) -> Tensor:
        """Multipliers of the values, from those of the violations: negative for lower limits."""
        return multipliers * self.limits.side(self.tracker.rows)
