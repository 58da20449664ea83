"""Recipes: each method is an outer function, a tracker and perhaps a proximal point.

A recipe returns an objective; your optimizer steps it.
"""

from .double_loop import alexr2 as alexr2
from .single_loop import sonex as sonex
from .single_loop import sonx as sonx
from .single_loop import sox as sox
from .update import adam_type as adam_type
from .update import momentum_type as momentum_type

__all__ = ["adam_type", "alexr2", "momentum_type", "sonex", "sonx", "sox"]
