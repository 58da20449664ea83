"""Our side: penalties on tracked constraint values, and ALEXR."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fcco

from .fairness import RocFairness
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
    primal = adam(problem, model)
    if isinstance(problem, RocFairness) and options["method"] != "squared-hinge":
        problem = problem.stated("pairs")
        limit = max(problem.limit - margin, 0.0)
        options["outer"] = fcco.outer.TwoSidedHinge(limit, options.pop("penalty"))
    else:
        options["margin"] = margin
    objective = fcco.constrained(model, primal, problem.num_constraints, **options)
    tracker = objective.term.tracker
    if from_zero:
        value = 0.0 if tracker.dim == 2 else -margin
        tracker.set_values(None, torch.full((tracker.num_inner, tracker.dim), value))

    def value_of(batch: Batch) -> Any:
        return lambda: problem.measure(model, batch)

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


def alexr(problem: Problem, model: nn.Module, setting: Setting) -> Stepper:
    """ALEXR: a dual variable per signed constraint; `ki` and `kp` are its gains per constraint."""
    optimizer, number = adam(problem, model), problem.num_constraints
    gain = setting["ki"]
    objective = fcco.constrained(
        model, optimizer, number, "alexr", penalty=setting["penalty"], dual_step=gain * number,
        theta=setting["kp"] / gain,
    )  # fmt: skip
    step = training_step(
        optimizer, lambda batch: objective(lambda: problem.measure(model, batch), batch.index)
    )
    return Stepper(step, [optimizer], extra_forwards=1)


METHODS: dict[str, Builder] = {
    **dict.fromkeys(("SONEX", "ALEXR2", "SONX", "squared hinge"), tracking),
    "ALEXR": alexr,
}
