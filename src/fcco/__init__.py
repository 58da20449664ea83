"""Non-smooth coupled compositional optimisation for PyTorch.

    min_w  g0(w) + (1/n) sum_i f_i(g_i(w)),      g_i(w) = E g_i(w; xi)

Every method is an outer function times a tracker, perhaps inside a proximal point, stepped by any
torch optimizer:

| method | outer function | tracker | proximal point |
|---|---|---|---|
| SONEX | `MoreauEnvelope(f, smoothing)` | `msvr(n, gamma)` | |
| ALEXR2 | `MoreauEnvelope(f, smoothing)` | `alexr(n, gamma, theta)` | `ProximalPoint` |
| SONX | f itself (a subgradient) | `msvr(n, gamma)` | |
| SOX | smooth f | `ema(n, gamma)` | |

and their rivals (`fcco.methods.table()`) add weights on groups, dual variables, switching or a
recursive gradient. Constrained problems have one door, `fcco.constrained(..., method="sonex")`.

`loss = objective(inner, index)` gives a scalar whose gradient is the method's estimator;
`loss.backward(); optimizer.step()` stay yours.
"""

from . import continual as continual
from . import contrastive as contrastive
from . import diagnostics as diagnostics
from . import fleet as fleet
from . import groups as groups
from . import methods as methods
from . import outer as outer
from . import theory as theory
from . import tracker as tracker
from ._schedules import Annealed as Annealed
from .constraints import Penalized as Penalized
from .constraints import PolyakStep as PolyakStep
from .constraints import ProximalLagrangian as ProximalLagrangian
from .constraints import Switching as Switching
from .constraints import SwitchingOptimizer as SwitchingOptimizer
from .continual import ReferenceLosses as ReferenceLosses
from .continual import TaskHeads as TaskHeads
from .contrastive import ContrastiveTerm as ContrastiveTerm
from .contrastive import GlobalContrastive as GlobalContrastive
from .group_dro import CVaRGroupDRO as CVaRGroupDRO
from .group_dro import CVaRTerm as CVaRTerm
from .groups import BlockSampler as BlockSampler
from .groups import GroupBatchSampler as GroupBatchSampler
from .groups import group_mean as group_mean
from .inner import Measured as Measured
from .iterates import OutputIterate as OutputIterate
from .methods import adam_type as adam_type
from .methods import alexr2 as alexr2
from .methods import constrained as constrained
from .methods import momentum_type as momentum_type
from .methods import ooa as ooa
from .methods import sonex as sonex
from .methods import sonx as sonx
from .methods import sox as sox
from .objective import Compositional as Compositional
from .outer import Absolute as Absolute
from .outer import CVaR as CVaR
from .outer import CVaRHinge as CVaRHinge
from .outer import Hinge as Hinge
from .outer import Maximum as Maximum
from .outer import MoreauEnvelope as MoreauEnvelope
from .outer import Pinball as Pinball
from .outer import SquaredHinge as SquaredHinge
from .outer import TwoSidedHinge as TwoSidedHinge
from .previous import PreviousParameters as PreviousParameters
from .projected import keep_inside as keep_inside
from .proximal_point import ProximalPoint as ProximalPoint
from .recursive import RecursiveGradient as RecursiveGradient
from .terms import CoupledTerm as CoupledTerm
from .tracker import InnerTracker as InnerTracker
from .tracker import alexr as alexr
from .tracker import ema as ema
from .tracker import msvr as msvr
from .tracker import spider as spider
from .weights import OnlineGroupDRO as OnlineGroupDRO

__version__ = "0.1.0"
