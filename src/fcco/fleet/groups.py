"""The estimator of weighted group losses: OOA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..weights import (
    Geometry,
    GroupWeights,
    Scaling,
    block_factor,
    estimated_losses,
    mirror_ascent,
)
from .member import State, Unsupported
from .run import Outcome, Run, Seen
from .values import attached, entries, in_two, pooled

__all__ = ["Adversary"]


@dataclass(frozen=True)
class Adversary:
    """Losses of groups under weights that an adversary moves, see `fcco.weights.GroupWeights`.

    Args:
        number: n.
        geometry: of the mirror step.
        scaling: whether sampled groups are scaled.
        adjusted: whether losses get a bonus when p moves.
    """

    number: int
    geometry: Geometry
    scaling: Scaling
    adjusted: bool
    remembers = False

    @classmethod
    def read_from(cls, term: GroupWeights) -> tuple[Adversary, dict[str, Any], State]:
        """The estimator of a term, its numbers and its state."""
        tracker = term.tracker
        if tracker.gamma != 1 or tracker.needs_previous or tracker.bounds is not None:
            raise Unsupported(
                "A fleet has `GroupWeights` on the losses of the batch alone: gamma=1, "
                "correction=0, no bounds."
            )
        if tracker.on_nonfinite == "skip":
            raise Unsupported("A fleet has no tracker with `on_nonfinite='skip'`.")
        numbers: dict[str, Any] = {"ascent": term.rate, "cap": term.cap}
        if term.bonus is not None:
            numbers["bonus"] = term.bonus
        own = cls(tracker.num_inner, term.geometry, term.scaling, term.bonus is not None)
        state = {"group_weights": term.current, "tracked": tracker.value[:, 0]}
        return own, numbers, {name: value.clone() for name, value in state.items()}

    def gradient(self, run: Run) -> Outcome:
        """G_t of one run, with the new weights."""

        def decide(fresh: Tensor) -> tuple[Tensor, State]:
            numbers, held = run.numbers, run.state
            losses, present = pooled(fresh, run.index, self.number)
            losses = losses.where(present, held["tracked"])
            blocks = self.number if run.index is None else present.to(losses).sum().clamp(min=1)
            factor = block_factor(self.scaling, self.number, blocks)
            estimate = estimated_losses(losses, present, factor, numbers.get("bonus"))
            weights = mirror_ascent(
                held["group_weights"], estimate, numbers["ascent"], numbers["cap"], self.geometry
            )
            return weights * factor, {"group_weights": weights, "tracked": losses}

        def scalar(seen: Seen, slope: Tensor, index: Tensor | None) -> Tensor:
            return seen.loss + attached(entries(seen, carrier=True), slope, index)

        return in_two(run, decide, scalar)
