"""The estimator of weighted group losses: OOA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..rules.group_weights import Geometry, Scaling, ascend, block_factor
from ..terms import GroupWeights
from .coupled import check_tracker
from .hyperparameters import Hyperparameter
from .run import Estimate, Run, State, Unsupported

__all__ = ["Adversary"]


class AdversaryHyperparameters(NamedTuple):
    """The numbers of a `GroupWeights`."""

    ascent: Hyperparameter  # eta_p
    cap: Hyperparameter  # the largest weight of a group


@dataclass(frozen=True)
class Adversary:
    """Losses of groups under weights that an adversary moves, see `fcco.terms.GroupWeights`."""

    number: int  # n
    geometry: Geometry  # of the mirror step
    scaling: Scaling  # whether losses of sampled groups get the factor n/B1
    needs_previous = False

    @classmethod
    def of(cls, term: GroupWeights) -> tuple[Adversary, AdversaryHyperparameters, State]:
        """The estimator of a term, its numbers and its state."""
        tracker = term.tracker
        if tracker.gamma != 1 or tracker.needs_previous:
            raise Unsupported(
                "A fleet has `GroupWeights` on the losses of the batch: gamma=1, correction=0."
            )
        check_tracker(tracker)
        adversary = cls(tracker.num_inner, term.geometry, term.scaling)
        state = {"group_weights": term.weights.clone(), "tracked": tracker.rows.clone()}
        return adversary, AdversaryHyperparameters(term.rate, term.cap), state

    def gradient(self, run: Run, hyperparameters: AdversaryHyperparameters) -> Estimate:
        """G_t of one run, with the new weights."""
        numbers: AdversaryHyperparameters = run.narrow(hyperparameters)
        table, index = run.state["tracked"], run.data.index
        values, forward = run.passes(table)
        losses, present = run.means(values, index, table)
        losses = losses.where(present, table)
        blocks = self.number if index is None else present.to(losses).sum()
        factor = block_factor(self.scaling, self.number, blocks)
        settings = (numbers.ascent, numbers.cap, self.geometry, factor)
        weights = ascend(run.state["group_weights"], losses, present, *settings)
        changed = {"group_weights": weights, "tracked": losses}
        return forward.estimate(weights * factor, changed, values)
