"""From a method's settings to its objective: the same constraints, stated as each method needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fcco
from fcco import methods
from fcco.constraints import ConstantConEx
from fcco.methods.constrained import RECIPES

from ...task import Method
from ..base import Stepped, make_optimizer
from . import rates as r

__all__ = ["UNCONSTRAINED", "Built", "build"]

UNCONSTRAINED = "erm"
_PAIRED = (methods.constrained_sonex, methods.constrained_alexr2, methods.hinge_penalty)
IN_PAIRS = tuple(word for word, recipe in RECIPES.items() if recipe in _PAIRED)
"""Methods with an outer function of our choice: the two-sided hinge on R^2."""
AVERAGED = (*IN_PAIRS, *(w for w, r in RECIPES.items() if r is methods.squared_hinge_penalty))
"""Methods whose multipliers follow from moving averages."""
OURS = ("outer", "dim", "equality", "tolerance", "schedule", "project", "process_group")
"""Settings of `fcco.constrained` that the constraints of the task decide."""
IN_WORDS = ("correction", "read", "constraint_optimizer", "on_nonfinite")
"""Settings that may be words."""


@dataclass
class Built(Stepped):
    """A method on this task.

    Attributes:
        state: from rates to the values that the objective wants.
    """

    state: Callable[[Tensor], Tensor]

    def multipliers(self, constraints: int) -> Tensor:
        """One per gap: what its two sides pull with together."""
        above, below = self.signed_multipliers(constraints).view(2, -1)
        return (above - below).abs()

    def signed_multipliers(self, constraints: int) -> Tensor:
        """Of gap <= kappa for each gap, then of -gap <= kappa.

        Dual methods may price both sides at once; the two-sided hinge the side of the tracked gap.
        """
        if self.objective is None:
            return torch.zeros(2 * constraints)
        values = self.objective.multipliers().detach().nan_to_num(nan=0.0)
        if len(values) == 2 * constraints:
            return values
        return torch.cat([values.clamp(min=0), (-values).clamp(min=0)])  # of pairs: by their sign


def build(model: nn.Module, method: Method, constraints: int, tolerance: float) -> Built:
    r"""A method with its optimizer.

    Penalties see :math:`\rho/m \sum_i f(g_i)` over the m gaps whichever way the gaps are stated.
    With `from_zero: true` the tracked gaps start at 0 and the multipliers with them: for penalties
    on moving averages; dual variables start at 0 in any case.

    Args:
        model: the scorer.
        method: its settings.
        constraints: the number m of gaps.
        tolerance: kappa.
    """
    optimizer = make_optimizer(model.parameters(), method)
    word, settings = method.method, dict(method.settings)
    _check(word, settings, tolerance)
    if word == UNCONSTRAINED:
        if settings:
            raise ValueError(f"`{word}` has no settings but got: {', '.join(settings)}.")
        return Built(None, optimizer, optimizer, r.pairs)
    from_zero = bool(settings.pop("from_zero", False))
    if word in IN_PAIRS:
        penalty: Any = _needed(settings, word, "penalty")
        margin: Any = settings.pop("margin", 0.0)
        outer = fcco.TwoSidedHinge(tolerance - margin, penalty)
        objective = fcco.constrained(model, optimizer, constraints, word, outer=outer, **settings)
        state: Callable[[Tensor], Tensor] = r.pairs
    else:
        more: dict[str, Any] = dict(settings)
        if "penalty" in more:
            more["penalty"] *= 2  # of twice as many constraints
        if RECIPES.get(word) is methods.icppac:
            tau, theta = more.pop("tau", 10.0), more.pop("theta", 0.1)
            more["schedule"] = ConstantConEx(tau=tau, theta=theta)
        objective = fcco.constrained(
            model, optimizer, 2 * constraints, word, tolerance=tolerance, **more
        )
        state = lambda rates: r.signed(rates, 0.0)  # noqa: E731
    if from_zero:
        tracker = objective.term.tracker
        tracker.set_values(None, torch.zeros(tracker.num_inner, tracker.dim))
    stepped: Any = objective.optimizer
    return Built(objective, stepped, optimizer, state)


def _needed(settings: dict[str, Any], method: str, name: str) -> Any:
    if name not in settings:
        raise ValueError(f"`settings.{name}` is needed for {method}.")
    return settings.pop(name)


def _check(word: str, settings: dict[str, Any], tolerance: float) -> None:
    """Refuse what would be taken and then ignored, or fail in a step without its name."""
    for name, value in settings.items():
        if name in OURS:
            raise ValueError(f"`settings.{name}` of {word} is made by the task; leave it out.")
        if isinstance(value, str) and name not in IN_WORDS:
            raise ValueError(f"`settings.{name}` of {word} must be a number but is: {value!r}.")
        if isinstance(value, bool) and name != "from_zero":
            raise ValueError(f"`settings.{name}` of {word} must not be true or false: {value}.")
    if settings.get("from_zero") and word not in AVERAGED:
        raise ValueError(f"`settings.from_zero` is for {', '.join(AVERAGED)} but not for {word}.")
    if settings.get("margin", 0.0) > tolerance:
        raise ValueError(
            f"`settings.margin` of {word} must be at most the tolerance {tolerance:g} but is: "
            f"{settings['margin']}."
        )
