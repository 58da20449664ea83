"""One run: batches, steps, figures, state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fcco._distributed import find_group

from ... import strategy
from ...data.grouped import GroupedPart, Samples
from ...task import Method, Row, Training
from ..base import autocast, chunks, learning_rate_factor
from . import spectrum
from .batches import Batch, Batches, epoch_steps
from .config import GroupDRO
from .figures import FEW, figures, measured, shown
from .methods import build
from .told import shown_names

__all__ = ["SHORT", "GroupDROTraining"]

SHORT = {"train": "train", "validation": "val", "test": "test"}
_SMALLEST = 1e-6
"""A scale of gradients below this has been halved 36 times in vain."""


class GroupDROTraining(Training):
    """A method on a data set from a seed.

    Args:
        config: of the experiment.
        method: and its settings.
        seed: of the batches.
        model: freshly made, on the device.
        samples: raw inputs of all parts, as tensors.
        parts: the data by name.
        summary: how accuracies of groups become one figure, see `GroupedData`.
        device: of the model and of the batches.
    """

    def __init__(
        self,
        config: GroupDRO,
        method: Method,
        seed: int,
        model: nn.Module,
        samples: Samples,
        parts: Mapping[str, GroupedPart],
        summary: str,
        device: torch.device,
    ) -> None:
        self.config, self.method, self.parts, self.device = config, method, dict(parts), device
        self.samples, self.summary = samples, summary
        self.train = parts["train"]
        self.model = strategy.wrap(model, config.strategy, device)
        self.sharded = strategy.is_sharded(self.model)
        self.copies = 2 if method.independent else 1
        per_epoch = epoch_steps(config, self.train, self.copies)
        sizes = torch.bincount(self.train.group)
        self.built = build(self.model, method, sizes, config.ratio, per_epoch * config.epochs)
        if self.built.objective is not None:
            self.built.objective.to(device)
        self.batches = Batches(
            config, samples, self.train, seed, device,
            groups=self.built.groups, copies=self.copies,
        )  # fmt: skip
        scaled = config.precision == "float16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled)
        self.steps, self.seconds = 0, 0.0
        self._check()

    def _check(self) -> None:
        """Options that do not go together."""
        if self.config.precision == "float16" and self.method.method == "alexr2":
            raise ValueError(
                "`precision: float16` scales gradients and skips steps, which the proximal point "
                "of alexr2 does not know; use bfloat16."
            )
        if self.config.spectrum:
            spectrum.check(self)
        group = find_group()
        micro = self.config.accumulate * (1 if group is None else group.size)
        if self.config.accumulate > 1 and self.config.groups_per_batch % micro:
            raise ValueError(
                f"`groups_per_batch` = {self.config.groups_per_batch} must be a multiple of "
                f"accumulate times processes, {micro}: micro-batches hold whole groups."
            )

    @property
    def samples_per_step(self) -> int:
        """The batch, or two."""
        return self.config.batch * self.copies

    @property
    def steps_per_epoch(self) -> int:
        """As many steps as draw the number of training samples."""
        return self.batches.steps

    def step(self) -> None:
        """One batch, perhaps in pieces."""
        start = time.perf_counter()
        epoch = self.steps / self.steps_per_epoch
        self.built.set_rate(self.method.lr * learning_rate_factor(self.config, epoch))
        pieces = self._pieces(self.batches.draw())
        while not self._moved(pieces):
            if self.scaler.get_scale() < _SMALLEST:
                raise FloatingPointError("The gradients are not finite, however they are scaled.")
        self.steps += 1
        self.seconds += time.perf_counter() - start

    def _moved(self, pieces: list[tuple[Batch, Batch | None]]) -> bool:
        """Try a step; False when scaled gradients overflowed, which makes the scale smaller.

        The same batch must come again then: the tracker waits for the step with its samples, and a
        checkpoint would not hold them.
        """
        for own, other in pieces:
            gradient = None if other is None else self._losses(other)
            independent = None if other is None else other.group
            loss = self.built.loss(self._losses(own), own.group, gradient, independent)
            self.scaler.scale(loss / len(pieces)).backward()
        optimizer, scale = self.built.optimizer, self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        return self.scaler.get_scale() >= scale

    def _pieces(self, batch: Batch) -> list[tuple[Batch, Batch | None]]:
        """Micro-batches of whole groups; of each group the odd samples are the second batch.

        Odd in the batch of all ranks, so that any number of them makes the same two batches.
        """
        number = self.config.accumulate
        cuts = torch.arange(len(batch.label)).tensor_split(number) if number > 1 else [slice(None)]
        found = [batch.at(cut) for cut in cuts]
        if self.copies == 1:
            return [(each, None) for each in found]
        even = self.batches.first % 2
        return [
            (each.at(slice(even, None, 2)), each.at(slice(1 - even, None, 2))) for each in found
        ]

    def _losses(self, batch: Batch) -> Callable[[], Tensor]:
        return lambda: cross_entropy(self._scores(batch.inputs), batch.label, reduction="none")

    def _scores(self, inputs: Tensor) -> Tensor:
        with autocast(self.config, self.device):
            scores = self.model(inputs)
        return scores if self.config.precision == "float32" else scores.float()

    def evaluate(self) -> Row:
        """Losses and accuracies on all data; it changes nothing.

        In the middle of a round of a double loop the weights of its start are evaluated.
        """
        with self.built.at_anchor(), self._evaluating():
            row, losses = self._figures()
        row["losses"] = shown(losses)
        tracked, weights = self.built.tracked(), self.built.weights()
        if tracked is not None:
            gap = (tracked.double().cpu() - losses)[~tracked.isnan().cpu()]
            if len(gap):
                row["tracking_error"] = gap.square().mean().sqrt().item()
                row["threshold"] = self.built.objective.threshold.item()
                row["threshold_exact"] = self._exact_threshold(losses)
        if weights is not None and len(weights) <= FEW:
            row["weights"] = weights.nan_to_num(nan=0.0).tolist()
        return row

    def _exact_threshold(self, losses: Tensor) -> float:
        from fcco.terms import exact_threshold

        smoothing = float(self.built.objective.term.smoothing)
        return exact_threshold(losses, self.config.ratio, smoothing).item()

    def _figures(self) -> tuple[Row, Tensor]:
        group, row = find_group(), Row()
        of_train = torch.empty(0)
        for name, part in self.parts.items():
            pieces = chunks(self.config, self.samples, part.rows, self.device, group)
            loss, right = measured(self._scores, part, pieces, self.device, group)
            own, losses = figures(SHORT[name], part, loss, right, self.config.ratio, self.summary)
            row.update(own)
            if name == "train":
                of_train = losses
        return row, of_train

    @contextlib.contextmanager
    def _evaluating(self) -> Any:
        held = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(held)

    def finish(self) -> Row:
        """Names of groups, speed and, if asked for, the spectrum of the groups' Jacobian."""
        names = shown_names(self.train.group_names)
        row: Row = {"losses_names": names, "weights_names": names}
        row["test_reported_names"] = shown_names(self.parts["test"].reported_names)
        if self.seconds:
            row["samples_per_second"] = self.steps * self.samples_per_step / self.seconds
        if self.config.spectrum:
            with self.built.at_anchor(), self._evaluating():
                row.update(spectrum.spectrum(self))
        return row

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "batches": self.batches.state_dict(),
            "scaler": self.scaler.state_dict(),
            **strategy.state(self.model, self.built.optimizer, self.built.objective),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle."""
        self.steps, self.seconds = int(state["steps"]), float(state["seconds"])
        self.batches.load_state_dict(state["batches"])
        self.scaler.load_state_dict(dict(state["scaler"]))
        strategy.load(self.model, self.built.optimizer, self.built.objective, state)
