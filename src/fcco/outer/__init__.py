"""Outer functions f, applied to the tracked inner values g_i(w).

| class | f(u) | facts |
|---|---|---|
| `Hinge` | rho [u]_+ | convex, monotone |
| `Absolute` | w abs(u) | convex |
| `DeadZone` | w [abs(u) - kappa]_+ | convex |
| `SquaredHinge` | rho/2 [u]_+^2 | convex, monotone, smooth |
| `CVaR` | mean of the worst share r | convex, monotone, vector |
| `TwoSidedHinge` | w [abs(u_1 - u_2) - kappa]_+ | convex, on R^2 |
| `Ratio` | -u_1 / u_2, u_2 > 0 | smooth, on R^2 |
| `ClassSeparation` | spread in two classes and [m + b - a]_+^2 | smooth, on R^4 |
| `Linear` | u | convex, monotone, smooth |
| `Discount` | -1 / log2(1 + u), u > 0 | monotone, smooth |
| `LogMeanExp` | tau log(exp(nu) + e), nu tracked in log space | convex, monotone, smooth |
| `OneSidedMCP` | m u - c/2 u^2 for u > 0, then constant | weakly convex, monotone |
| `MoreauEnvelope` | min_v f(v) + norm(u - v)^2 / (2 lambda) | smooth |

`AbstractOuter` is the base class of your own.
"""

from .base import AbstractOuter, MoreauEnvelope, numeric_prox
from .cvar import CVaR, project_capped_simplex
from .piecewise import Absolute, DeadZone, Hinge, OneSidedMCP, TwoSidedHinge
from .smooth import ClassSeparation, Discount, Linear, LogMeanExp, Ratio, SquaredHinge

__all__ = [
    "Absolute", "AbstractOuter", "CVaR", "ClassSeparation", "DeadZone", "Discount",
    "Hinge", "Linear", "LogMeanExp", "MoreauEnvelope", "OneSidedMCP", "Ratio", "SquaredHinge",
    "TwoSidedHinge", "numeric_prox", "project_capped_simplex",
]  # fmt: skip
