"""Methods: each a frozen dataclass of its settings, with the update in math.

    method = term x rule of the step, stepped by any torch optimizer

`fcco.constrained` builds any of them for limits, by its word or from its settings; `sonex(...)`,
`alexr2(...)`, `sonx(...)`, `sox(...)` and `alexr(...)` for an outer function of your own, and
`ooa(...)` and `ctc_dro(...)` for groups, `scent(...)` for log-mean-exp. `table()` says what each
is for and what it needs.
"""

from .build import alexr, alexr2, constrained, ctc_dro, ooa, scent, sonex, sonx, sox
from .lagrangian import Icppac, Oss
from .registry import ALIASES, METHODS, ROWS, Method, table
from .settings import Settings
from .switching import Ssg
from .tracked import (
    Alexr,
    Alexr2,
    CtcDro,
    HingePenalty,
    Multipliers,
    Ooa,
    RecursiveHinge,
    Scent,
    Sonex,
    Sonx,
    Sox,
    SquaredHingePenalty,
)  # fmt: skip

__all__ = [
    "ALIASES", "METHODS", "ROWS", "Alexr", "Alexr2", "CtcDro", "HingePenalty", "Icppac", "Method",
    "Multipliers", "Ooa", "Oss", "RecursiveHinge", "Scent", "Settings", "Sonex", "Sonx", "Sox",
    "SquaredHingePenalty", "Ssg", "alexr", "alexr2", "constrained", "ctc_dro", "ooa", "scent",
    "sonex", "sonx", "sox", "table",
]  # fmt: skip
