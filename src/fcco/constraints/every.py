"""Constraints that are all looked at in every step, without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..limits import Limits, number_and_names
from ..terms import AbstractTerm
from ..tracker import InnerTracker, for_model
from ..tracker.blocks import Batch

__all__ = ["CompleteTracker", "EveryConstraint"]


class CompleteTracker(InnerTracker):
    """The values of the current batch, pooled over samples and ranks; no block may be absent."""

    call: str

    def _batch(self, *entries: Any, **options: Any) -> Batch:
        batch = super()._batch(*entries, **options)
        held, number = batch.index.shape[0], self.num_inner
        if held != number:
            raise ValueError(
                f"`{self.call}` looks at all {number} constraints in each step but this batch has "
                f"values of {held}; nothing was updated. For sampled constraints use a penalty "
                "method (`Penalized`)."
            )
        return batch


class EveryConstraint(AbstractTerm):
    """Constraints g_i <= tolerance_i of which each call gives every value.

    Args:
        call: the method's name, for the error text.
        model: the model, for the precision and the device.
        constraints: their number m, or their names.
        tolerance: one number or one per constraint.
        margin: aim for tolerance - margin.
    """

    def __init__(
        self,
        call: str,
        model: nn.Module,
        constraints: int | Sequence[str],
        tolerance: float | Sequence[float] | Tensor = 0.0,
        margin: float = 0.0,
    ) -> None:
        number, names = number_and_names(call, constraints)
        like = for_model(model, number).value
        tracker = CompleteTracker(
            number, gamma=1.0, correction=0.0, read="new", dtype=like.dtype, device=like.device
        )
        tracker.call = call
        super().__init__(tracker)
        self.limits = Limits(number, tracker.value, tolerance, margin, names, call=call)
        self.names = self.limits.names

    @property
    def updating(self) -> bool:
        """Whether a call now is part of the training, not an evaluation."""
        return self.training and torch.is_grad_enabled()

    def violation(self) -> Tensor:
        """g_i - tolerance_i in the last batch (positive: violated), NaN before the first."""
        excess = self.tracker.value.squeeze(-1) - self.limits.of(None)
        return torch.where(self.tracker.seen, excess, torch.nan)
