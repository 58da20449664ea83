"""Samples on their way to a model: one by one for loaders, and in chunks for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .data.grouped import Samples, Vectors
from .machine import OnMachine

__all__ = ["Rows", "chunks", "loader"]


class Rows(Dataset[tuple[Tensor, int]]):
    """Samples with their places, for a loader with worker processes.

    Args:
        samples: tensors by row.
        rows: the row of each place.
    """

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
    """A loader of batches of places.

    Args:
        config: its `loaders` and `pin_memory` are used.
        samples: tensors by row.
        rows: the row of each place.
        batches: places of each batch.
        device: where batches will go.
        persistent: keep worker processes from one pass to the next.
    """
    return DataLoader(
        Rows(samples, rows),
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
    rank: int,
    size: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Places with their inputs, for evaluation: each rank its share.

    Every rank gets the same number of chunks, none of them empty, because sharded models must be
    called together: where samples do not go round, the last place comes twice. The caller counts
    each place once.

    Args:
        config: its `evaluate_batch` is used, and what `loader` does.
        samples: tensors by row.
        rows: the row of each place.
        device: where inputs go.
        rank: this process.
        size: number of processes.
    """
    each, share = config.evaluate_batch, -(-len(rows) // size)
    places = torch.arange(rank * share, (rank + 1) * share).clamp(max=len(rows) - 1)
    if isinstance(samples, Vectors):
        values = samples.values
        for own in places.split(each):
            yield own, values[rows[own].to(values.device)].to(device)
        return
    found = loader(config, samples, rows, [own.tolist() for own in places.split(each)], device)
    for own, (inputs, _) in zip(places.split(each), found, strict=True):
        yield own, inputs.to(device, non_blocking=True)
