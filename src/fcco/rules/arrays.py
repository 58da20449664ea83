"""NumPy on the CPU, torch elsewhere: the few things that are written differently."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any
"""A NumPy array or a tensor."""

Number = Any
"""A Python number; on a GPU and in a fleet kept as a tensor to avoid a device synchronisation."""

USE_NUMPY = True
"""False keeps tensors on the CPU as tensors, to test the code path of a GPU."""


def view(tensor: Tensor) -> Array:
    """A tensor of the CPU as a NumPy array of the same memory; others as they are."""
    return tensor.numpy() if USE_NUMPY and tensor.device.type == "cpu" else tensor


def tensor(array: Array) -> Tensor:
    """An array as a tensor of the same memory."""
    return array if isinstance(array, Tensor) else torch.from_numpy(array)


def where(condition: Array, yes: Any, no: Any) -> Array:
    """Elements of one or of the other."""
    choose: Any = torch.where if isinstance(condition, Tensor) else np.where
    return choose(condition, yes, no)


def concatenate(arrays: list[Array]) -> Array:
    """Rows one after another."""
    join: Any = torch.cat if isinstance(arrays[0], Tensor) else np.concatenate
    return join(arrays)


def finite(array: Array) -> Array:
    """Which elements are neither NaN nor infinite."""
    return array.isfinite() if isinstance(array, Tensor) else np.isfinite(array)


def per_row(vector: Array, like: Array) -> Array:
    """A vector (R,) shaped so that it multiplies the rows of `like`, (R,) or (R, d1)."""
    return vector if like.ndim == 1 else vector[:, None]


class Numbers:
    """Operations on Python's numbers; `Tensors` has the same for 0-dimensional tensors."""

    larger, smaller, number = max, min, float

    @staticmethod
    def choose(condition: Number, yes: Number, no: Number) -> Number:
        return yes if condition else no


class Tensors:
    """Operations on 0-dimensional tensors, as in `Numbers`."""

    larger, smaller = torch.clamp_min, torch.clamp_max
    choose, number = torch.where, torch.as_tensor


@dataclass
class Views:
    """A cache of NumPy views of buffers, which a copy of its owner must not share."""

    found: dict[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> Views:
        return Views()

    def __reduce__(self) -> Any:
        return Views, ()
