"""Constraints g_i(w) <= tolerance_i: violations, multipliers, and methods beyond penalties.

| module | idea | used by |
|---|---|---|
| `objective` | violations, multipliers, reports | every constrained method |
| `switching` | a step on the loss or on the worst constraint | SSG |
| `lagrangian`, `dual_rules` | proximal points with multipliers | OSS, ICPPAC |

Penalties (SONEX, ALEXR2, hinge, squared hinge) and dual variables (ALEXR) are a
`ConstrainedObjective` of a `CoupledTerm` or `DualTerm`. `fcco.constrained` makes any of them by
name.
"""

from ..report import ConstraintReport
from .dual_rules import ConstantConEx, DualRule, VirtualQueue
from .lagrangian import LagrangianTerm, ProximalLagrangian
from .objective import ConstrainedObjective, MultiplierAverage
from .switching import Switching, SwitchingTerm

__all__ = [
    "ConstantConEx",
    "ConstrainedObjective",
    "ConstraintReport",
    "DualRule",
    "LagrangianTerm",
    "MultiplierAverage",
    "ProximalLagrangian",
    "Switching",
    "SwitchingTerm",
    "VirtualQueue",
]
