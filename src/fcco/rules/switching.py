"""The switching subgradient method: its branch, its threshold, and Polyak's step."""

from __future__ import annotations

import torch
from torch import Tensor

from .arrays import Number


def decide(excess: Tensor, threshold: Number) -> tuple[Tensor, Tensor, Tensor]:
    """The largest excess, whose it is, and whether it is at most the threshold eps_t.

    Example:
        >>> import torch
        >>> decide(torch.tensor([0.1, 0.3]), 0.2)
        (tensor(0.3000), tensor(1), tensor(False))
    """
    worst, which = excess.max(0)
    # In float32 a threshold such as 0.1 is rounded, and a tie could go the other way. (MPS has no
    # float64.)
    wide = worst if worst.device.type == "mps" else worst.double()
    return worst, which, wide <= threshold


def noise_of_worst(excess: Tensor, difference: Tensor) -> Tensor:
    """The noise of the values of the worst constraint, from squared differences of successive ones.

    Half a squared difference of two values is the noise of one; 0 before there are two.
    """
    return (difference.gather(0, excess.argmax(0, keepdim=True)) / 2).sqrt().squeeze(0)


def polyak_length(value: Tensor, square: Tensor) -> Tensor:
    """Polyak's step size g / |zeta|^2, and 0 where zeta = 0.

    Example:
        >>> import torch
        >>> polyak_length(torch.tensor(1.0), torch.tensor([4.0, 0.0]))
        tensor([0.2500, 0.0000])
    """
    some = square > 0
    # The inner `where` keeps 0/0 out of both branches: its NaN would reach a gradient.
    return torch.where(some, value / torch.where(some, square, 1), 0)
