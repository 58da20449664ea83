"""One run, which is one of the task. Apart from the command: worker processes import it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from fcco_experiments import config as configs
from fcco_experiments.task import Method
from fcco_experiments.tasks.group_dro import TASK, GroupDROProblem

from studies.runner import Job


@functools.cache
def problem(name: str, overrides: tuple[str, ...]) -> GroupDROProblem:
    return GroupDROProblem(configs.load(TASK, name, overrides=overrides))


def run(job: Job, overrides: tuple[str, ...] = (), curves: bool = False) -> dict[str, Any]:
    """Train as the job says: its problem is a config, its setting the fields of a `Method`.

    Args:
        job: the run.
        overrides: of the config.
        curves: keep the training CVaR after each epoch.
    """
    torch.set_num_threads(1)
    own = problem(job.problem, overrides)
    training = own.start(Method(**job.setting), job.seed)
    row: dict[str, Any] = {"epochs": own.config.epochs}
    curve: list[float] = []
    try:
        for epoch in range(own.config.epochs):
            for _ in range(training.steps_per_epoch):
                training.step()
            if curves or epoch + 1 == own.config.epochs:
                found = training.evaluate()
                curve.append(float(f"{found['train_cvar']:.4g}"))
                row |= {key: value for key, value in found.items() if isinstance(value, float)}
        if own.config.spectrum:
            row |= training.spectrum()
    except (FloatingPointError, RuntimeError) as error:
        if "finite" not in str(error) and not isinstance(error, FloatingPointError):
            raise
        row["died"] = True
    return row | ({"curve": curve} if curves else {})
