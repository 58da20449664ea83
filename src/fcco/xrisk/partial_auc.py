"""Partial AUC, one-way and two-way: exact by CVaR, smooth by KL."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from .._schedules import Smoothing
from ..outer import Linear, LogMeanExp
from ..terms import AbstractTerm, BlockParameters, CoupledTerm, CVaRTerm, NestedTerm
from ..tracker import NonFiniteValue, for_model, forgetting_log_track
from .base import BinaryRisk, Label, Proposals, check_gamma
from .pairs import PairMean, pair_means, share_above
from .surrogates import LOGIT_MARGIN, Surrogate, find_surrogate

__all__ = ["PartialAUC", "TwoWayPartialAUC"]


CUTOFF_RATE = 0.2
"""Weight of a batch in the shared cut-off. Its error counts only in second order: the risk has its
minimum over s there."""


def upper_quantile(values: Tensor, share: Any, exact: Any = False) -> Tensor:
    """The value that a share of the values is above, one of them if `exact`; pure.

    Otherwise it is interpolated, so that the mean over samples of a normal distribution is that of
    the distribution (type 9 of Hyndman and Fan).
    """
    ordered, number = values.sort(descending=True).values, values.shape[0]
    place, whole = share * (number + 0.25) - 0.625, share * number
    if not isinstance(place, Tensor):
        place = min(max(math.ceil(whole) - 1.0 if exact else place, 0.0), number - 1.0)
        low = int(place)
        return torch.lerp(ordered[low], ordered[math.ceil(place)], place - low)
    # Differs between the runs of a fleet.
    place = place if exact is False else torch.where(exact, whole.ceil() - 1, place)
    place = place.clamp(0, number - 1)
    below = place.floor()
    pair = ordered.index_select(0, torch.stack([below, place.ceil()]).long())
    return torch.lerp(pair[0], pair[1], (place - below).to(values))


def shared_cutoff(old: Tensor, batch: Tensor) -> Tensor:
    """The cut-off q after a batch: a running average of quantiles; pure."""
    return torch.lerp(old, batch, CUTOFF_RATE)


def hardest(negatives: Tensor, cutoff: Tensor, share: Any) -> Tensor:
    """The weights of negatives in the mean over the hardest, (M,); pure.

    Those at the cut-off itself count in part: they have what is left to a sum of 1.
    """
    over, wanted = negatives - cutoff, share * negatives.shape[0]
    above, at = (over > 0).sum(dtype=over.dtype), (over == 0).sum(dtype=over.dtype)
    # Divided by 0, if there are none at the cut-off: the quotient is then not used.
    part = ((wanted - above) / at).clamp(0, 1).to(over)
    return torch.heaviside(over, part) / wanted


class Cutoff(BlockParameters):
    """The shared cut-off q; knows how many negatives the training set has."""

    def __init__(self, negatives: int, like: Tensor) -> None:
        super().__init__(1, dtype=like.dtype, device=like.device)
        self.negatives = negatives


def own_thresholds(
    mean: PairMean, positives: Tensor, negatives: Tensor, level: Tensor, lr: Any
) -> Tensor:
    """The thresholds s_i after a gradient step; pure.

    The step is in units of the spread of the losses, so that their scale does not matter.
    """
    spread = mean.surrogate.value_and_slope(negatives - positives.mean())[0].std(correction=0)
    slope = 1 - share_above(mean, positives, negatives, level) / mean.share
    return level - lr * spread * slope


def _log_mean_power(power: float, u: Tensor, index: Tensor) -> Tensor:
    """The logarithm of the mean of u_i^power, from log u_i."""
    return ((power * u).logsumexp(0) - math.log(len(u))).view(1)


class _Partial(BinaryRisk):
    """What both have in common: the value of a positive against the hardest negatives.

    The arguments are those of `PartialAUC`, and `make_term`, which gives the term of a label from
    the settings of its trackers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        make_term: Callable[[Label, dict[str, Any]], AbstractTerm],
        *,
        max_fpr: float,
        form: Literal["cvar", "kl"],
        activation: Literal["sigmoid"] | None,
        surrogate: str | Surrogate,
        margin: float | None,
        gamma: float | Literal["auto"],
        temperature: float,
        threshold: Literal["shared", "own"],
        threshold_lr: float,
        names: Sequence[str] | None,
        process_group: Any,
    ) -> None:
        call = type(self).__name__
        _checks.in_interval(call, "max_fpr", max_fpr, 0.0, 1.0, open_low=True)
        _checks.one_of(call, "form", form, ("cvar", "kl"))
        _checks.one_of(call, "threshold", threshold, ("shared", "own"))
        _checks.positive(call, "temperature", temperature)
        _checks.positive(call, "threshold_lr", threshold_lr)
        check_gamma(call, gamma)
        threshold = "shared" if max_fpr == 1 else threshold  # every negative counts then
        found = find_surrogate(call, surrogate, margin, 1.0 if activation else LOGIT_MARGIN)
        if not found.monotone:
            raise ValueError(
                f"`{call}(surrogate={surrogate!r})` must never fall, so that the hardest negatives "
                "are those with the largest scores."
            )
        options: dict[str, Any] = {"gamma": gamma, "correction": 0.0, "read": "new"}
        if form == "kl":
            options |= {"log_space": True, "rule": forgetting_log_track}
            options["gamma"] = 0.9 if gamma == "auto" else gamma

        def with_thresholds(label: Label) -> AbstractTerm:
            term = make_term(label, options)
            like = term.tracker.value
            if form == "cvar" and threshold == "shared":
                term.keep("cutoff", Cutoff(label.negatives, like))
            elif form == "cvar":
                table = BlockParameters(label.positives, dtype=like.dtype, device=like.device)
                term.keep("thresholds_of_positives", table)
            return term

        super().__init__(
            model, optimizer, labels, with_thresholds,
            activation=activation, names=names, process_group=process_group,
        )  # fmt: skip
        kind = "cvar" if form == "cvar" else "log_mean_exp"
        self.pair_mean = PairMean(found, kind, share=max_fpr, temperature=temperature)
        self.threshold, self.threshold_lr = threshold, threshold_lr
        if activation is not None or (margin is None and isinstance(surrogate, str)):
            self._seen = []

    def _of_positives(
        self, term: AbstractTerm, scores: Tensor, number: int, block: Tensor, proposals: Proposals
    ) -> Tensor:
        """g_i of each positive of the batch."""
        positives, negatives = scores[:number], scores[number:]
        if self.pair_mean.kind != "cvar":
            return pair_means(self.pair_mean, positives, negatives)
        with torch.no_grad():
            table = term.tables[-1]  # the one kept above; a `CVaRTerm` has its own before it
            if self.training and self.threshold == "own":
                level, weight = self._own(table, positives, negatives, block, proposals), None
            else:
                cutoff = self._cutoff(table, negatives, proposals)
                level = self.pair_mean.surrogate.value_and_slope(cutoff - positives)[0]
                weight = hardest(negatives, cutoff, self.pair_mean.share)
        return pair_means(self.pair_mean, positives, negatives, level, weight)

    def _cutoff(self, table: Any, negatives: Tensor, proposals: Proposals) -> Tensor:
        """The cut-off q for a batch."""
        share = self.pair_mean.share
        if not self.training:
            return upper_quantile(negatives, share, exact=True)
        exact = share == 1 or len(negatives) >= table.negatives
        cutoff = upper_quantile(negatives, share, exact)
        if not math.isfinite(cutoff.item()):
            raise NonFiniteValue(
                f"Scores of negatives are infinite in `{type(self).__name__}`, so many that their "
                "cut-off is; nothing was updated."
            )
        if not exact:
            cutoff = shared_cutoff(table.read(None, cutoff.view(1)).to(cutoff), cutoff)
        proposals.append(functools.partial(table.propose, None, cutoff.view(1)))
        return cutoff

    def _own(
        self, table: Any, positives: Tensor, negatives: Tensor, block: Tensor, proposals: Proposals
    ) -> Tensor:
        """The thresholds s_i of the positives of a batch."""
        mean, block = self.pair_mean, block.to(table.value.device)
        cutoff = upper_quantile(negatives, mean.share)
        first = mean.surrogate.value_and_slope(cutoff - positives)[0]
        level = table.read(block, first=first).to(first)
        moved = own_thresholds(mean, positives, negatives, level, self.threshold_lr)
        proposals.append(functools.partial(table.propose, block, moved))
        return level


