"""The data of the study as tensors: one file that worker processes read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fcco_experiments import config as configs
from fcco_experiments.data.grouped import GroupedPart, Vectors
from fcco_experiments.tasks.group_dro import TASK, GroupDROProblem
from fcco_experiments.tasks.group_dro.training import GroupDRO
from torch import Tensor


@dataclass(frozen=True)
class Prepared:
    """Inputs, and the parts of each seed.

    Attributes:
        config: batches, epochs and schedule.
        inputs: features, images or token ids by row.
        parts: by seed, then by name.
        classes: their number.
        summary: how accuracies of groups become one figure, `"worst"` or `"tenth"`.
    """

    config: GroupDRO
    inputs: Tensor
    parts: dict[int, dict[str, GroupedPart]]
    classes: int
    summary: Any


def prepare(name: str, seeds: Sequence[int], overrides: Sequence[str], file: Path) -> None:
    """Read (and encode) the data of a config such as `celeba-finetune` into a file."""
    problem = GroupDROProblem(configs.load(TASK, name, overrides=overrides))
    samples = problem.samples
    assert isinstance(samples, Vectors), "the small copies of the data are in memory"
    parts = {seed: dict(problem.parts(seed)) for seed in seeds}
    inputs = samples.values.cpu()
    torch.save(Prepared(problem.config, inputs, parts, problem.outputs, problem.data.summary), file)


def load(file: Path) -> Prepared:
    """What `prepare` wrote."""
    return torch.load(file, weights_only=False, mmap=True)
