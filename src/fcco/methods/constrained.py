"""Build a constrained objective by method name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _checks
from .._checks import meant
from ..constraints import ConstrainedObjective
from ..terms.limits import Limit, bounds
from .alexr import constrained_alexr
from .alexr2 import constrained_alexr2
from .icppac import icppac
from .oss import oss
from .sonex import constrained_sonex
from .sonx import hinge_penalty
from .sox import squared_hinge_penalty
from .spider import recursive_penalty
from .ssg import ssg

__all__ = ["ALIASES", "RECIPES", "constrained"]

RECIPES: dict[str, Callable[..., ConstrainedObjective]] = {
    "sonex": constrained_sonex,
    "alexr2": constrained_alexr2,
    "alexr": constrained_alexr,
    "hinge": hinge_penalty,
    "squared-hinge": squared_hinge_penalty,
    "recursive-hinge": recursive_penalty,
    "ssg": ssg,
    "oss": oss,
    "icppac": icppac,
}
"""The constrained methods by each of their names, that of the registry first."""

ALIASES = {
    "smoothed-hinge": "sonex", "proximal-hinge": "alexr2", "dual": "alexr", "sonx": "hinge",
    "yang2025": "hinge", "sox": "squared-hinge", "li2024": "squared-hinge",
    "liu2025": "recursive-hinge", "switching": "ssg", "queues": "oss", "conex": "icppac",
}  # fmt: skip
"""Other names of the constrained methods: plain words, algorithms, papers."""
_NAMES = tuple(RECIPES)  # before the aliases join
RECIPES.update((alias, RECIPES[name]) for alias, name in ALIASES.items())

_TRACKER_OPTIONS = ("device", "dtype", "on_nonfinite")
"""Options of `InnerTracker` that mean the same for every recipe."""

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
    "equality": "said by the limit itself, `fcco.Equal(0.0)`",
}


def constrained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraints: int | Sequence[str] | Mapping[str, Limit],
    method: str = "sonex",
    **settings: Any,
) -> ConstrainedObjective:
    r"""Minimise g0(w) while values g_i(w) keep their limits, by the method of your choice.

    | limit | meaning |
    |---|---|
    | `{"women": 0.5}` | at most 0.5 |
    | `{"recall": fcco.AtLeast(0.9)}` | at least 0.9 |
    | `{"mean": (0.20, 0.26)}` | between the two; None for a side that is open |
    | `{"calibration": fcco.Equal(0.0)}` | equal to 0 |

    Limits of all kinds may be mixed. The multiplier of a lower limit is negative.

    Every method is called in the same way: with a function that returns `(loss, values)`. Then
    `loss.backward()`, and a step of `objective.optimizer`, which is your optimizer or, for double
    loops and for switching, one around it. `violation()`, `multipliers()`, `report()` and
    `state_dict()` mean the same for each; `value()` is the constraint part as the method sees it.

    | `method` | also called | what it does | constraints may be sampled |
    |---|---|---|---|
    | `"sonex"` | `"smoothed-hinge"` | smoothed hinge penalty, MSVR tracker | yes |
    | `"alexr2"` | `"proximal-hinge"` | the same in a proximal point | yes |
    | `"alexr"` | `"dual"` | a dual variable per constraint, capped at the penalty | yes |
    | `"hinge"` | `"sonx"`, `"yang2025"` | hinge penalty, MSVR tracker | yes |
    | `"squared-hinge"` | `"sox"`, `"li2024"` | squared hinge penalty, moving averages | yes |
    | `"recursive-hinge"` | `"liu2025"` | smoothed hinge penalty, recursive estimates | no |
    | `"ssg"` | `"switching"` | a step on the loss or, if violated, on the worst constraint | no |
    | `"oss"` | `"queues"` | proximal points, multipliers from virtual queues | no |
    | `"icppac"` | `"conex"` | proximal points, multipliers from a primal-dual loop | no |

    Args:
        model: your model.
        optimizer: your optimizer.
        constraints: their limits by name, as above; or their names, or their number m, with
            `tolerance` as the limit.
        method: the method.
        settings: those of the method; a wrong or missing one gives an error that lists them all.

    Settings of several methods:

    * `tolerance`, one limit or one per constraint, and `margin`: train for that much less than an
      upper limit and more than a lower one (not for equalities).
    * `process_group`: see `Compositional`.
    * Penalties and alexr: `penalty` (rho). sonex, alexr2 and recursive-hinge: `smoothing` (lambda).
      sonex, alexr2, hinge and squared-hinge: `offload` (see `Compositional`), and `objective`, a
      coupled term of the objective, when g0 or a part of it is coupled too; its tracker and outer
      function are its own. The function you pass then returns
      `{"objective": entries, "constraints": values}`, or `(loss, {...})`, and `index` is a dict
      likewise.

    Example:
        >>> import torch
        >>> from fcco import constrained
        >>> def distance_above_the_limit(method, **settings):
        ...     model = torch.nn.Linear(1, 1, bias=False).double()
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ...     objective = constrained(
        ...         model, optimizer, 1, method, penalty=20.0, gamma=1.0, tolerance=0.3, **settings)
        ...     def loss_and_constraint():
        ...         w = model.weight.view(1)
        ...         return (w - 1).square().sum() / 2, w
        ...     for _ in range(500):
        ...         objective(loss_and_constraint).backward()
        ...         objective.optimizer.step(); objective.optimizer.zero_grad()
        ...     return round(model.weight.item() - 0.3, 3)
        >>> distance_above_the_limit("sonex", smoothing=0.02)
        0.014
        >>> distance_above_the_limit("squared-hinge")
        0.033
    """
    if method not in RECIPES:
        _checks.one_of("constrained", "method", method, tuple(RECIPES))
    recipe = RECIPES[method]
    if isinstance(constraints, Mapping):
        settings["tolerance"] = _limits(constraints, settings)
        constraints = list(constraints)
    accepted, needed = _settings(recipe)
    wrong = [name for name in settings if name not in accepted]
    missing = [name for name in needed if name not in settings]
    if wrong or missing:
        raise ValueError(_explained(method, wrong, missing, accepted))
    return recipe(model, optimizer, constraints, **settings)


def _limits(constraints: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Limit]:
    """The limits of constraints that were given by name."""
    if "tolerance" in settings:
        raise ValueError(
            "`constrained(constraints={...})` says the limit of each constraint already: leave "
            "`tolerance` out."
        )
    return [bounds("constrained(constraints={...})", *each) for each in constraints.items()]


@functools.cache
def _settings(recipe: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a recipe's settings, and those without a default."""
    parameters = inspect.signature(recipe).parameters.values()
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    more = _TRACKER_OPTIONS if any(p.kind is p.VAR_KEYWORD for p in parameters) else ()
    needed = tuple(p.name for p in named if p.default is p.empty)
    return (*(p.name for p in named), *more), needed


def _explained(
    method: str, wrong: Sequence[str], missing: Sequence[str], accepted: Sequence[str]
) -> str:
    parts = []
    if wrong:
        near = {n: meant(n, accepted) for n in wrong if not _owners(n) and n not in _MEANING}
        reasons = [f"`{n}` {near.get(n) or f'is {_reason(n)}'}" for n in wrong]
        parts.append("has no such setting: " + "; ".join(reasons))
    if missing:
        parts.append("needs " + "; ".join(f"`{n}`, {_reason(n)}" for n in missing))
    settings = ", ".join(accepted)
    return f"`constrained(method={method!r})` {'; and '.join(parts)}. Settings: {settings}."


def _reason(setting: str) -> str:
    """What a setting is, and who has it."""
    owners = _owners(setting)
    meaning = _MEANING.get(setting, "a setting" if owners else "unknown")
    return f"{meaning} ({'for ' + ', '.join(owners) if owners else 'no method has it'})"


def _owners(setting: str) -> list[str]:
    """The methods that have a setting."""
    return [name for name in _NAMES if setting in _settings(RECIPES[name])[0]]
