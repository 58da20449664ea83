"""Outer functions f, applied to the tracked inner values g_i(w).

| class | f(u) | facts |
|---|---|---|
| `Hinge` | rho [u]_+ | convex, monotone |
| `CVaRHinge` | [u - s]_+ / r | convex, monotone |
| `Absolute` | w abs(u) | convex |
| `Pinball` | w max(tau u, (tau - 1) u) | convex |
| `DeadZone` | w [abs(u) - kappa]_+ | convex |
| `SquaredHinge` | rho/2 [u]_+^2 | convex, monotone, smooth |
| `Maximum` | max_i u_i | convex, monotone, vector |
| `TopMean` | mean of the k largest | convex, monotone, vector |
| `CVaR` | mean of the worst share r | convex, monotone, vector |
| `PositiveMaximum` | [max_i u_i]_+ | convex, monotone, vector |
| `EuclideanNorm` | w norm(u) | convex, vector |
| `SeparableHinge` | sum_j rho [u_j]_+ | convex, monotone, vector |
| `TwoSidedHinge` | w [abs(u_1 - u_2) - kappa]_+ | convex, on R^2 |
| `TauLog` | tau log(u + e), u >= 0 | concave, monotone, smooth |
| `AveragePrecision` | -u_1 / u_2, u_2 > 0 | smooth, on R^2 |
| `ClassSeparation` | spread in two classes and [m + b - a]_+^2 | smooth, on R^4 |
| `Power` | u^p, u >= 0 | convex, monotone, smooth |
| `NDCG` | c / log2(1 + u), u > 0 | convex for c > 0, smooth |
| `LogMeanExp` | tau log(exp(nu) + e), nu tracked in log space | convex, monotone, smooth |
| `LogTruncatedHinge` | alpha log(1 + [u]_+ / alpha) | weakly convex, monotone |
| `MCP` | m abs(u) - c/2 u^2, then constant | weakly convex |
| `OneSidedMCP` | MCP of [u]_+ | weakly convex, monotone |
| `SCAD` | abs(u), bent, then constant | weakly convex |
| `AbsoluteSquareGap` | abs(u^2 - 1) | weakly convex |
| `Custom` | any value function | as declared |
| `MoreauEnvelope` | min_v f(v) + norm(u - v)^2 / (2 lambda) | smooth |

`AbstractOuter` is the base class of your own; `numeric_prox` and the projections help to write one.
"""

from .base import AbstractOuter, numeric_prox
from .custom import Custom
from .envelope import MoreauEnvelope
from .piecewise import Absolute, CVaRHinge, DeadZone, Hinge, Pinball, TwoSidedHinge
from .projections import (
    project_ball,
    project_box,
    project_capped_simplex,
    project_simplex,
    project_subsimplex,
)
from .smooth import (
    NDCG,
    AveragePrecision,
    ClassSeparation,
    LogMeanExp,
    Power,
    SquaredHinge,
    TauLog,
)
from .support import CVaR, EuclideanNorm, Maximum, PositiveMaximum, SeparableHinge, TopMean
from .weakly_convex import MCP, SCAD, AbsoluteSquareGap, LogTruncatedHinge, OneSidedMCP

__all__ = [
    "MCP",
    "NDCG",
    "SCAD",
    "Absolute",
    "AbsoluteSquareGap",
    "AbstractOuter",
    "AveragePrecision",
    "CVaR",
    "CVaRHinge",
    "ClassSeparation",
    "Custom",
    "DeadZone",
    "EuclideanNorm",
    "Hinge",
    "LogMeanExp",
    "LogTruncatedHinge",
    "Maximum",
    "MoreauEnvelope",
    "OneSidedMCP",
    "Pinball",
    "PositiveMaximum",
    "Power",
    "SeparableHinge",
    "SquaredHinge",
    "TauLog",
    "TopMean",
    "TwoSidedHinge",
    "numeric_prox",
    "project_ball",
    "project_box",
    "project_capped_simplex",
    "project_simplex",
    "project_subsimplex",
]
