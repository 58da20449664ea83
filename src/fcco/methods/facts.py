"""What a method may ask of the problem, and how it refuses."""

from __future__ import annotations

from typing import Literal

from .. import _checks
from ..outer.base import AbstractOuter

__all__ = ["InnerKind", "dimension", "monotone_if_weakly_convex", "smooth_inner"]

InnerKind = Literal["smooth", "weakly_convex"]
"""What the inner functions g_i are: smooth, or only weakly convex (with kinks)."""


def dimension(method: str, outer: AbstractOuter, dim: int | None) -> int:
    """d1: what `outer` declares, or what the caller gave."""
    dimension = outer.dim if dim is None else dim
    if dimension is None:
        raise ValueError(f"`{method}(dim=...)` is needed: {outer!r} takes vectors of any length.")
    return dimension


def smooth_inner(method: str, inner: InnerKind) -> None:
    """Refuse inner functions with kinks."""
    _checks.one_of(method, "inner", inner, ("smooth", "weakly_convex"))
    if inner != "smooth":
        raise ValueError(
            f"`{method}(inner='weakly_convex')`: {method} needs smooth inner functions g_i. For "
            "non-smooth ones use sonx or alexr2 with a non-decreasing outer function."
        )


def monotone_if_weakly_convex(method: str, outer: AbstractOuter, inner: InnerKind) -> None:
    """Refuse an outer function that may decrease when the inner ones have kinks.

    f(g) of a convex f and a weakly convex g is weakly convex only if f does not decrease.
    """
    _checks.one_of(method, "inner", inner, ("smooth", "weakly_convex"))
    if inner == "weakly_convex":
        _checks.requires(f"{method}(inner='weakly_convex')", outer, "monotone")
