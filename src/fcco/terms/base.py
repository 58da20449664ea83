"""A term of an objective: what an objective asks of it."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from .._state import KeepsPrecision
from ..previous import PreviousParameters
from ..rules.arrays import Views
from ..tracker import InnerTracker, OpenStep, Tracked


class AbstractTerm(KeepsPrecision):
    """One term of an objective: the tracked values u_i, and the loss they make.

    An objective tracks the values of a batch and calls `loss` with the result. State changes when
    the optimizer has made its step: what `loss` wants to keep goes into `tracked.step`, see
    `OpenStep`. The other members are for methods whose step is more than a sum.
    """

    tracker: InnerTracker
    names: tuple[str, ...] | None = None  # of the blocks; values may then be given as a dict
    needs_objective: ClassVar[bool] = False  # the function must also return the ordinary loss g0
    watches_objective: ClassVar[bool] = False  # `observe` wants the rest of the loss
    beside_loss: ClassVar[bool] = False  # its weights are multipliers, that of the loss is 1
    overlapping: ClassVar[bool] = True  # a sample may be in several blocks, or in none
    # True if `loss` never synchronises with the host, so that it can be captured in a CUDA graph
    # (`fcco._replay`). It then receives padded batches; mask with `tracked.present`.
    branch_free: bool = False
    looks_back: bool = False  # `look_back` wants to be called before the forward pass
    replaces_objective: bool = False  # the step of the last `loss` leaves g0 out (SSG)

    def __init__(self, tracker: InnerTracker) -> None:
        super().__init__()
        self.tracker, self._views = tracker, Views()

    @property
    def views(self) -> dict[str, Any]:
        """The buffers as the rules see them; another dict when they have moved."""
        return self._views.found

    @property
    def step(self) -> int:
        """Optimizer steps this term had a part in."""
        return self.tracker.steps

    @property
    def kink_width(self) -> float | None:
        """The width of the rounded kink; None for a term without one."""
        return None

    @abc.abstractmethod
    def loss(self, tracked: Tracked) -> Tensor:
        """The scalar whose gradient is this term's part of the estimator G_t."""

    @abc.abstractmethod
    def value(self) -> Tensor:
        """The term's own value at the tracked u, without smoothing, over the blocks seen."""

    def look_back(
        self, pooled: Callable[[], Tracked], previous: PreviousParameters, independent: bool
    ) -> None:
        """Use the values of the batch at w_{t-1}, before the forward pass at w_t.

        `pooled` runs the user's function where the parameters are; it returns the values of this
        term, pooled over ranks and carrying their gradient. `independent`: another batch will
        carry the gradient.
        """

    def observe(self, step: OpenStep, loss: Tensor) -> None:
        """Take note of the rest of the loss: g0 and the other terms, averaged over ranks."""

    def forget(self) -> None:
        """Drop what is kept of the calls since the last optimizer step: they are given up."""

    def table(self) -> Tensor:
        """The u_i of the blocks seen so far, shape (seen,) or (seen, d1)."""
        return self.tracker.seen_rows()

    # Views of buffers, for the terms that keep some, are renewed when these move.

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._views.found = {}
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._views.found = {}  # `assign=True` takes other tensors
        super()._load_from_state_dict(*arguments)
