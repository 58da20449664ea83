"""What the user's function may return, brought to one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._distributed import Group, sum_over_ranks

__all__ = ["Measured", "Parsed", "global_mean", "parse", "split"]


class Measured(NamedTuple):
    """A measured statistic with a differentiable stand-in.

    The tracker follows `value` (an accuracy, a 0/1 rate: no gradient needed); the gradient is
    that of `surrogate`, which has the same shape.
    """

    value: Tensor
    surrogate: Tensor


class Parsed(NamedTuple):
    """Inner values of one term.

    Attributes:
        value: what is tracked, (E,) or (E, d1).
        surrogate: what carries the gradient; None when it is `value`.
        index: block ids, when the values were given by name.
    """

    value: Tensor
    surrogate: Tensor | None
    index: Tensor | None

    @property
    def carrier(self) -> Tensor:
        """What carries the gradient."""
        return self.value if self.surrogate is None else self.surrogate


def split(result: Any) -> tuple[Tensor | None, Any]:
    """Separate the ordinary loss g0 from the inner values."""
    if isinstance(result, tuple) and not isinstance(result, Measured):
        if len(result) != 2:
            raise ValueError(
                "The inner function must return values or a pair (loss, values) but returned a "
                f"tuple of {len(result)}."
            )
        return result
    return None, result


def parse(term: str, names: Sequence[str] | None, values: Any) -> Parsed:
    """Bring the inner values of one term to tensors.

    Args:
        term: the term's name, for the error text.
        names: the names of its blocks, or None.
        values: a tensor, a `Measured` pair, or either by block name; absent blocks are left alone.
    """
    if isinstance(values, Measured) and all(isinstance(part, Tensor) for part in values):
        return Parsed(values.value, values.surrogate, None)
    if isinstance(values, Tensor):
        return Parsed(values, None, None)
    if not isinstance(values, Mapping):
        raise TypeError(
            f"Inner values of `{term}` must be a tensor, fcco.Measured of two tensors or a dict by "
            f"name but are: {type(values).__name__}."
        )
    known = {name: k for k, name in enumerate(names or ())}
    unknown = [name for name in values if name not in known]
    if unknown or not values:
        raise ValueError(
            f"Inner values of `{term}` are given for {unknown or 'no name'}, but its blocks are "
            f"named: {', '.join(known) or 'not at all (pass names=... or a tensor)'}."
        )
    index = torch.tensor([known[name] for name in values])
    parts = [parse(term, None, value) for value in values.values()]
    value = torch.stack([part.value for part in parts])
    if all(part.surrogate is None for part in parts):
        return Parsed(value, None, index)
    return Parsed(value, torch.stack([part.carrier for part in parts]), index)


def global_mean(loss: Tensor, group: Group | None) -> Tensor:
    """g0 as a scalar: per-sample losses are averaged over the batches of all ranks."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            "The inner function must return values or a pair (loss, values) with a tensor as loss "
            f"but the loss is: {type(loss).__name__}."
        )
    if loss.dim() == 0:
        return loss
    if loss.dim() != 1:
        raise ValueError(
            f"The loss g0 must be a scalar or per-sample losses but has shape {tuple(loss.shape)}."
        )
    if group is None:
        return loss.mean()
    count = sum_over_ranks(torch.tensor(float(len(loss)), device=loss.device), group)
    return loss.sum() * (group.size / count)
