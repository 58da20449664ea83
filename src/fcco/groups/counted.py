"""How a sampler counts, so that a run resumes exactly.

Every batch is a function of (seed, epoch, batch number) alone, so the state of a sampler is just
its seed and how far training has come: the epoch and the batches *consumed* in it. A resumed
sampler replays the draws of the epoch up to there, which touches no data. The draws come from a
private NumPy generator; no global random state is read or changed. (NumPy keeps its streams the
same across machines, but not across all of its versions.)
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import Sampler

from .. import _checks

__all__ = ["AbstractSampler"]

Batch_co = TypeVar("Batch_co", covariant=True)
Loaded = TypeVar("Loaded")


class AbstractSampler(Sampler[Batch_co], abc.ABC):
    """The counting that both samplers share: (seed, epoch, consumed).

    A new iteration starts where the count stands, and the count moves to the next epoch by
    itself. What counts as consumed:

    * `for batch in sampler.consume(loader)`: a batch counts from the moment the loop body has it,
      however many more the loader's workers have prefetched. So a checkpoint belongs after the
      step in the loop body, and holds exactly the batches trained on. The recommended loop.
    * `for batch in loader`: a batch counts when the loader asks for its indices. With
      `num_workers=0` that is the same; with workers the count runs ahead by the prefetched
      batches (up to `num_workers * prefetch_factor`), and a checkpoint would skip them.
    * Where the loop is not yours (a trainer with callbacks): call `advance(0)` once before
      training, then `advance()` after each step, instead of `consume`.
    * `batch = sampler.draw()`: no loader at all, the batch counts at once.
    """

    def __init__(self, call: str, batches_per_epoch: int, seed: int) -> None:
        _checks.integer(call, "batches_per_epoch", batches_per_epoch, 1)
        _checks.integer(call, "seed", seed, 0)
        self.seed = int(seed)
        self.batches_per_epoch = int(batches_per_epoch)
        self._epoch = 0
        self._consumed = 0
        self._by_hand = False  # `advance` counts
        self._loops = 0  # `consume` loops under way: these count
        self._drawing: tuple[int, int, Iterator[Batch_co]] | None = None

    @abc.abstractmethod
    def _stream(self, generator: np.random.Generator) -> Iterator[Batch_co]:
        """The endless batches of one epoch, in order, from that epoch's generator."""

    @property
    def epoch(self) -> int:
        """The epoch the next batch belongs to."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """Batches of this epoch that are consumed."""
        return self._consumed

    def __len__(self) -> int:
        """Batches per epoch (also when an iteration resumes in the middle of one)."""
        return self.batches_per_epoch

    def __iter__(self) -> Iterator[Batch_co]:
        """The remaining batches of the current epoch."""
        for batch in self._remaining():
            if not (self._by_hand or self._loops):
                self._count(1)
            yield batch

    def consume(self, loader: Iterable[Loaded]) -> Iterator[Loaded]:
        """The loader's batches, each counted as consumed when it is handed out.

        Args:
            loader: the loader that draws from this sampler, also wrapped, but not an iterator
                that has begun: what that one has prefetched would be counted twice.
        """
        self._loops += 1
        try:
            for batch in loader:
                self._count(1)
                yield batch
        finally:
            self._loops -= 1

    def advance(self, batches: int = 1) -> None:
        """Count batches as consumed; from the first call on, plain iteration no longer does."""
        _checks.integer(f"{type(self).__name__}.advance", "batches", batches, 0)
        self._by_hand = True
        self._count(batches)

    def draw(self) -> Batch_co:
        """The next batch, counted as consumed, for use without a loader; epochs follow on."""
        at = (self._epoch, self._consumed)
        if self._drawing is None or self._drawing[:2] != at:
            stream = self._remaining()
        else:
            stream = self._drawing[2]
        batch = next(stream)
        self._drawing = (at[0], at[1] + 1, stream)
        self._count(1)
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch; the current one is kept as it is, also if half done."""
        _checks.integer(f"{type(self).__name__}.set_epoch", "epoch", epoch, 0)
        if epoch != self._epoch:
            self._epoch, self._consumed = int(epoch), 0

    def state_dict(self) -> dict[str, int]:
        """The seed, the epoch and the batches consumed in it; the same on every rank."""
        return {"seed": self.seed, "epoch": self._epoch, "consumed": self._consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches consumed in `state`; to be called before iterating."""
        call = f"{type(self).__name__}.load_state_dict"
        for name in ("seed", "epoch", "consumed"):
            if name not in state:
                raise ValueError(f"`{call}(...)` needs the entry {name!r}; found: {list(state)}.")
            _checks.integer(call, name, state[name], 0)
        if state["consumed"] >= self.batches_per_epoch:
            raise ValueError(
                f"`{call}(...)` has consumed = {state['consumed']} but an epoch has only "
                f"{self.batches_per_epoch} batches: the state is that of another sampler."
            )
        self.seed = int(state["seed"])
        self._epoch, self._consumed = int(state["epoch"]), int(state["consumed"])
        self._drawing = None

    def _remaining(self) -> Iterator[Batch_co]:
        # A generator: it looks at the count when first asked for a batch, not when made, because
        # a loader with workers makes two iterators of its sampler and uses the second.
        stream = self._stream(np.random.default_rng([self.seed, self._epoch]))
        yield from itertools.islice(stream, self._consumed, self.batches_per_epoch)

    def _count(self, batches: int) -> None:
        epochs, self._consumed = divmod(self._consumed + batches, self.batches_per_epoch)
        self._epoch += epochs
