"""The Gram matrix of the stacked Jacobian, in tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .. import _checks
from .evaluation import Inner, Loss, all_blocks, block_values, finite, loss_value, trainable

__all__ = ["bordered_gram", "gram_matrix"]


def gram_matrix(
    inner: Inner,
    num_inner: int,
    parameters: Iterable[Tensor],
    *,
    with_threshold: bool = False,
    tile: int = 32,
    per_layer: bool = True,
) -> Tensor:
    r"""The Gram matrix of the stacked Jacobian, without ever holding the Jacobian.

    .. math::
        J = [J_1; \dots; J_n] \in \mathbb{R}^{n d_1 \times d}, \qquad J J^\top \in
        \mathbb{R}^{n d_1 \times n d_1}

    Rows are ordered block by block. Two tiles of `tile` blocks are alive at a time and gradients
    are recomputed, so the memory is 2 tile d1 d' numbers instead of n d1 d, at about
    n^2 d1 / (2 tile) backward passes per group of layers (n d1 where n <= tile). d' is the size of
    the largest parameter tensor with `per_layer` (smaller tensors share a group up to that size),
    else d. Sums are in float64.

    Args:
        inner: maps a LongTensor of blocks to g_i(w) with a graph, full data, deterministic
            (evaluation mode, no dropout).
        num_inner: n.
        parameters: w.
        with_threshold: add the column of the CVaR threshold s, for inner = L_i: the gradient of
            L_i - s is (grad L_i, -1), which adds 1 to each entry.
        tile: blocks per tile.
        per_layer: accumulate over groups of layers.

    Example:
        L_i = |w - e_i|^2 / 2 at w = (1/3, 1/3, 1/3): the gradients are w - e_i.

        >>> import torch
        >>> from fcco.diagnostics import gram_matrix
        >>> w = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
        >>> losses = lambda index: (w - torch.eye(3)[index]).square().sum(1) / 2
        >>> gram_matrix(losses, 3, [w], with_threshold=True)
        tensor([[1.6667, 0.6667, 0.6667],
                [0.6667, 1.6667, 0.6667],
                [0.6667, 0.6667, 1.6667]], dtype=torch.float64)
    """
    call = "gram_matrix"
    weights = trainable(call, parameters)
    index = all_blocks(call, num_inner, weights[0])
    matrix = bordered_gram(call, inner, index, weights, None, tile, per_layer)
    if with_threshold:
        if len(matrix) != num_inner:
            raise ValueError(
                f"`{call}(with_threshold=True)` needs scalar inner functions (d1 = 1)."
            )
        matrix += 1
    return matrix


def bordered_gram(
    call: str,
    inner: Inner,
    index: Tensor,
    parameters: list[Tensor],
    loss: Loss | None,
    tile: int,
    per_layer: bool,
) -> Tensor:
    """The Gram matrix of the blocks in `index`, with grad g_0 as last row where `loss` is given."""
    _checks.at_least(call, "tile", tile, 1)
    width = block_values(call, inner, index[:1]).numel()

    def values_of(part: Tensor) -> Callable[[], Tensor]:
        return lambda: block_values(call, inner, part).reshape(-1)

    parts = index.split(tile)
    sources = [values_of(part) for part in parts]
    sizes = [len(part) * width for part in parts]
    if loss is not None:
        sources.append(lambda: loss_value(call, loss).reshape(1))
        sizes.append(1)
    starts = [sum(sizes[:position]) for position in range(len(sizes))]
    places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    total = sum(sizes)
    matrix = torch.zeros(total, total, dtype=torch.float64, device=parameters[0].device)

    def add_product(left: Tensor, row: slice, column: slice, group: list[Tensor], source) -> None:
        # A function of its own, so that one right tile is freed before the next is computed.
        product = left @ _rows(source, group).T
        matrix[row, column] += product
        matrix[column, row] += product.T

    for group in _layer_groups(parameters, per_layer):
        for position, source in enumerate(sources):
            left = _rows(source, group)
            row = places[position]
            matrix[row, row] += left @ left.T
            for other in range(position + 1, len(sources)):
                add_product(left, row, places[other], group, sources[other])
            del left
    finite(call, matrix)
    return matrix


def _rows(source: Callable[[], Tensor], group: list[Tensor]) -> Tensor:
    """The gradients of each value with respect to one group of parameters, as float64 rows."""
    values = source()
    last = len(values) - 1
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
    groups: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        if not groups or parameter.numel() > room:
            groups.append([])
            room = limit
        groups[-1].append(parameter)
        room -= parameter.numel()
    return groups
