"""The fields of a group DRO experiment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..task import Experiment

__all__ = ["GroupDRO"]


@dataclass(frozen=True, kw_only=True)
class GroupDRO(Experiment):
    r"""The average loss of the worst groups.

    .. math::
        \min_{w,s}\; s + \frac1{rn}\sum_{i=1}^n [L_i(w) - s]_+, \qquad
        L_i(w) = \mathrm E\bigl[\ell(w; x, y) \mid \text{group } i\bigr]

    Args:
        ratio: r, the share of groups that count (the appendix of the paper calls it alpha).
        tower: the network in front of the head; `"none"` for data that are vectors.
        train: `"head"` trains a head on features of the frozen tower, computed once and kept in
            the cache; `"all"` trains every weight.
        pretrained: start the tower from pretrained weights.
        weights: file of those weights; the tower's own unless given.
        hidden: widths of the hidden layers of the head; none makes it linear.
        size: height and width that images are scaled to.
        tokens: texts are cut after so many tokens.
        batch_norm: `"frozen"` keeps the statistics of the pretrained tower; `"batch"` takes those
            of each batch, as training from random weights must.
        batch: samples of a batch, B1 B2.
        groups_per_batch: B1.
        sample_limit: at most so many samples of each group are kept; 0 keeps all.
        distinct: drop texts that repeat one of their own group, so that no copy of a training text
            is a test text.
        schedule: of the learning rate: `"constant"`; `"step"`, times `decay` after every
            `decay_epochs`; `"linear"` down to 0, after `warmup_epochs` up from 0.
        decay: factor of the step schedule.
        decay_epochs: its epochs.
        warmup_epochs: of the linear schedule.
        choose_by: the figure that a sweep makes small. `"train_cvar"` compares how well the
            problem is solved; `"val_cvar"` and `"val_error"` (one minus the accuracy over reported
            groups, worst or tenth percentile) how well the result generalises.
        spectrum: compute the smallest eigenvalue of the groups' Jacobian Gram matrix at the end
            (assumption LBSV), over all weights.
        device: `"auto"` takes a GPU when there is one.
        precision: of the forward pass: float32, autocast to bfloat16, or to float16 with scaled
            gradients.
        accumulate: micro-batches that a batch is cut into.
        recompute: gradient checkpointing: recompute activations of the tower in the backward pass.
        loaders: worker processes that read images from files.
        pin_memory: page-locked memory for batches on their way to a GPU.
        evaluate_batch: samples of a batch of evaluation.
        strategy: how several processes (torchrun) share a run: `"ddp"` or `"fsdp2"`.
    """

    incidental: ClassVar[tuple[str, ...]] = (
        "checkpoint_every", "device", "recompute", "loaders", "pin_memory", "evaluate_batch",
    )  # fmt: skip

    ratio: float = 0.15
    tower: str = "none"
    train: Literal["head", "all"] = "head"
    pretrained: bool = True
    weights: str = ""
    hidden: tuple[int, ...] = ()
    size: tuple[int, int] = (128, 104)
    tokens: int = 128
    batch_norm: Literal["frozen", "batch"] = "frozen"
    batch: int = 64
    groups_per_batch: int = 4
    sample_limit: int = 0
    distinct: bool = False
    schedule: Literal["constant", "step", "linear"] = "constant"
    decay: float = 0.2
    decay_epochs: int = 3
    warmup_epochs: float = 1.0
    choose_by: Literal["train_cvar", "val_cvar", "val_error"] = "val_cvar"
    spectrum: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    accumulate: int = 1
    recompute: bool = False
    loaders: int = 0
    pin_memory: bool = False
    evaluate_batch: int = 512
    strategy: Literal["ddp", "fsdp2"] = "ddp"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ValueError(f"`ratio` must be in (0, 1] but is: {self.ratio}.")
        for name in ("batch", "groups_per_batch", "tokens", "accumulate", "evaluate_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1 but is: {getattr(self, name)}.")
        for name in ("sample_limit", "loaders", "warmup_epochs"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` must be at least 0 but is: {getattr(self, name)}.")
        if self.batch % self.groups_per_batch:
            raise ValueError(
                f"`batch` must be a multiple of groups_per_batch = {self.groups_per_batch} "
                f"but is: {self.batch}."
            )
        if self.groups_per_batch % self.accumulate:
            raise ValueError(
                f"`accumulate` must divide groups_per_batch = {self.groups_per_batch} (micro-"
                f"batches hold whole groups) but is: {self.accumulate}."
            )
        if not 0 < self.decay <= 1 or self.decay_epochs < 1:
            raise ValueError(
                f"`decay` must be in (0, 1] and `decay_epochs` at least 1 but they are: "
                f"{self.decay}, {self.decay_epochs}."
            )
        if self.warmup_epochs >= self.epochs and self.schedule == "linear":
            raise ValueError(
                f"`warmup_epochs` must be below epochs = {self.epochs} but is: "
                f"{self.warmup_epochs}."
            )
        if min(self.size, default=0) < 1 or len(self.size) != 2:
            raise ValueError(f"`size` must be a height and a width but is: {list(self.size)}.")
        if not all(width >= 1 for width in self.hidden):
            raise ValueError(f"`hidden` must hold widths from 1 on but is: {list(self.hidden)}.")
        if self.tower == "none" and self.train == "all" and not self.hidden:
            raise ValueError("`train: all` needs a `tower` (or `hidden` layers).")

    @property
    def per_group(self) -> int:
        """B2, samples of each group in a batch."""
        return self.batch // self.groups_per_batch
