"""Risks of 0/1 labels: their base, AUC, average precision, and the AUC of bags."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import _checks
from ..inputs import ONLY
from ..objective import Compositional
from ..outer import ClassSeparation, Ratio
from ..terms import AbstractTerm
from ..tracker import InnerTracker, Tracked
from .base import Ints, RiskTerm, ScoreRisk, Values, average, read_scores
from .pairs import PairLoss, pair_means

LOGIT_MARGIN = 5.0
"""The margin between logits that a trained classifier has room for."""


@dataclass
class Label:
    """One of the labels: the sizes of its classes, and its term of the objective."""

    name: str
    positives: int
    negatives: int
    block: Ints  # number of each sample among the positives, -1 for others, (N,)
    term: Any = None


class BinaryRisk(ScoreRisk):
    """Base of risks over pairs of a positive and another sample.

    Pairs are built inside, on several ranks those of the global batch. A batch without positives,
    or without negatives, of a label says nothing about that label. One of several labels that comes
    in one of k batches has k times the weight there. (A subclass sets its settings before it calls
    this constructor, which asks for the terms.)

    Args:
        labels: 0 or 1 for each sample of the training set, (N,); or (N, T) for T labels, NaN where
            unknown, and the risk is the mean over labels.
        surrogate: l, the loss of a pair, a name of the table of `PairLoss`.
        margin: of the surrogate; unless given, 5 for logits and 1 for probabilities.
        activation: what is applied to the scores before they are compared. `"sigmoid"` bounds their
            differences, so that no pair outweighs all others; your scores are logits then.
        names: names of the labels.
        process_group: see `Compositional`.

    Subclasses that track have `gamma`, the weight of the new inner values; `"auto"` weighs noise
    against lag.
    """

    _empty = (
        "has no positive or no negative sample, and so no pair to learn from. Positives are rare: "
        "draw a fixed number of them with `fcco.groups.PositiveBatchSampler`."
    )
    visits: Tensor  # of several labels: calls, and those in which each label had pairs
    per_positive = True  # the blocks are the positives; otherwise one block for the whole class

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        *,
        surrogate: str = "squared_hinge",
        margin: float | None = None,
        activation: Literal["sigmoid"] | None = None,
        names: Sequence[str] | None = None,
        process_group: Any = "auto",
    ) -> None:
        call = type(self).__name__
        if activation is not None:
            _checks.one_of(call, "activation", activation, ("sigmoid",))
        if activation is not None or margin is None:
            self._seen = []  # other margins may be those of probabilities
        usual = 1.0 if activation else LOGIT_MARGIN
        self.pair_loss = PairLoss.read(call, surrogate, usual if margin is None else margin)
        self.activation = activation
        self._table = table = as_labels(f"`{call}(labels=...)`", labels)
        self._several = table.ndim == 2
        columns = table.T if self._several else [table]
        keys = [f"label {t}" for t in range(len(columns))] if self._several else [ONLY]
        if names is not None:
            keys = [str(name) for name in names]
            if not self._several or not len(keys) == len(set(keys)) == len(columns):
                raise ValueError(
                    f"`{call}(names=...)` must be different names, one for each of the columns of "
                    f"`labels`, of shape {table.shape}, but is: {keys}."
                )
        self.labels: list[Label] = []
        for key, column in zip(keys, columns, strict=True):
            positive = column == 1
            counts = int(positive.sum()), int((column == 0).sum())
            if 0 in counts:
                place = "" if key == ONLY else f" in `{key}`"
                raise ValueError(
                    f"`{call}(labels=...)` must hold positives (1) and negatives (0) but has "
                    f"{counts[0]} and {counts[1]}{place}."
                )
            label = Label(key, *counts, np.where(positive, positive.cumsum() - 1, -1))
            label.term = self.term_of(label, model)
            if self._several:
                label.term.branch_free = False  # its share changes with each call
            self.labels.append(label)
        terms = {label.name: label.term for label in self.labels}
        super().__init__(model, optimizer, terms if self._several else terms[ONLY], process_group)
        if self._several:
            zeros = torch.zeros(1 + len(keys), dtype=torch.int64)
            self.register_buffer("visits", zeros.to(self.labels[0].term.tracker.value.device))

    @abc.abstractmethod
    def term_of(self, label: Label, model: nn.Module) -> Any:
        """The term of a label."""

    @abc.abstractmethod
    def values(self, label: Label, scores: Tensor, positives: int) -> Values:
        """The inner values of a batch, one row for each positive or one in all; and new state.

        Scores of the positives come first.
        """

    def forward(  # type: ignore[override]
        self, function: Callable[[], Any], labels: Any, index: Any = None
    ) -> Tensor:
        """The loss of one batch.

        Args:
            function: runs the model and returns the scores, (B,), or (B, T) for T labels; or a pair
                (loss, scores) with an ordinary loss, a scalar or per-sample losses.
            labels: 0 or 1 for each sample, of the shape of the scores; NaN where unknown. Best on
                the CPU, as the loader gives them.
            index: number of each sample in the training set, (B,); None if the batch is the
                training set in order, or in `eval()` mode, where samples may be others.
        """
        others = index is None and not self.training
        ids, y = self._read_batch(labels, index, others)
        shape = y.shape
        ids, y, ranks = self._gathered(ids, y)
        loss, scores = self._scores(function, shape, ranks)
        compared = scores if self.activation is None else scores.sigmoid()
        values, blocks, new = {}, {}, []
        for t, label in enumerate(self.labels):
            column, own = (y[:, t], compared[:, t]) if self._several else (y, compared)
            positive, negative = np.flatnonzero(column == 1), np.flatnonzero(column == 0)
            if not (positive.size and negative.size):
                continue
            order = torch.from_numpy(np.concatenate([positive, negative]))
            # One gather, and one scatter backward.
            ordered = own.index_select(0, order.to(scores.device, non_blocking=True))
            values[label.name], found = self.values(label, ordered, positive.size)
            block = np.zeros(1, dtype=np.int64)
            if self.per_positive and not others:
                block = label.block[ids[positive]]
            blocks[label.name] = torch.from_numpy(block)
            new += found
        if not values:
            return self._without_pairs(loss, scores)
        self._look_at(scores)
        visits = self._weigh(values) if self._several else None
        if others:
            return self._loss_of_others(loss, values)
        result = self._tracked_loss(loss, values, blocks, new)
        if visits is not None and self.learning:
            self.visits.copy_(visits)
        return result

    def _weigh(self, present: Collection[str]) -> Tensor:
        """Give the labels of a batch their shares in its loss; returns the new `visits`.

        The share of a label with pairs in m of k calls is k / m over the number of labels: with
        probability p of that in a call, its expectation is kp E[1 / (1 + Bin(k-1, p))] =
        1 - (1-p)^k. An evaluation has the mean over the labels of the batch.
        """
        came = [True, *(label.name in present for label in self.labels)]
        visits = self.visits + self.visits.new_tensor(came)
        counts = visits.to(self.labels[0].term.tracker.value)
        shares = counts[0] / (counts[1:] * len(self.labels))
        for label, share in zip(self.labels, shares, strict=True):
            label.term.share = share if self.learning else 1 / len(present)
        return visits

    def _loss_of_others(self, loss: Tensor | None, values: Mapping[str, Tensor]) -> Tensor:
        """The loss of other samples, in parts if there are more positives than in training."""
        parts = [] if loss is None else [loss]
        for name, each in values.items():
            for part in each.split(self.terms[name].tracker.num_inner):
                value = self._tracked_loss(None, {name: part}, {name: torch.arange(len(part))}, ())
                parts.append(value * (len(part) / len(each)))
        return torch.stack(parts).sum()

    def value(self) -> Tensor:
        """The risk itself at the tracked values, over what was seen so far; a mean over labels."""
        return super().value() / len(self.labels)

    def _read_batch(self, labels: Any, index: Any, others: bool) -> tuple[Ints, NDArray[Any]]:
        """Numbers and labels of the samples of a call, checked; other samples have no numbers."""
        name, known = type(self).__name__, self._table
        y = as_labels(f"`{name}`: `labels`", labels)
        if y.shape[1:] != known.shape[1:]:
            raise ValueError(
                f"`{name}`: `labels` have shape {y.shape}, those of the training set {known.shape}."
            )
        if others:
            return np.arange(len(y)), y
        ids = self._read_index(index, len(known))
        if len(ids) != len(y):
            hint = "" if index is not None else " (of all rows): give the numbers of these rows"
            raise ValueError(
                f"`{name}`: `labels` hold {len(y)} samples, but `index` {len(ids)}{hint}."
            )
        there = known[ids]
        if self.training and not ((there == y) | (np.isnan(there) & np.isnan(y))).all():
            raise ValueError(
                f"`{name}`: labels of the batch differ from those of the training set at the same "
                "`index`. Is `index` the number of each sample in the whole training set?"
            )
        return ids, y


def as_labels(place: str, labels: Any) -> NDArray[np.float32]:
    """Labels as floats, all of them 0, 1 or, in a table, NaN."""
    table = torch.as_tensor(labels).detach().to("cpu", torch.float32).numpy()
    if table.ndim not in (1, 2):
        raise ValueError(
            f"{place} must have shape (N,), or (N, T) for T labels, but has {table.shape}."
        )
    wrong = (table != 0) & (table != 1)  # NaN too
    if table.ndim == 2:
        wrong &= ~np.isnan(table)
    if wrong.any():
        raise ValueError(
            f"{place} must be 0 (negative) or 1 (positive)"
            f"{', or NaN (unknown)' if table.ndim == 2 else ''} but contain: {table[wrong][0]:g}."
        )
    return table


def class_moments(positives: Tensor, negatives: Tensor) -> Tensor:
    """The means of h and h^2 of both classes, (4,)."""
    sides = (positives, negatives)
    return torch.stack([part for h in sides for part in (h.mean(), h.square().mean())])


class AUC(BinaryRisk):
    r"""Maximise the area under the ROC curve.

    With scores h, and means and variances over positives and negatives,

    .. math::
        \min_w\; \operatorname{Var}_+ h + \operatorname{Var}_- h
            + [\,m + \mathbb E_- h - \mathbb E_+ h\,]_+^2.

    One block; g is the vector of the class means of h and h^2, which is tracked, and f is
    `fcco.outer.ClassSeparation`: a plain minimum, where AUCM solves a min-max problem. The mean of
    a surrogate over all pairs is `PartialAUC(max_fpr=1)`.

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
        margin: float = 1.0,
        gamma: float | Literal["auto"] = "auto",
        names: Sequence[str] | None = None,
        process_group: Any = "auto",
    ) -> None:
        self.gamma = gamma
        super().__init__(
            model, optimizer, labels, margin=margin, names=names, process_group=process_group
        )

    def term_of(self, label: Label, model: nn.Module) -> RiskTerm:
        separation = ClassSeparation(self.pair_loss.margin)
        return RiskTerm(separation, average(model, 1, 4, gamma=self.gamma))

    def values(self, label: Label, scores: Tensor, positives: int) -> Values:
        return class_moments(scores[:positives], scores[positives:]).view(1, 4), ()


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
    of positives above one.

    Train with cross-entropy first (`fcco.xrisk.warm_start`). The gradient of AP comes from the
    top of the list: from random weights it learns slowly or not at all.

    Args:
        prevalence: the share of positives at which precision is taken, unless that of the training
            set is larger; 0 for the latter. Of very many negatives those far below a positive add
            up, because a surrogate is not quite 0 there; to count them less brings the gradient
            back to the top of the list.
        options: further ones of `BinaryRisk`. Several labels are mAP.

    References:
        Q. Qi et al., Stochastic optimization of areas under precision-recall curves with provable
        convergence, 2021 (SOAP).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        *,
        activation: Literal["sigmoid"] | None = "sigmoid",
        prevalence: float = 0.2,
        gamma: float | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        _checks.in_interval("AveragePrecision", "prevalence", prevalence, 0.0, 1.0, open_high=True)
        self.prevalence, self.gamma = prevalence, gamma
        super().__init__(model, optimizer, labels, activation=activation, **options)

    def term_of(self, label: Label, model: nn.Module) -> RiskTerm:
        return RiskTerm(Ratio(), average(model, label.positives, 2, gamma=self.gamma))

    def values(self, label: Label, scores: Tensor, positives: int) -> Values:
        """The ranks of each positive among the positives and among all, for the training set."""
        means = pair_means(self.pair_loss, scores[:positives], scores, split=positives)
        above, below = means.unbind(1)
        negatives, wanted = label.negatives, self.prevalence
        if wanted:
            negatives = min(negatives, label.positives * (1 - wanted) / wanted)
        # The pair of a positive with itself, of loss l(0) = 1, does not count. Without any other
        # positive in the batch, what these would add is not known, and taken as none.
        share = (label.positives - 1) / max(positives - 1, 1)
        rank = 1 + share * (positives * above - 1)
        return torch.stack([rank, rank + negatives * below], dim=1), ()


