"""Training a network on a table: what is trained for, the loop, the iterate that is returned."""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim.swa_utils import update_bn

from ...groups import HoldOut
from ...optim import OutputIterate
from .table import Encoding, Part

T = TypeVar("T")

Scored = tuple[Tensor, Part]
"""The scores of rows, and the rows."""

STEEP = 4.0
"""Slope of the stand-in of a counted rate, relative to that of the mean probability. Multipliers
start at 0 and move by at most a hundredth of their unit in a step; with steeper values they have a
shorter way to go, which a few hundred steps are enough for."""


def scores_of(module: nn.Module, x: Tensor) -> Tensor:
    """The logit of the second of two classes, (n,), or that of each of more, (n, classes)."""
    scores = module(x)
    return scores.view(-1) if scores.shape[1:] == (1,) else scores


@torch.no_grad()
def outputs(module: nn.Module, x: Tensor) -> Tensor:
    """The scores of many rows."""
    module.eval()
    return torch.cat([scores_of(module, rows) for rows in x.split(65536)])


def losses_of(scores: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of each sample."""
    if scores.dim() == 1:
        return binary_cross_entropy_with_logits(scores, y.to(scores), reduction="none")
    return cross_entropy(scores, y, reduction="none")


def predicted(scores: Tensor) -> Tensor:
    """The class that scores stand for."""
    return (scores > 0).long() if scores.dim() == 1 else scores.argmax(1)


@dataclass(frozen=True)
class Settings:
    """Numbers of the training loop."""

    max_epochs: int
    more_epochs: int  # for a goal that is not reached by then
    batch_size: int
    learning_rate: float
    weight_decay: float
    seed: int


@dataclass(frozen=True)
class Plan:
    """How long to train unless told."""

    passes: int = 8  # epochs, at least
    per_epoch: int = 64  # batches, with at least 128 and at most 2,048 rows in each
    steps: int = 300  # in all, at least
    learning_rate: float = 0.005  # the largest


class Fit(NamedTuple):
    """A network and the rows to train it on; `held` sets some apart, to measure values on."""

    module: nn.Module
    part: Part
    held: HoldOut | None
    settings: Settings

    @property
    def rest(self) -> Part:
        """The rows that carry the gradient."""
        return self.part if self.held is None else self.part.of(self.held.rest)


class Shuffled:
    """The rows of a part, in batches of nearly equal size.

    All rows come at each pass, in another random order.
    """

    def __init__(self, part: Part, batch_size: float) -> None:
        self.part, self.count = part, max(1, round(len(part.y) / batch_size))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Part]:
        order = torch.randperm(len(self.part.y)).to(self.part.y.device)
        return (self.part.of(rows) for rows in order.tensor_split(self.count))


class Problem(NamedTuple):
    """What a loop over batches needs."""

    objective: Any  # None for plain cross-entropy
    batches: Any  # of an epoch, anew at each pass: an iterable with a length
    loss: Callable[[Any], Tensor]  # of a batch


def plain(fit: Fit) -> Problem:
    """Cross-entropy."""

    def loss(batch: Part) -> Tensor:
        return losses_of(scores_of(fit.module, batch.x), batch.y).mean()

    return Problem(None, Shuffled(fit.rest, fit.settings.batch_size), loss)


class Goal(abc.ABC):
    """What is trained for, and how to judge it."""

    name: str  # of the figure that `value` gives
    asked: str  # what was asked for, in words
    means: Sequence[str] = ()  # the names of what `members` counts in
    plan = Plan()  # for the network that is made for a table
    epochs_share = rate_share = 1.0  # of the epochs and of the learning rate, in the loop
    tolerance = math.inf  # of the gap

    @abc.abstractmethod
    def problem(self, fit: Fit, optimizer: torch.optim.Optimizer) -> Problem:
        """What to train on."""

    def members(self, part: Part) -> Tensor:
        """Which samples count in which mean that is tracked, (n, means)."""
        return part.members

    @abc.abstractmethod
    def value(self, scores: Tensor, part: Part) -> float:
        """The figure that was asked for."""

    @abc.abstractmethod
    def merit(self, training: Scored, held: Scored) -> float:
        """How good an iterate is, from its scores of the training part and of held-out rows."""

    def gap(self, *parts: Scored) -> float:
        """What should not be above the tolerance when training ends."""
        return 0.0

    def threshold(self, scores: Tensor, part: Part) -> float:
        """Where to cut the scores of two classes, from the validation part if there is one."""
        return 0.0

    def figures(self, scores: Tensor, part: Part) -> dict[str, float]:
        """Figures for the history."""
        accuracy = (predicted(scores) == part.y).float().mean()
        return {"accuracy": float(accuracy), self.name: self.value(scores, part)}


def judged(parts: Mapping[str, T]) -> list[T]:
    """The parts that say what holds: with rows apart not those that the gradient comes from."""
    return [each for name, each in parts.items() if name != "training" or "holdout" not in parts]


def train(goal: Goal, fit: Fit, parts: Mapping[str, Part]) -> tuple[Any, list[dict[str, float]]]:
    r"""Train a module to the average iterate of the best epoch.

    AdamW; the learning rate rises over the first tenth of the steps and then falls to 0.3 of its
    largest. Iterates of a constrained problem go around their limit as the multipliers do. Their
    average does not, and is what is judged on held-out rows and kept:

    .. math::
        \bar w_t \propto \sum_{s \le t} s^3 w_s,

    nearly that of the last third. Without a validation part that of the last epoch is kept. Returns
    the objective, and the figures of each epoch.
    """
    module, part, settings = fit.module, parts["training"], fit.settings
    if isinstance(module, WideAndDeep):
        every = -(-len(part.y) // 8192)  # the start wants no more rows
        module.start(part.x[::every], part.y[::every])
    optimizer = adamw(module, settings)
    objective, batches, loss_of = goal.problem(fit, optimizer)
    average = OutputIterate(optimizer, "average", weight=lambda: float(average.count + 1) ** 3)
    total, rate = settings.max_epochs * len(batches), goal.rate_share * settings.learning_rate
    history: list[dict[str, float]] = []
    best, state, step = -math.inf, module.state_dict(), 0
    for epoch in range(1, settings.max_epochs + settings.more_epochs + 1):
        module.train()
        losses = []
        for batch in batches:
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(min(step / total, 1.0))
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        with average.applied():
            # Parts of nearly equal size: statistics of one row do not exist.
            update_bn(part.x.tensor_split(max(1, len(part.x) // 1024)), module)
            scored = {name: (outputs(module, rows.x), rows) for name, rows in parts.items()}
            row = {"epoch": epoch, "loss": float(torch.stack(losses).mean())}
            for name, each in scored.items():
                row |= {f"{name} {figure}": value for figure, value in goal.figures(*each).items()}
            history.append(row)
            merit = goal.merit(*judged(scored)) if "validation" in parts else 0.0
            if merit >= best:
                best, state = merit, copy.deepcopy(module.state_dict())
        if epoch >= settings.max_epochs and goal.gap(*judged(scored)) <= goal.tolerance:
            break
    module.load_state_dict(state)
    return objective, history


def adamw(module: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; for a small network the fused one takes half the time."""
    parameters, rate, decay = module.parameters(), settings.learning_rate, settings.weight_decay
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=True)


