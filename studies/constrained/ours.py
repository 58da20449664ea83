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

from .problems import Batch, Builder, Problem, Schedule, Setting, Stepper, adam, training_step


def penalized(
    problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting
) -> fcco.constraints.ConstrainedObjective:
    """A penalty of `fcco.constrained` for a problem.

    A hinge on gaps of two rates is stated as pairs, so that the rates are tracked before they are
    subtracted; everything else as signed constraints.

    Args:
        problem: the problem.
        model: its model.
        optimizer: what steps it.
        setting: of `fcco.constrained`, and `follow` and `from_zero` (see `grids`).
    """
    options: dict[str, Any] = {"method": "sonex", **setting}
    margin, follow = options.pop("margin", 0.0), options.pop("follow", None)
    from_zero = options.pop("from_zero", False)
    if follow is not None:
        options["smoothing"] = _following(options["smoothing"], problem.schedule, follow)
    number = problem.num_constraints
    if in_pairs(problem, setting):
        limit = problem.limit - margin  # type: ignore[attr-defined]
        outer = fcco.outer.TwoSidedHinge(max(limit, 0.0), options.pop("penalty"))
        objective = fcco.constrained(model, optimizer, number // 2, outer=outer, **options)
    else:
        objective = fcco.constrained(model, optimizer, number, margin=margin, **options)
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
    return "pairs" in problem.forms and setting.get("method") != "squared-hinge"


def tracking(problem: Problem, model: nn.Module, setting: Setting) -> Stepper:
    """SONEX, ALEXR2, SONX and the squared hinge, by `method` and its options.

    The first `warm_up` batches only start the estimates, and count as steps all the same. Every
    inner step of ALEXR2 is a gradient evaluation.
    """
    options = dict(setting)
    warm_up, first = options.pop("warm_up", 0), []
    primal = adam(problem, model)
    objective = penalized(problem, model, primal, options)
    optimizer: Any = objective.optimizer  # Adam, or ALEXR2's proximal point around it
    form = "pairs" if in_pairs(problem, setting) else "signed"

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

    extra = int(objective.term.tracker.needs_previous)
    return Stepper(step, [primal], extra_forwards=extra)


def alexr2(problem: Problem, model: nn.Module, setting: Setting) -> Stepper:
    """ALEXR2 with the settings of the grids."""
    return tracking(problem, model, {**setting, "method": "alexr2"})


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

    step = training_step(
        optimizer, lambda batch: objective(lambda: problem.measure(model, batch), batch.index)
    )
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
        setting: of the method; `constraint_lr` makes a second Adam for switching.
    """
    options = dict(setting)
    optimizers = [adam(problem, model)]
    if method == "oss":  # it multiplies every step by this; all methods have the same steps here
        optimizers[0].param_groups[0]["lr"] *= 2 * math.sqrt(options["inner_steps"])
    if "constraint_lr" in options:
        second = torch.optim.Adam(model.parameters(), lr=options.pop("constraint_lr"))
        options["constraint_optimizer"] = second
        optimizers.append(second)
    objective = fcco.constrained(model, optimizers[0], problem.num_constraints, method, **options)
    optimizer: Any = objective.optimizer  # the Adam above, or one around it

    step = training_step(
        optimizer, lambda batch: objective(lambda: problem.measure(model, batch), batch.index)
    )
    return Stepper(step, optimizers, gradients, extra_forwards)


METHODS: dict[str, Builder] = {
    "SONEX": tracking,
    "ALEXR": alexr,
    "ALEXR2": alexr2,
    "SONX": tracking,
    "squared hinge": tracking,
}

# Name in the tables: word of the method, gradient evaluations of a step, passes beside those.
# OSS takes a derivative along its step, ICPPAC does so at the previous parameters.
DOOR = {"SSG": ("ssg", 1, 0), "OSS": ("oss", 1, 1), "ICPPAC": ("icppac", 2, 0)}

METHODS |= {name: partial(behind_the_door, *entry) for name, entry in DOOR.items()}
