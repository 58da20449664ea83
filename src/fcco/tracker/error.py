r"""How far running averages are from what they average: noise and lag, from the batches alone.

A block that is visited again shows two things. Its batch value differs from the last one, by noise
and a little motion; and it differs from the running average u, by noise and all the motion that u
has not followed yet. With noise of variance :math:`\sigma^2` in a batch value, a g_i that moves by
steps of variance q between visits, and weight :math:`\gamma` of the new value,

.. math::
    D = \tfrac12\mathbb E(\text{fresh}_t - \text{fresh}_{t-1})^2 = \sigma^2 + \tfrac q2, \qquad
    V = \mathbb E(\text{fresh}_t - u_t)^2 = \frac{2\sigma^2 + q/\gamma}{2-\gamma}.

Two equations for two unknowns. The error of u after the visit, and the weight that makes it
smallest (the gain of a Kalman filter), follow:

.. math::
    \mathbb E(u-g)^2 = \frac{\gamma\sigma^2 + q(1-\gamma)^2/\gamma}{2-\gamma}, \qquad
    \gamma^2\sigma^2 = (1-\gamma)\,q.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._state import KeepsPrecision

__all__ = ["ErrorEstimate", "best_gamma", "noise_and_drift", "squared_error"]

HORIZON = 100
"""Visits of a block that its own statistics look back."""

POOLED_HORIZON = 50
"""Steps that the statistics of all blocks together look back."""

GAMMA_RANGE = (0.05, 0.95)
"""What `best_gamma` is kept in. Below, u would hardly notice that the drift has grown again; at 1
noise and drift cannot be told apart."""

Numbers = Any
"""A float, a tensor or a NumPy array: the formulas below are arithmetic that all of them know. On
the CPU they run in NumPy, where an operation on a short vector takes a third of torch's time."""


def noise_and_drift(
    difference: Numbers, innovation: Numbers, gamma: Numbers
) -> tuple[Numbers, Numbers]:
    r"""Solve for :math:`\sigma^2` and q, both at least 0; pure.

    Args:
        difference: D.
        innovation: V.
        gamma: weight of the new value, below 1.

    Example:
        >>> import torch
        >>> noise, drift, gamma = 4.0, 1.0, 0.2
        >>> innovation = torch.tensor((2 * noise + drift / gamma) / (2 - gamma))
        >>> found = noise_and_drift(torch.tensor(noise + drift / 2), innovation, gamma)
        >>> [round(each.item(), 4) for each in found]
        [4.0, 1.0]
    """
    excess = innovation * (2 - gamma) - 2 * difference
    drift = (excess * (gamma / (1 - gamma))).clip(0 * difference, 2 * difference)
    return difference - drift / 2, drift


def squared_error(noise: Numbers, drift: Numbers, gamma: Numbers) -> tuple[Numbers, Numbers]:
    """What noise and lag add to the squared error of u after a visit; pure."""
    return noise * gamma / (2 - gamma), drift * ((1 - gamma) ** 2 / (gamma * (2 - gamma)))


def best_gamma(noise: Numbers, drift: Numbers) -> Numbers:
    """The weight of the new value with the smallest error; pure.

    Example:
        >>> import torch
        >>> gamma = best_gamma(torch.tensor(2.0), torch.tensor(1.0))
        >>> gamma, gamma**2 * 2.0 - (1 - gamma) * 1.0
        (tensor(0.5000), tensor(0.))
    """
    ratio = (drift + 1e-30) / (noise + 1e-30)
    # The stable form of (sqrt(ratio^2 + 4 ratio) - ratio) / 2.
    return 2 / (1 + (1 + 4 / ratio) ** 0.5)