def schedule(progress: float) -> float:
    """The learning rate, relative to its largest, after a share of the steps."""
    if progress < 0.1:
        return 0.3 + 0.7 * progress / 0.1
    return 0.65 + 0.35 * math.cos(math.pi * (progress - 0.1) / 0.9)


class WideAndDeep(nn.Module):
    """A linear function of encoded features, plus a network of the scaled ones.

    The network has two hidden layers and starts at 0.

    References:
        H.-T. Cheng et al., Wide & deep learning for recommender systems, 2016.
    """

    def __init__(self, encoding: Encoding, outputs: int) -> None:
        super().__init__()
        self.features = len(encoding.knots)
        self.wide = nn.Linear(len(encoding.mean), outputs)
        last = nn.Linear(16, outputs, bias=False)
        hidden = nn.Linear(self.features, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()
        self.deep = nn.Sequential(*hidden, last)
        nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            wide = self.wide(x)
        else:  # a matrix product rounds a row as its place among the rows wants, a sum does not
            columns = [(x * weight).sum(1) for weight in self.wide.weight]
            wide = torch.stack(columns, dim=1) + self.wide.bias
        return wide + self.deep(x[:, : self.features])

    def start(self, x: Tensor, y: Tensor) -> None:
        """Fit the wide part by 15 steps of L-BFGS, with the squared norm / 2 n as penalty."""
        parameters = list(self.wide.parameters())
        for parameter in parameters:
            nn.init.zeros_(parameter)
        lbfgs = torch.optim.LBFGS(parameters, max_iter=15, line_search_fn="strong_wolfe")

        def penalized() -> Tensor:
            lbfgs.zero_grad()
            penalty = self.wide.weight.square().sum() / (2 * len(x))
            value = losses_of(scores_of(self.wide, x), y).mean() + penalty
            value.backward()
            return value

        lbfgs.step(penalized)
        lbfgs.zero_grad()
