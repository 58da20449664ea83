"""Risks of ranked lists: NDCG, of the whole list or its top, and listwise cross-entropy."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import _checks
from ..inputs import ONLY
from ..outer import AbstractOuter, Discount, LogMeanExp
from ..rules.arrays import per_row
from ..tracker import InnerTracker, Tracked
from .base import Ints, New, RiskTerm, ScoreRisk, Values, average, table_for
from .pairs import Members, PairLoss, difference, pair_means

Floats = NDArray[np.float64]


class RankingTerm(RiskTerm):
    r"""The mean over lists of sum_i c_i f(g_i(w)), over the relevant items i of each.

    The items of a batch stand for their lists: one of n items of which b are in the batch has the
    weight n / b, and a list without a relevant item in the batch counts as one too. Where lists and
    items are drawn at random this has no bias.
    """

    weight: Tensor  # c_i, (n,)
    list_of: Tensor  # number of the list of each item, (n,)
    drawn: Tensor  # share of each list that is in the batch, 0 for those that do not count, (Q,)
    branch_free = False  # another `drawn` for each batch

    def __init__(
        self, outer: AbstractOuter, tracker: InnerTracker, weight: Tensor, list_of: Tensor
    ) -> None:
        super().__init__(outer, tracker)
        self.register_buffer("weight", weight.to(tracker.value), persistent=False)
        self.register_buffer("list_of", list_of.to(tracker.value.device), persistent=False)
        self.drawn = tracker.value.new_ones(int(list_of.max()) + 1)

    def loss(self, tracked: Tracked) -> Tensor:
        u, index = tracked.value, tracked.index
        weight = self.weight[index] / (self.drawn[self.list_of[index]] * self.drawn.count_nonzero())
        slope = self.outer.gradient(u) * per_row(weight, u)
        return tracked.as_loss((self.outer(u) * weight).sum(), slope)

    def value(self) -> Tensor:
        seen = self.tracker.seen
        lists = self.list_of[seen].unique()
        total = (self.outer(self.table()) * self.weight[seen]).sum()
        return total / len(lists) if len(lists) else total.new_tensor(math.nan)


_DISCOUNT = Discount()


@dataclass(frozen=True)
class _TopDiscount(AbstractOuter):
    """-u_2 / log2(1 + u_1): the discount at a rank, for an item that is in the top to a degree."""

    dim = 2
    smooth = True

    def __call__(self, u: Tensor) -> Tensor:
        return _DISCOUNT(u[..., 0]) * u[..., 1]

    def gradient(self, u: Tensor) -> Tensor:
        rank, top = u.unbind(-1)
        return torch.stack([_DISCOUNT.gradient(rank) * top, _DISCOUNT(rank)], dim=-1)


class RankingRisk(ScoreRisk):
    """Base of risks over lists of items with relevance grades.

    Give whole lists where they are short (`GroupBatchSampler(query, ..., small_groups="all")`), or
    a sample of each with at least two items. Lists weigh equally if they are drawn equally often
    and their items at random, whether a sample holds a relevant one or not. On several ranks an
    item is compared with those of its list on all ranks. (A subclass sets its settings before it
    calls this constructor.)

    Args:
        relevance: grade of each item of the training set, at least 0, (N,).
        query: list of each item, (N,).
        outer: f.
        process_group: see `Compositional`.
        tracking: settings of the tracker: `gamma` is the weight of the new inner values, `"auto"`
            weighs noise against lag.
    """

    _empty = (
        "holds no list with a relevant item and another one, and so no pair to learn from; draw "
        "whole lists with `GroupBatchSampler`."
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        relevance: Any,
        query: Any,
        outer: AbstractOuter,
        *,
        process_group: Any = "auto",
        **tracking: Any,
    ) -> None:
        call = type(self).__name__
        grades = np.asarray(torch.as_tensor(relevance), dtype=np.float64)
        lists = np.asarray(torch.as_tensor(query))
        if grades.ndim != 1 or lists.shape != grades.shape or grades.size == 0:
            raise ValueError(
                f"`{call}(relevance=..., query=...)` must be two vectors of equal length, but have "
                f"shapes {grades.shape} and {lists.shape}."
            )
        if not (np.isfinite(grades).all() and (grades >= 0).all()):
            raise ValueError(f"`{call}(relevance=...)` must be finite and at least 0.")
        _, number = np.unique(lists, return_inverse=True)
        sizes = np.bincount(number)
        # An item without any other in its list has no rank to learn; one of grade 0 no weight.
        relevant = (grades > 0) & (sizes[number] > 1)
        if not relevant.any():
            raise ValueError(
                f"`{call}(relevance=..., query=...)` has nothing to rank: no list of two items or "
                "more with one of relevance above 0."
            )
        weight = torch.from_numpy(self.weights(grades, number)[relevant])
        # Lists without a relevant item do not count: numbers of the others without gaps.
        _, list_of = np.unique(number[relevant], return_inverse=True)
        tracker = average(model, len(weight), outer.dim or 1, **tracking)
        term = RankingTerm(outer, tracker, weight, torch.from_numpy(list_of))
        super().__init__(model, optimizer, term, process_group)
        self._list, self._block = number, np.where(relevant, np.cumsum(relevant) - 1, -1)
        self._sizes, self._useful = sizes, np.unique(number[relevant])  # lists that count

    @abc.abstractmethod
    def weights(self, grades: Floats, number: Ints) -> Floats:
        """The weight c_i of every item, from the grades and the numbers of the lists."""

    @abc.abstractmethod
    def values(self, scores: Tensor, members: Members, others: Tensor, block: Tensor) -> Values:
        """The inner values of the relevant items of a batch, (P,), and new state.

        Relevant item k is number `block[k]` of these, and has `others[k]` others in its list.
        """

    def forward(  # type: ignore[override]
        self, function: Callable[[], Any], index: Any = None
    ) -> Tensor:
        """The loss of one batch.

        Args:
            function: runs the model and returns the scores, (B,), or (loss, scores).
            index: number of each item in the training set, (B,); None if the batch is the training
                set in order.
        """
        ids = self._read_index(index, len(self._list))
        shape, device = ids.shape, self.term.weight.device
        ids, _, ranks = self._gathered(ids)
        loss, scores = self._scores(function, shape, ranks)
        lists = self._list[ids]
        present = np.bincount(self._list[np.unique(ids)], minlength=len(self._sizes))
        # An item alone in its list says nothing: the others of the list are not in the batch.
        anchor = np.flatnonzero((self._block[ids] >= 0) & (present[lists] > 1))
        if not anchor.size:
            return self._without_pairs(loss, scores)
        self._look_at(scores)
        drawn = (present * (present > 1) / self._sizes)[self._useful]
        self.term.drawn = torch.from_numpy(drawn).to(self.term.weight)
        block, others, lists, own = (
            torch.from_numpy(each).to(device)
            for each in (self._block[ids[anchor]], self._sizes[lists[anchor]] - 1.0, lists, anchor)
        )
        members = Members(own=own, row=lists[own], column=lists)
        values, new = self.values(scores, members, others.to(scores), block)
        return self._tracked_loss(loss, {ONLY: values}, {ONLY: block}, new)


class NDCG(RankingRisk):
    r"""Maximise the normalised discounted cumulative gain of ranked lists.

    With scores h, lists (queries) q, relevance grades y and a surrogate l of the pairs,

    .. math::
        \min_w\; -\frac1Q\sum_q \frac1{Z_q}\sum_{i\in q} \frac{2^{y_i} - 1}{\log_2(1 + r_i(w))},
        \qquad r_i = 1 + \sum_{j\in q,\,j\ne i} \ell(h_j - h_i),

    Z_q being the gain of the best order. A block is an item of relevance above 0; g_i = r_i is
    tracked, so that a batch need not hold the whole list; f is the discount. For the top k of the
    list each gain is multiplied by sigmoid((h_i - lambda_q) / spread_q). The spread is the standard
    deviation of the scores of list q in the batch. The cut-off lambda_q, between the k-th and the
    next score of the list, is kept in a table: a running average of the quantiles of batches, exact
    when the batch holds the list.

    Args:
        k: None for the whole list, or the length of the top.
        surrogate: l, a name of the table of `PairLoss`.
        margin: of the surrogate.

    References:
        Z.-H. Qiu et al., Large-scale stochastic optimization of NDCG surrogates for deep learning
        with provable convergence, 2022 (SONG, K-SONG).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        relevance: Any,
        query: Any,
        *,
        k: int | None = None,
        surrogate: str = "squared_hinge",
        margin: float = 1.0,
        gamma: float | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        if k is not None:
            _checks.integer("NDCG", "k", k, 1)
        self.k = k
        self.pair_loss = PairLoss.read("NDCG", surrogate, margin)
        outer = _DISCOUNT if k is None else _TopDiscount()
        super().__init__(model, optimizer, relevance, query, outer, gamma=gamma, **options)
        if k is not None:
            self.term.cutoffs = table_for(self.term.tracker, len(self.term.drawn))

    def weights(self, grades: Floats, number: Ints) -> Floats:
        """The gain of each item over that of the best order of its list."""
        gains = np.exp2(grades) - 1
        # The rank (from 1) of each item in its list by falling grade: its place less that of the
        # first of the list, which has the same number.
        order = np.lexsort((-grades, number))
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order] = 1 + np.arange(len(order)) - np.searchsorted(number[order], number[order])
        counted = ranks <= (self.k or len(ranks))
        best = np.bincount(number, counted * gains / np.log2(1 + ranks))
        return gains / np.where(best > 0, best, 1)[number]

    def values(self, scores: Tensor, members: Members, others: Tensor, block: Tensor) -> Values:
        """The ranks, and to what degree each item is in the top."""
        anchors = scores[members.own]
        ranks = 1 + others * pair_means(self.pair_loss, anchors, scores, members)
        if self.k is None:
            return ranks, ()
        with torch.no_grad():
            cutoff, spread, new = self._cutoffs(self.k, scores, members, others, block)
        top = torch.sigmoid((anchors - cutoff) / spread)
        return torch.stack([ranks, top], dim=1), new

    def _cutoffs(
        self, k: int, scores: Tensor, members: Members, others: Tensor, block: Tensor
    ) -> tuple[Tensor, Tensor, New]:
        """The lambda_q and the spread of the scores of its list, for each relevant item."""
        _, of_list = torch.unique(members.column, return_inverse=True)
        number = torch.bincount(of_list)
        mean = scores.new_zeros(len(number)).index_add_(0, of_list, scores) / number
        square = torch.zeros_like(mean).index_add_(0, of_list, (scores - mean[of_list]) ** 2)
        # Sorted by list and falling score, the k-th of a list stands k places after its first.
        order = torch.argsort(scores, descending=True)
        ordered = scores[order[torch.argsort(of_list[order], stable=True)]]
        at, total = of_list[members.own], others + 1
        count, first = number[at], (number.cumsum(0) - number)[at]
        # A batch with b of n items has about k b/n of the top k. Half-way to the next score.
        place = (k * count / total).round().long().clamp(min=1).minimum(count - 1)
        best = (ordered[first + place - 1] + ordered[first + place]) / 2
        # A list that is no longer than k is in its own top as a whole.
        best = torch.where(total > k, best, ordered[first + count - 1] - 1e6)
        spread = (square / number).sqrt()[at] + 1e-6
        if not self.training:
            return best, spread, ()
        # A sample of the list moves lambda_q by its share, the whole list sets it.
        table, share = self.term.cutoffs, (count / total).to(best).clamp(max=1)
        rows = self.term.list_of[block]
        cutoff = torch.lerp(table.read(rows, best).to(best), best, share)
        lists, which = torch.unique(rows, return_inverse=True)
        # Items of a list write the same number into its place.
        once = cutoff.new_zeros(len(lists)).index_copy_(0, which, cutoff)
        return cutoff, spread, [(table, lists, once)]


