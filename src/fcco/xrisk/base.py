"""What all risks share: reading a call, the scores of all ranks, terms; and the warm start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from .. import _checks
from .._distributed import Group, find_group, gather_rows, row_counts
from .._watch import warn
from ..inputs import ONLY, mean_loss, split
from ..objective import Compositional
from ..outer import AbstractOuter
from ..terms import AbstractTerm, BlockParameters
from ..tracker import InnerTracker, NonFiniteValue, Tracked, for_model

Ints = NDArray[np.int64]
Ranks = tuple[Group, list[int]]
"""The ranks, and the number of samples on each."""
New = Sequence[tuple[BlockParameters, Tensor | None, Tensor]]
"""What a batch changes beside the tracked values: tables, numbers of rows, and the new rows."""
Values = tuple[Tensor, New]
"""The inner values of a batch, and what it changes."""

_CALLS, _SCORES = 25, 1000  # so many, all of them in [0, 1], are those of probabilities


class ScoreRisk(Compositional):
    """Base of risks: your function returns scores; what is tracked are inner values made from them.

    On several ranks scores are gathered, and every rank computes the values of the global batch.
    """

    _empty: ClassVar[str] = ""  # the warning about a batch without pairs, after "A batch of `...`"
    _seen: list[Any] | None = None  # of the scores of the first calls; None: not watched
    _said_empty = False

    def __init__(self, model: nn.Module, optimizer: Any, terms: Any, process_group: Any) -> None:
        # Scores are gathered: every rank holds the values of the global batch already.
        super().__init__(model, optimizer, terms, process_group=None)
        self._ranks = process_group

    @property
    def learning(self) -> bool:
        """Whether a call now is part of the training."""
        return self.training and torch.is_grad_enabled()

    def entries(self, function: Any, index: Any = None, rows: Any = None) -> Any:
        raise TypeError(f"`{type(self).__name__}` makes its inner values from scores, in calls.")

    def _read_index(self, index: Any, number: int) -> Ints:
        """The numbers of the samples of a call among all, checked; None means all in order."""
        # In NumPy: a dozen looks at short vectors take a third of torch's time there.
        ids = np.arange(number) if index is None else torch.as_tensor(index).cpu().numpy()
        wanted = (
            f"`{type(self).__name__}`: `index` must be the number of each sample in the training "
            f"set, integers of shape (B,) in [0, {number - 1}], but"
        )
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"{wanted} has shape {ids.shape} and dtype {ids.dtype}.")
        if ids.size and (ids.min() < 0 or ids.max() >= number):
            raise IndexError(f"{wanted} reaches from {ids.min()} to {ids.max()}.")
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
        self, function: Any, shape: tuple[int, ...], ranks: Ranks | None
    ) -> tuple[Any, Tensor]:
        """The ordinary loss or None, and the scores of all ranks; `shape` is that of this rank."""
        name = type(self).__name__
        loss, scores = read_scores(name, function)
        if scores.shape == (*shape, 1) and len(shape) == 1:
            scores = scores.squeeze(1)
        if scores.shape != shape:
            raise ValueError(
                f"The function given to `{name}` must return a score for each entry of `labels` or "
                f"`index`, shape {shape}, but they have shape {tuple(scores.shape)}."
            )
        if ranks is not None:
            scores = _of_all_ranks(scores, *ranks)
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

    def _tracked_loss(self, loss: Any, values: Any, index: Any, new: New) -> Tensor:
        """The loss of a batch from its inner values and their blocks, both by term."""
        found, blocks = (values[ONLY], index[ONLY]) if ONLY in values else (values, index)
        result = super().forward(lambda: found if loss is None else (loss, found), blocks)
        step = self.open_step
        if self.learning and step is not None:
            for table, numbers, rows in new:
                table.propose(step, numbers, rows)
        return result

    def _look_at(self, scores: Tensor) -> None:
        """Say once that the scores of the first calls are probabilities, not logits."""
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
                "probabilities, but logits are wanted: leave the sigmoid out."
            )


def read_scores(name: str, function: Any) -> tuple[Any, Tensor]:
    """What the user's function returns: the ordinary loss or None, and the scores."""
    if not callable(function):
        raise TypeError(
            f"`{name}` needs a function, not a {type(function).__name__}: write "
            "`risk(lambda: model(x).squeeze(1), ...)`."
        )
    result = function()
    loss, scores = split(result) if isinstance(result, tuple) else (None, result)
    if not isinstance(scores, Tensor):
        raise TypeError(
            f"The function given to `{name}` must return scores, or (loss, scores), but "
            f"returned: {type(scores).__name__}."
        )
    # Differences and quotients of scores in half precision would be wrong in the third digit.
    return loss, scores.to(torch.promote_types(scores.dtype, torch.float32))


def _of_all_ranks(scores: Tensor, group: Group, sizes: list[int]) -> Tensor:
    """The scores of all ranks, (B,) or (B, T); backward needs no communication."""
    rows = scores.detach() if scores.dim() > 1 else scores.detach().unsqueeze(1)
    parts = list(gather_rows(rows, group, sizes).reshape(-1, *scores.shape[1:]).split(sizes))
    # All ranks compute the same loss from the same scores, and each adds the gradient of its own
    # samples: the sum over ranks is wanted, and data-parallel training takes the mean.
    own = scores * group.size
    own.detach().copy_(scores)  # backward looks at the factor only
    parts[group.rank] = own
    return torch.cat(parts)


class RiskTerm(AbstractTerm):
    """The term (1/n) sum_i f(g_i(w)) of a label, times its share in the mean over labels."""

    branch_free = True
    share: Any = 1.0

    def __init__(self, outer: AbstractOuter, tracker: InnerTracker) -> None:
        super().__init__(tracker)
        self.outer = outer

    def loss(self, tracked: Tracked) -> Tensor:
        u, share = tracked.value, self.share / tracked.number
        values = self.outer(u)
        if tracked.present is not None:
            values = torch.where(tracked.present, values, 0)
        return tracked.as_loss(values.sum() * share, self.outer.gradient(u) * share)

    def value(self) -> Tensor:
        return self.outer(self.table()).mean()


def average(model: nn.Module, *size: int, **options: Any) -> InnerTracker:
    """The tracker of a risk: running averages, read after their update."""
    return for_model(model, *size, correction=0.0, read="new", **options)


def table_for(tracker: InnerTracker, number: int) -> BlockParameters:
    """A table of thresholds in the precision of a tracker."""
    return BlockParameters(number, dtype=tracker.value.dtype, device=tracker.value.device)


def warm_start(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Any], epochs: int = 1
) -> list[float]:
    """Train with binary cross-entropy for some epochs; returns the mean loss of each.

    The model returns logits, (B,), (B, 1) or (B, T); the loader yields ordinary shuffled batches
    that begin with inputs and labels, `(x, y, ...)`, of which those that are NaN are left out.
    """
    _checks.integer("warm_start", "epochs", epochs, 1)
    device = next(model.parameters()).device
    was_training, means = model.training, []
    model.train()
    for epoch in range(epochs):
        losses = []
        for x, y, *_ in loader:
            y = y.to(device)
            known = ~y.isnan()
            if not bool(known.any()):
                continue
            scores = model(x.to(device)).reshape(y.shape)[known]
            loss = binary_cross_entropy_with_logits(scores, y[known].to(scores))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        if not losses:
            raise ValueError(
                f"`warm_start(loader=...)` gave no batch in epoch {epoch + 1}: is it used up?"
            )
        means.append(sum(losses) / len(losses))
    optimizer.zero_grad()
    model.train(was_training)
    return means
