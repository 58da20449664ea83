"""Recipes: each method is an outer function, a tracker and perhaps a proximal point.

A recipe returns an objective; your optimizer steps it. `table()` lists the methods with what each
asks for and costs.
"""

from . import catalogue as catalogue
from . import registry as registry
from .door import constrained as constrained
from .double_loop import alexr2 as alexr2
from .group_weights import ooa as ooa
from .penalties import li2024 as li2024
from .penalties import liu2025 as liu2025
from .penalties import yang2025 as yang2025
from .primal_dual import alexr as alexr
from .proximal_lagrangian import icppac as icppac
from .proximal_lagrangian import oss as oss
from .registry import get as get
from .registry import register as register
from .registry import table as table
from .single_loop import sonex as sonex
from .single_loop import sonx as sonx
from .single_loop import sox as sox
from .switching import ssg as ssg
from .update import adam_type as adam_type
from .update import momentum_type as momentum_type
from .variance_reduced import msvr as msvr

__all__ = [
    "adam_type",
    "alexr",
    "alexr2",
    "constrained",
    "get",
    "icppac",
    "li2024",
    "liu2025",
    "momentum_type",
    "msvr",
    "ooa",
    "oss",
    "register",
    "sonex",
    "sonx",
    "sox",
    "ssg",
    "table",
    "yang2025",
]
