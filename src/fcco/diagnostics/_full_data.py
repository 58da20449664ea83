"""Values, weighted gradients and Gram matrix of the inner functions, in chunks of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _checks
from ..tracker import NonFiniteValue

__all__ = ["FullData", "Inner", "Loss", "trainable"]

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
        _checks.integer(self.call, "chunk", self.chunk, 1)

    @property
    def index(self) -> Tensor:
        """All blocks, 0, ..., n - 1."""
        return torch.arange(self.num_inner, device=self.parameters[0].device)

    def values(self, index: Tensor) -> Tensor:
        """g_i(w) for the blocks in `index`, detached, in float64."""
        # Gradients stay enabled: an inner function may differentiate inside itself.
        return torch.cat([self._of(p).detach().double() for p in index.split(self.chunk)])

    def constraint_values(self) -> Tensor:
        """g_i(w) of scalar constraints, shape (m,), detached, in float64."""
        values = self.values(self.index)
        if values.dim() == 2 and values.shape[1] != 1:
            raise ValueError(
                f"`{self.call}(inner=...)` gives d1 = {values.shape[1]} values per constraint: "
                "write a vector constraint as several scalar ones."
            )
        return values.reshape(-1)

    def gradient(self, weights: Tensor) -> list[Tensor]:
        """sum_i J_i^T weights_i (+ grad g_0) in float64, one tensor per parameter."""
        total = [torch.zeros_like(p, dtype=torch.float64) for p in self.parameters]
        for part in self._parts(self.index, self.chunk):
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
        name, size = ("loss", 1) if index is None else ("inner", len(index))
        with torch.enable_grad():
            values = self.inner(index) if index is not None else self.loss()  # type: ignore[misc]
        if index is None and values.dim() == 0:
            values = values.reshape(1)
        if (
            values.dim() not in (1, 2)
            or len(values) != size
            or (index is None and values.dim() > 1)
        ):
            wanted = "a scalar" if index is None else f"the shape ({size},) or ({size}, d1)"
            raise ValueError(
                f"`{self.call}({name}=...)` must return {wanted} but returned: "
                f"{tuple(values.shape)}."
            )
        if not values.requires_grad:
            raise ValueError(
                f"`{self.call}({name}=...)` returned values without an autograd graph to the "
                "parameters (was it detached or computed under `torch.no_grad()`?)."
            )
        finite = torch.isfinite(values.detach()).reshape(size, -1).all(1)
        if not bool(finite.all()):
            first = int((~finite).nonzero()[0, 0])
            block = "it" if index is None else f"block {int(index[first])}"
            raise NonFiniteValue(
                f"`{self.call}({name}=...)` must be finite but {block} gives: "
                f"{values[first].tolist()}."
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


def trainable(call: str, parameters: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of `parameters` that require a gradient."""
    kept = [parameter for parameter in parameters if parameter.requires_grad]
    if not kept:
        raise ValueError(
            f"`{call}(parameters=...)` has no tensor that requires a gradient "
            "(an iterator such as `model.parameters()` can be used only once)."
        )
    return kept
