r"""Hyperparameters and iteration counts from the theorems, with explicit constants.

For given constants of a problem and an accuracy eps, `sonex`, `sonex_adam` and `alexr2` return
settings with which the paper's proofs go through. They answer "what does the theorem prescribe",
hence are far more cautious than tuned values; their use is in the orders and in tests. All
constants come from the proofs, corrected where those slip (docs/mathematics.md lists the errata;
the ones that matter here are named below).

Reference: the SONEX and ALEXR2 paper, arXiv 2506.02504: sections 4.1 (SONEX), 4.2 (ALEXR2),
5 (constraints) and the appendix on adaptive learning rates.
"""

from .constants import Constants
from .rules import (
    auto_correction,
    correction,
    dual_step,
    inner_lr,
    inner_step,
    penalty_size,
    smoothed_bias,
    smoothing_for,
    tracking_error,
)
from .theorems import Alexr2Settings, SonexSettings, alexr2, sonex, sonex_adam

__all__ = [
    "Alexr2Settings",
    "Constants",
    "SonexSettings",
    "alexr2",
    "auto_correction",
    "correction",
    "dual_step",
    "inner_lr",
    "inner_step",
    "penalty_size",
    "smoothed_bias",
    "smoothing_for",
    "sonex",
    "sonex_adam",
    "tracking_error",
]
