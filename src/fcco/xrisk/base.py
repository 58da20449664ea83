"""The bases of risks: reading a call, the scores of all ranks, pairs of samples, terms."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import _checks
from .._distributed import Group, find_group, gather_rows, row_counts
from .._state import CheckedState
from .._watch import warn
from ..inputs import ONLY, mean_loss, split
from ..objective import Compositional
from ..outer import AbstractOuter
from ..terms import AbstractTerm, BlockParameters
from ..tracker import InnerTracker, NonFiniteValue, Tracked, for_model
from .pairs import gather_scores
from .surrogates import LOGIT_MARGIN, Surrogate, find_surrogate

__all__ = ["BinaryRisk", "Label", "New", "RiskTerm", "ScoreRisk", "as_labels", "check_gamma"]

Ints = NDArray[np.int64]
Ranks = tuple[Group, list[int]]
"""The ranks, and the number of samples on each."""
New = Sequence[tuple[BlockParameters, Tensor | None, Tensor]]
"""What a batch changes beside the tracked values: tables, numbers of rows, and the new rows."""

_CALLS, _SCORES = 25, 1000
"""So many calls and scores, all of them in [0, 1], are those of probabilities."""


class ScoreRisk(CheckedState):
    """Base of risks: your function returns scores, from which inner values are made.

    On several ranks these are the values of the global batch: scores are gathered, and every rank
    computes the same values from them.

    Attributes:
        objective: the `Compositional` that tracks the inner values.
    """

    _gathers: ClassVar[bool] = True
    _noun: ClassVar[str] = "sample"
    _batch: ClassVar[str] = "`labels`"
    _empty: ClassVar[str] = ""  # the warning about a batch without pairs, after "A batch of `...`"
    _seen: list[Any] | None = None  # of the scores of the first calls; None: not watched
    _said_empty = False
    previous = None  # no risk looks at w_{t-1}

    def __init__(self, model: nn.Module, optimizer: Any, terms: Any, process_group: Any) -> None:
        super().__init__()
        # Where scores are gathered, every rank holds the values of the global batch already.
        group = None if self._gathers else process_group
        self.objective = Compositional(model, optimizer, terms, process_group=group)
        self.objective.method = type(self).__name__
        self.optimizer, self._ranks = optimizer, process_group

    @property
    def term(self) -> Any:
        return self.objective.term

    @property
    def terms(self) -> Mapping[str, Any]:
        return self.objective.terms

    @property
    def learning(self) -> bool:
        """Whether a call now is part of the training."""
        return self.training and torch.is_grad_enabled()

    def value(self) -> Tensor:
        """The risk itself at the tracked values, over what was seen so far."""
        return self.objective.value()

    def close(self) -> None:
        self.objective.close()

    def detach_hooks(self) -> None:
        self.objective.detach_hooks()

    def _read_index(self, index: Any, number: int) -> Ints:
        """The numbers of the samples of a call among all, checked; None means all in order."""
        # In NumPy: a dozen looks at short vectors take a third of torch's time there.
        name = type(self).__name__
        ids = np.arange(number) if index is None else torch.as_tensor(index).cpu().numpy()
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(
                f"`{name}`: `index` must be the number of each {self._noun} in the training set, "
                f"integers of shape (B,), but has shape {ids.shape} and dtype {ids.dtype}."
            )
        if ids.size and (ids.min() < 0 or ids.max() >= number):
            raise IndexError(
                f"`{name}`: `index` must lie in [0, {number - 1}], the {self._noun}s of the "
                f"training set, but reaches from {ids.min()} to {ids.max()}."
            )
        return ids.astype(np.int64, copy=False)

    def _gathered(self, ids: Ints, y: NDArray[Any] | None = None) -> tuple[Ints, Any, Ranks | None]:
        """The numbers and labels of the samples of all ranks; with None on a single process."""
        group = find_group(self._ranks)
        if group is None:
            return ids, y, None
        device = next(iter(self.terms.values())).tracker.value.device
        # In one message: double precision holds labels, and numbers of samples below 2^53.
        rows = np.column_stack([ids] if y is None else [ids, y]).astype(np.float64)
        own = torch.from_numpy(rows).to(device)
        sizes = row_counts(own, group)
        table = gather_rows(own, group, sizes).cpu().numpy()
        labels = table[:, 1:] if y is not None and y.ndim > 1 else table[:, -1]
        return table[:, 0].astype(np.int64), labels, (group, sizes)

    def _scores(
        self, function: Any, shape: tuple[int, ...] | None = None, ranks: Ranks | None = None
    ) -> tuple[Any, Tensor]:
        """What the user's function returns: the ordinary loss or None, and the scores of all ranks.

        `shape` is that of the scores of this rank, None if the objective reads both.
        """
        name = type(self).__name__
        if not callable(function):
            raise TypeError(
                f"`{name}` needs a function that runs the model and returns the scores but got: "
                f"{type(function).__name__}. Write `risk(lambda: model(x).squeeze(1), ...)`."
            )
        loss, scores = split(function())
        if not isinstance(scores, Tensor):
            raise TypeError(
                f"The function given to `{name}` must return scores, a tensor, or (loss, scores) "
                f"but returned: {type(scores).__name__}."
            )
        # Differences and quotients of scores in half precision would be wrong in the third digit.
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if shape is None:
            return loss, scores
        if scores.shape == (*shape, 1) and len(shape) == 1:
            scores = scores.squeeze(1)
        if scores.shape != shape:
            each = self._noun if len(shape) == 1 else f"{self._noun} and label"
            raise ValueError(
                f"The function given to `{name}` must return one score per {each} of "
                f"{self._batch}, shape {shape}, but they have shape {tuple(scores.shape)}."
            )
        if ranks is not None:
            scores = gather_scores(scores, *ranks)
        # Of several labels those without a pair, or unknown, are in no value that is looked at.
        if len(shape) > 1 and self.learning:
            self._refuse(bool(scores.isnan().any()))
        if loss is not None:
            loss = mean_loss(loss, ranks and ranks[0], check=self.learning)
        return loss, scores

    def _refuse(self, bad: bool) -> None:
        if bad:
            raise NonFiniteValue(
                f"Scores of `{type(self).__name__}` or the loss beside them are NaN or infinite; "
                "nothing was updated."
            )

    def _without_pairs(self, loss: Tensor | None, scores: Tensor) -> Tensor:
        """Nothing to learn from, but still a loss that can be differentiated."""
        if self.training and not self._said_empty:
            self._said_empty = True
            warn(f"A batch of `{type(self).__name__}` {self._empty}")
        nothing = (scores * 0).sum()  # NaN if a score is not finite
        result = nothing if loss is None else loss + nothing
        if self.learning:
            self._refuse(not bool(torch.isfinite(result)))
        return result

    def _tracked_loss(
        self,
        loss: Tensor | None,
        values: Mapping[str, Tensor],
        index: Mapping[str, Tensor],
        new: New,
    ) -> Tensor:
        """The loss of a batch from its inner values and their blocks, both by term.

        `new` is what else the batch changes, unless it is refused.
        """
        found, blocks = (values[ONLY], index[ONLY]) if ONLY in values else (values, index)
        result = self.objective(lambda: found if loss is None else (loss, found), blocks)
        if new and self.learning:
            for table, numbers, rows in new:
                table.propose(self.objective.open_step, numbers, rows)
        return result

    def _look_at(self, scores: Tensor) -> None:
        """Say once that the scores of the first calls look like probabilities, not logits."""
        if self._seen is None or not self.learning:
            return
        self._seen.append((*scores.detach().aminmax(), scores.numel()))
        lows, highs, sizes = zip(*self._seen, strict=True)
        if len(sizes) < _CALLS or sum(sizes) < _SCORES:
            return
        self._seen = None
        if bool((torch.stack(lows) >= 0).all() & (torch.stack(highs) <= 1).all()):
            warn(
                f"All {sum(sizes)} scores of `{type(self).__name__}` so far lie in [0, 1], like "
                "probabilities, but logits are wanted: leave the sigmoid out. (To compare "
                "probabilities give `activation=None, margin=1`, where there are such.)"
            )


class RiskTerm(AbstractTerm):
    """The coupled term (1/n) sum_i f(g_i(w)) of a label, times its share in the mean over labels."""

    share: Any = 1.0

    def __init__(self, outer: AbstractOuter, tracker: InnerTracker) -> None:
        super().__init__(tracker)
        self.outer = outer

    def loss(self, tracked: Tracked) -> Tensor:
        values, slope = self.outer.value_and_gradient(tracked.value)
        share = self.share / max(len(tracked.index), 1)
        return tracked.as_loss(values.sum() * share, slope * share)

    def value(self) -> Tensor:
        return self.outer(self.table()).mean()


def average(model: nn.Module, *size: int, **options: Any) -> InnerTracker:
    """The tracker of a risk: running averages, read after their update."""
    return for_model(model, *size, correction=0.0, read="new", **options)


def table_for(tracker: InnerTracker, number: int) -> BlockParameters:
    """A table of thresholds in the precision of a tracker."""
    return BlockParameters(number, dtype=tracker.value.dtype, device=tracker.value.device)


class Label:
    """One of the labels, from 0, 1 or NaN for each training sample; `call` is for the error text.

    Attributes:
        positives, negatives: how many samples are 1, and 0.
        block: number of each sample among the positives, -1 for others, (N,).
        term: that of the objective.
    """

    term: Any

    def __init__(self, call: str, name: str, labels: Tensor) -> None:
        positive = labels == 1
        self.positives, self.negatives = int(positive.sum()), int((labels == 0).sum())
        if self.positives == 0 or self.negatives == 0:
            place = "" if name == ONLY else f" in `{name}`"
            raise ValueError(
                f"`{call}(labels=...)` must hold positives (1) and negatives (0) but has "
                f"{self.positives} and {self.negatives}{place}."
            )
        self.name = name
        self.block = torch.where(positive, positive.cumsum(0) - 1, -1).numpy()


class BinaryRisk(ScoreRisk):
    """Base of risks over pairs of a positive and another sample.

    Call it with a function that returns the scores of a batch, its labels, and the number of each
    sample in the training set; pairs are built inside, on several ranks those of the global batch.

    A batch without positives, or without negatives, of a label says nothing about that label. One
    of several labels that comes in one of k batches has k times the weight there (`visits` counts
    them): in expectation all labels weigh the same. (A subclass sets its settings before it calls
    this constructor, which asks for the terms.)

    Args:
        model: your model.
        optimizer: your optimizer.
        labels: 0 or 1 for each sample of the training set, (N,); or (N, T) for T labels, NaN where
            unknown, and the risk is the mean over labels.
        names: names of the labels.
        process_group: see `Compositional`.
    """

    _empty = (
        "has no positive or no negative sample, and so no pair to learn from. Positives are rare: "
        "draw a fixed number of them with `fcco.groups.PositiveBatchSampler`."
    )
    visits: Tensor  # of several labels: calls, and those in which each label had pairs
    activation: Literal["sigmoid"] | None = None
    per_positive = True
    """Whether the blocks are the positives; otherwise one block for the whole class."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        *,
        names: Sequence[str] | None = None,
        process_group: Any = "auto",
    ) -> None:
        call = type(self).__name__
        table = as_labels(f"`{call}(labels=...)`", labels)
        self._table, self._several = table.numpy(), table.dim() == 2
        columns = table.unbind(1) if self._several else (table,)
        keys = [f"label {t}" for t in range(len(columns))] if self._several else [ONLY]
        if names is not None:
            keys = [str(name) for name in names]
            if not self._several or not len(keys) == len(set(keys)) == len(columns):
                wanted = f"{len(columns)} different names" if self._several else "left out"
                raise ValueError(
                    f"`{call}(names=...)` names the columns of `labels`, of shape "
                    f"{tuple(table.shape)}, and must be {wanted} but is: {keys}."
                )
        self.labels = [Label(call, *each) for each in zip(keys, columns, strict=True)]
        for label in self.labels:
            label.term = self.term_of(label, model)
        terms = {label.name: label.term for label in self.labels}
        super().__init__(model, optimizer, terms if self._several else terms[ONLY], process_group)
        if self._several:
            zeros = torch.zeros(1 + len(keys), dtype=torch.int64)
            self.register_buffer("visits", zeros.to(self.labels[0].term.tracker.value.device))

    @abc.abstractmethod
    def term_of(self, label: Label, model: nn.Module) -> Any:
        """The term of a label."""

    @abc.abstractmethod
    def values(
        self, label: Label, scores: Tensor, positives: int, block: Tensor
    ) -> tuple[Tensor, New]:
        """The inner values of a batch, one row for each positive or one in all; and new state.

        `scores` are those of the P positives, then of the negatives; `block` numbers the positives.
        """

    def _compare(self, activation: Any, surrogate: Any, margin: float | None) -> Surrogate:
        """Read how scores are compared: the surrogate of their differences."""
        call = type(self).__name__
        if activation is not None:
            _checks.one_of(call, "activation", activation, ("sigmoid",))
        self.activation = activation
        if activation is not None or (margin is None and isinstance(surrogate, str)):
            self._seen = []  # other margins may be those of probabilities
        return find_surrogate(call, surrogate, margin, 1.0 if activation else LOGIT_MARGIN)

    def forward(self, function: Callable[[], Any], labels: Any, index: Any = None) -> Tensor:
        """The loss of one batch.

        Args:
            function: runs the model and returns the scores, (B,), or (B, T) for T labels; or a pair
                (loss, scores) with an ordinary loss, a scalar or per-sample losses.
            labels: 0 or 1 for each sample, of the shape of the scores; NaN where unknown. Best on
                the CPU, as the loader gives them: they are looked at there.
            index: number of each sample in the training set, (B,); None if the batch is the
                training set in order, or in `eval()` mode, where samples may be others.
        """
        others = index is None and not self.training
        ids, y = self._read_batch(labels, index, others)
        shape = y.shape
        ids, y, ranks = self._gathered(ids, y)
        loss, scores = self._scores(function, shape, ranks)
        pairs = self._pairs(y, ids, others, scores.device)
        if not pairs:
            return self._without_pairs(loss, scores)
        self._look_at(scores)
        visits = self._weigh(pairs) if self._several else None
        scores = scores if self.activation is None else scores.sigmoid()
        values, blocks, new = {}, {}, []
        for name, (label, column, order, number, block) in pairs.items():
            own = scores[:, column] if self._several else scores
            ordered = own.index_select(0, order)  # one gather, and one scatter backward
            values[name], found = self.values(label, ordered, number, block)
            blocks[name] = block if self.per_positive else torch.zeros_like(block[:1])
            new += found
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
        1 - (1-p)^k. The mean over the labels of each batch would be a ratio, in which labels that
        come alone weigh more; it is the value of an evaluation.
        """
        came = [True, *(label.name in present for label in self.labels)]
        visits = self.visits + self.visits.new_tensor(came)
        counts = visits.to(self.labels[0].term.tracker.value)
        shares = counts[0] / (counts[1:] * len(self.labels))
        for label, share in zip(self.labels, shares, strict=True):
            label.term.share = share if self.learning else 1 / len(present)
        return visits

    def _loss_of_others(self, loss: Tensor | None, values: Mapping[str, Tensor]) -> Tensor:
        """The loss of any samples on their own, of a validation set for example.

        In parts, where there are more positives than in training: every value is a block.
        """
        parts = [] if loss is None else [loss]
        for name, each in values.items():
            for part in each.split(self.terms[name].tracker.num_inner):
                blocks = torch.arange(len(part))
                value = self._tracked_loss(None, {name: part}, {name: blocks}, ())
                parts.append(value * (len(part) / len(each)))
        return torch.stack(parts).sum()

    def value(self) -> Tensor:
        """The risk itself at the tracked values, over the positives seen; a mean over labels."""
        return super().value() / len(self.labels)

    def _read_batch(self, labels: Any, index: Any, others: bool) -> tuple[Ints, Any]:
        """Numbers and labels of the samples of a call, checked; other samples have no numbers."""
        name, known = type(self).__name__, self._table
        y = torch.as_tensor(labels).detach().cpu().numpy()
        if y.ndim != known.ndim or y.shape[1:] != known.shape[1:]:
            raise ValueError(
                f"`{name}`: `labels` of a batch have shape {y.shape} but those of the training set "
                f"{known.shape}."
            )
        if others:
            return np.arange(len(y)), as_labels(f"`{name}`: `labels`", y).numpy()
        ids = self._read_index(index, len(known))
        if len(ids) != len(y):
            what = "`index`" if index is not None else "the training set, as no `index` is given,"
            raise ValueError(
                f"`{name}`: `labels` hold {len(y)} samples but {what} holds {len(ids)}; give the "
                "number of each sample in the training set."
            )
        there = known[ids]
        if (there == y).all():
            return ids, there
        y = as_labels(f"`{name}`: `labels`", y).numpy()  # it has the better words for a -1
        if self.training and not ((there == y) | (np.isnan(there) & np.isnan(y))).all():
            raise ValueError(
                f"`{name}`: labels of the batch differ from those of the training set at the same "
                "`index`. Is `index` the number of each sample in the whole training set?"
            )
        return ids, y

    def _pairs(
        self, y: NDArray[Any], ids: Ints, others: bool, device: torch.device
    ) -> dict[str, tuple[Label, int, Tensor, int, Tensor]]:
        """The pairs of a batch by label; labels without any are left out.

        Of each: its column among the scores; positions of the positives in the batch, then of the
        negatives; how many are positives; and the number of each positive.
        """
        pairs = {}
        for t, label in enumerate(self.labels):
            column = y[:, t] if self._several else y
            positive, negative = np.flatnonzero(column == 1), np.flatnonzero(column == 0)
            if positive.size and negative.size:
                order = torch.from_numpy(np.concatenate([positive, negative]))
                own = np.arange(positive.size) if others else label.block[ids[positive]]
                order, block = order.to(device, non_blocking=True), torch.from_numpy(own)
                pairs[label.name] = (label, t, order, positive.size, block)
        return pairs


def check_gamma(call: str, gamma: Any, name: str = "gamma") -> None:
    """Refuse a weight of new values outside (0, 1], before a tracker speaks of it."""
    if gamma != "auto":
        _checks.in_interval(call, name, gamma, 0.0, 1.0, open_low=True)


def as_labels(place: str, labels: Any) -> Tensor:
    """Labels as floats, all of them 0, 1 or NaN."""
    table = torch.as_tensor(labels).detach().to("cpu", torch.float32)
    if table.dim() not in (1, 2):
        raise ValueError(
            f"{place} must have shape (N,), or (N, T) for T labels, but has {tuple(table.shape)}."
        )
    wrong = (table != 0) & (table != 1)  # NaN too
    if table.dim() == 2:
        wrong &= ~table.isnan()
    if bool(wrong.any()):
        raise ValueError(
            f"{place} must be 0 (negative) or 1 (positive)"
            f"{', or NaN (unknown)' if table.dim() == 2 else ''} but contain: {table[wrong][0]:g}."
        )
    return table