class BagTerm(AbstractTerm):
    r"""f of the class means of H and H^2 over bags.

    .. math::
        G_t = \frac1{B_1}\sum_{b\in\mathcal B_1} \nabla g_b(w)\,\nabla\phi_b(u_b)\,\nabla f(v)

    u_b follows log g_b, and v the mean of phi_b(u_b): the chain rule at the tracked values.
    """

    positive: Tensor

    def __init__(
        self, bags: InnerTracker, means: InnerTracker, labels: Tensor, temperature: float,
        margin: float,
    ) -> None:  # fmt: skip
        super().__init__(bags)
        self.mean, self.outer, self.temperature = means, ClassSeparation(margin), temperature
        self.register_buffer("positive", labels.to(bags.value.device) == 1, persistent=False)

    def class_means(self, u: Tensor, index: Tensor) -> Tensor:
        """The class means of H and H^2 over some bags."""
        scores, positive = self.temperature * u, self.positive[index]
        if bool(positive.all()) or not bool(positive.any()):
            raise ValueError("`MultiInstanceAUC`: a batch must hold bags of both classes.")
        return class_moments(scores[positive], scores[~positive])

    def loss(self, tracked: Tracked) -> Tensor:
        if tracked.index.shape[0] == 0:  # a mean over no bags would be NaN
            return tracked.as_loss(tracked.value.sum(), tracked.value)
        with torch.enable_grad():
            u = tracked.value.detach().requires_grad_()
            fresh = self.class_means(u, tracked.index).unsqueeze(0)
            v = self.mean.track(self.mean.entries(self.mean.blocks(), fresh), tracked.step)
            value, slope = self.outer.value_and_gradient(v.value)
            top = v.as_loss(value.sum(), slope)
            (slope_u,) = torch.autograd.grad(top, u)
        return tracked.as_loss(top.detach(), slope_u)

    def value(self) -> Tensor:
        table, seen = self.table(), self.tracker.seen.nonzero().squeeze(1)
        if not len(table):
            return table.new_tensor(torch.nan)
        return self.outer(self.class_means(table, seen)).sum()


