"""The bases of risks of scores: reading a call, gathering scores, building rows of pairs."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import _checks
from .._distributed import Group, find_group, gather_rows, row_counts
from .._watch import warn
from ..inputs import ONLY, mean_loss, split
from ..objective import Compositional
from ..terms import AbstractTerm
from ..tracker import Blocks, NonFiniteValue, Tracked
from .pairs import gather_scores

__all__ = [
    "BinaryRisk",
    "Label",
    "Proposals",
    "ScoreRisk",
    "as_labels",
    "check_gamma",
    "read_scores",
]

Ints = NDArray[np.int64]
Ranks = tuple[Group, list[int]]
"""The ranks, and the number of samples on each."""
Proposals = list[Callable[[], None]]
"""What writes the state behind thresholds; called when the batch was not refused."""

_CALLS, _SCORES = 25, 1000
"""So many calls and scores, all of them in [0, 1], are those of probabilities."""


def takes_no_values(self: Any, *_: Any, **__: Any) -> NoReturn:
    """In place of methods that would take scores for inner values."""
    raise TypeError(
        f"`{type(self).__name__}` makes its inner values from scores, in a call alone: it has no "
        "`warm_up` or `pool`. Estimates start at their first visit; to start the model use "
        "`fcco.xrisk.warm_start`."
    )


class ScoreRisk(Compositional):
    """Base of risks whose function returns scores; inner values are built from them.

    On several ranks these are the values of the global batch: scores are gathered, and every rank
    computes the same values from them.
    """

    _noun: ClassVar[str] = "sample"
    _batch: ClassVar[str] = "`labels`"
    _empty: ClassVar[str]
    """The warning about a batch without pairs, after "A batch of `...`"."""
    warm_up = pool = takes_no_values  # type: ignore[assignment]

    def __init__(self, model: nn.Module, optimizer: Any, terms: Any, process_group: Any) -> None:
        # No process group: every rank holds the values of the global batch already.
        super().__init__(model, optimizer, terms, process_group=None, shared_index=False)
        self._ranks, self._said_empty = process_group, False
        self._seen: list[Any] | None = None  # of the scores of the first calls; None: not watched

    @property
    def learning(self) -> bool:
        """Whether a call now is part of the training, at w_t."""
        return self.training and torch.is_grad_enabled()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._terms.values())).tracker.value.device

    def _read_index(self, index: Any, number: int) -> Ints:
        """The sample numbers of a call, checked; in NumPy, on the host.

        A dozen looks at short vectors take a third of torch's time there, and positions of
        positives are needed on the host in any case.

        Args:
            index: what the user gave; None for all in order.
            number: of samples in the training set.
        """
        name = type(self).__name__
        ids = np.arange(number) if index is None else on_host(index)
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

    def _gathered(self, *arrays: NDArray[Any]) -> tuple[Sequence[NDArray[Any]], Ranks | None]:
        """Arrays with a row per sample, those of all ranks; with None on a single process."""
        group = find_group(self._ranks)
        if group is None:
            return arrays, None
        columns = [a.reshape(len(a), math.prod(a.shape[1:])) for a in arrays]
        # In one message: double precision holds labels, and numbers of samples below 2^53.
        rows = torch.from_numpy(np.concatenate(columns, axis=1, dtype=np.float64)).to(self._device)
        sizes = row_counts(rows, group)
        table = gather_rows(rows, group, sizes).cpu().numpy()
        parts = np.split(table, np.cumsum([c.shape[1] for c in columns])[:-1], axis=1)
        found = [
            part.reshape(-1, *own.shape[1:]).astype(own.dtype)
            for part, own in zip(parts, arrays, strict=True)
        ]
        return found, (group, sizes)

    def _loss_of_scores(
        self,
        function: Callable[[], Any],
        shape: tuple[int, ...],
        ranks: Ranks | None,
        index: Mapping[str, Tensor],
        values: Callable[[Tensor, Proposals], Mapping[str, Tensor]],
    ) -> Tensor:
        """The loss of one batch, the mean over the terms.

        Args:
            function: the user's.
            shape: of the scores of this rank.
            ranks: as `_gathered` found them.
            index: the blocks of the inner values by term; without any, there is no pair.
            values: gives the inner values by term from the scores of all ranks.
        """
        several, name = ONLY not in self._terms, type(self).__name__
        bad = (
            f"Scores of `{name}` or the loss beside them are NaN or infinite; nothing was updated."
        )
        proposals: Proposals = []

        def entries() -> Any:
            loss, scores = read_scores(name, function)
            scores = self._with_shape(scores, shape)
            scores = scores if ranks is None else gather_scores(scores, *ranks)
            # Those of labels without a pair, or unknown, are in no value that is looked at later.
            if several and self.learning and bool(scores.isnan().any()):
                raise NonFiniteValue(bad)
            if loss is not None:
                loss = mean_loss(loss, ranks and ranks[0], check=self.learning)
            if not index:  # nothing to learn from, but still a loss that can be differentiated
                nothing = (scores * 0).sum()  # NaN if a score is not finite
                return nothing if loss is None else loss + nothing
            if self._seen is not None and self.learning:
                self._look_at(scores.detach(), self._seen)
            proposals.clear()  # only those of the last evaluation count
            found: Any = values(scores, proposals)
            found = found if several else found[ONLY]
            return found if loss is None else (loss, found)

        if not index:
            if self.training and not self._said_empty:
                self._said_empty = True
                warn(f"A batch of `{name}` {self._empty}")
            loss = entries()
            if self.learning and not bool(torch.isfinite(loss)):
                raise NonFiniteValue(bad)
            return loss
        loss = super().forward(entries, index if several else index[ONLY])
        if self.learning:
            for write in proposals:
                write()
        return loss

    def _look_at(self, scores: Tensor, seen: list[Any]) -> None:
        """Say once that the scores of the first calls look like probabilities, not logits."""
        seen.append((*scores.aminmax(), scores.numel()))
        lows, highs, sizes = zip(*seen, strict=True)
        if len(sizes) < _CALLS or sum(sizes) < _SCORES:
            return
        self._seen = None
        if bool((torch.stack(lows) >= 0).all() & (torch.stack(highs) <= 1).all()):
            warn(
                f"All {sum(sizes)} scores of `{type(self).__name__}` so far lie in [0, 1], like "
                "probabilities, but logits are wanted: leave the sigmoid out. (To compare "
                "probabilities give `activation=None, margin=1`, where there are such.)"
            )

    def _with_shape(self, scores: Tensor, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1 and scores.shape == (*shape, 1):
            return scores.squeeze(1)
        if scores.shape != shape:
            raise ValueError(
                f"The function given to `{type(self).__name__}` must return one score per "
                f"{self._noun}{'' if len(shape) == 1 else ' and label'} of {self._batch}, shape "
                f"{shape}, but they have shape {tuple(scores.shape)}."
            )
        return scores


class Label:
    """One of the labels: how many samples each class has, and the numbers of its positives.

    Args:
        call: the name of the risk, for the error text.
        labels: 0, 1 or NaN for each training sample, (N,).
        place: which label it is, for the error text.

    Attributes:
        positives, negatives: how many samples are 1, and 0.
        block: number of each sample among the positives, -1 for others, (N,).
    """

    def __init__(self, call: str, labels: Tensor, place: str) -> None:
        positive = labels == 1
        self.positives, self.negatives = int(positive.sum()), int((labels == 0).sum())
        if self.positives == 0 or self.negatives == 0:
            raise ValueError(
                f"`{call}(labels=...)` must hold positives (1) and negatives (0) but has "
                f"{self.positives} and {self.negatives}{place}."
            )
        self.block = torch.where(positive, positive.cumsum(0) - 1, -1).numpy()


class _Rows(NamedTuple):
    """The pairs of one label in a batch."""

    column: int  # of the label among the scores
    order: Tensor  # positions of the positives in the batch, then of the negatives
    positives: int  # P, how many are positives
    block: Tensor  # number of each positive, (P,)


class BinaryRisk(ScoreRisk):
    """Base of risks over pairs of a positive and another sample.

    Call it with a function that returns the scores of a batch, its labels, and the number of each
    sample in the training set; pairs are built inside, on several ranks those of the global batch.

    A batch without positives, or without negatives, of a label says nothing about that label. One
    of several labels that comes in one of k batches has k times the weight there (`visits` counts
    them): in expectation all labels weigh the same.

    Args:
        model: your model.
        optimizer: your optimizer.
        labels: 0 or 1 for each sample of the training set, (N,); or (N, T) for T labels, NaN where
            unknown.
        make_term: gives the term of a label; a function, because the settings it needs cannot be
            attributes before this constructor has run.
        activation: `"sigmoid"`, or None: what is applied to the scores.
        names: names of the labels.
        process_group: see `Compositional`.
    """

    _empty = (
        "has no positive or no negative sample, and so no pair to learn from. Positives are rare: "
        "draw a fixed number of them with `fcco.groups.PositiveBatchSampler`."
    )
    visits: Tensor
    per_positive = True
    """Whether the blocks are the positives; otherwise one block for the whole class."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        make_term: Callable[[Label], AbstractTerm],
        *,
        activation: Literal["sigmoid"] | None = None,
        names: Sequence[str] | None,
        process_group: Any,
    ) -> None:
        call = type(self).__name__
        if activation is not None:
            _checks.one_of(call, "activation", activation, ("sigmoid",))
        table = as_labels(f"`{call}(labels=...)`", labels)
        several = table.dim() == 2
        columns = table.unbind(1) if several else (table,)
        keys = [ONLY]
        if names is not None and not several:
            raise ValueError(
                f"`{call}(names=...)` names the columns of `labels`, which is a vector."
            )
        if several:
            keys = [f"label {t}" for t in range(len(columns))]
            keys = keys if names is None else [str(name) for name in names]
            if len(keys) != len(columns) or len(set(keys)) != len(columns):
                raise ValueError(
                    f"`{call}(names=...)` must be {len(columns)} different names, one per column "
                    f"of `labels`, but is: {keys}."
                )
        found = {
            key: Label(call, column, f" in `{key}`" if several else "")
            for key, column in zip(keys, columns, strict=True)
        }
        terms = {key: make_term(label) for key, label in found.items()}
        super().__init__(model, optimizer, terms if several else terms[ONLY], process_group)
        self._labels, self._table, self._several = found, table.numpy(), several
        self.activation = activation
        if several:  # calls, and those in which each label had pairs
            visits = torch.zeros(1 + len(keys), dtype=torch.int64, device=self._device)
            self.register_buffer("visits", visits)

    @abc.abstractmethod
    def values(
        self, term: Any, scores: Tensor, positives: int, block: Tensor, proposals: Proposals
    ) -> Tensor:
        """The inner values of a batch: one row for each positive, or one in all.

        Args:
            term: the term of the label.
            scores: of the positives, then of the negatives.
            positives: P, how many are positives.
            block: number of each positive, (P,).
            proposals: takes what writes the state behind thresholds, if the call succeeds.
        """

    @property
    def label(self) -> Label:
        """The only label."""
        (label,) = self._labels.values()
        return label

    def forward(  # type: ignore[override]
        self, function: Callable[[], Any], labels: Any, index: Any = None
    ) -> Tensor:
        """The loss of one batch.

        Args:
            function: runs the model and returns the scores, (B,), or (B, T) for T labels; or a pair
                (loss, scores) with an ordinary loss, a scalar or per-sample losses.
            labels: 0 or 1 for each sample, of the shape of the scores; NaN where unknown. Best on
                the CPU, as the loader gives them: they are looked at there.
            index: number of each sample in the training set, (B,); None if the batch is the
                training set in order, or in `eval()` mode, where samples may be others.
        """
        if index is None and not self.training:
            return self._evaluated(function, labels)
        y, ids = self._read_batch(labels, index)
        shape = y.shape
        (y, ids), ranks = self._gathered(y, ids)
        rows = self._rows(y, ids)

        def values(scores: Tensor, proposals: Proposals) -> dict[str, Tensor]:
            return self._values_by_label(scores, rows, proposals)

        only = torch.zeros(1, dtype=torch.int64)
        blocks = {key: row.block if self.per_positive else only for key, row in rows.items()}
        return self._loss_of_scores(function, shape, ranks, blocks, values)

    def _values_by_label(
        self, scores: Tensor, rows: Mapping[str, _Rows], proposals: Proposals
    ) -> dict[str, Tensor]:
        scores = scores if self.activation is None else scores.sigmoid()
        found = {}
        for key, (t, order, positives, block) in rows.items():
            column = scores[:, t] if self._several else scores
            ordered = column.index_select(0, order)  # one gather, and one scatter backward
            found[key] = self.values(self._terms[key], ordered, positives, block, proposals)
        return found

    def _evaluated(self, function: Callable[[], Any], labels: Any) -> Tensor:
        """The loss of any samples on their own, of a validation set for example."""
        name = type(self).__name__
        y = as_labels(f"`{name}`: `labels`", labels).numpy()
        shape = self._checked_shape(y)
        (y,), ranks = self._gathered(y)
        rows = self._rows(y, None)
        loss, scores = read_scores(name, function)
        scores = self._with_shape(scores, shape)
        scores = scores if ranks is None else gather_scores(scores, *ranks)
        parts = []
        for key, values in self._values_by_label(scores, rows, []).items():
            tracker = self._terms[key].tracker
            # Every value is a block of its own, also if there are more than in training.
            ones = values.new_ones(len(values))
            blocks = Blocks(len(values), torch.arange(len(values)), None, ones, whole=True)
            entries = tracker.entries(blocks, values).fresh
            tracked = Tracked(
                entries.detach(), blocks.index.to(entries.device), entries, blocks, ones,
                log=tracker.log_space,
            )  # fmt: skip
            parts.append(self._terms[key].loss(tracked))
        total = torch.stack(parts).mean() if parts else scores.sum() * 0
        total = total if loss is None else total + mean_loss(loss, ranks and ranks[0])
        if total.requires_grad:
            total.register_hook(self._state.differentiated)
        return total

    def _combined(
        self, loss: Tensor | None, tracked: dict[str, Tracked], group: Any, updating: bool
    ) -> Tensor:
        """The ordinary loss, and the mean over labels."""
        if not self._several:
            return super()._combined(loss, tracked, group, updating)
        names = list(self._terms)
        here = [n for n, name in enumerate(names) if name in tracked]
        losses = torch.stack([self._terms[names[n]].loss(tracked[names[n]]) for n in here])
        total = losses.mean()
        if updating:
            # Weight k / m for a label with pairs in m of k calls: with probability p of that in a
            # call, its expectation is kp E[1 / (1 + Bin(k-1, p))] = 1 - (1-p)^k. The mean over the
            # labels of each batch would be a ratio, in which labels that come alone weigh more.
            self.visits += self.visits.new_tensor([True, *(name in tracked for name in names)])
            counts = self.visits.to(losses)
            share = counts[0] / (counts[1:] * len(names))
            total = losses.dot(share if len(here) == len(names) else share[here])
        return total if loss is None else loss + total

    def value(self) -> Tensor:
        """The risk itself at the tracked values, over the positives seen; a mean over labels."""
        return super().value() / len(self._labels)

    def _checked_shape(self, y: NDArray[Any]) -> tuple[int, ...]:
        """The shape of labels, which must have the columns of those of the training set."""
        known = self._table.shape
        if y.ndim != len(known) or y.shape[1:] != known[1:]:
            raise ValueError(
                f"`{type(self).__name__}`: `labels` of a batch have shape {y.shape} but those of "
                f"the training set {known}."
            )
        return y.shape

    def _read_batch(self, labels: Any, index: Any) -> tuple[NDArray[Any], Ints]:
        """Labels and sample numbers of a call, checked."""
        name, known = type(self).__name__, self._table
        y = on_host(labels)
        self._checked_shape(y)
        ids = self._read_index(index, len(known))
        if len(ids) != len(y):
            what = "`index`" if index is not None else "the training set, as no `index` is given,"
            raise ValueError(
                f"`{name}`: `labels` hold {len(y)} samples but {what} holds {len(ids)}; give the "
                "number of each sample in the training set."
            )
        there = known[ids]
        if (there == y).all():
            return there, ids
        y = as_labels(f"`{name}`: `labels`", y).numpy()  # it has the better words for a -1
        if self.training and not ((there == y) | (np.isnan(there) & np.isnan(y))).all():
            raise ValueError(
                f"`{name}`: labels of the batch differ from those of the training set at the same "
                "`index`. Is `index` the number of each sample in the whole training set?"
            )
        return y, ids

    def _rows(self, y: NDArray[Any], ids: Ints | None) -> dict[str, _Rows]:
        """The pairs of a batch by label; labels without pairs are left out.

        Without sample numbers the positives of the batch are counted through.
        """
        rows, device = {}, self._device
        for t, (key, label) in enumerate(self._labels.items()):
            column = y[:, t] if self._several else y
            positive, negative = np.flatnonzero(column == 1), np.flatnonzero(column == 0)
            if positive.size and negative.size:
                order = torch.from_numpy(np.concatenate([positive, negative]))
                own = np.arange(positive.size) if ids is None else label.block[ids[positive]]
                block = torch.from_numpy(own)
                rows[key] = _Rows(t, order.to(device, non_blocking=True), positive.size, block)
        return rows


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


def read_scores(call: str, function: Any) -> tuple[Any, Tensor]:
    """What the user's function returns: the ordinary loss or None, and the scores."""
    if not callable(function):
        raise TypeError(
            f"`{call}` needs a function that runs the model and returns the scores but got: "
            f"{type(function).__name__}. Write `risk(lambda: model(x).squeeze(1), ...)`."
        )
    loss, scores = split(function())
    if not isinstance(scores, Tensor):
        raise TypeError(
            f"The function given to `{call}` must return scores, a tensor, or (loss, scores) but "
            f"returned: {type(scores).__name__}."
        )
    # Differences and quotients of scores in half precision would be wrong in the third digit.
    return loss, scores.to(torch.promote_types(scores.dtype, torch.float32))


def on_host(values: Any) -> NDArray[Any]:
    """A tensor or what NumPy takes, as an array."""
    if isinstance(values, Tensor):
        values = values.detach()
        return (values if values.device.type == "cpu" else values.cpu()).numpy()
    return np.asarray(values)
