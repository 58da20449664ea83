"""From a method's settings to its objective: the same constraints, stated as each method needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fcco
from fcco.constraints.rules import ConstantConEx

from ..task import Method
from . import rates as r

__all__ = ["UNCONSTRAINED", "Built", "build"]

UNCONSTRAINED = "erm"
IN_PAIRS = ("sonex", "alexr2", "sonx", "yang2025")
"""Methods with an outer function of our choice: the two-sided hinge on R^2."""


@dataclass
class Built:
    """A method on this task.

    Attributes:
        objective: what makes the loss; None without constraints.
        optimizer: what is stepped.
        scheduled: the optimizer whose learning rate follows the schedule.
        state: from rates to the values that the objective wants.
        multipliers: of the gaps, from those of the objective.
    """

    objective: Any
    optimizer: torch.optim.Optimizer
    scheduled: torch.optim.Optimizer
    state: Callable[[Tensor], Tensor]

    def multipliers(self, constraints: int) -> Tensor:
        """One per gap; of two one-sided constraints at most one is active."""
        if self.objective is None:
            return torch.zeros(constraints)
        values = self.objective.multipliers().detach().nan_to_num(nan=0.0)
        return values.view(-1, constraints).sum(0)


def build(model: nn.Module, method: Method, constraints: int, tolerance: float) -> Built:
    r"""A method with its optimizer.

    Penalties see :math:`\rho/m \sum_i f(g_i)` over the m gaps whichever way the gaps are stated.
    With `from_zero: true` the tracked gaps start at 0 and the multipliers with them.

    Args:
        model: the scorer.
        method: its settings.
        constraints: the number m of gaps.
        tolerance: kappa.
    """
    optimizer = _optimizer(model, method)
    word, settings = method.method, dict(method.settings)
    if word == UNCONSTRAINED:
        if settings:
            raise ValueError(f"`{word}` has no settings but got: {', '.join(settings)}.")
        return Built(None, optimizer, optimizer, r.pairs)
    from_zero = bool(settings.pop("from_zero", False))
    if word in IN_PAIRS:
        penalty: Any = _needed(settings, word, "penalty")
        margin: Any = settings.pop("margin", 0.0)
        outer = fcco.TwoSidedHinge(max(tolerance - margin, 0.0), penalty)
        objective = fcco.constrained(model, optimizer, constraints, word, outer=outer, **settings)
        state: Callable[[Tensor], Tensor] = r.pairs
        start = 0.0
    else:
        more: dict[str, Any] = dict(settings)
        if "penalty" in more:
            more["penalty"] *= 2  # of twice as many constraints
        if word == "icppac":
            tau, theta = more.pop("tau", 10.0), more.pop("theta", 0.1)
            more["schedule"] = ConstantConEx(tau=tau, theta=theta)
        objective = fcco.constrained(
            model, optimizer, 2 * constraints, word, tolerance=tolerance, **more
        )
        state = lambda rates: r.signed(rates, 0.0)  # noqa: E731
        start = 0.0
    if from_zero:
        tracker = objective.term.tracker
        tracker.set_values(None, torch.full((tracker.num_inner, tracker.dim), start))
    stepped: Any = objective.optimizer
    return Built(objective, stepped, optimizer, state)


def _needed(settings: dict[str, Any], method: str, name: str) -> Any:
    if name not in settings:
        raise ValueError(f"`settings.{name}` is needed for {method}.")
    return settings.pop(name)


def _optimizer(model: nn.Module, method: Method) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": method.lr, "weight_decay": method.weight_decay}
    if method.update == "adam":
        return torch.optim.Adam(model.parameters(), betas=(1 - method.beta, 0.999), **options)
    if method.update == "sgd":
        return torch.optim.SGD(model.parameters(), **options)
    kept = 1 - method.beta
    return torch.optim.SGD(model.parameters(), momentum=kept, dampening=kept, **options)