class MultiInstanceAUC(Compositional):
    r"""Maximise the AUC of bags of instances, with a smooth maximum as the score of a bag.

    .. math::
        H_b(w) = \tau\log\operatorname*{mean}_{x\in b} e^{h(w; x)/\tau}, \qquad
        \min_w\; \operatorname{Var}_+ H + \operatorname{Var}_- H
            + [\,m + \mathbb E_- H - \mathbb E_+ H\,]_+^2

    A block is a bag, g_b = mean exp(h / tau) is tracked in log space from the instances of it that
    a batch holds; the class means of H and H^2 are tracked too, f is `fcco.outer.ClassSeparation`.

    Args:
        labels: 0 or 1 for each bag of the training set.
        temperature: tau; small is the maximum over the instances, large their mean.
        margin: m.
        gamma: weight of the new mean of a bag.
        gamma_classes: weight of the new class means; `"auto"` weighs noise against lag.

    References:
        D. Zhu et al., Provable multi-instance deep AUC maximization with stochastic pooling, 2023
        (MIDAM).
    """

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
        table = torch.from_numpy(as_labels("`MultiInstanceAUC(labels=...)`", labels))
        if table.dim() != 1 or not 0 < int(table.sum()) < len(table):
            raise ValueError(
                "`MultiInstanceAUC(labels=...)` must be a vector of 0 and 1, both present."
            )
        self.temperature = temperature
        bags = average(model, len(table), gamma=gamma, log_space=True)
        means = average(model, 1, 4, gamma=gamma_classes)
        term = BagTerm(bags, means, table, temperature, margin)
        super().__init__(model, optimizer, term, process_group=process_group)

    def forward(  # type: ignore[override]
        self, function: Callable[[], Any], bag: Any
    ) -> Tensor:
        """The loss of one batch of instances.

        Args:
            function: runs the model and returns the scores of instances, (B,), or (loss, scores).
            bag: number of the bag of each instance, (B,); there must be bags of both classes.
        """
        return super().forward(self._logarithms(function), bag)

    def entries(self, function: Any, index: Any = None, rows: Any = None) -> Any:
        return super().entries(self._logarithms(function), index, rows)

    def _logarithms(self, function: Any) -> Callable[[], Any]:
        """The logarithms of exp(h / tau), of which the tracker takes means."""
        loss, scores = read_scores("MultiInstanceAUC", function)
        values = scores / self.temperature
        return lambda: values if loss is None else (loss, values)
