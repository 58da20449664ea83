"""Constraints that are all looked at in every step, without memory."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..tracker import for_model
from .base import AbstractTerm
from .limits import Equal, Limits, Tolerance, number_and_names

__all__ = ["UnsampledTerm"]


class UnsampledTerm(AbstractTerm):
    """Base of terms for constraints g_i <= tolerance_i of which each call gives every value.

    Args:
        call: the method's name, for the error text.
        model: the model, for the precision and the device.
        constraints: their number m, or their names.
        tolerance: one number or one per constraint.
        margin: aim for tolerance - margin.
        measure: measure the noise of the values, see `InnerTracker`.
    """

    def __init__(
        self,
        call: str,
        model: nn.Module,
        constraints: int | Sequence[str],
        tolerance: Tolerance = 0.0,
        margin: float = 0.0,
        measure: bool = False,
    ) -> None:
        number, names = number_and_names(call, constraints)
        tracker = for_model(
            model, number, gamma=1.0, correction=0.0, read="new", sampled=False, measure=measure
        )
        super().__init__(tracker)
        self.limits = Limits(number, tracker.value, tolerance, margin, names, call=call)
        self.names = self.limits.names
        if any(isinstance(limit, (Equal, tuple)) for limit in self.limits.written()):
            raise ValueError(
                f"`{call}(tolerance=...)` takes limits on one side: write (low, high) and `Equal` "
                "as two limits, `AtLeast(low)` and high, of one value, or use the default method."
            )

    def violation(self) -> Tensor:
        """g_i - tolerance_i in the last batch (positive: violated), NaN before the first."""
        return torch.where(self.tracker.seen, self.at(self.tracker.rows)[0], torch.nan)

    def at(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Violations at given values; the multipliers do not depend on them."""
        return self.limits.violation(values), self.multipliers()

    def signed(self, multipliers: Tensor) -> Tensor:
        """Multipliers of g_i, from those of the violations: negative for lower limits."""
        return multipliers * self.limits.side(self.tracker.rows)

    @abc.abstractmethod
    def multipliers(self) -> Tensor:
        """The multiplier of each constraint."""
