"""Validation of arguments: each error names the call, the limit and the reason.

The value of a tensor is never looked at, so that the same classes can be built inside
`torch.func.vmap` or a compiled graph, and without waiting for a GPU.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor


def number(call: str, name: str, value: Any) -> bool:
    """Raise unless `value` is a number or a tensor; return whether it may be compared."""
    # The plain numbers come first: a compiled graph then traces nothing else of this function.
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return True
    # A tensor may have any shape: batches of parameters are used by vmap and by broadcasting.
    if isinstance(value, (Tensor, torch.SymInt, torch.SymFloat)):
        return False
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # of NumPy
        return True
    kind = type(value).__name__
    raise TypeError(f"`{call}({name}=...)` must be a number but is: {value!r} ({kind}).")


def positive(call: str, name: str, value: Any) -> None:
    """Raise unless `value` is a finite number above zero."""
    if number(call, name, value) and not 0 < value < math.inf:
        raise ValueError(f"`{call}({name}=...)` must be positive and finite but is: {value}.")


def finite(call: str, name: str, value: Any, low: float = -math.inf) -> None:
    """Raise unless `value` is a finite number, not below `low`."""
    if number(call, name, value) and not -math.inf < value < math.inf:
        raise ValueError(f"`{call}({name}=...)` must be finite but is: {value}.")
    at_least(call, name, value, low)


def at_least(call: str, name: str, value: Any, low: float) -> None:
    """Raise unless `value >= low`."""
    if number(call, name, value) and not value >= low:
        raise ValueError(f"`{call}({name}=...)` must be at least {low} but is: {value}.")


def integer(call: str, name: str, value: Any, low: int) -> None:
    """Raise unless `value` is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"`{call}({name}=...)` must be an integer but is: {value!r}.")
    if value < low:
        raise ValueError(f"`{call}({name}=...)` must be at least {low} but is: {value}.")


def in_interval(
    call: str, name: str, value: Any, low: float, high: float,
    *, open_low: bool = False, open_high: bool = False,
) -> None:  # fmt: skip
    """Raise unless `value` lies between `low` and `high`."""
    if not number(call, name, value):
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
    if number(call, name, value) and number(call, limit_name, limit) and not value < limit:
        raise ValueError(
            f"`{call}({name}=...)` must be below {limit_name} = {limit:g} but is: {value} "
            f"({reason})."
        )


def meant(name: str, names: Collection[str]) -> str:
    """A question for a misspelt name; empty when no name is near."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean `{near[0]}`?" if near else ""


def known(call: str, given: Collection[str], settings: Sequence[str]) -> None:
    """Raise if a keyword of a call is none of its settings."""
    for name in given:
        if name not in settings:
            raise TypeError(
                f"`{call}` has no such setting: `{name}` ({meant(name, settings) or 'unknown'}). "
                f"Settings: {', '.join(settings)}."
            )


def one_of(call: str, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the allowed words."""
    if value not in allowed:
        words = ", ".join(repr(word) for word in allowed)
        near = meant(str(value), allowed)
        given = f"{value!r} ({near})" if near else f"{value!r}"
        raise ValueError(f"`{call}({name}=...)` must be one of {words} but is: {given}.")


def requires(method: str, outer: Any, *facts: str) -> None:
    """Raise unless the outer function declares every fact in `facts`."""
    missing = [fact for fact in facts if not getattr(outer, fact)]
    if missing:
        raise ValueError(
            f"{outer!r} is not compatible with {method}: it must be {' and '.join(facts)}; "
            f"missing: {', '.join(missing)}."
        )
