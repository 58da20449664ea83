"""Diagnostics: what a point or a run has reached, measured on the full data.

| question | function |
|---|---|
| approximate stationarity, an upper bound for any f | `approximate_stationarity` |
| approximate stationarity, exact for f with two slopes, such as the hinge | `hinge_stationarity` |
| what it implies under a bounded singular value | `nearly_stationary_bounds` |
| nearly-stationarity, by the prox-linear step | `prox_linear` |
| KKT residuals, with the penalty's and with the best multipliers | `kkt`, `kkt_report` |
| the Gram matrix of the stacked Jacobian | `gram_matrix` |
| its smallest eigenvalue | `smallest_eigenvalue` |
| the singular value of violated constraints | `constraint_condition` |
| tracking error of u | `tracking_error` |
| is lambda of the right scale | `smoothed_zone` |

All are functions of the model at its current parameters and return small frozen dataclasses. Those
that solve a least-squares problem need scipy (`pip install 'fcco[solvers]'`). Common arguments:

* `inner` maps a LongTensor of blocks to g_i(w), shape (B,) or (B, d1), on the full data and with an
  autograd graph to `parameters`; deterministic, so set the model to evaluation mode first.
* `outer` is f, `num_inner` n, `num_constraints` m, `parameters` w.
* `loss` returns g_0(w), if there is one.
* `chunk` is the number of blocks per autograd graph; more than that is never built at a time.
* `tile` and `per_layer` bound the memory of a Gram matrix, see `gram_matrix`.
"""

from .jacobian import (
    ConstraintCondition,
    Spectrum,
    constraint_condition,
    gram_matrix,
    smallest_eigenvalue,
)
from .proximal import ProxLinear, prox_linear
from .residuals import KKT, KKTReport, kkt, kkt_report
from .runs import SmoothedZone, TrackingError, smoothed_zone, tracking_error
from .stationarity import (
    ApproximateStationarity,
    HingeStationarity,
    NearlyStationaryBounds,
    approximate_stationarity,
    hinge_stationarity,
    nearly_stationary_bounds,
)

__all__ = [
    "KKT",
    "ApproximateStationarity",
    "ConstraintCondition",
    "HingeStationarity",
    "KKTReport",
    "NearlyStationaryBounds",
    "ProxLinear",
    "SmoothedZone",
    "Spectrum",
    "TrackingError",
    "approximate_stationarity",
    "constraint_condition",
    "gram_matrix",
    "hinge_stationarity",
    "kkt",
    "kkt_report",
    "nearly_stationary_bounds",
    "prox_linear",
    "smallest_eigenvalue",
    "smoothed_zone",
    "tracking_error",
]
