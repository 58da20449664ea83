"""How well a run tracks: the inner values u, the gradient estimate v, and the choice of lambda."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _checks
from .evaluation import (
    Inner,
    Loss,
    all_blocks,
    fits,
    inner_values,
    norm,
    trainable,
    weighted_gradient,
)

if TYPE_CHECKING:
    from ..outer.base import AbstractOuter

__all__ = [
    "GradientError",
    "SmoothedZone",
    "TrackingError",
    "gradient_error",
    "smoothed_zone",
    "tracking_error",
]


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


@dataclass(frozen=True)
class SmoothedZone:
    """The share of blocks where the envelope differs from f in slope.

    Attributes:
        share: from 0 to 1, over the seen blocks.
        num_seen: how many blocks were counted.
    """

    share: float
    num_seen: int

    @property
    def hint(self) -> str | None:
        """What a share of exactly 0 or 1 suggests, else None."""
        if self.share == 0:
            return (
                "no block is in the smoothed zone: the smoothing has no effect here (it is small "
                "against the spread of u, or no block is near its kink)"
            )
        if self.share == 1:
            return (
                "every block is in the smoothed zone: the smoothing is large against the spread of "
                "u, and no block reaches an extreme slope of f"
            )
        return None

    def __str__(self) -> str:
        line = f"{self.share:.1%} of {self.num_seen} blocks in the smoothed zone"
        return line if self.hint is None else f"{line}; {self.hint}"


@dataclass(frozen=True)
class GradientError:
    """The error of a gradient estimate.

    Attributes:
        error: |v - grad F_lambda|.
        norm: |grad F_lambda|.
    """

    error: float
    norm: float

    @property
    def relative(self) -> float:
        """Error / norm (`inf` at a stationary point)."""
        return self.error / self.norm if self.norm > 0 else math.inf

    def __str__(self) -> str:
        return f"|v - grad F| = {self.error:.3g} where |grad F| = {self.norm:.3g}"


def tracking_error(
    tracked: Tensor, inner: Inner, *, seen: Tensor | None = None, chunk: int = 64
) -> TrackingError:
    r"""The error of the tracked values against the full data.

    .. math::
        \frac1n \sum_i \|u_i - g_i(w)\|^2

    Args:
        tracked: u, shape (n,) or (n, d1).
        inner: maps a LongTensor of blocks to g_i(w) with a graph, full data, deterministic.
        seen: shape (n,), True for blocks that have a tracked value; all by default.
        chunk: blocks per graph.

    Example:
        >>> import torch
        >>> from fcco.diagnostics import tracking_error
        >>> w = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
        >>> seen = torch.tensor([True, True, False])
        >>> print(tracking_error(torch.tensor([1.0, 1.5, 0.0]), lambda index: w[index], seen=seen))
        mean |u - g|^2 = 0.125, largest |u - g| = 0.5 over 2 seen blocks
    """
    call = "tracking_error"
    index = _seen(call, tracked, seen)
    values = inner_values(call, inner, index, chunk)
    rows = tracked.detach().to(values)[index]
    if rows.numel() != values.numel():
        raise ValueError(
            f"`{call}(tracked=...)` has the shape {tuple(tracked.shape)} but inner gives "
            f"{tuple(values.shape[1:])} per block."
        )
    square = (rows.reshape(values.shape) - values).square().reshape(len(index), -1).sum(1)
    return TrackingError(float(square.mean()), math.sqrt(float(square.max())), len(index))


def smoothed_zone(
    tracked: Tensor, outer: AbstractOuter, smoothing: float, *, seen: Tensor | None = None
) -> SmoothedZone:
    r"""The share of blocks in the smoothed zone, a check of the scale of lambda.

    .. math::
        \frac1n \#\{i : 0 < u_i < \lambda \rho\} \quad \text{for } f = \rho [\cdot]_+

    In general a block is in the zone where its slope is none of the extreme ones: inside
    `outer.dual_zone(smoothing)` where f has one, else where 0 < |grad f_lambda(u_i)| < C_f.
    A share of 0 or 1 suggests that lambda is of the wrong scale.

    Args:
        tracked: u, shape (n,) or (n, d1); the values g_i(w) themselves will do as well.
        outer: f itself, non-smooth and Lipschitz, not its envelope.
        smoothing: lambda.
        seen: shape (n,), True for blocks that have a tracked value; all by default.

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
    values = tracked.detach().double()[_seen(call, tracked, seen)]
    fits(call, outer, values)
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


def gradient_error(
    estimate: Iterable[Tensor],
    inner: Inner,
    outer: AbstractOuter,
    num_inner: int,
    parameters: Iterable[Tensor],
    *,
    loss: Loss | None = None,
    chunk: int = 64,
) -> GradientError:
    r"""The error of a gradient estimate v against the full-data gradient of the objective.

    .. math::
        \|v - \nabla F_\lambda(w)\|, \qquad
        \nabla F_\lambda = \nabla g_0 + \tfrac1n \sum_i J_i^\top \nabla f_\lambda(g_i)

    Args:
        estimate: v, one tensor per parameter (gradients, or the momentum buffers of an optimizer).
        inner: maps a LongTensor of blocks to g_i(w) with a graph, full data, deterministic.
        outer: the outer function that v refers to, f_lambda as a `MoreauEnvelope` for SONEX.
        num_inner: n.
        parameters: w.
        loss: g_0, if there is one.
        chunk: blocks per graph.

    Example:
        >>> import torch
        >>> from fcco.diagnostics import gradient_error
        >>> from fcco.outer import Absolute, MoreauEnvelope
        >>> w = torch.tensor([1.0, -0.5], requires_grad=True)
        >>> v = [torch.tensor([0.5, 0.0])]
        >>> huber = MoreauEnvelope(Absolute(), 1.0)
        >>> print(gradient_error(v, lambda index: w[index], huber, 2, [w]))
        |v - grad F| = 0.25 where |grad F| = 0.559
    """
    call = "gradient_error"
    weights = trainable(call, parameters)
    values = inner_values(call, inner, all_blocks(call, num_inner, weights[0]), chunk)
    fits(call, outer, values)
    pull = outer.gradient(values).detach() / num_inner
    exact = weighted_gradient(call, inner, pull, weights, chunk, loss)
    given = list(estimate)
    if [tensor.shape for tensor in given] != [tensor.shape for tensor in exact]:
        raise ValueError(
            f"`{call}(estimate=...)` must hold one tensor for each of the {len(exact)} trainable "
            f"parameters, of the same shape, but holds {len(given)}: "
            f"{[tuple(tensor.shape) for tensor in given]}."
        )
    difference = [v.detach().to(g) - g for v, g in zip(given, exact, strict=True)]
    return GradientError(norm(difference), norm(exact))


def _seen(call: str, tracked: Tensor, seen: Tensor | None) -> Tensor:
    """The indices of the blocks to look at."""
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
