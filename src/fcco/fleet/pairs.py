"""Inner values from pairs of scores: the risks of `fcco.xrisk` with one label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..terms import AbstractTerm, BlockParameters
from ..xrisk import AUC, AveragePrecision, BinaryRisk, PartialAUC, TwoWayPartialAUC
from ..xrisk.binary import RankTerm, class_moments, smooth_ranks
from ..xrisk.pairs import PairMean, all_pair_means
from ..xrisk.partial_auc import Cutoff, hardest, own_thresholds, shared_cutoff, upper_quantile
from .hyperparameters import Hyperparameter, Template
from .run import Data, Run, State, Unsupported, all_blocks

__all__ = ["PairValues"]

THRESHOLDS = "pair_thresholds"
"""The state behind s_i: one cut-off, or a threshold for each positive."""


class PairHyperparameters(NamedTuple):
    """The numbers of the inner values of a risk."""

    pair_mean: dict[str, Hyperparameter]
    positives: Hyperparameter  # samples that ranks count, None for other values
    negatives: Hyperparameter  # likewise, and for a shared cut-off those of the training set
    threshold_lr: Hyperparameter  # None unless every positive has a threshold


@dataclass(frozen=True)
class PairValues:
    """From the scores of a batch to the inner values of a risk.

    Args:
        kind: `"moments"` of the classes, `"ranks"` of positives, or a mean for each `"row"`.
        activation: `"sigmoid"`, or None: what is applied to the scores.
        pair_mean: what is computed of the pairs.
        per_positive: the blocks are the positives; otherwise there is one.
        shared: whether all positives share a cut-off.
    """

    kind: str
    activation: str | None
    pair_mean: Template
    per_positive: bool
    shared: bool

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
        shared, step, state = False, None, {}
        sizes = (term.positives, term.negatives) if isinstance(term, RankTerm) else (None, None)
        if risk.pair_mean.kind == "cvar":
            assert isinstance(risk, (PartialAUC, TwoWayPartialAUC))
            table = term.tables[-1]
            assert isinstance(table, BlockParameters)
            shared = risk.threshold == "shared"
            step = None if shared else risk.threshold_lr
            sizes = (None, table.negatives) if isinstance(table, Cutoff) else sizes
            state = {THRESHOLDS: table.value.clone()}
        numbers = PairHyperparameters(of_mean, *sizes, step)
        return cls(kind, risk.activation, template, risk.per_positive, shared), numbers, state

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
            level, weight, changed = self._level(run, numbers, mean, positives, negatives, block)
            if self.kind == "moments":
                result = class_moments(positives, negatives)
            elif self.kind == "ranks":
                sides = [all_pair_means(mean, positives, side) for side in (positives, negatives)]
                sizes = numbers.positives, numbers.negatives
                result = smooth_ranks(torch.stack(sides, 1), *sizes, mean.surrogate)
            else:
                result = all_pair_means(mean, positives, negatives, level, weight)
                result = result if self.per_positive else result.mean().view(1)
            # Blocks are -1 in a batch with another number of positives than the first, which a GPU
            # was not asked about (`Fleet.step`): NaN freezes the run.
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
    ) -> tuple[Tensor | None, Tensor | None, State]:
        """The thresholds s_i of the positives of the batch, which negatives count, new state."""
        if mean.kind != "cvar":
            return None, None, {}
        positives, negatives, loss = positives.detach(), negatives.detach(), mean.surrogate
        share, table = mean.share, run.state[THRESHOLDS]
        if self.shared:
            exact = (share >= 1) | (numbers.negatives <= negatives.shape[0])
            cutoff = upper_quantile(negatives, share, exact)
            moved = shared_cutoff(torch.where(table.isnan(), cutoff, table), cutoff)
            cutoff = torch.where(exact, cutoff, moved)
            weight = hardest(negatives, cutoff, share)
            return loss.value_and_slope(cutoff - positives)[0], weight, {THRESHOLDS: cutoff}
        cutoff = upper_quantile(negatives, share)
        rows, first = table.index_select(0, block), loss.value_and_slope(cutoff - positives)[0]
        level = torch.where(rows.isnan(), first, rows)
        moved = own_thresholds(mean, positives, negatives, level, numbers.threshold_lr)
        blocks = all_blocks(block, table.shape[0], table)
        stepped = blocks.sums(moved) / blocks.counts
        return level, None, {THRESHOLDS: torch.where(blocks.counts > 0, stepped, table)}
