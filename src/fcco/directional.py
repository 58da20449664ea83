"""Directional derivatives of inner values, without a second forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Directional"]


class Directional:
    r"""J v: how inner values change along a direction in parameter space.

    .. math:: J v = \frac{\partial}{\partial y}\,\bigl\langle J^\top y,\; v\bigr\rangle

    The vector-Jacobian product is linear in y, so its derivative along y is J v: one backward pass
    with a graph when it is built, one more for each direction. It works with any function that can
    be differentiated twice, whatever holds its parameters. The graph of `values` stays usable.

    Args:
        values: g(w), any shape, with gradient.
        parameters: w.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> change = Directional(torch.stack([w.prod(), w.sum()]), [w])
        >>> change.along([torch.tensor([1.0, -1.0])])
        tensor([1., 0.])
    """

    def __init__(self, values: Tensor, parameters: Sequence[Tensor]) -> None:
        self._probe = torch.zeros_like(values, requires_grad=True)
        self._pulled = torch.autograd.grad(
            values, parameters, self._probe, create_graph=True, allow_unused=True
        )

    def along(self, direction: Sequence[Tensor]) -> Tensor:
        """J v for one tensor per parameter; a parameter that the values do not use adds nothing."""
        parts = [
            torch.sum(pulled * part)
            for pulled, part in zip(self._pulled, direction, strict=True)
            if pulled is not None
        ]
        if not parts:
            return torch.zeros_like(self._probe)
        total = torch.stack(parts).sum()
        return torch.autograd.grad(total, self._probe, retain_graph=True)[0]
