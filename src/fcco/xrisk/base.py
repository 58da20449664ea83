"""The base of risks over pairs of a positive and another sample: reading a call, building rows."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from .._distributed import Group, find_group, gather_rows, row_counts
from .._watch import warn
from ..inputs import ONLY, mean_loss
from ..objective import Compositional
from ..terms import AbstractTerm
from .pairs import gather_scores

__all__ = ["BinaryRisk", "Label", "Proposals", "as_labels", "check_gamma"]

Scores = Callable[[], Any]
Proposals = list[Callable[[], None]]
"""What writes the state behind thresholds; called when the batch was not refused."""


class Label:
    """One of the labels: where its positives stand among the samples, and its term.

    Args:
        labels: 0, 1 or NaN for each training sample, (N,).
    """

    def __init__(self, call: str, labels: Tensor, place: str) -> None:
        positive = labels == 1
        self.positives, self.negatives = int(positive.sum()), int((labels == 0).sum())
        if self.positives == 0 or self.negatives == 0:
            raise ValueError(
                f"`{call}(labels=...)` must hold positives (1) and negatives (0) but has "
                f"{self.positives} and {self.negatives}{place}."
            )
        # The number of each positive among the positives; -1 for others.
        self.block = torch.where(positive, positive.cumsum(0) - 1, -1)


class BinaryRisk(Compositional):
    """Base of risks over pairs of a positive and another sample.

    Call it with a function that returns the scores of a batch, its labels, and the number of each
    sample in the training set; pairs are built inside. On several ranks they are those of the
    global batch: scores are gathered, and every rank computes the same values from them.

    A batch without positives, or without negatives, of a label says nothing about that label.
    """

    per_positive = True
    """Whether the blocks are the positives; otherwise one block for the whole class."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
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
        if several and names is not None and len(set(names)) != len(columns):
            raise ValueError(
                f"`{call}(names=...)` must be {len(columns)} different names, one per column of "
                f"`labels`, but is: {list(names)}."
            )
        keys = [ONLY]
        if several:
            keys = [str(n) for n in names] if names is not None else [
                f"label {t}" for t in range(len(columns))
            ]  # fmt: skip
        found = {
            key: Label(call, column, f" in `{key}`" if several else "")
            for key, column in zip(keys, columns, strict=True)
        }
        terms = {key: self.make_term(model, label) for key, label in found.items()}
        super().__init__(
            model,
            optimizer,
            terms if several else terms[ONLY],
            process_group=None,  # every rank holds the values of the global batch already
            shared_index=False,
        )
        self._ranks, self._labels, self._table = process_group, found, table
        self._several, self._said_empty = several, False
        self.activation = activation

    @abc.abstractmethod
    def make_term(self, model: nn.Module, label: Label) -> AbstractTerm:
        """The term of one label."""

    @abc.abstractmethod
    def values(
        self, term: Any, positives: Tensor, negatives: Tensor, block: Tensor, proposals: Proposals
    ) -> Tensor:
        """The inner values of a batch: one row for each positive, or one in all.

        Args:
            term: the term of the label.
            positives: scores of the positives, (P,).
            negatives: scores of the negatives, (M,).
            block: number of each positive, (P,).
            proposals: takes what writes the state behind thresholds, if the call succeeds.
        """

    @property
    def label(self) -> Label:
        """The only label."""
        (label,) = self._labels.values()
        return label

    @property
    def learning(self) -> bool:
        """Whether a call now is part of the training, at w_t."""
        return self.training and torch.is_grad_enabled()

    def forward(  # type: ignore[override]
        self, function: Scores, labels: Any, index: Any = None, **options: Any
    ) -> Tensor:
        """The loss of one batch.

        Args:
            function: runs the model and returns the scores, (B,), or (B, T) for T labels; or a pair
                (loss, scores) with an ordinary loss, a scalar or per-sample losses.
            labels: 0 or 1 for each sample, of the shape of the scores; NaN where unknown.
            index: number of each sample in the training set, (B,); None if the batch is the
                training set in order.
            options: further arguments of `Compositional`, but those of an independent batch.
        """
        y = as_labels(f"`{type(self).__name__}`: `labels`", labels)
        ids = torch.arange(len(self._table)) if index is None else torch.as_tensor(index)
        self._check_batch(y, ids, index is None)
        group, sizes = find_group(self._ranks), None
        if group is not None:
            device = next(iter(self._terms.values())).tracker.value.device
            y, ids, sizes = _over_ranks(y.to(device), ids.to(device), group)
        rows, blocks = self._rows(y, ids)
        proposals: Proposals = []

        def entries() -> Any:
            result = function()
            loss, scores = result if isinstance(result, tuple) else (None, result)
            scores = self._check_scores(scores, len(labels))
            scores = scores if group is None else gather_scores(scores, group, sizes or [])
            values, learns = {}, self.learning
            if learns:
                proposals.clear()
            for key, (positive, negative) in rows.items():
                column = scores[:, list(self._labels).index(key)] if self._several else scores
                values[key] = self.values(
                    self._terms[key], column[positive], column[negative], blocks[key],
                    proposals if learns else [],
                )  # fmt: skip
            if loss is not None:  # the sum of all is divided by the number of labels below
                loss = mean_loss(loss, group, check=learns) * len(self._labels)
            elif not values:  # nothing to learn from, but still a loss that can be differentiated
                loss = scores.sum() * 0
            if not self._several and values:
                values = values[ONLY]
            return values if loss is None else (loss, values)

        if not rows:
            self._say_empty()
            return entries()[0] / len(self._labels)
        places: Any = blocks
        if not self.per_positive:
            places = {key: torch.zeros(1, dtype=torch.int64) for key in rows}
        loss = super().forward(entries, places if self._several else places[ONLY], **options)
        for write in proposals:
            write()
        return loss / len(self._labels) if self._several else loss

    def value(self) -> Tensor:
        """The risk itself at the tracked values, over the positives seen; a mean over labels."""
        return super().value() / len(self._labels)

    def _say_empty(self) -> None:
        if not self._said_empty and self.training:
            self._said_empty = True
            warn(
                f"A batch of `{type(self).__name__}` has no positive or no negative sample, and so "
                "no pair to learn from. Positives are rare: draw a fixed number of them with "
                "`fcco.groups.PositiveBatchSampler`."
            )

    def _check_batch(self, y: Tensor, ids: Tensor, whole: bool) -> None:
        name = type(self).__name__
        known = self._table
        if y.dim() != known.dim() or (y.dim() == 2 and y.shape[1] != known.shape[1]):
            raise ValueError(
                f"`{name}`: `labels` of a batch have shape {tuple(y.shape)} but those of the "
                f"training set {tuple(known.shape)}."
            )
        if ids.shape != (len(y),) or ids.is_floating_point() or ids.dtype == torch.bool:
            what = "the whole training set, because no `index` is given" if whole else "`index`"
            raise ValueError(
                f"`{name}`: `labels` hold {len(y)} samples but {what} {tuple(ids.shape)}; give the "
                "number of each sample in the training set, integers of shape (B,)."
            )
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(known)):
            raise IndexError(
                f"`{name}`: `index` must lie in [0, {len(known) - 1}], the samples of the training "
                f"set, but reaches from {int(ids.min())} to {int(ids.max())}."
            )
        if not self.training:
            return
        there = known[ids.to(known.device)].to(y)
        if not bool(((there == y) | (there.isnan() & y.isnan())).all()):
            raise ValueError(
                f"`{name}`: labels of the batch differ from those of the training set at the same "
                "`index`. Is `index` the number of each sample in the whole training set?"
            )

    def _check_scores(self, scores: Any, size: int) -> Tensor:
        if not isinstance(scores, Tensor):
            raise TypeError(
                f"The function given to `{type(self).__name__}` must return scores, a tensor, or "
                f"(loss, scores) but returned: {type(scores).__name__}."
            )
        wanted = (size, self._table.shape[1]) if self._several else (size,)
        if not self._several and scores.shape == (size, 1):
            scores = scores.squeeze(1)
        if tuple(scores.shape) != wanted:
            raise ValueError(
                f"The function given to `{type(self).__name__}` must return one score per label, "
                f"shape {wanted}, but they have shape {tuple(scores.shape)}."
            )
        # Differences of scores in half precision would be wrong in the third digit.
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return scores if self.activation is None else scores.sigmoid()

    def _rows(
        self, y: Tensor, ids: Tensor
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
        """Positions of the positives and negatives of each label, and blocks of the positives."""
        rows, blocks = {}, {}
        for t, (key, label) in enumerate(self._labels.items()):
            column = y[:, t] if self._several else y
            positive = (column == 1).nonzero().squeeze(1)
            negative = (column == 0).nonzero().squeeze(1)
            if len(positive) and len(negative):
                rows[key] = positive, negative
                blocks[key] = label.block[ids[positive].to(label.block.device)]
        return rows, blocks


def check_gamma(call: str, gamma: Any, name: str = "gamma") -> None:
    """Refuse a weight of new values outside (0, 1], before a tracker speaks of it."""
    if gamma != "auto":
        _checks.in_interval(call, name, gamma, 0.0, 1.0, open_low=True)


def as_labels(place: str, labels: Any) -> Tensor:
    """Labels as floats, all of them 0, 1 or NaN."""
    table = torch.as_tensor(labels)
    table = table.to(torch.float32)
    if table.dim() not in (1, 2):
        raise ValueError(
            f"{place} must have shape (N,), or (N, T) for T labels, but has {tuple(table.shape)}."
        )
    wrong = ~((table == 0) | (table == 1))
    if bool(wrong.any()):
        wrong &= ~table.isnan()
        if bool(wrong.any()) or table.dim() == 1:
            value = table[wrong][0] if bool(wrong.any()) else math.nan
            raise ValueError(
                f"{place} must be 0 (negative) or 1 (positive)"
                f"{', or NaN (unknown)' if table.dim() == 2 else ''} but contain: {value:g}."
            )
    return table


def _over_ranks(y: Tensor, ids: Tensor, group: Group) -> tuple[Tensor, Tensor, list[int]]:
    """Labels and sample numbers of all ranks, and how many each has."""
    columns = y if y.dim() == 2 else y.unsqueeze(1)  # of a rank without samples, too
    rows = torch.cat([ids.double().unsqueeze(1), columns.double()], 1)
    sizes = row_counts(rows, group)
    rows = gather_rows(rows, group, sizes)
    return rows[:, 1:].to(y).reshape(-1, *y.shape[1:]), rows[:, 0].long(), sizes
