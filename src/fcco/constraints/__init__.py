"""Constraints g_i(w) <= tolerance_i: by a penalty, by switching, by dual variables.

| module | idea | used by |
|---|---|---|
| `base` | violations, multipliers, reports | every method |
| `penalized` | a penalty on tracked values | SONEX, ALEXR2, Li et al., Yang et al. |
| `recursive` | a penalty on recursive estimates | Liu and Xu |
| `switching`, `steps` | a step on the loss or on the worst constraint | SSG |
| `lagrangian`, `rules`, `rounds` | proximal points with multipliers | OSS, ICPPAC |

Every objective here answers `violation()`, `multipliers()` and `report()`; `fcco.constrained` makes
any of them by name.
"""

from .base import ConstrainedObjective as ConstrainedObjective
from .base import ConstraintReport as ConstraintReport
from .base import MultiplierAverage as MultiplierAverage
from .lagrangian import ProximalLagrangian as ProximalLagrangian
from .penalized import Penalized as Penalized
from .rules import ConEx as ConEx
from .rules import ConstantConEx as ConstantConEx
from .rules import StochasticConEx as StochasticConEx
from .rules import StronglyConvexConEx as StronglyConvexConEx
from .rules import VirtualQueue as VirtualQueue
from .steps import InverseRoot as InverseRoot
from .steps import PolyakStep as PolyakStep
from .steps import convex_step as convex_step
from .steps import weakly_convex_step as weakly_convex_step
from .switching import Switching as Switching
from .switching import SwitchingOptimizer as SwitchingOptimizer

__all__ = [
    "ConEx",
    "ConstantConEx",
    "ConstrainedObjective",
    "ConstraintReport",
    "InverseRoot",
    "MultiplierAverage",
    "Penalized",
    "PolyakStep",
    "ProximalLagrangian",
    "StochasticConEx",
    "StronglyConvexConEx",
    "Switching",
    "SwitchingOptimizer",
    "VirtualQueue",
    "convex_step",
    "weakly_convex_step",
]
