"""Full-data evaluation in chunks: values of the inner functions and weighted sums of gradients.

Every diagnostic needs only three things from a model: the values g_i(w), a sum of J_i^T y_i with
given weights, and the gradient of the extra term g_0. Each is computed here a chunk of blocks at
a time, so that the graph of all n blocks never exists at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..outer.base import AbstractOuter

__all__ = ["Inner", "Loss", "fits", "inner_values", "loss_gradient", "norm", "trainable"]

Inner = Callable[[Tensor], Tensor]
Loss = Callable[[], Tensor]


def trainable(call: str, parameters: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of `parameters` that require a gradient."""
    kept = [parameter for parameter in parameters if parameter.requires_grad]
    if not kept:
        raise ValueError(
            f"`{call}(parameters=...)` has no tensor that requires a gradient "
            "(an iterator such as `model.parameters()` can be used only once)."
        )
    return kept


def block_values(call: str, inner: Inner, index: Tensor) -> Tensor:
    """g_i(w) for the blocks in `index`, with its graph, checked for shape and finiteness."""
    with torch.enable_grad():
        values = inner(index)
    if values.dim() not in (1, 2) or values.shape[0] != len(index):
        raise ValueError(
            f"`{call}(inner=...)` must return the shape ({len(index)},) or ({len(index)}, d1) "
            f"for {len(index)} blocks but returned: {tuple(values.shape)}."
        )
    if not values.requires_grad:
        raise ValueError(
            f"`{call}(inner=...)` returned values without an autograd graph to the parameters "
            "(was it detached or computed under `torch.no_grad()`?)."
        )
    finite = torch.isfinite(values.detach()).reshape(len(index), -1).all(1)
    if not bool(finite.all()):
        worst = int((~finite).nonzero()[0, 0])
        raise ValueError(
            f"`{call}(inner=...)` must return finite values but block {int(index[worst])} gives: "
            f"{values[worst].tolist()}."
        )
    return values


def all_blocks(call: str, num_inner: int, like: Tensor) -> Tensor:
    """The index 0, ..., n - 1 on the device of `like`."""
    if not (isinstance(num_inner, int) and num_inner >= 1):
        raise ValueError(f"`{call}` needs at least one block but their number is: {num_inner}.")
    return torch.arange(num_inner, device=like.device)


def inner_values(call: str, inner: Inner, index: Tensor, chunk: int) -> Tensor:
    """g_i(w) for the blocks in `index`, detached, in float64."""
    # The graph stays on: an inner function may differentiate inside itself.
    parts = [block_values(call, inner, part).detach().double() for part in index.split(chunk)]
    return torch.cat(parts)


def fits(call: str, outer: AbstractOuter, values: Tensor) -> None:
    """Raise unless the outer function accepts inner values of this shape."""
    width = values.shape[1] if values.dim() == 2 else 1
    vector = values.dim() == 2 and outer.dim != 1
    if not (vector and outer.dim in (None, width)) and not (outer.dim == 1 and width == 1):
        raise ValueError(
            f"`{call}`: {outer!r} has dim = {outer.dim} and does not accept inner values of shape "
            f"{tuple(values.shape)} (scalar functions need one value per block, vector functions "
            "the shape (n, d1))."
        )


def weighted_gradient(
    call: str,
    inner: Inner,
    weights: Tensor,
    parameters: list[Tensor],
    chunk: int,
    loss: Loss | None = None,
) -> list[Tensor]:
    """sum_i J_i^T weights_i (+ grad g_0), accumulated in float64, one tensor per parameter."""
    total = loss_gradient(call, loss, parameters)
    index = all_blocks(call, len(weights), parameters[0])
    for part in index.split(chunk):
        values = block_values(call, inner, part)
        pull = weights[part].reshape(values.shape).to(values)
        gradients = torch.autograd.grad(values, parameters, pull, materialize_grads=True)
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += gradient
    finite(call, *total)
    return total


def loss_gradient(call: str, loss: Loss | None, parameters: list[Tensor]) -> list[Tensor]:
    """The gradient of g_0 in float64; zeros where there is no g_0."""
    if loss is None:
        return [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    value = loss_value(call, loss)
    gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
    # A copy, because sums are taken in place and autograd may hand out a tensor of the user's.
    return [gradient.to(torch.float64, copy=True) for gradient in gradients]


def loss_value(call: str, loss: Loss) -> Tensor:
    """g_0(w) with its graph."""
    with torch.enable_grad():
        value = loss()
    if value.numel() != 1 or not value.requires_grad:
        raise ValueError(
            f"`{call}(loss=...)` must return a scalar with an autograd graph but returned the "
            f"shape {tuple(value.shape)}, requires_grad={value.requires_grad}."
        )
    if not bool(torch.isfinite(value.detach())):
        raise ValueError(f"`{call}(loss=...)` must be finite but is: {value.item()}.")
    return value.reshape(())


def finite(call: str, *gradients: Tensor) -> None:
    """Raise unless every entry is finite."""
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise ValueError(
            f"`{call}`: a gradient of inner or loss is not finite although the values are "
            "(a root or a norm at zero, or overflow in a low precision)."
        )


def norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of several tensors taken as one vector."""
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())
