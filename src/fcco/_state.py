"""State that keeps its own precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["KeepsPrecision"]


class KeepsPrecision(nn.Module):
    """A module whose own float buffers follow `.to(device)` but are never narrowed.

    A model may run in bfloat16; a moving average may not, because steps of a thousandth vanish in
    its 8 bits. `.double()` still widens.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        wide = {k: v for k, v in self._buffers.items() if v is not None and v.is_floating_point()}
        super()._apply(fn, recurse)
        for name, before in wide.items():
            after = self._buffers[name]
            if after is not None and after.dtype.itemsize < before.dtype.itemsize:
                self._buffers[name] = before.to(after.device)
        return self
