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

from .dual_rules import ConEx as ConEx
from .dual_rules import ConstantConEx as ConstantConEx
from .dual_rules import DualRule as DualRule
from .dual_rules import StochasticConEx as StochasticConEx
from .dual_rules import StronglyConvexConEx as StronglyConvexConEx
from .dual_rules import VirtualQueue as VirtualQueue
from .lagrangian import LagrangianTerm as LagrangianTerm
from .lagrangian import ProximalLagrangian as ProximalLagrangian
from .objective import ConstrainedObjective as ConstrainedObjective
from .objective import ConstraintReport as ConstraintReport
from .objective import MultiplierAverage as MultiplierAverage
from .switching import Switching as Switching
from .switching import SwitchingTerm as SwitchingTerm

__all__ = [
    "ConEx",
    "ConstantConEx",
    "ConstrainedObjective",
    "ConstraintReport",
    "DualRule",
    "LagrangianTerm",
    "MultiplierAverage",
    "ProximalLagrangian",
    "StochasticConEx",
    "StronglyConvexConEx",
    "Switching",
    "SwitchingTerm",
    "VirtualQueue",
]
