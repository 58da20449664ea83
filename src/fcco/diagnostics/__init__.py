"""Diagnostics: what a point or a run has reached, measured on the full data.

| question | function |
|---|---|
| KKT residuals, with given, a penalty's, or the best multipliers | `kkt` |
| the smallest eigenvalue of the stacked Jacobian's Gram matrix | `smallest_eigenvalue` |
| the singular value of violated constraints | `constraint_condition` |
| tracking error of u | `tracking_error` |

All are functions of the model at its current parameters and return small frozen dataclasses. The
best multipliers need scipy (`pip install scipy`). Common arguments:

* `inner` maps a LongTensor of blocks to g_i(w), shape (B,) or (B, d1), on the full data and with an
  autograd graph to `parameters`; deterministic, so set the model to evaluation mode first.
* `num_inner` is n, `num_constraints` m, `parameters` w.
* `loss` returns g_0(w), if there is one.
* `chunk` is the number of blocks per autograd graph; more than that is never built at a time.
* `per_layer` bounds the memory of a Gram matrix: gradients are held for groups of layers, none
  larger than the largest parameter, at one more backward pass per group.
"""

from .jacobian import ConstraintCondition, Spectrum, constraint_condition, smallest_eigenvalue
from .residuals import KKT, kkt, tracking_error

__all__ = [
    "KKT", "ConstraintCondition", "Spectrum", "constraint_condition", "kkt", "smallest_eigenvalue",
    "tracking_error",
]  # fmt: skip
