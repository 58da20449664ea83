"""Notice a bad value without making the host wait for the device."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Watch"]


class _Look(NamedTuple):
    good: Tensor
    arrived: Any
    finite: Tensor
    blocks: Tensor


class Watch:
    """Flags on their way to the host, one for each step.

    Reading a number from a GPU waits for everything before it, and the GPU then idles until new
    work arrives. Here the flag is copied beside the computation and looked at in a later step.
    """

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque()

    def push(self, finite: Tensor, blocks: Tensor) -> None:
        """Remember which blocks (B1,) had finite values."""
        good, arrived = finite.all(), None
        if good.device.type == "cuda":
            good = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(good, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._looks.append(_Look(good, arrived, finite, blocks))

    def poll(self) -> None:
        """Raise if a flag that has arrived is bad."""
        while self._looks and (self._looks[0].arrived is None or self._looks[0].arrived.query()):
            look = self._looks.popleft()
            if not look.good.item():
                self._looks.clear()
                blocks = look.blocks[~look.finite].tolist()
                raise ValueError(
                    "`InnerTracker` was given a NaN or infinite inner value for blocks "
                    f"{blocks[:10]} in an earlier step; these blocks kept their value, but the "
                    "loss of that step, and so the gradient, was not finite."
                )
