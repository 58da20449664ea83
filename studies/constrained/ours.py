"""Our side: penalties on tracked constraint values, and what `fcco.constrained` has beside them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn

import fcco

from .problems import Batch, Builder, Problem, Setting, Stepper, adam, training_step


def tracking(problem: Problem, model: nn.Module, setting: Setting) -> Stepper:
    """SONEX, ALEXR2, SONX and the squared hinge: penalties of `fcco.constrained`.

    A hinge on gaps of two rates is stated as pairs, so that the rates are tracked before they are
    subtracted; everything else as signed constraints. Every inner step of ALEXR2 is a gradient
    evaluation.

    Args:
        problem: the problem.
        model: its model.
        setting: of `fcco.constrained`, and `follow`, `warm_up` and `from_zero` (see `grids`).
    """
    options: dict[str, Any] = {"method": "sonex", **setting}
    margin, follow = options.pop("margin", 0.0), options.pop("follow", None)
    from_zero, warm_up = options.pop("from_zero", False), options.pop("warm_up", 0)
    if follow is not None:
        start, schedule = options["smoothing"], problem.schedule
        options["smoothing"] = lambda step: start * schedule.factor(step) ** follow
    primal, number = adam(problem, model), problem.num_constraints
    pairs = "pairs" in problem.forms and options["method"] != "squared-hinge"
    if pairs:
        limit = problem.limit - margin  # type: ignore[attr-defined]
        outer = fcco.outer.TwoSidedHinge(max(limit, 0.0), options.pop("penalty"))
        objective = fcco.constrained(model, primal, number // 2, outer=outer, **options)
    else:
        objective = fcco.constrained(model, primal, number, margin=margin, **options)
    tracker = objective.term.tracker
    if from_zero:
        value = 0.0 if tracker.dim == 2 else -margin
        tracker.set_values(None, torch.full((tracker.num_inner, tracker.dim), value))

    def value_of(batch: Batch) -> Any:
        return lambda: problem.measure(model, batch, "pairs" if pairs else "signed")

    train = training_step(objective.optimizer, lambda b: objective(value_of(b), b.index))
    first = []

    def step(batch: Batch) -> None:
        if len(first) == warm_up:
            train(batch)
            return
        first.append((value_of(batch), batch.index))
        if len(first) == warm_up:
            objective.warm_up(first)

    return Stepper(step, [primal], extra_forwards=int(tracker.needs_previous))


def by_name(
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
        setting: of the method; `constraint_lr` makes a second Adam for switching, `ki` and `kp` are
            the gains of ALEXR per constraint.
    """
    options = dict(setting)
    optimizers = [adam(problem, model)]
    if method == "oss":  # it multiplies every step by this; all methods have the same steps here
        optimizers[0].param_groups[0]["lr"] *= 2 * math.sqrt(options["inner_steps"])
    if method == "alexr":
        gain = options.pop("ki")
        options["dual_step"] = gain * problem.num_constraints
        options["theta"] = options.pop("kp") / gain
    if "constraint_lr" in options:
        second = torch.optim.Adam(model.parameters(), lr=options.pop("constraint_lr"))
        options["constraint_optimizer"] = second
        optimizers.append(second)
    objective = fcco.constrained(model, optimizers[0], problem.num_constraints, method, **options)
    step = training_step(
        objective.optimizer,  # the Adam above, or one around it
        lambda batch: objective(lambda: problem.measure(model, batch), batch.index),
    )
    return Stepper(step, optimizers, gradients, extra_forwards)


# OSS takes a derivative along its step, ICPPAC does so at the previous parameters.
METHODS: dict[str, Builder] = {
    **dict.fromkeys(("SONEX", "ALEXR2", "SONX", "squared hinge"), tracking),
    "ALEXR": partial(by_name, "alexr", 1, 1),
    "SSG": partial(by_name, "ssg", 1, 0),
    "OSS": partial(by_name, "oss", 1, 1),
    "ICPPAC": partial(by_name, "icppac", 2, 0),
}
