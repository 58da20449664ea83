r"""Trackers: running estimates u_i of the inner values g_i(w).

One module, `InnerTracker`, and its named settings:

| constructor | gamma' | reads | used by |
|---|---|---|---|
| `ema(n, gamma)` | 0 | old u | SOX |
| `msvr(n, gamma)` | `"auto"`, `"theory"` or a number | old u | SONX, SONEX |
| `alexr(n, gamma, theta)` | theta gamma | new u | ALEXR, ALEXR2 |
| `spider(n, refresh_every)` | 1, with gamma = 0 | new u | Liu and Xu |
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from .module import InnerTracker as InnerTracker
from .tracked import Tracked as Tracked
from .update import log_track as log_track
from .update import theory_correction as theory_correction
from .update import track as track
from .update import value_of as value_of

__all__ = [
    "InnerTracker",
    "Tracked",
    "alexr",
    "ema",
    "for_model",
    "log_track",
    "msvr",
    "spider",
    "theory_correction",
    "track",
    "value_of",
]


def ema(num_inner: int, gamma: float = 0.1, **options: Any) -> InnerTracker:
    """Moving average, u+ = (1 - gamma) u + gamma g(w_t); see `InnerTracker` for the options."""
    return InnerTracker(num_inner, gamma=gamma, correction=0.0, **options)


def msvr(
    num_inner: int,
    gamma: float = 0.1,
    correction: float | Literal["theory", "auto"] = "auto",
    **options: Any,
) -> InnerTracker:
    """Moving average with MSVR's correction gamma' (g(w_t) - g(w_{t-1})); see `InnerTracker`."""
    return InnerTracker(num_inner, gamma=gamma, correction=correction, **options)


def alexr(num_inner: int, gamma: float = 0.8, theta: float = 0.125, **options: Any) -> InnerTracker:
    """ALEXR's extrapolation (Alg. 2, lines 6-8, u-form).

    `gamma` is the weight in u-form (the paper's gamma-hat); the dual step of the argmax form is
    gamma / (1 - gamma). The defaults are those of the paper's fairness experiment.
    """
    options.setdefault("read", "new")
    return InnerTracker(num_inner, gamma=gamma, correction=theta * gamma, **options)


def spider(num_inner: int, refresh_every: int, **options: Any) -> InnerTracker:
    """Recursive estimate u+ = u + g(w_t) - g(w_{t-1}), refreshed every so many steps."""
    options.setdefault("read", "new")
    return InnerTracker(
        num_inner, gamma=0.0, correction=1.0, refresh_every=refresh_every, **options
    )


def for_model(model: nn.Module, num_inner: int, dim: int = 1, **options: Any) -> InnerTracker:
    """A tracker on the model's device, in its precision but not below float32."""
    parameter = next(iter(model.parameters()), None)
    if parameter is not None:
        options.setdefault("device", parameter.device)
        options.setdefault("dtype", torch.promote_types(parameter.dtype, torch.float32))
    return InnerTracker(num_inner, dim, **options)
