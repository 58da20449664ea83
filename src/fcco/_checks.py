"""Validation: each error names the call, the limit and the reason.

Only plain numbers are checked. A tensor passes through, so that the same classes can be built
inside `torch.func.vmap` or a compiled graph, where looking at a value is not possible.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

__all__ = ["at_least", "below", "in_interval", "integer", "one_of", "positive", "requires"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def positive(call: str, name: str, value: Any) -> None:
    """Raise unless `value` is a finite number above zero."""
    if _is_number(value) and not 0 < value < math.inf:
        raise ValueError(f"`{call}({name}=...)` must be positive and finite but is: {value}.")


def at_least(call: str, name: str, value: Any, low: float) -> None:
    """Raise unless `value >= low`."""
    if _is_number(value) and not value >= low:
        raise ValueError(f"`{call}({name}=...)` must be at least {low} but is: {value}.")


def integer(call: str, name: str, value: Any, low: int) -> None:
    """Raise unless `value` is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"`{call}({name}=...)` must be an integer but is: {value!r}.")
    at_least(call, name, int(value), low)


def in_interval(
    call: str,
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise unless `value` lies between `low` and `high`."""
    if not _is_number(value):
        return
    above = value > low if open_low else value >= low
    under = value < high if open_high else value <= high
    if not (above and under):
        left, right = "(" if open_low else "[", ")" if open_high else "]"
        raise ValueError(
            f"`{call}({name}=...)` must lie in {left}{low}, {high}{right} but is: {value}."
        )


def below(call: str, name: str, value: Any, limit: float, limit_name: str, reason: str) -> None:
    """Raise unless `value < limit`; the message says what the limit is and why."""
    if _is_number(value) and _is_number(limit) and not value < limit:
        raise ValueError(
            f"`{call}({name}=...)` must be below {limit_name} = {limit:g} but is: {value} "
            f"({reason})."
        )


def one_of(call: str, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the allowed words."""
    if value not in allowed:
        words = ", ".join(repr(word) for word in allowed)
        raise ValueError(f"`{call}({name}=...)` must be one of {words} but is: {value!r}.")


def requires(method: str, outer: Any, *facts: str) -> None:
    """Raise unless the outer function declares every fact in `facts`."""
    missing = [fact for fact in facts if not getattr(outer, fact)]
    if missing:
        raise ValueError(
            f"{outer!r} is not compatible with {method}: it must be {' and '.join(facts)}; "
            f"missing: {', '.join(missing)}."
        )
