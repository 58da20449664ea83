"""The memory behind the contrastive losses of `sentence_transformers` and `open_clip`.

`fcco.GlobalContrastive` needs the optimizer, which these frameworks make after the loss, because it
pools the calls between two steps and may correct its estimates. Here each call is a step of its own
and updates a plain moving average, at the cost of a few operations more than the loss of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .. import _checks
from .._distributed import find_group, gather_rows, row_counts
from .._state import KeepsPrecision, Uninterrupted
from ..tracker import log_track
from ..tracker.blocks import segment

__all__ = ["PairMemory", "pair_numbers"]

_EXCLUDED = -1e30  # its exponential is 0 and so is its slope; that of -inf may be NaN


class PairMemory(KeepsPrecision):
    r"""The loss of each pair against the others of the data set, from small batches.

    With s_ij the score of anchor i and document j,

    .. math::
        \frac1n\sum_{i=1}^n \log(1 + G_i), \qquad
        G_i = \frac{K}{n-1}\sum_{j \ne i} e^{s_{ij} - s_{ii}},

    is the cross-entropy of pair i among K negatives, which stand for all n - 1. The negatives at
    hand, those N_i of the batch and of pairs stored from earlier batches, estimate G_i, and a
    moving average over the visits of pair i takes its place:

    .. math::
        \hat G_i = \frac{K}{N_i}\sum_{j} e^{s_{ij} - s_{ii}}, \qquad
        G_i \leftarrow (1-\gamma)\,G_i + \gamma\,\hat G_i.

    The gradient with respect to the features of the batch is that of the objective, with sums over
    the pairs at hand in place of sums over all: anchor i has the weights
    :math:`p_{ij} = \frac{K}{N_i} e^{s_{ij} - s_{ii}} / (1 + G_i)` of documents j, and document j
    has the weights :math:`p_{ij}` of anchors i, for which each stored pair keeps the logarithm of
    its :math:`e^{s_{ii}}(1 + G_i)`. Without stored pairs all is unbiased but for the average.

    Buffers: `value` holds log G_i, NaN before the first visit, with a second column for documents
    against anchors if `symmetric`; `features`, `numbers` and `levels` belong to the stored pairs.
    Hard negatives are further documents: those of other pairs count like their positives; those of
    pair i are always in the batch with it, and count once. The arguments are those of
    `GlobalContrastiveLoss`, and `call`, the class that the user built, for errors.
    """

    may_be_nan = ("value",)
    value: Tensor
    features: Tensor
    numbers: Tensor
    levels: Tensor

    def __init__(
        self,
        call: str,
        num_pairs: int,
        gamma: float,
        symmetric: bool,
        stored_pairs: int = 0,
        negatives: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        _checks.integer(call, "num_pairs", num_pairs, 2)
        _checks.in_interval(call, "gamma", gamma, 0.0, 1.0, open_low=True)
        _checks.integer(call, "stored_pairs", stored_pairs, 0)
        if negatives is not None:
            _checks.integer(call, "negatives", negatives, 1)
        self.num_pairs, self.gamma, self.symmetric = num_pairs, gamma, symmetric
        self.stored_pairs = stored_pairs
        self.negatives = min(negatives or num_pairs, num_pairs - 1)
        ways = 2 if symmetric else 1
        value = torch.full((num_pairs, ways), math.nan, dtype=dtype, device=device)
        self.register_buffer("value", value)
        # Columns and width are those of the first batch.
        self.register_buffer("features", value.new_zeros((0, stored_pairs, 0)))
        self.register_buffer("levels", value.new_zeros((stored_pairs, ways)))
        self.register_buffer("numbers", torch.full((stored_pairs,), -1, device=device))  # free

    def forward(
        self,
        features: Sequence[Tensor],
        scale: float | Tensor,
        index: Tensor | None = None,
    ) -> Tensor:
        """The mean loss of a batch.

        Args:
            features: of the anchors, of their positives, then of hard negatives, (b, d) each.
            scale: what inner products are multiplied by.
            index: the number of each pair, see `pair_numbers`. None leaves the memory alone: the
                loss is that of this batch (of this rank), whose negatives stand for all.
        """
        first = features[0]
        if index is not None and len(index) != len(first):
            raise ValueError(
                f"There are {len(first)} pairs of features but the numbers of {len(index)} pairs."
            )
        with torch.autocast(first.device.type, enabled=False):
            dtype = torch.promote_types(first.dtype, torch.float32)
            columns = torch.stack([each.to(dtype) for each in features])
            with torch.no_grad():
                number = scale.to(columns) if isinstance(scale, Tensor) else scale
                value, slopes, slope = self._value_and_gradient(columns, number, index)
            # A linear function of the features has the gradient that was computed. Its value,
            # which backward does not look at, is replaced by that of the loss.
            loss = torch.dot(columns.flatten(), slopes.flatten())
            if isinstance(scale, Tensor) and scale.requires_grad:
                loss = loss + scale.squeeze() * slope
            loss.detach().copy_(value)
            return loss

    def _value_and_gradient(
        self, columns: Tensor, scale: float | Tensor, index: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, its gradient by the features, (columns, b, d), and that by the scale."""
        own = torch.arange(columns.shape[1]) if index is None else index
        own = own.to(columns.device, non_blocking=True)
        group = None if index is None else find_group()
        every, numbers, start, ranks = columns, own, 0, 1
        if group is not None:
            counts, ranks = row_counts(own, group), group.size
            start = sum(counts[: group.rank])
            numbers = gather_rows(own.unsqueeze(1), group, counts).squeeze(1)
            rows = gather_rows(columns.transpose(0, 1).flatten(1), group, counts)
            every = rows.view(len(rows), len(columns), -1).transpose(0, 1)
        stored = self.stored_pairs > 0 and index is not None
        if stored and self.features.shape[::2] != every.shape[::2]:
            self.features = self.features.new_zeros((len(every), self.stored_pairs, every.shape[2]))
            self.numbers.fill_(-1)
            self.levels.zero_()
        pool = torch.cat([every, self.features.to(every)], 1) if stored else every
        ids = torch.cat([numbers, self.numbers]) if stored else numbers

        # The logarithm of K / N_i. A pair that the batch holds twice is no negative of itself; one
        # without any negative, the last of an epoch say, has the loss 0.
        kept = own.unsqueeze(1) != ids
        kept &= ids >= 0  # a place of the store that is still free
        number = kept.sum(1, keepdim=True).to(columns)
        weight = math.log(self.negatives) - number.log()
        weight = torch.where(kept, weight, _EXCLUDED)
        once = weight
        if len(columns) > 2:  # the own hard negative
            once = weight.clone()
            once.diagonal(start).zero_()

        # One way of comparing: an anchor with documents; and a document with anchors.
        ways = [(0, range(1, len(columns)))] + ([(1, range(1))] if self.symmetric else [])
        share = ranks / (len(numbers) * len(ways))
        matching = scale * (columns[0] * columns[1]).sum(1)
        logits = [
            torch.cat([
                scale * columns[row] @ pool[column].T + (once if column > 1 else weight)
                for column in others
            ], 1)
            for row, others in ways
        ]  # fmt: skip
        fresh = torch.stack([each.logsumexp(1) for each in logits], 1) - matching.unsqueeze(1)
        sums = fresh
        if index is not None:
            new, sums = self._tracked(fresh, own)
            rows = new if group is None else gather_rows(new, group, counts)
            # A pair that the batch holds several times has the mean of its G, in any order.
            pairs, place, times = numbers.unique(return_inverse=True, return_counts=True)
            logs = segment(rows, place, len(pairs), log=True) - times.log().unsqueeze(1)
            self.value.index_copy_(0, pairs, logs.to(self.value))
        # log(1 + G); beyond 60 the 1 has no digit left, beyond 20, the default, it has.
        logs = softplus(sums, threshold=60)
        levels = logs + matching.unsqueeze(1)
        pulls = torch.exp(fresh - logs)  # the sum of the weights p_ij of a row
        all_levels = levels if group is None else gather_rows(levels, group, counts)
        store = torch.cat([all_levels, self.levels.to(levels)]) if stored else all_levels

        slopes, slope = torch.zeros_like(columns), columns.new_zeros(())
        for way, (row, others) in enumerate(ways):
            weights = torch.exp(logits[way] - levels[:, way : way + 1])
            documents = pool[others[0] : others[-1] + 1].flatten(0, 1)
            pull = pulls[:, way : way + 1]
            partner = 1 - row
            mean = weights @ documents
            mean.addcmul_(pull, columns[partner], value=-1.0)
            slope = slope + (mean * columns[row]).sum()
            slopes[row] += mean
            slopes[partner].addcmul_(pull, columns[row], value=-1.0)
            for column in others:
                pushed = scale * columns[column] @ pool[row].T - store[:, way]
                pushed += once if column > 1 else weight
                slopes[column] += torch.exp(pushed) @ pool[row]
        if stored:  # the pairs of this batch in front; as many of the oldest are dropped
            size = self.stored_pairs
            with Uninterrupted():
                self.features = pool.to(self.features)[:, :size]
                self.numbers, self.levels = ids[:size], store.to(self.levels)[:size]
        return logs.sum() * share, slopes * (scale * share), slope * share

    def _tracked(self, fresh: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """The new log G_i of this rank's pairs, as it is kept, and as the loss takes it."""
        old = self.value[own]
        new = log_track(old, ~old.isnan(), fresh.to(old), None, self.gamma, 0.0)[1]
        # A pair that met no negative keeps its value: nothing was measured.
        kept = torch.where(fresh < _EXCLUDED / 2, old, new)
        return kept, torch.where(kept.isnan(), new, kept).to(fresh)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        saved, before = state_dict.get(f"{prefix}features"), self.features
        if saved is not None and saved.shape[1] == self.stored_pairs:
            self.features = before.new_zeros(saved.shape)  # the width is known by now
        try:
            super()._load_from_state_dict(state_dict, prefix, *others)
        except RuntimeError:
            self.features = before
            raise

    def extra_repr(self) -> str:
        return (
            f"{self.num_pairs}, gamma={self.gamma}, symmetric={self.symmetric}, "
            f"stored_pairs={self.stored_pairs}, negatives={self.negatives}"
        )


def pair_numbers(index: Any, num_pairs: int, where: str, remedy: str) -> Tensor:
    """Check the numbers of the pairs of a batch, which the user calls `where`.

    A wrong number would be an error in the middle of a GPU's work, and a class in its place would
    make one pair of many, without any message. A copy on the host costs less than a kernel.
    """
    if index is None:
        raise ValueError(
            f"{where} is missing, which tells which of the {num_pairs} pairs these are. {remedy}"
        )
    given = torch.as_tensor(index)
    numbers = given.detach().cpu()
    kind, rows = numbers.dtype, len(numbers)
    if numbers.dim() != 1 or kind == torch.bool or kind.is_floating_point or kind.is_complex:
        raise ValueError(
            f"{where} must be a vector of integers, the number of each pair, but has shape "
            f"{tuple(numbers.shape)} and dtype {kind}. {remedy}"
        )
    distinct = set(numbers.tolist())
    outside = [number for number in distinct if not 0 <= number < num_pairs]
    if outside:
        raise IndexError(
            f"{where} must lie in [0, {num_pairs - 1}] (num_pairs={num_pairs}) but contains: "
            f"{outside[0]}. {remedy}"
        )
    if rows > 2 and len(distinct) <= rows / 2:
        raise ValueError(
            f"{where} has only {len(distinct)} different numbers in a batch of {rows}: these are "
            f"classes or groups, not the numbers of pairs. {remedy}"
        )
    return given.long()
