"""Diagnostics of a run: the error of the tracked values and the scale of lambda."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _checks
from ..outer import AbstractOuter
from ._full_data import Inner, check_outer, inner_values

__all__ = ["SmoothedZone", "TrackingError", "smoothed_zone", "tracking_error"]


@dataclass(frozen=True)
class TrackingError:
    """The error of the tracked inner values.

    Attributes:
        mean_square: the mean of |u_i - g_i|^2 over the seen blocks.
        largest: max_i |u_i - g_i| over the seen blocks.
        num_seen: how many blocks have a tracked value.
    """

    mean_square: float
    largest: float
    num_seen: int

    def __str__(self) -> str:
        return (
            f"mean |u - g|^2 = {self.mean_square:.3g}, largest |u - g| = {self.largest:.3g} over "
            f"{self.num_seen} seen blocks"
        )


def tracking_error(
    tracked: Tensor, inner: Inner, *, seen: Tensor | None = None, chunk: int = 64
) -> TrackingError:
    r"""The error (1/n) sum_i |u_i - g_i(w)|^2 of the tracked values against the full data.

    `fcco.theory.expected_tracking_error` is its value in a steady state.

    Args:
        tracked: u, shape (n,) or (n, d1): `tracker.value`.
        inner: see `fcco.diagnostics`.
        seen: shape (n,), True for blocks that have a tracked value (`tracker.seen`); all by
            default.
        chunk: see `fcco.diagnostics`.

    Example:
        >>> import torch
        >>> from fcco.diagnostics import tracking_error
        >>> w = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
        >>> seen = torch.tensor([True, True, False])
        >>> print(tracking_error(torch.tensor([1.0, 1.5, 0.0]), lambda index: w[index], seen=seen))
        mean |u - g|^2 = 0.125, largest |u - g| = 0.5 over 2 seen blocks
    """
    call = "tracking_error"
    index = _seen_blocks(call, tracked, seen)
    values = inner_values(call, inner, index, chunk)
    rows = tracked.detach().to(values)[index]
    if rows.numel() != values.numel():
        raise ValueError(
            f"`{call}(tracked=...)` has the shape {tuple(tracked.shape)} but inner gives "
            f"{tuple(values.shape[1:])} per block."
        )
    square = (rows.reshape(values.shape) - values).square().reshape(len(index), -1).sum(1)
    return TrackingError(float(square.mean()), math.sqrt(float(square.max())), len(index))


@dataclass(frozen=True)
class SmoothedZone:
    """The share of blocks where the envelope differs from f in slope.

    Attributes:
        share: from 0 to 1, over the seen blocks.
        num_seen: how many blocks were counted.
    """

    share: float
    num_seen: int

    def __str__(self) -> str:
        hints = {
            0.0: ": the smoothing has no effect here (too small, or no block is near its kink)",
            1.0: ": the smoothing is too large, no block reaches an extreme slope of f",
        }
        line = f"{self.share:.1%} of {self.num_seen} blocks in the smoothed zone"
        return line + hints.get(self.share, "")


def smoothed_zone(
    tracked: Tensor, outer: AbstractOuter, smoothing: float, *, seen: Tensor | None = None
) -> SmoothedZone:
    r"""The share of blocks in the smoothed zone, a check of the scale of lambda.

    For the hinge rho [.]_+ the zone is 0 < u_i < lambda rho. In general it is where the slope is
    none of the extreme ones: inside `outer.dual_zone(smoothing)` where f has one, else where
    0 < |grad f_lambda(u_i)| < C_f. A share of 0 or 1 says that lambda is of the wrong scale.

    Args:
        tracked: u, shape (n,) or (n, d1); the values g_i(w) themselves will do as well.
        outer: f itself, non-smooth and Lipschitz, not its envelope.
        smoothing: lambda.
        seen: as in `tracking_error`.

    Example:
        >>> import torch
        >>> from fcco.diagnostics import smoothed_zone
        >>> from fcco.outer import Hinge
        >>> u = torch.tensor([-1.0, 0.1, 0.3, 2.0])
        >>> print(smoothed_zone(u, Hinge(2.0), 0.1))
        25.0% of 4 blocks in the smoothed zone
        >>> smoothed_zone(u, Hinge(2.0), 1e-4).share
        0.0
    """
    call = "smoothed_zone"
    _checks.positive(call, "smoothing", smoothing)
    if outer.smooth or not math.isfinite(outer.lipschitz):
        raise ValueError(
            f"`{call}(outer=...)` must be the non-smooth, Lipschitz function f itself, which "
            f"{outer!r} is not: it has no extreme slope to leave."
        )
    values = tracked.detach().double()[_seen_blocks(call, tracked, seen)]
    check_outer(call, outer, values)
    zone = outer.dual_zone(smoothing)
    if zone is not None:
        inside = ((values > zone[0]) & (values < zone[1])).reshape(len(values))
    else:
        slope = outer.envelope_gradient(values, smoothing).detach().reshape(len(values), -1)
        slope = slope.norm(dim=1)
        # Rounding must not count a block that has reached the extreme slope.
        margin = 1e-9 * outer.lipschitz
        inside = (slope > margin) & (slope < outer.lipschitz - margin)
    return SmoothedZone(float(inside.double().mean()), len(values))


def _seen_blocks(call: str, tracked: Tensor, seen: Tensor | None) -> Tensor:
    number = len(tracked)
    if seen is None:
        return torch.arange(number, device=tracked.device)
    if seen.shape != (number,):
        raise ValueError(
            f"`{call}(seen=...)` must have the shape ({number},) but has: {tuple(seen.shape)}."
        )
    index = seen.to(tracked.device).bool().nonzero().reshape(-1)
    if len(index) == 0:
        raise ValueError(f"`{call}(seen=...)` has no seen block.")
    return index
