"""The parts of Liu and Xu's method: all constraints in every call, and their maximum as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..inner import Measured, parse, split
from ..limits import Limits
from ..objective import Inner
from ..outer import PositiveMaximum
from ..reading import Index
from ..terms import OuterTerm, Smoothing
from ..tracker import InnerTracker, Tracked, for_model
from .base import ConstrainedObjective
from .every import CompleteTracker

__all__ = ["LargestPenalty", "LargestTerm", "RecursivePenalty", "recursive_tracker"]


def recursive_tracker(
    model: nn.Module, number: int, refresh_every: int, as_one: bool, **options: Any
) -> InnerTracker:
    """u+ = u + g(w_k) - g(w_{k-1}), refreshed; every batch must hold all constraints.

    Args:
        model: the model, for the precision and the device.
        number: m.
        refresh_every: q.
        as_one: one block of dimension m instead of m blocks.
        options: further options of `InnerTracker`.
    """
    options |= {"gamma": 0.0, "correction": 1.0, "read": "new", "refresh_every": refresh_every}
    if as_one:
        return for_model(model, 1, number, **options)
    like = for_model(model, number, **options).value
    tracker = CompleteTracker(number, **options | {"dtype": like.dtype, "device": like.device})
    tracker.call = "liu2025"
    return tracker


class LargestTerm(OuterTerm):
    r"""One penalty for the largest of m constraints, on the tracked vector of their values.

    .. math::
        \beta\,\bigl[\max_i\,(g_i(w) - \text{tolerance}_i)\bigr]_+

    Args:
        tracker: one block of dimension m.
        penalty: beta.
        smoothing: lambda of the penalty with its weight: the slope is beta times the projection
            of u / (lambda beta) onto {y >= 0, sum y <= 1}.
        tolerance: g_i <= tolerance_i, one number or one per constraint.
        margin: train for tolerance - margin.
        names: names of the constraints, for reports.
    """

    def __init__(
        self,
        tracker: InnerTracker,
        *,
        penalty: float,
        smoothing: Smoothing,
        tolerance: float | Sequence[float] | Tensor = 0.0,
        margin: float = 0.0,
        names: Sequence[str] | None = None,
    ) -> None:
        width: Smoothing  # (beta f)_lambda = beta f_(lambda beta)
        if callable(smoothing):
            width = lambda step: penalty * smoothing(step)  # noqa: E731
        else:
            width = penalty * smoothing
        super().__init__(PositiveMaximum(), tracker, width)
        self.penalty = penalty
        call = type(self).__name__
        self.limits = Limits(tracker.dim, tracker.value, tolerance, margin, names, call=call)

    def loss(self, tracked: Tracked) -> Tensor:
        """Value and slope of the smoothed penalty at the tracked vector."""
        excess = self.limits.excess(tracked.value)
        values, slope = self.smoothed.value_and_gradient(excess)
        return tracked.attach(self.penalty * values.sum(), self.penalty * slope)

    def value(self) -> Tensor:
        """The penalty itself at the tracked vector."""
        return self.penalty * self.outer(self.violation())

    def violation(self) -> Tensor:
        """How far each constraint is exceeded (positive: violated), NaN before the first call."""
        return torch.where(self.tracker.seen, self.tracker.value - self.limits.of(None), torch.nan)[
            0
        ]

    def multipliers(self) -> Tensor:
        """The slope along each constraint; together at most beta."""
        return self.multipliers_at(self.violation())

    def multipliers_at(self, violation: Tensor) -> Tensor:
        """The slope along each constraint at given violations."""
        slope = self.penalty * self.smoothed.gradient(violation + self.limits.margin)
        return torch.where(violation.isnan(), torch.nan, slope)


class RecursivePenalty(ConstrainedObjective):
    """A penalty on estimates that only follow differences, so no constraint may be left out.

    Made by `liu2025`. A batch that lacks a constraint is refused before anything changes.
    """

    method = "liu2025"
    samples_constraints = False

    @property
    def refresh_due(self) -> bool:
        """Whether the next step starts afresh from its batch, which should be a large one."""
        return self.term.tracker.refresh_due

    @property
    def _corrects(self) -> bool:
        # A refresh does not look at w_{k-1}: spare the forward pass on the large batch.
        return super()._corrects and not self.refresh_due


class LargestPenalty(RecursivePenalty):
    """The same with a `LargestTerm`: the values of all constraints are one block."""

    def forward(
        self,
        inner: Inner,
        index: Index = None,
        *,
        counts: Index = None,
        gradient: Inner | None = None,
        gradient_index: Index = None,
        past: Any = None,
    ) -> Tensor:
        """The loss of one batch with the values of all constraints; see `Compositional`."""
        if not index is counts is gradient_index is None:
            raise ValueError(
                "`liu2025(aggregate='max')` takes the values of all constraints in order, or by "
                "name: leave `index` and `counts` out."
            )
        return super().forward(
            lambda: self._as_row(inner()),
            gradient=None if gradient is None else lambda: self._as_row(gradient()),
            past=None if past is None else self._as_row(past),
        )

    def _as_row(self, result: Any) -> Any:
        """What the user's function returned, with the values as one block, shape (1, m)."""
        loss, values = split(result)
        limits = self.term.limits
        entry = parse("constraints", limits.names, values)
        if entry.value.shape != (limits.number,):
            raise ValueError(
                f"`liu2025(aggregate='max')` looks at all {limits.number} constraints in each step "
                f"but this batch has values of shape {tuple(entry.value.shape)}; nothing was "
                "updated."
            )
        order = slice(None) if entry.index is None else entry.index.argsort()
        row = entry.value[order].unsqueeze(0)
        if entry.surrogate is not None:
            row = Measured(row, entry.surrogate[order].unsqueeze(0))
        return row if loss is None else (loss, row)

    def _at(self, values: Tensor) -> tuple[Tensor, Tensor]:
        excess = values - self.term.limits.of(None)
        return excess, self.term.multipliers_at(excess)
