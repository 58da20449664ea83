"""Building blocks of recipes: an objective of one term, and checks of what a method is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from .. import _checks
from .._schedules import Schedule, Smoothing
from ..constraints import ConstrainedObjective
from ..objective import Compositional
from ..outer import AbstractOuter, Hinge
from ..terms import AbstractTerm, CoupledTerm, MultiplierTerm
from ..terms.limits import Tolerance, number_and_names
from ..tracker import InnerTracker, for_model, like_model

__all__ = [
    "Auto",
    "automatic",
    "coupled",
    "dimension",
    "multiplied",
    "penalized",
    "penalty_function",
]  # fmt: skip

GAMMA = 0.2
"""Weight of the new value for the automatic rule of constraints; its gains were chosen with it."""

Auto = Literal["auto"]
"""A setting that the method finds by itself."""


def dimension(method: str, outer: AbstractOuter, dim: int | None) -> int:
    """d1: what `outer` declares, or what the caller gave."""
    dimension = outer.dim if dim is None else dim
    if dimension is None:
        raise ValueError(f"`{method}(dim=...)` is needed: {outer!r} takes vectors of any length.")
    return dimension


def coupled(
    method: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: AbstractOuter,
    num_inner: int,
    *,
    smoothing: Smoothing = 0.0,
    dim: int | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **tracker: Any,
) -> Compositional:
    """An objective of one `CoupledTerm`; `tracker` are options of `InnerTracker`."""
    values = for_model(model, num_inner, dimension(method, outer, dim), **tracker)
    term = CoupledTerm(outer, values, smoothing=smoothing)
    problem = Compositional(model, optimizer, term, process_group=process_group, offload=offload)
    problem.method = method
    return problem


def penalized(
    method: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    outer: AbstractOuter,
    *,
    smoothing: Smoothing = 0.0,
    weight: Schedule = 1.0,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    dim: int | None = None,
    objective: AbstractTerm | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **tracker: Any,
) -> ConstrainedObjective:
    """Constraints as a `CoupledTerm` of a penalty function, perhaps beside a coupled objective."""
    number, names = number_and_names(method, constraints)
    # An outer function without a dimension of its own takes scalars unless the caller says more.
    values = InnerTracker(number, dim or outer.dim or 1, **like_model(model, tracker))
    term = CoupledTerm(
        outer, values, smoothing=smoothing, weight=weight, tolerance=tolerance, margin=margin,
        names=names,
    )  # fmt: skip
    problem = ConstrainedObjective(
        model, optimizer, term, objective=objective, process_group=process_group, offload=offload
    )
    problem.method = method
    return problem


def automatic(method: str, settings: dict[str, Any], outer: AbstractOuter | None = None) -> bool:
    """Whether the settings of a penalty are `"auto"`, all of them; refuse a part.

    Args:
        method: its name.
        settings: those that are found together.
        outer: a penalty function of the caller's own, which holds its weight, or None.
    """
    found = [name for name, value in settings.items() if isinstance(value, str)]
    for name in found:
        _checks.one_of(method, name, settings[name], ("auto",))
    if outer is not None:
        if "smoothing" in found:
            raise ValueError(
                f"`{method}(outer=...)` needs a number as `smoothing`: 'auto' is for limits "
                f"g_i <= tolerance_i without a penalty function of your own, {outer!r}."
            )
        return False
    if 0 < len(found) < len(settings):
        given = [name for name in settings if name not in found]
        raise ValueError(
            f"`{method}({given[0]}={settings[given[0]]!r})` needs a number as `{found[0]}` too: "
            f"they are found together or given together. Leave `{given[0]}` out, or give both."
        )
    return bool(found)


def multiplied(
    method: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    tolerance: Tolerance = 0.0,
    margin: float = 0.0,
    dim: int | None = None,
    objective: AbstractTerm | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **tracker: Any,
) -> ConstrainedObjective:
    """Constraints as a `MultiplierTerm`, which finds its own settings."""
    number, names = number_and_names(method, constraints)
    if (dim or 1) != 1:
        raise ValueError(
            f"`{method}(dim={dim})` has no automatic settings: they are for one number per "
            "constraint. Give `outer`, a function of the vectors, and a number as `smoothing`."
        )
    options = {"gamma": GAMMA, "correction": 0.0, "read": "new", "measure": True}
    options |= {name: value for name, value in tracker.items() if value is not None}
    term = MultiplierTerm(
        InnerTracker(number, **like_model(model, options)),
        tolerance=tolerance, margin=margin, names=names,
    )  # fmt: skip
    problem = ConstrainedObjective(
        model, optimizer, term, objective=objective, process_group=process_group, offload=offload
    )
    problem.method = method
    return problem


def penalty_function(
    method: str, outer: AbstractOuter | None, penalty: float | None
) -> AbstractOuter:
    """The exact penalty rho [.]_+, or the caller's own function."""
    if outer is not None:
        if penalty is not None:
            raise ValueError(
                f"`{method}(outer=...)` has its own weight and shape: leave `penalty` out, or "
                f"{outer!r} would silently win over it."
            )
        return outer
    if penalty is None:
        raise ValueError(f"`{method}(penalty=...)` is needed unless `outer` is given.")
    _checks.positive(method, "penalty", penalty)
    return Hinge(penalty)
