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
| tracking error of u, gradient error of v | `tracking_error`, `gradient_error` |
| is lambda of the right scale | `smoothed_zone` |
| bounds of Adam-type step sizes | `step_size_bounds` |

All are functions of the model at its current parameters and return small frozen dataclasses. The
inner functions are given as a callable that maps a LongTensor of blocks to g_i(w) on the full data,
with an autograd graph to `parameters`; set the model to evaluation mode first. The graph of more
than a chunk of blocks is never built. Those that solve a least-squares problem need scipy
(`pip install 'fcco[solvers]'`).
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
from .runs import (
    GradientError,
    SmoothedZone,
    StepSizeBounds,
    TrackingError,
    gradient_error,
    smoothed_zone,
    step_size_bounds,
    tracking_error,
)
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
    "GradientError",
    "HingeStationarity",
    "KKTReport",
    "NearlyStationaryBounds",
    "ProxLinear",
    "SmoothedZone",
    "Spectrum",
    "StepSizeBounds",
    "TrackingError",
    "approximate_stationarity",
    "constraint_condition",
    "gradient_error",
    "gram_matrix",
    "hinge_stationarity",
    "kkt",
    "kkt_report",
    "nearly_stationary_bounds",
    "prox_linear",
    "smallest_eigenvalue",
    "smoothed_zone",
    "step_size_bounds",
    "tracking_error",
]
