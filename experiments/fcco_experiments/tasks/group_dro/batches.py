"""Batches of B1 groups with B2 samples each, from memory or from files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcco.groups import GroupBatchSampler

from ...data.grouped import GroupedPart, Samples, Vectors
from ..base import loader
from .config import GroupDRO

__all__ = ["Batch", "Batches", "epoch_steps"]


class Batch(NamedTuple):
    """Raw inputs with labels and group ids, on the device."""

    inputs: Tensor
    label: Tensor
    group: Tensor

    def at(self, places: Tensor | slice) -> Batch:
        """Some of the samples."""
        return Batch(self.inputs[places], self.label[places], self.group[places])


def epoch_steps(config: GroupDRO, part: GroupedPart, copies: int = 1) -> int:
    """Steps that draw the number of training samples once."""
    return -(-len(part) // (config.batch * copies))


class Batches:
    """An endless stream of batches that can be resumed; each rank gets its slice of a batch.

    Args:
        config: sizes and loader options.
        samples: tensors; `Vectors` are indexed in memory, others read by a loader.
        part: the training data.
        seed: of the draws.
        device: where batches go.
        groups: draw group by group; else uniformly from all samples.
        copies: independent batches of the same groups in each draw.
    """

    def __init__(
        self,
        config: GroupDRO,
        samples: Samples,
        part: GroupedPart,
        seed: int,
        device: torch.device,
        *,
        groups: bool = True,
        copies: int = 1,
    ) -> None:
        self.config, self.samples, self.part, self.device = config, samples, part, device
        number, each = (config.groups_per_batch, config.per_group) if groups else (1, config.batch)
        self._drawn = config.batch * copies
        self.steps = epoch_steps(config, part, copies)
        self.sampler = GroupBatchSampler(
            part.group if groups else torch.zeros_like(part.group),
            number,
            each * copies,
            batches_per_epoch=self.steps,
            seed=seed,
        )
        self._rows, self._label, self._group = (
            column.to(device) for column in (part.rows, part.label, part.group)
        )
        self._loaded: Iterator[Any] | None = None

    @property
    def first(self) -> int:
        """The place of this rank's first sample in the batch of all ranks."""
        sampler = self.sampler
        return self._drawn * sampler.rank // sampler.world_size

    def draw(self) -> Batch:
        """The next batch."""
        if isinstance(self.samples, Vectors):
            places = torch.tensor(self.sampler.draw(), device=self.device)
            rows = self._rows[places].to(self.samples.values.device)
            inputs = self.samples.values[rows].to(self.device)
            return Batch(inputs, self._label[places], self._group[places])
        if self._loaded is None:
            self._loaded = self._load()
        inputs, places = (each.to(self.device, non_blocking=True) for each in next(self._loaded))
        return Batch(inputs, self._label[places], self._group[places])

    def _load(self) -> Iterator[Any]:
        rows, own = self.part.rows, self.sampler
        found = loader(self.config, self.samples, rows, own, self.device, persistent=True)
        while True:
            yield from own.consume(found)

    def state_dict(self) -> dict[str, int]:
        """How far the draws have come."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after those draws."""
        self.sampler.load_state_dict(dict(state))
        self._loaded = None
