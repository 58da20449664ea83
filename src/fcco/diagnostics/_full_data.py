"""Values, weighted gradients and Gram matrix of the inner functions, in chunks of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _checks
from ..tracker import NonFiniteValue

__all__ = ["FullData", "Inner", "Loss", "inner_values", "trainable"]

Inner = Callable[[Tensor], Tensor]
Loss = Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class FullData:
    """A problem at the current parameters."""

    call: str  # the public function, which errors name
    inner: Inner
    num_inner: int
    parameters: list[Tensor]  # from `trainable`
    loss: Loss | None = None
    chunk: int = 64  # blocks per graph

    def __post_init__(self) -> None:
        _checks.integer(self.call, "num_inner", self.num_inner, 1)

    @property
    def index(self) -> Tensor:
        """All blocks, 0, ..., n - 1."""
        return torch.arange(self.num_inner, device=self.parameters[0].device)

    def constraint_values(self) -> Tensor:
        """g_i(w) of scalar constraints, shape (m,), detached, in float64."""
        values = inner_values(self.call, self.inner, self.index, self.chunk)
        if values.dim() == 2 and values.shape[1] != 1:
            raise ValueError(
                f"`{self.call}(inner=...)` gives d1 = {values.shape[1]} values per constraint: "
                "write a vector constraint as several scalar ones."
            )
        return values.reshape(-1)

    def gradient(self, weights: Tensor) -> list[Tensor]:
        """sum_i J_i^T weights_i (+ grad g_0) in float64, one tensor per parameter."""
        if self.loss is None:
            total = [torch.zeros_like(p, dtype=torch.float64) for p in self.parameters]
        else:
            value = _loss_value(self.call, self.loss)
            gradients = torch.autograd.grad(value, self.parameters, materialize_grads=True)
            # A copy, because the sum below is in place and autograd may return the user's tensor.
            total = [gradient.to(torch.float64, copy=True) for gradient in gradients]
        for part in self.index.split(self.chunk):
            values = _block_values(self.call, self.inner, part)
            # One backward pass sums J_i^T weights_i over the chunk; no Jacobian is formed.
            cotangent = weights[part].reshape(values.shape).to(values)
            parts = torch.autograd.grad(values, self.parameters, cotangent, materialize_grads=True)
            for partial_sum, gradient in zip(total, parts, strict=True):
                partial_sum += gradient
        _check_finite(self.call, *total)
        return total

    def gram(self, per_layer: bool, index: Tensor | None = None, tile: int = 32) -> Tensor:
        """The Gram matrix J J^T of the blocks in `index` (all by default), in float64.

        Rows are ordered block by block; where there is a loss, its gradient is the last row. Two
        tiles of blocks are alive at a time and gradients are recomputed, so the memory is
        2 tile d1 d' numbers instead of n d1 d, at about n^2 d1 / (2 tile) backward passes per group
        of layers; d' is d or, `per_layer`, the size of the largest parameter.
        """
        index = self.index if index is None else index
        width = _block_values(self.call, self.inner, index[:1]).numel()  # d1, rows per block
        tiles: list[Tensor | None] = [*index.split(tile)]
        if self.loss is not None:
            tiles.append(None)  # stands for g_0
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
        _check_finite(self.call, matrix)
        return matrix

    def _rows(self, tile: Tensor | None, group: list[Tensor]) -> Tensor:
        """Gradients of the values of one tile (None: of g_0) with respect to `group`."""
        if tile is not None:
            values = _block_values(self.call, self.inner, tile).reshape(-1)
        else:
            assert self.loss is not None
            values = _loss_value(self.call, self.loss).reshape(1)
        last = len(values) - 1  # one backward pass per value; the last one frees the graph
        rows = values.new_empty(len(values), sum(p.numel() for p in group), dtype=torch.float64)
        for position, value in enumerate(values):
            gradients = torch.autograd.grad(
                value, group, retain_graph=position < last, materialize_grads=True
            )
            torch.cat([g.reshape(-1).double() for g in gradients], out=rows[position])
        return rows


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


def trainable(call: str, parameters: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of `parameters` that require a gradient."""
    kept = [parameter for parameter in parameters if parameter.requires_grad]
    if not kept:
        raise ValueError(
            f"`{call}(parameters=...)` has no tensor that requires a gradient "
            "(an iterator such as `model.parameters()` can be used only once)."
        )
    return kept


def inner_values(call: str, inner: Inner, index: Tensor, chunk: int) -> Tensor:
    """g_i(w) for the blocks in `index`, detached, in float64."""
    _checks.integer(call, "chunk", chunk, 1)
    # Gradients stay enabled: an inner function may differentiate inside itself.
    parts = [_block_values(call, inner, part).detach().double() for part in index.split(chunk)]
    return torch.cat(parts)


def _block_values(call: str, inner: Inner, index: Tensor) -> Tensor:
    """g_i(w) for the blocks in `index`, with its graph."""
    with torch.enable_grad():
        values = inner(index)
    if values.dim() not in (1, 2) or values.shape[0] != len(index):
        raise ValueError(
            f"`{call}(inner=...)` must return the shape ({len(index)},) or ({len(index)}, d1) but "
            f"returned: {tuple(values.shape)}."
        )
    if not values.requires_grad:
        raise ValueError(
            f"`{call}(inner=...)` returned values without an autograd graph to the parameters "
            "(was it detached or computed under `torch.no_grad()`?)."
        )
    finite = torch.isfinite(values.detach()).reshape(len(index), -1).all(1)
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0, 0])
        raise NonFiniteValue(
            f"`{call}(inner=...)` must return finite values but block {int(index[first])} gives: "
            f"{values[first].tolist()}."
        )
    return values


def _loss_value(call: str, loss: Loss) -> Tensor:
    with torch.enable_grad():
        value = loss()
    if value.numel() != 1 or not value.requires_grad:
        raise ValueError(
            f"`{call}(loss=...)` must return a scalar with an autograd graph but returned the "
            f"shape {tuple(value.shape)}, requires_grad={value.requires_grad}."
        )
    if not bool(torch.isfinite(value.detach())):
        raise NonFiniteValue(f"`{call}(loss=...)` must be finite but is: {value.item()}.")
    return value.reshape(())


def _check_finite(call: str, *gradients: Tensor) -> None:
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise NonFiniteValue(
            f"`{call}`: a gradient of inner or loss is not finite although the values are "
            "(a root or a norm at zero, or overflow in a low precision)."
        )
