"""Diagnostics of a run: errors of u and v, the scale of lambda, and step sizes of optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer, RMSprop

from .. import _checks
from ._full_data import FullData, Inner, Loss, check_outer, inner_values, norm, trainable

if TYPE_CHECKING:
    from ..outer.base import AbstractOuter

__all__ = [
    "GradientError",
    "SmoothedZone",
    "StepSizeBounds",
    "TrackingError",
    "gradient_error",
    "smoothed_zone",
    "step_size_bounds",
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


def tracking_error(
    tracked: Tensor, inner: Inner, *, seen: Tensor | None = None, chunk: int = 64
) -> TrackingError:
    r"""The error of the tracked values against the full data.

    .. math::
        \frac1n \sum_i \|u_i - g_i(w)\|^2

    `fcco.theory.expected_tracking_error` is its value in a steady state.

    Args:
        tracked: u, shape (n,) or (n, d1): `tracker.value`.
        inner: maps a LongTensor of blocks to g_i(w) with a graph, full data, deterministic.
        seen: shape (n,), True for blocks that have a tracked value (`tracker.seen`); all by
            default.
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
    data = FullData(call, inner, num_inner, trainable(call, parameters), loss, chunk)
    values = data.values(outer)
    exact = data.gradient(outer.gradient(values).detach() / num_inner)
    given = list(estimate)
    if [tensor.shape for tensor in given] != [tensor.shape for tensor in exact]:
        raise ValueError(
            f"`{call}(estimate=...)` must hold one tensor for each of the {len(exact)} trainable "
            f"parameters, of the same shape, but holds {len(given)}: "
            f"{[tuple(tensor.shape) for tensor in given]}."
        )
    difference = [v.detach().to(g) - g for v, g in zip(given, exact, strict=True)]
    return GradientError(norm(difference), norm(exact))


@dataclass(frozen=True)
class StepSizeBounds:
    """The smallest and the largest factor 1 / (sqrt(s) + eps), over coordinates and steps.

    `StepSizeBounds()` is empty; merging with it changes nothing.

    Attributes:
        lower: c_l.
        upper: c_u.
    """

    lower: float = math.inf
    upper: float = 0.0

    @property
    def ratio(self) -> float:
        """c_u / c_l, which enters the iteration complexity to the power 2.5."""
        return self.upper / self.lower

    def merge(self, other: StepSizeBounds) -> StepSizeBounds:
        """The bounds that hold for both."""
        return StepSizeBounds(min(self.lower, other.lower), max(self.upper, other.upper))

    def __str__(self) -> str:
        return f"step sizes in lr * [{self.lower:.3g}, {self.upper:.3g}], ratio {self.ratio:.3g}"


@torch.no_grad()
def step_size_bounds(optimizer: Optimizer) -> StepSizeBounds:
    r"""The bounds c_l and c_u of the step sizes an Adam-type optimizer has just used.

    .. math::
        c_l \le \frac{1}{\sqrt{\hat s} + \varepsilon} \le c_u, \qquad
        \hat s = \frac{s}{1 - \beta_2^t}

    with s the running mean of squared gradients (its running maximum for `amsgrad`; without the
    bias correction, and less the squared mean where `centered`, for RMSprop). The theory of SONEX
    with adaptive steps assumes such bounds (`fcco.theory.sonex_settings`); the effective step is
    lr times this factor.

    Args:
        optimizer: `Adam`, `AdamW` or `RMSprop` of torch, after at least one step.

    Example:
        Merge over training:

        >>> import torch
        >>> from fcco.diagnostics import StepSizeBounds, step_size_bounds
        >>> w = torch.tensor([1.0, -10.0], requires_grad=True)
        >>> optimizer = torch.optim.Adam([w], lr=0.1)
        >>> bounds = StepSizeBounds()
        >>> for _ in range(3):
        ...     w.grad = 2 * w.detach()
        ...     optimizer.step()
        ...     bounds = bounds.merge(step_size_bounds(optimizer))
        >>> print(bounds)
        step sizes in lr * [0.05, 0.553], ratio 11.1

    References:
        The paper, appendix on adaptive step sizes; Kingma and Ba (2015), Adam.
    """
    if not isinstance(optimizer, (Adam, AdamW, RMSprop)):
        raise TypeError(
            "`step_size_bounds(optimizer=...)` must be a torch Adam, AdamW or RMSprop but is: "
            f"{type(optimizer).__name__} (other optimizers scale their steps differently)."
        )
    bounds = StepSizeBounds()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state and parameter.numel() > 0:
                lower, upper = torch.aminmax(_factors(group, state))
                bounds = bounds.merge(StepSizeBounds(lower.item(), upper.item()))
    if bounds.upper == 0:
        raise ValueError("`step_size_bounds(optimizer=...)` has no state yet: call `step()` first.")
    return bounds


def _factors(group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    """1 / (sqrt(s) + eps) of each coordinate of one parameter."""
    if "square_avg" in state:  # RMSprop
        square = state["square_avg"].double()
        if group["centered"]:
            # Rounding can make the centred moment slightly negative.
            square = (square - state["grad_avg"].double().square()).clamp(min=0)
    else:
        name = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
        square = state[name].double() / (1 - float(group["betas"][1]) ** float(state["step"]))
    return 1 / (square.sqrt() + float(group["eps"]))
