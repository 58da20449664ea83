"""Every setting that is tried: K for each method and problem, as data.

The grids were centred by short trials on seeds 0 to 3, and these were not equally many: on the gaps
of rates about 125 settings of SONEX and 10 to 25 of each peer, on the convex problem about 25 and
15, on the sampled one about 40 and 20. Only what is listed here takes part in the choice.

`dual_lr`, `lr` and `ki` are steps of multipliers, `penalty` is the weight of a quadratic (peers) or
of a hinge (ours), `dual_decay` lets the dual step follow the primal schedule. For ours see
`fcco.constrained`; `follow=p` makes the smoothing fall with the learning rate to the power p,
`warm_up` is the number of batches that only start the estimates, and `from_zero` starts them where
every multiplier is zero.
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
    # Wide, since on fresh seeds most methods end 0.02 to 0.05 above the limit.
    "sampled": (-0.05, -0.03, -0.01, 0.0, 0.01),
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