class PartialAUC(_Partial):
    r"""Maximise the area under the ROC curve up to a false positive rate (one-way partial AUC).

    Only the negatives with the largest scores matter, a share of `max_fpr` of them. With scores h,
    positives i, negatives j, and a surrogate l of the pairs,

    .. math::
        \text{"cvar": } \min_{w,s}\; \frac1{n_+}\sum_{i} \Bigl( s_i
            + \frac1{\text{max\_fpr}}\operatorname*{mean}_j\,[\,\ell(h_j - h_i) - s_i\,]_+ \Bigr),
        \qquad
        \text{"kl": } \min_w\; \frac1{n_+}\sum_i \tau\log\operatorname*{mean}_j
            e^{\ell(h_j - h_i)/\tau}.

    The first is exact: at its minimum over s it is the mean of l over all positives and the hardest
    negatives, the last of which counts in part. l never falls, so these are the same negatives for
    every positive, those above one cut-off q, and s_i is l(q - h_i). `threshold="shared"` keeps q,
    a running average over batches, exact when the batch holds all negatives; `"own"` keeps and
    steps an s_i for each positive, which is seen once in a while (SOPA). From 32 negatives in a
    batch `max_fpr=0.05` becomes a rate of 0.050 on all data if their scores are normal, 0.044 to
    0.060 if they are log-normal or uniform; with fewer than 0.6 / `max_fpr` of them it is too
    large, as q cannot be above their largest score. The second
    replaces the hardest negatives by soft weights on all of them, by a temperature instead of a
    share; a block is a positive, g_i is the mean of exponentials, tracked in log space, and
    f = tau log.

    Start from a model trained with cross-entropy (`fcco.xrisk.warm_start`).

    Args:
        model: your model.
        optimizer: your optimizer.
        labels: 0 or 1 for each sample of the training set, (N,); or (N, T) for T labels, NaN where
            unknown: the risk is then the mean over labels.
        max_fpr: the largest false positive rate that counts; 1 is AUC.
        form: see above; `"kl"` has a temperature in place of `max_fpr`.
        activation: `"sigmoid"` compares probabilities instead of the scores themselves.
        surrogate: l, a name or a `Surrogate`; it must not fall.
        margin: of the surrogate; 5 unless given, for scores that are logits; 1 with activation.
        gamma: weight of the new g_i, for `"kl"`: 0.9 unless given.
        temperature: tau of `"kl"`.
        threshold: see above.
        threshold_lr: step size of `"own"`, in units of the standard deviation of l(h_j - mean h_i)
            over the negatives of the batch.
        names: names of the labels.
        process_group: see `Compositional`.

    Example:
        >>> import torch
        >>> from fcco import xrisk
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> x, y = torch.randn(8, 2), torch.tensor([1, 1, 0, 0, 0, 0, 0, 0])
        >>> risk = xrisk.PartialAUC(model, optimizer, labels=y, max_fpr=0.5)
        >>> loss = risk(lambda: model(x).squeeze(1), y, torch.arange(8))
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()

    References:
        D. Zhu et al., When AUC meets DRO: optimizing partial AUC for deep learning with non-convex
        convergence guarantee, 2022 (SOPA, SOPA-s).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        *,
        max_fpr: float,
        form: Literal["cvar", "kl"] = "cvar",
        activation: Literal["sigmoid"] | None = None,
        surrogate: str | Surrogate = "squared_hinge",
        margin: float | None = None,
        gamma: float | Literal["auto"] = "auto",
        temperature: float = 0.1,
        threshold: Literal["shared", "own"] = "shared",
        threshold_lr: float = 0.1,
        names: Sequence[str] | None = None,
        process_group: Any = "auto",
    ) -> None:

        def make_term(label: Label, options: dict[str, Any]) -> CoupledTerm:
            if form == "kl":
                tracker = for_model(model, label.positives, **options)
                return CoupledTerm(LogMeanExp(temperature), tracker)
            # f is linear: there is nothing to gain from tracking.
            return CoupledTerm(Linear(), for_model(model, 1, gamma=1.0, read="new"))

        super().__init__(
            model, optimizer, labels, make_term, max_fpr=max_fpr, form=form, activation=activation,
            surrogate=surrogate, margin=margin, gamma=gamma, temperature=temperature,
            threshold=threshold, threshold_lr=threshold_lr, names=names,
            process_group=process_group,
        )  # fmt: skip
        self.per_positive = form == "kl"

    def values(
        self,
        term: CoupledTerm,
        scores: Tensor,
        positives: int,
        block: Tensor,
        proposals: Proposals,
    ) -> Tensor:
        """g_i of each positive, or their mean."""
        values = self._of_positives(term, scores, positives, block, proposals)
        return values if self.per_positive else values.mean().view(1)


class TwoWayPartialAUC(_Partial):
    r"""Maximise the part of the ROC curve with large true and small false positive rates.

    Only the positives with the lowest scores, a share of 1 - `min_tpr`, and the negatives with the
    largest, a share of `max_fpr`, matter. With scores h, positives i, negatives j, and a surrogate
    l of the pairs,

    .. math::
        \text{"cvar": } \min_w\;
        \mathrm{CVaR}_{1-\text{min\_tpr}}\bigl(g_1(w), \dots, g_{n_+}(w)\bigr), \qquad
        g_i(w) = \mathrm{CVaR}_{\text{max\_fpr}}\bigl\{\ell(h_j - h_i)\bigr\}_j

    .. math::
        \text{"kl": } \min_w\; \tau'\log\operatorname*{mean}_i
            \Bigl(\operatorname*{mean}_j e^{\ell(h_j - h_i)/\tau}\Bigr)^{\tau/\tau'}

    The first is exact and has a non-smooth outer function, the case that SONEX was made for: a
    block is a positive, g_i (see `PartialAUC`) is tracked, and f = [. - s]_+ / (1 - min_tpr) is
    rounded as far as the estimates are off, with the exact s (`fcco.CVaRTerm`). The second has
    three levels (`fcco.terms.NestedTerm`), soft weights on both sides, and temperatures instead of
    rates.

    Start from a model trained with cross-entropy (`fcco.xrisk.warm_start`).

    Args:
        model: your model.
        optimizer: your optimizer.
        labels: 0 or 1 for each sample of the training set, (N,); or (N, T) for T labels, NaN where
            unknown: the risk is then the mean over labels.
        min_tpr: the smallest true positive rate that counts; 0 is one-way partial AUC.
        max_fpr: the largest false positive rate that counts.
        form: see above.
        activation: `"sigmoid"` compares probabilities instead of the scores themselves.
        surrogate: l, a name or a `Surrogate`; it must not fall.
        margin: of the surrogate; 5 unless given, for scores that are logits; 1 with activation.
        smoothing: how far the kink of CVaR is rounded, see `CVaRTerm`.
        gamma: weight of the new g_i; `"auto"` weighs noise against lag; for `"kl"` it is 0.9.
        temperature: tau of `"kl"`, for the negatives.
        positive_temperature: tau' of `"kl"`, for the positives.
        threshold: see `PartialAUC`; `"own"` is that of STACO.
        threshold_lr: see `PartialAUC`.
        names: names of the labels.
        process_group: see `Compositional`.

    Example:
        >>> import torch
        >>> from fcco import xrisk
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> x, y = torch.randn(8, 2), torch.tensor([1, 1, 0, 0, 0, 0, 0, 0])
        >>> risk = xrisk.TwoWayPartialAUC(model, optimizer, labels=y, min_tpr=0.5, max_fpr=0.5)
        >>> loss = risk(lambda: model(x).squeeze(1), y, torch.arange(8))
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()

    References:
        D. Zhu et al., When AUC meets DRO, 2022 (SOTA-s). L. Zhou et al., Stochastic primal-dual
        block coordinate methods for two-way partial AUC maximization, 2025 (STACO). X. Chen et al.,
        Stochastic momentum methods for non-smooth non-convex finite-sum coupled compositional
        optimization, 2025 (SONEX).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        *,
        min_tpr: float,
        max_fpr: float,
        form: Literal["cvar", "kl"] = "cvar",
        activation: Literal["sigmoid"] | None = None,
        surrogate: str | Surrogate = "squared_hinge",
        margin: float | None = None,
        smoothing: Smoothing = "auto",
        gamma: float | Literal["auto"] = "auto",
        temperature: float = 0.1,
        positive_temperature: float = 1.0,
        threshold: Literal["shared", "own"] = "shared",
        threshold_lr: float = 0.1,
        names: Sequence[str] | None = None,
        process_group: Any = "auto",
    ) -> None:
        _checks.in_interval("TwoWayPartialAUC", "min_tpr", min_tpr, 0.0, 1.0, open_high=True)
        _checks.positive("TwoWayPartialAUC", "positive_temperature", positive_temperature)
        if isinstance(smoothing, int | float):
            _checks.at_least("TwoWayPartialAUC", "smoothing", smoothing, 0.0)

        def make_term(label: Label, options: dict[str, Any]) -> AbstractTerm:
            if form == "kl":
                power = temperature / positive_temperature
                trackers = [for_model(model, n, **options) for n in (label.positives, 1)]
                middle = functools.partial(_log_mean_power, power)
                return NestedTerm(LogMeanExp(positive_temperature), middle, *trackers)
            measure = smoothing == "auto"
            tracker = for_model(model, label.positives, measure=measure, **options)
            return CVaRTerm(tracker, 1 - min_tpr, smoothing=smoothing)

        super().__init__(
            model, optimizer, labels, make_term, max_fpr=max_fpr, form=form, activation=activation,
            surrogate=surrogate, margin=margin, gamma=gamma, temperature=temperature,
            threshold=threshold, threshold_lr=threshold_lr, names=names,
            process_group=process_group,
        )  # fmt: skip

    def values(
        self,
        term: AbstractTerm,
        scores: Tensor,
        positives: int,
        block: Tensor,
        proposals: Proposals,
    ) -> Tensor:
        """g_i of each positive of the batch."""
        return self._of_positives(term, scores, positives, block, proposals)
