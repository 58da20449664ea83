"""The registry: what each method is for, what it asks for, what it costs, who proposed it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from .. import _checks
from .alexr import alexr
from .alexr2 import alexr2
from .constrained import ALIASES
from .icppac import icppac
from .ooa import ooa
from .oss import oss
from .sonex import sonex
from .sonx import hinge_penalty, sonx
from .sox import sox, squared_hinge_penalty
from .spider import recursive_penalty
from .ssg import ssg

__all__ = ["PROBLEMS", "Method", "Table", "get", "register", "table"]

PROBLEMS = {
    "S1": "mean of |a (w_i - c_i)|, separable",
    "S2": "CVaR over groups, all of which tie at the solution",
    "S3": "a quadratic under upper bounds",
    "S3b": "a quadratic outside the unit ball (a non-convex set)",
    "S4": "a hinge of inner functions with kinks",
    "smooth": "a squared hinge of linear functions",
}
"""Problems with known answers; every method names those on which it must reach the answer."""


@dataclass(frozen=True)
class Method:
    """One method: the facts that decide whether it fits a problem.

    Attributes:
        name: the word by which it is chosen.
        recipe: the function that builds it; its docstring holds the update.
        problem: the problem class: what f and g_i may be.
        complexity: evaluations until the measure is at most eps.
        measure: what the complexity bounds.
        reference: where it comes from.
        problems: the names of `PROBLEMS` that it solves; the tests run each.
        outer: facts that the outer function must declare.
        constraints: `""` for no constrained method, `"sampled"` when a step may look at a part of
            the constraints, `"all"` when it must see all of them.
        loop: `"single"` or `"double"`.
        update: what steps the parameters.
        sampling: which blocks a step looks at.
        batches: independent batches per step.
        extra: evaluations beside one forward and one backward pass.
    """

    name: str
    recipe: Callable[..., Any]
    problem: str
    complexity: str
    measure: str
    reference: str
    problems: tuple[str, ...]
    outer: tuple[str, ...] = ()
    constraints: Literal["", "sampled", "all"] = ""
    loop: Literal["single", "double"] = "single"
    update: str = "momentum or Adam"
    sampling: str = "blocks sampled"
    batches: int = 1
    extra: str = "none"


_METHODS: dict[str, Method] = {}


def register(method: Method) -> Method:
    """Add a method; refused unless it is documented and says which problems prove it.

    The tests run it on these problems, against a transcription and through a checkpoint.
    """
    call = f"register({method.name!r})"
    if method.name in _METHODS:
        raise ValueError(f"`{call}`: a method of this name is registered already.")
    if not method.problems:
        raise ValueError(f"`{call}`: `problems` is empty; name at least one of {[*PROBLEMS]}.")
    for problem in method.problems:
        _checks.one_of(call, "problems", problem, tuple(PROBLEMS))
    text = inspect.getdoc(method.recipe) or ""
    missing = [part for part in (".. math::", "Args:", "References:") if part not in text]
    if missing:
        raise ValueError(
            f"`{call}`: the docstring of {method.recipe.__name__} lacks {' and '.join(missing)}; "
            "it must show the update, the arguments and the source."
        )
    _METHODS[method.name] = method
    return method


def get(name: str) -> Method:
    """The method of this name.

    Example:
        >>> import fcco
        >>> fcco.methods.get("sonex").complexity
        'n eps^-5 / (B1 sqrt(B2))'
    """
    # Not before: "sonx" and "sox" are methods here and other names of penalties in `constrained`.
    if name not in _METHODS:
        name = ALIASES.get(name, name)
    _checks.one_of("methods.get", "name", name, tuple(_METHODS))
    return _METHODS[name]


class Table(tuple[Method, ...]):
    """Methods that print as a table.

    Example:
        >>> import fcco
        >>> fcco.methods.table().only(problems="S4", loop="single").names()
        ['sonx', 'hinge']
    """

    COLUMNS = ("name", "problem", "loop", "sampling", "extra", "complexity", "reference")

    def only(self, **facts: Any) -> Table:
        """Those with these facts: `only(loop="double")`, `only(constraints="sampled")`."""
        for fact in facts:
            _checks.one_of("Table.only", "fact", fact, tuple(f.name for f in fields(Method)))

        def holds(value: Any, wanted: Any) -> bool:
            return wanted in value if isinstance(value, tuple) else value == wanted

        chosen = (m for m in self if all(holds(getattr(m, k), v) for k, v in facts.items()))
        return Table(chosen)

    def names(self) -> list[str]:
        """The names, in order."""
        return [method.name for method in self]

    def as_dicts(self) -> list[dict[str, Any]]:
        """All facts of each as plain values, for JSON."""

        def plain(value: Any) -> Any:
            if isinstance(value, tuple):
                return list(value)
            return f"fcco.methods.{value.__name__}" if callable(value) else value

        return [{f.name: plain(getattr(m, f.name)) for f in fields(m)} for m in self]

    def rows(self) -> list[list[str]]:
        """The cells of the printed table."""
        return [[str(getattr(method, column)) for column in self.COLUMNS] for method in self]

    def __str__(self) -> str:
        """Aligned columns."""
        lines = [list(self.COLUMNS), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in lines)
        return "\n".join("  ".join(row).rstrip() for row in padded)


def table() -> Table:
    """All methods, as a table that prints itself.

    Example:
        >>> import fcco
        >>> fcco.methods.table().only(constraints="all").names()
        ['oss', 'icppac', 'ssg', 'recursive-hinge']
    """
    return Table(_METHODS.values())


_PAST = "forward at w_{t-1}"
_WEAK = "g_0 and g_i weakly convex"
_ALL: dict[str, Any] = {"constraints": "all", "sampling": "all constraints"}

for _method in (
    Method(
        "sonex", sonex,
        problem="f weakly convex with a prox, g_i smooth", constraints="sampled", extra=_PAST,
        complexity="n eps^-5 / (B1 sqrt(B2))", measure="approximate stationarity",
        reference="the paper, Algorithm 1", problems=("S1", "S2", "S3", "S3b", "smooth"),
    ),
    Method(
        "alexr2", alexr2,
        problem="f convex with a prox, g_i smooth; or f also non-decreasing, g_i weakly convex",
        outer=("convex",), constraints="sampled", loop="double", batches=2,
        extra="forward at z_{k-1}",
        complexity="n eps^-5 / (B1 B2)", measure="near stationarity of F_lambda",
        reference="the paper, Algorithm 2", problems=("S1", "S2", "S3", "S3b", "S4", "smooth"),
    ),
    Method(
        "sonx", sonx,
        problem="f weakly convex, g_i smooth; or f also non-decreasing, g_i weakly convex",
        update="SGD", extra=_PAST,
        complexity="n eps^-6 / (B1 sqrt(B2))", measure="near stationarity",
        reference="Hu, Zhu and Yang 2023", problems=("S1", "S2", "S4"),
    ),
    Method(
        "sox", sox,
        problem="f smooth, g_i smooth", outer=("smooth",),
        complexity="n eps^-4 / (B1 B2)", measure="stationarity",
        reference="Wang and Yang 2022", problems=("smooth",),
    ),
    Method(
        "alexr", alexr,
        problem="f convex and non-decreasing, g_i convex; or g_i affine",
        outer=("convex",), constraints="sampled", update="SGD", batches=2, extra=_PAST,
        complexity="n eps^-2 / B1; n eps^-1 / B1 if strongly convex", measure="objective gap",
        reference="Wang and Yang 2023", problems=("S1", "S2", "S3", "smooth"),
    ),
    Method(
        "ooa", ooa,
        problem="worst groups or CVaR over groups", sampling="blocks sampled, scaled by n/B1",
        complexity="n log(n) eps^-2 / B1", measure="objective gap (convex)",
        reference="Sagawa et al. 2020", problems=("S2",),
    ),
    Method(
        "oss", oss,
        problem=f"{_WEAK}, Slater", loop="double", update="SGD", extra="derivative along the step",
        complexity="eps^-6", measure="near KKT",
        reference="Ma, Lin and Yang 2020", problems=("S3", "S3b"), **_ALL,
    ),
    Method(
        "icppac", icppac,
        problem=f"{_WEAK}, Slater", loop="double", update="SGD", batches=2,
        extra="forward and derivative at x_{t-1}", complexity="eps^-6", measure="near KKT",
        reference="Boob, Deng and Lan 2023", problems=("S3", "S3b"), **_ALL,
    ),
    Method(
        "ssg", ssg,
        problem="g_0 weakly convex, g_i convex (or weakly convex with regularity)",
        update="SGD, or two optimizers", batches=2, extra="forward for the switch",
        complexity="eps^-8", measure="near KKT",
        reference="Huang and Lin 2023", problems=("S3", "S3b"), **_ALL,
    ),
    Method(
        "squared-hinge", squared_hinge_penalty,
        problem="g_0 and g_i smooth; squared hinge", constraints="sampled",
        complexity="eps^-7", measure="KKT", reference="Li et al. 2024", problems=("S3", "S3b"),
    ),
    Method(
        "hinge", hinge_penalty,
        problem=f"{_WEAK}; hinge", constraints="sampled", update="SGD", extra=_PAST,
        complexity="eps^-6", measure="near KKT",
        reference="Yang et al. 2025", problems=("S3", "S3b", "S4"),
    ),
    Method(
        "recursive-hinge", recursive_penalty,
        problem=f"{_WEAK}; smoothed hinge", update="SGD", batches=2,
        extra=f"{_PAST}; a large batch every q steps",
        complexity="eps^-6 values, eps^-4 subgradients", measure="near KKT",
        reference="Liu and Xu 2025", problems=("S3", "S3b"), **_ALL,
    ),
):  # fmt: skip
    register(_method)
