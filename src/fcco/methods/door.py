"""The front door for constrained problems: one call, the method is a word."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from ..constraints import ConstrainedObjective, Penalized
from ..dual import DualAscent, DualTerm, ExcessTracker
from ..limits import number_and_names
from ..outer import Hinge
from ..outer.base import AbstractOuter
from ..proximal_point import ProximalPoint
from ..terms import AbstractTerm, Smoothing
from ..tracker import for_model
from .penalties import li2024, liu2025, yang2025
from .proximal_lagrangian import icppac, oss
from .switching import ssg

__all__ = ["constrained"]

_TRACKER_OPTIONS = ("bounds", "device", "dtype", "on_nonfinite", "rule")
"""Options of `InnerTracker` that no recipe sets itself."""

_MEANING = {
    "penalty": "the weight of a penalty; dual and switching methods have none",
    "smoothing": "how far the hinge is smoothed",
    "gamma": "the weight of the new value in a moving average",
    "correction": "the weight of MSVR's correction",
    "read": "which running estimate enters the gradient",
    "nu": "the parameter of ALEXR2's proximal point",
    "eta": "the step of an inner loop",
    "inner_steps": "the length of an inner loop",
    "theta": "an extrapolation",
    "dual_step": "the step of the dual variables",
    "objective": "a coupled term of the objective, which needs a penalty on tracked values",
    "offload": "where the copy of w_{t-1} is kept that a correction needs",
    "refresh_every": "how often a recursive estimate starts afresh",
}


def constrained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    method: str = "sonex",
    **settings: Any,
) -> ConstrainedObjective:
    r"""Minimise g0(w) subject to g_i(w) <= tolerance_i, by the method of your choice.

    .. math::
        \min_w\; g_0(w) \qquad\text{subject to}\qquad
        g_i(w) \le \text{tolerance}_i, \quad i = 1,\dots,m

    Every method is called in the same way: with a function that returns `(loss, values)`. Then
    `loss.backward()`, and a step of `objective.optimizer`, which is your optimizer or, for double
    loops and for switching, one around it. `violation()`, `multipliers()`, `report()` and
    `state_dict()` mean the same for each; `value()` is the constraint part as the method sees it.

    | `method` | what it does | a call may hold a part of the constraints |
    |---|---|---|
    | `"sonex"` | smoothed hinge penalty, MSVR tracker | yes |
    | `"alexr2"` | the same in a proximal point | yes |
    | `"alexr"` | a dual variable per constraint, extrapolated ascent, capped at the penalty | yes |
    | `"yang2025"`, `"sonx"` | hinge penalty, MSVR tracker | yes |
    | `"li2024"`, `"sox"` | squared hinge penalty, moving averages | yes |
    | `"liu2025"` | smoothed hinge penalty, recursive estimates | no |
    | `"ssg"` | a step on the loss or, if violated, on the largest constraint | no |
    | `"oss"` | proximal points, multipliers from virtual queues | no |
    | `"icppac"` | proximal points, multipliers from a primal-dual loop | no |

    Args:
        model: your model.
        optimizer: your optimizer.
        constraints: their number m, or their names.
        method: the method.
        settings: `tolerance`, `margin` and `process_group` for each; and those of the method.
            Penalties: `penalty` (rho) and, for sonex, alexr2 and liu2025, `smoothing` (lambda);
            `gamma`, `correction`, `read`. alexr needs `dual_step`, alexr2 `nu` and `eta`, liu2025
            `refresh_every`. The penalties on tracked values (sonex, alexr2, yang2025, li2024) take
            `objective`, a coupled term of the objective (see `Penalized`), and `offload` (see
            `Compositional`). A wrong or missing setting gives an error that lists them all.

    Example:
        >>> import torch
        >>> from fcco import constrained
        >>> def distance_above_the_limit(method, **settings):
        ...     model = torch.nn.Linear(1, 1, bias=False).double()
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ...     objective = constrained(
        ...         model, optimizer, 1, method, penalty=20.0, gamma=1.0, tolerance=0.3, **settings)
        ...     for _ in range(500):
        ...         w = model.weight.view(1)
        ...         objective(lambda: ((w - 1).square().sum() / 2, w)).backward()
        ...         objective.optimizer.step(); objective.optimizer.zero_grad()
        ...     return round(model.weight.item() - 0.3, 3)
        >>> distance_above_the_limit("sonex", smoothing=0.02)
        0.014
        >>> distance_above_the_limit("li2024")
        0.033
    """
    _checks.one_of("constrained", "method", method, tuple(_RECIPES))
    recipe = _RECIPES[method]
    accepted, needed = _settings(recipe)
    own = f"Settings of {method}: {', '.join(accepted)}"
    wrong = [name for name in settings if name not in accepted]
    if wrong:
        reasons = "; ".join(f"`{name}` is {_reason(name)}" for name in wrong)
        raise ValueError(f"`constrained(method={method!r})` has no such setting: {reasons}. {own}.")
    missing = [name for name in needed if name not in settings]
    if missing:
        reasons = "; ".join(f"`{name}`, {_reason(name)}" for name in missing)
        raise ValueError(f"`constrained(method={method!r})` needs {reasons}. {own}.")
    objective = recipe(model, optimizer, constraints, **settings)
    objective.method = method
    return objective


def _settings(recipe: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a recipe's settings, and those without a default."""
    parameters = inspect.signature(recipe).parameters.values()
    named = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    more = _TRACKER_OPTIONS if any(each.kind is each.VAR_KEYWORD for each in parameters) else ()
    needed = tuple(each.name for each in named if each.default is each.empty)
    return (*(each.name for each in named), *more), needed


