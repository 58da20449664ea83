"""Directional derivatives of inner values, without a second forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._distributed import Group, patience

__all__ = ["Linearised"]


class Linearised:
    r"""g(x) + J v, also after the parameters have moved on from x.

    .. math:: J v = \frac{\partial}{\partial y}\,\bigl\langle J^\top y,\; v\bigr\rangle

    The vector-Jacobian product is linear in y, so its derivative along y is J v: one backward pass
    with a graph when this is built, one more for each direction v. It works with any function that
    can be differentiated twice. The graph of `values` stays usable.

    Args:
        values: g(x).
        parameters: x.
        group: ranks over which the gradient of `values` is averaged.
    """

    def __init__(
        self, values: Tensor, parameters: Sequence[Tensor], group: Group | None = None
    ) -> None:
        self.values, self._group = values.detach(), group
        self._probe = torch.zeros_like(values, requires_grad=True)  # y
        self._pulled: Sequence[Tensor | None] = [None for _ in parameters]  # J^T y
        if values.requires_grad:
            storages = {p.untyped_storage().data_ptr() for p in parameters}

            def copied(tensor: Tensor) -> Tensor:
                of_parameter = tensor.untyped_storage().data_ptr() in storages
                return tensor.detach().clone() if of_parameter else tensor

            # A step changes the parameters in place, and the derivative of a product needs them.
            hooks = torch.autograd.graph.saved_tensors_hooks(copied, lambda tensor: tensor)
            with torch.autocast(values.device.type, enabled=False), hooks:
                self._pulled = torch.autograd.grad(
                    values, parameters, self._probe, create_graph=True, allow_unused=True
                )

    def change(self, move: Sequence[Tensor]) -> Tensor:
        """J v for a move v, one tensor per parameter."""
        change = torch.zeros_like(self.values)
        with torch.autocast(change.device.type, enabled=False), torch.enable_grad():
            both = zip(self._pulled, move, strict=True)
            parts = [torch.sum(pulled * part) for pulled, part in both if pulled is not None]
            if parts:
                total = torch.stack(parts).sum()
                (change,) = torch.autograd.grad(total, self._probe, retain_graph=True)
        if self._group is not None:
            with patience:
                torch.distributed.all_reduce(change, group=self._group.handle)
            change = change / self._group.size
        return change
