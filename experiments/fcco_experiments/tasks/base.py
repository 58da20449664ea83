"""What the tasks share: config fields, learning rate, optimizers, training loop, columns, words."""

from __future__ import annotations

import contextlib
import functools
import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

import fcco
from fcco import _checks
from fcco.methods.lagrangian import ProximalRound

from .. import data
from ..task import Experiment, Method, Metric, Page, Panel, Row, Task, Training
from .judge import judge

PART_KEYS = {"train": "train", "validation": "val", "test": "test"}
"""Parts of the data as the keys of rows call them."""

Schedule = Literal["constant", "step", "milestones", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OnMachine(Experiment):
    """Where and in which precision a network is trained."""

    incidental: ClassVar[tuple[str, ...]] = (
        "checkpoint_every", "device", "loaders", "evaluate_batch",
    )  # fmt: skip

    device: Literal["auto", "cpu", "cuda"] = "auto"  # "auto": a GPU when there is one
    precision: Literal["float32", "bfloat16"] = "float32"  # of the forward pass
    loaders: int = 0  # worker processes that read images from files
    evaluate_batch: int = 512  # samples of a batch of evaluation

    @property
    def preferred_device(self) -> str:
        return self.device

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        super().__post_init__()
        self.at_least(1, "evaluate_batch")
        self.at_least(0, "loaders")


@dataclass(frozen=True, kw_only=True)
class Scheduled(Experiment):
    """How the learning rate moves over training, see `learning_rate_factor`.

    Args:
        schedule: `"constant"`; `"step"`, times `decay` after every `decay_epochs`; `"milestones"`,
            times `decay` at each share `decay_at` of the training; `"linear"` down to 0, or
            `"cosine"`, half a wave down to 0, both after `warmup_epochs` up from 0; after a tenth
            of the training, where there are no more epochs than those.
    """

    schedule: Schedule = "constant"
    decay: float = 0.2
    decay_epochs: int = 3
    decay_at: tuple[float, ...] = (0.5, 0.75)
    warmup_epochs: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no schedule."""
        super().__post_init__()
        self.at_least(1, "decay_epochs")
        if not 0 < self.decay <= 1:
            raise ValueError(f"`decay` must be in (0, 1] but is: {self.decay}.")
        if not all(0 <= share <= 1 for share in self.decay_at):
            raise ValueError(
                f"`decay_at` must hold shares between 0 and 1 but is: {list(self.decay_at)}."
            )
        if not 0 <= self.warmup_epochs < math.inf:
            raise ValueError(f"`warmup_epochs` must be at least 0 but is: {self.warmup_epochs}.")


def learning_rate_factor(config: Scheduled, epoch: float) -> float:
    """What the learning rate is multiplied by after so many epochs.

    Example:
        >>> config = Scheduled(data="celeba", epochs=9, schedule="step", decay=0.5, decay_epochs=3)
        >>> [learning_rate_factor(config, epoch) for epoch in (0, 2.9, 3, 6)]
        [1.0, 1.0, 0.5, 0.25]
        >>> config = Scheduled(data="adult", epochs=5, schedule="milestones", decay=0.1)
        >>> [round(learning_rate_factor(config, epoch), 2) for epoch in (0, 2.9, 3, 4)]
        [1.0, 1.0, 0.1, 0.01]
        >>> config = Scheduled(data="amazon", epochs=4, schedule="linear", warmup_epochs=1)
        >>> [learning_rate_factor(config, epoch) for epoch in (0, 0.5, 1, 2.5, 4)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
        >>> config = Scheduled(data="bdd100k", epochs=4, schedule="cosine", warmup_epochs=0)
        >>> [round(learning_rate_factor(config, epoch), 3) for epoch in (0, 1, 2, 4)]
        [1.0, 0.854, 0.5, 0.0]
    """
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "step":
        return config.decay ** (int(epoch) // config.decay_epochs)
    if config.schedule == "milestones":  # a milestone within an epoch counts from the next one on
        share = int(epoch) / config.epochs
        return config.decay ** sum(share >= milestone for milestone in config.decay_at)
    warm = config.warmup_epochs if config.warmup_epochs < config.epochs else config.epochs / 10
    if epoch < warm:
        return epoch / warm
    left = max(0.0, (config.epochs - epoch) / (config.epochs - warm))
    return left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2


def autocast(config: OnMachine, device: torch.device) -> AbstractContextManager[Any]:
    """The `precision` of a forward pass."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16")


def perceptron(width: int, hidden: Sequence[int], outputs: int) -> list[nn.Module]:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return [*layers, nn.Linear(width, outputs)]


def make_optimizer(parameters: Iterable[Tensor], method: Method) -> torch.optim.Optimizer:
    """Adam (weight decay decoupled), SGD with the momentum of the paper, or plain SGD."""
    _checks.in_interval("Method", "beta", method.beta, 0, 1, open_low=True)
    decay = method.weight_decay
    if method.update == "adam":
        return fcco.optim.adam_type(parameters, method.lr, method.beta, weight_decay=decay)
    if method.update == "momentum":
        return fcco.optim.momentum_type(parameters, method.lr, method.beta, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=method.lr, weight_decay=decay)


def check_method(method: Method, by_task: Collection[str], words: Collection[str] = ()) -> None:
    """Refuse a word that is none of `words`, if any, and settings that the task makes."""
    if words and method.method not in words:
        raise ValueError(f"`method` must be one of {', '.join(words)} but is: {method.method}.")
    for name in method.settings:
        if name in by_task:
            raise ValueError(
                f"`settings.{name}` of {method.method} is made by the task; leave it out."
            )


@dataclass
class Stepped:
    """A method on a task: what makes its loss and what steps it; tasks add what they need."""

    objective: Any  # None where the loss is a plain average
    optimizer: torch.optim.Optimizer  # what is stepped
    scheduled: torch.optim.Optimizer  # whose learning rate follows the schedule

    def set_rate(self, lr: float) -> None:
        """Use this learning rate from now on."""
        for group in self.scheduled.param_groups:
            group["lr"] = lr

    def at_anchor(self) -> AbstractContextManager[None]:
        """Inside, the weights are those between the rounds of a double loop."""
        if isinstance(self.optimizer, fcco.optim.ProximalPoint | ProximalRound):
            return self.optimizer.anchored()
        return nullcontext()


class BaseTraining(Training):
    """The loop of a run: set the learning rate, update the weights, count.

    The model lies on the device; `batches` have a `state_dict`.
    """

    config: Any  # subclasses say which
    built: Any
    batches: Any
    model: Any

    def __init__(
        self,
        config: Scheduled,
        method: Method,
        model: nn.Module,
        built: Stepped,
        batches: Any,
        device: torch.device,
        epoch: tuple[int, int],
    ) -> None:
        """`epoch` is the number of its steps, and of the samples of each."""
        self.config, self.method, self.device = config, method, device
        self.steps_per_epoch, self.samples_per_step = epoch
        self.model, self.built, self.batches = model, built, batches
        self.steps = 0
        if isinstance(built.objective, nn.Module):
            built.objective.to(device)

    @abstractmethod
    def loss(self) -> Tensor:
        """The loss of the next batch, whose gradient the optimizer takes."""

    def step(self) -> None:
        epoch = self.steps / self.steps_per_epoch
        self.built.set_rate(self.method.lr * learning_rate_factor(self.config, epoch))
        self.loss().backward()
        self.built.optimizer.step()
        self.built.optimizer.zero_grad()
        self.steps += 1

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model is in evaluation mode, at the weights between rounds."""
        before = self.model.training
        with self.built.at_anchor():
            self.model.eval()
            try:
                yield
            finally:
                self.model.train(before)

    def state_dict(self) -> dict[str, Any]:
        objective = self.built.objective
        return {
            "steps": self.steps,
            "batches": self.batches.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.built.optimizer.state_dict(),
            "objective": None if objective is None else objective.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        self.batches.load_state_dict(state["batches"])
        self.model.load_state_dict(state["model"])
        self.built.optimizer.load_state_dict(state["optimizer"])
        if self.built.objective is not None:
            self.built.objective.load_state_dict(state["objective"])


class BaseTask(Task):
    """A task whose sentences stand in a template, one block for each place.

    Attributes:
        template: the file, in this folder.
        problem: made of a config.
        references: words of methods that solve another problem.
        parts: of the data, in the order of their columns.
    """

    template: ClassVar[str]
    problem: ClassVar[type[Any]]
    references: ClassVar[tuple[str, ...]]
    parts: ClassVar[tuple[str, ...]] = ("test", "train", "val")

    @abstractmethod
    def figures(self, config: Any) -> Iterable[tuple[Metric, str]]:
        """Figures of each part of the data, see `by_part`."""

    @abstractmethod
    def once(self, config: Any) -> tuple[Metric, ...]:
        """Figures of a whole run."""

    @abstractmethod
    def card(self, config: Any) -> dict[str, str]:
        """What is said of the data; see `described`."""

    @abstractmethod
    def panels(self, config: Any) -> Iterable[Panel]:
        """Plots of a comparison; of figures that no run has, the report draws none."""

    @abstractmethod
    def build(self, config: Any, method: Method) -> object:
        """A method on a small model, to see whether its settings are right."""

    def words(self, block: str, config: Any, **values: Any) -> tuple[str, ...]:
        """The paragraphs of a block."""
        return paragraphs(f"{self.template}/page.j2", block, config=config, **values)

    def described(self, config: Experiment, **unless: str) -> dict[str, str]:
        """What the card of the data says for this task; `unless` for data without such words."""
        known = config.data in data.names()
        return unless | (data.card(config.data).words.get(self.name, {}) if known else {})

    def metrics(self, config: Any) -> tuple[Metric, ...]:
        columns = by_part(*self.figures(config), parts=self.parts) + self.once(config)
        return tuple(sorted(columns, key=lambda metric: not metric.headline))

    def page(self, config: Any) -> Page:
        values = {"card": self.card(config), "rule": self.judged(config)}
        (title,) = self.words("title", config, **values)
        return Page(
            title=title,
            question=self.words("question", config, **values),
            metrics=self.metrics(config),
            panels=tuple(self.panels(config)),
        )

    def load(self, config: Any) -> Any:
        return self.problem(config)

    def check(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        problems = list(self.wrong(config))
        for name, method in config.methods.items():
            try:
                self.build(config, method)
            except (TypeError, ValueError) as error:
                problems.append((("methods", name), str(error)))
        return problems

    def wrong(self, config: Any) -> Iterable[tuple[tuple[str, ...], str]]:
        """What is wrong beside the methods, as `Task.check` says it."""
        return ()

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return self.words("verdict", config, **self.outcome(config, methods))

    def next_steps(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return self.words("next_steps", config, **self.outcome(config, methods))

    def outcome(self, config: Any, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
        """What the sentences of the verdict are made from: the judgement, and whom they name."""
        verdict, others = judge(self, config, methods), self.named(config)
        return {
            "verdict": verdict, "final": verdict.final, "best": verdict.best,
            "order": verdict.order, "references": [n for n in verdict.order if n in others],
            "reference": next((name for name in verdict.order if name in others), None),
            "ours": next((name for name in verdict.order if name not in others), None),
            "key": verdict.rule.objective if verdict.rule else "",
        }  # fmt: skip

    def named(self, config: Experiment) -> tuple[str, ...]:
        """The references of a config, by the names that tables show."""
        return tuple(n for n, method in config.methods.items() if method.method in self.references)


SECONDS = Metric("seconds", "seconds", "none", 1, True, "training time of a run")


def by_part(*metrics: tuple[Metric, str], parts: Sequence[str]) -> tuple[Metric, ...]:
    """A column of each metric for each part of the data, with the part in its key and its label.

    The text beside a metric names the parts whose column is in the first table.

    >>> (metric,) = by_part((Metric("auc", "AUC"), ""), parts=["val"])
    >>> metric.key, metric.label, metric.headline
    ('val_auc', 'AUC, validation', False)
    """
    words = {"val": "validation"}
    return tuple(
        replace(
            metric, key=f"{part}_{metric.key}", label=f"{metric.label}, {words.get(part, part)}",
            headline=part in shown.split(),
        )
        for part in parts
        for metric, shown in metrics
    )  # fmt: skip


KKT = (
    Metric("kkt_stationarity", "KKT stationarity", "lower", meaning="with its own multipliers:"
        " length of the Lagrangian's gradient on all training data"),
    Metric("kkt_feasibility", "KKT feasibility", "lower", meaning="largest violation of a"
        " constraint on all training data"),
    Metric("kkt_complementarity", "KKT complementarity", "lower", meaning="largest product of a"
        " multiplier and its constraint"),
    Metric("kkt_best_stationarity", "KKT stationarity, best multipliers", "lower", meaning="with"
        " the best possible multipliers: length of the Lagrangian's gradient on all training data"),
    Metric("kkt_best_complementarity", "KKT complementarity, best multipliers", "lower",
        meaning="largest product of a best multiplier and its constraint"),
)  # fmt: skip


@functools.cache
def _templates() -> Any:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=ChoiceLoader(
            [PackageLoader("fcco_experiments", place) for place in ("tasks", "report/templates")]
        ),
        undefined=StrictUndefined,  # a name with a typing error must not become an empty string
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # plain text: the page that shows it escapes it
    )


def paragraphs(template: str, block: str, /, **values: Any) -> tuple[str, ...]:
    """The paragraphs of one `{% block NAME %}` of a template such as `"fairness/page.j2"`.

    An empty line ends a paragraph; `values` are the names that the template uses.
    """
    page = _templates().get_template(template)
    text = "".join(page.blocks[block](page.new_context(values)))
    joined = (" ".join(part.split()) for part in text.split("\n\n"))
    return tuple(part for part in joined if part)
