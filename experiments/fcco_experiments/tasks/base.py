"""What the tasks share: config fields, learning rate, optimizers, batches and training loop."""

from __future__ import annotations

import contextlib
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fcco
from fcco import _checks
from fcco.groups import GroupBatchSampler
from fcco.methods.lagrangian import ProximalRound

from ..data.grouped import Samples, Vectors
from ..task import Experiment, Method, Row, Training

PART_KEYS = {"train": "train", "validation": "val", "test": "test"}
"""Parts of the data as the keys of rows call them."""

Schedule = Literal["constant", "step", "milestones", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OnMachine(Experiment):
    """Where and in which precision a network is trained."""

    incidental: ClassVar[tuple[str, ...]] = (
        "checkpoint_every", "device", "recompute", "loaders", "pin_memory", "evaluate_batch",
    )  # fmt: skip

    device: Literal["auto", "cpu", "cuda"] = "auto"  # "auto": a GPU when there is one
    precision: Literal["float32", "bfloat16"] = "float32"  # of the forward pass
    recompute: bool = False  # gradient checkpointing of the backbone
    loaders: int = 0  # worker processes that read images from files
    pin_memory: bool = False  # page-locked memory for batches on their way to a GPU
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


class _Rows(Dataset[tuple[Tensor, int]]):
    """Samples with their places, for a loader with worker processes."""

    def __init__(self, samples: Samples, rows: Tensor) -> None:
        self.samples, self.rows = samples, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        sample = self.samples[int(self.rows[place])]
        assert isinstance(sample, Tensor), "texts are encoded before"
        return sample, place


def loader(
    config: OnMachine,
    samples: Samples,
    rows: Tensor,
    batches: Iterable[list[int]],
    device: torch.device,
    *,
    persistent: bool = False,
) -> DataLoader[Any]:
    """A loader of (inputs, places) for batches of places; `rows` holds the row of each place.

    With `persistent` its worker processes are kept from one pass to the next.
    """
    return DataLoader(
        _Rows(samples, rows),
        batch_sampler=batches,
        num_workers=config.loaders,
        pin_memory=config.pin_memory and device.type == "cuda",
        persistent_workers=persistent and config.loaders > 0,
        generator=torch.Generator(),  # or each pass would draw from the global one
    )


def chunks(
    config: OnMachine,
    samples: Samples,
    rows: Tensor,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Places with their inputs, for evaluation."""
    pieces = torch.arange(len(rows)).split(config.evaluate_batch)
    if isinstance(samples, Vectors):
        values = samples.values
        for piece in pieces:
            yield piece, values[rows[piece].to(values.device)].to(device)
        return
    loaded = loader(config, samples, rows, [piece.tolist() for piece in pieces], device)
    for piece, (inputs, _) in zip(pieces, loaded, strict=True):
        yield piece, inputs.to(device, non_blocking=True)


@torch.no_grad()
def per_sample(
    config: OnMachine,
    samples: Samples,
    rows: Tensor,
    device: torch.device,
    function: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """What `function` makes of inputs and their places, (b, k), for all rows."""
    pieces = chunks(config, samples, rows, device)
    return torch.cat([function(inputs, places.to(device)) for places, inputs in pieces])


class Batches:
    """An endless stream of batches that can be resumed.

    A batch joins what one or several samplers draw, each from a stream of rows of its own: `rows`
    holds the row of each place of each stream. `Vectors` are indexed in memory, other samples read
    by a loader.
    """

    def __init__(
        self,
        config: OnMachine,
        samples: Samples,
        rows: Sequence[Tensor],
        samplers: Sequence[GroupBatchSampler],
        device: torch.device,
    ) -> None:
        self.config, self.samples, self.device = config, samples, device
        self.samplers, self._rows = list(samplers), torch.cat(list(rows))
        self._ends = torch.tensor([len(stream) for stream in rows]).cumsum(0)
        self._starts = [0, *self._ends[:-1].tolist()]
        self._loaded: Iterator[tuple[Tensor, Tensor]] | None = None
        for sampler in self.samplers:
            sampler.advance(0)  # what loaders have read ahead does not count as used

    def draw(self) -> tuple[Tensor, list[Tensor]]:
        """The inputs of the next batch, and its places in each stream (on the CPU)."""
        if isinstance(self.samples, Vectors):
            places = [torch.tensor(sampler.draw()) for sampler in self.samplers]
            values = self.samples.values
            rows = self._rows[self._joined(places)].to(values.device)
            return values[rows].to(self.device), places
        if self._loaded is None:
            self._loaded = self._load()
        inputs, joined = next(self._loaded)
        sizes = torch.bincount(
            torch.bucketize(joined, self._ends, right=True), minlength=len(self._starts)
        )
        places = joined.split(sizes.tolist())
        return inputs.to(self.device, non_blocking=True), [
            stream - start for stream, start in zip(places, self._starts, strict=True)
        ]

    def _joined(self, places: Sequence[Tensor]) -> Tensor:
        """Places in the streams as places in all of them, one after the other."""
        pairs = zip(places, self._starts, strict=True)
        return torch.cat([stream + start for stream, start in pairs])

    def __iter__(self) -> Iterator[list[int]]:
        """Joined places of the batches that are left in this epoch, for a loader."""
        for drawn in zip(*self.samplers, strict=True):
            yield self._joined([torch.tensor(places) for places in drawn]).tolist()

    def _load(self) -> Iterator[tuple[Tensor, Tensor]]:
        loaded = loader(self.config, self.samples, self._rows, self, self.device, persistent=True)
        while True:
            for inputs, joined in loaded:
                for sampler in self.samplers:
                    sampler.advance()
                yield inputs, joined

    def state_dict(self) -> dict[str, Any]:
        """How many batches were drawn."""
        return {"samplers": [sampler.state_dict() for sampler in self.samplers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after those draws."""
        for sampler, saved in zip(self.samplers, state["samplers"], strict=True):
            sampler.load_state_dict(dict(saved))
        self._loaded = None


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
        self._steps_per_epoch, self._samples_per_step = epoch
        self.model, self.built, self.batches = model, built, batches
        self.steps, self.seconds = 0, 0.0
        if isinstance(built.objective, nn.Module):
            built.objective.to(device)

    @property
    def steps_per_epoch(self) -> int:
        return self._steps_per_epoch

    @property
    def samples_per_step(self) -> int:
        return self._samples_per_step

    @abstractmethod
    def loss(self) -> Tensor:
        """The loss of the next batch, whose gradient the optimizer takes."""

    def step(self) -> None:
        start = time.perf_counter()
        epoch = self.steps / self.steps_per_epoch
        self.built.set_rate(self.method.lr * learning_rate_factor(self.config, epoch))
        self.loss().backward()
        self.built.optimizer.step()
        self.built.optimizer.zero_grad()
        self.steps += 1
        self.seconds += time.perf_counter() - start

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

    def speed(self) -> Row:
        """Samples a second in training, where there was any."""
        if not self.seconds:
            return {}
        return {"samples_per_second": self.steps * self.samples_per_step / self.seconds}

    def state_dict(self) -> dict[str, Any]:
        objective = self.built.objective
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "batches": self.batches.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.built.optimizer.state_dict(),
            "objective": None if objective is None else objective.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.seconds = int(state["steps"]), float(state["seconds"])
        self.batches.load_state_dict(state["batches"])
        self.model.load_state_dict(state["model"])
        self.built.optimizer.load_state_dict(state["optimizer"])
        if self.built.objective is not None:
            self.built.objective.load_state_dict(state["objective"])
