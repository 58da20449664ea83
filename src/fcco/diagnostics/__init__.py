"""Diagnostics: what a point has reached, measured on the full data, and what a tracker can reach.

| question | function |
|---|---|
| KKT residuals, with given or the best multipliers | `kkt` |
| the smallest eigenvalue of the stacked Jacobian's Gram matrix | `smallest_eigenvalue` |
| the singular value of violated constraints | `constraint_condition` |
| the expected error of tracked values, in closed form | `expected_tracking_error` |

The first three are functions of the model at its current parameters and return small frozen
dataclasses. The best multipliers need scipy (`pip install scipy`). Common arguments:

* `inner` maps a LongTensor of blocks to g_i(w), shape (B,) or, of `smallest_eigenvalue` alone,
  (B, d1), on the full data and with an autograd graph to `parameters`; deterministic, so set the
  model to evaluation mode first. It is asked for at most 64 blocks at a time.
* `num_inner` is n, `num_constraints` m, `parameters` w.
* `loss` returns g_0(w), if there is one.
* `per_layer` bounds the memory of a Gram matrix: gradients are held for groups of layers, none
  larger than the largest parameter, at one more backward pass per group.
"""

from .measures import (
    KKT,
    ConstraintCondition,
    Spectrum,
    constraint_condition,
    expected_tracking_error,
    kkt,
    smallest_eigenvalue,
)

__all__ = [
    "KKT", "ConstraintCondition", "Spectrum", "constraint_condition", "expected_tracking_error",
    "kkt", "smallest_eigenvalue",
]  # fmt: skip
