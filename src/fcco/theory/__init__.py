r"""Formulas of the theorems, with explicit constants: hyperparameters, step sizes, error laws.

| question | name |
|---|---|
| which hyperparameters make the proofs go through | `sonex_settings`, `alexr2_settings` |
| the constants these need | `Constants` |
| primal and dual step of ALEXR for a contraction theta | `inner_step`, `dual_step` |
| steady error of a tracked value | `expected_tracking_error` |
| a penalty that is exact | `penalty_size` |
| violation that smoothing leaves | `smoothed_bias` |

The settings are far more cautious than tuned values; their use is in the orders and in tests. All
constants come from the proofs, corrected where those slip (docs/mathematics.md lists the errata).

References:
    The SONEX and ALEXR2 paper, arXiv 2506.02504: sections 4.1 (SONEX), 4.2 (ALEXR2), 5
    (constraints) and the appendix on adaptive learning rates.
"""

from .laws import dual_step, expected_tracking_error, inner_step, penalty_size, smoothed_bias
from .settings import (
    Alexr2Settings,
    Constants,
    SonexSettings,
    alexr2_settings,
    sonex_settings,
)

__all__ = [
    "Alexr2Settings",
    "Constants",
    "SonexSettings",
    "alexr2_settings",
    "dual_step",
    "expected_tracking_error",
    "inner_step",
    "penalty_size",
    "smoothed_bias",
    "sonex_settings",
]
