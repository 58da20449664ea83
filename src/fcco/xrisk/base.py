"""The base of risks over pairs of a positive and another sample: reading a call, building rows."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
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
Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
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
        self.block = torch.where(positive, positive.cumsum(0) - 1, -1).numpy()


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
        self._ranks, self._labels, self._table = process_group, found, table.numpy()
        self._several, self._said_empty = several, False
        self.activation = activation

    @abc.abstractmethod
    def make_term(self, model: nn.Module, label: Label) -> AbstractTerm:
        """The term of one label."""

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
            labels: 0 or 1 for each sample, of the shape of the scores; NaN where unknown. Best on
                the CPU, as the loader gives them: they are looked at there.
            index: number of each sample in the training set, (B,); None if the batch is the
                training set in order.
            options: further arguments of `Compositional`, but those of an independent batch.
        """
        y, ids = self._read_batch(labels, index)
        size, group, sizes = len(y), find_group(self._ranks), None
        device = self._device
        if group is not None:
            y, ids, sizes = _over_ranks(y, ids, group, device)
        rows, blocks = self._rows(y, ids, device)
        proposals: Proposals = []

        def entries() -> Any:
            result = function()
            loss, scores = result if isinstance(result, tuple) else (None, result)
            scores = self._check_scores(scores, size)
            scores = scores if group is None else gather_scores(scores, group, sizes or [])
            values, learns = {}, self.learning
            if learns:
                proposals.clear()
            for key, (t, order, positives) in rows.items():
                column = scores[:, t] if self._several else scores
                ordered = column.index_select(0, order)  # one gather, and one scatter backward
                values[key] = self.values(
                    self._terms[key], ordered, positives, blocks[key], proposals if learns else []
                )
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

    @property
    def _device(self) -> torch.device:
        return next(iter(self._terms.values())).tracker.value.device

    def _read_batch(self, labels: Any, index: Any) -> tuple[Floats, Ints]:
        """Labels and sample numbers of a call, checked; in NumPy, on the host.

        A dozen looks at short vectors take a third of torch's time there, and positions of
        positives are needed on the host in any case.
        """
        name, known = type(self).__name__, self._table
        y, ids = _on_host(labels), np.arange(len(known)) if index is None else _on_host(index)
        if y.ndim != known.ndim or y.shape[1:] != known.shape[1:]:
            raise ValueError(
                f"`{name}`: `labels` of a batch have shape {y.shape} but those of the training set "
                f"{known.shape}."
            )
        if ids.shape != y.shape[:1] or (ids.size and ids.dtype.kind not in "iu"):
            what = "the whole training set, because no `index` is given," if index is None else (
                "`index`"
            )  # fmt: skip
            raise ValueError(
                f"`{name}`: `labels` hold {len(y)} samples but {what} has shape {ids.shape} and "
                f"dtype {ids.dtype}; give the number of each sample in the training set, integers "
                "of shape (B,)."
            )
        if ids.size == 0:
            return y, ids.astype(np.int64)
        if ids.min() < 0 or ids.max() >= len(known):
            raise IndexError(
                f"`{name}`: `index` must lie in [0, {len(known) - 1}], the samples of the training "
                f"set, but reaches from {ids.min()} to {ids.max()}."
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
        self, y: Floats, ids: Ints, device: torch.device
    ) -> tuple[dict[str, tuple[int, Tensor, int]], dict[str, Tensor]]:
        """By label: its column, positions of positives and then negatives, how many positives.

        And the blocks of the positives. Labels without pairs are left out.
        """
        rows, blocks = {}, {}
        for t, (key, label) in enumerate(self._labels.items()):
            column = y[:, t] if self._several else y
            positive, negative = np.flatnonzero(column == 1), np.flatnonzero(column == 0)
            if positive.size and negative.size:
                order = torch.from_numpy(np.concatenate([positive, negative]))
                rows[key] = t, order.to(device, non_blocking=True), positive.size
                blocks[key] = torch.from_numpy(label.block[ids[positive]])
        return rows, blocks


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


def _over_ranks(
    y: Floats, ids: Ints, group: Group, device: torch.device
) -> tuple[Floats, Ints, list[int]]:
    """Labels and sample numbers of all ranks, and how many each has."""
    columns = y[:, None] if y.ndim == 1 else y
    table = np.concatenate([ids[:, None], columns], axis=1, dtype=np.float64)
    rows = torch.from_numpy(table).to(device)
    sizes = row_counts(rows, group)
    table = gather_rows(rows, group, sizes).cpu().numpy()
    return table[:, 1:].reshape(-1, *y.shape[1:]), table[:, 0].astype(np.int64), sizes


def _on_host(values: Any) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach()
        return (values if values.device.type == "cpu" else values.cpu()).numpy()
    return np.asarray(values)
