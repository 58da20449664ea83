"""Optimizers that are part of a method, and what may follow a step.

| module | idea |
|---|---|
| `wrapper` | optimizers that step others; what an objective knows of them |
| `proximal_point` | rounds of inner steps, then one step of yours (ALEXR2) |
| `steps` | the paper's updates, random or averaged iterates |
"""

from .proximal_point import ProximalPoint
from .steps import OutputIterate, adam_type, momentum_type
from .wrapper import MethodOptimizer

__all__ = ["MethodOptimizer", "OutputIterate", "ProximalPoint", "adam_type", "momentum_type"]
