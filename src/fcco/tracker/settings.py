"""Which settings of a tracker are legal."""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import _checks

__all__ = ["check_settings"]


def check_settings(
    num_inner: int,
    dim: int,
    gamma: float,
    correction: Any,
    read: str,
    bounds: tuple[float, float] | None,
    refresh_every: int | None,
    on_nonfinite: str,
    dtype: torch.dtype,
) -> None:
    """Raise unless an `InnerTracker` can be built from these."""
    call = "InnerTracker"
    _checks.integer(call, "num_inner", num_inner, 1)
    _checks.integer(call, "dim", dim, 1)
    _checks.in_interval(call, "gamma", gamma, 0.0, 1.0)
    _checks.one_of(call, "read", read, ("old", "new"))
    _checks.one_of(call, "on_nonfinite", on_nonfinite, ("raise", "skip", "deferred"))
    if isinstance(correction, str):
        _checks.one_of(call, "correction", correction, ("theory", "auto"))
        if correction == "theory":
            _checks.in_interval(call, "gamma", gamma, 0.0, 1.0, open_high=True)
    else:
        _checks.in_interval(call, "correction", correction, 0.0, math.inf, open_high=True)
    if gamma == 0 and correction in (0, 0.0):
        raise ValueError("`InnerTracker(gamma=0)` with `correction=0` would never move.")
    if refresh_every is not None:
        _checks.integer(call, "refresh_every", refresh_every, 1)
    if bounds is not None and not bounds[0] <= bounds[1]:
        raise ValueError(f"`{call}(bounds=...)` must be (low, high) but is: {bounds}.")
    if not dtype.is_floating_point:
        raise ValueError(f"`InnerTracker(dtype=...)` must be a float type but is: {dtype}.")
