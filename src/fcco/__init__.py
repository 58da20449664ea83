"""Losses for PyTorch that are functions of expectations: worst groups, limits and rankings.

| what you want | what to use |
|---|---|
| the worst groups get better | `CVaRGroupDRO`, with `GroupBatchSampler` |
| values stay within limits | `constrained`, with `Measured` for rates |
| nothing gets worse in fine-tuning | `constrained`, with `ReferenceLosses` |
| good rankings: average precision, partial AUC, NDCG | `fcco.xrisk` |
| two encoders, from small batches | `GlobalContrastive` |
| terms of your own | `Compositional` and `fcco.terms` |

`loss = objective(function, index)` gives a scalar for `loss.backward()`; `optimizer.step()` stays
yours. All objectives have the form

    min_w  g0(w) + (1/n) sum_i f(g_i(w)),      g_i(w) = E g_i(w; xi)

where f has a kink and a batch only has a noisy g_i. A *term* turns running estimates u_i of the g_i
into a loss (`fcco.terms`); a *method* is a term and a rule for the step (`fcco.methods`):

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
