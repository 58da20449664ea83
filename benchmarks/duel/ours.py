"""Our side: penalties on tracked constraint values, and what `fcco.constrained` has beside them.

A method behind that door needs a line in `DOOR` and K settings in the grids of the problems that
are legal for it; any other a builder and a line in `METHODS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import fcco

from .problems import Batch, Problem, Schedule
from .stepper import Builder, Setting, Stepper, adam

__all__ = ["DOOR", "METHODS", "penalized"]


def penalized(
    problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting
) -> fcco.ConstrainedObjective:
    """`fcco.constrained` for a problem.

    A hinge on gaps of two rates is stated as pairs, so that the rates are tracked before they are
    subtracted; everything else as signed constraints.

    Args:
        problem: the problem.
        model: its model.
        optimizer: what steps it.
        setting: options of `Penalized`, and `follow` and `from_zero` (see `grids`).
    """
    options: dict[str, Any] = dict(setting)
    margin, follow = options.pop("margin", 0.0), options.pop("follow", None)
    from_zero = options.pop("from_zero", False)
    if follow is not None:
        options["smoothing"] = _following(options["smoothing"], problem.schedule, follow)
    if in_pairs(problem, setting):
        limit = problem.limit - margin  # type: ignore[attr-defined]
        options.pop("kind", None)
        options.setdefault("smoothing", 0.0)
        outer = fcco.TwoSidedHinge(max(limit, 0.0), options.pop("penalty"))
        objective = fcco.constrained(
            model, optimizer, problem.num_constraints // 2, outer=outer, **options
        )
    else:
        objective = fcco.constrained(
            model, optimizer, problem.num_constraints, margin=margin, **options
        )
    if from_zero:
        tracker = objective.term.tracker
        value = 0.0 if tracker.dim == 2 else -margin
        tracker.set_values(None, torch.full((tracker.num_inner, tracker.dim), value))
    return objective


def _following(start: float, schedule: Schedule, power: float) -> Callable[[int], float]:
    """A smoothing that falls with the learning rate."""
    return lambda step: start * schedule.factor(step) ** power


def in_pairs(problem: Problem, setting: Setting) -> bool:
    """Whether two rates are tracked for each gap."""
    return "pairs" in problem.forms and setting.get("kind") != "squared_hinge"


def _step(
    problem: Problem,
    model: nn.Module,
    objective: fcco.ConstrainedObjective,
    optimizer: torch.optim.Optimizer,
    setting: Setting,
    warm_up: int,
) -> Callable[[Batch], None]:
    """One step; the first batches only start the estimates, and count as steps all the same."""
    form = "pairs" if in_pairs(problem, setting) else "signed"
    first: list[tuple[Callable[[], Any], torch.Tensor | None]] = []

    def step(batch: Batch) -> None:
        def inner() -> tuple[torch.Tensor, torch.Tensor]:
            return problem.measure(model, batch, form)

        if len(first) < warm_up:
            first.append((inner, batch.index))
            if len(first) == warm_up:
                objective.warm_up(first)
            return
        objective(inner, batch.index).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def single_loop(problem: Problem, model: nn.Module, setting: Setting) -> Stepper:
    """SONEX, SONX and the squared hinge, by their options."""
    options = dict(setting)
    warm_up = options.pop("warm_up", 0)
    optimizer = adam(problem, model)
    objective = penalized(problem, model, optimizer, options)
    extra = int(objective.term.tracker.needs_previous)
    step = _step(problem, model, objective, optimizer, options, warm_up)
    return Stepper(step, [optimizer], extra_forwards=extra)


def alexr2(problem: Problem, model: nn.Module, setting: Setting) -> Stepper:
    """ALEXR2: every inner step is a gradient evaluation."""
    options = dict(setting)
    warm_up, theta = options.pop("warm_up", 0), options.pop("theta")
    inner = {name: options.pop(name) for name in ("nu", "eta", "inner_steps")}
    options.update(correction=theta * options["gamma"], read="new")
    outer = adam(problem, model)
    optimizer = fcco.ProximalPoint(outer, **inner)
    objective = penalized(problem, model, optimizer, options)
    step = _step(problem, model, objective, optimizer, options, warm_up)
    return Stepper(step, [outer], extra_forwards=1)


def alexr(problem: Problem, model: nn.Module, setting: Setting) -> Stepper:
    """ALEXR: a dual variable per signed constraint; `ki` and `kp` are its gains per constraint."""
    optimizer = adam(problem, model)
    objective = fcco.constrained(
        model,
        optimizer,
        problem.num_constraints,
        "alexr",
        penalty=setting["penalty"],
        dual_step=setting["ki"] * problem.num_constraints,
        theta=setting["kp"] / setting["ki"],
    )

    def step(batch: Batch) -> None:
        objective(lambda: problem.measure(model, batch), batch.index).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Stepper(step, [optimizer], extra_forwards=1)


def behind_the_door(
    method: str,
    gradients: int,
    extra_forwards: int,
    problem: Problem,
    model: nn.Module,
    setting: Setting,
) -> Stepper:
    """A method of `fcco.constrained` on signed constraints.

    Args:
        method: its word.
        gradients: gradient evaluations of one step.
        extra_forwards: passes of one step beside those.
        problem: the problem.
        model: its model.
        setting: of the method; `tau` and `theta` make a `ConstantConEx`, and `constraint_lr` a
            second Adam for switching.
    """
    options = dict(setting)
    optimizers = [adam(problem, model)]
    if method == "oss":  # it multiplies every step by this; all methods have the same steps here
        optimizers[0].param_groups[0]["lr"] *= 2 * math.sqrt(options["inner_steps"])
    if "constraint_lr" in options:
        second = torch.optim.Adam(model.parameters(), lr=options.pop("constraint_lr"))
        options["constraint_optimizer"] = second
        optimizers.append(second)
    if "tau" in options:
        from fcco.constraints import ConstantConEx

        options["schedule"] = ConstantConEx(tau=options.pop("tau"), theta=options.pop("theta"))
    objective = fcco.constrained(model, optimizers[0], problem.num_constraints, method, **options)
    optimizer: Any = objective.optimizer  # the Adam above, or one around it

    def step(batch: Batch) -> None:
        objective(lambda: problem.measure(model, batch), batch.index).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Stepper(step, optimizers, gradients, extra_forwards)


METHODS: dict[str, Builder] = {
    "SONEX": single_loop,
    "ALEXR": alexr,
    "ALEXR2": alexr2,
    "SONX": single_loop,
    "squared hinge": single_loop,
}

# Name in the tables: word of the method, gradient evaluations of a step, passes beside those.
# OSS takes a derivative along its step, ICPPAC does so at the previous parameters.
DOOR = {"SSG": ("ssg", 1, 0), "OSS": ("oss", 1, 1), "ICPPAC": ("icppac", 2, 0)}

METHODS |= {name: partial(behind_the_door, *entry) for name, entry in DOOR.items()}
