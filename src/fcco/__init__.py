"""Non-smooth coupled compositional optimisation for PyTorch.

    min_w  g0(w) + (1/n) sum_i f_i(g_i(w)),      g_i(w) = E g_i(w; xi)

The equation of the library:

    method = term x rule of the step, stepped by any torch optimizer

A *term* turns tracked values u_i ~ g_i(w) into a loss (`fcco.terms`): an outer function of them,
CVaR, weights on groups, or dual variables. The *rule of the step* is plain for most methods; others
step inside a proximal point, or switch between loss and limits. Each method is a
dataclass of its settings in `fcco.methods`:

<!-- methods: method | for | needs | use it when -->

| method | for | needs | use it when |
| --- | --- | --- | --- |
| `multipliers` | limits | nothing | there are limits: of any kind, nothing to tune |
| `sonex` | groups, limits, general | smoothing, penalty | you want the paper's method |
| `alexr2` | groups, limits, general | smoothing, penalty | the g_i have kinks |
| `sonx` | groups, general | outer | f must not be smoothed |
| `sox` | general | outer | f is smooth |
| `alexr` | limits, general | dual_step, penalty | the problem is convex |
| `ooa` | groups | nothing | you compare with group DRO |
| `ctc-dro` | groups | nothing | group DRO puts all weight on the noisiest group |
| `scent` | general | nothing | f is log-mean-exp, with many blocks |
| `hinge` | limits | penalty | you compare with SONX on a penalty |
| `squared-hinge` | limits | penalty | you compare with work on forgetting |
| `recursive-hinge` | limits | smoothing, refresh_every, penalty | a large batch at times is cheap |
| `ssg` | limits | nothing | batches are large, their noise small |
| `oss` | limits | proximal, inner_steps | you compare with virtual queues |
| `icppac` | limits | proximal, inner_steps | you compare with a primal-dual loop |

Entry points: `CVaRGroupDRO` for the worst groups, `constrained(model, optimizer, limits)` for
limits, `GlobalContrastive` for two towers, `fcco.xrisk` for average precision, partial AUC and
ranking, `Compositional` for any terms.
`loss = objective(function, index)` gives a scalar whose gradient is the method's estimator;
`loss.backward(); optimizer.step()` stay yours.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import (
    _checks,
    constraints,
    continual,
    groups,
    methods,
    optim,
    outer,
    previous,
    terms,
    tracker,
)
from ._schedules import Annealed, Width
from ._watch import UsageWarning
from .continual import ReferenceLosses
from .group_dro import CVaRGroupDRO
from .groups import BlockSampler, GroupBatchSampler, group_mean
from .inputs import Measured
from .methods import constrained
from .objective import Compositional
from .terms import AtLeast, Equal
from .tracker import NonFiniteValue

if _TYPE_CHECKING:
    from . import certificate as certificate
    from . import contrastive as contrastive
    from . import diagnostics as diagnostics
    from . import fleet, xrisk
    from .contrastive import GlobalContrastive

__version__ = "0.1.0"

# Imported when they are first used: not every program needs them.
_LAZY = {
    "GlobalContrastive": "contrastive",
    "certificate": "certificate",
    "contrastive": "contrastive",
    "diagnostics": "diagnostics",
    "fleet": "fleet",
    "xrisk": "xrisk",
}
_PARTS = (constraints, continual, groups, methods, optim, outer, previous, terms, tracker)

__all__ = [
    "Annealed", "AtLeast", "BlockSampler", "CVaRGroupDRO", "Compositional", "Equal",
    "GlobalContrastive", "GroupBatchSampler", "Measured", "NonFiniteValue", "ReferenceLosses",
    "UsageWarning", "Width", "constrained", "fleet", "group_mean", "methods", "outer", "terms",
    "xrisk",
]  # fmt: skip


def __getattr__(name: str) -> _Any:
    if name in _LAZY:
        module = _importlib.import_module(f".{_LAZY[name]}", __name__)
        return module if name == _LAZY[name] else getattr(module, name)
    homes = [part.__name__ for part in _PARTS if name in part.__all__]
    near = f"use {homes[0]}.{name}" if homes else _checks.meant(name, __all__)
    raise AttributeError(f"module 'fcco' has no attribute {name!r}{near and f': {near}'}")


def __dir__() -> list[str]:
    return __all__
