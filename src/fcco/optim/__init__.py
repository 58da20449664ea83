"""Optimizers that are part of a method, and what may follow a step.

| module | idea | used by |
|---|---|---|
| `wrapper` | optimizers that step others; what an objective knows of them | all below |
| `proximal_point` | rounds of inner steps, then one step of yours | ALEXR2 |
| `proximal_round` | rounds around an anchor that end at their average | OSS, ICPPAC |
| `switching` | one of two optimizers, by the branch of the step | SSG |
| `iterates` | random or averaged iterates, projections | any method |
"""

from .iterates import OutputIterate, project_after_step
from .proximal_point import ProximalPoint, proximal_step
from .proximal_round import ProximalRound
from .switching import PolyakStep, SwitchingOptimizer
from .wrapper import MethodOptimizer

__all__ = [
    "MethodOptimizer",
    "OutputIterate",
    "PolyakStep",
    "ProximalPoint",
    "ProximalRound",
    "SwitchingOptimizer",
    "project_after_step",
    "proximal_step",
]
