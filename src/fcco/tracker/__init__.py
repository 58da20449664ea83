r"""Trackers: running estimates u_i of the inner values g_i(w).

One module, `InnerTracker`, and its named settings:

| constructor | gamma' | reads | used by |
|---|---|---|---|
| `ema_tracker(n, gamma)` | 0 | old u | SOX |
| `msvr_tracker(n, gamma)` | `"auto"`, `"theory"` or a number | old u | SONX, SONEX |
| `alexr_tracker(n, gamma, theta)` | theta gamma | new u | ALEXR, ALEXR2 |
| `spider_tracker(n, refresh_every)` | 1, with gamma = 0 | new u | Liu and Xu |
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from ..rules.track import log_track, theory_correction, track, value_of
from .blocks import Batch, Blocks, Entries, OpenStep, Tracked
from .tracker import ErrorEstimate, InnerTracker, NonFiniteValue

__all__ = [
    "GAMMA",
    "THETA",
    "Batch",
    "Blocks",
    "Entries",
    "ErrorEstimate",
    "InnerTracker",
    "NonFiniteValue",
    "OpenStep",
    "Tracked",
    "alexr_tracker",
    "ema_tracker",
    "for_model",
    "like_model",
    "log_track",
    "msvr_tracker",
    "spider_tracker",
    "theory_correction",
    "track",
    "value_of",
]

GAMMA = 0.8
"""Weight of the new value for ALEXR2 in the paper's fairness experiment."""

THETA = 0.125
"""Extrapolation of ALEXR2 in the same experiment."""


def ema_tracker(num_inner: int, gamma: float = 0.1, **options: Any) -> InnerTracker:
    """Moving average, u+ = (1 - gamma) u + gamma g(w_t); see `InnerTracker` for the options."""
    return InnerTracker(num_inner, gamma=gamma, correction=0.0, **options)


def msvr_tracker(
    num_inner: int,
    gamma: float = 0.1,
    correction: float | Literal["theory", "auto"] = "auto",
    **options: Any,
) -> InnerTracker:
    """Moving average with MSVR's correction gamma' (g(w_t) - g(w_{t-1})); see `InnerTracker`."""
    return InnerTracker(num_inner, gamma=gamma, correction=correction, **options)


def alexr_tracker(
    num_inner: int, gamma: float = GAMMA, theta: float = THETA, **options: Any
) -> InnerTracker:
    """ALEXR's extrapolation (Alg. 2, lines 6-8, u-form).

    `gamma` is the weight in u-form (the paper's gamma-hat); the dual step of the argmax form is
    gamma / (1 - gamma). The defaults are those of the paper's fairness experiment.
    """
    options.setdefault("read", "new")
    return InnerTracker(num_inner, gamma=gamma, correction=theta * gamma, **options)


def spider_tracker(num_inner: int, refresh_every: int, **options: Any) -> InnerTracker:
    """Recursive estimate u+ = u + g(w_t) - g(w_{t-1}), refreshed every so many steps.

    It only follows differences, so that each step must hold all blocks.
    """
    settings: dict[str, Any] = {"gamma": 0.0, "correction": 1.0, "sampled": False, "read": "new"}
    return InnerTracker(num_inner, refresh_every=refresh_every, **{**settings, **options})


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
