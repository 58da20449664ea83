"""Partial AUC, one-way and two-way."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from .._schedules import Smoothing
from ..outer import Linear
from ..terms import CVaRTerm
from ..tracker import NonFiniteValue, Tracked
from .base import RiskTerm, Values, average, table_for
from .binary import BinaryRisk, Label
from .pairs import pair_means

CUTOFF_RATE = 0.2
"""Weight of a batch in the cut-off, whose error counts in second order: s is the minimiser."""


def upper_quantile(values: Tensor, share: float, exact: bool) -> Tensor:
    """The value that a share of the values is above, one of them if `exact`.

    Otherwise it is interpolated, so that the mean over samples of a normal distribution is that of
    the distribution (type 9 of Hyndman and Fan).
    """
    ordered, number = values.sort(descending=True).values, len(values)
    place = math.ceil(share * number) - 1 if exact else share * (number + 0.25) - 0.625
    place = min(max(place, 0), number - 1)
    low = int(place)
    return torch.lerp(ordered[low], ordered[math.ceil(place)], place - low)


def hardest(negatives: Tensor, cutoff: Tensor, share: float) -> Tensor:
    """The weights of negatives in the mean over the hardest, (M,).

    Those at the cut-off itself count in part: they have what is left to a sum of 1.
    """
    over, wanted = negatives - cutoff, share * len(negatives)
    above, at = (over > 0).sum(dtype=over.dtype), (over == 0).sum(dtype=over.dtype)
    # Divided by 0, if there are none at the cut-off: the quotient is then not used.
    part = ((wanted - above) / at).clamp(0, 1).to(over)
    return torch.heaviside(over, part) / wanted


class PartialAUC(BinaryRisk):
    r"""Maximise the area under the ROC curve up to a false positive rate (one-way partial AUC).

    Only the negatives with the largest scores matter, a share of `max_fpr` of them. With scores h,
    positives i, negatives j, and a surrogate l of the pairs,

    .. math::
        \min_{w,s}\; \frac1{n_+}\sum_{i} \Bigl( s_i
            + \frac1{\text{max\_fpr}}\operatorname*{mean}_j\,[\,\ell(h_j - h_i) - s_i\,]_+ \Bigr).

    At its minimum over s this is the mean of l over all positives and the hardest negatives, the
    last of which counts in part. l never falls, so these are the same negatives for every positive,
    those above one cut-off q, and s_i is l(q - h_i). A running average over batches is kept of q;
    it is exact when the batch holds all negatives. From 32 negatives in a batch `max_fpr=0.05`
    becomes a rate of 0.050 on all data if their scores are normal, 0.044 to 0.060 if they are
    log-normal or uniform; with fewer than 0.6 / `max_fpr` of them it is too large.

    Start from a model trained with cross-entropy (`fcco.xrisk.warm_start`).

    Args:
        max_fpr: the largest false positive rate that counts; 1 is AUC, the mean over all pairs.
        options: further ones of `BinaryRisk`.

    References:
        D. Zhu et al., When AUC meets DRO: optimizing partial AUC for deep learning with non-convex
        convergence guarantee, 2022 (SOPA).
    """

    per_positive = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        *,
        max_fpr: float,
        **options: Any,
    ) -> None:
        _checks.in_interval(type(self).__name__, "max_fpr", max_fpr, 0.0, 1.0, open_low=True)
        self.max_fpr = max_fpr
        super().__init__(model, optimizer, labels, **options)

    def term_of(self, label: Label, model: nn.Module) -> Any:
        # f is linear: there is nothing to gain from tracking.
        term = RiskTerm(Linear(), average(model, 1, gamma=1.0))
        term.cutoff = table_for(term.tracker, 1)
        return term

    def values(self, label: Label, scores: Tensor, positives: int) -> Values:
        anchors, negatives = scores[:positives], scores[positives:]
        with torch.no_grad():
            cutoff, new = self._cutoff(label, negatives)
            weight = hardest(negatives, cutoff, self.max_fpr)
            level = self.pair_loss(cutoff - anchors)[0]
        values = pair_means(self.pair_loss, anchors, negatives, weight, level=level)
        return values if self.per_positive else values.mean().view(1), new

    def _cutoff(self, label: Label, negatives: Tensor) -> Values:
        """The cut-off q for a batch, and what is kept of it."""
        if not self.training:
            return upper_quantile(negatives, self.max_fpr, exact=True), ()
        exact = self.max_fpr == 1 or len(negatives) >= label.negatives
        cutoff = upper_quantile(negatives, self.max_fpr, exact)
        if not math.isfinite(cutoff.item()):
            raise NonFiniteValue(
                f"Scores of negatives are infinite in `{type(self).__name__}`, so many that their "
                "cut-off is; nothing was updated."
            )
        table = label.term.cutoff
        if not exact:
            cutoff = torch.lerp(table.read(None, cutoff.view(1)).to(cutoff), cutoff, CUTOFF_RATE)
        return cutoff, [(table, None, cutoff.view(1))]


class _PositivesTerm(CVaRTerm):
    """CVaR over the positives of a label, times its share in the mean over labels."""

    share: Any = 1.0

    def loss(self, tracked: Tracked) -> Tensor:
        return super().loss(tracked) * self.share


class TwoWayPartialAUC(PartialAUC):
    r"""Maximise the part of the ROC curve with large true and small false positive rates.

    Only the positives with the lowest scores, a share of 1 - `min_tpr`, and the negatives with the
    largest, a share of `max_fpr`, matter. With scores h, positives i, negatives j, and a surrogate
    l of the pairs,

    .. math::
        \min_w\;
        \mathrm{CVaR}_{1-\text{min\_tpr}}\bigl(g_1(w), \dots, g_{n_+}(w)\bigr), \qquad
        g_i(w) = \mathrm{CVaR}_{\text{max\_fpr}}\bigl\{\ell(h_j - h_i)\bigr\}_j,

    a non-smooth outer function, the case that SONEX was made for: a block is a positive, g_i (see
    `PartialAUC`) is tracked, and f = [. - s]_+ / (1 - min_tpr) is rounded as far as the estimates
    are off, with the exact s (`fcco.terms.CVaRTerm`). Train with cross-entropy first.

    Args:
        min_tpr: the smallest true positive rate that counts; 0 is one-way partial AUC.
        smoothing: how far the kink of CVaR is rounded, see `CVaRTerm`.
        options: further ones of `PartialAUC`, among them `max_fpr`.

    References:
        L. Zhou et al., Stochastic primal-dual block coordinate methods for two-way partial AUC
        maximization, 2025 (STACO). X. Chen et al., Stochastic momentum methods for non-smooth
        non-convex finite-sum coupled compositional optimization, 2025 (SONEX).
    """

    per_positive = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        *,
        min_tpr: float,
        smoothing: Smoothing = "auto",
        gamma: float | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        _checks.in_interval("TwoWayPartialAUC", "min_tpr", min_tpr, 0.0, 1.0, open_high=True)
        if isinstance(smoothing, int | float):
            _checks.at_least("TwoWayPartialAUC", "smoothing", smoothing, 0.0)
        self.min_tpr, self.smoothing, self.gamma = min_tpr, smoothing, gamma
        super().__init__(model, optimizer, labels, **options)

    def term_of(self, label: Label, model: nn.Module) -> Any:
        smoothing: Any = self.smoothing
        measure = smoothing == "auto"
        tracker = average(model, label.positives, gamma=self.gamma, measure=measure)
        term = _PositivesTerm(tracker, 1 - self.min_tpr, smoothing=smoothing)
        term.cutoff = table_for(tracker, 1)
        return term
