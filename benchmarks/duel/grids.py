"""Every setting that is tried: K for each method and problem, as data.

The grids were centred by short trials on the tuning seed, the peers' first; what is not listed
here was not used for a choice. `dual_lr`, `lr` and `ki` are steps of multipliers, `penalty` is the
weight of a quadratic (peers) or of a hinge (ours), `dual_decay` lets the dual step follow the
primal schedule. For ours see `fcco.Penalized`; `follow=p` makes the smoothing fall with the
learning rate to the power p, `warm_up` is the number of batches that only start the estimates, and
`from_zero` starts them where every multiplier is zero.
"""

from __future__ import annotations

from . import grid_convex, grid_fairness, grid_sampled
from .stepper import Setting

__all__ = ["GRIDS", "MARGINS", "K", "family", "settings"]

K = 8
GRIDS = {
    "fairness": grid_fairness.GRID,
    "convex": grid_convex.GRID,
    "sampled": grid_sampled.GRID,
}
# Training limits relative to the stated ones, for the objective at equal violation.
MARGINS = {
    "fairness": (-0.004, 0.0, 0.004),
    "convex": (-0.01, 0.0, 0.01),
    "sampled": (-0.01, 0.0, 0.01),
}


def family(problem: str) -> str:
    """Problems that share their grids."""
    return "fairness" if problem in ("adult", "compas") else problem


def settings(problem: str, method: str) -> list[Setting]:
    """The K settings of a method on a problem."""
    found = GRIDS[family(problem)][method]
    if len(found) != K or len({str(sorted(s.items(), key=str)) for s in found}) != K:
        raise ValueError(f"`grids`: {method} on {problem} must have {K} different settings.")
    return found
