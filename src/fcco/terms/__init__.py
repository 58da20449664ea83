"""Terms of an objective: what is done with the tracked values u_i.

| module | term | used by |
|---|---|---|
| `coupled` | an outer function of u_i; penalties too | SONEX, SONX, SOX, ALEXR2 |
| `cvar` | the worst values, with a threshold s | group DRO by SONEX, SONX, ALEXR2 |
| `group_weights` | weights on groups that an adversary moves | OOA |
| `dual` | one dual variable per block | ALEXR v2 |
| `multipliers` | multipliers that find their own steps | constraints without settings |
| `parameters` | numbers that belong to blocks: cut-offs, temperatures | `fcco.xrisk`, contrastive |
| `limits` | limits, and what every term with limits offers | all for limits |
"""

from .base import AbstractTerm
from .coupled import CoupledTerm, OuterTerm
from .cvar import CVaRTerm
from .dual import DualTerm
from .group_weights import GroupWeights
from .limits import AtLeast, ConstraintTerm, Equal, Limits
from .multipliers import MultiplierTerm
from .parameters import BlockParameters

__all__ = [
    "AbstractTerm", "AtLeast", "BlockParameters", "CVaRTerm", "ConstraintTerm", "CoupledTerm",
    "DualTerm", "Equal", "GroupWeights", "Limits", "MultiplierTerm", "OuterTerm",
]  # fmt: skip
