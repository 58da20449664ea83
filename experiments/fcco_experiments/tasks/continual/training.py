"""One run: batches, steps, figures, state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco
from fcco._distributed import find_group

from ... import strategy
from ...data.grouped import GroupedPart, Samples
from ...task import Method, Row, Training
from ..base import learning_rate_factor
from .batches import Batch, Batches, Streams
from .certificate import certificate, contrast
from .config import Continual
from .embedding import Encoder
from .figures import Classes, by_class, changes
from .methods import build
from .texts import Texts

__all__ = ["SHORT", "ContinualTraining"]

SHORT = {"train": "train", "validation": "val", "test": "test"}


class ContinualTraining(Training):
    """A method on a data set from a seed, starting from the old model.

    Args:
        config: of the experiment.
        method: and its settings.
        seed: of the batches.
        model: the old model, on the device.
        samples: image inputs of all rows.
        texts: all texts.
        inputs: what the text side takes, one row for each text, on the device.
        parts: the data by name; classes are protected first, the target last.
        extra: rows of further pairs for the target.
        old_losses: of the old model, one for each protected training sample, in their order.
        device: of the model and of the batches.
    """

    def __init__(
        self,
        config: Continual,
        method: Method,
        seed: int,
        model: nn.Module,
        samples: Samples,
        texts: Texts,
        inputs: Tensor,
        parts: Mapping[str, GroupedPart],
        extra: Tensor,
        old_losses: fcco.ReferenceLosses,
        device: torch.device,
    ) -> None:
        self.config, self.method, self.parts, self.device = config, method, dict(parts), device
        self.samples, self.everything, self.old_losses = samples, parts["train"], old_losses
        self.model = strategy.wrap(model, config.strategy, device)
        self.sharded = strategy.is_sharded(self.model)
        self.encoder = Encoder(config, self.model, texts, inputs, device)
        rows, label = self.everything.rows, self.everything.label
        protected = label < len(config.protected)
        self.streams = Streams(
            torch.cat([rows[~protected], extra]), rows[protected], label[protected]
        )
        pairs = len(self.streams.anchors), len(self.streams.negatives)
        self.built = build(
            self.model, method, config.protected, pairs,
            temperature=config.temperature, chunk=config.chunk,
        )  # fmt: skip
        self.built.objective.to(device)
        self.batches = Batches(config, samples, self.streams, seed, device)
        self.steps, self.seconds = 0, 0.0
        self.old = {name: found[0] for name, found in self._classes().items()}

    @property
    def samples_per_step(self) -> int:
        """Images of a batch."""
        config = self.config
        classes = config.classes_per_batch or len(config.protected)
        return config.batch + config.negatives + classes * config.per_class

    @property
    def steps_per_epoch(self) -> int:
        """As the config says."""
        return self.config.steps_per_epoch

    def step(self) -> None:
        """One batch."""
        start = time.perf_counter()
        epoch = self.steps / self.steps_per_epoch
        self.built.set_rate(self.method.lr * learning_rate_factor(self.config, epoch))
        batch = self.batches.draw()
        self.built.loss(lambda: self._values(batch), self._index(batch)).backward()
        self.built.optimizer.step()
        self.built.optimizer.zero_grad()
        self.steps += 1
        self.seconds += time.perf_counter() - start

    def _index(self, batch: Batch) -> dict[str, Tensor]:
        """Blocks: the target pairs (and, where they are anchors too, the others), the classes."""
        pairs = batch.anchors
        if self.built.everyone:
            pairs = torch.cat([pairs, len(self.streams.anchors) + batch.negatives])
        kept = self.streams.label[batch.kept]
        return {"objective": pairs.to(self.device), "constraints": kept.to(self.device)}

    def _values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Entries of the contrastive term, and what each protected sample lost since the start."""
        texts, streams = self.encoder.texts, self.streams
        anchors, pairs = len(batch.anchors), len(batch.anchors) + len(batch.negatives)
        rows = torch.cat([streams.anchors[batch.anchors], streams.negatives[batch.negatives]])
        seen, read = self.encoder(batch.images, torch.cat([texts.captions[rows], texts.prompts]))
        target = torch.full((anchors,), len(self.config.protected))
        label = torch.cat([target, streams.label[batch.negatives]]).to(self.device)
        anchor = None
        if not self.built.everyone:
            anchor = torch.arange(pairs, device=self.device) < anchors
        entries = self.built.contrast.inner(seen[:pairs], read[:pairs], label=label, anchor=anchor)
        scores = self.encoder.scores(seen[pairs:], read[pairs:])
        own = streams.label[batch.kept].to(self.device)
        losses = cross_entropy(scores, own, reduction="none")
        return entries, losses - self.old_losses(batch.kept.to(self.device))

    def _classes(self) -> dict[str, tuple[Classes, Tensor]]:
        """Figures of every class, and the vectors of the images, on each part of the data."""
        found = {}
        for name, part in self.parts.items():
            seen, read = self.encoder.all(
                self.samples, part.rows, self.encoder.texts.prompts, find_group()
            )
            label = part.label.to(self.device)
            found[name] = by_class(self.encoder.scores(seen, read), label), seen
        return found

    def evaluate(self) -> Row:
        """Accuracies and losses on all data against the old model's; it changes nothing.

        In the middle of a round of a double loop the weights of its start are evaluated.
        """
        row: Row = {}
        with self.built.at_anchor():
            found = self._classes()
            for name, (now, _) in found.items():
                row.update(changes(SHORT[name], now, self.old[name], self.config.forget_limit))
            row["objective"] = self._objective(found["train"][1])
        multipliers, tracked = self.built.multipliers(), self.built.tracked()
        if multipliers is not None:
            row["multipliers"] = multipliers.tolist()
        if tracked is not None and not bool(tracked.isnan().any()):
            gap = tracked.double().cpu() - torch.tensor(row["constraints"], dtype=torch.float64)
            row["tracking_error"] = gap.square().mean().sqrt().item()
        return row

    @torch.no_grad()
    def _objective(self, images: Tensor) -> float:
        """The contrastive loss over all training pairs of the data set."""
        part, texts = self.everything, self.encoder.texts
        _, read = self.encoder.all(self.samples, part.rows[:1], torch.arange(texts.of_classes))
        captions = read[texts.captions[part.rows].to(self.device)]
        return contrast(self, images, captions, part.label.to(self.device)).item()

    def finish(self) -> Row:
        """Names of the classes, the old model's figures, speed, and KKT residuals."""
        protected, config = list(self.config.protected), self.config
        row: Row = {"constraints_names": protected, "accuracies_names": list(config.classes)}
        for name, old in self.old.items():
            row[f"old_{SHORT[name]}_accuracies"] = old.accuracy.tolist()
            row[f"{SHORT[name]}_counts"] = old.count.tolist()
        if "penalty" in self.method.settings:
            row["penalty"] = float(self.method.settings["penalty"])
        if self.seconds:
            row["samples_per_second"] = self.steps * self.samples_per_step / self.seconds
        if config.certificate and config.train == "projections" and not self.sharded:
            with self.built.at_anchor():
                row.update(certificate(self))
        return row

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "batches": self.batches.state_dict(),
            # Measured or trained anew elsewhere, they may differ: a run keeps what it began with.
            "old_losses": self.old_losses.value.cpu(),
            "old": {name: list(each) for name, each in self.old.items()},
            **strategy.state(self.model, self.built.optimizer, self.built.objective),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle."""
        self.steps, self.seconds = int(state["steps"]), float(state["seconds"])
        self.batches.load_state_dict(state["batches"])
        self.old_losses = fcco.ReferenceLosses(state["old_losses"]).to(self.device)
        self.old = {name: Classes(*each) for name, each in state["old"].items()}
        strategy.load(self.model, self.built.optimizer, self.built.objective, state)
