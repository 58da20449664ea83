"""Methods: one file each, with the update in math and the parts it is made of.

    method = term x rule of the step, stepped by any torch optimizer

A recipe returns an objective; your optimizer steps it. `table()` lists the methods with what each
asks for and costs; `constrained` builds the constrained ones by name.
"""

from .alexr import alexr as alexr
from .alexr import constrained_alexr as constrained_alexr
from .alexr2 import alexr2 as alexr2
from .alexr2 import constrained_alexr2 as constrained_alexr2
from .constrained import constrained as constrained
from .icppac import icppac as icppac
from .msvr import msvr as msvr
from .ooa import ooa as ooa
from .oss import oss as oss
from .registry import Method as Method
from .registry import get as get
from .registry import register as register
from .registry import table as table
from .sonex import constrained_sonex as constrained_sonex
from .sonex import sonex as sonex
from .sonx import hinge_penalty as hinge_penalty
from .sonx import sonx as sonx
from .sox import sox as sox
from .sox import squared_hinge_penalty as squared_hinge_penalty
from .spider import recursive_penalty as recursive_penalty
from .ssg import ssg as ssg
from .updates import adam_type as adam_type
from .updates import momentum_type as momentum_type

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
    "msvr",
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
