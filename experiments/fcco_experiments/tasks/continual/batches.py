"""Batches: target pairs, pairs to contrast them with, and samples of every protected class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcco.groups import GroupBatchSampler

from ...data.grouped import Samples, Vectors
from ..base import loader
from .config import Continual

__all__ = ["Batch", "Batches", "Streams"]


class Streams(NamedTuple):
    """Rows that each part of a batch is drawn from.

    Attributes:
        anchors: rows of the target's pairs.
        negatives: rows of the pairs of protected classes.
        label: class of each of the latter.
    """

    anchors: Tensor
    negatives: Tensor
    label: Tensor


class Batch(NamedTuple):
    """The samples of a batch, this rank's part of it.

    Attributes:
        images: inputs of all samples, in the order of the three parts.
        anchors: places of the target pairs in their stream.
        negatives: places of the pairs they are contrasted with in their stream.
        kept: places of the samples of protected classes, in the same stream.
    """

    images: Tensor
    anchors: Tensor
    negatives: Tensor
    kept: Tensor


class Batches:
    """An endless stream of batches that can be resumed; each rank gets its slice of each part.

    Args:
        config: sizes and loader options.
        samples: image inputs; `Vectors` are indexed in memory, others read by a loader.
        streams: where the parts come from.
        seed: of the draws.
        device: where batches go.
    """

    def __init__(
        self,
        config: Continual,
        samples: Samples,
        streams: Streams,
        seed: int,
        device: torch.device,
    ) -> None:
        self.config, self.samples, self.device = config, samples, device
        classes = config.classes_per_batch or len(config.protected)
        wanted = (
            (torch.zeros_like(streams.anchors), 1, config.batch),
            (torch.zeros_like(streams.negatives), 1, config.negatives),
            (streams.label, classes, config.per_class),
        )
        self.samplers = [
            GroupBatchSampler(
                group, number, each,
                batches_per_epoch=config.steps_per_epoch, seed=3 * seed + place,
            )
            for place, (group, number, each) in enumerate(wanted)
        ]  # fmt: skip
        # One list of all rows, so that one loader reads the three parts.
        self.rows = torch.cat([streams.anchors, streams.negatives])
        self._first = len(streams.anchors)
        self._loaded: Iterator[Any] | None = None

    def draw(self) -> Batch:
        """The next batch."""
        if isinstance(self.samples, Vectors):
            parts = [torch.tensor(sampler.draw()) for sampler in self.samplers]
            values = self.samples.values
            rows = self.rows[self._places(parts)].to(values.device)
            return Batch(values[rows].to(self.device), *parts)
        if self._loaded is None:
            self._loaded = self._load()
        images, parts = next(self._loaded)
        return Batch(images.to(self.device, non_blocking=True), *parts)

    def _places(self, parts: list[Tensor]) -> Tensor:
        anchors, negatives, kept = parts
        return torch.cat([anchors, self._first + negatives, self._first + kept])

    def _load(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        sizes = self.config.batch, self.config.negatives
        while True:
            for sampler in self.samplers:
                sampler.advance(0)  # what workers have read ahead does not count as used
            drawn = (list(map(torch.tensor, each)) for each in zip(*self.samplers, strict=True))
            batches = [self._places(parts).tolist() for parts in drawn]
            found = loader(self.config, self.samples, self.rows, batches, self.device)
            for images, places in found:
                cuts = [self._share(0, sizes[0]), self._share(1, sizes[1])]
                parts = list(places.tensor_split([cuts[0], sum(cuts)]))
                for sampler in self.samplers:
                    sampler.advance()
                yield images, [parts[0], *(part - self._first for part in parts[1:])]

    def _share(self, stream: int, size: int) -> int:
        """Samples of a part on this rank, as the sampler slices it."""
        sampler = self.samplers[stream]
        low, high = (size * r // sampler.world_size for r in (sampler.rank, sampler.rank + 1))
        return high - low

    def state_dict(self) -> dict[str, Any]:
        """How far the draws have come."""
        return {"samplers": [sampler.state_dict() for sampler in self.samplers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after those draws."""
        for sampler, own in zip(self.samplers, state["samplers"], strict=True):
            sampler.load_state_dict(dict(own))
        self._loaded = None
