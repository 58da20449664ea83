"""What is compared, and one run: the same model for all, equally many comments in a step."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import fcco
from fcco.groups import GroupBatchSampler, GroupMemberships
from studies.runner import Job
from studies.small_batches import Encoder

from .comments import WORDS, Kind, Part, load

FPR = 0.05  # of all comments, at the threshold of every method
LIMIT = 0.02  # the rate of an identity may be larger by this
WIDTH = 0.3  # of the sigmoid that stands for a step at the threshold, in logits
OURS = "ours"

Setting = dict[str, Any]
Loss = Callable[[], Tensor]
Figures = dict[str, Any]
"""Of a run by `auc`, `fpr`, `tpr` and part; `groups`: of each part and identity the false positives
and the number of comments that are not toxic; `seconds`."""


@dataclass(frozen=True)
class Plan:
    """Learning rates to choose from, steps of a run, comments in a step."""

    rates: tuple[float, ...]
    steps: int
    rows: int


NAMED, END_TO_END = "features and words", "end to end"
HEAD = Plan((1e-3, 3e-3), 1200, 768)
PLANS = {"features": HEAD, NAMED: HEAD, END_TO_END: Plan((5e-5,), 600, 256)}
METHODS: dict[str, dict[str, tuple[float, ...]]] = {
    "erm": {"weight_decay": (0.01, 1.0)},
    "label weights": {"weight_decay": (0.01, 1.0)},
    "identity weights": {"weight_decay": (0.01, 1.0)},
    "ooa": {"step": (0.01, 0.1)},
    OURS: {"margin": (1.0, 3.0)},
}
"""Methods with the values of their own knob."""


def grid(method: str, rates: tuple[float, ...]) -> list[Setting]:
    """Learning rates x the values of the knob."""
    ((name, values),) = METHODS[method].items()
    return [{"lr": lr, name: value} for lr, value in itertools.product(rates, values)]


@dataclass(frozen=True)
class Task:
    """A model in training, of a head on features or of a whole network on tokens alike."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Part
    rows: int  # comments in a step
    seed: int

    def scores(self, rows: Tensor) -> Tensor:
        return self.model(self.train.x[rows]).squeeze(1)


def loss_of(method: str, task: Task, setting: Setting) -> Loss:
    """A function without arguments, which draws a batch and gives the loss."""
    if method in ("ooa", OURS):
        return (ooa if method == "ooa" else ours)(task, setting)
    train, generator = task.train, torch.Generator().manual_seed(task.seed)
    weight = train.weight  # of all comments
    if method == "label weights":  # as many toxic comments as others
        toxic = (weight * train.y).sum() / weight.sum()
        weight = weight / torch.where(train.y == 1, toxic, 1 - toxic)
    elif method == "identity weights":  # equally many comments of each identity and label
        members = cells(train)
        weight = (members / members.sum(0)).sum(1)
    share = weight.cpu()

    def loss() -> Tensor:
        batch = torch.multinomial(share, task.rows, True, generator=generator)
        return bce(task.scores(batch), train.y[batch])

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
    train, generator = task.train, torch.Generator().manual_seed(task.seed)
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


def run(job: Job, kind: Kind) -> Figures:
    """Train as the job says; its problem is a key of `PLANS`, its steps are `evaluations`.

    Token ids are for a whole network.
    """
    torch.set_num_threads(1)
    start = time.perf_counter()
    plan, whole = PLANS[job.problem], kind == "tokens"
    device = "cuda" if whole and torch.cuda.is_available() else "cpu"
    cpu = load(kind, job.problem == NAMED)
    parts = {name: part.to(device) for name, part in cpu.items()}
    steps = job.evaluations or plan.steps
    torch.manual_seed(job.seed)
    model = Network(device) if whole else head(parts["train"].x.shape[1])
    decay = job.setting.get("weight_decay", 0.01)
    optimizer = torch.optim.AdamW(model.parameters(), job.setting["lr"], weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(factor, steps=steps))
    task = Task(model, optimizer, parts["train"], plan.rows, job.seed)
    loss = loss_of(job.method, task, job.setting)
    for _ in range(steps):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    with torch.no_grad():
        found = {
            name: torch.cat([model(x) for x in parts[name].x.split(1024)]).squeeze(1).cpu()
            for name in ("val", "test")
        }
    figures = judge(found, {name: cpu[name] for name in found})
    return figures | {"seconds": round(time.perf_counter() - start, 1)}


def factor(step: int, steps: int) -> float:
    """Of the learning rate: up over the first 5 % of the steps, then a cosine down to 0."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min((step - warm) / max(1, steps - warm), 1)))


def head(features: int, width: int = 128) -> nn.Module:
    """A perceptron with one hidden layer. Without dropout all methods fit the small groups."""
    layers = nn.Dropout(0.2), nn.Linear(features, width), nn.ReLU(), nn.Dropout(0.5)
    return nn.Sequential(*layers, nn.Linear(width, 1))


class Network(nn.Module):
    """MiniLM with one score in float32: rounded scores would tie at the threshold."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.encoder = Encoder(device)
        width = self.encoder.backbone.width
        self.top = nn.Sequential(nn.Dropout(0.1), nn.Linear(width, 1)).to(device)

    def forward(self, tokens: Tensor) -> Tensor:
        """A logit for each comment."""
        return self.top(self.encoder({"input_ids": tokens})["sentence_embedding"])


def judge(scores: dict[str, Tensor], parts: dict[str, Part]) -> Figures:
    """Figures at the threshold at which all validation comments have the rate `FPR`."""
    cut = threshold(scores["val"], parts["val"])
    found: Figures = {"auc": {}, "fpr": {}, "tpr": {}, "groups": {}}
    for name, part in parts.items():
        above, weight = scores[name] > cut, part.weight.double()
        for key, label in (("fpr", 0), ("tpr", 1)):
            own = part.y == label
            found[key][name] = round(float(weight[own & above].sum() / weight[own].sum()), 6)
        auc = roc_auc_score(part.y, scores[name], sample_weight=weight)
        found["auc"][name] = round(float(auc), 6)
        innocent = part.groups & (part.y == 0)[:, None]
        counts = (innocent & above[:, None]).sum(0), innocent.sum(0)
        found["groups"][name] = torch.stack(counts, 1).tolist()
    return found


def threshold(scores: Tensor, part: Part) -> float:
    """The least score with at most `FPR` of the comments that are not toxic above it."""
    own = part.y == 0
    values, order = scores[own].sort()
    share = part.weight[own][order].double().cumsum(0) / part.weight[own].double().sum()
    return float(values[torch.searchsorted(share, 1 - FPR)])
