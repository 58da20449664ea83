"""Diagnostics of a run: the error of the tracked values and the scale of lambda."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..objective import Compositional
from ..outer import AbstractOuter
from ..terms import AbstractTerm, OuterTerm
from ._full_data import Inner, inner_values

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


@dataclass(frozen=True, eq=False)
class SmoothedZone:
    """The blocks where the envelope differs from f in slope.

    Attributes:
        share: their share of the seen blocks, from 0 to 1.
        width: of the rounded kink, in units of the inner values; NaN where f declares no `jump`.
        inside: which blocks they are, shape (n,).
        num_seen: how many blocks were counted.
    """

    share: float
    width: float
    inside: Tensor
    num_seen: int

    def __str__(self) -> str:
        hints = {
            0.0: ": the smoothing has no effect here (too small, or no block is near its kink)",
            1.0: ": the smoothing is too large, no block reaches an extreme slope of f",
        }
        zone = "the smoothed zone" if math.isnan(self.width) else f"a zone {self.width:.3g} wide"
        line = f"{self.share:.1%} of {self.num_seen} blocks in {zone}"
        return line + hints.get(self.share, "")


def smoothed_zone(
    objective: Compositional | OuterTerm, values: Tensor | None = None
) -> SmoothedZone:
    r"""The share of blocks in the smoothed zone, a check of the scale of lambda.

    For the hinge rho [.]_+ the zone is 0 < u_i - tolerance_i < lambda rho, for CVaR
    0 < u_i - s < lambda / r. In general it is where the slope is none of the extreme ones: inside
    `outer.dual_zone(smoothing)` where f has one, else where 0 < |grad f_lambda| < C_f. A share of 0
    or 1 says that lambda is of the wrong scale.

    Args:
        objective: an objective, or a term of one; its f must be non-smooth and Lipschitz. Limits,
            margin and the threshold of CVaR are its own.
        values: g_i(w) of all blocks, from full data say; None: those tracked.

    Example:
        >>> import torch, fcco
        >>> from fcco.diagnostics import smoothed_zone
        >>> term = fcco.CoupledTerm(fcco.Hinge(2.0), fcco.ema_tracker(4, gamma=0.1),
        ...                         smoothing=0.1, tolerance=0.5)
        >>> print(smoothed_zone(term, torch.tensor([-0.5, 0.6, 0.8, 2.5])))
        25.0% of 4 blocks in a zone 0.2 wide
    """
    call = "smoothed_zone"
    term = objective if isinstance(objective, AbstractTerm) else objective.term
    if not isinstance(term, OuterTerm):
        raise ValueError(
            f"`{call}(objective=...)` needs a term with an outer function, such as `CoupledTerm` "
            f"or `CVaRTerm`, but has: {type(term).__name__}."
        )
    outer, smoothing, tracker = term.outer, term.smoothing, term.tracker
    if outer.smooth or not math.isfinite(outer.lipschitz):
        raise ValueError(
            f"`{call}(objective=...)` needs a non-smooth, Lipschitz outer function, which "
            f"{outer!r} is not: it has no extreme slope to leave."
        )
    seen = tracker.seen
    if values is None:
        if not bool(seen.any()):
            raise ValueError(f"`{call}(...)` has no seen block yet; give `values`.")
    else:
        if values.shape != tracker.rows.shape:
            raise ValueError(
                f"`{call}(values=...)` must have the shape {tuple(tracker.rows.shape)}, one row "
                f"per block, but has: {tuple(values.shape)}."
            )
        seen = torch.ones_like(seen)
        values = values.detach().to(tracker.rows)
    inside = _in_zone(outer, term.excess(values).double(), smoothing) & seen
    number = int(seen.sum())
    width = math.nan if outer.jump is None else smoothing * outer.jump
    return SmoothedZone(int(inside.sum()) / number, width, inside, number)


def _in_zone(outer: AbstractOuter, excess: Tensor, smoothing: float) -> Tensor:
    """Which blocks have a slope between the extreme ones of f."""
    if smoothing == 0:
        return torch.zeros(len(excess), dtype=torch.bool, device=excess.device)
    zone = outer.dual_zone(smoothing)
    if zone is not None:
        return (excess > zone[0]) & (excess < zone[1])
    slope = outer.envelope_gradient(excess, smoothing).reshape(len(excess), -1).norm(dim=1)
    # Rounding must not count a block that has reached the extreme slope.
    margin = 1e-9 * outer.lipschitz
    return (slope > margin) & (slope < outer.lipschitz - margin)


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