class ErrorEstimate(KeepsPrecision):
    """The statistics D and V, of each block and of all together, as running averages over visits.

    Args:
        like: the table u, whose shape, precision and device they take.

    Attributes:
        latest: the last batch value of each block.
        difference: D of each block.
        innovation: V of each block.
        visits: how often a block was visited; D and V need two.
        pooled: D and V over all blocks of the last steps, and the number of these steps.
        gain: the weight of the new value that was best so far, which `gamma="auto"` uses.
    """

    latest: Tensor
    difference: Tensor
    innovation: Tensor
    visits: Tensor
    pooled: Tensor
    gain: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        for name in ("latest", "difference", "innovation"):
            self.register_buffer(name, torch.zeros_like(like))
        self.register_buffer("visits", like.new_zeros(len(like)))
        self.register_buffer("pooled", like.new_zeros(3))
        self.register_buffer("gain", like.new_full((1,), 0.5))

    def arrays(self) -> dict[str, Numbers]:
        """The buffers, on the CPU as NumPy arrays that share their memory."""
        buffers: dict[str, Any] = self._buffers
        if buffers["visits"].device.type != "cpu":
            return buffers
        return {name: buffer.numpy() for name, buffer in buffers.items()}

    def add(self, index: Tensor, fresh: Tensor, old: Tensor, gamma: float | None) -> None:
        """Take a visit into account.

        Args:
            index: the blocks.
            fresh: their batch values.
            old: their u before the visit; on a first visit it does not count.
            gamma: weight of the new value; None for `gain`, which then moves.
        """
        if len(index) == 0:
            return
        state, at, new, before = self.arrays(), index, fresh.detach(), old.detach()
        if state is not self._buffers:
            at, new, before = at.numpy(), new.numpy(), before.numpy()
        visits = state["visits"][at]
        again = visits > 0  # the first visit has nothing to compare with
        weight = again / visits.clip(1, HORIZON)
        state["visits"][at] = visits + 1
        if len(fresh.shape) > 1:
            weight, again = weight[:, None], again[:, None]
        moved, missed = (new - state["latest"][at]) ** 2 / 2, (new - before) ** 2
        for name, seen in (("difference", moved), ("innovation", missed)):
            known = state[name][at]
            state[name][at] = known + weight * (seen - known)
        state["latest"][at] = new
        self._pool(state, moved * again, missed * again, again.sum(), gamma)

    def _pool(
        self,
        state: dict[str, Numbers],
        moved: Numbers,
        missed: Numbers,
        number: Numbers,
        gamma: float | None,
    ) -> None:
        pooled, some = state["pooled"], (number > 0) * 1.0
        count = number.clip(1) * (moved.size if state is not self._buffers else moved.numel())
        count = count / len(moved)  # entries of the blocks that came again
        steps = pooled[2] + some
        weight = some / steps.clip(1, POOLED_HORIZON)
        difference = pooled[0] + weight * (moved.sum() / count - pooled[0])
        innovation = pooled[1] + weight * (missed.sum() / count - pooled[1])
        pooled[0], pooled[1], pooled[2] = difference, innovation, steps
        if gamma is None:
            gain = state["gain"][0]
            best = best_gamma(*noise_and_drift(difference, innovation, gain)).clip(*GAMMA_RANGE)
            state["gain"][0] = gain + (best - gain) * (some / POOLED_HORIZON)

    def weights(self, index: Tensor) -> Tensor:
        """The weight of the new value of some blocks, with `gamma="auto"`.

        A block's first values are averaged: the k-th has weight 1/k until that is below the gain.
        """
        state = self.arrays()
        if state is self._buffers:
            return torch.maximum(1 / (self.visits[index] + 1), self.gain)
        first = 1 / (state["visits"][index.numpy()] + 1)
        return torch.from_numpy(np.maximum(first, state["gain"]))

    def error(self, gamma: float | None) -> Tensor:
        """The standard error of each u; NaN for a block that was not visited twice."""
        weight = self.gain if gamma is None else min(gamma, GAMMA_RANGE[1])
        found = noise_and_drift(self.difference, self.innovation, weight)
        noise, lag = squared_error(*found, weight)
        known = self.visits > 1
        errors = (noise + lag).sqrt()
        return torch.where(known if errors.dim() == 1 else known.unsqueeze(1), errors, torch.nan)

    def pooled_error(self, gamma: float | None) -> tuple[Numbers, Numbers]:
        """The standard errors by noise and by lag of a typical u; floats on the CPU."""
        state = self.arrays()
        weight = state["gain"][0] if gamma is None else min(gamma, GAMMA_RANGE[1])
        found = noise_and_drift(state["pooled"][0], state["pooled"][1], weight)
        noise, lag = (each**0.5 for each in squared_error(*found, weight))
        return (noise, lag) if state is self._buffers else (float(noise), float(lag))
