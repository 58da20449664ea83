"""AUC and average precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from ..outer import ClassSeparation, Linear, Ratio
from ..terms import CoupledTerm
from ..tracker import for_model
from .base import BinaryRisk, Label, Proposals, check_gamma
from .pairs import PairMean, pair_means, two_means
from .surrogates import LOGIT_MARGIN, Surrogate, find_surrogate

__all__ = ["AUC", "AveragePrecision"]


def class_moments(positives: Tensor, negatives: Tensor) -> Tensor:
    """The means of h and h^2 of both classes, (1, 4); pure."""
    sides = [positives.mean(), positives.square().mean()]
    sides += [negatives.mean(), negatives.square().mean()]
    return torch.stack(sides).view(1, 4)


def smooth_ranks(
    means: Tensor, all_positives: Any, all_negatives: Any, surrogate: Surrogate
) -> Tensor:
    """The rank of each positive of a batch among the positives and among all, (P, 2); pure.

    Args:
        means: of the losses of each positive against all positives and all negatives of the batch,
            (P, 2).
        all_positives: number of positives of the training set.
        all_negatives: number of its negatives.
        surrogate: l.
    """
    above, below = means.unbind(1)
    # The pair of a positive with itself, of loss l(0), does not count. Without any other positive
    # in the batch, what these would add is not known, and taken as none.
    number = means.shape[0]
    share = (all_positives - 1) / max(number - 1, 1)
    rank = 1 + share * (number * above - surrogate.at_zero)
    return torch.stack([rank, rank + all_negatives * below], dim=1)


class AUC(BinaryRisk):
    r"""Maximise the area under the ROC curve.

    With scores h, positives i and negatives j,

    .. math::
        \text{"margin": } \min_w\; \operatorname{Var}_+ h + \operatorname{Var}_- h
            + [\,m + \mathbb E_- h - \mathbb E_+ h\,]_+^2, \qquad
        \text{"pairwise": } \min_w\; \operatorname*{mean}_{i,j}\, \ell(h_j - h_i)

    and `"squared"` is `"margin"` without the hinge, the mean of (m + h_j - h_i)^2 over all pairs.
    One block; g is the vector of the class means of h and h^2, which is tracked, and f is
    `fcco.outer.ClassSeparation`: a plain minimum, where AUCM solves a min-max problem. The
    pairwise form is a plain mean and needs no tracking.

    Args:
        model: your model.
        optimizer: your optimizer.
        labels: 0 or 1 for each sample of the training set, (N,); or (N, T) for T labels, NaN where
            unknown, and the risk is the mean over labels.
        loss: see above.
        margin: m, of the first two forms and of the surrogate.
        surrogate: l of the pairwise form, a name or a `Surrogate`.
        gamma: weight of the new class means; `"auto"` weighs noise against lag.
        names: names of the labels.
        process_group: see `Compositional`.

    Example:
        >>> import torch
        >>> from fcco import xrisk
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> x, y = torch.randn(8, 2), torch.tensor([1, 1, 0, 0, 0, 0, 0, 0])
        >>> risk = xrisk.AUC(model, optimizer, labels=y)
        >>> loss = risk(lambda: model(x).squeeze(1), y, torch.arange(8))
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()

    References:
        Z. Yuan et al., Large-scale robust deep AUC maximization, 2021 (AUCM).
    """

    per_positive = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        *,
        loss: Literal["margin", "squared", "pairwise"] = "margin",
        margin: float = 1.0,
        surrogate: str | Surrogate = "squared_hinge",
        gamma: float | Literal["auto"] = "auto",
        names: Sequence[str] | None = None,
        process_group: Any = "auto",
    ) -> None:
        _checks.one_of("AUC", "loss", loss, ("margin", "squared", "pairwise"))
        _checks.positive("AUC", "margin", margin)
        check_gamma("AUC", gamma)
        # A surrogate that is not a name has a margin of its own; this one has a default, and stays
        # that of the other forms.
        own = None if isinstance(surrogate, Surrogate) else margin
        pair_mean = PairMean(find_surrogate("AUC", surrogate, own))

        def make_term(label: Label) -> CoupledTerm:
            if loss == "pairwise":  # f is linear: there is nothing to gain from tracking
                return CoupledTerm(Linear(), for_model(model, 1, gamma=1.0, read="new"))
            tracker = for_model(model, 1, 4, gamma=gamma, correction=0.0, read="new")
            return CoupledTerm(ClassSeparation(margin, hinge=loss == "margin"), tracker)

        super().__init__(
            model, optimizer, labels, make_term, names=names, process_group=process_group
        )
        self.pair_mean = pair_mean

    def values(
        self,
        term: CoupledTerm,
        scores: Tensor,
        positives: int,
        block: Tensor,
        proposals: Proposals,
    ) -> Tensor:
        """The class means of h and h^2, or the mean over pairs."""
        if term.tracker.dim == 1:
            means = pair_means(self.pair_mean, scores[:positives], scores[positives:])
            return means.mean().view(1)
        return class_moments(scores[:positives], scores[positives:])


class AveragePrecision(BinaryRisk):
    r"""Maximise average precision (AP), the area under the precision-recall curve.

    Precision at the score of positive i is its rank among the positives over its rank among all.
    With ranks made smooth by a surrogate l of the pairs (l(0) = 1),

    .. math::
        \min_w\; -\frac1{n_+}\sum_{i:\,y_i=1} \frac{r_i^+(w)}{r_i(w)}, \qquad
        r_i^+ = 1 + \sum_{j \ne i:\,y_j=1} \ell(h_j - h_i), \quad
        r_i = r_i^+ + \sum_{j:\,y_j=0} \ell(h_j - h_i).

    A block is a positive; g_i = (r_i^+, r_i), which is tracked; f(u) = -u_1/u_2. From a batch the
    sums are estimated as class sizes times means over the class, without bias for any number
    of positives above one. The value of the loss is minus the estimated (surrogate) AP. With
    few positives, the sum over negatives is scaled down, see `prevalence`.

    **Train with cross-entropy first** (`fcco.xrisk.warm_start`). The gradient of AP comes from the
    top of the list: from random weights it learns slowly or not at all, after cross-entropy it
    moves what matters.

    Args:
        model: your model.
        optimizer: your optimizer.
        labels: 0 or 1 for each sample of the training set, (N,); or (N, T) for T labels, NaN where
            unknown: the risk is then the mean over labels (mAP).
        activation: what is applied to the scores before they are compared. `"sigmoid"` bounds their
            differences, so that no pair outweighs all others; your scores are logits then.
        prevalence: the share of positives at which precision is taken, unless that of the training
            set is larger; 0 for the latter. Of very many negatives those far below a positive add
            up, because a surrogate is not quite 0 there; to count them less brings the gradient
            back to the top of the list.
        surrogate: l, a name or a `Surrogate`.
        margin: of the surrogate; 1 unless given, 5 without activation.
        gamma: weight of the new ranks; `"auto"` weighs noise against lag.
        names: names of the labels.
        process_group: see `Compositional`.

    Example:
        >>> import torch
        >>> from fcco import xrisk
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> x, y = torch.randn(8, 2), torch.tensor([1, 1, 0, 0, 0, 0, 0, 0])
        >>> risk = xrisk.AveragePrecision(model, optimizer, labels=y)
        >>> loss = risk(lambda: model(x).squeeze(1), y, torch.arange(8))
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()

    References:
        Q. Qi et al., Stochastic optimization of areas under precision-recall curves with provable
        convergence, 2021 (SOAP). B. Wang and T. Yang, Finite-sum coupled compositional stochastic
        optimization: theory and applications, 2022 (SOX).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        *,
        activation: Literal["sigmoid"] | None = "sigmoid",
        prevalence: float = 0.2,
        surrogate: str | Surrogate = "squared_hinge",
        margin: float | None = None,
        gamma: float | Literal["auto"] = "auto",
        names: Sequence[str] | None = None,
        process_group: Any = "auto",
    ) -> None:
        check_gamma("AveragePrecision", gamma)
        usual = 1.0 if activation else LOGIT_MARGIN
        _checks.in_interval("AveragePrecision", "prevalence", prevalence, 0.0, 1.0, open_high=True)
        pair_mean = PairMean(find_surrogate("AveragePrecision", surrogate, margin, usual))

        def make_term(label: Label) -> CoupledTerm:
            options: dict[str, Any] = {"gamma": gamma, "correction": 0.0, "read": "new"}
            number = label.positives
            most = number * (1 - prevalence) / prevalence if prevalence else math.inf
            tracker = for_model(model, number, 2, **options)
            return RankTerm(number, min(label.negatives, most), tracker)

        super().__init__(
            model, optimizer, labels, make_term,
            activation=activation, names=names, process_group=process_group,
        )  # fmt: skip
        self.pair_mean = pair_mean
        if activation is not None or (margin is None and isinstance(surrogate, str)):
            self._seen = []

    def values(
        self,
        term: Any,
        scores: Tensor,
        positives: int,
        block: Tensor,
        proposals: Proposals,
    ) -> Tensor:
        """The two ranks of each positive of the batch, estimated for the whole training set."""
        means = two_means(self.pair_mean.surrogate, scores, positives)
        return smooth_ranks(means, term.positives, term.negatives, self.pair_mean.surrogate)


class RankTerm(CoupledTerm):
    """Minus the ratio of two ranks; knows how many samples of each class they count."""

    def __init__(self, positives: int, negatives: float, tracker: Any) -> None:
        super().__init__(Ratio(), tracker)
        self.positives, self.negatives = positives, negatives
