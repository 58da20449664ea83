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


def run(job: Job, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train as the job says: its problem is a config, its setting the fields of a `Method`."""
    torch.set_num_threads(1)
    own = problem(job.problem, overrides)
    training = own.start(Method(**job.setting), job.seed)
    row: dict[str, Any] = {"epochs": own.config.epochs}
    try:
        for _ in range(own.config.epochs * training.steps_per_epoch):
            training.step()
        row |= {k: v for k, v in training.evaluate().items() if isinstance(v, float)}
        if own.config.spectrum:
            row |= training.spectrum()
    except (FloatingPointError, RuntimeError) as error:
        if "finite" not in str(error) and not isinstance(error, FloatingPointError):
            raise
        row["died"] = True
    return row
