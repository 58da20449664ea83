"""From a method's settings to its objective over the losses of groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fcco
from fcco._distributed import find_group
from fcco.inputs import mean_loss

from ...task import Method
from ..base import Stepped, make_optimizer

__all__ = ["WORDS", "Built", "build"]

WORDS = ("sonex", "sonx", "alexr2", "ooa", "erm", "uniform")
OURS = ("num_groups", "ratio", "process_group", "group_sizes")
"""Settings that the task decides."""

Losses = Callable[[], Tensor]


@dataclass
class Built(Stepped):
    """A method on this task.

    Attributes:
        groups: whether batches are drawn group by group, or uniformly from all samples.
    """

    groups: bool = True

    def loss(
        self,
        losses: Losses,
        group: Tensor,
        gradient: Losses | None = None,
        gradient_group: Tensor | None = None,
    ) -> Tensor:
        """What is differentiated.

        Args:
            losses: runs the model and gives per-sample losses.
            group: of each sample.
            gradient: the same for an independent batch, when the method wants one.
            gradient_group: of each of its samples.
        """
        if self.objective is None:
            return mean_loss(losses(), find_group())
        if gradient is None:
            return self.objective(losses, group)
        return self.objective(losses, group, gradient=gradient, gradient_index=gradient_group)

    def tracked(self) -> Tensor | None:
        """u_i, NaN for groups that were never seen; None for methods without memory of losses."""
        if isinstance(self.objective, fcco.CVaRGroupDRO):
            return self.objective.group_losses()
        return None

    def weights(self) -> Tensor | None:
        """The weight of each group in the gradient, None for the plain average over samples."""
        return None if self.objective is None else self.objective.group_weights()


def build(model: nn.Module, method: Method, sizes: Tensor, ratio: float, steps: int = 1) -> Built:
    """A method with its optimizer.

    With `smoothing_end` the smoothing falls from `smoothing` to it over all steps (geometrically):
    at first nearly all groups count, at last the worst alone.

    Args:
        model: what is trained.
        method: its settings.
        sizes: number of training samples of each group.
        ratio: r.
        steps: of the whole training.
    """
    word, settings = method.method, dict(method.settings)
    _check(word, settings, method)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], method)
    number = len(sizes)
    if word == "erm":
        return Built(None, optimizer, optimizer, groups=False)
    if word == "uniform":  # weights that may not move
        objective = fcco.ooa(model, optimizer, number, ratio=1.0)
        return Built(objective, optimizer, optimizer)
    given: dict[str, Any] = dict(settings)
    if word in ("sonex", "sonx", "alexr2"):  # as the paper has them, not the library's defaults
        given = {"smoothing": 0.1, "gamma": 0.1, "correction": "auto", "read": "old", **given}
    if word == "ooa":
        own = None if given.pop("plain", False) else ratio
        objective = fcco.ooa(model, optimizer, number, ratio=own, group_sizes=sizes, **given)
        return Built(objective, optimizer, optimizer)
    stepped: torch.optim.Optimizer = optimizer
    if word == "sonx":
        given["smoothing"] = 0.0
    if word == "alexr2":
        loop = {name: given.pop(name) for name in ("nu", "eta")}
        loop["inner_steps"], theta = given.pop("inner_steps", 5), given.pop("theta", 0.125)
        gamma = given["gamma"] = settings.get("gamma", 0.8)
        stepped = fcco.ProximalPoint(optimizer, **loop)
        given |= {"correction": theta * gamma, "read": "new"}
    if "smoothing_end" in given:
        end = given.pop("smoothing_end")
        given["smoothing"] = fcco.Annealed(given["smoothing"], end, steps)
    objective = fcco.CVaRGroupDRO(model, stepped, number, ratio, **given)
    return Built(objective, stepped, optimizer)


def _check(word: str, settings: dict[str, Any], method: Method) -> None:
    """Refuse what would be taken and then ignored, or fail without its name."""
    if word not in WORDS:
        raise ValueError(f"`method` must be one of {', '.join(WORDS)} but is: {word}.")
    for name in settings:
        if name in OURS:
            raise ValueError(f"`settings.{name}` of {word} is made by the task; leave it out.")
    if word in ("erm", "uniform") and settings:
        raise ValueError(f"`{word}` has no settings but got: {', '.join(settings)}.")
    if word == "sonx" and (wrong := [name for name in settings if name.startswith("smoothing")]):
        raise ValueError(f"`settings.{wrong[0]}` is not for sonx: with smoothing it is sonex.")
    if word in ("sonex", "alexr2") and "smoothing" not in settings:
        raise ValueError(f"`settings.smoothing` is needed for {word}.")
    if word == "alexr2":
        for name in ("nu", "eta"):
            if name not in settings:
                raise ValueError(f"`settings.{name}` is needed for alexr2.")
        for name in ("correction", "read"):
            if name in settings:
                raise ValueError(f"`settings.{name}` of alexr2 follows from theta and gamma.")
    if method.independent and word != "alexr2":
        raise ValueError(f"`independent` is for alexr2 but not for {word}.")
