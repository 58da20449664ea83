"""AUC, average precision, and the AUC of bags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from ..outer import ClassSeparation, Linear, Ratio
from ..terms import NestedTerm
from .base import BinaryRisk, Label, New, RiskTerm, ScoreRisk, as_labels, average, check_gamma
from .pairs import pair_means
from .surrogates import Surrogate, find_surrogate

__all__ = ["AUC", "AveragePrecision", "MultiInstanceAUC"]


def class_moments(positives: Tensor, negatives: Tensor) -> Tensor:
    """The means of h and h^2 of both classes, (4,)."""
    sides = (positives, negatives)
    return torch.stack([part for h in sides for part in (h.mean(), h.square().mean())])


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
        labels: 0 or 1 for each sample of the training set; or several labels, see `BinaryRisk`.
        loss: see above.
        margin: m, of the first two forms and of the surrogate.
        surrogate: l of the pairwise form, a name or a `Surrogate`.
        gamma: weight of the new class means; `"auto"` weighs noise against lag.
        options: `names`, `process_group`, see `BinaryRisk`.

    Example:
        >>> import torch, fcco
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> x, y = torch.randn(8, 2), torch.arange(8) < 2
        >>> risk = fcco.xrisk.AUC(model, optimizer, labels=y)
        >>> risk(lambda: model(x).squeeze(1), y, torch.arange(8)).backward()

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
        **options: Any,
    ) -> None:
        _checks.one_of("AUC", "loss", loss, ("margin", "squared", "pairwise"))
        _checks.positive("AUC", "margin", margin)
        check_gamma("AUC", gamma)
        self.loss, self.margin, self.gamma = loss, margin, gamma
        own = None if isinstance(surrogate, Surrogate) else margin  # has its own
        self.surrogate = find_surrogate("AUC", surrogate, own)
        super().__init__(model, optimizer, labels, **options)

    def term_of(self, label: Label, model: nn.Module) -> RiskTerm:
        if self.loss == "pairwise":  # f is linear: there is nothing to gain from tracking
            return RiskTerm(Linear(), average(model, 1, gamma=1.0))
        outer = ClassSeparation(self.margin, hinge=self.loss == "margin")
        return RiskTerm(outer, average(model, 1, 4, gamma=self.gamma))

    def values(
        self, label: Label, scores: Tensor, positives: int, block: Tensor
    ) -> tuple[Tensor, New]:
        sides = scores[:positives], scores[positives:]
        if self.loss == "pairwise":
            return pair_means(self.surrogate, *sides).mean().view(1), ()
        return class_moments(*sides).view(1, 4), ()


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
        labels: 0 or 1 for each sample of the training set; or several labels (mAP).
        activation: what is applied to the scores before they are compared. `"sigmoid"` bounds their
            differences, so that no pair outweighs all others; your scores are logits then.
        prevalence: the share of positives at which precision is taken, unless that of the training
            set is larger; 0 for the latter. Of very many negatives those far below a positive add
            up, because a surrogate is not quite 0 there; to count them less brings the gradient
            back to the top of the list.
        surrogate: l, a name or a `Surrogate`.
        margin: of the surrogate; 1 unless given, 5 without activation.
        gamma: weight of the new ranks; `"auto"` weighs noise against lag.
        options: `names`, `process_group`, see `BinaryRisk`.

    Example:
        >>> import torch, fcco
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> x, y = torch.randn(8, 2), torch.arange(8) < 2
        >>> risk = fcco.xrisk.AveragePrecision(model, optimizer, labels=y)
        >>> risk(lambda: model(x).squeeze(1), y, torch.arange(8)).backward()

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
        **options: Any,
    ) -> None:
        check_gamma("AveragePrecision", gamma)
        _checks.in_interval("AveragePrecision", "prevalence", prevalence, 0.0, 1.0, open_high=True)
        self.prevalence, self.gamma = prevalence, gamma
        self.surrogate = self._compare(activation, surrogate, margin)
        self._at_zero = self.surrogate.value_and_slope(torch.zeros(1))[0].item()
        super().__init__(model, optimizer, labels, **options)

    def term_of(self, label: Label, model: nn.Module) -> RiskTerm:
        return RiskTerm(Ratio(), average(model, label.positives, 2, gamma=self.gamma))

    def values(
        self, label: Label, scores: Tensor, positives: int, block: Tensor
    ) -> tuple[Tensor, New]:
        """The ranks of each positive among the positives and among all, for the training set."""
        means = pair_means(self.surrogate, scores[:positives], scores, split=positives)
        above, below = means.unbind(1)
        negatives, wanted = label.negatives, self.prevalence
        if wanted:
            negatives = min(negatives, label.positives * (1 - wanted) / wanted)
        # The pair of a positive with itself, of loss l(0), does not count. Without any other
        # positive in the batch, what these would add is not known, and taken as none.
        share = (label.positives - 1) / max(positives - 1, 1)
        rank = 1 + share * (positives * above - self._at_zero)
        return torch.stack([rank, rank + negatives * below], dim=1), ()


class MultiInstanceAUC(ScoreRisk):
    r"""Maximise the AUC of bags of instances, with a smooth maximum as the score of a bag.

    .. math::
        H_b(w) = \tau\log\operatorname*{mean}_{x\in b} e^{h(w; x)/\tau}, \qquad
        \min_w\; \operatorname{Var}_+ H + \operatorname{Var}_- H
            + [\,m + \mathbb E_- H - \mathbb E_+ H\,]_+^2

    Three levels (`fcco.terms.NestedTerm`): a block is a bag, g_b = mean exp(h / tau) is tracked in
    log space from the instances of the bag that a batch holds; the class means of H and H^2 are
    tracked too; f is `fcco.outer.ClassSeparation`. Bags may be larger than a batch.

    Args:
        model: your model, which scores instances.
        optimizer: your optimizer.
        labels: 0 or 1 for each bag of the training set.
        temperature: tau; small is the maximum over the instances, large their mean.
        margin: m.
        gamma: weight of the new mean of a bag.
        gamma_classes: weight of the new class means; `"auto"` weighs noise against lag.
        process_group: see `Compositional`.

    Example:
        >>> import torch, fcco
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> risk = fcco.xrisk.MultiInstanceAUC(model, optimizer, labels=[1, 0, 0])
        >>> x, bag = torch.randn(6, 2), torch.tensor([0, 0, 1, 1, 2, 2])
        >>> risk(lambda: model(x).squeeze(1), bag).backward()

    References:
        D. Zhu et al., Provable multi-instance deep AUC maximization with stochastic pooling, 2023
        (MIDAM).
    """

    _gathers = False
    labels: Tensor

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        *,
        temperature: float = 1.0,
        margin: float = 1.0,
        gamma: float = 0.5,
        gamma_classes: float | Literal["auto"] = "auto",
        process_group: Any = "auto",
    ) -> None:
        _checks.positive("MultiInstanceAUC", "temperature", temperature)
        _checks.positive("MultiInstanceAUC", "margin", margin)
        _checks.in_interval("MultiInstanceAUC", "gamma", gamma, 0.0, 1.0, open_low=True)
        check_gamma("MultiInstanceAUC", gamma_classes, "gamma_classes")
        table = as_labels("`MultiInstanceAUC(labels=...)`", labels)
        if table.dim() != 1 or not 0 < int(table.sum()) < len(table):
            raise ValueError(
                "`MultiInstanceAUC(labels=...)` must be a vector with positive (1) and negative "
                "(0) bags."
            )
        self.temperature = temperature
        bags = average(model, len(table), gamma=gamma, log_space=True)
        means = average(model, 1, 4, gamma=gamma_classes)
        term = NestedTerm(ClassSeparation(margin), self._class_means, bags, means)
        super().__init__(model, optimizer, term, process_group)
        self.register_buffer("labels", table.to(bags.value.device), persistent=False)

    def _class_means(self, u: Tensor, index: Tensor) -> Tensor:
        """The class means of H and H^2 over some bags."""
        scores, positive = self.temperature * u, self.labels[index] == 1
        if bool(positive.all()) or not bool(positive.any()):
            raise ValueError(
                "`MultiInstanceAUC`: a batch must hold bags of both classes, but the labels of its "
                f"{len(index)} bags are all {int(positive[0])}; nothing was updated."
            )
        return class_moments(scores[positive], scores[~positive])

    def forward(self, function: Callable[[], Any], bag: Any) -> Tensor:
        """The loss of one batch of instances.

        Args:
            function: runs the model and returns the scores of instances, (B,), or (loss, scores).
            bag: number of the bag of each instance, (B,); there must be bags of both classes.
        """
        loss, scores = self._scores(function)
        values = scores / self.temperature
        return self.objective(lambda: values if loss is None else (loss, values), bag)
