"""open_clip: its `ClipLoss` against all pairs of the data set, from small batches.

The memory of the pairs is also that of `sentence_transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from .. import _checks
from .._distributed import find_group, gather_rows, row_counts
from .._state import KeepsPrecision, Uninterrupted
from ..index import check_range
from ..tracker import log_track
from ..tracker.blocks import segment

__all__ = ["GlobalClipLoss"]

_REMEDY = "Let the data set return (image, text, number) and pass `index=number`."
_EXCLUDED = -1e30  # its exponential is 0 and so is its slope; that of -inf may be NaN


class PairMemory(KeepsPrecision):
    r"""The loss of `GlobalContrastiveLoss` and `GlobalClipLoss`, and what is kept of each pair.

    `fcco.GlobalContrastive` needs the optimizer, which these frameworks make after the loss. Here
    each call is a step of its own. With s_ij the score of anchor i and document j, and N_i
    negatives at hand, in the batch and among pairs stored from earlier ones,

    .. math::
        \hat G_i = \frac{K}{N_i}\sum_{j} e^{s_{ij} - s_{ii}}, \qquad
        G_i \leftarrow (1-\gamma)\,G_i + \gamma\,\hat G_i, \qquad
        \text{loss}_i = \log(1 + G_i).

    Anchor i has the weights :math:`p_{ij} = \frac{K}{N_i} e^{s_{ij} - s_{ii}} / (1 + G_i)` of
    documents j in the gradient, and document j the weights :math:`p_{ij}` of anchors i, for which
    each stored pair keeps the logarithm of its :math:`e^{s_{ii}}(1 + G_i)`, its level.

    `value` holds log G_i, NaN before the first visit, with a second column for documents against
    anchors if `symmetric`. Hard negatives are further documents: those of pair i, which are always
    in the batch with it, count once.
    """

    may_be_nan = ("value",)
    value: Tensor
    features: Tensor
    numbers: Tensor
    levels: Tensor

    def __init__(
        self, call: str, num_pairs: int, gamma: float, symmetric: bool, stored_pairs: int,
        negatives: int | None = None, dtype: torch.dtype = torch.float32, device: Any = None,
    ) -> None:  # fmt: skip
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

    def forward(self, features: Sequence[Tensor], scale: Any, index: Tensor | None) -> Tensor:
        """The mean loss of a batch of anchors, their positives, then hard negatives, (b, d) each.

        Without `index`, the numbers of the pairs, the memory is left alone: the loss is that of
        this batch (of this rank), whose negatives stand for all. `scale` multiplies inner products.
        """
        first = features[0]
        if index is not None and len(index) != len(first):
            raise ValueError(
                f"There are {len(first)} pairs of features but the numbers of {len(index)} pairs."
            )
        with torch.autocast(first.device.type, enabled=False):
            dtype = torch.promote_types(first.dtype, torch.float32)
            columns = torch.stack([each.to(dtype) for each in features])
            scale = scale.to(columns).squeeze() if isinstance(scale, Tensor) else scale
            return self._loss(columns, scale, index)

    def _loss(self, columns: Tensor, scale: float | Tensor, index: Tensor | None) -> Tensor:
        """The loss of features in one table, (columns, b, d)."""
        own = torch.arange(columns.shape[1]) if index is None else index
        own = own.to(columns.device, non_blocking=True)
        group = None if index is None else find_group()
        counts = [len(own)] if group is None else row_counts(own, group)
        start = 0 if group is None else sum(counts[: group.rank])

        def of_all_ranks(rows: Tensor) -> Tensor:
            return rows if group is None else gather_rows(rows, group, counts)

        fixed, known = columns.detach(), scale.detach() if isinstance(scale, Tensor) else scale
        numbers, every = of_all_ranks(own.unsqueeze(1)).squeeze(1), fixed
        if group is not None:
            rows = of_all_ranks(fixed.transpose(0, 1).flatten(1))
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
        share = len(counts) / (len(numbers) * len(ways))
        matching = (columns[0] * columns[1]).sum(1)
        scores = [
            torch.cat([columns[row] @ pool[column].T for column in others], 1)
            for row, others in ways
        ]
        logits = [
            known * each.detach() + torch.cat([once if k > 1 else weight for k in others], 1)
            for each, (_, others) in zip(scores, ways, strict=True)
        ]
        own_logits = (known * matching.detach()).unsqueeze(1)
        fresh = torch.stack([each.logsumexp(1) for each in logits], 1) - own_logits
        sums = fresh
        if index is not None:
            new, sums = self._tracked(fresh, own)
            # A pair that the batch holds several times has the mean of its G, in any order.
            pairs, place, times = numbers.unique(return_inverse=True, return_counts=True)
            logs = segment(of_all_ranks(new), place, len(pairs), log=True)
            logs -= times.to(logs).log().unsqueeze(1)
            self.value.index_copy_(0, pairs, logs.to(self.value))
        # log(1 + G); beyond 60 the 1 has no digit left, beyond 20, the default, it has.
        logs = softplus(sums, threshold=60)
        levels = logs + own_logits
        pulls = torch.exp(fresh - logs)  # the sum of the weights p_ij of a row
        store = of_all_ranks(levels)
        store = torch.cat([store, self.levels.to(levels)]) if stored else store

        # A linear function of the scores, with the weights held constant, has the gradient above.
        loss = columns.new_zeros(())
        for way, (row, others) in enumerate(ways):
            weights = torch.exp(logits[way] - levels[:, way : way + 1])
            pulled = (pulls[:, way] * matching).sum()
            loss = loss + scale * ((weights * scores[way]).sum() - pulled)
            for column in others:
                pushed = columns[column] @ pool[row].T
                apart = once if column > 1 else weight
                weights = torch.exp(known * pushed.detach() - store[:, way] + apart)
                loss = loss + known * (weights * pushed).sum()
        loss = loss * share
        # Its value, which backward does not look at, is replaced by that of the loss.
        loss.detach().copy_(logs.sum() * share)
        if stored:  # the pairs of this batch in front; as many of the oldest are dropped
            size = self.stored_pairs
            with Uninterrupted():
                self.features = pool.to(self.features)[:, :size]
                self.numbers, self.levels = ids[:size], store.to(self.levels)[:size]
        return loss

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


def pair_numbers(index: Any, num_pairs: int, where: str, remedy: str) -> Tensor:
    """Check the numbers of the pairs of a batch, which the user calls `where`.

    A class in place of a number would make one pair of many, without any message.
    """
    if index is None:
        raise ValueError(f"{where} is missing, the numbers of these of {num_pairs} pairs. {remedy}")
    ids = torch.as_tensor(index)
    if ids.dim() != 1 or ids.dtype == torch.bool or ids.dtype.is_floating_point:
        raise ValueError(
            f"{where} must be a vector of integers, but has shape {tuple(ids.shape)} and dtype "
            f"{ids.dtype}. {remedy}"
        )
    distinct = ids.unique().tolist()  # sorted
    if distinct:
        check_range(where, distinct[0], distinct[-1], num_pairs)
    if len(ids) > 2 and len(distinct) <= len(ids) / 2:
        raise ValueError(
            f"{where} has only {len(distinct)} different numbers in a batch of {len(ids)}: these "
            f"are classes or groups, not the numbers of pairs. {remedy}"
        )
    return ids.long()


class GlobalClipLoss(nn.Module):
    r"""open_clip's `ClipLoss` with all pairs of the data set as negatives, from small batches.

    .. math::
        \frac1{2n}\sum_{i=1}^n \Bigl[\log\Bigl(1 + \sum_{j \ne i} e^{c (s_{ij} - s_{ii})}\Bigr) +
        \log\Bigl(1 + \sum_{j \ne i} e^{c (s_{ji} - s_{ii})}\Bigr)\Bigr], \qquad
        s_{ij} = \langle \text{image}_i, \text{text}_j\rangle

    A moving average over the visits of a pair follows each of its sums, from the negatives in the
    batch. The call is that of `ClipLoss` with the number of each pair besides. In `eval()` mode and
    without gradient the loss is that of the batch. On several ranks the negatives and the gradient
    are those of the whole batch, as with `ClipLoss(local_loss=True, gather_with_grad=True)`.

    Args:
        num_pairs: n, the number of pairs of the data set.
        gamma: weight of the new sums in the average; 1 has no memory.
        stored_pairs: how many of the last pairs keep their features, as further negatives.
        negatives: K < n - 1 negatives stand for all: both sums are multiplied by K / (n - 1), as
            in a batch of K + 1 pairs. None is n - 1.

    References:
        A. Radford et al., Learning transferable visual models from natural language supervision,
        2021 (CLIP). Z. Yuan et al., Provable stochastic optimization for global contrastive
        learning: small batch does not harm performance, 2022 (SogCLR).
    """

    def __init__(
        self, num_pairs: int, gamma: float = 0.8, stored_pairs: int = 0, negatives: Any = None
    ) -> None:
        super().__init__()
        self.memory = PairMemory("GlobalClipLoss", num_pairs, gamma, True, stored_pairs, negatives)

    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor,
        logit_bias: Tensor | None = None, output_dict: bool = False, *, index: Any = None,
    ) -> Tensor | dict[str, Tensor]:  # fmt: skip
        """The loss of a batch, of features of unit length.

        Args:
            image_features: (B, d).
            text_features: of the same pairs, (B, d).
            logit_scale: c, with gradient if it is learned.
            logit_bias: has no effect, as in `ClipLoss`: it is the same for all pairs.
            output_dict: return `{"contrastive_loss": loss}`.
            index: the number of each pair in the data set, from 0 to n - 1, (B,), best on the CPU
                (it is checked there). Not used in evaluation.
        """
        numbers = None
        if self.training and torch.is_grad_enabled():
            where = "`GlobalClipLoss(...)(index=...)`"
            numbers = pair_numbers(index, self.memory.num_pairs, where, _REMEDY)
        loss = self.memory((image_features, text_features), logit_scale, numbers)
        return {"contrastive_loss": loss} if output_dict else loss
