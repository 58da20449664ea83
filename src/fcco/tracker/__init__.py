r"""Trackers: running estimates u_i of the inner values g_i(w).

One module, `InnerTracker`, with the settings of every method:

| gamma' (`correction`) | `read` | others | used by |
|---|---|---|---|
| 0 (`ema_tracker`) | either | | SOX |
| `"auto"`, `"theory"` or a number | `"old"` | | MSVR, SONX, SONEX |
| theta gamma | `"new"` | gamma / (1 - gamma) is the dual step alpha | ALEXR, ALEXR2 |
| 1 | `"new"` | gamma = 0, `sampled=False`, `refresh_every` | Liu and Xu (SPIDER) |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..rules.track import log_track, theory_correction, track, value_of
from .blocks import Batch, Blocks, Entries, OpenStep, Tracked
from .tracker import ErrorEstimate, InnerTracker, NonFiniteValue

__all__ = [
    "Batch", "Blocks", "Entries", "ErrorEstimate", "InnerTracker", "NonFiniteValue", "OpenStep",
    "Tracked", "ema_tracker", "for_model", "like_model", "log_track", "theory_correction", "track",
    "value_of",
]  # fmt: skip


def ema_tracker(num_inner: int, gamma: float = 0.1, **options: Any) -> InnerTracker:
    """Moving average, u+ = (1 - gamma) u + gamma g(w_t); see `InnerTracker` for the options."""
    return InnerTracker(num_inner, gamma=gamma, correction=0.0, **options)


def like_model(model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a tracker with the model's device, and its precision but not below float32."""
    if isinstance(model, torch.optim.Optimizer):
        raise TypeError(f"The model comes first, then the optimizer: {type(model).__name__}.")
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        return options
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return {"device": parameter.device, "dtype": dtype, **options}


def for_model(model: nn.Module, num_inner: int, dim: int = 1, **options: Any) -> InnerTracker:
    """A tracker on the model's device, in its precision but not below float32."""
    return InnerTracker(num_inner, dim, **like_model(model, options))