class ListwiseCrossEntropy(RankingRisk):
    r"""Cross-entropy between the relevance of the items of a list and the softmax of their scores.

    .. math::
        \min_w\; \frac1Q\sum_q \sum_{i\in q} p_i \log\sum_{j\in q} e^{h_j - h_i},
        \qquad p_i = \frac{y_i}{\sum_{k\in q} y_k}

    A block is an item of relevance above 0; g_i = sum_{j != i} exp(h_j - h_i) is tracked in log
    space, so that a list may be longer than a batch; f = log(1 + .). Extreme classification is the
    case of lists with one relevant item. Arguments and calls are those of `NDCG`.

    References:
        Z. Cao et al., Learning to rank: from pairwise approach to listwise approach, 2007
        (ListNet).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        relevance: Any,
        query: Any,
        *,
        gamma: float = 0.9,
        **options: Any,
    ) -> None:
        self._seen = []
        options |= {"gamma": gamma, "log_space": True}
        super().__init__(model, optimizer, relevance, query, LogMeanExp(1.0, 1.0), **options)

    def weights(self, grades: Floats, number: Ints) -> Floats:
        """The share of each item in the relevance of its list."""
        total = np.bincount(number, grades)
        return grades / np.where(total > 0, total, 1)[number]

    def values(self, scores: Tensor, members: Members, others: Tensor, block: Tensor) -> Values:
        """The logarithm of the sum over the other items, estimated for the whole list."""
        means = pair_means(difference, scores[members.own], scores, members, log_exp=True)
        return means + others.log(), ()
