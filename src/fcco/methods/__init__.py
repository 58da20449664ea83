"""Methods: one file each, with the update in math and the parts it is made of.

    method = term x rule of the step, stepped by any torch optimizer

A recipe returns an objective; your optimizer steps it. `table()` lists the methods with what each
asks for and costs; `constrained` builds the constrained ones by name.
"""

from .alexr import alexr, constrained_alexr
from .alexr2 import alexr2, constrained_alexr2
from .constrained import constrained
from .icppac import icppac
from .ooa import ooa
from .oss import oss
from .registry import Method, get, register, table
from .sonex import constrained_sonex, sonex
from .sonx import hinge_penalty, sonx
from .sox import sox, squared_hinge_penalty
from .spider import recursive_penalty
from .ssg import ssg
from .updates import adam_type, momentum_type

__all__ = [
    "Method",
    "adam_type",
    "alexr",
    "alexr2",
    "constrained",
    "constrained_alexr",
    "constrained_alexr2",
    "constrained_sonex",
    "get",
    "hinge_penalty",
    "icppac",
    "momentum_type",
    "ooa",
    "oss",
    "recursive_penalty",
    "register",
    "sonex",
    "sonx",
    "sox",
    "squared_hinge_penalty",
    "ssg",
    "table",
]
