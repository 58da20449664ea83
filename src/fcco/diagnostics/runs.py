"""Diagnostics of a run: the error of the tracked values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._full_data import Inner, inner_values

__all__ = ["TrackingError", "tracking_error"]


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
