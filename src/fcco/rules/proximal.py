"""Steps around an anchor: the inner loop of ALEXR2, and the rounds of OSS and ICPPAC."""

from __future__ import annotations

import torch
from torch import Tensor

from .arrays import Number


def proximal_step(z: Tensor, anchor: Tensor, gradient: Tensor, eta: Number, nu: Number) -> Tensor:
    r"""The inner update of ALEXR2 (Alg. 2, line 11).

    .. math::
        z^+ = \arg\min_x \langle G, x\rangle + \tfrac1{2\nu}\|x - w\|^2 + \tfrac1{2\eta}\|x - z\|^2
            = \frac{\nu z + \eta w - \eta\nu G}{\eta + \nu}

    Example:
        >>> import torch
        >>> one = torch.tensor(1.0)
        >>> proximal_step(z=one, anchor=0 * one, gradient=one, eta=0.5, nu=0.5)
        tensor(0.2500)
    """
    return (nu * z + eta * anchor - eta * nu * gradient) / (eta + nu)


def envelope_gradient(anchor: Tensor, z: Tensor, nu: Number) -> Tensor:
    """(w - z) / nu, which the outer loop of ALEXR2 steps on."""
    return (anchor - z) / nu


def proximal_value(away: Tensor, move: Tensor) -> Tensor:
    """|x - w|^2 + 2 <x - w, v>, from x - w and v."""
    return torch.sum(away * (away + 2 * move))


def regularised(values: Tensor, change: Tensor, proximal: Tensor) -> Tensor:
    """l_t, from g(x) - tolerance, <grad g(x), v> and c (|x - w|^2 + 2 <x - w, v>)."""
    return values + change + proximal.to(values)


def pull_strength(coefficient: Number, total: Tensor) -> Tensor:
    """2c (1 + sum_i y_i), the factor of x - w in the gradient of the Lagrangian."""
    return 2 * coefficient * (1 + total)


def running_average(average: Tensor, point: Tensor, count: int | Tensor) -> Tensor:
    """The average with one more point; `count` has this one."""
    share = 1 / count
    point = point.to(average)
    return torch.lerp(average, point, share.to(point) if isinstance(share, Tensor) else share)
