"""Limits of constraints: at most, at least, equal, between."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from .._state import KeepsPrecision

__all__ = [
    "AtLeast",
    "Equal",
    "Limit",
    "Limits",
    "Tolerance",
    "bounds",
    "excess",
    "number_and_names",
    "side",
    "violation",
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


# Of values (n,) or (n, d1) and their limits high and low, which is None without lower limits.


def violation(values: Tensor, high: Tensor, low: Tensor | None) -> Tensor:
    """See `Limits.violation`."""
    above = values - high
    return above if low is None else torch.maximum(above, low - values)


def excess(values: Tensor, high: Tensor, low: Tensor | None, margin: Any) -> Tensor:
    """See `Limits.excess`."""
    if low is None:
        return values - high + margin
    half = (high - low) / 2
    return violation(values, high, low) + half.clip(max=margin)


def side(values: Tensor, high: Tensor, low: Tensor | None) -> Any:
    """See `Limits.side`."""
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
        return values if self.plain else excess(values, *self._of(index, dim), self.margin)

    def violation(self, values: Tensor, index: Tensor | None = None, dim: int = 1) -> Tensor:
        """How far values are outside their limits; inside, minus the way to the nearer one."""
        return violation(values, *self._of(index, dim))

    def side(self, values: Tensor, index: Tensor | None = None) -> Any:
        """The slope of `violation`: 1, or -1 where the lower limit is the nearer one."""
        return side(values, *self._of(index, 1))

    def _of(self, index: Tensor | None, dim: int) -> tuple[Tensor, Tensor | None]:
        low = None if self.upper else self.of(index, low=True)
        return self.of(index, dim), low

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
