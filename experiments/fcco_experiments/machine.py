"""Fields of experiments that train networks: where they run, and how the learning rate moves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from .task import Experiment

__all__ = ["TYPES", "OnMachine", "Scheduled", "factor"]

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of autocast, by `precision`."""


@dataclass(frozen=True, kw_only=True)
class OnMachine(Experiment):
    """Where and in which precision a network is trained.

    Args:
        device: `"auto"` takes a GPU when there is one.
        precision: of the forward pass: float32, autocast to bfloat16, or to float16 with scaled
            gradients.
        recompute: gradient checkpointing: recompute activations of the backbone in the backward pass.
        loaders: worker processes that read images from files.
        pin_memory: page-locked memory for batches on their way to a GPU.
        evaluate_batch: samples of a batch of evaluation.
        strategy: how several processes (torchrun) share a run: `"ddp"` or `"fsdp2"`.
    """  # noqa: E501

    incidental: ClassVar[tuple[str, ...]] = (
        "checkpoint_every", "device", "recompute", "loaders", "pin_memory", "evaluate_batch",
    )  # fmt: skip

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    recompute: bool = False
    loaders: int = 0
    pin_memory: bool = False
    evaluate_batch: int = 512
    strategy: Literal["ddp", "fsdp2"] = "ddp"

    @property
    def preferred_device(self) -> str:
        """The field `device`."""
        return self.device

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        super().__post_init__()
        if self.evaluate_batch < 1:
            raise ValueError(f"`evaluate_batch` must be at least 1 but is: {self.evaluate_batch}.")
        if self.loaders < 0:
            raise ValueError(f"`loaders` must be at least 0 but is: {self.loaders}.")


@dataclass(frozen=True, kw_only=True)
class Scheduled(Experiment):
    """How the learning rate moves over training, see `factor`.

    Args:
        schedule: `"constant"`; `"step"`, times `decay` after every `decay_epochs`; `"linear"` down
            to 0, or `"cosine"`, half a wave down to 0, both after `warmup_epochs` up from 0.
        decay: factor of the step schedule.
        decay_epochs: its epochs.
        warmup_epochs: of the linear and the cosine schedule.
    """

    schedule: Literal["constant", "step", "linear", "cosine"] = "constant"
    decay: float = 0.2
    decay_epochs: int = 3
    warmup_epochs: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no schedule."""
        super().__post_init__()
        if not 0 < self.decay <= 1 or self.decay_epochs < 1:
            raise ValueError(
                f"`decay` must be in (0, 1] and `decay_epochs` at least 1 but they are: "
                f"{self.decay}, {self.decay_epochs}."
            )
        if not 0 <= self.warmup_epochs < math.inf:
            raise ValueError(f"`warmup_epochs` must be at least 0 but is: {self.warmup_epochs}.")
        if self.warmup_epochs >= self.epochs and self.schedule in ("linear", "cosine"):
            raise ValueError(
                f"`warmup_epochs` must be below epochs = {self.epochs} but is: "
                f"{self.warmup_epochs}."
            )


def factor(config: Scheduled, epoch: float) -> float:
    """What the learning rate is multiplied by after so many epochs.

    Example:
        >>> config = Scheduled(data="celeba", epochs=9, schedule="step", decay=0.5, decay_epochs=3)
        >>> [factor(config, epoch) for epoch in (0, 2.9, 3, 6)]
        [1.0, 1.0, 0.5, 0.25]
        >>> config = Scheduled(data="amazon", epochs=4, schedule="linear", warmup_epochs=1)
        >>> [factor(config, epoch) for epoch in (0, 0.5, 1, 2.5, 4)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
        >>> config = Scheduled(data="bdd100k", epochs=4, schedule="cosine", warmup_epochs=0)
        >>> [round(factor(config, epoch), 3) for epoch in (0, 1, 2, 4)]
        [1.0, 0.854, 0.5, 0.0]
    """
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "step":
        return config.decay ** (int(epoch) // config.decay_epochs)
    warm = config.warmup_epochs
    if epoch < warm:
        return epoch / warm
    left = max(0.0, (config.epochs - epoch) / (config.epochs - warm))
    return left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2