def _reason(setting: str) -> str:
    """What a setting is, and who has it."""
    owners = [name for name, recipe in _RECIPES.items() if setting in _settings(recipe)[0]]
    meaning = _MEANING.get(setting, "a setting" if owners else "unknown")
    return f"{meaning} ({'for ' + ', '.join(owners) if owners else 'no method has it'})"


def _smoothed_hinge(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    smoothing: Smoothing,
    penalty: float | None = None,
    gamma: float = 0.1,
    correction: float | Literal["theory", "auto"] = "auto",
    read: Literal["old", "new"] = "old",
    equality: bool = False,
    outer: AbstractOuter | None = None,
    dim: int | None = None,
    tolerance: float | Sequence[float] | Tensor = 0.0,
    margin: float = 0.0,
    objective: AbstractTerm | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **options: Any,
) -> ConstrainedObjective:
    """SONEX on the penalised problem, see `Penalized`."""
    return Penalized(
        model, optimizer, constraints, penalty=penalty, smoothing=smoothing, gamma=gamma,
        correction=correction, read=read, equality=equality, outer=outer, dim=dim,
        tolerance=tolerance, margin=margin, objective=objective, process_group=process_group,
        offload=offload, **options,
    )  # fmt: skip


def _proximal_point(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    smoothing: Smoothing,
    nu: float,
    eta: float,
    inner_steps: int | Callable[[int], int] = 5,
    penalty: float | None = None,
    gamma: float = 0.8,
    theta: float = 0.125,
    equality: bool = False,
    outer: AbstractOuter | None = None,
    dim: int | None = None,
    tolerance: float | Sequence[float] | Tensor = 0.0,
    margin: float = 0.0,
    objective: AbstractTerm | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **options: Any,
) -> ConstrainedObjective:
    """ALEXR2 on the penalised problem: `alexr2`'s tracker and loop, `Penalized`'s constraints."""
    _checks.in_interval("alexr2", "theta", theta, 0.0, 1.0)
    if outer is not None:
        _checks.requires("alexr2", outer, "convex")
    proximal = ProximalPoint(optimizer, nu=nu, eta=eta, inner_steps=inner_steps)
    return Penalized(
        model, proximal, constraints, penalty=penalty, smoothing=smoothing, gamma=gamma,
        correction=theta * gamma, read="new", equality=equality, outer=outer, dim=dim,
        tolerance=tolerance, margin=margin, objective=objective, process_group=process_group,
        offload=offload, **options,
    )  # fmt: skip


def _dual_ascent(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str],
    *,
    penalty: float,
    dual_step: float,
    theta: float = 1.0,
    tolerance: float | Sequence[float] | Tensor = 0.0,
    margin: float = 0.0,
    on_nonfinite: Literal["raise", "skip", "deferred"] = "raise",
    process_group: Any = "auto",
) -> ConstrainedObjective:
    """ALEXR (v2) on the penalised problem: y+ = clip(y + dual_step g~, 0, penalty).

    The multipliers y/m collect the violations, up to penalty/m, and end where the constraint
    holds: no smoothing is left. `theta` above 1, outside the theory, adds a part proportional to
    the violation, measured on the same samples at both ends of a step, which damps the loop.
    """
    _checks.at_least("alexr", "theta", theta, 0.0)
    _checks.positive("alexr", "penalty", penalty)
    number, names = number_and_names("alexr", constraints)
    like = for_model(model, number).value
    tracker = ExcessTracker(
        number,
        gamma=1.0,
        correction=theta,
        read="new",
        rule=DualAscent(Hinge(penalty), dual_step),
        on_nonfinite=on_nonfinite,
        dtype=like.dtype,
        device=like.device,
    )
    term = DualTerm(tracker, tolerance=tolerance, margin=margin, names=names)
    return ConstrainedObjective(model, optimizer, term, process_group=process_group)


_RECIPES: dict[str, Callable[..., ConstrainedObjective]] = {
    "sonex": _smoothed_hinge,
    "alexr2": _proximal_point,
    "alexr": _dual_ascent,
    "sonx": yang2025,
    "yang2025": yang2025,
    "sox": li2024,
    "li2024": li2024,
    "liu2025": liu2025,
    "ssg": ssg,
    "oss": oss,
    "icppac": icppac,
}
