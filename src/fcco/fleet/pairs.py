"""Inner values from pairs of scores: the risks of `fcco.xrisk` with one label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..terms import AbstractTerm, BlockParameters
from ..tracker import InnerTracker
from ..xrisk import AUC, AveragePrecision, BinaryRisk, PartialAUC, TwoWayPartialAUC
from ..xrisk.binary import class_moments, smooth_ranks
from ..xrisk.pairs import PairMean, all_pair_means, share_above
from .coupled import Tracking, TrackingHyperparameters
from .hyperparameters import Hyperparameter, Template
from .run import Data, Run, State, Unsupported, all_blocks

__all__ = ["PairValues"]

CUTOFF = "cutoff."
"""Prefix of the state of the tracker of the cut-off."""
THRESHOLDS = "thresholds_of_positives"


class PairHyperparameters(NamedTuple):
    """The numbers of the inner values of a risk."""

    pair_mean: dict[str, Hyperparameter]
    positives: Hyperparameter  # of the training set
    negatives: Hyperparameter
    cutoff: TrackingHyperparameters | None  # None unless a cut-off is tracked
    threshold_lr: Hyperparameter  # None unless every positive has a threshold


@dataclass(frozen=True)
class PairValues:
    """From the scores of a batch to the inner values of a risk.

    Args:
        kind: `"moments"` of the classes, `"ranks"` of positives, or a mean for each `"row"`.
        activation: `"sigmoid"`, or None: what is applied to the scores.
        pair_mean: what is computed of the pairs.
        per_positive: the blocks are the positives; otherwise there is one.
        cutoff: how the cut-off of `threshold="shared"` is tracked; None without.
    """

    kind: str
    activation: str | None
    pair_mean: Template
    per_positive: bool
    cutoff: Tracking | None

    @classmethod
    def of(
        cls, risk: BinaryRisk, term: AbstractTerm
    ) -> tuple[PairValues, PairHyperparameters, State]:
        """The inner values of a risk, their numbers and their state."""
        if not isinstance(risk, (AUC, AveragePrecision, PartialAUC, TwoWayPartialAUC)):
            raise Unsupported(f"A fleet has no rule for the pairs of {type(risk).__name__}.")
        kind = "row"
        if isinstance(risk, AveragePrecision):
            kind = "ranks"
        elif isinstance(risk, AUC) and term.tracker.dim > 1:
            kind = "moments"
        template, of_mean = Template.of(risk.pair_mean)
        cutoff, of_cutoff, step, state = None, None, None, {}
        if risk.pair_mean.kind == "cvar":
            assert isinstance(risk, (PartialAUC, TwoWayPartialAUC))
            kept = term.tables[-1]
            if isinstance(kept, InnerTracker):
                cutoff, of_cutoff, found = Tracking.of(kept)
                state = {CUTOFF + name: value for name, value in found.items()}
            elif isinstance(kept, BlockParameters):
                step, state = risk.threshold_lr, {THRESHOLDS: kept.value.clone()}
        numbers = PairHyperparameters(
            of_mean, risk.label.positives, risk.label.negatives, of_cutoff, step
        )
        values = cls(kind, risk.activation, template, risk.per_positive, cutoff)
        return values, numbers, state

    def bind(self, run: Run, hyperparameters: PairHyperparameters) -> Run:
        """A run whose function returns the inner values, not the scores."""
        numbers: PairHyperparameters = run.narrow(hyperparameters)
        batch, _, index, _, order = run.data
        assert index is not None and order is not None
        block, number = index.clamp(min=0), index.shape[0]
        mean: PairMean = self.pair_mean.build(numbers.pair_mean)

        def values(scores: Tensor) -> tuple[Tensor, State]:
            scores = scores.squeeze(-1) if scores.dim() > 1 else scores
            if scores.shape != order.shape:
                raise ValueError(
                    "The function of this fleet must return one score per sample, shape "
                    f"{tuple(order.shape)}, but they have shape {tuple(scores.shape)}."
                )
            scores = scores.index_select(0, order)
            scores = scores if self.activation is None else scores.sigmoid()
            positives, negatives = scores[:number], scores[number:]
            level, changed = self._level(run, numbers, mean, positives, negatives, block)
            if self.kind == "moments":
                result = class_moments(positives, negatives)
            elif self.kind == "ranks":
                sizes = numbers.positives, numbers.negatives
                result = smooth_ranks(all_pair_means, mean, positives, negatives, *sizes)
            else:
                result = all_pair_means(mean, positives, negatives, level)
                result = result if self.per_positive else result.mean().view(1)
            # The number of positives was another one: this freezes the run.
            return torch.where((index < 0).any(), torch.nan, result), changed

        data = Data(batch, index=block if self.per_positive else None)
        return run._replace(data=data, values=values)

    def _level(
        self,
        run: Run,
        numbers: PairHyperparameters,
        mean: PairMean,
        positives: Tensor,
        negatives: Tensor,
        block: Tensor,
    ) -> tuple[Tensor | None, State]:
        """The thresholds s_i of the positives of the batch, and the new state behind them."""
        if mean.kind != "cvar":
            return None, {}
        positives, negatives, loss = positives.detach(), negatives.detach(), mean.surrogate
        cutoff = _quantile(negatives, 1 - mean.share)
        if self.cutoff is not None:
            assert numbers.cutoff is not None
            own = {k.removeprefix(CUTOFF): v for k, v in run.state.items() if k.startswith(CUTOFF)}
            tracker = run._replace(state=own, data=Data(None))
            update = self.cutoff.update(tracker, numbers.cutoff, cutoff.view(1), None)
            changed = {CUTOFF + name: value for name, value in update.state.items()}
            return loss.value_and_slope(update.u - positives)[0], changed
        table = run.state[THRESHOLDS]
        rows, first = table.index_select(0, block), loss.value_and_slope(cutoff - positives)[0]
        level = torch.where(rows.isnan(), first, rows)
        spread = loss.value_and_slope(negatives - positives.mean())[0].std(correction=0)
        slope = 1 - share_above(mean, positives, negatives, level) / mean.share
        blocks = all_blocks(block, table.shape[0], table)
        stepped = blocks.sums(level - numbers.threshold_lr * spread * slope) / blocks.counts
        return level, {THRESHOLDS: torch.where(blocks.counts > 0, stepped, table)}


def _quantile(values: Tensor, share: Tensor | float) -> Tensor:
    """`torch.quantile`, which looks at the value of a tensor `share` and cannot be mapped."""
    ordered = values.sort().values
    place = share * (values.shape[0] - 1) * torch.ones_like(ordered[0])
    below = place.floor()
    pair = ordered.index_select(0, torch.stack([below, place.ceil()]).long())
    return torch.lerp(pair[0], pair[1], place - below)
