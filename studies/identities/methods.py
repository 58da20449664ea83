"""What is compared: four settings each, the same model, equally many comments in a step.

A builder takes a `Task` and a setting and returns a function without arguments, which draws a batch
and gives the loss. The same methods train a head on features and a whole network on tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import fcco
from fcco.groups import GroupBatchSampler, GroupMemberships

from .comments import WORDS, Part

FPR = 0.05  # of all comments, at the threshold of every method
LIMIT = 0.02  # the rate of an identity may be larger by this
WIDTH = 0.3  # of the sigmoid that stands for a step at the threshold, in logits
OURS = "ours"

Setting = dict[str, Any]
Loss = Callable[[], Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        model: the model.
        optimizer: steps it.
        train: training comments.
        scores: logits of the comments in these rows.
        rows: comments in a step.
        seed: of the batches.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Part
    scores: Callable[[Tensor], Tensor]
    rows: int
    seed: int

    @property
    def generator(self) -> torch.Generator:
        """A fresh one."""
        return torch.Generator().manual_seed(self.seed)


def erm(task: Task, setting: Setting) -> Loss:
    """Cross-entropy of all comments."""
    return weighted(task, task.train.weight)


def label_weights(task: Task, setting: Setting) -> Loss:
    """Cross-entropy with as many toxic comments as others."""
    train = task.train
    toxic = (train.weight * train.y).sum() / train.weight.sum()
    return weighted(task, train.weight / torch.where(train.y == 1, toxic, 1 - toxic))


def identity_weights(task: Task, setting: Setting) -> Loss:
    """Cross-entropy with equally many comments of each identity and label: weight 1 / size."""
    members = cells(task.train)
    return weighted(task, (members / members.sum(0)).sum(1))


def weighted(task: Task, weight: Tensor) -> Loss:
    """Cross-entropy of comments that are drawn in proportion to a weight."""
    weight, generator = weight.cpu(), task.generator

    def loss() -> Tensor:
        batch = torch.multinomial(weight, task.rows, True, generator=generator)
        return bce(task.scores(batch), task.train.y[batch])

    return loss


def cells(part: Part) -> Tensor:
    """Identity (or none) and label of each comment: boolean, (comments, 2 (groups + 1))."""
    named = torch.cat([part.groups, ~part.groups.any(1, keepdim=True)], 1)
    toxic = (part.y == 1)[:, None]
    return torch.cat([named & ~toxic, named & toxic], 1)


def ooa(task: Task, setting: Setting) -> Loss:
    """Group DRO over identity and label; a step has equally many comments of each."""
    rows = range(len(task.train.y))
    members = GroupMemberships(rows, cells(task.train).cpu())  # type: ignore[arg-type]
    number = members.num_groups
    sampler = GroupBatchSampler(members.group, number, task.rows // number, seed=task.seed)
    objective = fcco.methods.ooa(task.model, task.optimizer, number, step=setting["step"])

    def loss() -> Tensor:
        batch = torch.tensor(sampler.draw())
        rows, group = members.sample[batch], members.group[batch]
        return objective(
            lambda: bce(task.scores(rows), task.train.y[rows], reduction="none"), group
        )

    return loss


def ours(task: Task, setting: Setting) -> Loss:
    """Cross-entropy under constraints: the rate of each identity less that of all comments.

    Half of a batch is drawn from all comments, for the loss and the overall rate, half from
    those that are not toxic and name an identity. What counts is being above the threshold at which
    the last few thousand comments have the rate `FPR`; a sigmoid carries the gradient.
    """
    train, generator = task.train, task.generator
    weight, groups, innocent = train.weight.cpu(), train.groups.cpu(), (train.y == 0).cpu()
    named = (innocent & groups.any(1)).nonzero().squeeze(1)
    sizes = [task.rows // 2, task.rows - task.rows // 2]
    limit = limits(groups[innocent].sum(0), setting["margin"])
    objective = fcco.constrained(task.model, task.optimizer, limit)
    threshold = Threshold()

    def loss() -> Tensor:
        batch = torch.multinomial(weight, sizes[0], True, generator=generator)
        own = named[torch.randint(len(named), (sizes[1],), generator=generator)]
        quiet = innocent[batch].nonzero().squeeze(1)

        def loss_and_excess() -> tuple[Tensor, fcco.Measured]:
            every, found = task.scores(torch.cat([batch, own])).split(sizes)
            other = every[quiet]
            cut = threshold(other)
            hard = (found > cut).float() - (other > cut).float().mean()
            soft = [torch.sigmoid((each - cut) / WIDTH) for each in (found, other)]
            return bce(every, train.y[batch]), fcco.Measured(hard, soft[0] - soft[1].mean())

        return objective(loss_and_excess, groups[own])

    return loss


def limits(counts: Tensor, margin: float) -> dict[str, float]:
    """`LIMIT` less a margin in standard errors of a rate of `FPR` among so many comments."""
    error = (FPR * (1 - FPR) / counts).sqrt()
    return dict(zip(WORDS, (LIMIT - margin * error).tolist(), strict=True))


class Threshold:
    """The quantile 1 - `FPR` of the last scores that it was given."""

    def __init__(self, size: int = 4096) -> None:
        self._last, self._size = torch.empty(0), size

    def __call__(self, scores: Tensor) -> Tensor:
        """The quantile with these among the last."""
        new = scores.detach()
        self._last = torch.cat([self._last.to(new), new])[-self._size :]
        return self._last.quantile(1 - FPR)


@dataclass(frozen=True)
class Method:
    """A loss, and the values of its own knob."""

    build: Callable[[Task, Setting], Loss]
    knob: dict[str, tuple[Any, ...]]

    def grid(self, rates: tuple[float, ...]) -> list[Setting]:
        """Learning rates x the values of the knob."""
        ((name, values),) = self.knob.items()
        return [{"lr": lr, name: value} for lr, value in product(rates, values)]


DECAYS = {"weight_decay": (0.01, 1.0)}
METHODS = {
    "erm": Method(erm, DECAYS),
    "label weights": Method(label_weights, DECAYS),
    "identity weights": Method(identity_weights, DECAYS),
    "ooa": Method(ooa, {"step": (0.01, 0.1)}),
    OURS: Method(ours, {"margin": (1.0, 3.0)}),
}
