"""Values, weighted gradients and Gram matrix of the inner functions, in chunks of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .. import _checks
from ..tracker import NonFiniteValue

__all__ = ["FullData", "Inner", "Loss"]

Inner = Callable[[Tensor], Tensor]
Loss = Callable[[], Tensor]


_CHUNK = 64
"""Blocks per autograd graph."""


class FullData:
    """A problem at the current parameters; `call` is the public function, which errors name."""

    def __init__(
        self,
        call: str,
        inner: Inner,
        num_inner: int,
        parameters: Iterable[Tensor],
        loss: Loss | None = None,
    ) -> None:
        _checks.integer(call, "num_inner", num_inner, 1)
        self.call, self.inner, self.loss = call, inner, loss
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise ValueError(
                f"`{call}(parameters=...)` has no tensor that requires a gradient "
                "(an iterator such as `model.parameters()` can be used only once)."
            )
        self.index = torch.arange(num_inner, device=self.parameters[0].device)

    def constraint_values(self) -> Tensor:
        """g_i(w) of scalar constraints, shape (m,), detached, in float64."""
        # Gradients stay enabled: an inner function may differentiate inside itself.
        values = torch.cat([self._of(p).detach().double() for p in self.index.split(_CHUNK)])
        if values.dim() == 2 and values.shape[1] != 1:
            raise ValueError(
                f"`{self.call}(inner=...)` gives d1 = {values.shape[1]} values per constraint: "
                "write a vector constraint as several scalar ones."
            )
        return values.reshape(-1)

    def gradient(self, weights: Tensor) -> list[Tensor]:
        """sum_i J_i^T weights_i (+ grad g_0) in float64, one tensor per parameter."""
        total = [torch.zeros_like(p, dtype=torch.float64) for p in self.parameters]
        for part in self._parts(self.index, _CHUNK):
            values = self._of(part)
            # One backward pass sums J_i^T weights_i over the chunk; no Jacobian is formed.
            cotangent = torch.ones(1) if part is None else weights[part].reshape(values.shape)
            gradients = torch.autograd.grad(
                values, self.parameters, cotangent.to(values), materialize_grads=True
            )
            for partial_sum, gradient in zip(total, gradients, strict=True):
                partial_sum += gradient
        self._check_finite(*total)
        return total

    def gram(self, per_layer: bool, index: Tensor | None = None, tile: int = 32) -> Tensor:
        """The Gram matrix J J^T of the blocks in `index` (all by default), in float64.

        Rows are ordered block by block; where there is a loss, its gradient is the last row. Two
        tiles of blocks are alive at a time and gradients are recomputed, so the memory is
        2 tile d1 d' numbers instead of n d1 d, at about n^2 d1 / (2 tile) backward passes per group
        of layers; d' is d or, `per_layer`, the size of the largest parameter.
        """
        index = self.index if index is None else index
        width = self._of(index[:1]).numel()  # d1, rows per block
        tiles = self._parts(index, tile)
        ends = list(itertools.accumulate(1 if t is None else len(t) * width for t in tiles))
        places = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        matrix = torch.zeros(ends[-1], ends[-1], dtype=torch.float64, device=index.device)
        for group in _layer_groups(self.parameters, per_layer):
            for position, row in enumerate(places):
                left = self._rows(tiles[position], group)
                matrix[row, row] += left @ left.T
                for other in range(position + 1, len(tiles)):
                    # The right tile has no name, so it is freed before the next is computed.
                    product = left @ self._rows(tiles[other], group).T
                    matrix[row, places[other]] += product
                    matrix[places[other], row] += product.T
                del left  # or three tiles would exist while the next left one is computed
        self._check_finite(matrix)
        return matrix

    def _rows(self, tile: Tensor | None, group: list[Tensor]) -> Tensor:
        """Gradients of the values of one tile with respect to `group`."""
        values = self._of(tile).reshape(-1)
        last = len(values) - 1  # one backward pass per value; the last one frees the graph
        rows = values.new_empty(len(values), sum(p.numel() for p in group), dtype=torch.float64)
        for position, value in enumerate(values):
            gradients = torch.autograd.grad(
                value, group, retain_graph=position < last, materialize_grads=True
            )
            torch.cat([g.reshape(-1).double() for g in gradients], out=rows[position])
        return rows

    def _parts(self, index: Tensor, size: int) -> list[Tensor | None]:
        """Blocks in parts of this size; None stands for g_0, if there is one."""
        return [*index.split(size), *([] if self.loss is None else [None])]

    def _of(self, index: Tensor | None) -> Tensor:
        """g_i(w) for the blocks in `index`, or g_0(w) for None, shape (1,), with its graph."""
        with torch.enable_grad():
            values = self.inner(index) if index is not None else self.loss()  # type: ignore[misc]
        if index is None:
            name, wanted, fits = "loss", "a scalar", values.numel() == 1
            values = values.reshape(-1)
        else:
            name, wanted = "inner", f"the shape ({len(index)},) or ({len(index)}, d1)"
            fits = values.dim() in (1, 2) and len(values) == len(index)
        argument = f"`{self.call}({name}=...)`"
        if not fits:
            raise ValueError(f"{argument} must return {wanted}, not: {tuple(values.shape)}.")
        if not values.requires_grad:
            raise ValueError(
                f"{argument} returned values without an autograd graph to the parameters (was it "
                "detached or computed under `torch.no_grad()`?)."
            )
        wrong = (~torch.isfinite(values.detach())).nonzero()
        if len(wrong):
            first = int(wrong[0, 0])
            block = "it" if index is None else f"block {int(index[first])}"
            raise NonFiniteValue(
                f"{argument} must be finite but {block} gives: {values[first].tolist()}."
            )
        return values

    def _check_finite(self, *gradients: Tensor) -> None:
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            raise NonFiniteValue(
                f"`{self.call}`: a gradient of inner or loss is not finite although the values are "
                "(a root or a norm at zero, or overflow in a low precision)."
            )


def _layer_groups(parameters: list[Tensor], per_layer: bool) -> list[list[Tensor]]:
    """Consecutive parameters, together no larger than the largest one (or all together)."""
    if not per_layer:
        return [parameters]
    limit = max(parameter.numel() for parameter in parameters)
    groups: list[list[Tensor]] = [[]]
    for parameter in parameters:
        if sum(each.numel() for each in [*groups[-1], parameter]) > limit:
            groups.append([])
        groups[-1].append(parameter)
    return groups
