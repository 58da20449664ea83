"""What a tracker has done, and what it wrote since the last optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .blocks import Batch

__all__ = ["Progress"]


_MOST = 100_000
"""Numbers remembered; a table with more blocks asks the mask for the others."""


@dataclass
class Progress:
    """Counters, and the open step: what was written, and what stood there before.

    A plain object, because setting an attribute of an `nn.Module` costs as much as a tensor op.
    """

    steps: int = 0
    skipped: int = 0
    batch: Batch | None = None
    old: Tensor | None = None
    seen: Tensor | None = None
    visited: set[int] = field(default_factory=set)
    version: int = -1
    complete: bool = False  # every block is visited

    def first_visits(self, known: Tensor, batch: Batch) -> Tensor | None:
        """Which blocks of a batch have a value; None when all are known to, the usual case.

        A set of numbers answers at once what a look into the mask `known` would cost four tensor
        operations. It holds for the version of the mask that it was made for.
        """
        ids = batch.ids
        if self.version == known._version and (
            self.complete or (ids is not None and self.visited.issuperset(ids))
        ):
            return None
        return known.index_select(0, batch.index)

    def visit(self, known: Tensor, batch: Batch, only: Tensor | None = None) -> None:
        """Mark the blocks of a batch in the mask, or `only` some of them."""
        if self.version != known._version:  # somebody else wrote to the mask
            self.visited.clear()
            self.complete = False
        if only is not None:
            known.index_copy_(0, batch.index, only)
        else:
            known.index_fill_(0, batch.index, True)
            self.complete = self.complete or batch.whole
            if batch.ids is not None and len(self.visited) < _MOST:
                self.visited.update(batch.ids)
        self.version = known._version

    def keep(self, batch: Batch, old: Tensor, seen: Tensor | None) -> None:
        """Leave the step open; `seen` is None when every block had a value before."""
        self.batch, self.old, self.seen = batch, old, seen

    def take_back(self, batch: Batch, value: Tensor, known: Tensor) -> Batch:
        """Undo the open step; return its batch pooled with `batch`, to be applied as one.

        A second batch before the optimizer steps (gradient accumulation, or a step that a
        GradScaler skipped) holds more samples of the same g_i(w_t). Two corrections for one step
        would count it twice.
        """
        if self.batch is None or self.old is None:
            return batch
        value.index_copy_(0, self.batch.index, self.old)
        if self.seen is not None:
            known.index_copy_(0, self.batch.index, self.seen)
        return self.batch.merge(batch)

    def close(self) -> bool:
        """End the open step; say whether there was one."""
        if self.batch is None:
            return False
        self.batch = self.old = self.seen = None
        self.steps += 1
        return True

    def forget(self) -> None:
        """Drop the open step without counting it: what is written stays."""
        self.batch = self.old = self.seen = None
