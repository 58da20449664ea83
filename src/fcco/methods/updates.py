"""The two updates of the paper as torch optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import _checks

__all__ = ["adam_type", "momentum_type"]


def momentum_type(
    params: Iterable[Tensor], lr: float, beta: float = 0.1, **options: Any
) -> torch.optim.SGD:
    r"""The paper's momentum update as a torch optimizer (Alg. 1, lines 10-11).

    .. math:: v_{t+1} = (1-\beta) v_t + \beta G_t, \qquad w_{t+1} = w_t - \eta v_{t+1}

    This is SGD with `momentum = dampening = 1 - beta`. (SGD without dampening goes the same way
    with steps 1/beta times as long.)

    Args:
        params: the parameters.
        lr: eta.
        beta: weight of the new gradient; 1 is plain SGD.
        options: further options of `torch.optim.SGD`.
    """
    _checks.in_interval("momentum_type", "beta", beta, 0.0, 1.0, open_low=True)
    # The first buffer of torch's SGD is v = G_0, without dampening, which the paper leaves open.
    return torch.optim.SGD(params, lr=lr, momentum=1 - beta, dampening=1 - beta, **options)


def adam_type(
    params: Iterable[Tensor], lr: float, beta: float = 0.1, beta2: float = 0.001, **options: Any
) -> torch.optim.AdamW:
    r"""The paper's Adam-type update as a torch optimizer.

    .. math::
        s_{t+1} = (1-\beta')s_t + \beta' G_t\circ G_t, \qquad
        w_{t+1} = w_t - \eta\,\hat v_{t+1}/(\sqrt{\hat s_{t+1}} + \epsilon)

    with bias corrections and decoupled weight decay: AdamW with `betas = (1-beta, 1-beta2)`.

    Args:
        params: the parameters.
        lr: eta.
        beta: weight of the new gradient.
        beta2: beta', weight of the new squared gradient.
        options: further options of `torch.optim.AdamW` (`weight_decay` is 0 unless given).
    """
    _checks.in_interval("adam_type", "beta", beta, 0.0, 1.0, open_low=True)
    _checks.in_interval("adam_type", "beta2", beta2, 0.0, 1.0, open_low=True)
    options.setdefault("weight_decay", 0.0)
    return torch.optim.AdamW(params, lr=lr, betas=(1 - beta, 1 - beta2), **options)
